"""A small worker, and work for it that other processes find by name."""

import os
import threading
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from vla_rlaif.cluster_config import RayClusterConfig
from vla_rlaif.dist.answers import answers
from vla_rlaif.dist.cluster import Place, StoredValue, WorkerContext


class Counter:
    def __init__(self, context: WorkerContext, start: int) -> None:
        self.context, self.value = context, start
        self.order: list[int] = []
        self.released = threading.Event()

    def add(self, num: int) -> int:
        self.value += num
        self.order.append(num)
        return self.value

    def history(self) -> list[int]:
        return self.order

    def place(self) -> Place:
        return self.context.place

    def incarnation(self) -> int:
        return self.context.incarnation

    def add_rows(self, rows: np.ndarray) -> np.ndarray:
        """The worker's index is added to each."""
        return rows + self.context.index

    def total(self, rows: np.ndarray) -> float:
        return float(rows.sum())

    def fail(self) -> None:
        raise KeyError("the worker's own words")

    def wait(self) -> str:
        """Until released, or for a minute."""
        return "released" if self.released.wait(60) else "not released"

    def release(self) -> None:
        self.released.set()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def variable(self, name: str) -> str | None:
        return os.environ.get(name)

    def put(self, rows: np.ndarray) -> StoredValue:
        return self.context.store.put(rows)

    def take(self, stored: StoredValue) -> float:
        return float(stored.take(10.0).sum())

    def through_workers_of_its_own(self, config: RayClusterConfig, lent: Sequence[Any], num: int) -> list[int]:
        """``num`` is added by each worker on the places that were lent."""
        from vla_rlaif.dist.ray_cluster import RayCluster

        cluster = RayCluster(config, lent=lent)
        try:
            group = cluster.start("env", make_counter, len(lent))
            return answers(group.all(partial(Counter.add, num=num)), 60.0, "adding")
        finally:
            cluster.close()


def make_counter(context: WorkerContext, start: int = 0) -> Counter:
    return Counter(context, start)


def make_nothing(context: WorkerContext) -> Counter:
    raise ValueError(f"no {context.role} can be made of this; give another config.")


def make_broken(context: WorkerContext) -> Counter:
    raise KeyError(f"{context.name} is broken")
