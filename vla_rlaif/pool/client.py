"""A robot's side of a pool whose servers come and go: it asks one of them, and the next one when that one leaves.

A request that was not answered is asked again, by the same deadline: a server that drains has answered what it took.
"""

import asyncio
import contextlib
import random
from pathlib import Path
from typing import Any

from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import InvalidHandshake, WebSocketException

from vla_rlaif.pool.endpoints import live_endpoints
from vla_rlaif.serve.protocol import decode, encode

RETRY_S = 0.02  # between two servers that cannot be reached
OPEN_S = 1.0  # for a server to answer at all: the host of a dead one may not even refuse


class NoAnswerError(Exception):
    """No server gave an action by the deadline."""


class PoolRobot:
    """Keeps one connection. ``folder`` is the pool's `endpoints`; the seed spreads robots over the servers."""

    def __init__(self, folder: Path, name: str, *, seed: int, headers: dict[str, str] | None = None) -> None:
        self._folder, self._name, self._headers = folder, name, headers or {}
        self._rng = random.Random(seed)
        self._socket: ClientConnection | None = None
        self._url = ""  # of the last server

    async def infer(self, observation: dict[str, Any], *, within_s: float) -> dict[str, Any]:
        """The server's reply. NoAnswerError after ``within_s``, ValueError for a request that no server will take."""
        message = encode(observation)
        last: BaseException | None = None
        try:
            async with asyncio.timeout(within_s):
                while True:
                    try:
                        socket = await self._connection()
                        await socket.send(message)
                        reply = await socket.recv()
                    except (OSError, WebSocketException) as error:  # it drains, or it is gone
                        last, self._socket = error, None
                        await asyncio.sleep(RETRY_S)
                        continue
                    if isinstance(reply, bytes):
                        return decode(reply)
                    if reply.startswith("invalid"):
                        raise ValueError(reply)
                    last = NoAnswerError(reply)  # overloaded, expired or failed: another server may do better
                    await self.close()
        except TimeoutError:
            await self.close()
            raise NoAnswerError(f"no action within {within_s:g} s; the last trouble was {last!r}") from last

    async def close(self) -> None:
        if self._socket is not None:
            socket, self._socket = self._socket, None
            with contextlib.suppress(WebSocketException, OSError):
                await socket.close()

    async def _connection(self) -> ClientConnection:
        if self._socket is None:
            urls = await asyncio.to_thread(live_endpoints, self._folder)
            if not urls:
                raise InvalidHandshake("no server is announced")
            self._url = self._rng.choice([url for url in urls if url != self._url] or urls)
            socket = await connect(
                f"{self._url}/?robot={self._name}",
                compression=None,
                open_timeout=OPEN_S,
                additional_headers=self._headers,
                proxy=None,
            )
            await socket.recv()  # what the server says of itself, when it is ready
            self._socket = socket
        return self._socket
