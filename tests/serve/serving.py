"""A tiny policy to serve, and a robot that talks to the server; its wire format is written anew, not ours."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import msgpack
import numpy as np
from prometheus_client.parser import text_string_to_metric_families
from websockets.asyncio.client import ClientConnection, connect

from vla_rlaif.interfaces import Policy
from vla_rlaif.policies.gaussian_torch import GaussianTorch
from vla_rlaif.policy_config import GaussianConfig
from vla_rlaif.serve.server import PolicyServer
from vla_rlaif.serve.settings import ServeSettings
from vla_rlaif.types import Decision, EnvSpec, Observation, Weights

SPEC = EnvSpec(
    cameras=("primary", "wrist"),
    image_size=8,
    state_dim=4,
    action_dim=2,
    chunk=3,
    max_decisions=5,
    instructions=("reach the goal", "push the cube"),
)


def weights_of(version: int) -> Weights:
    rng = np.random.default_rng(version)
    return {
        "weight": 0.1 * rng.normal(size=(6, 4)).astype(np.float32),
        "bias": 0.1 * rng.normal(size=6).astype(np.float32),
    }


def make_gaussian(version: int = 0) -> GaussianTorch:
    policy = GaussianTorch(GaussianConfig(backend="torch"), SPEC)
    policy.load(weights_of(version), version)
    return policy


@dataclass
class SlowPolicy:
    """Acts only while the gate is open; keeps the sizes of its calls. Every entry of a row's action is the rule's."""

    gate: threading.Event = field(default_factory=threading.Event)
    sizes: list[int] = field(default_factory=list)
    version: int = 0
    window: int = 1
    rule: Callable[[np.ndarray], np.ndarray] = lambda state: state.sum(axis=1)  # [N P] -> [N]

    def load(self, weights: Weights, version: int) -> None:
        self.version = version

    def act(self, obs: Observation, seeds: np.ndarray, *, noise_scale: float = 1.0) -> Decision:
        self.sizes.append(len(seeds))
        assert self.gate.wait(timeout=30)
        values = self.rule(obs.state).astype(np.float32)
        action = np.tile(values[:, None, None], (1, SPEC.chunk, SPEC.action_dim))
        return Decision(action=action, logp=np.zeros((len(seeds), 1), np.float32), trace={})


def observation(seed: int, prompt: str = "reach the goal") -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    return {
        "observation/image": rng.integers(0, 256, (8, 8, 3), np.uint8),
        "observation/wrist_image": rng.integers(0, 256, (8, 8, 3), np.uint8),
        "observation/state": rng.normal(size=4).astype(np.float32),
        "prompt": prompt,
    }


def in_process(policy: Any, sent: dict[str, Any], seed: int, noise_scale: float = 0.0) -> np.ndarray:
    """The same decision without a server."""
    obs = Observation(
        images={"primary": sent["observation/image"][None], "wrist": sent["observation/wrist_image"][None]},
        state=sent["observation/state"][None],
        instruction=(sent["prompt"],),
    )
    return policy.act(obs, np.array([seed], np.uint32), noise_scale=noise_scale).action[0]


def pack(message: Any) -> bytes:
    def array(value: np.ndarray) -> dict[bytes, Any]:
        fields = (True, value.tobytes(), value.dtype.str, value.shape)
        return dict(zip((b"__ndarray__", b"data", b"dtype", b"shape"), fields, strict=True))

    packed = msgpack.packb(message, default=array)
    assert packed is not None
    return packed


def unpack(data: bytes) -> Any:
    def array(items: dict[Any, Any]) -> Any:
        if b"__ndarray__" not in items:
            return items
        return np.ndarray(items[b"shape"], items[b"dtype"], items[b"data"])

    return msgpack.unpackb(data, object_hook=array)


@dataclass
class Client:
    """Asks as openpi's WebsocketClientPolicy does: one message, one reply."""

    socket: ClientConnection
    metadata: dict[str, Any]

    async def infer(self, message: dict[str, Any] | bytes | str) -> dict[str, Any] | str:
        """A reply, or the text of an error."""
        await self.socket.send(pack(message) if isinstance(message, dict) else message)
        reply = await self.socket.recv()
        return reply if isinstance(reply, str) else unpack(reply)

    async def actions(self, message: dict[str, Any]) -> dict[str, Any]:
        reply = await self.infer(message)
        assert isinstance(reply, dict), reply
        return reply


@asynccontextmanager
async def robot(server: PolicyServer, query: str = "", **options: Any) -> AsyncIterator[Client]:
    async with connect(f"ws://127.0.0.1:{server.port}/{query}", compression=None, max_size=None, **options) as socket:
        data = await socket.recv()
        assert isinstance(data, bytes)
        yield Client(socket, unpack(data))


def settings(**changes: Any) -> ServeSettings:
    """On a port that the system chooses; batches of at most 4."""
    return ServeSettings(**{"port": 0, "max_batch": 4, **changes})


def serving(
    policy: Callable[[], Policy] = make_gaussian,
    *,
    tokens: tuple[str, ...] = (),
    say: Callable[[str], None] = lambda text: None,
    **changes: Any,
) -> PolicyServer:
    """A server whose deadline does not depend on how busy the machine is."""
    return PolicyServer(policy, SPEC, settings(**{"deadline_ms": 10_000.0, **changes}), tokens=tokens, say=say)


def quiet(text: str) -> None:
    """What the server says is not of interest."""


async def http(server: PolicyServer, path: str, *headers: str) -> tuple[int, str]:
    """Status and body of a GET."""
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    lines = (f"GET {path} HTTP/1.1", "Host: localhost", *headers, "", "")
    writer.write("\r\n".join(lines).encode())
    data = (await reader.read()).decode()
    writer.close()
    head, _, body = data.partition("\r\n\r\n")
    return int(head.split()[1]), body


def metric(server: PolicyServer, name: str, **labels: str) -> float:
    """One sample, as Prometheus would read it."""
    families = text_string_to_metric_families(server.metrics.text().decode())
    full = f"vla_rlaif_serve_{name}"
    found = [s.value for f in families for s in f.samples if s.name == full and s.labels == labels]
    assert len(found) == 1, f"{full} {labels}: {found}"
    return found[0]


async def until(condition: Callable[[], bool], what: str, timeout_s: float = 10.0) -> None:
    for _ in range(round(timeout_s / 0.005)):
        if condition():
            return
        await asyncio.sleep(0.005)
    raise AssertionError(f"not within {timeout_s:g} s: {what}")
