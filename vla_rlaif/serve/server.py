"""The policy server: websocket requests of openpi clients and HTTP health and metrics on one port.

Protocol: the server sends metadata when it is ready; then one binary request, one reply, and so on. A reply is binary
with the actions, or a text frame "outcome: reason" that leaves the connection open. Close codes: 1012 the server
drains, 1013 it has no room (connect again later), 1008 nothing but invalid requests, 1009 a message is too large.
"""

import asyncio
import errno
import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from websockets.asyncio.server import Server, ServerConnection, serve
from websockets.exceptions import ConnectionClosed
from websockets.frames import CloseCode

from vla_rlaif.interfaces import Policy
from vla_rlaif.serve.batching import batch_sizes
from vla_rlaif.serve.connection import PatientConnection
from vla_rlaif.serve.endpoints import Endpoints, robot_name
from vla_rlaif.serve.engine import Engine, Refusal
from vla_rlaif.serve.metrics import Leaving, Outcome, ServeMetrics
from vla_rlaif.serve.protocol import encode
from vla_rlaif.serve.requests import RequestReader
from vla_rlaif.serve.robot import Robot
from vla_rlaif.serve.settings import ServeSettings, require_guard
from vla_rlaif.types import EnvSpec, Weights

MAX_INVALID = 100  # invalid requests in a row; then the connection is closed
CLOSE_TIMEOUT_S = 2.0  # for the robot's side of the closing handshake
OPEN_TIMEOUT_S = 5.0  # for the opening one
DRAINING = "the server drains; connect again"


@dataclass(frozen=True, kw_only=True)
class Drained:
    """How a drain ended."""

    num_cut_off: int  # robots that were still waiting for a reply at the deadline
    is_stuck: bool  # a call of the policy, or the staging of weights, has not returned: leave by os._exit


