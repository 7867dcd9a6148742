"""A reward card as one HTML page that needs nothing else: no network, no script, images inside.

All text is escaped. The style is that of report.html.
"""

import math
from collections.abc import Mapping
from html import escape
from pathlib import Path

import numpy as np
from jaxtyping import UInt8

from vla_rlaif.checkpoint import write_whole
from vla_rlaif.report_clips import animation, still
from vla_rlaif.reward_card_data import Bin, Card, Gate, Mistake, Rate

STYLE = Path(__file__).with_name("report.css")
Clips = Mapping[str, UInt8[np.ndarray, "F height width 3"]]  # by episode id
SIDE, LEFT, TOP = 300, 46, 12  # of the diagram, SVG units
VERDICTS = {True: "passed", False: "failed", None: "not measured"}


def write_card_page(card: Card, path: Path, clips: Clips, *, missing: str = "no frames") -> None:
    """``clips`` may lack episodes: their mistakes are listed without pictures, and ``missing`` says why."""
    write_whole(path, render(card, clips, missing=missing).encode())


def render(card: Card, clips: Clips, *, missing: str = "no frames") -> str:
    sections = {
        "Gates": _gates(card),
        "Figures": _figures(card),
        "Calibration": _reliability(card),
        "Success": _success(card),
        "By task": _tasks(card),
        "Worst mistakes": _mistakes(card, clips, missing),
        "Model": _about(card),
    }
    body = "\n".join(f"<section><h2>{title}</h2>\n{content}\n</section>" for title, content in sections.items())
    failed = sum(gate.passed is False for gate in card.gates)
    verdict = f"{failed} of {len(card.gates)} gates failed" if failed else "No gate failed"
    unknown = sum(gate.passed is None for gate in card.gates)
    verdict += f", {unknown} could not be measured." if unknown else "."
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>Reward card</title>\n<style>\n{STYLE.read_text(encoding='ascii')}</style>\n</head>\n"
        f'<body>\n<main>\n<h1>Reward card</h1>\n<p class="muted">{verdict}</p>\n{body}\n</main>\n</body>\n</html>\n'
    )


def _gates(card: Card) -> str:
    rows = "".join(_gate_row(gate) for gate in card.gates)
    head = '<tr><th>gate</th><th>wanted</th><th class="number">value</th><th class="number">verdict</th></tr>'
    note = (
        "A gate is what a reward should pass before a policy is trained on it. How well values grow along a clip is "
        "none: a constant ramp is perfect at it."
    )
    table = f'<table><thead>{head}</thead><tbody>{rows}</tbody></table><p class="muted">{note}</p>'
    return f'<div class="card">{table}</div>'


def _gate_row(gate: Gate) -> str:
    color = {True: "--good", False: "--bad", None: "--muted"}[gate.passed]
    wanted = f"{gate.wanted}. {gate.note}" if gate.note else gate.wanted
    return (
        f'<tr><th scope="row">{escape(gate.name)}</th><td>{escape(wanted)}</td>'
        f'<td class="number">{_number(gate.value)}</td>'
        f'<td class="number" style="color: var({color})">{VERDICTS[gate.passed]}</td></tr>'
    )


def _figures(card: Card) -> str:
    rows = {
        "Pairwise accuracy on held-out pairs": _rate(card.accuracy),
        "Ties among the held-out pairs": str(card.num_ties),
        f"Kendall's tau against {card.tau_against}": _number(card.tau),
        "Success-failure gap, standard deviations": _number(card.success_failure_gap),
        "Spread within start states, of all episodes' one": _number(card.within_group_std),
        "Episodes scored": str(card.num_episodes),
    }
    return _table(rows)


def _reliability(card: Card) -> str:
    if not card.reliability:
        return '<p class="missing">No held-out pair: nothing can be said about the probabilities.</p>'
    text = (
        f"Expected calibration error {_number(card.ece)}. The temperature was chosen on the same pairs, so this is a "
        "lower bound. Each point is the pairs of about one confidence; on the diagonal the model is right as often as "
        "it says."
    )
    return f'<div class="card">{_diagram(card.reliability)}<p class="muted">{text}</p></div>'


