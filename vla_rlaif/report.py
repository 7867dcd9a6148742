"""A run as one HTML page that needs nothing else: no network, no script, images inside. ``write_report`` is the entry.

Every section is always there; a piece the run has not written is said in words. All text from the run is escaped.
"""

import shlex
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from vla_rlaif import report_training
from vla_rlaif.report_charts import interval_bars
from vla_rlaif.report_clips import animation, still
from vla_rlaif.report_data import RunRecord, load_run

STYLE = Path(__file__).with_name("report.css")


def write_report(run_dir: Path) -> Path:
    """Write ``report.html`` into a run directory, finished or not. Returns its path."""
    path = run_dir / "report.html"
    page = render(load_run(run_dir))
    draft = path.with_name(path.name + ".tmp")  # a reader who reloads meanwhile never sees half a page
    draft.write_text(page, encoding="utf-8")
    draft.replace(path)
    return path


def render(run: RunRecord) -> str:
    """The page as text."""
    name = escape(str(run.setting("name") or run.run_dir.name))
    sections = {
        "Success before and after": _headline(run),
        "Clips": _clips(run),
        "Training": report_training.charts(run),
        "Time": report_training.phases(run),
        "Setting": _settings(run),
    }
    if (run.run_dir / "reward_card.html").exists():
        sections["Reward"] = '<p><a href="reward_card.html">The card of the final reward model</a></p>'
    sections["Look inside"] = _look_inside(run)
    body = "\n".join(f"<section><h2>{title}</h2>\n{content}\n</section>" for title, content in sections.items())
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{name}: training report</title>\n<style>\n{STYLE.read_text(encoding='ascii')}</style>\n</head>\n"
        f'<body>\n<main>\n<h1>{name}</h1>\n<p class="muted">{_status(run)}</p>\n{body}\n</main>\n</body>\n</html>\n'
    )


def percent(rate: float) -> str:
    return f"{100 * rate:.1f} %"


def missing(text: str) -> str:
    return f'<p class="missing">{text}</p>'


def difference(
    before: float, after: float, before_interval: tuple[float, float], after_interval: tuple[float, float]
) -> tuple[float, float]:
    """95 % interval of ``after - before`` from their intervals (Newcombe 1998, method 10, independent samples)."""
    low = ((after - after_interval[0]) ** 2 + (before_interval[1] - before) ** 2) ** 0.5
    high = ((after_interval[1] - after) ** 2 + (before - before_interval[0]) ** 2) ** 0.5
    return after - before - low, after - before + high


def _status(run: RunRecord) -> str:
    where = escape(str(run.run_dir))
    if run.result is not None:
        minutes = run.result.get("minutes")
        return f"Finished{f' after {minutes:.1f} minutes' if minutes is not None else ''}. Run directory: {where}."
    if not run.metrics:
        return f"Not finished, and no training step is on record: still starting, or crashed. Run directory: {where}."
    last = run.metrics[-1]
    total = run.setting("loop", "steps")
    planned = f", {total} steps are planned" if total else ""
    minutes = f" at {last['minutes']:.1f} minutes" if last.get("minutes") is not None else ""
    progress = f"Last on record: step {last['step']}{minutes}{planned}."
    return f"Not finished: still running, or crashed. {progress} Run directory: {where}."


def _headline(run: RunRecord) -> str:
    result = run.result or {}
    bars: list[tuple[str, float, tuple[float, float] | None]] = []
    cells = []
    for label in ("before", "after"):
        rate, interval = result.get(f"success_{label}"), _interval(result.get(f"ci95_{label}"))
        if rate is None:
            cells.append(f"<div><dt>{label} training</dt><dd>-<small>not measured yet</small></dd></div>")
            continue
        rate = float(rate)
        bars.append((label, rate, interval))
        ends = f"95 % interval {percent(interval[0])} to {percent(interval[1])}" if interval else "no interval recorded"
        cells.append(f"<div><dt>{label} training</dt><dd>{percent(rate)}<small>{ends}</small></dd></div>")
    text = f'<dl class="rates">{"".join(cells)}</dl>{_verdict(run, bars)}'
    if not bars:
        return f'<div class="card">{text}</div>'
    alt = "Success rate. " + " ".join(f"{label} training: {percent(rate)}." for label, rate, _ in bars)
    return f'<div class="card headline"><div>{text}</div>{interval_bars("headline", bars, alt=alt)}</div>'


def _verdict(run: RunRecord, bars: Sequence[tuple[str, float, tuple[float, float] | None]]) -> str:
    """What the two rates allow to say, and what they rest on."""
    if len(bars) < 2:
        return missing("There is no before and after to compare: result.json has not both success rates (yet).")
    (_, before, before_interval), (_, after, after_interval) = bars
    episodes = (run.result or {}).get("episodes")
    count = f"{episodes} episodes each" if episodes is not None else "an unrecorded number of episodes"
    basis = f"Success is the simulator's, in {count}."
    if run.setting("reward", "type") == "success":
        basis += " It was the reward too: this run is a baseline without a learned reward."
    if before_interval is None or after_interval is None:
        return f"<p>Change {_points(after - before)}.</p>" + missing(f"No interval is recorded for it. {basis}")
    low, high = difference(before, after, before_interval, after_interval)
    sure = "is an improvement" if low > 0 else "is a loss" if high < 0 else "may be chance: the interval includes zero"
    return (
        f"<p>Change {_points(after - before)} (95 % interval {100 * low:+.1f} to {100 * high:+.1f}): it {sure}.</p>"
        f'<p class="muted">{basis} The interval of the change takes the two sets of episodes as independent.</p>'
    )


