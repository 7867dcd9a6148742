"""What `doctor` reads off this machine: GPUs, cores, memory, disk, limits. Sizes are GiB."""

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

MEMORY_GB, DISK_GB = 6, 2  # for `make align`
SHARED_GB = 1  # of Ray's object store and torch's worker processes
OPEN_FILES = 4096  # Ray opens several a worker
GROUP = Path("/sys/fs/cgroup")  # limits of the container


@dataclass(frozen=True, kw_only=True)
class Finding:
    passed: bool | None  # None: it does not apply here
    found: str
    remedy: str = ""


def gpu() -> Finding:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        text = "none (nvidia-smi is not there); everything runs on the CPU"
        return Finding(passed=None, found=text, remedy="for a GPU, install NVIDIA's driver")
    query = [tool, "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=30, check=False)
    except subprocess.TimeoutExpired:
        text = "reset the GPU, or restart the machine"
        return Finding(passed=False, found="nvidia-smi does not answer within 30 s", remedy=text)
    text = (done.stdout if done.returncode == 0 else done.stdout + done.stderr).strip().replace("\n", "; ")
    advice = "the driver does not fit the kernel, or the container has no GPU (docker run --gpus all)"
    return Finding(passed=done.returncode == 0 and bool(text), found=text or "nvidia-smi lists none", remedy=advice)


def cpu() -> Finding:
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    quota = _quota(GROUP / "cpu.max")
    allowed = cores if quota is None else min(cores, quota)
    text = f"{allowed:g} cores" + (f" (a limit of the container; {cores} are seen)" if allowed < cores else "")
    advice = "libraries start a thread for each core that they see: set OMP_NUM_THREADS to the limit"
    return Finding(passed=allowed == cores or "OMP_NUM_THREADS" in os.environ, found=text, remedy=advice)


def _quota(file: Path) -> float | None:
    """Cores that the control group allows."""
    if not file.exists():
        return None
    used, period = file.read_text().split()
    return None if used == "max" else int(used) / int(period)


def memory() -> Finding:
    available, why = available_memory()
    text = f"close other programs, or give the container more; `make align` needs {MEMORY_GB} GB"
    return Finding(passed=available >= MEMORY_GB, found=f"{available:.1f} GB available{why}", remedy=text)


def available_memory(group: Path = GROUP, table: Path = Path("/proc/meminfo")) -> tuple[float, str]:
    """GiB, and what limits them if it is the container."""
    if table.exists():  # with the page cache, which gives way; free pages alone would fail a busy machine
        lines = dict(line.split(":", 1) for line in table.read_text().splitlines())
        available = int(lines["MemAvailable"].split()[0]) / 2**20
    else:
        available = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    limit, used = group / "memory.max", group / "memory.current"
    if limit.exists() and (text := limit.read_text().strip()) != "max":
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        left = (int(text) - int(used.read_text()) + int(stat["inactive_file"])) / 2**30
        if left < available:
            return left, " (a limit of the container)"
    return available, ""


def shared_memory(folder: Path = Path("/dev/shm")) -> Finding:
    if not folder.exists():
        return Finding(passed=None, found=f"this system has no {folder}")
    size = shutil.disk_usage(folder).total / 2**30
    advice = (
        f"start the container with --shm-size={SHARED_GB}g or more; Ray falls back to the disk, torch's workers die"
    )
    return Finding(passed=size >= SHARED_GB, found=f"{size:.1f} GB", remedy=advice)


def open_files() -> Finding:
    if sys.platform == "win32":
        return Finding(passed=None, found="this system has no such limit")
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    passed = soft == resource.RLIM_INFINITY or soft >= OPEN_FILES
    advice = f"ulimit -n {OPEN_FILES} before a run on a cluster or with many env workers (the hard limit is {hard})"
    return Finding(passed=passed, found=f"at most {soft} a process", remedy=advice)


def disk(folder: Path) -> Finding:
    free = shutil.disk_usage(folder).free / 2**30
    advice = f"free some space, or run elsewhere; runs and caches want {DISK_GB} GB"
    return Finding(passed=free >= DISK_GB, found=f"{free:.1f} GB free at {folder}", remedy=advice)
