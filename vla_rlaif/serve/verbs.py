"""The verb `serve`: from a policy folder to a server that runs until SIGTERM."""

import asyncio
import functools
import os
import signal
from collections.abc import Callable
from pathlib import Path

from vla_rlaif.build import load_folder
from vla_rlaif.checkpoint import load_policy
from vla_rlaif.config import RunConfig
from vla_rlaif.policies.specs import spec_from_json
from vla_rlaif.serve.server import PolicyServer
from vla_rlaif.serve.settings import ServeSettings
from vla_rlaif.serve.watch import stamp_of, watch
from vla_rlaif.types import EnvSpec

Say = Callable[[str], None]


def serve_policy(
    config: RunConfig, folder: Path, settings: ServeSettings, *, token_file: Path | None, follow: bool, say: Say
) -> None:
    """Returns after a drain. ``follow`` swaps the weights whenever ``folder`` is replaced."""
    tokens = () if token_file is None else read_tokens(token_file)
    asyncio.run(_serve(config, folder, settings, tokens, follow, say))


def read_tokens(path: Path) -> tuple[str, ...]:
    """One a line; any of them opens the door, so that they can be changed without a gap."""
    try:
        tokens = tuple(path.read_text().split())
    except FileNotFoundError:
        raise ValueError(f"no token file {path}; make one with `openssl rand -hex 32 > {path}`.") from None
    if not tokens:
        raise ValueError(f"{path} is empty, wanted one token a line.")
    return tokens


def spec_of(folder: Path) -> EnvSpec:
    """What the stored policy was made for."""
    metadata, _ = load_policy(folder)
    if "spec" not in metadata:
        raise ValueError(f"{folder}/policy.json has no spec; a policy's metadata() must hold spec_to_json(spec).")
    return spec_from_json(metadata["spec"])


async def _serve(
    config: RunConfig, folder: Path, settings: ServeSettings, tokens: tuple[str, ...], follow: bool, say: Say
) -> None:
    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    seen, spec = stamp_of(folder), spec_of(folder)
    make = functools.partial(load_folder, folder, config, spec)
    server = PolicyServer(make, spec, settings, tokens=tokens, say=say)
    await server.listen()
    say(f"listening on ws://{settings.host}:{server.port}, warming up")

    async def work() -> None:
        await server.warm_up()
        say(f"ready: {folder}, chunks of {spec.chunk} x {spec.action_dim}, batches up to {settings.max_batch}")
        if follow:
            await watch(server, folder, seen, say=say)
        await stop.wait()

    stopped, working = asyncio.create_task(stop.wait()), asyncio.create_task(work())
    await asyncio.wait((stopped, working), return_when=asyncio.FIRST_COMPLETED)
    has_failed = working.done()
    say("draining")
    end = await server.drain()
    say(f"drained; {end.num_cut_off} robots were cut off" if end.num_cut_off else "drained")
    if has_failed:
        working.result()  # raises what ended it
    if end.is_stuck:
        say("a call of the policy has not returned; leaving without it")
        os._exit(0)
