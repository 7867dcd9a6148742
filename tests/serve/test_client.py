# ruff: noqa: SIM117 (a server, and inside of it what is expected)
"""A policy behind a server plays what it plays in process, bit for bit, and every way to fail says what to do."""

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from serving import pack, unpack
from websockets.asyncio.server import ServerConnection, serve

from vla_rlaif.envs.point_reach import PointReach
from vla_rlaif.policies.gaussian_torch import GaussianTorch
from vla_rlaif.policy_config import GaussianConfig
from vla_rlaif.rollout import Split, held_out_starts, rollout
from vla_rlaif.serve.client import ServedPolicy, WithBegin
from vla_rlaif.serve.server import PolicyServer
from vla_rlaif.serve.settings import ServedSettings, ServeSettings
from vla_rlaif.types import Decision, Observation, Weights

NUM = 3
SPEC = PointReach(NUM, max_decisions=3).spec
PATIENT = ServedSettings(timeout_s=30.0, connect_s=30.0)


@contextlib.contextmanager
def running(start: Callable[[], Any]) -> Iterator[Any]:
    """An async context manager's object, alive on a loop of its own thread."""
    loop, ready, stop, made = asyncio.new_event_loop(), threading.Event(), asyncio.Event(), []

    async def live() -> None:
        async with start() as server:
            made.append(server)
            ready.set()
            await stop.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(live(),))
    thread.start()
    try:
        assert ready.wait(30)
        yield made[0]
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(30)
        loop.close()


def ours(policy: Callable[[], Any], *, tokens: tuple[str, ...] = (), **changes: Any):
    settings = ServeSettings(**{"port": 0, "max_batch": 4, "fixed_batch": True, "deadline_ms": 10_000.0, **changes})
    return running(lambda: PolicyServer(policy, SPEC, settings, tokens=tokens, say=lambda text: None))


def url(server: PolicyServer) -> str:
    return f"ws://127.0.0.1:{server.port}"


@dataclass
class Remembering:
    """Acts on the last two frames, on whether they are real, on the sentence and on the seed."""

    version: int = 7
    window: int = 2

    def act(self, obs: Observation, seeds: np.ndarray, *, noise_scale: float = 1.0) -> Decision:
        assert obs.frame_ok is not None
        drift = (obs.state[:, 1] - obs.state[:, 0])[:, :2] + 0.1 * obs.frame_ok.sum(axis=1, keepdims=True)
        noise = np.stack([np.random.default_rng(int(s)).standard_normal(2) for s in seeds])
        action = (drift + 0.5 * noise + 0.01 * obs.images["top"].mean(axis=(1, 2, 3, 4))[:, None]).astype(np.float32)
        return Decision(action=action[:, None], logp=np.zeros((len(seeds), 1), np.float32), trace={})

    def load(self, weights: Weights, version: int) -> None:
        self.version = version


def make_gaussian() -> GaussianTorch:
    policy = GaussianTorch(GaussianConfig(backend="torch"), SPEC)
    rng = np.random.default_rng(0)
    weights = {name: 0.3 * rng.normal(size=v.shape).astype(np.float32) for name, v in policy.params.items()}
    policy.load(weights, 0)
    return policy


@pytest.mark.parametrize("make", [make_gaussian, Remembering])
def test_whole_episodes_are_those_of_the_policy_in_process(make):
    """Two rounds of episodes: the server's histories begin anew with each, and seeds are the evaluation's."""
    starts = held_out_starts(Split.TEST, 2 * NUM)
    with ours(make) as server:
        policy = ServedPolicy(url(server), SPEC, PATIENT)
        try:
            env = WithBegin(PointReach(NUM, max_decisions=3), policy)
            there = rollout(policy, env, starts, seed=4, noise_scale=0.0)
        finally:
            policy.close()
    here = rollout(make(), PointReach(NUM, max_decisions=3), starts, seed=4, noise_scale=0.0, act_batch=NUM)
    np.testing.assert_array_equal(there.action, here.action)
    np.testing.assert_array_equal(there.success, here.success)
    assert here.action.std() > 0.01 and there.version == 0  # of a server: the version that it was started with


