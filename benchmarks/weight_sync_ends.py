"""The workers of weight_sync.py: a learner that has arrays, actors that take them, and the bare operations to compare
with."""

import os
import signal
import time
from collections.abc import Mapping
from typing import Any

import numpy as np
import ray
import torch

from vla_rlaif.dist.cluster import WorkerContext
from vla_rlaif.dist.link import Links
from vla_rlaif.dist.process_groups import GroupSpec
from vla_rlaif.dist.sender import Sender
from vla_rlaif.dist.staging import Receiver
from vla_rlaif.dist.tickets import Check
from vla_rlaif.types import Weights

SIDE = 2048  # of the square matrices


def parameters(millions: float) -> dict[str, np.ndarray]:
    """Matrices of 4.2 million float32, a vector for each, and a rest."""
    total = round(millions * 1e6)
    num = total // (SIDE * SIDE + SIDE)
    shapes: dict[str, tuple[int, ...]] = {f"block_{i:03d}/kernel": (SIDE, SIDE) for i in range(num)}
    shapes |= {f"block_{i:03d}/bias": (SIDE,) for i in range(num)}
    shapes["head/kernel"] = (total - sum(int(np.prod(shape)) for shape in shapes.values()),)
    return {name: np.full(shape, i, np.float32) for i, (name, shape) in enumerate(shapes.items())}


class LearnerEnd:
    """Trains everything: the newest weights are arrays on the host."""

    def __init__(self, context: WorkerContext, millions: float) -> None:
        self.version, self.arrays = 0, parameters(millions)
        self.sender, self.links = Sender(self, store=context.store), Links()
        self.flat = np.zeros(0, np.uint8)

    def trained(self, *, averaged: bool) -> Weights:
        del averaged
        return self.arrays

    def weights(self, *, averaged: bool = False) -> Weights:
        return self.trained(averaged=averaged)


class ActorEnd:
    """Takes weights as a policy does that shares their memory, or as one that copies them."""

    def __init__(self, context: WorkerContext) -> None:
        del context
        self.receiver, self.links = Receiver(self.load), Links()
        self.weights: Mapping[str, np.ndarray] = {}
        self.copies: dict[str, np.ndarray] | None = None
        self.flat = np.zeros(0, np.uint8)

    def load(self, weights: Weights, version: int) -> None:
        del version
        if self.copies is None:
            self.weights = weights
            return
        for name, value in weights.items():
            np.copyto(self.copies[name], value)


def step(learner: LearnerEnd) -> None:
    learner.version += 1
    learner.arrays["head/kernel"] += 1


def adopt(actor: ActorEnd) -> tuple[float, int, float]:
    """Seconds in which it could not act, the version that acts, and a number of it."""
    begun = time.perf_counter()
    actor.receiver.adopt()
    took = time.perf_counter() - begun
    return took, actor.receiver.version, float((actor.copies or actor.weights)["head/kernel"][-1])


def copy_from_now_on(actor: ActorEnd) -> None:
    actor.copies = {name: np.array(value) for name, value in actor.weights.items()}


def make_room(worker: LearnerEnd | ActorEnd, *, num_bytes: int) -> None:
    worker.flat = np.ones(num_bytes, np.uint8)


def broadcast(worker: LearnerEnd | ActorEnd, *, spec: GroupSpec) -> None:
    """One end of the bare collective: no manifest, no checks. The group is kept."""
    link = worker.links.join(spec)
    if spec.rank == 0:
        link.send(worker.flat)
    else:
        link.receive(worker.flat, _ignore)


def _ignore(num_bytes: int) -> None:
    del num_bytes


def put(learner: LearnerEnd, *, as_torch: bool) -> list[Any]:
    """Inside a list, so that the answer is the reference and not the object."""
    return [ray.put(torch.from_numpy(learner.flat) if as_torch else learner.flat)]


def take(actor: ActorEnd, *, ref: list[Any]) -> None:
    """Get it, and copy it into memory of this process."""
    [value] = ray.get(ref)
    actor.flat[:] = value.numpy() if isinstance(value, torch.Tensor) else value


def die_after(actor: ActorEnd, *, blocks: int, note: str) -> None:
    """Kill -9 from inside, after so many blocks of the next payload; the time of death is written to a file."""
    del actor
    up_to = Check.up_to

    def watch(self: Check, memory: np.ndarray, num_bytes: int) -> None:
        up_to(self, memory, num_bytes)
        if len(self.found) >= blocks:
            with open(note, "w") as file:
                file.write(repr(time.time()))
            os.kill(os.getpid(), signal.SIGKILL)

    Check.up_to = watch


def peak_bytes(worker: object) -> int:
    """Highest resident memory of the process, what it maps of others included."""
    del worker
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith("VmHWM"))
