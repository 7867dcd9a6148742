"""Windows, exceptions and overrides compiled to half-open UTC intervals: exactly one rules any instant."""

import bisect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, time, timedelta
from zoneinfo import ZoneInfo

from vla_rlaif.pool.clock import DAY, Micros, resolve, say_time, to_local, zone_of
from vla_rlaif.pool.config import PoolConfig, Share, Window
from vla_rlaif.pool.times import DAY_MINUTES, WEEK_MINUTES

PAST = 8 * DAY  # a timeline starts so long before now: which windows count as too short depends on those before
AHEAD = 8 * DAY


@dataclass(frozen=True, kw_only=True)
class Override:
    """What an operator set by hand. It always expires."""

    id: int
    start: Micros
    end: Micros
    use: str | None = None  # name of shares that replace the window's
    targets: Mapping[str, int] = field(default_factory=dict)  # role -> GPUs, on top of the shares in force
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class Occurrence:
    """One stretch of time that a line of the calendar claims."""

    start: Micros
    end: Micros
    window: str
    rank: tuple[int, int]  # (0, priority) of the calendar, (1, id) of overrides; the highest rules
    source: str  # what the line is, for messages
    line: int  # equal for occurrences of the same line


@dataclass(frozen=True, kw_only=True)
class Interval:
    """[start, end) under the shares of one window."""

    start: Micros
    end: Micros
    window: str
    source: str  # "calendar", "exception ...", "override 3: note"
    targets: tuple[tuple[str, int], ...] = ()  # GPUs set by hand, on top of the window's shares

    @property
    def duration(self) -> Micros:
        return self.end - self.start


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """Consecutive intervals without a gap."""

    intervals: tuple[Interval, ...]
    starts: tuple[Micros, ...]
    zone: ZoneInfo

    def index(self, instant: Micros) -> int:
        """Of the interval that rules an instant."""
        assert self.starts[0] <= instant < self.intervals[-1].end, "the timeline was compiled for another time"
        return bisect.bisect_right(self.starts, instant) - 1

    def at(self, instant: Micros) -> Interval:
        return self.intervals[self.index(instant)]

    def between(self, start: Micros, end: Micros) -> Iterator[Interval]:
        """The intervals that touch [start, end), uncut."""
        for interval in self.intervals[self.index(start) :]:
            if interval.start >= end:
                return
            yield interval


def shares_of(config: PoolConfig, interval: Interval) -> dict[str, Share]:
    """The shares in force, by role. A minimum is never lowered by hand: it wins over a target set below it."""
    shares = {role: config.share(interval.window, role) for role in config.roles}
    for role, target in interval.targets:
        share, target = shares[role], max(target, shares[role].min)
        shares[role] = Share(min=share.min, target=target, max=max(target, share.most))
    return shares


def compile_timeline(config: PoolConfig, start: Micros, end: Micros, *, overrides: Sequence[Override] = ()) -> Timeline:
    """The windows that rule [start, end).

    Raises ValueError, with dates, where no window rules or two of equal priority do.
    """
    zone = zone_of(config.timezone)
    claims = [c for c in occurrences(config, start, end) if c.start < end and c.end > start and c.start < c.end]
    for override in overrides:
        if override.use is not None:
            note = f"override {override.id}: {override.note}".rstrip(": ")
            claims.append(
                Occurrence(
                    start=override.start,
                    end=override.end,
                    window=override.use,
                    rank=(1, override.id),
                    source=note,
                    line=-override.id,
                )
            )
    patches = [o for o in overrides if o.targets]
    edges = {start, end} | {t for c in (*claims, *patches) for t in (c.start, c.end) if start < t < end}
    pieces = [_rule(claims, patches, a, b, zone) for a, b in zip(sorted(edges), sorted(edges)[1:], strict=False)]
    intervals = tuple(_merge(pieces))
    return Timeline(intervals=intervals, starts=tuple(i.start for i in intervals), zone=zone)


def around(config: PoolConfig, now: Micros, *, overrides: Sequence[Override] = ()) -> Timeline:
    """The timeline that a plan made at ``now`` needs: some past, and at least the next 8 days."""
    return compile_timeline(config, now - PAST, now + 2 * AHEAD, overrides=overrides)


def occurrences(config: PoolConfig, start: Micros, end: Micros) -> Iterator[Occurrence]:
    """Every stretch that a line of the calendar claims around [start, end)."""
    zone = zone_of(config.timezone)
    # A span belongs to the Monday of its week, starts up to a week after it and lasts up to a week.
    first = to_local(start, zone).date() - timedelta(days=15)
    for offset in range((end - start) // DAY + 18):
        day = first + timedelta(days=offset)
        for line, window in enumerate(config.windows):
            span = _span(window, datetime.combine(day, time()), day.weekday())
            if span is not None:
                yield Occurrence(
                    start=resolve(span[0], zone),
                    end=resolve(span[1], zone),
                    window=window.name,
                    rank=(0, window.priority),
                    source="calendar",
                    line=line,
                )
    for line, rule in enumerate(config.exceptions, start=len(config.windows)):
        for a, b in rule.spans:
            yield Occurrence(
                start=resolve(a, zone),
                end=resolve(b, zone),
                window=rule.use,
                rank=(0, rule.priority),
                source=f"exception of {a:%Y-%m-%d}",
                line=line,
            )


def _span(window: Window, midnight: datetime, weekday: int) -> tuple[datetime, datetime] | None:
    """The wall-clock stretch of a window that belongs to a day."""
    if window.days is not None and window.start is not None and window.end is not None:
        if weekday not in window.days:
            return None
        length = window.end - window.start + (DAY_MINUTES if window.end < window.start else 0)
        start = midnight + timedelta(minutes=window.start)
        return start, start + timedelta(minutes=length)
    assert window.from_ is not None and window.to is not None, "a window is daily hours or a span"
    if weekday != 0:  # spans belong to the week of their start
        return None
    length = (window.to - window.from_) % WEEK_MINUTES or WEEK_MINUTES
    start = midnight + timedelta(minutes=window.from_)
    return start, start + timedelta(minutes=length)


def _rule(
    claims: Iterable[Occurrence], patches: Iterable[Override], start: Micros, end: Micros, zone: ZoneInfo
) -> Interval:
    """What rules a stretch in which nothing starts or ends."""
    active = sorted((c for c in claims if c.start <= start and end <= c.end), key=lambda c: c.rank, reverse=True)
    when = f"{say_time(start, zone)} to {say_time(end, zone)}"
    if not active:
        raise ValueError(f"no window rules {when}.")
    top = active[0]
    for other in active[1:]:
        if other.rank == top.rank and other.line != top.line:
            raise ValueError(
                f"{top.window} ({top.source}) and {other.window} ({other.source}) both rule {when} with priority "
                f"{top.rank[1]}; give one of them a higher priority."
            )
    source, targets = top.source, {}
    for patch in sorted(patches, key=lambda o: o.id):
        if patch.start <= start and end <= patch.end:
            targets |= patch.targets
            source = f"override {patch.id}: {patch.note}".rstrip(": ")
    return Interval(start=start, end=end, window=top.window, source=source, targets=tuple(sorted(targets.items())))


def _merge(pieces: Iterable[Interval]) -> Iterator[Interval]:
    """Neighbours that mean the same become one."""
    last: Interval | None = None
    for piece in pieces:
        if last is not None and (last.window, last.source, last.targets) == (piece.window, piece.source, piece.targets):
            last = replace(last, end=piece.end)
            continue
        if last is not None:
            yield last
        last = piece
    if last is not None:
        yield last
