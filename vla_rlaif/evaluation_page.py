"""An evaluation as one HTML page that needs nothing else, and as JSON. All text from outside is escaped."""

from collections.abc import Mapping
from html import escape
from typing import Any

import numpy as np
from jaxtyping import UInt8

from vla_rlaif.evaluation import Evaluated, Footage, Side, rate_of
from vla_rlaif.paired import Comparison, compare
from vla_rlaif.report import STYLE, missing, percent
from vla_rlaif.report_charts import interval_bars
from vla_rlaif.report_clips import animation, still

FORMAT = 1
MAX_FRAMES = 40  # of a clip
MAX_SIDE = 160  # pixels of a clip


def as_json(found: Evaluated) -> dict[str, Any]:
    """All that was measured. ``success``, ``ci95`` and ``outcomes`` are side A's; outcomes are in the order of the
    start states, one list a repetition, or one list where there is one repetition."""
    one = len(found.a.outcomes) == 1
    outcomes = found.a.outcomes.tolist()
    values: dict[str, Any] = {
        "format": FORMAT,
        **_rate(found.a),
        "episodes": len(found.starts.seed),
        "outcomes": outcomes[0] if one else outcomes,
        "noise_seeds": list(found.noise_seeds),
        "start_seeds": found.starts.seed.tolist(),
        "instruction": list(found.instruction),
        "a": _side(found.a),
        "tasks": _tasks(found),
    }
    comparison = found.comparison
    if found.b is not None and comparison is not None:
        values |= {"b": _side(found.b), "comparison": _compared(comparison)}
    return values


def _rate(side: Side) -> dict[str, Any]:
    rate = side.rate
    return {"success": rate.success, "ci95": [rate.low, rate.high], "interval": rate.method}


def _side(side: Side) -> dict[str, Any]:
    seeds = len(side.outcomes) // len(side.sources)
    policies = []
    for number, source in enumerate(side.sources):
        own = rate_of(side.outcomes[number * seeds : (number + 1) * seeds])
        ends = [own.low, own.high]
        policies.append({"source": source.name, "kind": source.kind, "success": own.success, "ci95": ends})
    return {
        **_rate(side),
        "policies": policies,
        "outcomes": side.outcomes.tolist(),
        "env_steps": side.env_steps.tolist(),
        "broken": side.broken,
    }


def _compared(c: Comparison) -> dict[str, Any]:
    return {
        "difference": c.difference,
        "ci95": [c.low, c.high],
        "a_better": c.better,
        "b_better": c.worse,
        "p_value": c.p_value,
    }


def _tasks(found: Evaluated) -> list[dict[str, Any]]:
    rows = []
    for task in found.tasks:
        own = found.a.outcomes[:, task.rows]
        rate = rate_of(own)
        row: dict[str, Any] = {"task": task.instruction, "episodes": len(task.rows)}
        row["a"] = {"success": rate.success, "ci95": [rate.low, rate.high]}
        if found.b is not None:
            other = found.b.outcomes[:, task.rows]
            against = rate_of(other)
            row["b"] = {"success": against.success, "ci95": [against.low, against.high]}
            row["comparison"] = _compared(compare(own, other))
        rows.append(row)
    return rows


def spoken(found: Evaluated) -> list[str]:
    """What the command prints."""
    lines = [f"{_said(found.a)}, {len(found.starts.seed)} episodes{_repeated(found.a)}{_names(found.a)}"]
    comparison = found.comparison
    if found.b is not None and comparison is not None:
        lines = [f"A: {lines[0]}", f"B: {_said(found.b)}{_repeated(found.b)}{_names(found.b)}", verdict(comparison)]
    broken = found.a.broken + (found.b.broken if found.b else 0)
    if broken:
        lines.append(f"{broken} episodes broke in the simulation; they count as failures")
    if found.num_repeats:
        lines.append(
            f"caution: the env has fewer start states than episodes, and goes through them {found.num_repeats + 1} "
            "times; intervals take episodes as independent"
        )
    if len(found.tasks) > 1:
        lines += [_task_line(row) for row in _tasks(found)]
    return lines


def verdict(c: Comparison) -> str:
    sure = "A is better" if c.low > 0 else "B is better" if c.high < 0 else "may be chance"
    points = f"{100 * c.difference:+.1f} points, 95 % interval [{100 * c.low:+.1f}, {100 * c.high:+.1f}]"
    counts = f"A is better on {c.better} start states, B on {c.worse}, exact p = {c.p_value:.2g}"
    return f"A - B: {points}; {counts}: {sure}"


def _said(side: Side) -> str:
    rate = side.rate
    return f"success {rate.success:.3f}, 95 % interval [{rate.low:.3f}, {rate.high:.3f}]"


def _repeated(side: Side) -> str:
    return "" if len(side.outcomes) == 1 else f" x {len(side.outcomes)} repetitions"


def _names(side: Side) -> str:
    return f" ({', '.join(source.name for source in side.sources)})"


def _task_line(row: Mapping[str, Any]) -> str:
    text = f"  {row['task']}: {_cell(row['a'])} of {row['episodes']}"
    if "b" in row:
        text += f", against {_cell(row['b'])}; p = {row['comparison']['p_value']:.2g}"
    return text


def _cell(rate: Mapping[str, Any]) -> str:
    low, high = rate["ci95"]
    return f"{rate['success']:.3f} [{low:.3f}, {high:.3f}]"


