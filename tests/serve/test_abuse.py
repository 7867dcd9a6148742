"""Clients that are malformed, oversized, slow, silent or gone: a good robot keeps being answered."""

import asyncio
import contextlib
import os
import socket
from collections.abc import Iterator

import numpy as np
import pytest
from serving import SPEC, Client, make_gaussian, metric, observation, pack, quiet, robot, settings, until
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosedError

from vla_rlaif.policies.gaussian_torch import GaussianTorch
from vla_rlaif.policy_config import GaussianConfig
from vla_rlaif.serve.server import MAX_INVALID, PolicyServer
from vla_rlaif.types import EnvSpec


def serving(spec: EnvSpec = SPEC, make=make_gaussian, **changes) -> PolicyServer:
    return PolicyServer(make, spec, settings(**{"deadline_ms": 10_000.0, **changes}), say=quiet)


PROMPT_S = 3.0  # what a good robot waits at most; generous, because the machine may be busy with other tests


async def asks_on(client: Client, num: int = 50) -> float:
    """The longest of ``num`` replies, in seconds; all must be actions."""
    loop, longest = asyncio.get_running_loop(), 0.0
    for seed in range(num):
        began = loop.time()
        await client.actions(observation(seed))
        longest = max(longest, loop.time() - began)
    return longest


HANDSHAKE = (
    b"GET / HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    b"Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\nSec-WebSocket-Version: 13\r\n\r\n"
)


def frame(opcode: int, payload: bytes) -> bytes:
    """A final websocket frame under the mask 0, which leaves the payload as it is (RFC 6455, section 5.2)."""
    if len(payload) < 126:
        return bytes([0x80 | opcode, 0x80 | len(payload)]) + b"\0\0\0\0" + payload
    return bytes([0x80 | opcode, 0xFF]) + len(payload).to_bytes(8) + b"\0\0\0\0" + payload


class Peers:
    """TCP connections that read nothing by themselves."""

    def __init__(self) -> None:
        self._open: list[socket.socket] = []

    async def connect(self, server: PolicyServer, data: bytes, buffer_bytes: int | None = None) -> socket.socket:
        peer, loop = socket.socket(), asyncio.get_running_loop()
        self._open.append(peer)
        if buffer_bytes is not None:
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer_bytes)
        peer.setblocking(False)
        await loop.sock_connect(peer, ("127.0.0.1", server.port))
        await loop.sock_sendall(peer, data)
        return peer

    async def open(self, server: PolicyServer, data: bytes = b"", buffer_bytes: int | None = None) -> socket.socket:
        """Shake hands as a websocket client, then send ``data``."""
        peer, loop = await self.connect(server, HANDSHAKE, buffer_bytes), asyncio.get_running_loop()
        assert (await loop.sock_recv(peer, 1000)).startswith(b"HTTP/1.1 101 ")
        await loop.sock_sendall(peer, data)
        return peer

    def close(self) -> None:
        for peer in self._open:
            peer.close()


@pytest.fixture
def peers() -> Iterator[Peers]:
    opened = Peers()
    yield opened
    opened.close()


async def test_garbage_in_every_form(peers):
    async with serving() as server, robot(server) as good:
        forms = [
            os.urandom(1000),
            b"\0" * 4096,
            b"GET /" + b"a" * 20_000,
            b"POST / HTTP/1.1\r\n\r\n",
            b"\x16\x03\x01\x02",
        ]
        for data in [*forms, HANDSHAKE[:60], HANDSHAKE + frame(2, b"too early")]:
            await peers.connect(server, data)
        for data in (frame(2, os.urandom(500)), b"\xff" * 100, frame(8, b"\0"), frame(0, b"continues nothing")):
            await peers.open(server, data)
        assert await asks_on(good) < PROMPT_S
        peers.close()
        await until(lambda: metric(server, "robots") == 1, "only the good robot is left")


async def test_a_robot_that_sends_nothing_but_nonsense_is_shown_the_door():
    async with serving() as server, robot(server) as good, robot(server) as bad:
        for _ in range(MAX_INVALID - 1):
            assert isinstance(await bad.infer(b"\xc1"), str)
        await bad.actions(observation(0))  # one that is valid, and it may go on
        for _ in range(MAX_INVALID):
            assert isinstance(await bad.infer(b"\xc1"), str)
        with pytest.raises(ConnectionClosedError, match="invalid requests in a row"):
            await bad.socket.recv()
        assert bad.socket.close_code == 1008
        await good.actions(observation(0))


