"""The server over real sockets: actions as in process, whoever shares a batch; deadlines, overload."""

import asyncio
from contextlib import AsyncExitStack, asynccontextmanager

import numpy as np
import pytest
from serving import (
    SPEC,
    SlowPolicy,
    in_process,
    make_gaussian,
    metric,
    observation,
    robot,
    serving,
    until,
)

from vla_rlaif.policies.gaussian_jax import GaussianJax
from vla_rlaif.policy_config import GaussianConfig

TOKEN = "0123456789abcdef0123"


@asynccontextmanager
async def robots(num, policy, **changes):
    """A server and ``num`` connected robots."""
    async with serving(policy, **changes) as server, AsyncExitStack() as stack:
        yield (server, *[await stack.enter_async_context(robot(server)) for _ in range(num)])


async def test_actions_are_those_in_process():
    policy = make_gaussian()
    async with serving() as server, robot(server) as client:
        assert client.metadata["action_horizon"] == 3 and client.metadata["version"] == 0
        for decision in range(3):
            sent = observation(decision)
            reply = await client.actions(sent)
            np.testing.assert_array_equal(reply["actions"], in_process(policy, sent, reply["seed"]), strict=True)
            assert (reply["version"], reply["decision"]) == (0, decision)
            assert reply["server_timing"].keys() == {"infer_ms", "queue_ms"} | (
                {"prev_total_ms"} if decision else set()
            )
            assert reply["policy_timing"]["infer_ms"] > 0


async def test_sampled_actions_follow_the_seed_of_the_reply():
    policy = make_gaussian()
    async with serving(noise_scale=1.0) as server, robot(server, "?robot=left") as left, robot(server) as other:
        sent = observation(0)
        replies = [await left.actions(sent), await left.actions(sent), await other.actions(sent)]
        for reply in replies:
            np.testing.assert_array_equal(reply["actions"], in_process(policy, sent, reply["seed"], 1.0))
        assert len({reply["seed"] for reply in replies}) == 3
        assert await left.infer({"reset": True}) == {"reset": True, "version": 0}
        assert (await left.actions(sent))["seed"] == replies[0]["seed"]
        assert (await other.actions(sent | {"reset": True}))["decision"] == 0


def make_jax() -> GaussianJax:
    policy = GaussianJax(GaussianConfig(), SPEC)
    rng = np.random.default_rng(0)
    policy.load({n: rng.normal(size=v.shape).astype(np.float32) for n, v in policy.params.items()}, 0)
    return policy


async def ask_together(server, num) -> list[np.ndarray]:
    """Robot i sends observation i; all ask at once."""
    gate = asyncio.Barrier(num)

    async def ask(seed: int) -> np.ndarray:
        async with robot(server) as client:
            await gate.wait()
            actions = (await client.actions(observation(seed)))["actions"]
            await gate.wait()
            return actions

    return await asyncio.gather(*(ask(seed) for seed in range(num)))


@pytest.mark.parametrize("make", [make_jax, make_gaussian])
async def test_company_in_a_fixed_batch_changes_no_bit(make):
    """Seven robots ask together: batches of 4 and 3. Their actions are those that each gets alone."""
    async with serving(make, max_wait_ms=200.0, fixed_batch=True) as server:
        together = await ask_together(server, 7)
        assert metric(server, "batch_size_count") == 2 and metric(server, "batch_size_sum") == 7
        async with robot(server) as client:
            for seed, actions in enumerate(together):
                alone = await client.actions(observation(seed))
                np.testing.assert_array_equal(actions, alone["actions"])


@pytest.mark.parametrize("make", [make_jax, make_gaussian])
async def test_libraries_sum_in_another_order_for_other_batch_sizes(make):
    """Why ``fixed_batch`` is there: the same rows in calls of other sizes are equal to 1e-6, not always to the bit."""
    async with serving(make, max_wait_ms=200.0) as server:
        for seed, actions in enumerate(await ask_together(server, 7)):
            np.testing.assert_allclose(actions, in_process(make(), observation(seed), 0), rtol=0, atol=1e-6)


async def test_a_lone_robot_does_not_wait_for_company():
    async with serving(max_wait_ms=10_000.0, deadline_ms=5000.0) as server, robot(server) as client:
        assert (await client.actions(observation(0)))["server_timing"]["queue_ms"] < 1000


async def test_errors_leave_the_connection_open():
    async with serving() as server, robot(server) as client:
        wrong = observation(0) | {"observation/state": np.zeros(3, np.float32)}
        error = await client.infer(wrong)
        assert isinstance(error, str) and error.startswith("invalid: the state has 3 values")
        assert (await client.infer("hello")) == "invalid: got a text frame, wanted a binary one (msgpack)."
        assert (await client.actions(observation(0)))["decision"] == 0
        assert metric(server, "requests_total", outcome="invalid") == 2
        assert metric(server, "requests_total", outcome="ok") == 1


