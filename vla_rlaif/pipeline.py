"""Steps are gathered in order; with overlap, on a thread of their own, ahead of the learner.

    sequential      publish 0, gather 0, update 0, publish 1, gather 1, update 1, ...
    1 step ahead    gather   | 0 | 1   | 2   | 3   |       weights are published at the bars that `publish` gives;
                    weights  | 0 | 0   | 1   | 2   |       step k + 1 is played with the weights of k updates
                    update       | 0   | 1   | 2   |       while update k runs

Up to ``ahead`` steps are ordered with each publication, and the next one comes when the last of them is gathered. So
weights never change while anything is played, who acts with what does not depend on time, and a run is the same every
time at every ``ahead``.
"""

import queue
import threading
from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, Future, wait

from vla_rlaif.gather import Gathered
from vla_rlaif.parts import Acting


class Pipeline:
    """Hands the gathered steps to the learner, inside its context. ``gather`` and ``publish`` are never called at the
    same time."""

    def __init__(
        self,
        gather: Callable[[int, Acting], Gathered],
        publish: Callable[[int], Acting],
        *,
        end: int,
        ahead: int,
        acting: Acting,
        timeout_s: float,
    ) -> None:
        """``gather`` gets a step and who acts; ``acting`` is what is published already. ``end`` is the first step that
        is not gathered. ``timeout_s`` is how long a step may take; without steps ahead nothing waits."""
        self.acting = acting
        self._gather, self._publish = gather, publish
        self._end, self._ahead, self._timeout_s = end, ahead, timeout_s
        self._pending: dict[int, Future[Gathered]] = {}  # ordered and not taken, in order
        self._orders: queue.SimpleQueue[tuple[int, Acting, Future[Gathered]] | None] = queue.SimpleQueue()
        self._leaving, self._is_hung = threading.Event(), False
        # daemon: a hung env must not keep the process from ending.
        self._thread = threading.Thread(target=self._work, name="gather", daemon=True)

    def take(self, step: int) -> Gathered:
        """The batch of ``step``, which is the one after the step that was taken before; ``update`` comes next.

        Raises what gathering raised, or TimeoutError.
        """
        if not self._ahead:
            if self.acting.step != step:
                self.acting = self._publish(step)
            return self._gather(step, self.acting)
        if not self._pending:  # the first one
            if self.acting.step + self._ahead < step:
                self.acting = self._publish(step)
            self._order(step)
        future = self._pending[step]
        self._wait([future], f"the episodes of step {step}")
        gathered = future.result()
        del self._pending[step]
        if step == self.acting.step + self._ahead:
            self.acting = self._publish(step)  # at the end too: a checkpoint may be gone on from
            self._order(step + 1)
        return gathered

    def rest(self) -> None:
        """Wait until nothing is played any more, so that the caller may play. What waits for its step is kept."""
        self._wait(list(self._pending.values()), "the episodes that were ordered")

    @property
    def num_carried(self) -> int:
        """Episodes that wait for their step."""
        done = [future for future in self._pending.values() if future.done() and future.exception() is None]
        return sum(future.result().num_episodes for future in done)

    def __enter__(self) -> "Pipeline":
        if self._ahead:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Drops what was ordered; what is being played is played to its end."""
        self._leaving.set()
        self._orders.put(None)
        if self._ahead and not self._is_hung:
            self._thread.join(self._timeout_s)

    def _order(self, first: int) -> None:
        """All that may be played with the weights that act now."""
        for step in range(first, min(self.acting.step + self._ahead + 1, self._end)):
            self._pending[step] = Future()
            self._orders.put((step, self.acting, self._pending[step]))

    def _wait(self, futures: list[Future[Gathered]], what: str) -> None:
        done, waiting = wait(futures, self._timeout_s, FIRST_EXCEPTION)
        for future in done:
            future.result()
        if waiting:
            self._is_hung = True
            raise TimeoutError(
                f"{what} were not there after {self._timeout_s} s (loop.timeout_s): an env, a reward model or a worker "
                "hangs, or it needs more time than that."
            )

    def _work(self) -> None:
        while (order := self._orders.get()) is not None and not self._leaving.is_set():
            step, acting, future = order
            try:
                future.set_result(self._gather(step, acting))
            except BaseException as error:  # raised again where the step is taken, with this traceback
                future.set_exception(error)
                return
