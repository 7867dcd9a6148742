"""Work in a thread of its own, so that whoever started it can go on, ask how it goes, and give it up."""

import threading
import traceback
from collections.abc import Callable


class Task[T]:
    """A failure is kept as text: it travels to the coordinator, which decides whether to try again."""

    def __init__(self, work: Callable[[], T], *, name: str) -> None:
        self.value: T | None = None
        self.problem = ""
        self._done = threading.Event()
        self._work = work
        threading.Thread(target=self._run, name=name, daemon=True).start()

    @property
    def is_done(self) -> bool:
        return self._done.is_set()

    def wait(self, seconds: float) -> bool:
        """Whether it has ended."""
        return self._done.wait(seconds)

    def _run(self) -> None:
        try:
            self.value = self._work()
        except Exception:  # whatever it is, the others must hear of it, or they would wait for this end
            self.problem = traceback.format_exc().rstrip()
        finally:
            self._done.set()
