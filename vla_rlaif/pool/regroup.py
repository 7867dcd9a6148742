"""Which training process should run on which replicas. Pure: what is observed in, orders out, nothing remembered.

A training run spans all active replicas of its role. When they change, a new process is started on the new ones and the
old one is halted: it finishes its step, checkpoints and ends, and the new one, which has loaded its libraries
meanwhile, goes on from there. A file lock of the run keeps them apart. Gradient accumulation keeps the global batch.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from vla_rlaif.pool.replica import Halt, Launch, Leave, Order, Status
from vla_rlaif.pool.state import COMING, Phase
from vla_rlaif.pool.work import Division

BACKOFF_S = (0.0, 5.0, 30.0, 120.0)  # before a process that failed is started again
STARTING = tuple(phase for phase in COMING if phase is not Phase.WARM)  # a warm one may wait for its window


@dataclass(frozen=True, kw_only=True)
class Spread:
    """How a run may be shared out over GPUs."""

    divide: Callable[[int], Division | None]  # over so many GPUs; None: not over so many
    across_nodes: bool  # one process uses GPUs of several nodes: only where GPUs are numbers


def regroup(statuses: Sequence[Status], spread: Spread, *, is_finished: bool) -> list[Order]:
    """Orders for the replicas of a training role. ``is_finished``: the run has done all its steps."""
    running = [(s.claim.replica, run) for s in statuses for run in s.report.runs if run.is_alive]
    used = {name for _, run in running for name in run.members}
    team = _team([s for s in statuses if s.phase is Phase.ACTIVE], used, spread)
    wanted = {s.claim.replica for s in team}
    shrinks = bool(used - wanted)
    is_there = any(set(run.members) == wanted for _, run in running)
    is_settled = shrinks or not any(s.phase in STARTING for s in statuses)
    orders: list[Order] = []
    if team and not is_there and not is_finished and is_settled and _may_start(team[0]):
        orders.append(_launch(team, spread))
        is_there = True
    orders += [
        Halt(replica=leader, serial=run.serial)
        for leader, run in running
        if set(run.members) != wanted and (shrinks or is_there)
    ]
    return orders


def leavers(statuses: Sequence[Status]) -> list[Leave]:
    """Replicas of a training role that drain, and that no process of the run uses any more."""
    used = {name for s in statuses for run in s.report.runs if run.is_alive for name in run.members}
    draining = [s.claim.replica for s in statuses if s.phase is Phase.DRAINING]
    return [Leave(replica=name) for name in draining if name not in used]


def _team(active: Sequence[Status], used: set[str], spread: Spread) -> list[Status]:
    """The replicas to train on, sorted by name: those that do already rather than others, as many as can be used."""
    team = sorted(active, key=lambda s: (s.claim.replica not in used, s.claim.replica))
    if not spread.across_nodes and team:
        nodes = Counter(gpu.node for s in team for gpu in s.claim.gpus)
        first = team[0].claim.gpus[0].node
        node = max(nodes, key=lambda name: (nodes[name], name == first))
        team = [s for s in team if s.claim.gpus[0].node == node]
    while team and spread.divide(_num_gpus(team)) is None:
        team.pop()
    return sorted(team, key=lambda s: s.claim.replica)


def _may_start(leader: Status) -> bool:
    """Not at once after a failure."""
    last = max(leader.report.runs, key=lambda run: run.serial, default=None)
    if last is None or last.is_alive or not last.num_failures:
        return True
    return last.ended_s >= BACKOFF_S[min(last.num_failures, len(BACKOFF_S) - 1)]


def _num_gpus(team: Sequence[Status]) -> int:
    return sum(len(s.claim.gpus) for s in team)


def _launch(team: Sequence[Status], spread: Spread) -> Launch:
    leader, division = team[0], spread.divide(_num_gpus(team))
    assert division is not None, "a team is one that the run can be divided over"
    on_node = [s for s in team if s.claim.gpus[0].node == leader.claim.gpus[0].node]
    return Launch(
        replica=leader.claim.replica,
        serial=1 + max((run.serial for run in leader.report.runs), default=0),
        members=tuple(s.claim.replica for s in team),
        devices=division.devices,
        visible=tuple(sorted(i for s in on_node for i in s.gpu_ids)),
        micro_batches=division.micro_batches,
    )