class PolicyServer:
    """``async with PolicyServer(...) as server``: listening on entry, ready to act soon after, drained on exit."""

    def __init__(
        self,
        make_policy: Callable[[], Policy],
        spec: EnvSpec,
        settings: ServeSettings,
        *,
        tokens: tuple[str, ...] = (),
        version: int = 0,
        say: Callable[[str], None] = print,
    ) -> None:
        require_guard(settings, tokens)
        self._settings, self._version = settings, version
        self._reader = RequestReader(spec, settings)
        self.metrics = ServeMetrics(batch_sizes(settings.max_batch, fixed=False))
        self._robots: set[ServerConnection] = set()
        self._conversations: set[asyncio.Task[None]] = set()  # the tasks that talk to robots
        self._idle: set[asyncio.Timeout] = set()  # of robots that are between requests
        self._ready, self._draining = asyncio.Event(), False
        self._engine = Engine(make_policy, spec, settings, self.metrics, num_robots=lambda: len(self._robots), say=say)
        self.metrics.watch("robots", "Connected robots", lambda: len(self._robots))
        self.metrics.watch("ready", "1 while requests are admitted", lambda: self.unready is None)
        self._endpoints = Endpoints(tokens, self.metrics, ailment=self._engine.ailment, unready=lambda: self.unready)
        self._listener: Server | None = None
        self._drained: Drained | None = None

    async def __aenter__(self) -> "PolicyServer":
        try:
            await self.listen()
            await self.warm_up()
        except BaseException:
            await self.drain()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.drain()

    @property
    def port(self) -> int:
        assert self._listener is not None, "port before listen()"
        return self._listener.sockets[0].getsockname()[1]

    @property
    def version(self) -> int:
        """Of the weights that act from the next batch on."""
        return self._engine.version

    @property
    def unready(self) -> str | None:
        """Why requests are not admitted, if so."""
        if self._draining:
            return "draining"
        return None if self._ready.is_set() else "warming up"

    async def listen(self) -> None:
        """Open the port: health is answered, robots may connect and wait for the policy."""
        s = self._settings
        connection = functools.partial(PatientConnection, write_timeout_s=s.write_timeout_s)
        listener = serve(
            self._serve_robot,
            s.host,
            s.port,
            compression=None,  # images do not shrink, and a small message cannot become a large one
            origins=[None],  # no web page may talk to a server on its reader's machine
            process_request=self._endpoints.respond,
            open_timeout=OPEN_TIMEOUT_S,
            close_timeout=CLOSE_TIMEOUT_S,
            ping_interval=s.ping_interval_s,
            ping_timeout=s.ping_timeout_s,
            max_size=s.max_message_bytes,
            create_connection=connection,  # pyright: ignore[reportArgumentType] (a factory will do, its docs say)
            max_queue=1,  # a robot has one request at a time; more stay in its own buffers
            logger=logging.getLogger("vla_rlaif.serve"),
        )
        try:
            self._listener = await listener
        except OSError as error:
            if error.errno not in (errno.EADDRINUSE, errno.EADDRNOTAVAIL, errno.EACCES):
                raise
            raise ValueError(f"cannot listen on {s.host}:{s.port}: {error.strerror}. Choose another port.") from None

    async def warm_up(self) -> None:
        """Make the policy, compile what it needs, admit requests."""
        await self._engine.start(self._version)
        self._ready.set()

    async def stage(self, weights: Weights | None, version: int) -> None:
        """See Engine.stage. Requests are answered by the old weights meanwhile."""
        await self._engine.stage(weights, version)

    def commit(self, version: int) -> None:
        """See Engine.commit. No request is dropped: a batch runs wholly on the weights it began with."""
        self._engine.commit(version)

    async def drain(self, deadline_s: float | None = None) -> Drained:
        """Stop admission, answer what has arrived, close: within ``deadline_s``, or the settings' ``drain_s``."""
        if self._drained is not None:
            return self._drained
        loop = asyncio.get_running_loop()
        end = loop.time() + (self._settings.drain_s if deadline_s is None else deadline_s)
        self._draining = True
        self._ready.set()  # who waits for the policy is told to leave
        for idle in self._idle:
            idle.reschedule(loop.time())
        if self._conversations:
            await asyncio.wait(self._conversations, timeout=end - loop.time())
        cut_off = list(self._robots)
        for robot in cut_off:
            robot.transport.abort()
        for conversation in self._conversations:
            conversation.cancel()
        if self._listener is not None:
            self._listener.close(code=CloseCode.SERVICE_RESTART, reason=DRAINING)
            # Open TCP connections that never asked for anything may take OPEN_TIMEOUT_S.
            await asyncio.wait([asyncio.ensure_future(self._listener.wait_closed())], timeout=max(0, end - loop.time()))
        is_done = await self._engine.close(max(0.1, end - loop.time()))
        self._drained = Drained(num_cut_off=len(cut_off), is_stuck=not is_done)
        return self._drained

    async def _serve_robot(self, robot: ServerConnection) -> None:
        """One connection, from its metadata to its end."""
        if self._draining or len(self._robots) >= self._settings.max_connections:
            code = CloseCode.SERVICE_RESTART if self._draining else CloseCode.TRY_AGAIN_LATER
            self.metrics.left("refused")
            await robot.close(code, DRAINING if self._draining else "no room for another robot")
            return
        task = asyncio.current_task()
        assert task is not None
        self._robots.add(robot)
        self._conversations.add(task)
        try:
            self.metrics.left(await self._converse(robot))
        finally:
            self._robots.discard(robot)
            self._conversations.discard(task)

    async def _converse(self, robot: ServerConnection) -> Leaving:
        assert robot.request is not None
        name, num_invalid, previous_s, last = robot_name(robot.request.path), 0, None, False
        try:
            await self._ready.wait()
            if self._draining:
                await robot.close(CloseCode.SERVICE_RESTART, DRAINING)
                return "drained"
            state = Robot(name=name, seed=self._settings.seed, window=self._engine.window)
            await robot.send(encode({**self._reader.metadata(), "version": self._engine.version}))
            while not last and (message := await self._next(robot)) is not None:
                last = self._draining  # a robot has one request at a time: what else it has sent is not waited for
                arrived = asyncio.get_running_loop().time()
                outcome, reply = await self._reply(state, message, arrived, previous_s)
                self.metrics.count(outcome)
                self.metrics.request_s.observe(asyncio.get_running_loop().time() - arrived)
                await robot.send(reply)
                previous_s = asyncio.get_running_loop().time() - arrived
                num_invalid = num_invalid + 1 if outcome == "invalid" else 0
                if num_invalid == MAX_INVALID:
                    await robot.close(CloseCode.POLICY_VIOLATION, f"{MAX_INVALID} invalid requests in a row")
                    return "misbehaving"
                await asyncio.sleep(0)  # a robot that has sent a thousand messages takes turns with the others
            await robot.close(CloseCode.SERVICE_RESTART, DRAINING)
            return "drained"
        except ConnectionClosed as closed:
            return _why(robot, closed)

    async def _next(self, robot: ServerConnection) -> bytes | str | None:
        """The next message, or None if the server drains and none has arrived."""
        for _ in range(2):  # a drain that begins while we wait allows one more look
            try:
                async with asyncio.timeout(0 if self._draining else None) as idle:
                    self._idle.add(idle)
                    try:
                        return await robot.recv()
                    finally:
                        self._idle.discard(idle)
            except TimeoutError:
                continue
        return None

    async def _reply(
        self, robot: Robot, message: bytes | str, arrived: float, previous_s: float | None
    ) -> tuple[Outcome, bytes | str]:
        try:
            request = self._reader.read(message)
        except ValueError as error:
            return "invalid", f"invalid: {error}"
        if request.reset:
            robot.reset()
        if request.frame is None:
            return "reset", encode({"reset": True, "version": self._engine.version})
        view = robot.view(request.frame, request.seed)
        answer = await self._engine.submit(view, arrived + request.deadline_s)
        if isinstance(answer, Refusal):
            return answer.outcome, f"{answer.outcome}: {answer.text}"
        infer_ms, queue_ms = 1e3 * answer.policy_s, 1e3 * answer.queue_s
        timing = {"infer_ms": infer_ms, "queue_ms": queue_ms}
        if previous_s is not None:
            timing["prev_total_ms"] = 1e3 * previous_s
        reply: dict[str, Any] = {
            "actions": answer.action,
            "version": answer.version,
            "decision": robot.decision,
            "seed": view.seed,
            "server_timing": timing,
            "policy_timing": {"infer_ms": infer_ms},
        }
        robot.answered(request.frame)
        return "ok", encode(reply)


def _why(robot: ServerConnection, closed: ConnectionClosed) -> Leaving:
    if isinstance(robot, PatientConnection) and robot.is_slow:
        return "slow_reader"
    sent = closed.sent.code if closed.sent is not None else None
    if sent == CloseCode.MESSAGE_TOO_BIG:
        return "oversized"
    if sent == CloseCode.INTERNAL_ERROR:  # what websockets sends when a ping is not answered
        return "unresponsive"
    return "closed"
