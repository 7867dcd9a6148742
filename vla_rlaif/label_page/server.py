"""The page's server: a few files and clips over HTTP, everything else over one websocket a page.

Everything is below ``/TOKEN/``. There are no CORS headers, and no other origin may open the websocket. Listens on
loopback unless told otherwise.
"""

import asyncio
import errno
import json
import logging
import socket
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from websockets.asyncio.server import Server, ServerConnection, serve
from websockets.datastructures import Headers
from websockets.exceptions import ConnectionClosed
from websockets.frames import CloseCode
from websockets.http11 import Request, Response

from vla_rlaif.label_page.annotators import labeller_of
from vla_rlaif.label_page.clips import ClipCache
from vla_rlaif.label_page.desk import LabelDesk
from vla_rlaif.label_page.messages import (
    ANSWERS,
    MAX_BYTES,
    Alive,
    Answer,
    Join,
    Undo,
    read_message,
    say_pair,
    say_progress,
    say_question,
)
from vla_rlaif.label_page.settings import PageSettings
from vla_rlaif.local_page.guard import is_loopback, is_own_page, refusal, rest_of_path
from vla_rlaif.local_page.headers import HEADERS, cache_control

HERE = Path(__file__).parent
FILES = {
    "": ("page.html", "text/html"),
    "page.css": ("page.css", "text/css"),
    "page.js": ("page.js", "text/javascript"),
}
CLIP_AGE_S = 600  # that a browser keeps a clip
OPEN_TIMEOUT_S = 120.0  # for a clip out of a large shard, too
SEND_TIMEOUT_S = 5.0
MAX_PAGES = 64
MAX_INVALID = 20  # messages in a row; then the connection is closed


@dataclass(frozen=True, kw_only=True)
class Session:
    """What is labelled now."""

    desk: LabelDesk
    clips: ClipCache
    deadline: float | None = None  # until when training waits, seconds since 1970


