"""Keeps a learned reward in step with the policy: sample pairs of fresh episodes, label them, measure, refit.

Axes: N fresh episodes, M new pairs, E labelled episodes, K frames read, D features.
"""

import functools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Protocol, runtime_checkable

import numpy as np
from jaxtyping import Bool, Float, Int

from vla_rlaif.interfaces import Labeller
from vla_rlaif.preferences.clip_book import ClipBook
from vla_rlaif.preferences.data import ClipFrames, EpisodeFeatures, FitReport, PairData, pair_accuracy
from vla_rlaif.preferences.labelling import answer_counts, ask, choose_pairs, make_pair_data, make_records
from vla_rlaif.preferences.sampling import Strategy, split_by_group
from vla_rlaif.preferences.store import PreferenceStore
from vla_rlaif.types import Episodes, Weights, under


@runtime_checkable
class FittableReward(Protocol):
    """What the learner needs of a reward: ``reward_models.preference.PreferenceReward`` is one."""

    @property
    def version(self) -> int: ...

    def features(self, episodes: Episodes) -> EpisodeFeatures: ...

    def score_features(self, features: EpisodeFeatures) -> Float[np.ndarray, " N"]: ...

    def member_logits(self, features: EpisodeFeatures) -> Float[np.ndarray, "E N"]: ...

    def fit(self, data: PairData, seed: int, clips: ClipFrames | None = None) -> FitReport: ...

    def state(self) -> Weights: ...

    def restore(self, state: Weights) -> None: ...


OnLabels = Callable[[Episodes, Int[np.ndarray, "M 2"], Float[np.ndarray, " M"]], None]


@dataclass(frozen=True, kw_only=True)
class RefreshConfig:
    """How labels are spent."""

    budget: int = 1000  # labels of the whole run, ties and skips included
    held_out_share: float = 0.15  # of the pairs, among episodes that are never trained on
    mix: Mapping[Strategy, float] = field(default_factory=lambda: {"within_group": 0.5, "uniform": 0.5})
    seed: int = 0

    def __post_init__(self) -> None:
        if self.budget < 1 or not 0 <= self.held_out_share <= 0.5:
            raise ValueError(
                "Preferences need a budget of at least one label and a held_out_share in [0, 0.5], "
                f"got {self.budget} and {self.held_out_share}."
            )