def observation(num: int = NUM) -> Observation:
    return PointReach(num, max_decisions=3).reset(np.arange(num)).obs


def act(policy: ServedPolicy, **changes: Any) -> np.ndarray:
    return policy.act(replace(observation(), **changes), np.arange(NUM, dtype=np.uint32), noise_scale=0.0).action


@contextlib.contextmanager
def client(address: str, spec=SPEC, settings: ServedSettings = PATIENT) -> Iterator[ServedPolicy]:
    policy = ServedPolicy(address, spec, settings)
    try:
        yield policy
    finally:
        policy.close()


def test_nobody_there():
    with pytest.raises(ValueError, match=r"there is no policy server at ws://127\.0\.0\.1:9: .*Start it"):
        ServedPolicy("ws://127.0.0.1:9", SPEC, PATIENT)
    with pytest.raises(ValueError, match=r"ws:/nowhere refused the connection: .*URI"):
        ServedPolicy("ws:/nowhere", SPEC, PATIENT)


def test_tokens(tmp_path):
    token = "0123456789abcdef0123"
    (tmp_path / "token").write_text(token + "\n")
    (tmp_path / "empty").write_text("\n")
    with ours(make_gaussian, tokens=(token,)) as server:
        with pytest.raises(ValueError, match=r"refused the connection: .*401.*--served\.token-file"):
            ServedPolicy(url(server), SPEC, PATIENT)
        with client(url(server), settings=replace(PATIENT, token_file=tmp_path / "token")) as policy:
            assert act(policy).shape == (NUM, 1, 2)
        with pytest.raises(ValueError, match="is empty, wanted a token"):
            ServedPolicy(url(server), SPEC, replace(PATIENT, token_file=tmp_path / "empty"))


def test_what_the_server_expects_is_checked_before_anything_is_played():
    with ours(make_gaussian) as server:
        other = replace(SPEC, state_dim=5, image_size=32)
        with pytest.raises(ValueError, match=r"images \[\[16, 16, 3\]\], not \[\[32, 32, 3\]\]; state 4, not 5"):
            ServedPolicy(url(server), other, PATIENT)
        with pytest.raises(ValueError, match=r"--served\.cameras names 'wrist'; the env has top"):
            ServedPolicy(url(server), SPEC, replace(PATIENT, cameras={"wrist": "a"}))
        with client(url(server), spec=replace(SPEC, chunk=2)) as policy:
            with pytest.raises(ValueError, match="answers chunks of 1 actions, and the env executes 2"):
                act(policy)
            with pytest.raises(ValueError, match="takes no weights"):
                policy.load({}, 1)
    with ours(make_gaussian, state_keys=("a", "b")) as server:
        with pytest.raises(ValueError, match=r"wants the state in parts \(a, b\); start it without --state-keys"):
            ServedPolicy(url(server), SPEC, PATIENT)


def test_a_server_that_samples_is_not_measured_as_one_that_does_not():
    with ours(make_gaussian, noise_scale=1.0) as server, client(url(server)) as policy:
        with pytest.raises(ValueError, match="acts with --noise-scale 1, wanted 0"):
            act(policy)


def test_the_servers_reason_is_passed_on():
    with ours(make_gaussian) as server, client(url(server)) as policy:
        with pytest.raises(ValueError, match=r"did not act \(invalid\): the policy was not trained on 'fly'"):
            act(policy, instruction=("fly",) * NUM)


def test_weights_that_change_meanwhile_end_it():
    with ours(make_gaussian) as server, client(url(server)) as policy:
        first = act(policy)
        np.testing.assert_array_equal(act(policy), first)
        server._engine._loaded = replace(server._engine._loaded, version=3)
        with pytest.raises(ValueError, match=r"changed its weights meanwhile \(versions \[0, 3\]\).*--watch"):
            act(policy)


