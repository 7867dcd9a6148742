"""Calls that change a worker, answered once: one whose answer was lost may have been executed, and is asked again."""

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

KEPT = 8  # answers; a caller asks again before it asks for anything else


class Once:
    """Remembers the last answers by their key."""

    def __init__(self) -> None:
        self._answers: OrderedDict[str, Any] = OrderedDict()

    def __call__[T](self, key: str, do: Callable[[], T]) -> T:
        """What ``do`` gave when ``key`` was first asked for. An error is not kept: nothing was changed then."""
        if key not in self._answers:
            self._answers[key] = do()
            while len(self._answers) > KEPT:
                self._answers.popitem(last=False)
        return self._answers[key]
