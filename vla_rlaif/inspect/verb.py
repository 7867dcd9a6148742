"""`vla-rlaif inspect`: look at what a run did, or take some of its episodes elsewhere."""

import signal
import threading
from collections.abc import Callable
from pathlib import Path

from vla_rlaif.inspect.export import export as write
from vla_rlaif.inspect.filters import Filter, ordered
from vla_rlaif.inspect.library import Library, open_source
from vla_rlaif.inspect.routes import Routes
from vla_rlaif.inspect.server import InspectServer
from vla_rlaif.inspect.settings import InspectSettings
from vla_rlaif.local_page.guard import is_loopback

Say = Callable[[str], None]


def inspect(
    *,
    path: Path,
    export: Path | None,
    filter: str,
    order: str,
    limit: int | None,
    fps: float,
    host: str,
    port: int,
    names: tuple[str, ...],
    say: Say,
) -> None:
    """The flags are those of cli.Inspect. Serves until SIGINT or SIGTERM."""
    if export is None:
        if filter or limit is not None:
            raise ValueError("--filter and --limit choose what --export writes; the page has a field for filters.")
        _serve(Library(path), InspectSettings(host=host, port=port, names=names), say)
        return
    if limit is not None and limit < 1:
        raise ValueError(f"--limit is {limit}; it must be 1 or more.")
    if not 0 < fps <= 120:
        raise ValueError(f"--fps is {fps}; it must be above 0 and at most 120.")
    source = open_source(path)
    table = source.table
    if not table.id:
        raise ValueError(f"{path} has no episodes: the run kept none (record.every 0), or is older than keeping them.")
    rows = ordered(table, Filter.parse(filter).rows(table), order)[:limit]
    say(f"{write(source, rows, export, fps=fps)}: {len(rows)} of {len(table.id)} episodes")


def _serve(library: Library, settings: InspectSettings, say: Say) -> None:
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    with InspectServer(Routes(library), settings) as server:
        found = library.entries()
        say(f"{library.root}: {len(found)} {'thing' if len(found) == 1 else 'things'} to look at")
        say(f"look at {server.url}")
        if not is_loopback(settings.host):
            say("caution: whoever has that address can see everything here, and it is sent unencrypted.")
        say("Ctrl-C stops the page")
        stop.wait()
