"""Which training process should run on which replicas. Pure: what is observed in, orders out, nothing remembered.

A training run spans all active replicas of its role. When they change, a new process is started on the new ones and the
old one is halted: it finishes its step, checkpoints and ends, and the new one, which has loaded its libraries
meanwhile, goes on from there. A file lock of the run keeps them apart. Gradient accumulation keeps the global batch.
"""

from collections.abc import Sequence

from vla_rlaif.pool.config import Role
from vla_rlaif.pool.replica import Halt, Launch, Leave, Order, Status
from vla_rlaif.pool.state import COMING, Phase

BACKOFF_S = (0.0, 5.0, 30.0, 120.0)  # before a process that failed is started again
STARTING = tuple(phase for phase in COMING if phase is not Phase.WARM)  # a warm one may wait for its window


def regroup(statuses: Sequence[Status], role: Role, *, is_finished: bool) -> list[Order]:
    """Orders for the replicas of a training role. ``is_finished``: the run has done all its steps."""
    active = sorted((s for s in statuses if s.phase is Phase.ACTIVE), key=lambda s: s.claim.replica)
    wanted = tuple(s.claim.replica for s in active)
    running = [(s.claim.replica, run) for s in statuses for run in s.report.runs if run.is_alive]
    used = {name for _, run in running for name in run.members}
    shrinks = bool(used - set(wanted))
    is_there = any(run.members == wanted for _, run in running)
    orders: list[Order] = []
    is_settled = shrinks or not any(s.phase in STARTING for s in statuses)
    if wanted and not is_there and not is_finished and is_settled and _may_start(active[0]):
        orders.append(_launch(active, role))
        is_there = True
    orders += [
        Halt(replica=leader, serial=run.serial)
        for leader, run in running
        if run.members != wanted and (shrinks or is_there)
    ]
    return orders


def leavers(statuses: Sequence[Status]) -> list[Leave]:
    """Replicas of a training role that drain, and that no process of the run uses any more."""
    used = {name for s in statuses for run in s.report.runs if run.is_alive for name in run.members}
    draining = [s.claim.replica for s in statuses if s.phase is Phase.DRAINING]
    return [Leave(replica=name) for name in draining if name not in used]


def _may_start(leader: Status) -> bool:
    """Not at once after a failure."""
    last = max(leader.report.runs, key=lambda run: run.serial, default=None)
    if last is None or last.is_alive or not last.num_failures:
        return True
    return last.ended_s >= BACKOFF_S[min(last.num_failures, len(BACKOFF_S) - 1)]


def _launch(active: Sequence[Status], role: Role) -> Launch:
    leader, num_gpus = active[0], sum(len(s.claim.gpus) for s in active)
    on_node = [s for s in active if s.claim.gpus[0].node == leader.claim.gpus[0].node]
    return Launch(
        replica=leader.claim.replica,
        serial=1 + max((run.serial for run in leader.report.runs), default=0),
        members=tuple(s.claim.replica for s in active),
        devices=num_gpus,
        visible=tuple(sorted(i for s in on_node for i in s.gpu_ids)),
        micro_batches=None if role.global_batch is None else role.accumulation(num_gpus),
    )
