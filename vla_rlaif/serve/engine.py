"""The policy behind the queue: calls it with batches on a thread of its own, and swaps weights between two calls.

Axes: see types.py. Times are seconds of the event loop's clock.
"""

import asyncio
import contextlib
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

from vla_rlaif.interfaces import Policy
from vla_rlaif.serve.batching import BatchQueue, batch_sizes
from vla_rlaif.serve.metrics import Outcome, ServeMetrics
from vla_rlaif.serve.requests import Frame
from vla_rlaif.serve.robot import Robot, View, observation_of
from vla_rlaif.serve.settings import ServeSettings
from vla_rlaif.serve.worker import Worker
from vla_rlaif.types import EnvSpec, Weights


@dataclass(frozen=True, kw_only=True)
class Answer:
    """An action chunk and how it came about."""

    action: Float[np.ndarray, "H A"]  # env units
    version: int  # of the weights that acted
    queue_s: float
    policy_s: float


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """No action for this request; the text is for the robot's programmer."""

    outcome: Outcome
    text: str


@dataclass(frozen=True, kw_only=True)
class Loaded:
    policy: Policy
    version: int


@dataclass(frozen=True, kw_only=True, eq=False)
class Job:
    view: View
    arrived: float
    reply: "asyncio.Future[Answer | Refusal]"