def _diagram(bins: tuple[Bin, ...]) -> str:
    """Confidence against accuracy; a point's size is its share of the pairs."""

    def at(confidence: float, accuracy: float) -> tuple[float, float]:
        return LEFT + (confidence - 0.5) * 2 * SIDE, TOP + (1 - accuracy) * SIDE

    most = max(b.num for b in bins)
    lines, labels = [], []
    for tick in (0.0, 0.25, 0.5, 0.75, 1.0):
        y = at(0.5, tick)[1]
        lines.append(f'<line x1="{LEFT}" y1="{y:.0f}" x2="{LEFT + SIDE}" y2="{y:.0f}" stroke="var(--grid)"/>')
        labels.append(f'<text x="{LEFT - 8}" y="{y + 4:.0f}" text-anchor="end">{100 * tick:.0f} %</text>')
        x = LEFT + tick * SIDE
        labels.append(f'<text x="{x:.0f}" y="{TOP + SIDE + 18}" text-anchor="middle">{50 + 50 * tick:.0f} %</text>')
    (x1, y1), (x2, y2) = at(0.5, 0.5), at(1.0, 1.0)
    lines.append(f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" stroke="var(--muted)" stroke-dasharray="4 4"/>')
    points = []
    for b in bins:
        x, y = at(b.confidence, b.accuracy)
        radius = 3 + 9 * math.sqrt(b.num / most)
        title = f"confidence {b.confidence:.2f}, right {b.accuracy:.2f}, {b.num} pairs"
        points.append(
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius:.1f}" fill="var(--s1)" fill-opacity="0.75">'
            f"<title>{title}</title></circle>"
        )
    names = (
        f'<text x="{LEFT + SIDE / 2}" y="{TOP + SIDE + 38}" text-anchor="middle">confidence of the model</text>'
        f'<text x="{LEFT}" y="{TOP + SIDE + 38}" text-anchor="start">right</text>'
    )
    alt = " ".join(f"At confidence {b.confidence:.2f} right in {b.accuracy:.2f} of {b.num} pairs." for b in bins)
    return (
        f'<svg viewBox="0 0 {LEFT + SIDE + 24} {TOP + SIDE + 48}" role="img" aria-label="Reliability. {alt}" '
        f'font-size="12" fill="var(--muted)">{"".join(lines)}{"".join(points)}{"".join(labels)}{names}</svg>'
    )


def _success(card: Card) -> str:
    if math.isnan(card.threshold):
        return f'<p class="missing">The model has no threshold of success. {escape(card.false_positives_note)}</p>'
    rows = {
        "Threshold of the probability of success": _number(card.threshold),
        "Successes above it": _rate(card.recall),
        "False positives, all negatives together": _rate(card.false_positives),
    }
    kinds = {f"Above: {escape(kind)}": _rate(rate) for kind, rate in card.by_kind.items() if kind != "succeeded"}
    return _table(rows | kinds | {"How false positives are judged": escape(card.false_positives_note)})


def _tasks(card: Card) -> str:
    head = (
        '<tr><th>instruction</th><th class="number">accuracy</th><th class="number">gap</th>'
        '<th class="number">episodes</th></tr>'
    )
    rows = "".join(
        f'<tr><th scope="row">{escape(task.instruction)}</th><td class="number">{_rate(task.accuracy)}</td>'
        f'<td class="number">{_number(task.gap)}</td><td class="number">{task.episodes}</td></tr>'
        for task in card.tasks
    )
    note = "Accuracy is of held-out pairs whose two episodes both have the instruction."
    table = f'<table><thead>{head}</thead><tbody>{rows}</tbody></table><p class="muted">{note}</p>'
    return f'<div class="card">{table}</div>'


def _mistakes(card: Card, clips: Clips, missing: str) -> str:
    if not card.mistakes:
        return "<p>None: every decided held-out pair is ordered as it was labelled.</p>"
    parts = [_mistake(mistake, clips, missing) for mistake in card.mistakes]
    note = "The held-out pairs that the model is surest of and wrong about: it, or the label. One frame a decision."
    return f'<p class="muted">{note}</p><div class="grid">{"".join(parts)}</div>'


def _mistake(mistake: Mistake, clips: Clips, missing: str) -> str:
    better, worse = (mistake.first, mistake.second) if mistake.label > 0.5 else (mistake.second, mistake.first)
    sure = mistake.p_first if mistake.label < 0.5 else 1 - mistake.p_first
    sides = "".join(
        _clip(clips, episode, outcome, text, missing)
        for episode, outcome, text in (
            (better, "win", "labelled better"),
            (worse, "loss", f"{100 * sure:.0f} % sure that this is better"),
        )
    )
    title = f"{escape(better)} over {escape(worse)}, label {mistake.label:.2g}"
    return f'<div class="card"><h3>{title}</h3><div class="pair">{sides}</div></div>'


def _clip(clips: Clips, episode: str, outcome: str, text: str, missing: str) -> str:
    caption = f"<figcaption>{escape(episode)}: <b>{text}</b></figcaption>"
    if episode not in clips:
        return f'<figure class="{outcome}"><p class="missing">{escape(missing)}</p>{caption}</figure>'
    frames = clips[episode]
    picture = (
        f'<picture><source media="(prefers-reduced-motion: reduce)" srcset="{still(frames[-1])}">'
        f'<img src="{animation(frames)}" alt="{escape(f"Episode {episode}: {text}")}" width="{frames.shape[2]}" '
        f'height="{frames.shape[1]}"></picture>'
    )
    return f'<figure class="{outcome}">{picture}{caption}</figure>'


def _about(card: Card) -> str:
    return _table({escape(name): escape(value) for name, value in card.about.items()})


def _table(rows: Mapping[str, str]) -> str:
    """Names and values are HTML already."""
    cells = "".join(f'<tr><th scope="row">{name}</th><td>{value}</td></tr>' for name, value in rows.items())
    return f'<div class="card"><table class="settings"><tbody>{cells}</tbody></table></div>'


def _rate(rate: Rate) -> str:
    if math.isnan(rate.rate):
        return "not measured"
    return f"{100 * rate.rate:.1f} % [{100 * rate.low:.1f} %, {100 * rate.high:.1f} %] of {rate.num}"


def _number(value: float) -> str:
    return "not measured" if math.isnan(value) else f"{value:.3g}"
