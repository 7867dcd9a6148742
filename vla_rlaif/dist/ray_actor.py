"""What runs in the process of one worker on Ray: the worker itself knows nothing of it, and this file imports no Ray.

Methods run in concurrency groups: `work` and `urgent` have one thread each, `pulse` answers pings beside them and keeps
one call open for ever, by whose end the driver notices a death at once.
"""

import os
import platform
import sys
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vla_rlaif.dist.cluster import ObjectStore, Place, WorkerContext
from vla_rlaif.dist.host import memory_id
from vla_rlaif.envs.egl_devices import egl_device

GROUPS = {"work": 1, "urgent": 1, "pulse": 2}  # threads
STREAMED = 1 << 19  # bytes from which on a sender's copies pass by the cache


@dataclass(frozen=True, kw_only=True)
class Failed:
    """The work raised."""

    kind: str
    reason: str
    trace: str


@dataclass(frozen=True, kw_only=True)
class Started:
    """A worker is built."""

    place: Place
    pid: int


@dataclass(frozen=True, kw_only=True)
class Assignment:
    """Who the worker is to be."""

    role: str
    index: int
    num: int
    incarnation: int
    node: str
    address: str
    folder: Path  # that relative paths of the config start from
    log: Path | None  # that its output goes to


class WorkerActor:
    """Holds one worker."""

    def __init__(self) -> None:
        self._worker: Any = None

    def build(self, make: Callable[[WorkerContext], Any], assignment: Assignment, store: ObjectStore) -> Any:
        """Started, or Failed."""
        return _guarded(lambda: self._build(make, assignment, store))

    def do(self, work: Callable[[Any], Any]) -> Any:
        """Its result, or Failed."""
        return _guarded(lambda: work(self._worker))

    def ping(self) -> None:
        """Shows that the process runs."""

    def live(self) -> None:
        """Never returns."""
        threading.Event().wait()

    def _build(self, make: Callable[[WorkerContext], Any], assignment: Assignment, store: ObjectStore) -> Started:
        if not assignment.folder.is_dir():
            raise ValueError(
                f"node {assignment.node} has no folder {assignment.folder}; all nodes of a run share its file system."
            )
        os.chdir(assignment.folder)
        if assignment.log is not None:
            _redirect(assignment.log)
        gpus = tuple(gpu for gpu in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if gpu)
        if gpus and (device := egl_device(gpus[0])) is not None:
            os.environ["MUJOCO_EGL_DEVICE_ID"] = str(device)
        place = Place(node=assignment.node, address=assignment.address, gpus=gpus, memory=memory_id())
        context = WorkerContext(
            role=assignment.role,
            index=assignment.index,
            num=assignment.num,
            incarnation=assignment.incarnation,
            place=place,
            store=store,
        )
        self._worker = make(context)
        return Started(place=place, pid=os.getpid())


def environment(*, threads: int, gpus: tuple[str, ...] | None, share: float, sends: bool) -> dict[str, str]:
    """Variables that libraries read when they are loaded, and Python. XLA's and JAX's own are those of the driver.
    With ``gpus`` None, Ray says which are seen. ``sends``: it packs weights for others."""
    found = {name: value for name, value in os.environ.items() if name.startswith(("XLA_", "JAX_"))}
    found |= dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), str(threads))
    found["NPROC"] = str(threads)  # XLA's threads on the CPU
    found["PYTHONPATH"] = os.pathsep.join(_own_folders())
    if sends:
        found["GLIBC_TUNABLES"] = _streaming(os.environ.get("GLIBC_TUNABLES", ""))
    if gpus is not None:
        found["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
    found["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"  # Ray, nvidia-smi and EGL count in this order
    if gpus == ():
        found["JAX_PLATFORMS"] = "cpu"
        return found
    found.pop("JAX_PLATFORMS", None)  # the driver's own node may have no GPU
    if share < 1:
        found["XLA_PYTHON_CLIENT_MEM_FRACTION"] = f"{0.9 * share:.3f}"  # the rest is CUDA's own, and the driver's
    return found


def _streaming(tunables: str) -> str:
    """With stores that do not fetch what they overwrite, for the pieces in which weights are packed: memory is passed
    twice and not three times. glibc of x86 reads it, others do not; a value of the user's stands."""
    name = "glibc.cpu.x86_non_temporal_threshold"
    return tunables if name in tunables else ":".join(filter(None, [tunables, f"{name}={STREAMED:#x}"]))


def _own_folders() -> list[str]:
    """What the driver can import that is no part of its Python: with it, code that a config names."""
    installed = tuple({sys.prefix, sys.base_prefix})
    return [path for path in map(os.path.abspath, sys.path) if not path.startswith(installed) and os.path.isdir(path)]


def _redirect(log: Path) -> None:
    log.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    print(f"-- process {os.getpid()} on {platform.node()}", flush=True)


def _guarded(run: Callable[[], Any]) -> Any:
    try:
        return run()
    except Exception as error:  # the worker survives it; the driver raises it as WorkerError
        trace = "".join(traceback.format_exception(error))
        return Failed(kind=type(error).__name__, reason=str(error), trace=trace)
