"""`vla-rlaif label DATA --ui`: people label the episodes of a folder until they, or the operator, have enough."""

import asyncio
import dataclasses
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import tyro

from vla_rlaif.label_page.catalogue import FolderCatalogue
from vla_rlaif.label_page.clips import ClipCache
from vla_rlaif.label_page.desk import DeskSettings, LabelDesk
from vla_rlaif.label_page.queue import SampledQueue
from vla_rlaif.label_page.server import LabelServer, Session
from vla_rlaif.label_page.settings import PageSettings
from vla_rlaif.local_page.guard import is_loopback, keep_token
from vla_rlaif.preferences.agreement import describe_agreement, measure_agreement, write_agreement
from vla_rlaif.preferences.labelled import held_out_rows, join
from vla_rlaif.preferences.store import PreferenceStore

Say = Callable[[str], None]
STORE_TIMEOUT_S = 2.0  # for another process's write; the page waits meanwhile
FINISHED = "Every pair that was asked for has an answer. You may close this page."


@dataclass(frozen=True)
class LabelByHand:
    """Open a local page on which people label pairs of collected episodes."""

    data: tyro.conf.Positional[Path]  # folder of a policy's episodes that `collect` wrote
    ui: bool = True  # what chooses this verb
    store: Path | None = None  # SQLite file; new records are appended. Default: labels.sqlite in DATA
    pairs: int = 400  # that are to have an answer by hand in the end
    within_group: float = 0.5  # share of the pairs that share their start state
    held_out: float = 0.15  # share of the pairs whose episodes are never trained on
    seed: int = 0
    page: Annotated[PageSettings, tyro.conf.arg(name="")] = dataclasses.field(default_factory=PageSettings)


def main(arguments: Sequence[str], say: Say) -> None:
    label_by_hand(tyro.cli(LabelByHand, args=arguments, prog="vla-rlaif label"), say)


def label_by_hand(options: LabelByHand, say: Say) -> None:
    """Serve the page until SIGINT or SIGTERM, then say how far people agree."""
    data, store, page = options.data, options.store or options.data / "labels.sqlite", options.page
    if not 0 <= options.within_group <= 1 or not 0 <= options.held_out <= 0.5:
        raise ValueError(
            "--within-group must be in [0, 1] and --held-out in [0, 0.5], got "
            f"{options.within_group} and {options.held_out}."
        )
    catalogue = FolderCatalogue(data, page.cameras)
    with PreferenceStore(store, timeout_s=STORE_TIMEOUT_S) as kept:
        desk = open_desk(
            kept,
            catalogue,
            DeskSettings(wanted=options.pairs, repeat=page.repeat, lease_s=page.lease_s, seed=options.seed),
            within_group=options.within_group,
            held_out=options.held_out,
            store=store,
            data=data,
        )
        say(f"{data}: {len(catalogue.ids)} episodes; {store}: {_count(desk)}")
        session = Session(desk=desk, clips=ClipCache(catalogue))
        asyncio.run(_serve(session, page, keep_token(Path(f"{store}.token")), say))
        found = measure_agreement(kept.records())
        say(f"{store}: {_count(desk)}")
    for line in describe_agreement(found):
        say(line)
    write_agreement(found, store.with_suffix(".agreement.json"))


def open_desk(
    kept: PreferenceStore,
    catalogue: FolderCatalogue,
    settings: DeskSettings,
    *,
    within_group: float,
    held_out: float,
    store: Path,
    data: Path,
) -> LabelDesk:
    """A desk for the pairs of a folder that ``kept`` does not hold yet. Raises ValueError if it holds others."""
    records, episodes = kept.records(), catalogue.episodes
    known = join(records, catalogue.ids, episodes, store=store, data=data)
    split_seed, draw_seed = np.random.SeedSequence((settings.seed, kept.last_id)).generate_state(2).tolist()
    queue = SampledQueue(
        episodes,
        catalogue.ids,
        held=held_out_rows(episodes, known, held_out, split_seed),
        taken=[frozenset((r.first, r.second)) for r in records],
        within_group=within_group,
        held_out=held_out,
        seed=draw_seed,
    )
    instruction = dict(zip(catalogue.ids, episodes.instruction, strict=True))
    segment = (0, episodes.mask.shape[1])
    return LabelDesk(kept, queue, settings, instruction=instruction.__getitem__, segment=segment)


def _count(desk: LabelDesk) -> str:
    progress = desk.progress()
    return f"{progress.done} of {progress.wanted} pairs are labelled by hand"


async def _serve(session: Session, settings: PageSettings, token: str, say: Say) -> None:
    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    is_finished = False

    def changed() -> None:
        nonlocal is_finished
        progress = session.desk.progress()
        if progress.done >= progress.wanted and not is_finished:
            say(f"all {progress.wanted} pairs are labelled; Ctrl-C stops the page")
        is_finished = progress.done >= progress.wanted

    async with LabelServer(settings, token, idle="", finished=FINISHED, changed=changed) as server:
        await server.begin(session)
        say(f"label at {server.url}")
        if not is_loopback(settings.host):
            say("caution: whoever has that address can see the clips and label, and it is sent unencrypted.")
        say("Ctrl-C stops the page; every answer is stored at once")
        await stop.wait()
