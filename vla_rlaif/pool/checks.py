"""What is wrong with a calendar, with dates and a suggestion; and what is allowed but probably not meant."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, time, timedelta
from pathlib import Path

from vla_rlaif.pool.calendar import compile_timeline, occurrences
from vla_rlaif.pool.clock import DAY, Micros, resolve, say_time, to_local, zone_of
from vla_rlaif.pool.config import PoolConfig, Window, read_pool
from vla_rlaif.pool.goals import with_spare
from vla_rlaif.pool.times import DAY_MINUTES, WEEK_MINUTES, WEEKDAYS

Span = tuple[int, int]  # minutes of the week [start, end), start < 10080; the end may lie in the next week


@dataclass(frozen=True, kw_only=True)
class Conflict:
    """A stretch of the week with the wrong number of rulers: none, or two of equal priority."""

    span: Span
    windows: tuple[int, ...]  # lines; empty for a gap


def load_pool(path: Path, *, now: Micros) -> PoolConfig:
    """Read and check a pool. ``now`` only chooses the dates that messages show. Raises ValueError."""
    config = read_pool(path)
    try:
        check_calendar(config, now=now)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    return config


def check_calendar(config: PoolConfig, *, now: Micros) -> None:
    """Raises ValueError unless exactly one window rules any instant, in every week and through every exception."""
    conflicts = list(_conflicts(config.windows))
    if conflicts:
        texts = [_describe(config, conflict, now) for conflict in conflicts]
        raise ValueError("; ".join(texts) + ". " + " ".join(_suggestions(config, conflicts)))
    zone = zone_of(config.timezone)
    for rule in config.exceptions:
        for start, end in rule.spans:
            first, last = resolve(start, zone), resolve(end, zone)
            if first == last:
                raise ValueError(f"exception {rule.use} from {start} to {end} lies in hours that the clocks skip.")
            compile_timeline(config, first, last)


def cautions(config: PoolConfig, *, now: Micros) -> list[str]:
    """What is allowed and probably not meant."""
    found, size, zone = [], config.pool.num_gpus, zone_of(config.timezone)
    for window, shares in config.shares.items():
        least, target = sum(s.min for s in shares.values()), sum(s.target for s in shares.values())
        most = sum(s.most for s in shares.values())
        if least > size:
            found.append(f"{window}: the minimums ask for {least} of {size} GPUs; low priorities get less.")
        elif target > size:
            found.append(f"{window}: the targets ask for {target} of {size} GPUs; low priorities get less.")
        elif most < size:
            found.append(f"{window}: the shares use {most} of {size} GPUs; {size - most} stay idle.")
        for name, share in shares.items():
            spare = with_spare(config.roles[name], share.min, config.pool.nodes)
            if config.roles[name].is_protected and share.max is not None and spare > share.max:
                found.append(
                    f"{window}: {name} at max {share.max} falls below min {share.min} when a node dies; "
                    f"{spare} GPUs would survive that."
                )
    for rule in config.exceptions:
        days = sorted(rule.dates or ())
        if len(days) == 2 and (days[1] - days[0]).days > 1:
            found.append(
                f"exception {rule.use}: dates names two single days, {days[0]} and {days[1]}; the days between keep "
                f"their windows. For the whole stretch write from: {days[0]}T00:00, to: {days[1]}T24:00."
            )
        for start, end in rule.spans:
            first, last = resolve(start, zone), resolve(end, zone)
            if all(i.source == "calendar" for i in compile_timeline(config, first, last).intervals):
                found.append(f"exception {rule.use} of {start:%Y-%m-%d} never rules: windows of higher priority do.")
    for claim in occurrences(config, now, now + 8 * DAY):
        wall = [to_local(t, zone).replace(tzinfo=None) for t in (claim.start, claim.end)]
        shift = (wall[1] - wall[0]) // timedelta(microseconds=1) - (claim.end - claim.start)
        if shift and now < claim.end and claim.start < now + 8 * DAY:
            hours = (claim.end - claim.start) / 3.6e9
            found.append(
                f"the clocks change in {claim.window} from {say_time(claim.start, zone)}: it lasts {hours:g} h."
            )
    return found


def spans_of(window: Window) -> list[Span]:
    """The stretches of the week that a window claims."""
    if window.from_ is not None and window.to is not None:
        start = window.from_ % WEEK_MINUTES
        return [(start, start + ((window.to - window.from_) % WEEK_MINUTES or WEEK_MINUTES))]
    assert window.days is not None and window.start is not None and window.end is not None
    length = window.end - window.start + (DAY_MINUTES if window.end < window.start else 0)
    starts = [day * DAY_MINUTES + window.start for day in window.days]
    return [(start, start + length) for start in starts]


def _covers(span: Span, minute: int) -> bool:
    return span[0] <= minute < span[1] or span[0] <= minute + WEEK_MINUTES < span[1]


def _conflicts(windows: Sequence[Window]) -> Iterator[Conflict]:
    """Elementary stretches of the week that are claimed wrongly, neighbours of a kind merged."""
    edges = sorted({0} | {edge % WEEK_MINUTES for w in windows for span in spans_of(w) for edge in span})
    found: list[Conflict] = []
    for start, end in zip(edges, [*edges[1:], WEEK_MINUTES], strict=True):
        here = [i for i, w in enumerate(windows) if any(_covers(span, start) for span in spans_of(w))]
        top = max((windows[i].priority for i in here), default=0)
        rulers = tuple(i for i in here if windows[i].priority == top)
        if len(rulers) == 1:
            continue
        if found and found[-1].span[1] == start and found[-1].windows == rulers:
            start = found.pop().span[0]
        found.append(Conflict(span=(start, end), windows=rulers))
    touches = len(found) > 1 and found[0].span[0] == 0 and found[-1].span[1] == WEEK_MINUTES
    if touches and found[0].windows == found[-1].windows:  # across Sunday midnight
        head, tail = found[0], found.pop()
        found[0] = Conflict(span=(tail.span[0], WEEK_MINUTES + head.span[1]), windows=head.windows)
    yield from sorted(found, key=lambda c: (not c.windows, c.span))


def _describe(config: PoolConfig, conflict: Conflict, now: Micros) -> str:
    start, end = _next(config, conflict.span, now)
    when = f"{start} to {end} (every week)"
    if not conflict.windows:
        return f"no window rules {when}"
    names = [config.windows[i].name for i in conflict.windows]
    return f"{' and '.join(names)} both rule {when} with priority {config.windows[conflict.windows[0]].priority}"


def _next(config: PoolConfig, span: Span, now: Micros) -> tuple[str, str]:
    """The next dates of a stretch of the week."""
    zone = zone_of(config.timezone)
    today = to_local(now, zone).date()
    monday = datetime.combine(today - timedelta(days=today.weekday()), time())
    for week in range(3):
        start, end = (resolve(monday + timedelta(weeks=week, minutes=m), zone) for m in span)
        if end > now:
            return say_time(start, zone), say_time(end, zone)
    raise AssertionError("a stretch of the week comes back within two weeks")


def _suggestions(config: PoolConfig, conflicts: Sequence[Conflict]) -> list[str]:
    """One span for a window whose days form one run, trimmed at overlaps and stretched over gaps; else what to do."""
    texts, mended = [], set()
    for line, window in enumerate(config.windows):
        runs = _runs(spans_of(window))
        if len(runs) != 1:
            continue
        (start, end), before = runs[0], len(mended)
        for number, conflict in enumerate(conflicts):
            (a, b), length = conflict.span, conflict.span[1] - conflict.span[0]
            if line in conflict.windows and a % WEEK_MINUTES == start % WEEK_MINUTES and start + length < end:
                start, mended = start + length, mended | {number}
            elif not conflict.windows and a % WEEK_MINUTES == end % WEEK_MINUTES and number not in mended:
                end, mended = end + b - a, mended | {number}
        if len(mended) > before:
            span = f'{{name: {window.name}, from: "{_week_time(start)}", to: "{_week_time(end, is_end=True)}"}}'
            texts.append(f"Write {window.name} as one span: {span}.")
    for number, conflict in enumerate(conflicts):
        if number in mended:
            continue
        start, end = _week_time(conflict.span[0]), _week_time(conflict.span[1], is_end=True)
        if conflict.windows:
            names = " or ".join(config.windows[i].name for i in conflict.windows)
            texts.append(f"From {start} to {end} give {names} a higher priority, or end the first one earlier.")
        else:
            near = next((w.name for w in config.windows), "")
            texts.append(f'Add a window for it, e.g. {{name: {near}, from: "{start}", to: "{end}"}}.')
    return texts


def _runs(spans: Sequence[Span]) -> list[Span]:
    """Stretches that touch, merged; also across Sunday midnight."""
    runs: list[Span] = []
    for start, end in sorted(spans):
        if runs and runs[-1][1] >= start:
            runs[-1] = (runs[-1][0], max(end, runs[-1][1]))
        else:
            runs.append((start, end))
    if len(runs) > 1 and runs[-1][1] - WEEK_MINUTES >= runs[0][0]:
        head = runs.pop(0)
        runs[-1] = (runs[-1][0], max(runs[-1][1], head[1] + WEEK_MINUTES))
    return runs


def _week_time(minute: int, *, is_end: bool = False) -> str:
    if is_end and minute % WEEK_MINUTES == 0:
        return "sun 24:00"
    day, rest = divmod(minute % WEEK_MINUTES, DAY_MINUTES)
    return f"{WEEKDAYS[day]} {rest // 60:02}:{rest % 60:02}"
