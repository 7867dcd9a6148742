"""A broadcast from one sender to several receivers, as those see it who need not know what carries it."""

import threading
from collections.abc import Callable
from typing import Protocol, runtime_checkable

from vla_rlaif.dist.manifest import Bytes


class LinkError(RuntimeError):
    """The broadcast failed: an end died, left or was late. Nobody can go on with this link."""


@runtime_checkable
class Link(Protocol):
    """One end. The calls of all ends belong together: each is a part of one collective operation."""

    def send(self, memory: Bytes) -> None:
        """To all others. Raises LinkError."""
        ...

    def receive(self, memory: Bytes, arrived: Callable[[int], None]) -> None:
        """Fill ``memory``, saying how many bytes have come so far. Raises LinkError."""
        ...

    def abort(self) -> None:
        """End it: an operation in progress, in any thread and in the other processes, fails at once."""
        ...


@runtime_checkable
class LinkSpec(Protocol):
    """Where the ends meet, and which of them this one is. Picklable."""

    @property
    def generation(self) -> int:
        """Rises with every link that is made: an old one is never mistaken for a new one."""
        ...

    def join(self) -> Link:
        """Meet the others. Raises LinkError if they do not come in time."""
        ...


class Links:
    """The newest link of one end. Safe to call from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._wanted = -1
        self._link: Link | None = None

    def join(self, spec: LinkSpec) -> Link:
        """The link of that generation, which is kept; an older one is ended."""
        with self._lock:
            if spec.generation < self._wanted:
                raise LinkError(f"generation {spec.generation} is over, {self._wanted} has begun")
            if spec.generation == self._wanted and self._link is not None:
                return self._link
            old, self._link, self._wanted = self._link, None, spec.generation
        if old is not None:
            old.abort()
        link = spec.join()
        with self._lock:
            if self._wanted == spec.generation:
                self._link = link
                return link
        link.abort()
        raise LinkError(f"generation {spec.generation} was given up while it was being joined")

    def abort(self, generation: int) -> None:
        """End the link of that generation, joined or being joined."""
        with self._lock:
            if generation < self._wanted:
                return
            link, self._link, self._wanted = self._link, None, generation + 1
        if link is not None:
            link.abort()
