"""How long simulated steps take, and which of them fail. Fixed by a seed, so that two calendars meet the same luck."""

import random
from dataclasses import dataclass

from vla_rlaif.pool.clock import HOUR, SECOND, Micros
from vla_rlaif.pool.config import Role
from vla_rlaif.pool.history import COLD, Step, expected
from vla_rlaif.pool.state import Replica


@dataclass(frozen=True, kw_only=True)
class Physics:
    """How the simulated pool behaves. The same seed gives the same steps the same durations in every run."""

    seed: int = 0
    duration: tuple[float, float] = (0.5, 1.0)  # of every step: uniform between these shares of the declared one
    slow_checkpoints: float = 0.0  # share that takes ``slow_factor`` times as long
    slow_factor: float = 5.0
    failed_checkpoints: float = 0.0  # share that fails or reads back corrupt
    checkpoint_every: Micros = HOUR  # of training, on its own
    poll: Micros = SECOND  # the scheduler looks at most so often
    service_ms: float = 20.0  # p99 latency without load

    def takes(self, role: Role, replica: Replica, step: Step) -> Micros:
        """The duration of a step that a replica begins."""
        low, high = self.duration
        share = low + (high - low) * self._draw(role, replica, step)
        if step == "checkpoint" and self._draw(role, replica, "slow") < self.slow_checkpoints:
            share *= self.slow_factor
        return round(share * expected(COLD, replica.role, role, step))

    def fails(self, role: Role, replica: Replica) -> bool:
        """Whether the checkpoint that a replica writes is no good."""
        return self._draw(role, replica, "fails") < self.failed_checkpoints

    def _draw(self, role: Role, replica: Replica, what: str) -> float:
        """Uniform in [0, 1), fixed by the seed, the step and who takes it.

        The replicas of a training run take a step together if they begin it together: they stop at one update and
        write one checkpoint. All others are on their own.
        """
        is_run = role.checkpoints and replica.job is None
        who = f"{replica.role}@{replica.since}" if is_run else replica.name
        return random.Random(f"{self.seed}:{who}:{what}:{replica.attempts}").random()
