"""Charts as inline SVG. Colours are CSS variables of the page, so one chart serves light and dark mode.

matplotlib is used by the Figure object alone: no pyplot, no figure registry.
"""

import io
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

import matplotlib
import numpy as np
from jaxtyping import Float
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from matplotlib.typing import RcKeyType

WIDTH = 4.7  # inches; 338 SVG units, so that 11-unit text stays 11 px in a 340 px column

# matplotlib wants colours, the page wants CSS variables: each stand-in is replaced by its variable in the SVG text.
INK, MUTED, GRID = "#0a0b0c", "#5a5b5c", "#dadbdc"
SERIES = ("#a1b001", "#a1b002", "#a1b003", "#a1b004", "#a1b005", "#a1b006", "#a1b007", "#a1b008")
VARIABLES = {INK: "--ink", MUTED: "--muted", GRID: "--grid"} | {c: f"--s{i}" for i, c in enumerate(SERIES, start=1)}
DASHES = ("-", (0, (5, 2)), (0, (1.5, 1.5)), (0, (6, 2, 1.5, 2)))  # lines differ without colour too

RC: dict[RcKeyType, Any] = {
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 11,
}


@dataclass(frozen=True, kw_only=True)
class Line:
    """One curve: a key of the metrics, as a share of another key if ``share_of`` is given."""

    key: str
    label: str
    share_of: str | None = None
    interval: tuple[str, str] | None = None  # keys of the ends of a 95 % interval


@dataclass(frozen=True, kw_only=True)
class Panel:
    """Curves with one y axis."""

    label: str
    lines: tuple[Line, ...]
    is_percent: bool = False  # the axis is 0 to 100 %
    is_count: bool = False
    from_zero: bool = False
    height: float = 1.55  # inches, with its title
    reference: float | None = None  # a value to compare with, drawn across


@dataclass(frozen=True, kw_only=True)
class Chart:
    """Panels over the same steps, or over the values of another key, top to bottom."""

    name: str  # prefix of its SVG ids
    title: str
    panels: tuple[Panel, ...]
    caption: str
    x: str = "step"
    x_label: str = "training step"


@dataclass(frozen=True, kw_only=True)
class Points:
    """A curve's data. NaN is a step whose value was not a finite number; steps without the key are left out."""

    steps: Float[np.ndarray, " K"]
    values: Float[np.ndarray, " K"]


def points(
    metrics: Sequence[dict], key: str, *, share_of: str | None = None, scale: float = 1.0, x: str = "step"
) -> Points:
    """The values of a key over the steps, or over another key ``x``."""
    rows = [row for row in metrics if key in row and (share_of is None or row.get(share_of))]
    rows = [row for row in rows if row.get(x) is not None]
    values = [np.nan if row[key] is None else row[key] / (row[share_of] if share_of else 1) for row in rows]
    return Points(steps=np.array([row[x] for row in rows], float), values=scale * np.array(values, float))


def has_data(metrics: Sequence[dict], line: Line, x: str = "step") -> bool:
    return bool(np.isfinite(points(metrics, line.key, share_of=line.share_of, x=x).values).any())


def line_chart(chart: Chart, metrics: Sequence[dict]) -> str | None:
    """The panels that have data, as SVG; None if none has."""
    panels = [panel for panel in chart.panels if any(has_data(metrics, line, chart.x) for line in panel.lines)]
    if not panels:
        return None
    heights = [panel.height for panel in panels]
    figure = _figure(height=0.5 + sum(heights))
    spoken = []
    with matplotlib.rc_context(RC):
        axes = figure.subplots(len(panels), sharex=True, squeeze=False, height_ratios=heights)[:, 0]
        for axis, panel in zip(axes, panels, strict=True):
            _frame(axis)
            spoken += _draw(axis, panel, metrics, chart.x)
        axes[-1].set_xlabel(chart.x_label, color=MUTED)
        axes[-1].xaxis.set_major_locator(MaxNLocator(nbins=5, integer=chart.x == "step"))
        return _svg(figure, name=chart.name, alt=f"{chart.title}. " + " ".join(spoken))


def interval_bars(name: str, bars: Sequence[tuple[str, float, tuple[float, float] | None]], *, alt: str) -> str:
    """Success rates in [0, 1] as horizontal bars with their 95 % intervals, first on top."""
    figure = _figure(height=0.75 + 0.5 * len(bars))
    with matplotlib.rc_context(RC):
        axis = figure.subplots()
        _frame(axis)
        for row, (_, rate, interval) in enumerate(bars):
            axis.barh(row, 100 * rate, color=SERIES[row], height=0.55, alpha=0.75)
            if interval is not None:
                ends = [[100 * max(rate - interval[0], 0)], [100 * max(interval[1] - rate, 0)]]
                axis.errorbar([100 * rate], [row], xerr=ends, fmt="none", ecolor=INK, capsize=5, elinewidth=1.5)
        axis.set_yticks(range(len(bars)), [label for label, _, _ in bars], color=INK)
        axis.set_xlim(0, 100)
        axis.set_ylim(len(bars) - 0.5, -0.5)
        axis.grid(visible=False, axis="y")
        axis.set_xlabel("success, %", color=MUTED)
        return _svg(figure, name=name, alt=alt)


