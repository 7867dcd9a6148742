"""Private views of memory that others write, kept from round to round: to make one takes as long as to copy it.

Who is given a view may write into it. Those pages are its own from then on, so the view is not used again. Whether
there are any is found out in a thread when the view is given back, and not while the next payload is waited for.
"""

import mmap
from collections.abc import Callable
from collections.abc import Set as AbstractSet

import numpy as np

from vla_rlaif.dist.manifest import Bytes
from vla_rlaif.dist.task import Task

IS_SHARED, IS_THERE, IS_SWAPPED = 1 << 61, 1 << 63, 1 << 62  # https://docs.kernel.org/admin-guide/mm/pagemap.html

LOOK_S = 60.0  # seconds; a gigabyte takes 0.02


class Views:
    """By the token of the memory. ``give`` and ``take_back`` are called by one thread, ``get`` by another."""

    def __init__(self) -> None:
        self._views: dict[str, np.ndarray] = {}
        self._given: dict[str, Task[bool] | None] = {}  # None: not given back yet

    def get(self, token: str, others: AbstractSet[str], make: Callable[[], Bytes]) -> Bytes:
        """A view that shows what is in the memory now. Those of neither ``token`` nor ``others`` are forgotten."""
        for each in self._views.keys() - {token, *others}:
            self._views.pop(each, None)  # another thread, which was given up, may have done it
            self._given.pop(each, None)
        view = self._views.get(token)
        if view is not None and token in self._given:
            look = self._given.pop(token) or _looking_at(view)
            if not look.wait(LOOK_S) or look.problem or look.value:
                view = None
        if view is None:
            self._views[token] = view = make()
        return view

    def give(self, tokens: AbstractSet[str]) -> None:
        """Somebody may write into these from now on."""
        for token in tokens & self._views.keys():
            self._given[token] = None

    def take_back(self, tokens: AbstractSet[str]) -> None:
        """Nobody uses these any more."""
        for token in tokens & self._given.keys():
            if (view := self._views.get(token)) is not None:
                self._given[token] = _looking_at(view)


def _looking_at(view: Bytes) -> Task[bool]:
    return Task(lambda: is_written(view), name="look at a view")


def is_written(view: Bytes) -> bool:
    """Whether this process has written to a private view: those pages are its own and hold an old version, which no
    other receiver's check would notice."""
    first, last = view.ctypes.data // mmap.PAGESIZE, (view.ctypes.data + len(view) - 1) // mmap.PAGESIZE
    with open("/proc/self/pagemap", "rb", buffering=0) as file:
        file.seek(8 * first)
        pages = np.frombuffer(file.read(8 * (last + 1 - first)), np.uint64)
    assert len(pages) == last + 1 - first
    return bool(np.any((pages & IS_SHARED == 0) & (pages & (IS_THERE | IS_SWAPPED) != 0)))
