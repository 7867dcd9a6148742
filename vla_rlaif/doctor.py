"""Checks of this machine, each failure with its remedy."""

import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

EXTRAS = {
    "jax": ("jax", "flax", "optax"),
    "torch": ("torch",),
    "lerobot": ("lerobot", "transformers", "peft"),
    "ray": ("ray",),
    "serve": ("msgpack", "prometheus_client", "websockets"),
    "suites": ("metaworld",),
    "warp": ("mujoco_warp",),
}
NEEDED = ("jax", "torch")  # for `make align`
MEMORY_GB, DISK_GB = 6, 2
Result = tuple[bool, str]  # passed, and what was found or what to do


def check(renderer: str) -> bool:
    """Print one line a check; True if all that `make align` needs is there."""
    checks: list[tuple[str, Callable[[], Result]]] = [
        ("python", _python),
        *[(f"extra {name}", lambda name=name: _extra(name)) for name in EXTRAS],
        (f"rendering {renderer}", lambda: _rendering(renderer)),
        ("gpu", _gpu),
        ("memory", _memory),
        ("disk", lambda: _disk(Path.cwd())),
    ]
    required = {"python", f"rendering {renderer}", "memory", "disk", *(f"extra {name}" for name in NEEDED)}
    fine = True
    for name, run in checks:
        passed, text = run()
        fine &= passed or name not in required
        mark = "ok  " if passed else "FAIL" if name in required else "-   "
        print(f"{mark} {name}: {text}")
    return fine


def remedy(package: str) -> str | None:
    """How to install a package that was missing, if one of the extras brings it."""
    extras = [name for name, packages in EXTRAS.items() if package in packages]
    return f"pip install -c constraints.txt -e '.[{extras[0]}]'" if extras else None


def require(extra: str, what: str) -> None:
    """Raises ValueError, before anything is done, if the packages of an extra that ``what`` needs are not there."""
    passed, text = _extra(extra)
    if not passed:
        raise ValueError(f"{what} needs the extra {extra}: {text}")


def _python() -> Result:
    found = sys.version.split()[0]
    return sys.version_info >= (3, 12), f"{found}; 3.12 or newer is needed"


def _extra(name: str) -> Result:
    missing = [package for package in EXTRAS[name] if importlib.util.find_spec(package) is None]
    if missing:
        return False, f"{', '.join(missing)} not installed: {remedy(missing[0])}"
    return True, ", ".join(f"{p} {importlib.metadata.version(p)}" for p in EXTRAS[name])


def _rendering(renderer: str) -> Result:
    """In a process of its own: a broken driver may abort instead of raising."""
    code = f"from vla_rlaif.envs.tabletop.render import check; check({renderer!r})"
    try:
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    except subprocess.TimeoutExpired:
        return False, "no answer within 60 s; use env.renderer: ray, which needs no GL"
    lines = done.stderr.strip().splitlines()
    return done.returncode == 0, "works" if done.returncode == 0 else lines[-1] if lines else f"exit {done.returncode}"


def _gpu() -> Result:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return False, "none found (nvidia-smi is not there); everything runs on the CPU"
    query = [tool, "--query-gpu=name,memory.total", "--format=csv,noheader"]
    done = subprocess.run(query, capture_output=True, text=True, timeout=30, check=False)
    return done.returncode == 0, done.stdout.strip().replace("\n", "; ") or done.stderr.strip()


def _memory() -> Result:
    table = Path("/proc/meminfo")
    if table.exists():  # with the page cache, which gives way; free pages alone would fail a busy machine
        lines = dict(line.split(":", 1) for line in table.read_text().splitlines())
        available = int(lines["MemAvailable"].split()[0]) / 2**20
    else:
        available = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    return available >= MEMORY_GB, f"{available:.1f} GB available; `make align` needs {MEMORY_GB} GB"


def _disk(folder: Path) -> Result:
    free = shutil.disk_usage(folder).free / 2**30
    return free >= DISK_GB, f"{free:.1f} GB free at {folder}; runs and caches want {DISK_GB} GB"
