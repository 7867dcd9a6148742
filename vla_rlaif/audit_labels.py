"""Gold by labels: a labeller from whom the reward does not learn compares the present policy with the best so far.

Both have played the first starts of the validation set, and the labeller is shown the two episodes of each start, in
random order. It has a budget and a store of its own, where what it said can be looked at like any other label:

    audit/preferences.sqlite    its answers, beside judge.sqlite or human.sqlite of a model or of people

Axes: N validation episodes, K of them that are compared, one a start state.
"""

from dataclasses import replace

import numpy as np
from jaxtyping import Float

from vla_rlaif.interfaces import Labeller
from vla_rlaif.preferences.labelling import ask, make_records
from vla_rlaif.preferences.store import PreferenceStore
from vla_rlaif.rollout import concatenate, take
from vla_rlaif.types import Episodes, Weights


class Auditor:
    """Asks, counts and keeps. Seeds come from (seed, number of the audit), so a resumed run repeats itself."""

    def __init__(self, labeller: Labeller, store: PreferenceStore, *, num_pairs: int, budget: int, seed: int) -> None:
        """``num_pairs`` are asked in each audit; ``budget`` labels in the whole run, skips included."""
        self._labeller, self._store = labeller, store
        self._num_pairs, self._budget, self._seed = num_pairs, budget, seed
        self._num_audits = 0
        self._num_labels = 0
        self._num_skips = 0

    @property
    def is_spent(self) -> bool:
        """Another audit would go beyond the budget."""
        return self._num_labels + self._num_pairs > self._budget

    def shown(self, episodes: Episodes) -> Episodes:
        """What must be kept of a validation so that it can be compared later, without the policy's own numbers."""
        kept = take(replace(episodes, trace={}), np.arange(min(self._num_pairs, len(episodes.valid))))
        return replace(kept, logp=kept.logp[..., :0], version=0)

    def margins(self, now: Episodes, step: int, best: Episodes, best_step: int) -> Float[np.ndarray, " K"]:
        """Of each start 1 where the present episode is the better one, -1 where the best policy's is, 0 for a tie; what
        is in between for labels that are probabilities. NaN: not asked, or skipped."""
        num = len(now.valid)
        if self.is_spent:
            return np.full(num, np.nan)
        if not self._num_audits:
            self._store.rewind(0)  # what an earlier start of this run, lost before its first checkpoint, was told
        rows = np.flatnonzero(now.valid & best.valid)
        order_seed, label_seed = np.random.SeedSequence((self._seed, self._num_audits)).generate_state(2).tolist()
        is_swapped = np.random.default_rng(order_seed).random(len(rows)) < 0.5
        pairs = np.where(is_swapped[:, None], np.stack([rows + num, rows], 1), np.stack([rows, rows + num], 1))
        both = concatenate([now, best])
        answers = ask(self._labeller, both, pairs, label_seed)
        ids = [f"validation-{s}:{row}" for s in (step, best_step) for row in range(num)]
        held_out = np.ones(len(pairs), bool)  # nothing is ever trained on them
        name = self._labeller.name
        self._store.append(make_records(both, ids, pairs, answers, held_out, labeller=name, step=step))
        self._num_audits += 1
        self._num_labels += len(pairs)
        self._num_skips += int(np.isnan(answers.p_first).sum())
        margins = np.full(num, np.nan)
        margins[rows] = (2 * answers.p_first - 1) * np.where(is_swapped, -1, 1)
        return margins

    def counts(self) -> dict[str, float]:
        return {
            "monitor/audit_labels": float(self._num_labels),
            "monitor/audit_skips": float(self._num_skips),
            "monitor/audit_budget_left": float(self._budget - self._num_labels),
        }

    def state(self) -> Weights:
        """For a checkpoint; ``restore`` takes it back."""
        counts = (self._num_audits, self._num_labels, self._num_skips, self._store.last_id)
        return {"counts": np.array(counts, np.int64)}

    def restore(self, state: Weights) -> None:
        """Go on from ``state``; records that the store got after it are put out of force."""
        *counts, last_id = (int(value) for value in state["counts"])
        self._num_audits, self._num_labels, self._num_skips = counts
        self._store.rewind(last_id)
