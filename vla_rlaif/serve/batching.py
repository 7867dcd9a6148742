"""When to call the policy, and with whom: a bounded first-in first-out queue. Pure; the clock is an argument.

Times are seconds of one monotonic clock.
"""

from collections.abc import Hashable


def batch_sizes(max_batch: int, *, fixed: bool) -> tuple[int, ...]:
    """The sizes that the policy is called with, ascending: powers of two and the largest, or the largest alone.

    Row i depends on no other row, but the libraries below choose other kernels for other sizes, whose sums differ in
    the last bits: on a CPU, torch's linear layer does for 1, 2 and 8 rows. With one size there is one kernel.
    """
    powers = [] if fixed else [2**i for i in range(max_batch.bit_length()) if 2**i < max_batch]
    return (*powers, max_batch)


class BatchQueue[T: Hashable]:
    """Waiting requests. A batch is cut when it is full, when the oldest waited long enough, or when all have asked."""

    def __init__(self, *, max_batch: int, max_wait_s: float, max_queue: int) -> None:
        self._max_batch, self._max_wait, self._max_queue = max_batch, max_wait_s, max_queue
        self._waiting: dict[T, tuple[float, float]] = {}  # arrival, deadline; in order of arrival

    def __len__(self) -> int:
        return len(self._waiting)

    def offer(self, item: T, *, now: float, deadline: float) -> bool:
        """False: the queue is full, the item is not in it."""
        if len(self._waiting) >= self._max_queue:
            return False
        self._waiting[item] = now, deadline
        return True

    def withdraw(self, item: T) -> None:
        self._waiting.pop(item, None)

    def wait_s(self, now: float, *, robots: int) -> float | None:
        """Until the next batch is due: None with an empty queue, 0 at once. No more than ``robots`` can be waiting,
        because each waits for its reply before it asks again."""
        if not self._waiting:
            return None
        if len(self._waiting) >= min(self._max_batch, robots):
            return 0.0
        arrival, _ = next(iter(self._waiting.values()))
        return max(0.0, arrival + self._max_wait - now)

    def take(self, now: float) -> list[T]:
        """The next batch, oldest first. What is past its deadline leaves the queue and is in no batch."""
        batch: list[T] = []
        for item in list(self._waiting):
            if len(batch) == self._max_batch:
                break
            _, deadline = self._waiting.pop(item)
            if now < deadline:
                batch.append(item)
        return batch
