"""Strips of days: one row a day, GPUs stacked by role, so that the calendar and what came of it are seen at once.

matplotlib is imported where a figure is drawn: the pool's verbs start without it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from vla_rlaif.pool.clock import HOUR, MINUTE, Micros, resolve, to_local, zone_of
from vla_rlaif.pool.config import PoolConfig
from vla_rlaif.pool.ledger import DEAD, IDLE, NOBODY, State
from vla_rlaif.pool.simulate import Simulation
from vla_rlaif.pool.staleness import Forecast

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# The colours of report.css in its light mode; a page replaces them by its variables.
ROLE_COLORS = ("#1f62ad", "#bd5208", "#23784a", "#7646a6", "#8a6d00", "#a62a62", "#2b7c85", "#7b8490")
INK, MUTED, GRID, PAPER, BAD = "#1a1e24", "#56606c", "#dfe4ea", "#ffffff", "#a8321f"
VARIABLES = {INK: "--ink", MUTED: "--muted", GRID: "--grid", PAPER: "--card", BAD: "--bad"} | {
    color: f"--s{i}" for i, color in enumerate(ROLE_COLORS, start=1)
}
BIN = 5 * MINUTE  # of a simulation's strips: finer is not seen
HANDOVER, DEAD_NAME = "handover, standby", "dead"


@dataclass(frozen=True, kw_only=True)
class Strip:
    """Steps of stacked counts: from ``times[i]`` on, layer k has ``counts[k][i]`` GPUs. The last time is the end."""

    title: str
    layers: tuple[str, ...]
    times: tuple[Micros, ...]
    counts: tuple[tuple[float, ...], ...]
    names: tuple[tuple[Micros, Micros, str], ...]  # windows, to write into the strips
    num_gpus: int
    config: PoolConfig


def plan_strip(config: PoolConfig, forecasts: Sequence[Forecast], *, start: Micros, end: Micros) -> Strip:
    """What the calendar gives each role."""
    times = (start, *(f.interval.start for f in forecasts[1:]), end)
    return Strip(
        title="GPUs by role, as planned",
        layers=config.ranked,
        times=times,
        counts=tuple(tuple(float(f.goals[role]) for f in forecasts) for role in config.ranked),
        names=_names([(f.interval.start, f.interval.end, f.interval.window) for f in forecasts], start, end),
        num_gpus=config.pool.num_gpus,
        config=config,
    )


def simulation_strip(sim: Simulation, *, title: str) -> Strip:
    """What every GPU did, as means over `BIN`: working for a role, changing hands, or dead; idle stays white."""
    roles, num_gpus = sim.config.ranked, sim.config.pool.num_gpus
    times, means = _means(sim)
    rows = []
    for held in means:
        working = [held.get((role, "active"), 0.0) for role in roles]
        dead, idle = held.get((NOBODY, DEAD), 0.0), held.get((NOBODY, IDLE), 0.0)
        rows.append((*working, max(num_gpus - sum(working) - dead - idle, 0.0), dead))
    spans = [(i.start, i.end, i.window) for i in sim.timeline.between(sim.start, sim.end)]
    return Strip(
        title=title,
        layers=(*roles, HANDOVER, DEAD_NAME),
        times=(*times, sim.end),
        counts=tuple(zip(*rows, strict=True)),
        names=_names(spans, sim.start, sim.end),
        num_gpus=num_gpus,
        config=sim.config,
    )


def _means(sim: Simulation) -> tuple[list[Micros], list[dict[tuple[str, State], float]]]:
    """Mean GPUs by (role, state) in bins of constant length; a run of equal bins is one."""
    times: list[Micros] = []
    means: list[dict[tuple[str, State], float]] = []
    ends = [at for at, _ in sim.series[1:]] + [sim.end]
    step = 0
    for begin in range(sim.start, sim.end, BIN):
        stop = min(begin + BIN, sim.end)
        mean: dict[tuple[str, State], float] = {}
        while True:
            share = (min(ends[step], stop) - max(sim.series[step][0], begin)) / (stop - begin)
            for key, num_gpus in sim.series[step][1].items():
                mean[key] = mean.get(key, 0.0) + share * num_gpus
            if ends[step] >= stop:
                break
            step += 1
        if not means or mean != means[-1]:
            times.append(begin)
            means.append(mean)
        if ends[step] == stop and step + 1 < len(ends):
            step += 1
    return times, means


def draw(strips: Sequence[Strip]) -> Figure:
    """One column a strip chart, one row a day; days of 23 and 25 hours have that length."""
    from matplotlib.figure import Figure

    days = [_days(strip) for strip in strips]
    rows = max(map(len, days))
    height = 0.62 if rows <= 10 else 0.3
    figure = Figure(figsize=(1.6 + 8.2 * len(strips), 1.35 + height * rows), dpi=110)
    figure.patch.set_facecolor(PAPER)
    top, bottom = 1 - 0.8 / figure.get_figheight(), 0.5 / figure.get_figheight()
    for column, (strip, found) in enumerate(zip(strips, days, strict=True)):
        left = (0.95 + column * (8.2 + 0.55)) / figure.get_figwidth()
        width = (8.2 - 0.35) / figure.get_figwidth()
        step = (top - bottom) / rows
        longest = max(24.0, *((end - start) / HOUR for start, end in found))
        for row, (start, end) in enumerate(found):
            box = (left, top - (row + 1) * step, width, step * (0.86 if rows <= 10 else 0.9))
            axis = figure.add_axes(box)
            _draw_day(axis, strip, start, end, longest=longest, is_last=row == len(found) - 1, tall=rows <= 10)
        _title(figure, strip, left=left, top=top)
    return figure


def save(strips: Sequence[Strip], path: Path) -> None:
    """As the suffix says: .svg or .png. Raises ValueError for another one."""
    import matplotlib

    if path.suffix not in (".svg", ".png"):
        raise ValueError(f"a picture is a .svg or a .png file, got {path.name}.")
    path.parent.mkdir(parents=True, exist_ok=True)
    metadata = {"Date": None} if path.suffix == ".svg" else None
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "pool"}):
        draw(strips).savefig(path, metadata=metadata)


def inline_svg(strips: Sequence[Strip], *, name: str, alt: str) -> str:
    """As an element of a page: the page's colours and font."""
    import matplotlib

    from vla_rlaif.report_charts import _svg

    with matplotlib.rc_context({"svg.fonttype": "none"}):
        figure = draw(strips)
        figure.patch.set_visible(False)
        svg = _svg(figure, name=name, alt=alt)
    for color, variable in VARIABLES.items():
        svg = svg.replace(color, f"var({variable})")
    return svg


