"""What the terminal shows: tables, and strips of half hours."""

import rich.box
import rich.table
from rich.console import Console
from rich.text import Text

from vla_rlaif.pool.clock import DAY, MINUTE, Micros, resolve, to_local
from vla_rlaif.pool.config import PoolConfig
from vla_rlaif.pool.goals import Outlook
from vla_rlaif.pool.staleness import Forecast
from vla_rlaif.pool.summary import Table

CELL = 30 * MINUTE
LEVELS = " " + "".join(chr(0x2581 + i) for i in range(8))  # nothing, and eighths of a block
COLORS = ("blue", "dark_orange", "green", "magenta", "yellow", "red", "cyan", "white")


def show(table: Table, console: Console) -> None:
    shown = rich.table.Table(title=table.title, title_justify="left", title_style="bold", box=rich.box.SIMPLE_HEAD)
    for i, column in enumerate(table.columns):
        shown.add_column(column, justify="right" if i in table.numbers else "left", overflow="fold")
    for row in table.rows:
        shown.add_row(*map(Text, row))
    console.print(shown)


def strips(config: PoolConfig, outlook: Outlook, forecasts: list[Forecast], *, start: Micros) -> list[Text]:
    """One block of lines a day: the window of each half hour, and the GPUs of each role as bars."""
    zone, end = outlook.timeline.zone, forecasts[-1].interval.end
    width = max(map(len, (*config.roles, "window")))
    lines = [_ruler(width)]
    day = to_local(start, zone).replace(hour=0, minute=0, second=0, microsecond=0, tzinfo=None)
    while (midnight := resolve(day, zone)) < min(end, start + 8 * DAY):
        day = to_local(midnight + 36 * 60 * MINUTE, zone).replace(hour=0, minute=0, second=0, tzinfo=None)
        cells = range(midnight, resolve(day, zone), CELL)
        found = [_at(forecasts, at, start, end) for at in cells]
        head = to_local(midnight, zone).strftime("%a %d %b ")
        hours = len(cells) / 2
        lines.append(Text(head + " " * (width - 5) + _names(found)) + Text("" if hours == 24 else f" {hours:g} h"))
        for color, role in zip(COLORS, config.ranked, strict=False):
            bars = "".join(_bar(entry, role, config.pool.num_gpus) for entry in found)
            lines.append(Text(f"{'':4} {role:>{width}} ") + Text(bars, style=color))
    return lines


def _ruler(width: int) -> Text:
    marks = "".join(f"{hour:<4}" for hour in range(0, 24, 2))
    return Text(" " * (width + 6) + marks + "h", style="dim")


def _at(forecasts: list[Forecast], at: Micros, start: Micros, end: Micros) -> Forecast | None:
    """The forecast that holds at the end of a cell, if the cell lies in the plan."""
    if at + CELL <= start or at >= end:
        return None
    return next(f for f in forecasts if f.interval.end > max(at, start))


def _names(found: list[Forecast | None]) -> str:
    """Window names, each where it begins, cut to the room it has."""
    text, i = "", 0
    while i < len(found):
        entry, length = found[i], 1
        while i + length < len(found) and found[i + length] is entry:
            length += 1
        text += " " * length if entry is None else f"|{entry.interval.window}"[:length].ljust(length)
        i += length
    return text


def _bar(entry: Forecast | None, role: str, num_gpus: int) -> str:
    if entry is None:
        return " "
    share = entry.goals[role] / num_gpus
    return LEVELS[max(1, round(8 * share)) if share else 0]
