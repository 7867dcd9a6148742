"""How many GPUs each role should hold: now, at the next boundaries, and from when on a handover must prepare them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from vla_rlaif.pool.calendar import Timeline, shares_of
from vla_rlaif.pool.clock import Micros, format_duration, say_time
from vla_rlaif.pool.config import PoolConfig, Role, Share, Shares
from vla_rlaif.pool.history import Leads

Goals = dict[str, int]  # role -> GPUs


def with_spare(role: Role, minimum: int, num_nodes: int) -> int:
    """The fewest GPUs, spread evenly over nodes, of which ``minimum`` survive the loss of any one node."""
    if not role.is_protected or not minimum or num_nodes < 2:
        return minimum
    size = role.gpus_per_replica
    replicas = -(-minimum // size)
    while (replicas - -(-replicas // num_nodes)) * size < minimum or not role.allows(replicas * size):
        replicas += 1
        if replicas > 2 * minimum + num_nodes:  # no allowed size survives
            return minimum
    return replicas * size


def minimums(config: PoolConfig, shares: Shares, capacity: int) -> Goals:
    """The minimums, shed by priority where they do not fit."""
    goals, free = {}, capacity
    for name in config.ranked:
        goals[name] = config.roles[name].at_most(min(shares[name].min, free))
        free -= goals[name]
    return goals


def allocate(config: PoolConfig, shares: Shares, *, capacity: int, num_nodes: int) -> Goals:
    """Minimums first, then what protects them, then targets, then what is left up to max; each by priority."""
    goals = minimums(config, shares, capacity)
    free = capacity - sum(goals.values())
    levels: tuple[Callable[[str, Share], int], ...] = (
        lambda name, share: with_spare(config.roles[name], share.min, num_nodes),
        lambda name, share: share.target,
        lambda name, share: share.most,
    )
    for level in levels:
        for name in config.ranked:
            if not free:
                return goals
            share = shares[name]
            wanted = level(name, share)
            wanted = wanted if share.max is None else min(wanted, share.max)
            grown = config.roles[name].at_most(min(wanted, goals[name] + free))
            if grown > goals[name]:
                free -= grown - goals[name]
                goals[name] = grown
    return goals


class Outlook:
    """Goals of the ruling window and of those after it, as far as somebody asks.

    A window that is over before a handover into it would be is skipped: the goals before it stay, but for its
    minimums. A role does not grow into a stretch that is shorter than its `min_runtime`.
    """

    def __init__(
        self,
        config: PoolConfig,
        timeline: Timeline,
        now: Micros,
        *,
        capacity: int,
        num_nodes: int,
        leads: Leads,
        boost: Mapping[str, int] | None = None,
    ) -> None:
        self.config, self.timeline, self.leads = config, timeline, leads
        self.first = timeline.index(now)
        self.notes: list[str] = []
        self._capacity, self._num_nodes, self._boost = capacity, num_nodes, boost or {}
        self._goals: dict[int, Goals] = {}
        self._raw: dict[int, Goals] = {}
        self._shares: dict[int, dict[str, Share]] = {}
        # What is longer than this is never skipped, so the goals before it do not matter.
        runtimes = [r.min_runtime for r in config.roles.values()]
        self._long = max(leads.longest + max(runtimes), config.transition.min_dwell)
        self._anchor = self.first
        while self._anchor > 0 and timeline.intervals[self._anchor].duration < self._long:
            self._anchor -= 1

    def goals(self, index: int) -> Goals:
        """For interval ``index`` of the timeline, the ruling one or a later one."""
        if index not in self._goals:
            self._goals[index] = self.raw(index) if index <= self._anchor else self._after(index)
        return self._goals[index]

    def shares(self, index: int) -> dict[str, Share]:
        if index not in self._shares:
            self._shares[index] = shares = shares_of(self.config, self.timeline.intervals[index])
            for role, target in self._boost.items() if index == self.first else ():
                shares[role] = Share(min=shares[role].min, target=target, max=max(target, shares[role].most))
        return self._shares[index]

    def raw(self, index: int) -> Goals:
        """What the shares say, without a look at how long the window lasts."""
        if index not in self._raw:
            self._raw[index] = self._allocate(self.shares(index))
        return self._raw[index]

    def start(self, index: int) -> Micros:
        return self.timeline.starts[index]

    def until(self, role: str, num_gpus: int, index: int) -> Micros:
        """The first boundary after interval ``index`` at which a role holds fewer GPUs than that."""
        for later in range(index + 1, len(self.timeline.intervals)):
            if self.goals(later)[role] < num_gpus:
                return self.start(later)
        return self.timeline.intervals[-1].end

    def lead(self, index: int) -> Micros:
        """The longest handover into interval ``index``; 0 if nothing changes."""
        before, after = self.goals(index - 1), self.goals(index)
        return self._lead(before, after)

    def _lead(self, before: Goals, after: Goals) -> Micros:
        out = max((self.leads.out[r] for r in after if after[r] < before[r]), default=0)
        into = max((self.leads.into[r] for r in after if after[r] > before[r]), default=0)
        return self.leads.scaled(out + into)

    def _after(self, index: int) -> Goals:
        before, wanted = self.goals(index - 1), self.raw(index)
        if before == wanted:
            return wanted
        interval, shares = self.timeline.intervals[index], self.shares(index)
        lead = self._lead(before, wanted)
        if interval.duration < max(lead, self.config.transition.min_dwell):
            self.notes.append(
                f"{interval.window} from {say_time(interval.start, self.timeline.zone)} lasts "
                f"{format_duration(interval.duration)}, less than its handover ({format_duration(lead)}) or min_dwell: "
                "skipped but for its minimums"
            )
            return self._allocate({r: _keeping(shares[r], before[r]) for r in shares})
        blocked = [r for r in wanted if wanted[r] > before[r] and not self._is_worth(r, wanted[r], index)]
        if not blocked:
            return wanted
        self.notes.append(f"{', '.join(blocked)} will not grow for {interval.window}: min_runtime does not fit")
        kept = {r: _keeping(shares[r], before[r]) if r in blocked else shares[r] for r in shares}
        for r in shares:
            if wanted[r] < before[r]:  # what nobody takes stays where it is
                kept[r] = Share(min=shares[r].min, target=shares[r].target, max=max(shares[r].most, before[r]))
        return self._allocate(kept)

    def _is_worth(self, role: str, num_gpus: int, index: int) -> bool:
        needed = self.config.roles[role].min_runtime + self.leads.scaled(self.leads.out[role])
        if num_gpus <= self.shares(index)[role].min:
            return True
        end = self.timeline.intervals[index].end
        while end - self.start(index) < needed and index + 1 < len(self.timeline.intervals):
            index += 1
            if self.raw(index)[role] < num_gpus:
                return False
            end = self.timeline.intervals[index].end
        return True

    def _allocate(self, shares: Shares) -> Goals:
        return allocate(self.config, shares, capacity=self._capacity, num_nodes=self._num_nodes)


def _keeping(share: Share, held: int) -> Share:
    target = max(share.min, held)
    return Share(min=share.min, target=target, max=max(share.most, target))


@dataclass(kw_only=True)
class Wants:
    """What this plan works towards."""

    want: Goals  # GPUs to hold: fewer are grown, more are drained
    keep: Goals  # newcomers beyond this are given up; between want and keep they are left alone
    floor: Goals  # active GPUs that no drain may go below: the minimums of now, and those that come within the lead
    limit: Goals  # active GPUs that a role may have before the boundary; protected roles have no limit
    index: dict[str, int]  # interval that each want comes from
    wakeups: list[Micros] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def wants(outlook: Outlook, now: Micros, capacity: int) -> Wants:
    """Goals of the ruling window, changed by what boundaries within the lead need.

    Roles that give GPUs to somebody at a boundary start to drain so early that the newcomer is ready at the boundary.
    Those that may not be preempted keep theirs until the boundary itself.
    """
    config, leads, first = outlook.config, outlook.leads, outlook.first
    goals, shares = outlook.goals(first), outlook.shares(first)
    result = Wants(
        want=dict(goals),
        keep=dict(goals),
        floor=minimums(config, shares, capacity),
        limit={r: max(goals[r], shares[r].most) for r in goals},
        index=dict.fromkeys(goals, first),
    )
    least = dict(result.floor)  # minimums of all windows up to the boundary looked at
    for index in range(first + 1, len(outlook.timeline.intervals)):
        boundary = outlook.start(index)
        if boundary - now > 2 * leads.longest:
            result.wakeups.append(boundary - 2 * leads.longest)
            break
        coming = minimums(config, outlook.shares(index), capacity)
        _prepare(result, outlook, index, now, least=least, coming=coming, capacity=capacity)
        least = {r: max(least[r], coming[r]) for r in least}
    return result


def _prepare(
    result: Wants, outlook: Outlook, index: int, now: Micros, *, least: Goals, coming: Goals, capacity: int
) -> None:
    """Change wants by the boundary before interval ``index``, as far as its lead has begun."""
    leads, boundary = outlook.leads, outlook.start(index)
    before, after = outlook.goals(index - 1), outlook.goals(index)
    held = _held_in_lead(outlook.config, before, after, least=least, coming=coming, capacity=capacity)
    givers = [r for r in after if held[r] < before[r]]
    gainers = [r for r in after if after[r] > before[r] and r not in givers]
    into = max((leads.into[r] for r in gainers), default=0)
    begins = {r: boundary - leads.scaled(leads.out[r] + into) for r in givers}
    first = min(begins.values(), default=boundary - leads.scaled(into))
    result.wakeups += [begin for begin in (first, *begins.values()) if begin > now]
    for r in after:
        result.keep[r] = max(result.keep[r], after[r])
        if first <= now:
            result.floor[r] = max(result.floor[r], coming[r])
    for r in gainers if first <= now else ():
        result.want[r], result.index[r] = after[r], index
    for r, begin in begins.items():
        if begin <= now:
            result.want[r], result.index[r] = held[r], index
            when = say_time(boundary, outlook.timeline.zone)
            result.notes.append(f"{r} gives {before[r] - held[r]} GPUs before {when}")


def _held_in_lead(
    config: PoolConfig, before: Goals, after: Goals, *, least: Goals, coming: Goals, capacity: int
) -> Goals:
    """What roles keep from the start of the lead until the boundary.

    Minimums of the new window must be active at the boundary, also where their GPUs are to come from a role that keeps
    them until then: lower priorities lend theirs meanwhile.
    """
    held = {}
    for r in after:
        gives = after[r] < before[r] and config.roles[r].preemptible is not False
        held[r] = max(after[r], least[r]) if gives else max(before[r], coming[r])
    excess = sum(held.values()) - capacity
    for r in reversed(config.ranked):
        lowest = max(least[r], coming[r])
        if excess > 0 and config.roles[r].preemptible is not False and held[r] > lowest:
            cut = max(config.roles[r].at_most(max(held[r] - excess, lowest)), lowest)
            excess, held[r] = excess - (held[r] - cut), cut
    return held
