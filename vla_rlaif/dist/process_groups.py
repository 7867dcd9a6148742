"""A link made of a torch process group of its own: gloo between hosts, NCCL between GPUs. The only module here that
imports torch.distributed.

The default group is never touched, so DDP and FSDP may use it meanwhile. Rank 0, the sender, hosts the store where the
members meet, on a port that the system chooses. A group that has failed is not used again: the next one has another
generation. NCCL between several GPUs is unmeasured; benchmarks/nccl_broadcast.py is for the day there are some.
"""

import datetime
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from torch.distributed import PrefixStore, TCPStore  # pyright: ignore[reportPrivateImportUsage] - public by the manual
from torch.distributed import distributed_c10d as c10d

from vla_rlaif.dist.link import LinkError
from vla_rlaif.dist.manifest import Bytes

JOIN_S = 20.0  # seconds for all members to meet
WATCHDOG = datetime.timedelta(days=1)
IN_FLIGHT = 4  # buckets at once: one is being summed while the next are on the wire


@runtime_checkable
class Backend(Protocol):
    """What is used of torch's process groups."""

    def broadcast(self, tensors: list[torch.Tensor], opts: c10d.BroadcastOptions) -> c10d.Work: ...

    def abort(self) -> None: ...


@runtime_checkable
class HasMeeting(Protocol):
    meeting: object


@runtime_checkable
class Meets(Protocol):
    @property
    def sender(self) -> HasMeeting: ...


def has_torch(worker: object) -> None:
    """Work that is done as soon as the worker has imported this module."""
    del worker


def open_store(worker: Meets) -> int:
    """Work for the sender's worker: the port of its store, which is opened if it is not yet."""
    if not isinstance(worker.sender.meeting, TCPStore):
        worker.sender.meeting = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    return worker.sender.meeting.port


@dataclass(frozen=True, kw_only=True)
class GroupSpec:
    """One member of a process group."""

    generation: int
    address: str  # of the store
    port: int
    rank: int  # 0 is the sender
    size: int
    own_address: str  # of the network interface that this member is to use
    backend: Literal["gloo", "nccl"]
    bucket_bytes: int
    timeout_s: float  # for one bucket

    def join(self) -> "GroupLink":
        join = datetime.timedelta(seconds=JOIN_S)
        try:
            store = PrefixStore(f"sync/{self.generation}", TCPStore(self.address, self.port, timeout=join))
            if self.backend == "nccl":
                return GroupLink(_nccl(self, store), self, torch.device("cuda", torch.cuda.current_device()))
            return GroupLink(_gloo(self, store), self, None)
        except RuntimeError as error:  # torch's DistError is one
            raise LinkError(f"member {self.rank} of {self.size} could not join the process group: {error}") from error


def _gloo(spec: GroupSpec, store: PrefixStore) -> Backend:
    options = c10d.ProcessGroupGloo._Options()  # pyright: ignore[reportAttributeAccessIssue] - missing in the stub
    options._devices = [c10d.ProcessGroupGloo.create_device(hostname=spec.own_address)]
    options._timeout = datetime.timedelta(seconds=JOIN_S)
    options._threads = IN_FLIGHT
    group: Any = c10d.ProcessGroupGloo(store, spec.rank, spec.size, options)  # the stub lacks its methods
    return group


def _nccl(spec: GroupSpec, store: PrefixStore) -> Backend:
    options = c10d.ProcessGroupNCCL.Options()
    options._timeout = WATCHDOG  # torch's own watchdog would end the process; the deadlines here come first
    group: Any = c10d.ProcessGroupNCCL(store, spec.rank, spec.size, options)
    return group


class GroupLink:
    """One member. The bytes are broadcast from rank 0 in buckets; every one has a deadline. NCCL needs them on the GPU,
    so there each bucket goes through a buffer on it."""

    def __init__(self, group: Backend, spec: GroupSpec, device: torch.device | None) -> None:
        self._group, self._spec, self._device = group, spec, device

    def send(self, memory: Bytes) -> None:
        self.broadcast(torch.from_numpy(memory), lambda num_bytes: None)

    def receive(self, memory: Bytes, arrived: Callable[[int], None]) -> None:
        self.broadcast(torch.from_numpy(memory), arrived)

    def abort(self) -> None:
        self._group.abort()

    def broadcast(self, flat: torch.Tensor, arrived: Callable[[int], None]) -> None:
        """Bytes of the host, or of the backend's device. Raises LinkError."""
        size, under_way = self._spec.bucket_bytes, deque[tuple[int, _Bucket]]()
        try:
            for start in range(0, len(flat), size):
                under_way.append((min(start + size, len(flat)), self._begin(flat[start : start + size])))
                if len(under_way) == IN_FLIGHT:
                    self._end(*under_way.popleft(), arrived)
            while under_way:
                self._end(*under_way.popleft(), arrived)
        except RuntimeError as error:
            raise LinkError(
                f"member {self._spec.rank} of {self._spec.size} of generation {self._spec.generation}: {error}"
            ) from error

    def _begin(self, part: torch.Tensor) -> "_Bucket":
        options = c10d.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        options.timeout = datetime.timedelta(seconds=self._spec.timeout_s)
        options.asyncOp = True
        there = part if self._device is None else part.to(self._device)
        return _Bucket(part=part, there=there, work=self._group.broadcast([there], options))

    def _end(self, stop: int, bucket: "_Bucket", arrived: Callable[[int], None]) -> None:
        if self._device is None:
            bucket.work.wait(datetime.timedelta(seconds=self._spec.timeout_s))
        else:
            self._wait_for_gpu(bucket.work)
        if self._spec.rank and bucket.there is not bucket.part:
            bucket.part.copy_(bucket.there)
        arrived(stop)

    def _wait_for_gpu(self, work: c10d.Work) -> None:
        """``wait`` would only let the stream wait, for ever if a member has died."""
        end = time.monotonic() + self._spec.timeout_s
        while not work.is_completed():
            if time.monotonic() > end:
                raise RuntimeError(f"a bucket has not arrived within {self._spec.timeout_s:g} s")
            time.sleep(0.0002)
        work.wait()  # the stream that copies comes after the one of NCCL; raises what went wrong


@dataclass(frozen=True, kw_only=True)
class _Bucket:
    part: torch.Tensor  # of the payload
    there: torch.Tensor  # the same on the device that the backend needs
    work: c10d.Work
