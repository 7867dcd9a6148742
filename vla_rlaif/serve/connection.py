"""The write deadline that websockets lacks.

For a peer that reads nothing it queues a pong for every ping, without bound, and its keepalive waits for ever.
"""

import asyncio
from typing import Any

from websockets.asyncio.server import ServerConnection


class PatientConnection(ServerConnection):
    """Reads nothing more from a robot that does not take what was written to it, and aborts after a while."""

    def __init__(self, *arguments: Any, write_timeout_s: float, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._write_timeout_s = write_timeout_s
        self._deadline: asyncio.TimerHandle | None = None
        self.is_slow = False  # the deadline has passed

    def pause_writing(self) -> None:
        super().pause_writing()
        self.transport.pause_reading()
        self._deadline = self.loop.call_later(self._write_timeout_s, self._give_up)

    def resume_writing(self) -> None:
        super().resume_writing()
        self.transport.resume_reading()
        self._forget_deadline()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._forget_deadline()

    def _give_up(self) -> None:
        self.is_slow = True
        self.transport.abort()

    def _forget_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
