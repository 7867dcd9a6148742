"""Weights change under load without a failed request; bad ones never act; a drain answers what has arrived."""

import asyncio
import contextlib
import itertools

import numpy as np
import pytest
from serving import (
    SPEC,
    Client,
    SlowPolicy,
    http,
    in_process,
    make_gaussian,
    metric,
    observation,
    quiet,
    robot,
    settings,
    until,
    weights_of,
)
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosedError

from vla_rlaif.checkpoint import save_policy
from vla_rlaif.config import GaussianConfig
from vla_rlaif.policies.gaussian_torch import GaussianTorch
from vla_rlaif.serve.server import Drained, PolicyServer
from vla_rlaif.serve.watch import stamp_of, watch
from vla_rlaif.types import EnvSpec

CLEAN = Drained(num_cut_off=0, is_stuck=False)


def serving(policy=make_gaussian, **changes) -> PolicyServer:
    return PolicyServer(policy, SPEC, settings(**{"deadline_ms": 10_000.0, **changes}), say=quiet)


async def ask_until(stop: asyncio.Event, client: Client, replies: list) -> None:
    for seed in itertools.count():
        if stop.is_set():
            return
        sent = observation(seed % 50)
        replies.append((sent, await client.actions(sent)))


async def test_swaps_under_load_fail_no_request():
    """Eight robots ask without a pause through 10 swaps; every action is that of the version the reply names."""
    replies, stop = [], asyncio.Event()
    async with serving(fixed_batch=True) as server, contextlib.AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(robot(server)) for _ in range(8)]
        asking = [asyncio.create_task(ask_until(stop, client, replies)) for client in clients]
        for version in range(1, 11):
            await server.stage(weights_of(version), version)
            server.commit(version)
            num = len(replies)
            await until(lambda num=num: len(replies) > num + 16, "requests between the swaps")
        stop.set()
        await asyncio.gather(*asking)
        assert metric(server, "requests_total", outcome="ok") == len(replies)
        assert metric(server, "weights_version") == server.version == 10
        assert metric(server, "weight_swaps_total", result="committed") == 10
    policies = {version: make_gaussian(version) for version in range(11)}
    assert {reply["version"] for _, reply in replies} >= set(range(1, 11))
    for sent, reply in replies:
        expected = in_process(policies[reply["version"]], sent, reply["seed"])
        np.testing.assert_allclose(reply["actions"], expected, rtol=0, atol=1e-6)


async def test_a_batch_ends_on_the_weights_it_began_with():
    made = []

    def make():
        number = len(made)
        made.append(SlowPolicy(rule=lambda state: np.full(len(state), number)))
        made[-1].gate.set()
        return made[-1]

    async with serving(make) as server, robot(server) as client:
        made[0].gate.clear()
        asking = asyncio.create_task(client.actions(observation(0)))
        await until(lambda: len(made[0].sizes) == 4, "the call that the swap overtakes")
        await server.stage({}, 7)
        server.commit(7)
        made[0].gate.set()
        first, second = await asking, await client.actions(observation(0))
        assert (first["version"], first["actions"][0, 0]) == (0, 0)
        assert (second["version"], second["actions"][0, 0]) == (7, 1)


async def test_weights_that_do_not_fit_or_do_not_act_are_not_staged():
    sent = observation(0)
    async with serving() as server, robot(server) as client:
        before = (await client.actions(sent))["actions"]
        unfit = {"weight": np.zeros((6, 5), np.float32), "bias": np.zeros(6, np.float32)}
        nan = {"weight": np.zeros((6, 4), np.float32), "bias": np.full(6, np.nan, np.float32)}
        for bad, why in [(unfit, "of shape"), ({}, "of shape"), (nan, "invalid values")]:
            with pytest.raises(ValueError, match=why):
                await server.stage(bad, 1)
            with pytest.raises(ValueError, match="cannot commit version 1: nothing is staged"):
                server.commit(1)
            reply = await client.actions(sent)
            assert reply["version"] == 0
            np.testing.assert_array_equal(reply["actions"], before)
        assert metric(server, "weight_swaps_total", result="failed") == 3


async def test_weights_that_choose_no_finite_action_are_not_staged():
    rules = iter([lambda state: np.zeros(len(state)), lambda state: np.full(len(state), np.nan)])

    def make():
        policy = SlowPolicy(rule=next(rules))
        policy.gate.set()
        return policy

    async with serving(make) as server:
        with pytest.raises(ValueError, match="version 1 chooses actions that are not finite"):
            await server.stage({}, 1)


async def test_stage_and_commit_name_the_same_version():
    async with serving() as server:
        await server.stage(weights_of(3), 3)
        with pytest.raises(ValueError, match="cannot commit version 4: version 3 is staged"):
            server.commit(4)
        server.commit(3)
        server.commit(3)  # a repeated call, its first answer lost
        assert server.version == 3 and metric(server, "weight_swaps_total", result="committed") == 1
        with pytest.raises(ValueError, match="version 3 acts already"):
            await server.stage(weights_of(3), 3)


async def test_a_policy_with_another_history_is_not_staged():
    windows = iter([2, 2, 1])

    def make():
        policy = SlowPolicy(window=next(windows), rule=lambda state: state.sum(axis=(1, 2)))
        policy.gate.set()
        return policy

    async with serving(make) as server, robot(server) as client:
        states = [observation(seed)["observation/state"] for seed in range(3)]
        seen = [(await client.actions(observation(seed)))["actions"][0, 0] for seed in range(3)]
        wanted = [2 * states[0].sum(), (states[0] + states[1]).sum(), (states[1] + states[2]).sum()]
        np.testing.assert_allclose(seen, wanted, rtol=1e-5)
        await server.stage({}, 1)
        with pytest.raises(ValueError, match="version 2 sees 1 frames, the robots' histories have 2"):
            await server.stage({}, 2)


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
        with pytest.raises(ConnectionClosedError):
            await asking
        policy.gate.set()


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


def folder_policy(folder, version: int, spec: EnvSpec = SPEC) -> None:
    policy = GaussianTorch(GaussianConfig(backend="torch"), spec)
    save_policy(folder, policy.metadata(), weights_of(version))


async def test_watch_follows_a_folder_and_skips_what_is_broken(tmp_path):
    from safetensors.numpy import load_file

    best, said = tmp_path / "best", []
    folder_policy(best, 0)

    def make():
        policy = GaussianTorch(GaussianConfig(backend="torch"), SPEC)
        try:
            policy.load(load_file(best / "params.safetensors"), 0)
        except Exception as error:
            raise ValueError(f"damaged: {error}") from None
        return policy

    async with serving(make) as server, robot(server) as client:
        watching = asyncio.create_task(watch(server, best, stamp_of(best), say=said.append, poll_s=0.02))
        sent = observation(0)
        for version in (1, 2):
            folder_policy(best, version)
            await until(lambda version=version: server.version == version, "the swap")
            expected = in_process(make_gaussian(version), sent, 0)
            np.testing.assert_array_equal((await client.actions(sent))["actions"], expected)
        (best / "params.safetensors").write_bytes(b"torn")
        await until(lambda: len(said) == 3, "a complaint")
        assert said[2].startswith(f"{best} was replaced, but version 2 goes on acting: damaged")
        (best / "policy.json").unlink()
        await asyncio.sleep(0.1)
        np.testing.assert_array_equal((await client.actions(sent))["actions"], expected)
        folder_policy(best, 3)
        await until(lambda: server.version == 3, "the next good one")
        assert len(said) == 4 and not watching.done()
        watching.cancel()
