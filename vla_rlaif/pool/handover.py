"""Who gives GPUs and who gets them. A minimum is kept by active replicas: newcomers count once they work."""

from collections import Counter
from collections.abc import Sequence

from vla_rlaif.pool.actions import Acquire
from vla_rlaif.pool.clock import Micros, format_duration
from vla_rlaif.pool.config import PoolConfig
from vla_rlaif.pool.draft import Draft
from vla_rlaif.pool.goals import Wants, with_spare
from vla_rlaif.pool.lifecycle import drain
from vla_rlaif.pool.placement import pack, per_node, spread, take
from vla_rlaif.pool.state import LEAVING, Gpu, Phase, Replica


def shrink(draft: Draft) -> None:
    """Drain what roles hold beyond what is wanted; newcomers go first, for they have done nothing yet."""
    urgent = any(draft.holds(r) < draft.wants.floor[r] for r in draft.config.roles)
    for role in reversed(draft.config.ranked):
        wanted, kept = draft.wants.want[role], max(draft.wants.want[role], draft.wants.keep[role])
        if draft.coming[role] and draft.holds(role) > kept:
            for replica in sorted(draft.coming[role].values(), key=lambda r: (r.job is not None, -r.acquired, r.name)):
                # A job that fits takes the place of standing replicas, not they that of the job.
                is_excess = draft.holds(role) - len(replica.gpus) >= kept
                if replica.job is not None:
                    is_excess = _num_of_jobs(draft, role) > kept
                if is_excess and not _would_be_thin(draft, role, replica):
                    draft.give_up(replica, f"{role} is to hold {wanted} GPUs")
        coming_jobs = sum(len(r.gpus) for r in draft.coming[role].values() if r.job is not None)
        while draft.num_active[role] > wanted - coming_jobs:
            victim = _victim(draft, role, draft.num_active[role] - wanted + coming_jobs, urgent=urgent)
            if victim is None:
                break
            drain(draft, victim, f"{role} is to hold {wanted} GPUs")


def grow(draft: Draft, role: str, level: int) -> None:
    """Acquire free GPUs for replicas that are missing up to a number of GPUs."""
    size = draft.config.roles[role].gpus_per_replica
    while level - draft.holds(role) - draft.reserved.get(role, 0) >= size:
        if not _is_worth(draft, role, size):
            return
        gpus = _place(draft, role, size)
        if gpus is None:
            _make_room(draft, role, size)
            return
        acquire(draft, role, gpus)


def acquire(draft: Draft, role: str, gpus: tuple[Gpu, ...], *, job: str | None = None) -> None:
    """Start a replica. Its name, and so the key, is the same until a GPU changes hands."""
    first = gpus[0]
    name = f"{job or role}-{first.node}-{first.slot}-{draft.observed.generation.get(first, 0)}"
    take(draft.free, gpus)
    reason = f"job {job}" if job else f"{role} is to hold {draft.wants.want[role]} GPUs"
    draft.actions.append(Acquire(replica=name, role=role, gpus=gpus, job=job, reason=reason))
    now = draft.observed.monotonic
    newcomer = Replica(name=name, role=role, gpus=gpus, phase=Phase.ACQUIRING, since=now, acquired=now, job=job)
    draft.expect(newcomer)


