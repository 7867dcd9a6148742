"""Work for the tests of what deals out work: a worker that counts, and that can be held until the test lets go."""

import threading

GATES: dict[str, threading.Event] = {}  # by name; workers are threads of the test's process


class Counter:
    def __init__(self, name: str, incarnation: int) -> None:
        self.name, self.incarnation, self.num_done = name, incarnation, 0


def make(context) -> Counter:
    return Counter(context.name, context.incarnation)


def square(worker: Counter, value: int) -> int:
    worker.num_done += 1
    return value * value


def who(worker: Counter) -> tuple[str, int]:
    return worker.name, worker.incarnation


def meet(worker: Counter, barrier: threading.Barrier) -> str:
    barrier.wait(10)
    return worker.name


def hold(worker: Counter, gate: str, everyone: bool = False) -> str:
    """Waits at the gate; only the first worker in its first life does so, unless ``everyone``."""
    if everyone or (worker.name, worker.incarnation) == ("reward/0", 0):
        GATES[f"{gate} reached"].set()
        GATES[gate].wait(20)
    return worker.name


def fail(worker: Counter) -> None:
    raise ArithmeticError("the sum is wrong")
