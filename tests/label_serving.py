"""A page server over a folder of made-up episodes, and a page of a person that talks to it."""

import asyncio
import http.client
import json
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from synthetic import make_episodes
from websockets.asyncio.client import ClientConnection, connect
from websockets.datastructures import Headers

from vla_rlaif.dataset import append_episodes
from vla_rlaif.label_page.catalogue import FolderCatalogue
from vla_rlaif.label_page.clips import ClipCache
from vla_rlaif.label_page.desk import DeskSettings
from vla_rlaif.label_page.server import LabelServer, Session
from vla_rlaif.label_page.settings import PageSettings
from vla_rlaif.label_page.verb import open_desk
from vla_rlaif.preferences.store import PreferenceStore

TOKEN = "t" * 32


def make_folder(folder: Path, num: int = 16) -> Path:
    append_episodes(folder, make_episodes(num), {})
    return folder


def make_scenes(folder: Path, num: int = 16, size: int = 64, cameras: tuple[str, ...] = ("top", "wrist")) -> Path:
    """Episodes that are worth looking at: a dot moves towards a disc, and stops sooner or later."""
    episodes = make_episodes(num, length=np.array([4, 3, 4, 2] * (num // 4)))
    rng, (y, x) = np.random.default_rng(0), np.mgrid[:size, :size] / size
    images = {camera: np.full((num, 5, size, size, 3), (58, 62, 70), np.uint8) for camera in cameras}
    for row in range(num):
        start, goal = rng.uniform(0.15, 0.85, 2), rng.uniform(0.2, 0.8, 2)
        for frame in range(5):
            share = rng.uniform(0.5, 1.0) * min(frame, episodes.num_decisions[row]) / 4
            hand = start + share * (goal - start)
            for zoom, camera in enumerate(cameras, start=1):
                picture = images[camera][row, frame]
                picture[(y - goal[0]) ** 2 + (x - goal[1]) ** 2 < (0.1 * zoom) ** 2] = (70, 170, 90)
                picture[(y - hand[0]) ** 2 + (x - hand[1]) ** 2 < (0.05 * zoom) ** 2] = (230, 120, 60)
        for camera in cameras:
            images[camera][row, episodes.num_decisions[row] :] = images[camera][row, episodes.num_decisions[row]]
    append_episodes(folder, replace(episodes, images=images), {})
    return folder


@asynccontextmanager
async def serving(
    data: Path, *, clock: Callable[[], float] = time.time, desk: dict[str, Any] | None = None, **settings: Any
) -> AsyncIterator[LabelServer]:
    """The page of a folder; the store is labels.sqlite in it."""
    asked: dict[str, Any] = {"wanted": 12, "repeat": 0.0} | (desk or {})
    flags: dict[str, Any] = {"port": 0} | settings
    store, catalogue = data / "labels.sqlite", FolderCatalogue(data)
    with PreferenceStore(store, timeout_s=0.05) as kept:
        opened = open_desk(
            kept, catalogue, DeskSettings(**asked), within_group=0.5, held_out=0.0, store=store, data=data
        )
        server = LabelServer(PageSettings(**flags), TOKEN, idle="idle", finished="finished", clock=clock)
        async with server:
            await server.begin(Session(desk=opened, clips=ClipCache(catalogue)))
            yield server


class Page:
    """What a person's browser does; remembers the newest state."""

    def __init__(self, socket: ClientConnection) -> None:
        self.socket = socket
        self.state: dict[str, Any] = {}

    async def say(self, **message: Any) -> dict[str, Any]:
        """Send, and wait for what the server says next."""
        await self.socket.send(json.dumps(message))
        return await self.hear()

    async def hear(self) -> dict[str, Any]:
        said = json.loads(await asyncio.wait_for(self.socket.recv(), 10))
        if said["type"] == "state":
            self.state |= said
        return said

    async def answer(self, answer: str) -> dict[str, Any]:
        question = self.state["question"]
        return await self.say(type="answer", left=question["left"]["id"], right=question["right"]["id"], answer=answer)

    @property
    def pair(self) -> tuple[str, ...]:
        """Left and right; empty if there is nothing to label."""
        question = self.state["question"]
        return () if question is None else (question["left"]["id"], question["right"]["id"])


@asynccontextmanager
async def page_of(server: LabelServer, name: str | None = None) -> AsyncIterator[Page]:
    origin: Any = f"http://127.0.0.1:{server.port}"
    async with connect(f"ws://127.0.0.1:{server.port}/{TOKEN}/socket", origin=origin) as socket:
        page = Page(socket)
        if name is not None:
            assert (await page.say(type="join", name=name))["type"] == "state"
        yield page


async def get(server: LabelServer, path: str, method: str = "GET", **headers: str) -> tuple[int, Headers, bytes]:
    """A request of an ordinary HTTP client: status, headers, body."""

    def fetch() -> tuple[int, Headers, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=10)
        try:
            connection.request(method, path, headers=headers)
            response = connection.getresponse()
            return response.status, Headers(response.getheaders()), response.read()
        finally:
            connection.close()

    return await asyncio.to_thread(fetch)


def run(work: Coroutine[Any, Any, None]) -> None:
    async def with_deadline() -> None:
        await asyncio.wait_for(work, 60)

    asyncio.run(with_deadline())


class Background:
    """``serving`` in a thread of its own, for a browser that is driven from this one. It can be stopped and started
    again, as an operator would."""

    def __init__(self, data: Path, **settings: Any) -> None:
        self._data, self._settings = data, settings
        self.url, self.port = "", 0
        self.start()

    def start(self) -> None:
        self._opened = threading.Event()
        self._loop, self._stop = asyncio.new_event_loop(), asyncio.Event()
        self._thread = threading.Thread(target=self._loop.run_until_complete, args=(self._serve(),))
        self._thread.start()
        assert self._opened.wait(10)

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(10)
        self._loop.close()

    async def _serve(self) -> None:
        async with serving(self._data, **dict(self._settings), port=self.port) as server:
            self.url, self.port = server.url, server.port
            self._opened.set()
            await self._stop.wait()