def page(found: Evaluated, footage: Footage | None, *, clips: int, about: Mapping[str, str]) -> str:
    """The page as text; ``clips`` start states at most of each kind, ``about`` are rows of its last table."""
    sections = {"Success": _headline(found), "Tasks": _table(found)}
    if footage is not None:
        sections |= _clips(found, footage, clips)
    cells = "".join(f'<tr><th scope="row">{escape(k)}</th><td>{escape(v)}</td></tr>' for k, v in about.items())
    sections["Setting"] = f'<div class="card"><table class="settings"><tbody>{cells}</tbody></table></div>'
    body = "\n".join(f"<section><h2>{title}</h2>\n{content}\n</section>" for title, content in sections.items())
    title = escape(found.a.sources[0].name + (f" against {found.b.sources[0].name}" if found.b else ""))
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{title}: evaluation</title>\n<style>\n{STYLE.read_text(encoding='ascii')}</style>\n</head>\n"
        f"<body>\n<main>\n<h1>{title}</h1>\n{body}\n</main>\n</body>\n</html>\n"
    )


def _sides(found: Evaluated) -> list[tuple[str, Side]]:
    return [("A", found.a)] if found.b is None else [("A", found.a), ("B", found.b)]


def _headline(found: Evaluated) -> str:
    cells, bars = [], []
    for label, side in _sides(found):
        rate = side.rate
        name = escape(", ".join(source.name for source in side.sources))
        ends = f"{percent(rate.low)} to {percent(rate.high)} ({rate.method})"
        cells.append(f"<div><dt>{label}: {name}</dt><dd>{percent(rate.success)}<small>{ends}</small></dd></div>")
        bars.append((label, rate.success, (rate.low, rate.high)))
    num, comparison = len(found.starts.seed), found.comparison
    repeated = "" if len(found.a.outcomes) == 1 else f", {len(found.a.outcomes)} repetitions of each"
    basis = f"{num} start states, each played once{repeated}; success is the simulator's."
    told = f'<dl class="rates">{"".join(cells)}</dl>'
    if comparison is not None:
        told += f"<p>{escape(verdict(comparison))}.</p>"
    told += f'<p class="muted">{basis}</p>'
    alt = " ".join(f"{label}: {percent(rate)}." for label, rate, _ in bars)
    return f'<div class="card headline"><div>{told}</div>{interval_bars("success", bars, alt=alt)}</div>'


def _table(found: Evaluated) -> str:
    head = ["Task", "Episodes", "A", *(["B", "A - B, points", "p"] if found.b else [])]
    rows = []
    for row in _tasks(found):
        cells = [row["episodes"], _cell(row["a"])]
        if found.b is not None:
            c = row["comparison"]
            low, high = c["ci95"]
            points = f"{100 * c['difference']:+.1f} [{100 * low:+.1f}, {100 * high:+.1f}]"
            cells += [_cell(row["b"]), points, f"{c['p_value']:.2g}"]
        tail = "".join(f'<td class="number">{cell}</td>' for cell in cells)
        rows.append(f'<tr><th scope="row">{escape(row["task"])}</th>{tail}</tr>')
    columns = "".join(f'<th{"" if k == 0 else " class=number"} scope="col">{name}</th>' for k, name in enumerate(head))
    return (
        f'<div class="card scroll" tabindex="0"><table><thead><tr>{columns}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div>"
        '<p class="muted">Rates with 95 % intervals. With many tasks some p-values are small by chance: one in twenty '
        "below 0.05.</p>"
    )


def chosen_clips(found: Evaluated, num: int) -> dict[str, list[int]]:
    """Start states to look at: of two sides where one wins and the other does not, of one its wins and losses. By the
    first repetition of each, in the order of the start states."""
    a = found.a.outcomes[0]
    if found.b is None:
        kinds = {"Wins": a, "Losses": ~a}
    else:
        b = found.b.outcomes[0]
        kinds = {"A wins, B loses": a & ~b, "B wins, A loses": b & ~a}
    return {title: np.flatnonzero(rows)[:num].tolist() for title, rows in kinds.items()}


def _clips(found: Evaluated, footage: Footage, num: int) -> dict[str, str]:
    sections = {}
    for title, rows in chosen_clips(found, num).items():
        cards = [card for row in rows if (card := _card(found, footage, row))]
        empty = missing("There is no such episode." if not rows else "The env has no camera.")
        sections[title] = f'<div class="grid">{"".join(cards)}</div>' if cards else empty
    return sections


def _card(found: Evaluated, footage: Footage, row: int) -> str:
    sides = []
    for label, side in _sides(found):
        frames = footage.frames(label.lower(), row)
        if frames is None:
            return ""
        outcome, frames = "win" if side.outcomes[0, row] else "loss", shortened(frames)
        alt = escape(f"{label}, start state {row}: {outcome}. Instruction: {found.instruction[row]}")
        sides.append(
            f'<figure class="{outcome}"><picture>'
            f'<source media="(prefers-reduced-motion: reduce)" srcset="{still(frames[-1])}">'
            f'<img src="{animation(frames)}" alt="{alt}" width="{frames.shape[2]}" height="{frames.shape[1]}">'
            f"</picture><figcaption>{label}: <b>{outcome}</b></figcaption></figure>"
        )
    heading = f"{escape(found.instruction[row])} <span class=muted>start state {row}</span>"
    return f'<div class="card"><h3>{heading}</h3><div class="pair">{"".join(sides)}</div></div>'


def shortened(frames: UInt8[np.ndarray, "F height width 3"]) -> UInt8[np.ndarray, "G h w 3"]:
    """At most MAX_FRAMES of them, the last one included, of at most MAX_SIDE pixels."""
    chosen = np.unique(np.linspace(0, len(frames) - 1, min(len(frames), MAX_FRAMES)).round().astype(int))
    stride = -(-max(frames.shape[1:3]) // MAX_SIDE)
    return frames[chosen][:, ::stride, ::stride]
