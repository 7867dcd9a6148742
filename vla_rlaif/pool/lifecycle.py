"""The next step of every replica that is coming or leaving: verified before it is released, never longer than planned.

Newcomers: acquire, warm, sync to the committed weights, admit. Those that leave: stop admission and drain, checkpoint,
verify, release. Times are measured on the monotonic clock, so that a step of the wall clock kills nothing.
"""

from vla_rlaif.pool.actions import Admit, Checkpoint, Drain, Release, Sync, Violation, Warm
from vla_rlaif.pool.clock import MINUTE, Micros, format_duration
from vla_rlaif.pool.draft import Draft
from vla_rlaif.pool.history import Step
from vla_rlaif.pool.state import Gpu, Phase, Replica

MAX_SYNC_ATTEMPTS = 3
STARTING: dict[Phase, Step] = {Phase.ACQUIRING: "acquire", Phase.WARMING: "warmup"}


def bury(draft: Draft) -> None:
    """Clear what is left of replicas that lost a node, a GPU or a process."""
    if all(map(all, (node.healthy for node in draft.observed.nodes))) and not draft.has_lost:
        return
    healthy = {Gpu(node.name, slot) for node in draft.observed.nodes for slot, ok in enumerate(node.healthy) if ok}
    for replica in draft.observed.replicas:
        broken = [gpu for gpu in replica.gpus if gpu not in healthy]
        if replica.phase is Phase.LOST or (broken and replica.phase is not Phase.RELEASING):
            where = f"{broken[0].node} GPU {broken[0].slot} is dead" if broken else "a process of it died"
            draft.kill(replica, f"{replica.name} is lost: {where}")


def progress(draft: Draft) -> None:
    """One step for each replica that has no action yet."""
    for role in draft.config.ranked:
        for replica in (*draft.coming[role].values(), *draft.leaving[role].values()):
            if replica.name not in draft.handled:
                _step(draft, replica)
        for replica in draft.active[role].values():
            _watch_sync(draft, replica)


def drain(draft: Draft, replica: Replica, reason: str) -> None:
    """Begin to take a working replica out."""
    role = draft.config.roles[replica.role]
    budget = draft.leads.drain_budget(replica.role)
    carry = role.preemptible == "at_chunk"
    draft.add(Drain(replica=replica.name, within=budget, carry_unfinished=carry, reason=reason), replica)
    draft.forget(replica)
    draft.draining.update(gpu.node for gpu in replica.gpus)
    draft.wake_in(budget)


def _step(draft: Draft, replica: Replica) -> None:
    match replica.phase:
        case Phase.ACQUIRING | Phase.WARMING:
            step = STARTING[replica.phase]
            left = draft.leads.timeout(replica.role, step) - draft.age(replica)
            if left <= 0:
                draft.kill(replica, f"{replica.name}: {step} takes {format_duration(draft.age(replica))}")
            draft.wake_in(left)
        case Phase.ACQUIRED:
            draft.add(Warm(replica=replica.name, reason=f"{replica.role} grows"), replica)
        case Phase.WARM | Phase.SYNCED:
            _sync_or_admit(draft, replica)
        case Phase.SYNCING:
            left = draft.leads.timeout(replica.role, "sync") - draft.age(replica)
            if left <= 0:
                draft.abort_sync(replica, f"weight sync takes {format_duration(draft.age(replica))}")
            draft.wake_in(left)
        case Phase.DRAINING:
            _within(draft, replica, draft.leads.drain_budget(replica.role), "drain")
        case Phase.DRAINED:
            _after_drain(draft, replica)
        case Phase.CHECKPOINTING:
            _within(draft, replica, draft.leads.save_budget(replica.role), "checkpoint")
        case Phase.UNSAVED:
            _save_again(draft, replica)
        case Phase.SAVED:
            draft.add(Release(replica=replica.name, reason="its checkpoint is verified"), replica)
        case Phase.RELEASING:
            _watch_release(draft, replica)


