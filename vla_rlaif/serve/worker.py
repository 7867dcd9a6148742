"""One thread for calls that would block the event loop."""

import asyncio
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any


class Worker:
    """Runs calls one after the other. The thread is a daemon, so that a call that never returns can be given up."""

    def __init__(self, name: str) -> None:
        self._calls: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = queue.SimpleQueue()
        threading.Thread(target=self._work, name=name, daemon=True).start()

    async def run[T](self, call: Callable[[], T]) -> T:
        """The result of ``call``, or what it raised."""
        done: Future[T] = Future()
        self._calls.put((call, done))
        return await asyncio.wrap_future(done)

    async def stop(self) -> None:
        """Returns when all calls that were asked for have returned; the thread ends.

        A process that ends earlier, in the middle of a call, is aborted by C++ code whose thread is taken away.
        """
        await self.run(lambda: None)
        self._calls.put(None)

    def _work(self) -> None:
        while (item := self._calls.get()) is not None:
            call, done = item
            if not done.set_running_or_notify_cancel():
                continue
            try:
                done.set_result(call())
            except BaseException as error:  # it belongs to the caller, who awaits it
                done.set_exception(error)