def rescue(draft: Draft, role: str) -> None:
    """A role without the GPUs of its minimum takes them from lower priorities at once, instead of after a drain."""
    floor = min(draft.wants.floor[role], draft.outlook.shares(draft.outlook.first)[role].min)
    size = draft.config.roles[role].gpus_per_replica
    missing = -(-(floor - draft.holds(role)) // size)  # replicas
    if missing <= 0:
        return
    releasing = per_node(r for rs in draft.leaving.values() for r in rs.values() if r.phase is Phase.RELEASING)
    room = Counter({node: len(slots) for node, slots in draft.free.items()}) + releasing + draft.killed
    mine = per_node(draft.active[role].values())
    for _ in range(missing):
        victims = {node: _hostages(draft, role, node, size - room[node]) for node in draft.free}
        possible = [node for node in draft.free if room[node] + sum(len(r.gpus) for r in victims[node]) >= size]
        if not possible:
            draft.say(f"{role} is below its minimum, and no node can give it {size} GPUs at once")
            return
        node = min(possible, key=lambda n: (sum(1 + _at_risk(draft, r) for r in victims[n]), mine[n], n))
        for victim in victims[node]:
            draft.kill(victim, f"{role} is below its minimum of {floor} GPUs")
            draft.killed[node] += len(victim.gpus)
            room[node] += len(victim.gpus)
        room[node] -= size
        draft.killed[node] -= size  # promised: the next role in need does not count on it
        mine[node] += size


def _hostages(draft: Draft, role: str, node: str, missing: int) -> list[Replica]:
    """Replicas of lower priority on a node that free so many GPUs, the cheapest first; all there are if too few."""
    chosen: list[Replica] = []
    for lower in reversed(draft.config.ranked[draft.config.ranked.index(role) + 1 :]):
        groups = (draft.leaving[lower], draft.coming[lower], draft.active[lower])
        here = [r for group in groups for r in group.values() if {g.node for g in r.gpus} == {node}]
        spare = draft.holds(lower) - draft.wants.floor[lower]
        for replica in sorted(here, key=lambda r: (_at_risk(draft, r), r.name)):
            is_leaving = replica.phase in LEAVING
            if missing <= 0 or replica.phase is Phase.RELEASING or replica.name in draft.handled:
                continue
            if is_leaving or spare >= len(replica.gpus):
                chosen.append(replica)
                missing -= len(replica.gpus)
                spare -= 0 if is_leaving else len(replica.gpus)
    return chosen


def is_thin(config: PoolConfig, role: str, wanted: Wants, replicas: Sequence[Replica], num_nodes: int) -> bool:
    """Whether too many GPUs of a role are on one node: it would not survive a loss, or cannot shrink to what would."""
    floor, size = wanted.floor[role], sum(len(r.gpus) for r in replicas)
    enough = with_spare(config.roles[role], floor, num_nodes)
    if not config.roles[role].is_protected or not floor or num_nodes < 2 or size < enough:
        return False
    held, cap = per_node(replicas), enough - floor  # GPUs that one node may take away
    is_at_risk = size - max(held.values()) < floor
    can_shrink = sum(min(n, cap) for n in held.values()) >= enough
    return is_at_risk or (size > max(wanted.want[role], enough) and not can_shrink)


def _num_of_jobs(draft: Draft, role: str) -> int:
    """GPUs of the jobs of a role."""
    replicas = (*draft.coming[role].values(), *draft.active[role].values())
    return sum(len(r.gpus) for r in replicas if r.job is not None)


def _would_be_thin(draft: Draft, role: str, leaver: Replica) -> bool:
    """Without this newcomer, which may be the one that is to make room on a full node."""
    rest = [r for r in (*draft.coming[role].values(), *draft.active[role].values()) if r.name != leaver.name]
    return is_thin(draft.config, role, draft.wants, rest, draft.num_nodes)


def keeps_minimum(draft: Draft, role: str, leaver: Replica) -> bool:
    """Whether the active rest satisfies the minimum, also when any one node dies if the role must survive that."""
    floor = draft.wants.floor[role]
    rest = [r for r in draft.active[role].values() if r.name != leaver.name]
    left = sum(len(r.gpus) for r in rest)
    if not draft.config.roles[role].is_protected or not floor:
        return left >= floor
    before = draft.num_active[role] - max(per_node(draft.active[role].values()).values(), default=0)
    after = left - max(per_node(rest).values(), default=0)
    return left >= floor and (after >= floor or before < floor)


def _victim(draft: Draft, role: str, excess: int, *, urgent: bool) -> Replica | None:
    """The cheapest active replica that may go. Roles are ranked by what they are wanted to hold."""
    is_protected = draft.config.roles[role].is_protected
    mine = per_node(draft.active[role].values())
    guarded = per_node(r for n, rs in draft.active.items() if draft.config.roles[n].is_protected for r in rs.values())
    leaving = per_node(r for rs in draft.leaving.values() for r in rs.values())
    is_claimed = any(
        draft.wants.want[n] > draft.holds(n) for n in draft.config.roles if draft.config.roles[n].is_protected
    )

    def cost(replica: Replica) -> tuple:
        node, size = replica.gpus[0].node, len(replica.gpus)
        # A job that the wanted size cannot hold must go in any case, one that fits goes last.
        rank = 1 if replica.job is None else 2 if size <= draft.wants.want[role] else 0
        room = leaving[node] + draft.draining[node]
        if is_protected:
            place = -mine[node]  # stays spread
        elif is_claimed:
            place = guarded[node] + room  # makes room where what must survive is thin
        else:
            place = -room  # whole nodes come free
        return (rank, _at_risk(draft, replica), place, replica.name)

    for replica in sorted(draft.active[role].values(), key=cost):
        left = draft.config.transition.min_dwell - (draft.observed.monotonic - replica.acquired)
        if replica.name in draft.handled:
            continue
        if left > 0 and not urgent:
            draft.say(f"{replica.name} stays {format_duration(left)} longer (min_dwell)")
            draft.wake_in(left)
        elif not keeps_minimum(draft, role, replica) and (replica.job is None or is_protected):
            # A job that leaves may take a role that can be preempted below its minimum: its GPUs are refilled at once.
            draft.say(f"{role} keeps {replica.name}: its minimum of {draft.wants.floor[role]} GPUs must be active")
        elif len(replica.gpus) <= excess or replica.job is not None:
            return replica
    return None


def _at_risk(draft: Draft, replica: Replica) -> Micros:
    """Work that is lost if it ends badly, in GPU-microseconds."""
    return 0 if replica.saved is None else (draft.observed.monotonic - replica.saved) * len(replica.gpus)


def _is_worth(draft: Draft, role: str, size: int) -> bool:
    """Whether a newcomer has time to do something before its GPUs are needed elsewhere."""
    spec, index = draft.config.roles[role], draft.wants.index[role]
    if draft.holds(role) < draft.wants.floor[role] or spec.preemptible is False:
        return True
    begin = max(draft.now + draft.leads.scaled(draft.leads.into[role]), draft.outlook.start(index))
    needed = max(spec.min_runtime, draft.config.transition.min_dwell) + draft.leads.scaled(draft.leads.out[role])
    end = draft.outlook.until(role, draft.holds(role) + size, index)
    if begin + needed <= end:
        return True
    draft.say(f"{role} does not grow: {format_duration(needed)} do not fit before {draft.when(end)}")
    return False


def _place(draft: Draft, role: str, size: int) -> tuple[Gpu, ...] | None:
    if not draft.config.roles[role].is_protected:
        node_size = max(len(node.healthy) for node in draft.observed.nodes)
        return pack(draft.free, size, node_size=node_size, one_node=False)
    held = per_node((*draft.active[role].values(), *draft.coming[role].values()))
    return spread(draft.free, size, held=held, cap=_cap(draft, role, size))


def _cap(draft: Draft, role: str, size: int) -> int:
    """GPUs of a protected role that one node may hold, so that the loss of it leaves the minimum."""
    floor, want = draft.wants.floor[role], draft.wants.want[role]
    if draft.holds(role) < floor or draft.num_nodes < 2:
        return want
    return max(want - floor, -(-want // (size * draft.num_nodes)) * size)


def _make_room(draft: Draft, role: str, size: int) -> None:
    """There are free GPUs, but not where the role can use them: replicas of lower priority move there.

    What is free on the node that was chosen is kept for the role, or those that move would come back to it.
    """
    num_free = sum(map(len, draft.free.values()))
    held = per_node((*draft.active[role].values(), *draft.coming[role].values()))
    cap = _cap(draft, role, size) if draft.config.roles[role].is_protected else size + max(held.values(), default=0)
    leaving = per_node(r for rs in draft.leaving.values() for r in rs.values()) + draft.draining
    lower = draft.config.ranked[draft.config.ranked.index(role) + 1 :]
    movable = [r for n in reversed(lower) for r in draft.active[n].values() if r.job is None and _has_dwelt(draft, r)]
    missing = {n: size - len(slots) - leaving[n] for n, slots in draft.free.items() if held[n] + size <= cap}
    for node in sorted(missing, key=lambda n: (missing[n], n)):
        movers = [r for r in movable if {g.node for g in r.gpus} == {node} and keeps_minimum(draft, r.role, r)]
        if missing[node] > 0 and (num_free < size or sum(len(r.gpus) for r in movers) < missing[node]):
            continue
        for mover in sorted(movers, key=lambda r: (len(r.gpus) < missing[node], _at_risk(draft, r), r.name)):
            if missing[node] > 0:
                drain(draft, mover, f"{role} needs GPUs on {node}, others are free")
                missing[node] -= len(mover.gpus)
        draft.free[node] = []
        return
    if num_free >= size:
        draft.say(f"{role} waits: {num_free} GPUs are free, but not {size} on a node that it may use")


def _has_dwelt(draft: Draft, replica: Replica) -> bool:
    return draft.observed.monotonic - replica.acquired >= draft.config.transition.min_dwell
