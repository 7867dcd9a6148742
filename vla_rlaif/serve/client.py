"""A policy that a server answers for: ours, or any other that speaks openpi's protocol.

Each row of a batch is a robot of its own, with a connection of its own, so that the server keeps their histories apart.
Axes: see types.py; W actions that a server answers with, of which the first H are executed.
"""

import asyncio
import threading
from collections.abc import Coroutine, Mapping, Sequence
from concurrent.futures import TimeoutError as LateError
from typing import Any

import numpy as np
from jaxtyping import Float, Int, UInt32
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidURI

from vla_rlaif.interfaces import VectorEnv
from vla_rlaif.serve.protocol import decode, encode
from vla_rlaif.serve.settings import ServedSettings
from vla_rlaif.types import Decision, EnvSpec, Observation, Transition, Weights

AGAIN = ("overloaded", "expired")  # outcomes after which a request may be sent again
PAUSE_S = 0.05  # before that
MAX_TOLD = 100_000  # instructions that a server may list


class ServedPolicy:
    """A Policy for evaluation: it cannot be trained, and the server, not it, remembers what was seen. Whoever plays
    must call ``begin`` when episodes start (``WithBegin`` does)."""

    window = 1

    def __init__(self, url: str, spec: EnvSpec, settings: ServedSettings) -> None:
        """Connects one robot, which learns what the server expects.

        Raises:
            ValueError: there is no server, it refuses, or it is for another env.
        """
        self.url, self._spec, self._settings = url, spec, settings
        self._headers = {} if settings.token_file is None else {"Authorization": f"Api-Key {_token(settings)}"}
        self._loop = asyncio.new_event_loop()  # it runs all the time, to answer the server's pings
        self._thread = threading.Thread(target=self._loop.run_forever, name="policy client", daemon=True)
        self._thread.start()
        self._robots: list[ClientConnection] = []
        self._starting = True
        self._version: int | None = None
        self._refusal = ""
        try:
            self.metadata = self._run(self._connect(), settings.connect_s)
            self._keys = self._names()
        except BaseException:
            self.close()
            raise

    @property
    def version(self) -> int:
        """Of the server's weights, if it tells one."""
        return self._version or 0

    @property
    def is_ours(self) -> bool:
        """Whether the server takes our keys beside the observation: seed and reset."""
        return "instructions" in self.metadata and "noise_scale" in self.metadata

    def begin(self) -> None:
        """The next decision of every robot is the first of an episode."""
        self._starting = True

    def act(self, obs: Observation, seeds: UInt32[np.ndarray, " N"], *, noise_scale: float = 1.0) -> Decision:
        """The server's noise is the server's: ``noise_scale`` must be its own.

        Raises:
            ValueError: the server refuses, is late, leaves, or answers with something else than chunks for this env.
        """
        if self.is_ours and noise_scale != self.metadata["noise_scale"]:
            raise ValueError(
                f"{self.url} acts with --noise-scale {self.metadata['noise_scale']:g}, wanted {noise_scale:g}."
            )
        missing = len(seeds) - len(self._robots)
        if missing > 0:
            self._run(_gather([self._connect() for _ in range(missing)]), self._settings.connect_s)
        requests = [self._request(obs, row, int(seeds[row])) for row in range(len(seeds))]
        robots = self._robots[: len(seeds)]
        asked = [self._ask(robot, request) for robot, request in zip(robots, requests, strict=True)]
        replies = self._run(_gather(asked), self._settings.timeout_s)
        self._starting = False
        self._check_version(replies)
        action = np.stack([self._chunk(reply) for reply in replies])
        return Decision(action=action, logp=np.zeros((len(seeds), 1), np.float32), trace={})

    def load(self, weights: Weights, version: int) -> None:
        raise ValueError(f"{self.url} is a policy server; it takes no weights from here.")

    def close(self) -> None:
        async def leave() -> None:
            await asyncio.gather(*(robot.close() for robot in self._robots), return_exceptions=True)

        if self._loop.is_running():
            asyncio.run_coroutine_threadsafe(leave(), self._loop).result(self._settings.connect_s)
            self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _run[T](self, work: Coroutine[Any, Any, T], timeout_s: float) -> T:
        """Do it on the loop's thread, with a deadline and with the errors that a user can act on."""
        task = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return task.result(timeout_s)
        except LateError:  # also what connecting raises, the builtin TimeoutError
            task.cancel()
            raise ValueError(
                f"{self.url} did not answer within {timeout_s:g} s. Is it still loading, or too slow for "
                f"{max(1, len(self._robots))} robots? Wait longer (--served.timeout-s, --served.connect-s) or play "
                f"fewer at a time (--env.num-envs).{self._refusal}"
            ) from None
        except ConnectionClosed as closed:
            code, reason = (closed.rcvd.code, closed.rcvd.reason) if closed.rcvd else (1006, "no goodbye")
            raise ValueError(f"{self.url} closed the connection ({code}: {reason}). Evaluate again.") from None
        except (InvalidHandshake, InvalidURI) as error:
            raise ValueError(
                f"{self.url} refused the connection: {error}. Does it need a token (--served.token-file)?"
            ) from None
        except OSError as error:
            raise ValueError(f"there is no policy server at {self.url}: {error}. Start it, or correct it.") from None

    async def _connect(self) -> dict[str, Any]:
        robot = await connect(
            self.url, compression=None, max_size=None, additional_headers=self._headers, open_timeout=None
        )
        self._robots.append(robot)
        hello = await robot.recv()
        if not isinstance(hello, bytes):
            raise ValueError(f"{self.url} does not speak openpi's protocol: it began with a text, {hello[:80]!r}.")
        return decode(hello, max_items=MAX_TOLD)

    async def _ask(self, robot: ClientConnection, request: bytes) -> dict[str, Any]:
        while True:
            await robot.send(request)
            reply = await robot.recv()
            if isinstance(reply, bytes):
                return decode(reply)
            outcome, _, reason = reply.partition(": ")
            if outcome not in AGAIN:
                raise ValueError(f"{self.url} did not act ({outcome}): {reason[-2000:] or 'no reason given'}")
            self._refusal = f" Its last answer was {reply!r}."
            await asyncio.sleep(PAUSE_S)  # nothing was counted; the caller's deadline ends this

    def _names(self) -> dict[str, str]:
        """Camera -> key. What the server tells of its policy must be this env's."""
        cameras, told = self._spec.cameras, self.metadata
        defaults = ["observation/image", *(f"observation/{camera}_image" for camera in cameras[1:])]
        keys = {c: self._settings.cameras.get(c, key) for c, key in zip(cameras, defaults, strict=True)}
        strangers = sorted(self._settings.cameras.keys() - set(cameras))
        if strangers:
            raise ValueError(f"--served.cameras names {strangers[0]!r}; the env has {', '.join(cameras)}.")
        if not self.is_ours:
            return keys
        side, images = (
            self._spec.image_size,
            {k.removeprefix("images/"): v for k, v in told.items() if k[:7] == "images/"},
        )
        wanted = {
            "images": [[side, side, 3]] * len(cameras),
            "state": self._spec.state_dim,
            "actions": self._spec.action_dim,
        }
        found = {"images": [*images.values()], "state": told["state/size"], "actions": told["action_dim"]}
        differ = [f"{name} {found[name]}, not {wanted[name]}" for name in wanted if found[name] != wanted[name]]
        if differ:
            raise ValueError(f"{self.url} serves a policy of another env: {'; '.join(differ)}.")
        if len(told["state/keys"]) > 1:
            parts = ", ".join(told["state/keys"])
            raise ValueError(f"{self.url} wants the state in parts ({parts}); start it without --state-keys.")
        return dict(zip(cameras, images, strict=True))

    def _request(self, obs: Observation, row: int, seed: int) -> bytes:
        ours = self.is_ours
        state_key = self.metadata["state/keys"][0] if ours else self._settings.state_key
        prompt_key = self.metadata["prompt"] if ours else self._settings.prompt_key
        request: dict[str, Any] = {key: np.ascontiguousarray(obs.images[c][row]) for c, key in self._keys.items()}
        request |= {state_key: obs.state[row].astype(np.float32), prompt_key: obs.instruction[row]}
        if ours:
            request |= {"seed": seed, "reset": self._starting, "deadline_ms": 1e3 * self._settings.timeout_s}
        return encode(request)

    def _chunk(self, reply: Mapping[str, Any]) -> Float[np.ndarray, "H A"]:
        action, spec = reply.get("actions"), self._spec
        if not isinstance(action, np.ndarray) or action.ndim != 2 or action.shape[1] != spec.action_dim:
            found = f"{list(action.shape)}" if isinstance(action, np.ndarray) else f"keys {', '.join(reply)}"
            raise ValueError(f"{self.url} answered {found}, wanted actions of [W {spec.action_dim}].")
        if len(action) < spec.chunk:
            raise ValueError(
                f"{self.url} answers chunks of {len(action)} actions, and the env executes {spec.chunk}: set env.chunk."
            )
        if not np.isfinite(action[: spec.chunk]).all():
            raise ValueError(f"{self.url} answered an action that is not finite.")
        return action[: spec.chunk].astype(np.float32)

    def _check_version(self, replies: list[dict[str, Any]]) -> None:
        """One evaluation is of one policy."""
        found = sorted({reply["version"] for reply in replies if "version" in reply})
        if self._version is not None:
            found = sorted({*found, self._version})
        if len(found) > 1:
            raise ValueError(
                f"{self.url} changed its weights meanwhile (versions {found}); evaluate a server without --watch."
            )
        self._version = found[0] if found else None


class WithBegin:
    """An env whose resets tell a ``ServedPolicy`` that episodes begin."""

    def __init__(self, env: VectorEnv, policy: ServedPolicy) -> None:
        self._env, self._policy = env, policy

    @property
    def num_envs(self) -> int:
        return self._env.num_envs

    @property
    def spec(self) -> EnvSpec:
        return self._env.spec

    def reset(self, seeds: Int[np.ndarray, " N"]) -> Transition:
        self._policy.begin()
        return self._env.reset(seeds)

    def step(self, action: Float[np.ndarray, "N H A"]) -> Transition:
        return self._env.step(action)

    def close(self) -> None:
        self._env.close()


async def _gather[T](work: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """The first error cancels the others."""
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


def _token(settings: ServedSettings) -> str:
    assert settings.token_file is not None
    try:
        lines = settings.token_file.read_text().split()
    except FileNotFoundError:
        raise ValueError(f"no token file {settings.token_file}.") from None
    if not lines:
        raise ValueError(f"{settings.token_file} is empty, wanted a token.")
    return lines[0]