class Engine:
    """Knows the policy and nothing of sockets. ``make_policy`` makes a new policy object, into which weights go."""

    def __init__(
        self,
        make_policy: Callable[[], Policy],
        spec: EnvSpec,
        settings: ServeSettings,
        metrics: ServeMetrics,
        *,
        num_robots: Callable[[], int],
        say: Callable[[str], None],
    ) -> None:
        self._make_policy, self._spec, self._settings = make_policy, spec, settings
        self._metrics, self._num_robots, self._say = metrics, num_robots, say
        self._sizes = batch_sizes(settings.max_batch, fixed=settings.fixed_batch)
        self._queue: BatchQueue[Job] = BatchQueue(
            max_batch=settings.max_batch, max_wait_s=settings.max_wait_ms / 1e3, max_queue=settings.max_queue
        )
        self._arrival, self._staging = asyncio.Event(), asyncio.Lock()
        self._acting, self._preparing = Worker("policy"), Worker("stage")
        self._loaded: Loaded | None = None
        self._staged: Loaded | None = None
        self._call_began: float | None = None
        self._task: asyncio.Task[None] | None = None
        metrics.watch("queue_depth", "Requests that wait for a batch", lambda: len(self._queue))

    @property
    def version(self) -> int:
        assert self._loaded is not None, "version before start()"
        return self._loaded.version

    @property
    def window(self) -> int:
        """How many frames a decision depends on."""
        assert self._loaded is not None, "window before start()"
        return self._loaded.policy.window

    def ailment(self) -> str | None:
        """Why no request can be answered, if so."""
        if self._task is not None and self._task.done():
            return f"the batching task has ended: {self._task}"
        now = asyncio.get_running_loop().time()
        if self._call_began is not None and now - self._call_began > self._settings.stall_s:
            return f"the policy has not returned for {now - self._call_began:.0f} s"
        return None

    async def start(self, version: int) -> None:
        """Make the policy and call it once with every batch size, so that no robot waits for a compiler."""
        self._loaded = await self._acting.run(lambda: self._prepare(None, version))
        self._metrics.version.set(version)
        self._task = asyncio.create_task(self._serve())

    async def submit(self, view: View, deadline: float) -> Answer | Refusal:
        """A refusal comes at once if the queue is full, and at the deadline if there is no answer by then."""
        loop = asyncio.get_running_loop()
        job = Job(view=view, arrived=loop.time(), reply=loop.create_future())
        if not self._queue.offer(job, now=job.arrived, deadline=deadline):
            text = f"{self._settings.max_queue} requests are waiting; try again later."
            return Refusal(outcome="overloaded", text=text)
        self._arrival.set()
        try:
            async with asyncio.timeout_at(deadline):
                return await job.reply
        except TimeoutError:
            self._queue.withdraw(job)
            text = f"no action by the deadline; {len(self._queue)} other requests are waiting."
            return Refusal(outcome="expired", text=text)

    async def stage(self, weights: Weights | None, version: int) -> None:
        """Make a new policy and try it while the old one acts. Without weights it is what ``make_policy`` makes now.

        ValueError for weights that do not fit or do not give finite actions; the old ones go on acting either way.
        """
        async with self._staging:
            if version == self.version:
                raise ValueError(f"version {version} acts already; stage another.")
            self._staged = None
            try:
                self._staged = await self._preparing.run(lambda: self._prepare(weights, version))
            finally:
                if self._staged is None:
                    self._metrics.swapped("failed")

    def commit(self, version: int) -> None:
        """Let the staged weights act from the next batch on. Committing twice is committing once."""
        if version == self.version:
            return
        if self._staged is None or self._staged.version != version:
            have = "nothing" if self._staged is None else f"version {self._staged.version}"
            raise ValueError(f"cannot commit version {version}: {have} is staged.")
        self._loaded, self._staged = self._staged, None
        self._metrics.version.set(version)
        self._metrics.swapped("committed")

    async def close(self, timeout_s: float) -> bool:
        """Waiting requests get no answer any more: drain first. False: a call has not returned in time."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        try:
            async with asyncio.timeout(timeout_s):
                await asyncio.gather(self._acting.stop(), self._preparing.stop())
        except TimeoutError:
            return False
        return True

    async def _serve(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            wait = self._queue.wait_s(loop.time(), robots=self._num_robots())
            if wait != 0:
                self._arrival.clear()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(wait):
                        await self._arrival.wait()
                continue
            now = loop.time()
            if jobs := self._queue.take(now):
                await self._answer(jobs, now)

    async def _answer(self, jobs: Sequence[Job], now: float) -> None:
        loaded, loop = self._loaded, asyncio.get_running_loop()
        assert loaded is not None
        self._metrics.batch.observe(len(jobs))
        self._call_began = now
        outcomes = await self._acting.run(lambda: self._act_apart(loaded, [job.view for job in jobs]))
        self._call_began, policy_s = None, loop.time() - now
        self._metrics.policy_s.observe(policy_s)
        for job, outcome in zip(jobs, outcomes, strict=True):
            if job.reply.done():  # its deadline has passed
                continue
            if isinstance(outcome, Refusal):
                job.reply.set_result(outcome)
                continue
            queue_s = now - job.arrived
            self._metrics.queue_s.observe(queue_s)
            job.reply.set_result(Answer(action=outcome, version=loaded.version, queue_s=queue_s, policy_s=policy_s))

    def _act_apart(self, loaded: Loaded, views: Sequence[View]) -> list[np.ndarray | Refusal]:
        """Actions or refusals, one a view. A ValueError is one robot's mistake: then each is asked for alone."""
        try:
            actions = self._act(loaded.policy, views)
        except ValueError as error:
            if len(views) == 1:
                return [Refusal(outcome="invalid", text=str(error))]
            return [outcome for view in views for outcome in self._act_apart(loaded, [view])]
        except Exception as error:  # whatever a policy raises, its robots get a reply and the next batch is tried
            self._say("".join(traceback.format_exception(error)))
            text = f"the policy raised {type(error).__name__}: {error}"
            return [Refusal(outcome="failed", text=text)] * len(views)
        broken = Refusal(outcome="failed", text=f"version {loaded.version} chose an action that is not finite.")
        return [action if np.isfinite(action).all() else broken for action in actions]

    def _act(self, policy: Policy, views: Sequence[View]) -> Float[np.ndarray, "N H A"]:
        size = next(size for size in self._sizes if size >= len(views))
        seeds = np.resize(np.array([view.seed for view in views], np.uint32), size)
        decision = policy.act(observation_of(views, size), seeds, noise_scale=self._settings.noise_scale)
        return decision.action[: len(views)]

    def _prepare(self, weights: Weights | None, version: int) -> Loaded:
        policy = self._make_policy()
        if weights is not None:
            policy.load(weights, version)
        if self._loaded is not None and policy.window != self.window:
            raise ValueError(
                f"version {version} sees {policy.window} frames, the robots' histories have {self.window}."
            )
        blank = Robot(name="", seed=0, window=policy.window).view(self._blank_frame())
        for size in self._sizes:
            action = self._act(policy, [blank] * size)
            wanted = (size, self._spec.chunk, self._spec.action_dim)
            if action.shape != wanted:
                raise ValueError(f"the policy's actions have shape {action.shape}, its spec says {wanted}.")
            if not np.isfinite(action).all():
                raise ValueError(f"version {version} chooses actions that are not finite.")
        return Loaded(policy=policy, version=version)

    def _blank_frame(self) -> Frame:
        side = self._spec.image_size
        return Frame(
            images={camera: np.zeros((side, side, 3), np.uint8) for camera in self._spec.cameras},
            state=np.zeros(self._spec.state_dim, np.float32),
            instruction=self._spec.instructions[0],
        )
