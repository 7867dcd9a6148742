"""What a run does about reward hacking: looks at every validation (monitor.py), warns, stops, or goes back."""

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

from vla_rlaif.checkpoint import RunCheckpoints
from vla_rlaif.composite import CompositeReward
from vla_rlaif.config import RunConfig
from vla_rlaif.monitor import Monitor, keeper_of
from vla_rlaif.parts import Parts
from vla_rlaif.types import Episodes, Weights

GOLD = {
    "success": "success has changed",
    "truth": "truth has changed",
    "labels": "the audit's labeller prefers it, from -1 to 1,",
}
KEPT = 4  # learners of the last bests; a run that resumes may need one from before its newest checkpoint


class Watch:
    """Of one run. Does nothing where the reward is the ground truth itself, or with monitor.action off.

    rollback/000010/  the learner at the best validation so far, after step 10 (monitor.action rollback)
    """

    def __init__(self, config: RunConfig, parts: Parts, run_dir: Path, say: Callable[[str], None]) -> None:
        self._config, self._parts, self._folder, self._say = config.monitor, parts, run_dir / "rollback", say
        self._monitor, self._has_said_spent = None, False
        if config.monitor.action != "off" and config.reward.type not in ("success", "oracle"):
            keeper = keeper_of(parts.reward, is_learned=parts.preferences is not None)
            self._monitor = Monitor(config.monitor, keeper, parts.auditor)

    @property
    def is_active(self) -> bool:
        return self._monitor is not None

    @property
    def is_over(self) -> bool:
        """The run ends here: its best policy is the result."""
        monitor, action = self._monitor, self._config.action
        if monitor is None or not monitor.is_alarmed:
            return False
        return action == "stop" or (action == "rollback" and monitor.rollbacks >= self._config.max_rollbacks)

    def look(self, episodes: Episodes, step: int, metrics: Mapping[str, float]) -> dict[str, float]:
        """Judge the validation after ``step`` updates and act on it; ``metrics`` of the step have its KL."""
        if self._monitor is None:
            return {}
        found = self._monitor.look(episodes, step, metrics.get("reference_kl", float("nan")))
        if isinstance(self._parts.reward, CompositeReward):
            found |= {f"monitor/{name}": value for name, value in self._parts.reward.kept_diagnostics().items()}
        if self._parts.auditor is not None and self._parts.auditor.is_spent and not self._has_said_spent:
            self._has_said_spent = True
            self._say("monitor.audit.budget is used up: the monitor has no gold from here and will raise no alarm.")
        if self._config.action == "rollback" and self._monitor.best_step == step:
            self._keep(step)
        if self._monitor.is_alarmed:
            self._act(step, found)
        return found | {"monitor/rollbacks": float(self._monitor.rollbacks)}

    def state(self) -> Weights:
        """For a checkpoint; ``restore`` takes it back."""
        return {} if self._monitor is None else self._monitor.state()

    def restore(self, state: Weights) -> None:
        if self._monitor is not None:
            self._monitor.restore(state)
            if self.is_over:
                self._say("the monitor has ended this run: with --monitor.action warn it goes on.")

    def _act(self, step: int, found: Mapping[str, float]) -> None:
        assert self._monitor is not None
        begins, best = self._monitor.strikes == self._config.patience, self._monitor.best_step
        if begins:
            self._say(
                f"caution: reward hacking, after step {step}: against the best validation (after step {best}) the "
                f"reward has risen by {found['monitor/proxy_change']:.3g} and {GOLD[self._config.gold]} by "
                f"{found['monitor/gold_change']:+.3f}, both beyond doubt, {self._config.patience} validations in a "
                "row. Raise algorithm.kl_coef, spend more labels, or mend the reward (docs/reward_hacking.md)."
            )
        if self.is_over:
            self._say(f"stopped by the monitor after step {step}; the best policy is that of the best validation.")
        elif self._config.action == "rollback":
            self._go_back(best)
            self._monitor.rolled_back()
            self._say(f"back to the weights after step {best}, for the {self._monitor.rollbacks}. time.")

    def _keep(self, step: int) -> None:
        for old in sorted(self._folder.glob("*"))[:-KEPT]:
            shutil.rmtree(old)
        RunCheckpoints(self._folder / f"{step:06d}", 1).save(step, {}, self._parts.learner.state())

    def _go_back(self, best: int) -> None:
        """Weights, average and optimiser of the best; the version goes on, since published ones never come again."""
        _, saved, _ = RunCheckpoints(self._folder / f"{best:06d}", 1).load_latest()
        self._parts.learner.restore({**saved, "version": np.array(self._parts.learner.version)})
