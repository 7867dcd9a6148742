"""The page's server in a thread of its own, for a run whose thread waits for labels.

Every wait has a deadline; what goes wrong in the thread is raised in the run.
"""

import asyncio
import threading
import time
from collections.abc import Coroutine, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np

from vla_rlaif.label_page.annotators import Turn
from vla_rlaif.label_page.clips import ClipCache
from vla_rlaif.label_page.desk import DeskSettings, LabelDesk
from vla_rlaif.label_page.queue import ListedQueue
from vla_rlaif.label_page.rounds import Round, Verdict
from vla_rlaif.label_page.server import LabelServer, Session
from vla_rlaif.label_page.settings import PageSettings
from vla_rlaif.local_page.guard import keep_token
from vla_rlaif.preferences.store import PreferenceStore

IDLE = "Training goes on and needs no labels just now. This page says when it does."
FINISHED = "Training has all the labels of this round and goes on. This page says when it needs more."
STORE_TIMEOUT_S = 2.0  # for another process's write; the page waits meanwhile
START_S, TURN_S = 30.0, 60.0  # for the thread to open the port, and to do what the run asks of it


class Room:
    """Open from the start to ``close``. All methods are for the thread of the run."""

    def __init__(self, store: Path, settings: PageSettings) -> None:
        self._path, self._settings = store, settings
        self._loop, self._stop = asyncio.new_event_loop(), asyncio.Event()
        self._server: LabelServer | None = None
        self._store: PreferenceStore | None = None
        self._desk: LabelDesk | None = None
        self._news = threading.Condition()
        self._num_missing, self._since = 0, 0.0  # pairs without an answer; when that changed, time.monotonic()
        self._failure: BaseException | None = None
        opened: Future[str] = Future()
        # A daemon: a run that ends by an error must not wait for it, and every answer is stored when it is given.
        self._thread = threading.Thread(target=self._main, args=(opened,), name="label page", daemon=True)
        self._thread.start()
        self.url = opened.result(START_S)

    def begin(self, round_: Round, *, deadline_s: float, repeat: float, lease_s: float, seed: int) -> int:
        """Put the pairs on the page. Returns how many have no answer yet."""
        settings = DeskSettings(wanted=len(round_.pairs), repeat=repeat, lease_s=lease_s, seed=seed)
        return self._do(self._begin(round_, settings, time.time() + deadline_s))

    def wait(self, timeout_s: float, undo_s: float) -> bool:
        """Until every pair has an answer and nothing has changed for ``undo_s``. False: time is up."""
        end = time.monotonic() + timeout_s
        with self._news:
            while True:
                now = time.monotonic()
                if self._failure is not None:
                    raise self._failure
                if self._num_missing == 0 and now >= self._since + undo_s:
                    return True
                if now >= end:
                    return self._num_missing == 0
                self._news.wait((end if self._num_missing else min(end, self._since + undo_s)) - now)

    def finish(self) -> tuple[dict[frozenset[str], Verdict], tuple[str, ...]]:
        """Take the pairs off the page: the answers, and who gave them."""
        return self._do(self._finish())

    def close(self) -> None:
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join(TURN_S)

    def _do[T](self, work: Coroutine[Any, Any, T]) -> T:
        if self._failure is not None:
            work.close()
            raise self._failure
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(TURN_S)

    # What follows runs in the thread of the page.

    def _main(self, opened: "Future[str]") -> None:
        try:
            with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
                runner.run(self._serve(opened))
        except BaseException as error:  # raised where the run waits
            if not opened.done():
                opened.set_exception(error)
            with self._news:
                self._failure = error
                self._news.notify_all()

    async def _serve(self, opened: "Future[str]") -> None:
        server = LabelServer(
            self._settings, keep_token(Path(f"{self._path}.token")), idle=IDLE, finished=FINISHED, changed=self._count
        )
        with PreferenceStore(self._path, timeout_s=STORE_TIMEOUT_S) as self._store:
            async with server as self._server:
                opened.set_result(server.url)
                await self._stop.wait()

    async def _begin(self, round_: Round, settings: DeskSettings, deadline: float) -> int:
        assert self._store is not None and self._server is not None, "the thread serves"
        self._desk = LabelDesk(
            self._store,
            ListedQueue(round_.pairs),
            settings,
            instruction=round_.instruction,
            segment=round_.segment,
        )
        self._count()
        with self._news:
            self._since = float("-inf")  # what was answered before can no longer be taken back
        await self._server.begin(Session(desk=self._desk, clips=ClipCache(round_), deadline=deadline))
        return self._num_missing

    async def _finish(self) -> tuple[dict[frozenset[str], Verdict], tuple[str, ...]]:
        assert self._desk is not None and self._server is not None, "begin comes first"
        verdicts, names = {}, set()
        for key in self._desk.labelled():
            opinions = self._desk.opinions(key)
            verdicts[key] = _verdict([turn for _, turn in opinions])
            names |= {name for name, _ in opinions}
        self._desk = None
        await self._server.begin(None)
        return verdicts, tuple(sorted(names))

    def _count(self) -> None:
        assert self._desk is not None
        progress = self._desk.progress()
        with self._news:
            self._num_missing, self._since = progress.wanted - progress.done, time.monotonic()
            self._news.notify_all()


def _verdict(turns: Sequence[Turn]) -> Verdict:
    """The mean of all answers but skips, as seen from the first of them."""
    first = turns[0].pair.first
    p_first = [t.p_first if t.pair.first == first else 1 - t.p_first for t in turns if t.p_first is not None]
    return Verdict(first=first, p_first=float(np.mean(p_first)) if p_first else float("nan"))
