"""Who may connect, and what is answered over plain HTTP."""

import asyncio

import pytest
from prometheus_client.parser import text_string_to_metric_families
from serving import (
    SlowPolicy,
    http,
    metric,
    observation,
    robot,
    serving,
)
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosedError, InvalidStatus

from vla_rlaif.serve.server import Drained

TOKEN = "0123456789abcdef0123"


async def test_health_readiness_and_metrics():
    policy = SlowPolicy()
    server = serving(lambda: policy, stall_s=0.05)
    await server.listen()
    warming = asyncio.create_task(server.warm_up())
    assert await http(server, "/healthz") == (200, "ok\n")
    assert await http(server, "/readyz") == (503, "warming up\n")
    early = asyncio.create_task(ask_zero(server))  # connects now and gets its metadata when the policy is warm
    policy.gate.set()
    await warming
    await early
    assert policy.sizes[:3] == [1, 2, 4]  # every batch size, before the first robot
    assert await http(server, "/readyz") == (200, "ok\n")
    status, text = await http(server, "/metrics")
    names = {family.name for family in text_string_to_metric_families(text)}
    assert status == 200
    expected = "requests request_seconds queue_seconds policy_seconds batch_size queue_depth robots weights_version"
    assert {f"vla_rlaif_serve_{name}" for name in f"{expected} weight_swaps disconnects ready".split()} <= names
    assert metric(server, "request_seconds_count") == 1
    assert (await http(server, "/elsewhere"))[0] == 426  # what is no websocket is told to become one
    async with robot(server) as client:
        policy.gate.clear()
        hanging = asyncio.create_task(client.infer(observation(0)))
        await asyncio.sleep(0.2)
        status, text = await http(server, "/healthz")
        assert status == 503 and text.startswith("the policy has not returned for")
        policy.gate.set()
        await hanging
    assert (await http(server, "/healthz"))[0] == 200
    assert await server.drain() == Drained(num_cut_off=0, is_stuck=False)


async def ask_zero(server):
    async with robot(server) as client:
        return await client.actions(observation(0))


async def test_tokens():
    async with serving(tokens=(TOKEN, TOKEN[::-1])) as server:
        for header in ({}, {"Authorization": "Api-Key wrong"}, {"Authorization": f"Api-Key {TOKEN}x"}):
            with pytest.raises(InvalidStatus) as refused:
                async with robot(server, additional_headers=header):
                    pass
            assert refused.value.response.status_code == 401
        for token in (TOKEN, TOKEN[::-1]):
            async with robot(server, additional_headers={"Authorization": f"Api-Key {token}"}) as client:
                await client.actions(observation(0))
        assert (await http(server, "/metrics"))[0] == 401
        assert (await http(server, "/metrics", f"Authorization: Bearer {TOKEN}"))[0] == 200
        assert (await http(server, "/healthz"))[0] == (await http(server, "/readyz"))[0] == 200


async def test_web_pages_and_unknown_parameters_are_refused():
    async with serving() as server:
        for query, options, status in [("", {"origin": "http://evil.example"}, 403), ("?seed=1", {}, 400)]:
            with pytest.raises(InvalidStatus) as refused:
                async with robot(server, query, **options):
                    pass
            assert refused.value.response.status_code == status


async def test_no_room_for_another_robot():
    async with serving(max_connections=1) as server, robot(server) as client:
        async with connect(f"ws://127.0.0.1:{server.port}") as second:
            with pytest.raises(ConnectionClosedError, match="no room for another robot"):
                await second.recv()
        assert second.close_code == 1013
        await client.actions(observation(0))


async def test_a_port_that_is_taken():
    async with serving() as server:
        with pytest.raises(ValueError, match=f"cannot listen on 127.0.0.1:{server.port}"):
            await serving(port=server.port).listen()


def test_a_network_needs_tokens():
    with pytest.raises(ValueError, match="--token-file"):
        serving(host="0.0.0.0")