class PreferenceLearner:
    """The only reader of labels. Seeds come from (seed, number of the refresh), so a resumed run repeats itself."""

    def __init__(
        self,
        *,
        labeller: Labeller,
        store: PreferenceStore,
        reward: FittableReward,
        config: RefreshConfig,
        on_labels: OnLabels | None = None,
        clips: ClipBook | None = None,
    ) -> None:
        """``on_labels`` is given every pair that may be trained on, when it is labelled. ``clips`` is for rewards with
        heads beside Bradley-Terry's; a share of the labels is spent on outcomes for it."""
        self._labeller = labeller
        self._store = store
        self._reward = reward
        self._config = config
        self._on_labels = on_labels
        self._clips = clips
        self._num_refreshes = 0
        self._num_labels = 0
        self._num_ties = 0
        self._num_skips = 0
        self._ids: list[str] = []  # of labelled episodes, in the order of the rows of _data
        self._data: PairData | None = None

    @property
    def num_labels(self) -> int:
        """Asked for so far, ties and skips included."""
        return self._num_labels

    @property
    def budget_left(self) -> int:
        """Labels that may still be asked for."""
        return self._config.budget - self._num_labels

    @property
    def labelled(self) -> tuple[Sequence[str], PairData] | None:
        """Ids of all labelled episodes, and the labels of their pairs; None before the first label."""
        return None if self._data is None else (tuple(self._ids), self._data)

    @property
    def clips(self) -> ClipFrames | None:
        """What the heads beside Bradley-Terry's learn from, if there are any."""
        return None if self._clips is None else self._clips.clips()

    def instructions(self) -> Mapping[str, str]:
        """Of all labelled episodes, by id."""
        return {name: r.instruction for r in self._store.records() for name in (r.first, r.second)}

    def refresh(self, episodes: Episodes, ids: Sequence[str], step: int, num_pairs: int) -> Mapping[str, float]:
        """Label at most ``num_pairs`` pairs of ``episodes`` (fewer if the budget or the episodes run out) and refit.

        ``reward/on_policy_accuracy`` is that of the model before it saw these labels: the honest figure.
        """
        self._check_ids(episodes, ids)
        num_pairs = min(num_pairs, self.budget_left)
        if num_pairs <= 0:
            return self._counts()
        if self._num_refreshes == 0:
            self._store.rewind(0)  # what an earlier start of this run, lost before its first checkpoint, has labelled
        num_outcomes = 0 if self._clips is None else self._clips.num_asked(num_pairs)
        num_pairs -= num_outcomes
        split_seed, train_seed, held_seed, label_seed, fit_seed = self._seeds()
        features = self._reward.features(episodes)
        logits = self._reward.member_logits(features) if self._reward.version else None
        held_rows = split_by_group(episodes.starts.group, episodes.valid, self._config.held_out_share, split_seed)
        num_held = round(self._config.held_out_share * num_pairs) if held_rows.any() else 0
        choose = functools.partial(choose_pairs, episodes, mix=self._config.mix, scores=logits)
        held = choose(num_held, np.flatnonzero(held_rows), held_seed)
        train = choose(num_pairs - num_held, np.flatnonzero(~held_rows), train_seed)
        pairs = np.concatenate([train, held])
        is_held = np.arange(len(pairs)) >= len(train)
        answers = ask(self._labeller, episodes, pairs, label_seed)
        labels = answers.p_first
        group = episodes.starts.group[pairs]
        on_policy = self._on_policy(episodes, features, pairs, labels)
        self._store.append(
            make_records(episodes, ids, pairs, answers, is_held, labeller=self._labeller.name, step=step)
        )
        self._num_refreshes += 1
        self._num_labels += len(labels)
        self._num_ties += int((labels == 0.5).sum())
        self._num_skips += int(np.isnan(labels).sum())
        self._data = self._extended(features, ids, pairs, labels, is_held)
        if self._on_labels is not None:
            self._on_labels(episodes, train, labels[~is_held])
        outcomes = self._ask_outcomes(episodes, ids, pairs, held_rows, num_outcomes, step)
        report = self._reward.fit(self._data, fit_seed, self.clips)
        return {
            **self._counts(),
            **answer_counts(answers),
            **outcomes,
            **_of_frame_heads(report),
            **on_policy,
            "labels/within_group": float((group[:, 0] == group[:, 1]).sum()),
            "reward/train_accuracy": report.train_accuracy,
            "reward/held_out_accuracy": report.held_out_accuracy,
            "reward/ece": report.ece,
            "reward/temperature": report.temperature,
            "reward/fit_loss": report.loss,
            "reward/fit_steps": float(report.num_steps),
            "reward/fit_s": report.seconds,
        }

    def state(self) -> Weights:
        """Everything that a bit-equal continuation needs, with the features of labelled episodes."""
        counts = (self._num_refreshes, self._num_labels, self._num_ties, self._num_skips, self._store.last_id)
        ids = np.frombuffer(json.dumps(self._ids).encode(), np.uint8).copy()
        data = {} if self._data is None else {f"data/{name}": value for name, value in vars(self._data).items()}
        reward = {f"reward/{name}": value for name, value in self._reward.state().items()}
        clips = {} if self._clips is None else {f"clips/{name}": value for name, value in self._clips.state().items()}
        return {"counts": np.array(counts, np.int64), "ids": ids, **data, **clips, **reward}

    def restore(self, state: Weights) -> None:
        """Go on from ``state``; records that the store got after it are put out of force."""
        *counts, last_id = (int(value) for value in state["counts"])
        self._num_refreshes, self._num_labels, self._num_ties, self._num_skips = counts
        self._ids = json.loads(state["ids"].tobytes())
        data = under("data/", state)
        self._data = PairData(**data) if data else None
        if self._clips is not None:
            self._clips.restore(under("clips/", state))
        self._reward.restore(under("reward/", state))
        self._store.rewind(last_id)

    @contextmanager
    def as_of(self, state: Weights) -> Iterator[None]:
        """The reward is what it was when ``state`` was taken: where steps are gathered ahead, it may have been fitted
        since."""
        then = under("reward/", state)
        if int(then["version"]) == self._reward.version:
            yield
            return
        now = self._reward.state()
        self._reward.restore(then)
        try:
            yield
        finally:
            self._reward.restore(now)

    def _check_ids(self, episodes: Episodes, ids: Sequence[str]) -> None:
        if len(ids) != len(episodes.valid) or len(set(ids)) != len(ids):
            raise ValueError(f"{len(episodes.valid)} episodes need as many different ids, got {len(set(ids))}.")
        known = set(ids) & set(self._ids)
        if known:
            raise ValueError(f"Episode {min(known)!r} is labelled already: refresh with fresh episodes under new ids.")

    def _seeds(self) -> list[int]:
        sequence = np.random.SeedSequence((self._config.seed, self._num_refreshes))
        return [int(value) for value in sequence.generate_state(5)]

    def _ask_outcomes(
        self,
        episodes: Episodes,
        ids: Sequence[str],
        pairs: Int[np.ndarray, "M 2"],
        held_rows: Bool[np.ndarray, " N"],
        num: int,
        step: int,
    ) -> dict[str, float]:
        """Of episodes that were compared, drawn at random: they are on one side already."""
        if self._clips is None:
            return {}
        seeds = np.random.SeedSequence((self._config.seed, self._num_refreshes, 1)).generate_state(2).tolist()
        rows = np.random.default_rng(seeds[0]).permutation(np.unique(pairs))[:num]
        asked = self._clips.ask(self._labeller, episodes, ids, rows, held_rows[rows], seed=seeds[1], step=step)
        self._num_labels += asked
        return {"labels/outcomes": float(asked)}

    def _on_policy(
        self,
        episodes: Episodes,
        features: EpisodeFeatures,
        pairs: Int[np.ndarray, "M 2"],
        labels: Float[np.ndarray, " M"],
    ) -> dict[str, float]:
        if not self._reward.version:
            return {"reward/on_policy_accuracy": float("nan"), "reward/on_policy_accuracy_in_group": float("nan")}
        score = self._reward.score_features(features)
        group = episodes.starts.group[pairs]
        same = group[:, 0] == group[:, 1]
        return {
            "reward/on_policy_accuracy": pair_accuracy(score, pairs, labels),
            "reward/on_policy_accuracy_in_group": pair_accuracy(score, pairs[same], labels[same]),
        }

    def _extended(
        self,
        features: EpisodeFeatures,
        ids: Sequence[str],
        pairs: Int[np.ndarray, "M 2"],
        labels: Float[np.ndarray, " M"],
        held_out: Bool[np.ndarray, " M"],
    ) -> PairData:
        """All pairs, the new ones last, and only the episodes that a pair needs."""
        rows, new = make_pair_data(features, pairs, labels, held_out)
        new = replace(new, pairs=new.pairs + len(self._ids))
        self._ids.extend(ids[int(row)] for row in rows)
        if self._data is None:
            return new
        old = vars(self._data)
        return PairData(**{name: np.concatenate([old[name], value]) for name, value in vars(new).items()})

    def _counts(self) -> dict[str, float]:
        return {
            "labels/total": float(self._num_labels),
            "labels/ties": float(self._num_ties),
            "labels/skips": float(self._num_skips),
            "labels/budget_left": float(self.budget_left),
            "reward/version": float(self._reward.version),
        }


def _of_frame_heads(report: FitReport) -> dict[str, float]:
    """What the report says of the heads "progress" and "success"; a head that is not there has no figures."""
    figures = {
        "reward/progress_error": report.progress_error,
        "reward/success_threshold": report.success_threshold,
        "reward/success_recall": report.success_recall,
        "reward/false_positives": report.false_positives,
    }
    return {name: value for name, value in figures.items() if not np.isnan(value)}
