"""Checks of this machine, each failure with its remedy. Light: what is heavy is tried in processes of its own."""

import importlib.metadata
import importlib.util
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from vla_rlaif.doctor_machine import Finding, cpu, disk, gpu, memory, open_files, shared_memory
from vla_rlaif.doctor_probes import devices, nccl, ray, rendering, run_env, suite
from vla_rlaif.manifest import differences, read_manifest, surroundings

# Modules of each extra, in the order in which they are named when missing.
EXTRAS = {
    "jax": ("jax", "flax", "optax"),
    "torch": ("torch",),
    "lerobot": ("lerobot", "transformers", "peft"),
    "ray": ("ray",),
    "serve": ("msgpack", "prometheus_client", "websockets"),
    "suites": ("metaworld", "gym_pusht"),
    "warp": ("mujoco_warp",),
    "inspect": ("pyarrow", "rerun"),
    "docs": ("mkdocs",),
    "encoders": ("efficientnet_lite_pytorch",),
}
DISTRIBUTIONS = {"rerun": "rerun-sdk"}  # of modules that are called otherwise
TOOLS = ("wandb", "trackio")  # that a user brings; no extra does
NEEDED = ("jax", "torch")  # for `make align`
RENDERERS = ("egl", "osmesa", "ray")
SUITES = ("tabletop", "metaworld", "pusht")


@dataclass(frozen=True, kw_only=True)
class Options:
    """What is checked."""

    renderer: str = "egl"  # which one must work
    full: bool = False  # start what takes a while: every renderer, GPUs, NCCL, Ray, an env of each suite
    config: Path | None = None  # a run whose env must work here
    manifest: Path | None = None  # of another run: what differs here
    as_json: bool = False


@dataclass(frozen=True, kw_only=True)
class Check:
    """One line. A check that is not needed never fails the whole."""

    name: str
    run: Callable[[], Finding]
    is_needed: bool = False


def check(options: Options) -> bool:
    """Print one line a check, or all as JSON; True if nothing that is needed fails."""
    results = []
    for one in checks(options):
        finding = one.run()
        results.append({"name": one.name, "needed": one.is_needed, **asdict(finding)})
        if not options.as_json:
            print(line(one, finding), flush=True)
    fine = not any(r["needed"] and r["passed"] is False for r in results)
    if options.as_json:
        print(json.dumps({"passed": fine, "checks": results}, indent=1))
    return fine


def line(one: Check, finding: Finding) -> str:
    mark = "ok  " if finding.passed else "FAIL" if one.is_needed and finding.passed is False else "-   "
    what_to_do = f": {finding.remedy}" if finding.remedy and not finding.passed else ""
    return f"{mark} {one.name}: {finding.found}{what_to_do}"


def checks(options: Options) -> list[Check]:
    """In the order in which one thing rests on the other."""
    found = [
        Check(name="python", run=_python, is_needed=True),
        Check(name="versions", run=_versions),
        *[Check(name=f"extra {n}", run=lambda n=n: _extra(n), is_needed=n in NEEDED) for n in EXTRAS],
        *[Check(name=f"tool {n}", run=lambda n=n: _tool(n)) for n in TOOLS],
        Check(name=f"rendering {options.renderer}", run=lambda: rendering(options.renderer), is_needed=True),
        Check(name="gpu", run=gpu),
        Check(name="cpu", run=cpu),
        Check(name="memory", run=memory, is_needed=True),
        Check(name="shared memory", run=shared_memory),
        Check(name="open files", run=open_files),
        Check(name="disk", run=lambda: disk(Path.cwd()), is_needed=True),
    ]
    if options.full:
        others = [name for name in RENDERERS if name != options.renderer]
        found += [Check(name=f"rendering {n}", run=lambda n=n: rendering(n)) for n in others]
        found += [Check(name=f"devices {n}", run=lambda n=n: devices(n)) for n in ("jax", "torch")]
        found += [Check(name="nccl", run=nccl), Check(name="ray", run=ray)]
        found += [Check(name=f"suite {n}", run=lambda n=n: suite(n, options.renderer)) for n in SUITES]
    if (run := options.config) is not None:
        found.append(Check(name=f"env of {run}", run=lambda: run_env(run), is_needed=True))
    if (other := options.manifest) is not None:
        found.append(Check(name=f"as {other}", run=lambda: _same_as(other)))
    return found


def remedy(package: str) -> str | None:
    """How to install a package that was missing, if one of the extras brings it."""
    extras = [name for name, packages in EXTRAS.items() if package in packages]
    if package in TOOLS:
        return f"pip install {package}"
    return f"pip install -c constraints.txt -e '.[{extras[0]}]'" if extras else None


def require(extra: str, what: str) -> None:
    """Raises ValueError, before anything is done, if the packages of an extra that ``what`` needs are not there."""
    finding = _extra(extra)
    if not finding.passed:
        raise ValueError(f"{what} needs the extra {extra}: {finding.found}: {finding.remedy}")


def require_package(package: str, what: str) -> None:
    """The same for a package that no extra brings."""
    if importlib.util.find_spec(package) is None:
        raise ValueError(f"{what} needs the package {package}, which is not installed: {remedy(package)}")


def _python() -> Finding:
    is_new = sys.version_info >= (3, 12)
    return Finding(passed=is_new, found=sys.version.split()[0], remedy="3.12 or newer is needed")


def _extra(name: str) -> Finding:
    missing = [package for package in EXTRAS[name] if importlib.util.find_spec(package) is None]
    if missing:
        return Finding(
            passed=False, found=f"{', '.join(missing)} not installed", remedy=remedy(missing[0]) or "install them"
        )
    return Finding(passed=True, found=", ".join(f"{p} {_version(p)}" for p in EXTRAS[name]))


def _tool(name: str) -> Finding:
    if importlib.util.find_spec(name) is None:
        return Finding(passed=None, found="not installed", remedy=remedy(name) or "")
    return Finding(passed=True, found=_version(name))


def _version(module: str) -> str:
    return importlib.metadata.version(DISTRIBUTIONS.get(module, module))


def _versions() -> Finding:
    """What is installed against what this package asks for, extras included."""
    wrong = mismatches(importlib.metadata.requires("vla_rlaif") or [])
    if wrong:
        text = "pip install -c constraints.txt with the same extras again"
        return Finding(passed=False, found="; ".join(wrong), remedy=text)
    return Finding(passed=True, found="installed packages are in the ranges that vla_rlaif asks for")


def mismatches(requirements: Sequence[str]) -> list[str]:
    """Installed packages outside of their range. What is not installed belongs to an extra that nobody asked for."""
    from packaging.requirements import Requirement

    found = []
    for text in requirements:
        wanted = Requirement(text)
        try:
            version = importlib.metadata.version(wanted.name)
        except importlib.metadata.PackageNotFoundError:
            continue
        if not wanted.specifier.contains(version, prereleases=True):
            found.append(f"{wanted.name} {version}, wanted {wanted.specifier}")
    return sorted(set(found))


def _same_as(path: Path) -> Finding:
    found = differences(read_manifest(path), surroundings())
    if not found:
        return Finding(passed=True, found="the same versions, code, machine and environment variables")
    text = "numbers may differ; install its versions (packages in the manifest) and check out its commit"
    return Finding(passed=False, found="; ".join(found), remedy=text)
