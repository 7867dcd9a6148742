"""What a run was made with, so that it can be repeated: versions, code, command, machine. `manifest.json` of a run.

vla-rlaif train runs/NAME/config.yaml --out ELSEWHERE --same-as runs/NAME/manifest.json
"""

import hashlib
import json
import os
import platform
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import yaml

from vla_rlaif.audit import privileged_terms
from vla_rlaif.config import RunConfig

FORMAT = 1
# Shown in reports; ``packages`` of a manifest has all that is installed.
SHOWN = ("vla_rlaif", "numpy", "mujoco", "jax", "flax", "optax", "torch", "lerobot", "ray")
# Environment variables that can change numbers, or where they are computed.
VARIABLES = (
    *("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "XLA_FLAGS", "JAX_PLATFORMS", "JAX_ENABLE_X64"),
    *("JAX_DEFAULT_MATMUL_PRECISION", "NVIDIA_TF32_OVERRIDE", "CUBLAS_WORKSPACE_CONFIG", "CUDA_VISIBLE_DEVICES"),
    *("MUJOCO_GL", "LIBGL_ALWAYS_SOFTWARE", "PYTHONHASHSEED"),
)


def manifest(config: RunConfig) -> dict[str, Any]:
    """What is written beside a run; JSON."""
    return {
        "format": FORMAT,
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "command": shlex.join(["vla-rlaif", *sys.argv[1:]]),
        "config_sha256": hashlib.sha256(config_text(config).encode()).hexdigest(),
        "seed": config.seed,
        "audited": config.audited,
        "privileged": privileged_terms(config.reward),
        **surroundings(),
    }


def surroundings() -> dict[str, Any]:
    """What runs in this process are made with."""
    packages = _packages()
    return {
        "versions": {name: packages[name] for name in SHOWN if name in packages},
        "python": platform.python_version(),
        "packages": packages,
        "git": _git(Path(__file__).resolve().parent),
        "machine": _machine(),
        "environment": {name: os.environ[name] for name in VARIABLES if name in os.environ},
    }


def config_text(config: RunConfig) -> str:
    """The YAML that a run keeps: all settings, the defaults too."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False)


def versions() -> dict[str, str]:
    installed = _packages()
    return {name: installed[name] for name in SHOWN if name in installed}


def read_manifest(path: Path) -> dict[str, Any]:
    """Raises ValueError if ``path`` is no manifest of a run."""
    path = path / "manifest.json" if path.is_dir() else path
    try:
        values = json.loads(path.read_text())
    except FileNotFoundError:
        raise ValueError(f"there is no manifest {path}; a run writes manifest.json when it starts.") from None
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}. Take another run's manifest.json.") from None
    if not isinstance(values, dict) or values.get("format") != FORMAT:
        raise ValueError(
            f"{path} is not a run's manifest of format {FORMAT}; it was made by another version, or by hand."
        )
    return values


def differences(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """What may make the numbers of two runs differ, one line a fact; the same config and seed are assumed."""
    found = []
    for section in ("packages", "environment", "machine"):
        old, new = then[section], now[section]
        for name in sorted(old.keys() | new.keys()):
            if old.get(name) != new.get(name):
                found.append(f"{name}: {_said(old.get(name))} then, {_said(new.get(name))} now")
    if then["python"] != now["python"]:
        found.append(f"python: {then['python']} then, {now['python']} now")
    for name, text in (("commit", "code"), ("diff_sha256", "uncommitted changes of the code")):
        if then["git"][name] != now["git"][name]:
            found.append(f"{text}: {_said(then['git'][name])} then, {_said(now['git'][name])} now")
    return found


def continued(path: Path, now: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The manifest of a run that goes on, with ``now`` as its newest life, and what differs from the life before. One
    that another version has written is replaced: it does not say enough to compare."""
    if not path.exists() or json.loads(path.read_text()).get("format") != FORMAT:
        return dict(now), []
    first = read_manifest(path)
    lives = first.get("resumed", [])
    before = lives[-1] if lives else first
    return {**first, "resumed": [*lives, now]}, differences(before, now)


def _said(value: Any) -> str:
    return "none" if value is None or value == [] else str(value)


def _packages() -> dict[str, str]:
    """Installed distributions, by name as it is imported or nearly so."""
    found = {d.metadata["Name"].replace("-", "_").lower(): d.version for d in metadata.distributions()}
    return dict(sorted(found.items()))


def _git(folder: Path) -> dict[str, Any]:
    """Of the checkout that the code runs from; all None if it was installed from a package."""

    def ask(*words: str) -> str | None:
        try:
            done = subprocess.run(["git", *words], cwd=folder, capture_output=True, check=False)
        except FileNotFoundError:
            return None
        return done.stdout.decode(errors="replace") if done.returncode == 0 else None

    commit, diff = ask("rev-parse", "HEAD"), ask("diff", "HEAD")
    untracked = ask("ls-files", "--others", "--exclude-standard", "--full-name", ":/")
    is_dirty = None if commit is None else bool(diff or untracked)
    return {
        "commit": None if commit is None else commit.strip(),
        "dirty": is_dirty,
        "diff_sha256": hashlib.sha256(diff.encode()).hexdigest() if diff else None,  # of tracked files
    }


def _machine() -> dict[str, Any]:
    return {
        "platform": platform.platform(),
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count(),
        "gpus": _gpus(),
    }


def _cpu() -> str:
    table = Path("/proc/cpuinfo")
    lines = table.read_text().splitlines() if table.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _gpus() -> list[str]:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    query = [tool, "--query-gpu=name,driver_version", "--format=csv,noheader"]
    done = subprocess.run(query, capture_output=True, text=True, timeout=30, check=False)
    return done.stdout.strip().splitlines() if done.returncode == 0 else []
