"""Episodes, groups and tables as a notebook shows them: HTML that needs nothing else, light and dark.

Axes as in source.py.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

import numpy as np
from jaxtyping import Int

from vla_rlaif.inspect.source import Episode, Source
from vla_rlaif.inspect.video import FPS
from vla_rlaif.report_clips import animation

WIDTH, HEIGHT, ROOM = 320, 96, 34  # of a small chart, pixels; the room left of it is for numbers
COLORS = ("#1d5fa8", "#c2571a", "#2f8a57", "#8a4fb0", "#b8860b", "#c23b6f", "#2a8f9e", "#6b7480")
MOST_LINES = len(COLORS)
LEFT, DIM, SMALL = "text-align:left", "opacity:.7", "font-size:.85em"
GOOD, BAD, UNKNOWN = "#1c7a43", "#b23a22", "#8591a0"
TABLE_COLUMNS = ("id", "step", "instruction", "success", "reward", "advantage", "truth", "disagreement", "spread")


@dataclass(frozen=True)
class Shown:
    """What a cell ends with to show it."""

    html: str

    def _repr_html_(self) -> str:
        return self.html


def show_episode(episode: Episode, *, size: int = 256) -> Shown:
    """Its cameras, ``size`` pixels wide, and its actions, log-probs and progress by decision."""
    numbers = episode.numbers
    charts = [
        _chart("progress", {} if numbers.progress is None else {"": numbers.progress}),
        _chart("action, first of each chunk", _dims(numbers.action[:, 0] if numbers.action.shape[1] else None)),
        _chart("log p, nats", {"": numbers.logp.sum(axis=1)} if numbers.logp.shape[1] else {}),
    ]
    clips = "".join(_clip(frames, camera, size) for camera, frames in episode.frames.items())
    return Shown(
        f'<div style="display:flex;flex-wrap:wrap;gap:16px;align-items:flex-start">'
        f"<div>{_facts(episode)}</div>{clips}<div>{''.join(charts)}</div></div>"
    )


def show_group(group: Sequence[Episode], *, size: int = 160) -> Shown:
    """Rollouts from one start side by side, with their rewards and advantages. All clips last equally long, so they
    stay in step."""
    first = group[0].about
    num = max(len(frames) for episode in group for frames in episode.frames.values())
    cards = []
    for episode in group:
        held = {c: frames[np.minimum(np.arange(num), len(frames) - 1)] for c, frames in episode.frames.items()}
        clips = "".join(_clip(frames, camera, size) for camera, frames in held.items())
        cards.append(
            f'<div style="border-top:4px solid {_color(episode)};padding:6px 0">'
            f'<div style="display:flex;gap:6px">{clips}</div>{_facts(episode, short=True)}</div>'
        )
    title = (
        f"<p><b>{escape(first.instruction[0])}</b><br>start seed {int(first.seed[0])}, step {int(first.step[0])}</p>"
    )
    return Shown(f'{title}<div style="display:flex;flex-wrap:wrap;gap:14px">{"".join(cards)}</div>')


def show_table(source: Source, rows: Int[np.ndarray, " M"], *, most: int = 20) -> Shown:
    """The first ``most`` of some episodes."""
    if not len(rows):
        return Shown(f"<p>None of the {len(source.table.id)} episodes of {escape(str(source.path))} passes.</p>")
    table = source.table
    part = table.taken(rows[:most])
    columns = {**vars(part), "disagreement": table.disagreement[rows[:most]], "spread": table.spread[rows[:most]]}
    head = "".join(f"<th>{name}</th>" for name in TABLE_COLUMNS)
    lines = zip(*(columns[name] for name in TABLE_COLUMNS), strict=True)
    body = "".join(f"<tr>{''.join(f'<td>{escape(_say(value))}</td>' for value in line)}</tr>" for line in lines)
    more = f"<p>and {len(rows) - most} more</p>" if len(rows) > most else ""
    return Shown(f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{more}")


def _say(value: object) -> str:
    if isinstance(value, float | np.floating):
        return "-" if math.isnan(float(value)) else f"{float(value):.3g}"
    return str(value)


def _color(episode: Episode) -> str:
    success = float(episode.about.success[0])
    return GOOD if success == 1 else BAD if success == 0 else UNKNOWN


def _facts(episode: Episode, *, short: bool = False) -> str:
    about = episode.about
    success = float(about.success[0])
    named = {
        "episode": episode.id,
        "outcome": "success" if success == 1 else "failure" if success == 0 else "unknown",
        "reward": about.reward[0],
        "advantage": about.advantage[0],
        "truth": about.truth[0],
    }
    if not short:
        named |= {
            "task": about.instruction[0],
            "step": about.step[0],
            "start seed": about.seed[0],
            "weights version": about.version[0],
            "decisions": about.decisions[0],
        }
    lines = "".join(
        f'<tr><td style="{LEFT};{DIM}">{name}</td><td style="{LEFT}">{escape(_say(value))}</td></tr>'
        for name, value in named.items()
    )
    return f"<table>{lines}</table>"


def _clip(frames: np.ndarray, camera: str, size: int) -> str:
    alt = escape(f"camera {camera}, {len(frames)} frames, {FPS:g} a second")
    return (
        f'<figure style="margin:0"><img src="{animation(frames)}" alt="{alt}" width="{size}" '
        f'style="image-rendering:pixelated"><figcaption style="{DIM};{SMALL}">{escape(camera)}</figcaption></figure>'
    )


def _dims(values: np.ndarray | None) -> dict[str, np.ndarray]:
    if values is None:
        return {}
    return {f"dim {dim}": values[:, dim] for dim in range(min(values.shape[1], MOST_LINES))}


def _chart(title: str, lines: dict[str, np.ndarray]) -> str:
    """Lines over decisions with the ends of their range; nothing without numbers."""
    known = [values for values in lines.values() if np.isfinite(values).any()]
    if not known:
        return ""
    low, high = float(min(np.nanmin(v) for v in known)), float(max(np.nanmax(v) for v in known))
    span, longest = (high - low) or 1.0, max(len(values) for values in known)
    paths = []
    for values, color in zip(lines.values(), COLORS, strict=False):
        x = ROOM + (WIDTH - ROOM - 4) * np.arange(len(values)) / max(1, longest - 1)
        y = 4 + (HEIGHT - 8) * (high - values) / span
        points = " ".join(f"{a:.1f},{b:.1f}" for a, b in zip(x, y, strict=True) if math.isfinite(b))
        paths.append(f'<polyline points="{points}" fill="none" stroke="{color}" stroke-width="1.6"/>')
    legend = " ".join(
        f'<span style="color:{color}">{escape(name)}</span>' for name, color in zip(lines, COLORS, strict=False) if name
    )
    numbers = "".join(
        f'<text x="{ROOM - 4}" y="{y}" text-anchor="end" font-size="10" fill="currentColor">{value:.3g}</text>'
        for y, value in ((12, high), (HEIGHT - 3, low))
    )
    return (
        f'<div style="{SMALL}">{escape(title)} {legend}</div>'
        f'<svg width="{WIDTH}" height="{HEIGHT}" role="img" aria-label="{escape(title)}">'
        f"{numbers}{''.join(paths)}</svg>"
    )