async def test_a_flood_of_tiny_messages_takes_turns_with_the_others(peers):
    """Three hundred thousand messages arrive at once; without turns they would be read in one go."""
    async with serving() as server, robot(server) as good:
        peer = await peers.open(server)
        message = frame(2, pack({"reset": True}))
        flood = asyncio.create_task(asyncio.get_running_loop().sock_sendall(peer, message * 300_000))
        assert await asks_on(good) < 3 * PROMPT_S  # with slack: both cores may be busy
        flood.cancel()


async def test_oversized_messages(peers):
    async with (
        serving(max_message_bytes=10_000, ping_interval_s=0.5) as server,
        robot(server) as good,
        robot(server) as big,
    ):
        await big.socket.send(b"a" * 10_001)
        with pytest.raises(ConnectionClosedError):
            await big.socket.recv()
        assert big.socket.close_code == 1009
        # A length of 2^62 bytes is refused when it is announced, not when it is there.
        await peers.open(server, bytes([0x82, 0xFF]) + (2**62).to_bytes(8) + b"\0\0\0\0")
        assert await asks_on(good) < PROMPT_S
        await until(lambda: metric(server, "disconnects_total", reason="oversized") == 2, "both are counted")


async def test_a_robot_that_does_not_read_is_disconnected(peers):
    """Replies of 2 MB fill the kernel's buffers; the server gives up after write_timeout_s."""
    long = EnvSpec(**{**vars(SPEC), "chunk": 250_000})

    def make():
        policy = GaussianTorch(GaussianConfig(backend="torch"), long)
        policy.load({"weight": np.zeros((500_000, 4), np.float32), "bias": np.zeros(500_000, np.float32)}, 0)
        return policy

    async with serving(long, make, max_batch=1, write_timeout_s=0.3) as server:
        await peers.open(server, frame(2, pack(observation(0))) * 8, buffer_bytes=4096)
        await until(lambda: metric(server, "disconnects_total", reason="slow_reader") == 1, "it is gone", timeout_s=20)
        assert metric(server, "robots") == 0
        async with robot(server) as good:
            assert (await good.actions(observation(0)))["actions"].shape == (250_000, 2)


async def test_a_robot_that_has_vanished_is_noticed_by_its_silence(peers):
    async with serving(ping_interval_s=0.1, ping_timeout_s=0.1) as server, robot(server) as good:
        await peers.open(server)
        await until(lambda: metric(server, "robots") == 2, "it is connected")
        assert await asks_on(good) < PROMPT_S
        await until(lambda: metric(server, "robots") == 1, "it is gone")
        assert metric(server, "disconnects_total", reason="unresponsive") == 1


async def test_half_a_message_and_half_a_handshake_hold_nobody_up(peers):
    async with serving() as server, robot(server) as good:
        for _ in range(20):
            await peers.open(server, frame(2, pack(observation(0)))[:300])
            await peers.connect(server, HANDSHAKE[:40])
        assert await asks_on(good) < PROMPT_S
        peers.close()
        await until(lambda: metric(server, "robots") == 1, "all of them are gone")


async def test_a_flood_of_pings_from_a_robot_that_does_not_read(peers):
    """Each ping makes the server write a pong: what it has not sent yet must not grow without end."""
    async with serving(write_timeout_s=1.0) as server, robot(server) as good:
        peer = await peers.open(server, buffer_bytes=4096)
        await until(lambda: metric(server, "robots") == 2, "it is connected")
        flood = asyncio.create_task(flooding(peer, frame(9, b"p" * 125) * 2000))
        asking = asyncio.create_task(asks_on(good, 50))
        while metric(server, "disconnects_total", reason="slow_reader") == 0:
            unsent = [connection.transport.get_write_buffer_size() for connection in server._robots]
            assert sum(unsent) < 2**19  # the pongs of one read, of at most 256 KiB
            await asyncio.sleep(0.01)
        assert await asking < PROMPT_S
        flood.cancel()
        with contextlib.suppress(asyncio.CancelledError, ConnectionError):
            await flood


async def flooding(peer: socket.socket, data: bytes) -> None:
    while True:
        await asyncio.get_running_loop().sock_sendall(peer, data)


async def test_a_robot_that_leaves_before_its_reply():
    async with serving() as server, robot(server) as good:
        for _ in range(20):
            async with connect(f"ws://127.0.0.1:{server.port}", compression=None) as rude:
                await rude.recv()
                await rude.send(pack(observation(0)))
                rude.transport.abort()
        await good.actions(observation(0))
        await until(lambda: metric(server, "robots") == 1, "all of them are gone")
