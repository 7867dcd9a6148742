"""Serve what a training run writes: a policy folder is staged and committed when it is replaced."""

import asyncio
import traceback
from collections.abc import Callable
from pathlib import Path

from vla_rlaif.serve.server import PolicyServer

POLL_S = 1.0
FILES = ("policy.json", "params.safetensors")

Stamp = tuple[tuple[int, int, int], ...]  # inode, modification time (ns) and size (bytes) of each file


def stamp_of(folder: Path) -> Stamp | None:
    """What changes when the folder is replaced; None while it is not there."""
    try:
        stats = [(folder / name).stat() for name in FILES]
    except FileNotFoundError:
        return None
    return tuple((s.st_ino, s.st_mtime_ns, s.st_size) for s in stats)


async def watch(
    server: PolicyServer, folder: Path, seen: Stamp | None, *, say: Callable[[str], None], poll_s: float = POLL_S
) -> None:
    """Runs until cancelled. ``seen`` is the stamp of what is served now; the server's policies come from ``folder``.

    A folder that does not load or does not act is reported, once, and the old weights go on acting.
    """
    while True:
        await asyncio.sleep(poll_s)
        stamp = stamp_of(folder)
        if stamp is None or stamp == seen:
            continue
        version = server.version + 1
        try:
            await server.stage(None, version)
        except ValueError as error:
            say(f"{folder} was replaced, but version {server.version} goes on acting: {error}")
        except Exception as error:  # robots depend on this process: whatever staging raises, the next folder is tried
            say("".join(traceback.format_exception(error)))
            say(f"{folder} was replaced, but version {server.version} goes on acting: {error!r}")
        else:
            if stamp_of(folder) != stamp:
                continue  # replaced again while it was read; the next round takes the newer one
            server.commit(version)
            say(f"{folder} was replaced: version {version} acts")
        seen = stamp
