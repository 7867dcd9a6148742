"""One torch policy on several ranks: replicated (DDP) or sharded (FSDP2). The only module that knows torch.distributed.

Both act through hooks on ``Module.__call__``, so everything that is computed with parameters goes through a ``Scorer``.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np
import torch
import torch.distributed as dist
from jaxtyping import Float
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage] - public by torch's manual
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

Sharding = Literal["replicated", "fsdp"]


def num_ranks(devices: int | None) -> int:
    """How many processes share the work: a GPU each, or on a machine without, as many as were asked for.

    Raises:
        ValueError: there are fewer GPUs.
    """
    gpus = torch.cuda.device_count()
    if devices is None:
        return max(1, gpus)
    if gpus and devices > gpus:
        raise ValueError(f"devices is {devices}, but this machine has {gpus} GPUs; use fewer, or null for all.")
    return devices


def serve_store(host: str = "127.0.0.1") -> TCPStore:
    """Where ranks meet, on a free port of ``host``, this machine's address; as long as the object lives."""
    return TCPStore(host, 0, is_master=True, wait_for_workers=False)


def micro_rows(rows: int, micro_batches: int, ranks: int, name: str) -> int:
    """Rows of one rank's part of a micro-batch of ``name``, whose value is ``rows``.

    Raises:
        ValueError: they do not split evenly.
    """
    if rows % (micro_batches * ranks):
        raise ValueError(
            f"{name} {rows} does not split into {micro_batches} micro-batches on {ranks} devices; "
            f"use a multiple of {micro_batches * ranks}, or fewer devices."
        )
    return rows // (micro_batches * ranks)


@runtime_checkable
class Blocked(Protocol):
    """A policy whose parameters FSDP can gather block by block."""

    @property
    def blocks(self) -> Sequence[torch.nn.Module]:
        """Modules that are used through ``__call__`` only: nobody reads their parameters or calls their parts."""
        ...


class Scorer(torch.nn.Module):
    """Runs functions that read a module's parameters."""

    def __init__(self, module: torch.nn.Module):
        super().__init__()
        self.module = module

    def forward(self, function: Callable[..., Any], *args: Any) -> Any:
        return function(*args)


@dataclass(frozen=True, kw_only=True)
class Rank:
    """The place of one process among those that train together; the default is a process alone."""

    device: torch.device
    index: int = 0
    num_ranks: int = 1
    sharding: Sharding = "replicated"
    mesh: DeviceMesh | None = None

    @classmethod
    def alone(cls) -> "Rank":
        """On the current GPU, if there is one."""
        is_cuda = torch.cuda.is_available()
        return cls(device=torch.device("cuda", torch.cuda.current_device()) if is_cuda else torch.device("cpu"))

    @classmethod
    def join(
        cls,
        index: int,
        num_ranks: int,
        *,
        sharding: Sharding,
        port: int,
        timeout_s: float,
        meet_s: float,
        host: str = "127.0.0.1",
        gpu: int | None = None,
    ) -> "Rank":
        """Meet the others at the store on ``port`` of ``host``, who may come up to ``meet_s`` later: some build for
        longer. Every collective fails after ``timeout_s``. ``gpu`` is which of those that this process sees; None: it
        sees those of all ranks."""
        is_cuda = torch.cuda.is_available()
        device = torch.device("cuda", index if gpu is None else gpu) if is_cuda else torch.device("cpu")
        if is_cuda:
            torch.cuda.set_device(device)
        meet = timedelta(seconds=meet_s)
        store = TCPStore(host, port, timeout=meet)
        store.set(f"here/{index}", "")
        store.wait([f"here/{other}" for other in range(num_ranks)], meet)
        dist.init_process_group(
            "nccl" if is_cuda else "gloo",
            store=store,
            rank=index,
            world_size=num_ranks,
            timeout=timedelta(seconds=timeout_s),
            device_id=device if is_cuda else None,
        )
        mesh = init_device_mesh(device.type, (num_ranks,))
        return cls(device=device, index=index, num_ranks=num_ranks, sharding=sharding, mesh=mesh)

    def place(self, scorer: Scorer, blocks: Sequence[torch.nn.Module]) -> torch.nn.Module:
        """What to call in place of ``scorer`` where gradients are wanted. Sharding replaces the parameters of its
        module, so look at those afterwards."""
        if self.mesh is None:
            return scorer
        if self.sharding == "fsdp":
            for block in blocks:
                fully_shard(block, mesh=self.mesh, reshard_after_forward=True)
            # After a forward pass without a backward one (the reference's), the parameters must be in shards again:
            # their values are about to be changed.
            fully_shard(scorer, mesh=self.mesh, reshard_after_forward=True)
            return scorer
        # What a part of the loss does not touch (a noise head in the imitation loss) gets no gradient in some passes.
        return DistributedDataParallel(
            scorer, broadcast_buffers=False, find_unused_parameters=True, gradient_as_bucket_view=True
        )

    def accumulate(self, model: torch.nn.Module, *, is_last: bool) -> AbstractContextManager[Any]:
        """Around the forward and backward pass of a part of an update. Replicas add up their gradients after the last;
        shards after each, or every rank would hold whole gradients."""
        if isinstance(model, DistributedDataParallel) and not is_last:
            return model.no_sync()
        return contextlib.nullcontext()

    def gather(self, table: Float[torch.Tensor, "rows columns"]) -> Float[np.ndarray, "all_rows columns"]:
        """The rows of all ranks, in order."""
        if self.mesh is None:
            return table.cpu().numpy()
        every = table.new_empty((self.num_ranks * len(table), table.shape[1]))
        dist.all_gather_into_tensor(every, table.contiguous())
        return every.cpu().numpy()


def local(value: torch.Tensor) -> torch.Tensor:
    """The numbers of this rank, to read or to change in place."""
    value = value.detach()
    return value.to_local() if isinstance(value, DTensor) else value


def whole(value: torch.Tensor) -> torch.Tensor:
    """All numbers. Collective where the tensor is in shards."""
    value = value.detach()
    return value.full_tensor() if isinstance(value, DTensor) else value


def like(value: torch.Tensor, array: torch.Tensor) -> torch.Tensor:
    """A copy of ``array`` on the device of ``value`` and in its shards, if it has its shape."""
    copy = array.clone().to(value.device)
    if not isinstance(value, DTensor) or copy.shape != value.shape:
        return copy
    return distribute_tensor(copy, value.device_mesh, value.placements, src_data_rank=None)


@contextlib.contextmanager
def exchanged(a: Mapping[str, torch.Tensor], b: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """Inside, two sets of tensors have each other's values: in place, at the cost of one more tensor at a time."""
    _exchange(a, b)
    try:
        yield
    finally:
        _exchange(a, b)


def _exchange(a: Mapping[str, torch.Tensor], b: Mapping[str, torch.Tensor]) -> None:
    for name, value in a.items():
        ours, theirs = local(value), local(b[name])
        kept = ours.clone()
        ours.copy_(theirs)
        theirs.copy_(kept)
