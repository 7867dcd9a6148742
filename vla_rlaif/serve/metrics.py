"""What an operator watches, as Prometheus metrics of one server (a registry of its own, nothing global)."""

from collections.abc import Callable
from typing import Literal, get_args

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

Outcome = Literal["ok", "reset", "invalid", "overloaded", "expired", "failed"]
Leaving = Literal["closed", "refused", "slow_reader", "unresponsive", "oversized", "misbehaving", "drained"]
Swap = Literal["committed", "failed"]

_PREFIX = "vla_rlaif_serve"
_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.08, 0.12, 0.2, 0.3, 0.5, 0.8, 1.2, 2.0, 5.0)


class ServeMetrics:
    def __init__(self, sizes: tuple[int, ...]) -> None:
        self._registry = CollectorRegistry()

        def histogram(name: str, text: str, buckets: tuple[float, ...] = _SECONDS) -> Histogram:
            return Histogram(f"{_PREFIX}_{name}", text, buckets=buckets, registry=self._registry)

        self._requests = Counter(f"{_PREFIX}_requests", "Requests by outcome", ["outcome"], registry=self._registry)
        self._left = Counter(f"{_PREFIX}_disconnects", "Ends of connections", ["reason"], registry=self._registry)
        self._swaps = Counter(f"{_PREFIX}_weight_swaps", "Weight swaps by result", ["result"], registry=self._registry)
        self.request_s = histogram("request_seconds", "From the receipt of a request to its reply")
        self.queue_s = histogram("queue_seconds", "What answered requests waited for their batch")
        self.policy_s = histogram("policy_seconds", "One call of the policy")
        self.batch = histogram("batch_size", "Requests in one call of the policy", tuple(map(float, sizes)))
        self.version = Gauge(f"{_PREFIX}_weights_version", "Version that acts", registry=self._registry)
        kinds = ((self._requests, Outcome), (self._left, Leaving), (self._swaps, Swap))
        for counter, kind in kinds:
            for label in get_args(kind):
                counter.labels(label)  # so that a rate exists before the first of a kind

    def watch(self, name: str, text: str, read: Callable[[], float]) -> None:
        """A gauge that is read when it is scraped."""
        Gauge(f"{_PREFIX}_{name}", text, registry=self._registry).set_function(read)

    def count(self, outcome: Outcome) -> None:
        self._requests.labels(outcome).inc()

    def left(self, reason: Leaving) -> None:
        self._left.labels(reason).inc()

    def swapped(self, result: Swap) -> None:
        self._swaps.labels(result).inc()

    def text(self) -> bytes:
        """In Prometheus' text format."""
        return generate_latest(self._registry)