def opened() -> SlowPolicy:
    policy = SlowPolicy()
    policy.gate.set()
    return policy


async def test_what_is_late_is_told_so_in_time_and_never_computed():
    policy = opened()
    async with robots(3, lambda: policy, max_batch=1) as (server, first, late, patient):
        policy.gate.clear()
        policy.sizes.clear()
        began = asyncio.get_running_loop().time()
        busy = asyncio.create_task(first.infer(observation(1)))
        await until(lambda: policy.sizes == [1], "the first call")
        waiting = asyncio.create_task(patient.infer(observation(3)))
        error = await late.infer(observation(2) | {"deadline_ms": 50})
        assert isinstance(error, str) and error.startswith("expired: no action by the deadline; 1 other")
        assert 0.04 < asyncio.get_running_loop().time() - began < 0.9
        policy.gate.set()
        assert not isinstance(await busy, str) and not isinstance(await waiting, str)
        assert policy.sizes == [1, 1]
        assert metric(server, "requests_total", outcome="expired") == 1
        again = await late.actions(observation(2))  # the failed request left no trace
        assert again["decision"] == 0


async def test_the_deadline_holds_during_the_call_as_well():
    policy = opened()
    async with serving(lambda: policy) as server, robot(server) as client:
        policy.gate.clear()
        error = await client.infer(observation(0) | {"deadline_ms": 30})
        assert isinstance(error, str) and error.startswith("expired")
        policy.gate.set()
        assert (await client.actions(observation(1)))["actions"][0, 0] == observation(1)["observation/state"].sum()


async def test_a_full_queue_answers_at_once():
    policy = opened()
    async with robots(4, lambda: policy, max_batch=1, max_queue=2, deadline_ms=20_000.0) as (server, a, b, c, d):
        policy.gate.clear()
        policy.sizes.clear()
        waiting = [asyncio.create_task(a.infer(observation(0)))]
        await until(lambda: policy.sizes == [1], "the first call")
        waiting += [asyncio.create_task(client.infer(observation(0))) for client in (b, c)]
        await until(lambda: metric(server, "queue_depth") == 2, "two requests in the queue")
        assert await d.infer(observation(0)) == "overloaded: 2 requests are waiting; try again later."
        policy.gate.set()
        assert all(isinstance(reply, dict) for reply in await asyncio.gather(*waiting))
        assert metric(server, "requests_total", outcome="overloaded") == 1


async def test_one_robot_s_mistake_inside_the_policy_is_its_own():
    def refuses_negatives(state):
        if (state[:, 0] < 0).any():
            raise ValueError("the first joint is negative")
        return state.sum(axis=1)

    policy = SlowPolicy(rule=refuses_negatives)
    policy.gate.set()
    good, bad = observation(0), observation(0)
    good["observation/state"] = np.ones(4, np.float32)
    bad["observation/state"] = -np.ones(4, np.float32)
    async with robots(3, lambda: policy, max_wait_ms=500.0) as (_, a, b, c):
        replies = await asyncio.gather(a.infer(good), b.infer(bad), c.infer(good))
    assert replies[1] == "invalid: the first joint is negative"
    assert [reply["actions"][0, 0] for reply in (replies[0], replies[2]) if isinstance(reply, dict)] == [4, 4]


async def test_a_policy_that_fails_is_asked_again():
    said, faults = [], [RuntimeError("out of memory")]

    def fails_once(state):
        if state.any() and faults:
            raise faults.pop()
        return state.sum(axis=1)

    policy = SlowPolicy(rule=fails_once)
    policy.gate.set()
    async with serving(lambda: policy, say=said.append) as server, robot(server) as client:
        assert await client.infer(observation(0)) == "failed: the policy raised RuntimeError: out of memory"
        assert (await client.actions(observation(0)))["decision"] == 0
        assert "out of memory" in said[0] and "Traceback" in said[0]
        assert metric(server, "requests_total", outcome="failed") == 1


async def test_an_action_that_is_not_finite_reaches_no_robot():
    policy = SlowPolicy(rule=lambda state: np.where(state[:, 0] == 9, np.nan, 0))
    policy.gate.set()
    nine = observation(0) | {"observation/state": np.full(4, 9, np.float32)}
    async with robots(2, lambda: policy, max_wait_ms=500.0) as (_, a, b):
        bad, good = await asyncio.gather(a.infer(nine), b.actions(observation(0)))
    assert bad == "failed: version 0 chose an action that is not finite." and not good["actions"].any()


async def test_actions_of_another_shape_than_the_spec_says():
    def make():
        policy = make_gaussian()
        policy.spec = SPEC.__class__(**{**vars(SPEC), "chunk": 1, "action_dim": 6})
        return policy

    with pytest.raises(ValueError, match=r"shape \(1, 1, 6\), its spec says \(1, 3, 2\)"):
        async with serving(make):
            pass