def stacked_bar(name: str, parts: Sequence[tuple[str, float]], *, alt: str) -> str:
    """Shares of a whole as one bar; the colours are the series colours in order, the page's table is the legend."""
    figure = Figure(figsize=(WIDTH, 0.5))
    figure.patch.set_visible(False)
    with matplotlib.rc_context(RC):
        axis = figure.add_axes((0, 0, 1, 1))
        axis.axis("off")
        left = 0.0
        for color, (_, size) in zip(SERIES, parts, strict=False):
            axis.barh(0, size, left=left, color=color, height=1)
            left += size
        axis.set_xlim(0, left)
        return _svg(figure, name=name, alt=alt)


def _figure(*, height: float) -> Figure:
    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    figure.patch.set_visible(False)
    return figure


def _frame(axis: Axes) -> None:
    axis.set_facecolor("none")
    axis.grid(color=GRID, linewidth=0.8)
    axis.set_axisbelow(True)
    axis.tick_params(colors=MUTED, length=0)
    for side, spine in axis.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color(MUTED)


def _draw(axis: Axes, panel: Panel, metrics: Sequence[dict], x: str) -> list[str]:
    """Draw the curves that have data; returns a sentence for each, for readers who cannot see them."""
    scale = 100.0 if panel.is_percent else 1.0
    spoken = []
    for i, line in enumerate(panel.lines):
        if not has_data(metrics, line, x):
            continue
        curve = points(metrics, line.key, share_of=line.share_of, scale=scale, x=x)
        is_sparse = len(curve.steps) <= 1 or line.interval is not None or x != "step"
        axis.plot(
            curve.steps,
            curve.values,
            color=SERIES[i],
            linestyle=DASHES[i % len(DASHES)],
            linewidth=1.8,
            marker="o" if is_sparse else None,
            markersize=4,
            label=line.label,
        )
        if line.interval is not None:
            low, high = (points(metrics, key, scale=scale) for key in line.interval)
            if np.array_equal(low.steps, curve.steps) and np.array_equal(high.steps, curve.steps):
                axis.fill_between(curve.steps, low.values, high.values, color=SERIES[i], alpha=0.2, linewidth=0)
                axis.vlines(curve.steps, low.values, high.values, color=SERIES[i], alpha=0.6, linewidth=1)
        spoken.append(_sentence(line, curve, unit=" %" if panel.is_percent else "", x=x))
    if panel.reference is not None:
        axis.axhline(scale * panel.reference, color=MUTED, linewidth=1, linestyle=":")
    axis.yaxis.set_major_locator(MaxNLocator(nbins=4, integer=panel.is_count, min_n_ticks=1))
    if panel.is_percent:
        axis.set_ylim(-2, 102)
        axis.set_yticks([0, 25, 50, 75, 100])
    elif panel.from_zero:
        top = axis.get_ylim()[1]
        axis.set_ylim(-0.04 * top, top)  # a little below zero, so that a line at zero is not hidden by the frame
    _label(axis, panel, num_lines=len(spoken))
    return spoken


def _label(axis: Axes, panel: Panel, *, num_lines: int) -> None:
    """The panel's title and, for more than one curve, a legend between title and axes: it never covers a curve."""
    rows = math.ceil(num_lines / 2) if len(panel.lines) > 1 else 0
    axis.set_title(panel.label, loc="left", color=INK, fontsize=11, pad=6 + 15 * rows)
    if rows:
        place = {"loc": "lower left", "bbox_to_anchor": (-0.02, 1), "borderaxespad": 0.1, "ncols": 2}
        axis.legend(frameon=False, labelcolor=INK, fontsize=10, handlelength=2.4, columnspacing=1.2, **place)


def _sentence(line: Line, curve: Points, *, unit: str, x: str) -> str:
    finite = np.isfinite(curve.values)
    steps, values = curve.steps[finite], curve.values[finite]
    first, last = f"{values[0]:.3g}{unit} at {x} {steps[0]:.4g}", f"{values[-1]:.3g}{unit} at {x} {steps[-1]:.4g}"
    return f"{line.label}: {last}." if len(values) == 1 else f"{line.label}: from {first} to {last}."


def _svg(figure: Figure, *, name: str, alt: str) -> str:
    """The figure as an element of an HTML page: unique ids, CSS colours, the page's font, a text alternative."""
    text = io.StringIO()
    figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    svg = text.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r"<style[^>]*>.*?</style>", "", svg, flags=re.DOTALL)  # its selector is *: it would style the page
    svg = re.sub(r'(\bid="|url\(#|href="#)', rf"\1{name}-", svg)
    view_box = re.search(r'viewBox="[^"]*"', svg)
    assert view_box is not None, "matplotlib's SVG has a viewBox"
    svg = f'<svg {view_box.group()} role="img" aria-label="{escape(alt)}">' + svg[svg.index(">") + 1 :]
    svg = svg.replace("xlink:href", "href").replace("'DejaVu Sans'", "system-ui")
    for color, variable in VARIABLES.items():
        svg = svg.replace(color, f"var({variable})")
    return svg
