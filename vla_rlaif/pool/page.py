"""Simulations as one HTML page that needs nothing else: no network, no script. All text is escaped."""

from collections.abc import Sequence
from html import escape
from pathlib import Path

from vla_rlaif.pool.charts import inline_svg, simulation_strip
from vla_rlaif.pool.clock import DAY, say_time, zone_of
from vla_rlaif.pool.simulate import Simulation
from vla_rlaif.pool.summary import Table, headline, notes, role_table, state_table, window_table
from vla_rlaif.pool.trace import NodeDown

STYLE = Path(__file__).parents[1] / "report.css"
OWN_STYLE = """main { max-width: 1500px; }
figure.strips { margin: 0; overflow-x: auto; }
figure.strips svg { max-width: none; min-width: 720px; }
table { margin: 0 0 20px; }
.beside { display: grid; gap: 16px; grid-template-columns: repeat(auto-fit, minmax(min(100%, 680px), 1fr)); }
.scroll { overflow-x: auto; }
"""


def write_page(path: Path, sims: Sequence[tuple[str, Simulation]], *, sources: Sequence[str]) -> None:
    """Write simulations side by side, each under its name. ``sources`` are their YAML texts."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(path.name + ".tmp")  # a reader who reloads meanwhile never sees half a page
    draft.write_text(render(sims, sources=sources), encoding="utf-8")
    draft.replace(path)


def render(sims: Sequence[tuple[str, Simulation]], *, sources: Sequence[str]) -> str:
    """The page as text."""
    title = "GPU pool: " + " and ".join(name for name, _ in sims)
    first = sims[0][1]
    zone = zone_of(first.config.timezone)
    days = (first.end - first.start) / DAY
    failures = sum(isinstance(event, NodeDown) for _, event in first.events)
    about = (
        f"{days:g} days from {say_time(first.start, zone, with_zone=True)}, {first.config.pool.num_gpus} GPUs, "
        f"{failures} node failures. Simulated by the planner that runs the pool."
    )
    strips = [simulation_strip(sim, title=name) for name, sim in sims]
    alt = "; ".join(f"{name}: " + ", ".join(f"{k} {v}" for k, v in headline(sim)) for name, sim in sims)
    sections = {
        "At a glance": _beside([_glance(name, sim) for name, sim in sims]),
        "Days": f'<figure class="card strips">{inline_svg(strips, name="strips", alt=alt)}</figure>',
        "In figures": _beside([_figures(name, sim) for name, sim in sims]),
        "What went wrong": _beside([_notes(name, sim) for name, sim in sims]),
        "Calendars": "".join(
            f"<details><summary>{escape(name)}</summary><pre>{escape(text)}</pre></details>"
            for (name, _), text in zip(sims, sources, strict=True)
        ),
    }
    body = "\n".join(f"<section><h2>{name}</h2>\n{content}\n</section>" for name, content in sections.items())
    style = STYLE.read_text(encoding="ascii") + OWN_STYLE
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>\n{style}</style>\n</head>\n<body>\n<main>\n<h1>{escape(title)}</h1>\n"
        f'<p class="muted">{escape(about)}</p>\n{body}\n</main>\n</body>\n</html>\n'
    )


def _beside(cards: Sequence[str]) -> str:
    return f'<div class="beside">{"".join(cards)}</div>'


def _glance(name: str, sim: Simulation) -> str:
    cells = "".join(f"<div><dt>{escape(k)}</dt><dd>{escape(v)}</dd></div>" for k, v in headline(sim))
    return f'<div class="card"><h3>{escape(name)}</h3><dl class="rates">{cells}</dl></div>'


def _figures(name: str, sim: Simulation) -> str:
    tables = "".join(_table(table) for table in (role_table(sim), state_table(sim), window_table(sim)))
    return f'<div class="card scroll"><h3>{escape(name)}</h3>{tables}</div>'


def _table(table: Table) -> str:
    def cell(tag: str, column: int, text: str) -> str:
        kind = ' class="number"' if column in table.numbers else ""
        return f"<{tag}{kind}>{escape(text)}</{tag}>"

    head = "".join(cell("th", i, text) for i, text in enumerate(table.columns))
    rows = "".join("<tr>" + "".join(cell("td", i, text) for i, text in enumerate(row)) + "</tr>" for row in table.rows)
    return f"<h3>{escape(table.title)}</h3><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"


def _notes(name: str, sim: Simulation) -> str:
    lines = notes(sim)
    text = "".join(f"<li>{escape(line)}</li>" for line in lines)
    shown = f"<ul>{text}</ul>" if lines else '<p class="missing">Nothing: no role was below its minimum.</p>'
    return f'<div class="card"><h3>{escape(name)}</h3>{shown}</div>'
