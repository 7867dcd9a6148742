"""A drain answers what has arrived, sends robots elsewhere and ends in time."""

import asyncio
import contextlib
import itertools
import time

import pytest
from serving import (
    Client,
    SlowPolicy,
    http,
    make_gaussian,
    metric,
    observation,
    pack,
    robot,
    serving,
    unpack,
    until,
    weights_of,
)
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosedError

from vla_rlaif.serve.server import Drained, PolicyServer

CLEAN = Drained(num_cut_off=0, is_stuck=False)


async def test_drain_answers_what_has_arrived_and_sends_the_others_away():
    policy = SlowPolicy()
    policy.gate.set()
    server = serving(lambda: policy)
    async with server, robot(server) as busy, robot(server) as idle:
        port = server.port
        policy.gate.clear()
        asking = asyncio.create_task(busy.actions(observation(0)))
        await until(lambda: len(policy.sizes) == 4, "a request in the policy")
        draining = asyncio.create_task(server.drain(10.0))
        with pytest.raises(ConnectionClosedError, match="the server drains; connect again"):
            await idle.socket.recv()
        assert idle.socket.close_code == 1012
        assert await http(server, "/readyz") == (503, "draining\n")
        assert (await http(server, "/healthz"))[0] == 200
        async with connect(f"ws://127.0.0.1:{server.port}") as late:
            with pytest.raises(ConnectionClosedError, match="the server drains; connect again"):
                await late.recv()
            assert late.close_code == 1012
        policy.gate.set()
        assert (await asking)["decision"] == 0
        with pytest.raises(ConnectionClosedError, match="drains"):
            await busy.socket.recv()
        assert await draining == CLEAN
        with pytest.raises(OSError, match="failed"):
            await connect(f"ws://127.0.0.1:{port}")


async def test_drain_ends_at_its_deadline():
    policy = SlowPolicy()
    policy.gate.set()
    loop = asyncio.get_running_loop()
    async with serving(lambda: policy) as server, robot(server) as client:
        policy.gate.clear()
        asking = asyncio.create_task(client.infer(observation(0)))
        await until(lambda: len(policy.sizes) == 4, "a request in the policy")
        began = loop.time()
        assert await server.drain(0.2) == Drained(num_cut_off=1, is_stuck=True)
        assert loop.time() - began < 5
        await until(lambda: metric(server, "robots") == 0, "the robot is forgotten before its deadline", timeout_s=3)
        with pytest.raises(ConnectionClosedError):
            await asking
        policy.gate.set()


async def test_a_request_that_arrives_as_the_drain_begins_is_answered():
    async with serving() as server, robot(server) as client:
        await client.socket.send(pack(observation(0)))
        time.sleep(0.05)  # it is in the server's socket; the event loop has not looked
        draining = asyncio.create_task(server.drain(10.0))
        reply = await client.socket.recv()
        assert isinstance(reply, bytes) and unpack(reply)["decision"] == 0
        assert await draining == CLEAN


async def test_drain_under_load_loses_no_request_that_was_received():
    """Each robot's last request is either answered or was never counted as received."""
    answered, ended = [], []

    async def play(client: Client) -> None:
        with pytest.raises(ConnectionClosedError, match="drains"):
            for seed in itertools.count():
                reply = await client.infer(observation(seed % 50))
                assert isinstance(reply, dict), reply
                answered.append(reply)
        ended.append(client)

    async with contextlib.AsyncExitStack() as stack:
        server = await stack.enter_async_context(serving())
        clients = [await stack.enter_async_context(robot(server)) for _ in range(8)]
        playing = [asyncio.create_task(play(client)) for client in clients]
        await until(lambda: len(answered) > 50, "some load")
        assert await server.drain(10.0) == CLEAN
        await asyncio.gather(*playing)
        assert len(ended) == 8 and metric(server, "requests_total", outcome="ok") == len(answered)


async def test_robots_move_to_another_server_without_a_failed_request():
    """A robot that is sent away connects to the other server and asks again: all get all their actions."""
    resent: list[int] = []

    async def play(seed: int, first: PolicyServer, second: PolicyServer) -> list[int]:
        versions, server = [], first
        while len(versions) < 60:
            async with robot(server) as client:
                try:
                    while len(versions) < 60:
                        versions.append((await client.actions(observation(len(versions))))["version"])
                        started.set()
                except ConnectionClosedError as closed:
                    assert closed.rcvd is not None and closed.rcvd.code == 1012
                    server, _ = second, resent.append(seed)
        return versions

    started = asyncio.Event()
    async with serving() as day, serving(lambda: make_gaussian(1)) as night:
        await night.stage(weights_of(1), 1)
        night.commit(1)
        playing = [asyncio.create_task(play(seed, day, night)) for seed in range(8)]
        await started.wait()
        assert await day.drain(10.0) == CLEAN
        for versions in await asyncio.gather(*playing):
            assert versions == sorted(versions) and versions[-1] == 1
    assert sorted(resent) == list(range(8))


async def test_drain_before_the_policy_is_there():
    server = serving()
    await server.listen()
    waiting = await connect(f"ws://127.0.0.1:{server.port}")
    await until(lambda: metric(server, "robots") == 1, "a robot that waits for the policy")
    assert await server.drain(5.0) == CLEAN
    with pytest.raises(ConnectionClosedError, match="drains"):
        await waiting.recv()
