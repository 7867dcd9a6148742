"""Who gives GPUs and who gets them. A minimum is kept by active replicas: newcomers count once they work."""

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
                if draft.holds(role) - len(replica.gpus) >= kept and not _would_be_thin(draft, role, replica):
                    draft.give_up(replica, f"{role} is to hold {wanted} GPUs")
        while draft.num_active[role] > wanted:
            victim = _victim(draft, role, draft.num_active[role] - wanted, urgent=urgent)
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
    missing = floor - draft.holds(role) - draft.freed
    if missing <= 0:
        return
    missing -= sum(map(len, draft.free.values()))
    missing -= sum(len(r.gpus) for rs in draft.leaving.values() for r in rs.values() if r.phase is Phase.RELEASING)
    mine = per_node(draft.active[role].values())
    for lower in reversed(draft.config.ranked[draft.config.ranked.index(role) + 1 :]):
        replicas = [*draft.leaving[lower].values(), *draft.coming[lower].values(), *draft.active[lower].values()]
        replicas = [r for r in replicas if r.phase is not Phase.RELEASING and r.name not in draft.handled]
        while missing > 0 and replicas:
            victim = min(replicas, key=lambda r: (_at_risk(draft, r), mine[r.gpus[0].node], r.name))
            replicas.remove(victim)
            if victim.phase in LEAVING or draft.holds(lower) - len(victim.gpus) >= draft.wants.floor[lower]:
                draft.kill(victim, f"{role} is below its minimum of {floor} GPUs")
                draft.freed += len(victim.gpus)
                missing -= len(victim.gpus)
                mine[victim.gpus[0].node] += len(victim.gpus)  # the newcomers spread over the nodes that give


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
    """There are free GPUs, but not where the role can use them: replicas of lower priority move there."""
    num_free = sum(map(len, draft.free.values()))
    if num_free < size:
        return
    held = per_node((*draft.active[role].values(), *draft.coming[role].values()))
    cap = _cap(draft, role, size) if draft.config.roles[role].is_protected else size + max(held.values(), default=0)
    leaving = per_node(r for rs in draft.leaving.values() for r in rs.values()) + draft.draining
    lower = draft.config.ranked[draft.config.ranked.index(role) + 1 :]
    movable = [r for n in reversed(lower) for r in draft.active[n].values() if r.job is None]
    for node in sorted(draft.free, key=lambda n: (size - len(draft.free[n]) - leaving[n], n)):
        missing = size - len(draft.free[node]) - leaving[node]
        movers = [r for r in movable if {g.node for g in r.gpus} == {node} and keeps_minimum(draft, r.role, r)]
        if held[node] + size > cap or sum(len(r.gpus) for r in movers) < missing:
            continue
        for mover in sorted(movers, key=lambda r: (len(r.gpus) < missing, _at_risk(draft, r), r.name)):
            if missing > 0:
                drain(draft, mover, f"{role} needs GPUs on {node}, others are free")
                missing -= len(mover.gpus)
        return
    draft.say(f"{role} waits: {num_free} GPUs are free, but not {size} on a node that it may use")