def _points(change: float) -> str:
    return f"{100 * change:+.1f} points"


def _interval(ends: Sequence[Any] | None) -> tuple[float, float] | None:
    return None if ends is None else (float(ends[0]), float(ends[1]))


def _clips(run: RunRecord) -> str:
    if run.clips is None:
        return missing("No clips: clips.npz is written by the final evaluation (evaluate.clips is how many).")
    cards = []
    for k, instruction in enumerate(run.clips.instruction):
        sides = []
        for label, frames, won in (
            ("Before", run.clips.before[k], run.clips.before_success[k]),
            ("After", run.clips.after[k], run.clips.after_success[k]),
        ):
            outcome = "win" if won else "loss"
            alt = escape(f"{label} training, start state {k + 1}: {outcome}. Instruction: {instruction}")
            sides.append(
                f'<figure class="{outcome}"><picture>'
                f'<source media="(prefers-reduced-motion: reduce)" srcset="{still(frames[-1])}">'
                f'<img src="{animation(frames)}" alt="{alt}" width="{frames.shape[2]}" height="{frames.shape[1]}">'
                f"</picture><figcaption>{label}: <b>{outcome}</b></figcaption></figure>"
            )
        cards.append(f'<div class="card"><h3>{escape(instruction)}</h3><div class="pair">{"".join(sides)}</div></div>')
    note = "Each pair is the same start state and instruction, before and after training, one frame a decision."
    wins = f"Wins here: {run.clips.before_success.sum()} before, {run.clips.after_success.sum()} after,"
    note += f" {wins} of {len(run.clips.instruction)}; the rates above are the measurement, these are examples."
    return f'<p class="muted">{note}</p><div class="grid">{"".join(cards)}</div>'


def _settings(run: RunRecord) -> str:
    result = run.result or {}
    last = run.metrics[-1] if run.metrics else {}
    labels = result.get("labels", next((r["labels/total"] for r in reversed(run.metrics) if "labels/total" in r), None))
    minutes, memory = result.get("minutes", last.get("minutes")), result.get("peak_memory_gb")
    versions = result.get("versions") or {}
    rows = {
        "Task": result.get("task", run.setting("env", "task") or run.setting("env", "type")),
        "Policy": _policy(run),
        "Reward": run.setting("reward", "type"),
        "Labels used": labels,
        "Minutes": None if minutes is None else f"{minutes:.1f}",
        "Seed": result.get("seed", run.setting("seed")),
        "Training steps": f"{len(run.metrics)} on record, {run.setting('loop', 'steps') or 'unknown'} planned",
        "Best step": result.get("best_step"),
        "Evaluation episodes": result.get("episodes"),
        "Peak memory": None if memory is None else f"{memory:.2f} GB",
        "Versions": ", ".join(f"{name} {version}" for name, version in versions.items()) or None,
    }
    cells = "".join(
        f'<tr><th scope="row">{name}</th><td>{"not recorded" if value is None else escape(str(value))}</td></tr>'
        for name, value in rows.items()
    )
    table = f'<div class="card"><table class="settings"><tbody>{cells}</tbody></table>'
    if run.config is None:
        return table + missing("config.yaml is missing: the settings of this run are not known.") + "</div>"
    text = escape((run.run_dir / "config.yaml").read_text(encoding="utf-8"))
    return f"{table}<details><summary>The whole config</summary><pre>{text}</pre></details></div>"


def _look_inside(run: RunRecord) -> str:
    """Where to go on: what this page has no room for."""
    where = escape(shlex.quote(str(run.run_dir)))
    return (
        '<div class="card"><p>Episodes and groups with their rewards, labels and all metrics, on a page:</p>'
        f"<pre>.venv/bin/vla-rlaif inspect {where}</pre>"
        "<p>The same in a notebook, whose first cell names the run:</p>"
        "<pre>.venv/bin/python -m pip install jupyterlab\n"
        ".venv/bin/jupyter lab notebooks/01_inspect_trajectories.ipynb</pre></div>"
    )


def _policy(run: RunRecord) -> str | None:
    """The kind of policy and its sizes: the parameter count if recorded, else the integers of its config."""
    kind = run.setting("policy", "type")
    if kind is None:
        return None
    parameters = (run.result or {}).get("policy_parameters")
    sizes = {k: v for k, v in (run.setting("policy") or {}).items() if type(v) is int}
    details = [f"{parameters:,} parameters"] if parameters is not None else []
    details += [f"{name} {size}" for name, size in sizes.items()]
    return f"{kind}: {', '.join(details)}" if details else str(kind)