@dataclass
class Stuck(Remembering):
    gate: threading.Event = threading.Event()  # noqa: RUF009 (one for all)
    window: int = 1

    def act(self, obs: Observation, seeds: np.ndarray, *, noise_scale: float = 1.0) -> Decision:
        assert self.gate.wait(30)
        return Decision(action=np.zeros((len(seeds), 1, 2), np.float32), logp=np.zeros((len(seeds), 1)), trace={})


def test_a_late_answer_is_waited_for_and_no_longer_than_asked():
    """The server gives up after 50 ms; the client asks again until its own deadline."""
    Stuck.gate.set()
    with (
        ours(Stuck, deadline_ms=50.0) as server,
        client(url(server), settings=replace(PATIENT, timeout_s=0.5)) as policy,
    ):
        act(policy)
        Stuck.gate.clear()
        with pytest.raises(ValueError, match=r"did not answer within 0\.5 s.*--served\.timeout-s.*'expired: no action"):
            act(policy)
        threading.Timer(0.3, Stuck.gate.set).start()
        with client(url(server), settings=replace(PATIENT, timeout_s=10.0)) as other:
            assert act(other).shape == (NUM, 1, 2)


def foreign(answer: Callable[[dict[str, Any]], bytes | str | None], hello: bytes | str = pack({"model": "x"})):
    """A server of openpi's protocol that is not ours. Answering None closes the connection."""

    async def converse(robot: ServerConnection) -> None:
        await robot.send(hello)
        async for message in robot:
            assert isinstance(message, bytes)
            reply = answer(unpack(message))
            if reply is None:
                await robot.close(1011, "the model fell over")
                return
            await robot.send(reply)

    return running(lambda: serve(converse, "127.0.0.1", 0, compression=None))


def address(server: Any) -> str:
    return f"ws://127.0.0.1:{server.sockets[0].getsockname()[1]}"


def test_another_server_of_the_protocol():
    """As openpi's own: it tells nothing of itself, and answers more actions than are executed."""
    seen = []

    def answer(request: dict[str, Any]) -> bytes:
        seen.append(request)
        return pack({"actions": np.tile(request["robot"][:2], (9, 1)).astype(np.float64)})

    settings = replace(PATIENT, cameras={"top": "images/top"}, state_key="robot", prompt_key="task")
    with foreign(answer) as server, client(address(server), settings=settings) as policy:
        action = act(policy)
        assert not policy.is_ours and policy.version == 0
    obs = observation()
    np.testing.assert_array_equal(action, obs.state[:, None, :2].astype(np.float32))
    assert all(sorted(request) == ["images/top", "robot", "task"] for request in seen)
    assert sorted(r["images/top"].tobytes() for r in seen) == sorted(i.tobytes() for i in obs.images["top"])


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        (pack({"action": np.zeros((1, 2))}), r"answered keys action, wanted actions of \[W 2\]"),
        (pack({"actions": np.zeros((1, 3))}), r"answered \[1, 3\], wanted actions of \[W 2\]"),
        (pack({"actions": np.full((1, 2), np.nan)}), "an action that is not finite"),
        ("Traceback ...\nKeyError: 'image'", r"did not act \(Traceback .*: .*'image'"),
        (None, r"closed the connection \(1011: the model fell over\)"),
    ],
)
def test_answers_that_are_none(reply, message):
    with foreign(lambda request: reply) as server, client(address(server)) as policy:
        with pytest.raises(ValueError, match="(?s)" + message):
            act(policy)


def test_a_server_of_something_else():
    with foreign(lambda request: "", hello="welcome to the chat") as server:
        with pytest.raises(ValueError, match="does not speak openpi's protocol: it began with a text, 'welcome"):
            ServedPolicy(address(server), SPEC, PATIENT)