def _sync_or_admit(draft: Draft, replica: Replica) -> None:
    """Work begins on the committed weights only, and not before the window allows it."""
    needs_weights = not draft.config.roles[replica.role].checkpoints
    if needs_weights and (replica.phase is Phase.WARM or replica.version != draft.observed.version):
        if replica.attempts >= MAX_SYNC_ATTEMPTS:
            draft.kill(replica, f"{replica.name}: {replica.attempts} weight syncs failed")
            return
        sync = Sync(
            replica=replica.name,
            version=draft.observed.version,
            attempt=replica.attempts,
            reason=f"version {draft.observed.version} is committed, it has {replica.version}",
        )
        draft.add(sync, replica)
        return
    would_be = draft.num_active[replica.role] + len(replica.gpus)
    limit = max(draft.wants.limit[replica.role], draft.wants.floor[replica.role])
    if draft.config.roles[replica.role].preemptible is False or would_be <= limit:
        draft.add(Admit(replica=replica.name, reason=f"{replica.role} works on it"), replica)
        draft.promote(replica)
    else:
        draft.say(f"{replica.name} is ready and waits for its window")


def _watch_sync(draft: Draft, replica: Replica) -> None:
    """A sync that an active or leaving replica takes part in ends, or is aborted."""
    if replica.syncing_since is None:
        return
    age = draft.observed.monotonic - replica.syncing_since
    left = draft.leads.timeout(replica.role, "sync") - age
    if left <= 0:
        draft.abort_sync(replica, f"weight sync takes {format_duration(age)}")
    draft.wake_in(left)


def _after_drain(draft: Draft, replica: Replica) -> None:
    if replica.syncing_since is not None:  # finished or aborted before the release: it writes into this memory
        draft.say(f"{replica.name} waits for the weight sync it takes part in")
        _watch_sync(draft, replica)
    elif draft.config.roles[replica.role].checkpoints:
        _checkpoint(draft, replica)
    else:
        draft.add(Release(replica=replica.name, reason="drained"), replica)


def _checkpoint(draft: Draft, replica: Replica) -> None:
    left = draft.leads.save_budget(replica.role) - _leaving_for(draft, replica)
    reason = "drained" if replica.attempts == 0 else f"checkpoint {replica.attempts} is not good"
    draft.add(Checkpoint(replica=replica.name, attempt=replica.attempts, within=left, reason=reason), replica)
    draft.wake_in(left)


def _save_again(draft: Draft, replica: Replica) -> None:
    """Another try if it can end in time."""
    waits = draft.config.transition.on_overrun == "wait"
    left = draft.leads.save_budget(replica.role) - _leaving_for(draft, replica)
    if left >= draft.leads.timeout(replica.role, "checkpoint"):
        _checkpoint(draft, replica)
    elif waits and draft.age(replica) >= MINUTE:
        draft.add(
            Checkpoint(
                replica=replica.name,
                attempt=replica.attempts,
                within=draft.leads.timeout(replica.role, "checkpoint"),
                reason="on_overrun: wait",
            ),
            replica,
        )
    elif waits:
        draft.wake_in(MINUTE - draft.age(replica))
        _complain(
            draft, replica, f"{replica.name} cannot write a good checkpoint and keeps its GPUs (on_overrun: wait)"
        )
    else:
        draft.kill(replica, f"{replica.name}: {replica.attempts} checkpoints failed; back to the last good one")


def _within(draft: Draft, replica: Replica, budget: Micros, step: Step) -> None:
    """A step of leaving has until ``budget`` after the start of the drain."""
    left = budget - _leaving_for(draft, replica)
    if left > 0:
        draft.wake_in(left)
    elif draft.config.transition.on_overrun == "kill":
        draft.kill(
            replica, f"{replica.name}: {step} overran by {format_duration(-left)}; back to the last good checkpoint"
        )
    else:
        _complain(draft, replica, f"{replica.name}: {step} overruns by {format_duration(-left)} (on_overrun: wait)")


def _watch_release(draft: Draft, replica: Replica) -> None:
    left = draft.leads.timeout(replica.role, "release") - draft.age(replica)
    if left <= 0:
        draft.kill(replica, f"{replica.name}: release takes {format_duration(draft.age(replica))}")
        _complain(draft, replica, f"{replica.name} does not free its GPUs")
    draft.wake_in(left)


def _leaving_for(draft: Draft, replica: Replica) -> Micros:
    assert replica.leaving is not None, "a replica that leaves has a start of its drain"
    return draft.observed.monotonic - replica.leaving


def _complain(draft: Draft, replica: Replica, reason: str) -> None:
    share = draft.outlook.shares(draft.outlook.first)[replica.role]
    active = draft.num_active[replica.role]
    draft.violations.append(Violation(role=replica.role, minimum=share.min, active=active, reason=reason))