class LabelServer:
    """``async with LabelServer(...) as server``. Its methods are for the thread of its event loop."""

    def __init__(
        self,
        settings: PageSettings,
        token: str,
        *,
        idle: str,
        finished: str,
        changed: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """``idle`` and ``finished`` are what people read while there is nothing to label, and when all is labelled.
        ``changed`` is called after every answer and every undo."""
        self._settings, self._token = settings, token
        self._idle, self._finished, self._changed, self._clock = idle, finished, changed, clock
        self.session: Session | None = None
        self._pages: dict[ServerConnection, str] = {}  # open pages, and who joined; empty before that
        self._listener: Server | None = None
        self._files = {path: ((HERE / name).read_bytes(), kind) for path, (name, kind) in FILES.items()}

    async def __aenter__(self) -> "LabelServer":
        s = self._settings
        try:
            self._listener = await serve(
                self._converse,
                s.host,
                s.port,
                process_request=self._respond,
                compression=None,
                open_timeout=OPEN_TIMEOUT_S,
                max_size=MAX_BYTES,
                max_queue=4,
                logger=logging.getLogger("vla_rlaif.label_page"),
            )
        except OSError as error:
            raise _cannot_listen(error, s.host, s.port) from None
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._listener is not None
        self._listener.close(code=CloseCode.GOING_AWAY, reason="the server stops")
        await self._listener.wait_closed()

    @property
    def port(self) -> int:
        assert self._listener is not None, "port before it listens"
        return self._listener.sockets[0].getsockname()[1]

    @property
    def url(self) -> str:
        """Of the page, for a browser on this machine."""
        host = "127.0.0.1" if self._settings.host in ("0.0.0.0", "::", "") else self._settings.host
        return f"http://{f'[{host}]' if ':' in host else host}:{self.port}/{self._token}/"

    async def begin(self, session: Session | None) -> None:
        """From now on this is labelled; None: nothing for the time being."""
        self.session = session
        if session is not None:
            for name in set(self._pages.values()) - {""}:
                session.desk.join(name)
        await self._tell_all(lambda name: True)

    async def _respond(self, page: ServerConnection, request: Request) -> Response | None:
        """None lets a websocket open."""
        only_loopback = is_loopback(self._settings.host)
        origins, hosts = request.headers.get_all("Origin"), request.headers.get_all("Host")
        problem = refusal(hosts, self._settings.names, only_loopback=only_loopback)
        if problem is not None:
            return _response(HTTPStatus.MISDIRECTED_REQUEST, f"{problem}\n".encode())
        path = rest_of_path(request.path, self._token)
        if path is None:
            text = "no such page; open the address that was printed where the labelling was started, with its token\n"
            return _response(HTTPStatus.FORBIDDEN, text.encode())
        if request.method != "GET":
            return _response(HTTPStatus.METHOD_NOT_ALLOWED, b"only GET\n")
        if path == "socket":
            if not is_own_page(origins, hosts):
                return _response(HTTPStatus.FORBIDDEN, b"only the page of this server may connect\n")
            return None
        if path.startswith("clip/"):
            return await self._clip(path)
        if path not in self._files:
            return _response(HTTPStatus.NOT_FOUND, b"no such file\n")
        data, kind = self._files[path]
        return _response(HTTPStatus.OK, data, kind=f"{kind}; charset=utf-8")

    async def _clip(self, path: str) -> Response:
        parts, session = [unquote(part) for part in path.split("/")], self.session
        shown = session.clips.shown(parts[1]) if session is not None and len(parts) == 3 else None
        if session is None or shown is None or parts[2] not in shown.sizes:
            return _response(HTTPStatus.NOT_FOUND, b"no such clip: what is labelled has changed; reload the page\n")
        try:
            also = session.desk.beside(parts[1])  # will be asked for next, and may lie in the same file
            sheet = await asyncio.to_thread(session.clips.sheet, parts[1], parts[2], also=also)
        except ValueError as error:  # a damaged shard, a clip too large: whoever labels can pass it by
            return _response(HTTPStatus.INTERNAL_SERVER_ERROR, f"{error}\n".encode())
        return _response(HTTPStatus.OK, sheet, kind="image/webp", age_s=CLIP_AGE_S)

    async def _converse(self, page: ServerConnection) -> None:
        """One page, from its opening to its end."""
        if len(self._pages) >= MAX_PAGES:
            await page.close(CloseCode.TRY_AGAIN_LATER, "too many pages are open")
            return
        self._pages[page], num_invalid = "", 0
        try:
            async for data in page:
                try:
                    await self._hear(page, data)
                    num_invalid = 0
                except (ValueError, OSError) as error:  # OSError: the disk is full
                    num_invalid += 1
                    await _send(page, {"type": "refused", "reason": str(error)})
                    if num_invalid == MAX_INVALID:
                        await page.close(CloseCode.POLICY_VIOLATION, f"{MAX_INVALID} invalid messages in a row")
        except ConnectionClosed:
            pass
        finally:
            name = self._pages.pop(page)
            if name and name not in self._pages.values() and self.session is not None:
                self.session.desk.leave(name)
                await self._tell_all(self._is_waiting)

    async def _hear(self, page: ServerConnection, data: str | bytes) -> None:
        message, now = read_message(data), self._clock()
        if isinstance(message, Join):
            labeller_of(message.name)  # refuses what is no name
            if self.session is not None:
                self.session.desk.join(message.name)
            self._pages[page] = message.name
            await self._tell_all(lambda name: name == message.name or self._is_waiting(name))
            return
        name, notice, session = self._pages[page], "", self.session
        if isinstance(message, Alive):
            if session is not None:
                session.desk.renew(name, now)
            await self._tell_all(self._is_waiting)  # a lease of somebody else may have run out
            return
        if session is None:
            raise ValueError("There is nothing to label now.")
        if isinstance(message, Answer):
            p_first = ANSWERS[message.answer]
            if not session.desk.answer(name, message.left, message.right, p_first, now):
                notice = "You had answered that pair already; your first answer stands."
        if isinstance(message, Undo):
            session.desk.undo(name, now)
        self._changed()
        await self._tell_all(lambda other: other == name or self._is_waiting(other), notice=(name, notice))

    def _is_waiting(self, name: str) -> bool:
        """Whether a person has no question and might get one."""
        return self.session is None or not self.session.desk.is_busy(name)

    async def _tell_all(self, is_asked: Callable[[str], bool], notice: tuple[str, str] = ("", "")) -> None:
        """Everybody gets the figures; those who ``is_asked`` holds for get their question, too."""
        told: list[Awaitable[None]] = []
        for page, name in list(self._pages.items()):
            if name:
                state = self._state(name, with_question=is_asked(name))
                told.append(_send(page, state | ({"notice": notice[1]} if notice[0] == name else {})))
        await asyncio.gather(*told)

    def _state(self, name: str, *, with_question: bool) -> dict[str, Any]:
        state: dict[str, Any] = {"type": "state", "name": name, "fps": self._settings.fps, "notice": ""}
        session, here = self.session, set(self._pages.values())
        if session is None:
            return state | {"question": None, "next": None, "text": self._idle, "progress": None, "people": []}
        desk, now = session.desk, self._clock()
        people = [{"name": k, "here": k in here, **p.counts()} for k, p in sorted(desk.people.items())]
        state |= {"progress": say_progress(desk, name), "people": people, "text": ""}
        if session.deadline is not None:
            state["seconds_left"] = max(0.0, session.deadline - now)
        if with_question:
            question = desk.question(name, now)
            upcoming = None if question is None else desk.upcoming(name, now)
            state["question"] = say_question(question, session.clips)
            state["next"] = None if upcoming is None else say_pair(upcoming, session.clips)
            if question is None:
                state["text"] = self._why_nothing(desk)
        return state

    def _why_nothing(self, desk: LabelDesk) -> str:
        progress = desk.progress()
        if progress.done >= progress.wanted:
            return self._finished
        if desk.num_leased:
            return "The last pairs are with others. If somebody leaves one unanswered, it comes to you."
        return f"There are no more pairs: these episodes make {progress.done}. {self._finished}"


def check_address(host: str, port: int) -> None:
    """Raises ValueError if nobody can listen there now."""
    try:
        with socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET):
            pass
    except OSError as error:
        raise _cannot_listen(error, host, port) from None


def _cannot_listen(error: OSError, host: str, port: int) -> Exception:
    if error.errno not in (errno.EADDRINUSE, errno.EADDRNOTAVAIL, errno.EACCES):
        return error
    return ValueError(f"cannot listen on {host}:{port}: {error.strerror}. Choose another port.")


async def _send(page: ServerConnection, message: dict[str, Any]) -> None:
    try:
        async with asyncio.timeout(SEND_TIMEOUT_S):
            await page.send(json.dumps(message))
    except ConnectionClosed:  # its conversation ends by itself
        return
    except TimeoutError:  # the others must not wait for a page that has gone to sleep; it connects again
        page.transport.abort()


def _response(status: HTTPStatus, body: bytes, *, kind: str = "text/plain; charset=utf-8", age_s: int = 0) -> Response:
    about = {"Content-Type": kind, "Content-Length": str(len(body)), "Cache-Control": cache_control(age_s)}
    headers = {**HEADERS, **about}
    return Response(status.value, status.phrase, Headers(**headers, Connection="close"), body)
