"""A replica of the policy server: warm before it is announced, on the committed weights, drained before it goes."""

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from vla_rlaif.build import build_env
from vla_rlaif.pool.acting import start_policy_of, weights_of
from vla_rlaif.pool.actions import Admit, Drain, Sync, Warm
from vla_rlaif.pool.clock import SECOND
from vla_rlaif.pool.committed import load_committed, newest_name
from vla_rlaif.pool.endpoints import announce, withdraw
from vla_rlaif.pool.replica import Order, Report
from vla_rlaif.pool.work import Work
from vla_rlaif.serve.server import PolicyServer

POLL_S = 0.5  # between looks at the run's checkpoints
CLOSE_S = 10.0


class ServeDuty:
    """The server lives in an event loop on a thread of its own."""

    def __init__(self, replica: str, work: Work, address: str) -> None:
        self._replica, self._work = replica, work
        self._host = address if work.serve.host in ("0.0.0.0", "::") else work.serve.host
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="serve", daemon=True)
        self._thread.start()
        self._server: PolicyServer | None = None
        self._policy: Any = None  # the start policy: names of parameters that are not trained
        self._seen = ""  # checkpoint whose weights act
        self._syncing: float | None = None
        self._following: asyncio.Task[None] | None = None
        self._failure: str | None = None

    def do(self, order: Order, is_current: Callable[[], bool]) -> None:
        match order:
            case Warm():
                self._run(self._warm_up())
            case Sync(abort=False):
                self._run(self._sync(is_current))
            case Admit():
                self._run(self._open())
            case Drain(within=within):
                self._run(self._drain(within / SECOND))
            case _:
                pass

    def report(self) -> Report:
        server = self._server
        if server is None:
            return Report(failure=self._failure)
        return Report(
            version=server.version,
            failure=self._failure,
            syncing_s=None if self._syncing is None else self._loop.time() - self._syncing,
            latency=latency_of(server),
        )

    def close(self) -> None:
        self._run(self._drain(0.1))
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=CLOSE_S)
        self._loop.close()

    def _run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    async def _warm_up(self) -> None:
        config, work = self._work.run, self._work
        env = build_env(config.env)
        spec = env.spec
        env.close()
        self._policy = start_policy_of(config, spec)
        name, committed = newest_name(config.run_dir), load_committed(config.run_dir)

        def make() -> Any:
            policy = start_policy_of(config, spec)
            policy.load(weights_of(self._policy, committed.average), committed.version)
            return policy

        server = PolicyServer(make, spec, work.serve, tokens=work.tokens, version=committed.version, say=print)
        await server.listen()
        await server.warm_up()
        self._server, self._seen = server, name

    async def _sync(self, is_current: Callable[[], bool]) -> None:
        """Make the newest committed weights act; old ones act until then."""
        assert self._server is not None, "weights before the server"
        name = newest_name(self._work.run.run_dir)
        committed = await asyncio.to_thread(load_committed, self._work.run.run_dir)
        if committed.version > self._server.version:
            await self._server.stage(weights_of(self._policy, committed.average), committed.version)
            if is_current():
                self._server.commit(committed.version)
        self._seen = name

    async def _open(self) -> None:
        assert self._server is not None, "admission before the server"
        announce(self._work.endpoints, self._replica, f"ws://{self._host}:{self._server.port}")
        self._following = asyncio.create_task(self._follow())

    async def _follow(self) -> None:
        while True:
            await asyncio.sleep(POLL_S)
            if newest_name(self._work.run.run_dir) == self._seen:
                continue
            self._syncing = self._loop.time()
            try:
                await self._sync(lambda: True)
            except ValueError as error:  # the old weights go on acting; the next checkpoint is another try
                self._seen = newest_name(self._work.run.run_dir)
                print(f"{self._replica} keeps version {self._server and self._server.version}: {error}", flush=True)
            finally:
                self._syncing = None

    async def _drain(self, within_s: float) -> None:
        withdraw(self._work.endpoints, self._replica)
        if self._following is not None:
            self._following.cancel()
        if self._server is not None:
            await self._server.drain(within_s)


def latency_of(server: PolicyServer) -> tuple[tuple[float, float], ...]:
    """(upper bound in seconds, requests so far that took no longer)."""
    name = "vla_rlaif_serve_request_seconds"
    for family in text_string_to_metric_families(server.metrics.text().decode()):
        if family.name == name:
            return tuple((float(s.labels["le"]), s.value) for s in family.samples if s.name == f"{name}_bucket")
    raise AssertionError("the server measures its requests")