def _names(
    spans: Sequence[tuple[Micros, Micros, str]], start: Micros, end: Micros
) -> tuple[tuple[Micros, Micros, str], ...]:
    return tuple((max(a, start), min(b, end), name) for a, b, name in spans)


def _days(strip: Strip) -> list[tuple[Micros, Micros]]:
    """Local days [midnight, midnight) that the strip touches."""
    zone = zone_of(strip.config.timezone)
    first = to_local(strip.times[0], zone)
    day = datetime(first.year, first.month, first.day)
    found = []
    while (start := resolve(day, zone)) < strip.times[-1]:
        day += timedelta(days=1)
        found.append((start, resolve(day, zone)))
    return found


def _draw_day(
    axis: Axes, strip: Strip, start: Micros, end: Micros, *, longest: float, is_last: bool, tall: bool
) -> None:
    edges, layers = _cut(strip, start, end)
    hours = [(at - start) / HOUR for at in edges]
    base = [0.0] * len(hours)
    for k, (layer, color) in enumerate(_colors(strip)):
        level = [b + n for b, n in zip(base, layers[k], strict=True)]
        hatch = "////" if layer == DEAD_NAME else None
        axis.fill_between(hours, base, level, step="post", facecolor=color, edgecolor=PAPER, linewidth=0, hatch=hatch)
        base = level
    for a, b, name in strip.names:
        left, right = max(a, start), min(b, end)
        if start < a < end:
            axis.axvline((a - start) / HOUR, color=INK, linewidth=0.9)
        if tall and right - left >= 75 * len(name) * HOUR // 500:
            middle = ((left + right) / 2 - start) / HOUR
            axis.text(middle, strip.num_gpus * 0.5, name, ha="center", va="center", color=PAPER, fontsize=8)
    zone = zone_of(strip.config.timezone)
    day = to_local(start, zone).strftime("%a %d %b")
    if end - start != 24 * HOUR:
        day += f"\n({(end - start) / HOUR:g} h)"
    axis.set_ylabel(day, rotation=0, ha="right", va="center", color=INK, fontsize=8, labelpad=6)
    axis.set_xlim(0, longest)
    axis.set_ylim(0, strip.num_gpus)
    axis.set_yticks([])
    axis.set_xticks(range(0, 25, 3))
    axis.tick_params(colors=MUTED, labelsize=8, length=2, labelbottom=is_last)
    axis.set_facecolor("none")
    for spine in axis.spines.values():
        spine.set_color(GRID)
    if is_last:
        text = f"hours since local midnight ({strip.config.timezone}); a strip is {strip.num_gpus} GPUs high"
        axis.set_xlabel(text, color=MUTED, fontsize=8)


def _cut(strip: Strip, start: Micros, end: Micros) -> tuple[list[Micros], list[list[float]]]:
    """The steps within [start, end), repeated values left out; ends with the value before ``end``."""
    first, last = max(start, strip.times[0]), min(end, strip.times[-1])
    edges: list[Micros] = []
    columns: list[tuple[float, ...]] = []
    for i, (a, b) in enumerate(zip(strip.times, strip.times[1:], strict=False)):
        if a < last and b > first:
            column = tuple(layer[i] for layer in strip.counts)
            if not columns or column != columns[-1]:
                edges.append(max(a, first))
                columns.append(column)
    edges.append(last)
    columns.append(columns[-1])
    return edges, [list(layer) for layer in zip(*columns, strict=True)]


def _colors(strip: Strip) -> list[tuple[str, str]]:
    special = {HANDOVER: INK, DEAD_NAME: BAD}
    roles = iter(ROLE_COLORS)
    return [(layer, special[layer] if layer in special else next(roles)) for layer in strip.layers]


def _title(figure: Figure, strip: Strip, *, left: float, top: float) -> None:
    """The title, and under it the legend."""
    from matplotlib.patches import Patch

    inch = 1 / figure.get_figheight()
    figure.text(left, top + 0.45 * inch, strip.title, color=INK, fontsize=11, va="bottom")
    handles = [Patch(facecolor=color, label=layer) for layer, color in _colors(strip)]
    handles += [Patch(facecolor=PAPER, edgecolor=MUTED, label="idle")] if HANDOVER in strip.layers else []
    figure.legend(
        handles=handles,
        loc="lower left",
        bbox_to_anchor=(left - 0.005, top + 0.1 * inch),
        ncols=len(handles),
        frameon=False,
        fontsize=8,
        labelcolor=INK,
        handlelength=1.2,
        columnspacing=1.4,
        borderaxespad=0,
    )
