"""Time of several sides that take turns, against the matrix multiplications that the same device does in the same run.

Best and median of the repetitions: on a shared machine the best is what the code costs, the ratio of two bests of one
run moves least. On a CPU the processor time is measured too, which does not count other people's load.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

SHORTEST = 0.05  # seconds that one measurement takes at least


@dataclass(frozen=True, kw_only=True)
class Side:
    """Something to time: ``run`` starts it and returns what to wait for."""

    name: str
    run: Callable[[], Any]
    flops: float
    rows: int = 1
    xla_flops: float | None = None  # of XLA's cost analysis, to check ``flops``


@dataclass(frozen=True, kw_only=True)
class Time:
    """Seconds of one call."""

    best: float
    median: float
    cpu: float  # of all cores, the best; only meaningful where the CPU computes


def take_turns(
    sides: Sequence[Side], between: Sequence[Side], repetitions: int, *, between_s: float = SHORTEST
) -> dict[str, Time]:
    """Every side once in each repetition, all of ``between`` before each of them, for ``between_s`` seconds each."""
    calls = {side.name: _calls(side, SHORTEST) for side in sides}
    calls |= {side.name: _calls(side, between_s) for side in between}
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in calls}
    for _ in range(repetitions):
        for side in sides:
            for each in (*between, side):
                found[each.name].append(_timed(each, calls[each.name]))
    return {
        name: Time(
            best=min(wall for wall, _ in times),
            median=statistics.median(wall for wall, _ in times),
            cpu=min(cpu for _, cpu in times),
        )
        for name, times in found.items()
    }


def _calls(side: Side, shortest: float) -> int:
    """Compiles, then finds how many calls are long enough to time."""
    jax.block_until_ready(side.run())
    wall, _ = _timed(side, 1)
    return max(1, round(shortest / wall))


def _timed(side: Side, calls: int) -> tuple[float, float]:
    start, cpu = time.perf_counter(), time.process_time()
    for _ in range(calls - 1):
        side.run()
    jax.block_until_ready(side.run())
    return (time.perf_counter() - start) / calls, (time.process_time() - cpu) / calls


def matmuls(shapes: Sequence[tuple[int, int, int]], dtype: Any) -> list[Side]:
    """Matrix multiplications [m, k] @ [k, n]: the best of them is what the device can do."""
    sides = []
    multiply = jax.jit(jnp.matmul)
    for m, k, n in dict.fromkeys(shapes):
        a, b = jnp.ones((m, k), dtype), jnp.ones((k, n), dtype)
        run = lambda a=a, b=b: multiply(a, b)  # noqa: E731
        sides.append(Side(name=f"matmul {m} x {k} x {n}", run=run, flops=2 * m * k * n))
    return sides
