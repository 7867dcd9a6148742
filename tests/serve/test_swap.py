"""Weights change under load without a failed request; bad ones never act."""

import asyncio
import contextlib
import itertools

import numpy as np
import pytest
from safetensors import SafetensorError
from safetensors.numpy import load_file
from serving import (
    SPEC,
    Client,
    SlowPolicy,
    in_process,
    make_gaussian,
    metric,
    observation,
    robot,
    serving,
    until,
    weights_of,
)

from vla_rlaif.checkpoint import save_policy
from vla_rlaif.policies.gaussian_torch import GaussianTorch
from vla_rlaif.policy_config import GaussianConfig
from vla_rlaif.serve.watch import stamp_of, watch
from vla_rlaif.types import EnvSpec


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


def folder_policy(folder, version: int, spec: EnvSpec = SPEC) -> None:
    policy = GaussianTorch(GaussianConfig(backend="torch"), spec)
    save_policy(folder, policy.metadata(), weights_of(version))


async def test_watch_follows_a_folder_and_skips_what_is_broken(tmp_path):
    best, said = tmp_path / "best", []
    folder_policy(best, 0)

    def make():
        policy = GaussianTorch(GaussianConfig(backend="torch"), SPEC)
        try:
            policy.load(load_file(best / "params.safetensors"), 0)
        except SafetensorError as error:
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
        await asyncio.sleep(0.1)  # some rounds in which nothing changes
        assert len(said) == 3 and said[2].startswith(f"{best} was replaced, but version 2 goes on acting: damaged")
        (best / "policy.json").unlink()
        await asyncio.sleep(0.1)
        np.testing.assert_array_equal((await client.actions(sent))["actions"], expected)
        folder_policy(best, 3)
        await until(lambda: server.version == 3, "the next good one")
        await asyncio.sleep(0.1)
        assert len(said) == 4 and server.version == 3 and not watching.done()
        watching.cancel()


async def test_watch_takes_the_newest_of_a_folder_that_changes_while_it_is_read(tmp_path):
    best, said, coming = tmp_path / "best", [], [2]
    folder_policy(best, 0)

    def make():
        policy = GaussianTorch(GaussianConfig(backend="torch"), SPEC)
        policy.load(load_file(best / "params.safetensors"), 0)
        if policy.params["bias"][0].item() == weights_of(1)["bias"][0] and coming:
            folder_policy(best, coming.pop())
        return policy

    async with serving(make) as server, robot(server) as client:
        watching = asyncio.create_task(watch(server, best, stamp_of(best), say=said.append, poll_s=0.02))
        folder_policy(best, 1)
        await until(lambda: server.version == 1, "a swap")
        actions = (await client.actions(observation(0)))["actions"]
        np.testing.assert_array_equal(actions, in_process(make_gaussian(2), observation(0), 0))
        assert said == [f"{best} was replaced: version 1 acts"]
        watching.cancel()
