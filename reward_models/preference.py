"""A reward learned from comparisons: an ensemble of Bradley-Terry heads on the features of an episode's frames, and
beside them, if wanted, heads that say how far the task is and whether it is done.

Axes: E members, N episodes, F frames of an episode, K frames read, D features, M pairs, R frames of clips. The fit
itself is in ``preference_fit.py`` and ``frame_heads.py``.
"""

import time
from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar

import numpy as np
import torch
from jaxtyping import Float, Int

from vla_rlaif.interfaces import Encoder
from vla_rlaif.preferences.data import ClipFrames, EpisodeFeatures, FitReport, PairData, pair_accuracy
from vla_rlaif.reward_models.bradley_terry import (
    calibrate,
    cross_entropy,
    expected_calibration_error,
    generator,
    one_thread,
    probability,
    to_numpy,
)
from vla_rlaif.reward_models.frame_heads import Head, Layout, share_above
from vla_rlaif.reward_models.networks import Network
from vla_rlaif.reward_models.preference_config import PreferenceConfig
from vla_rlaif.reward_models.preference_fit import FitConfig, fit_network, returns
from vla_rlaif.reward_models.reading import Read, episode_features, last_frames, read_in_parts
from vla_rlaif.success_threshold import cross_fit, threshold_at
from vla_rlaif.types import Episodes, under

HEADS: tuple[Head, ...] = ("return", "progress", "success")


class PreferenceReward:
    """Scores episodes in standard deviations of the reference episodes. It reads frames, proprioception and the
    instruction through its encoder, and comparisons through ``fit``; never ``success`` or ``truth``."""

    privileged: ClassVar[bool] = False

    def __init__(self, encoder: Encoder, config: PreferenceConfig | None = None, fit: FitConfig | None = None) -> None:
        self.encoder = encoder
        self.config = config or PreferenceConfig()
        self.fit_config = fit or FitConfig()
        self._version = 0
        self._network: Network | None = None
        self._temperature = 1.0
        self._threshold = float("nan")
        self._layout = Layout(heads=self.config.heads)
        self._scales: dict[str, np.ndarray] = {}  # mean and std of features and of members

    @property
    def version(self) -> int:
        """0 until the first fit; one more with every fit."""
        return self._version

    @property
    def heads(self) -> tuple[Head, ...]:
        return self.config.heads

    @property
    def threshold(self) -> float:
        """Of the last frame's ``success``: above it an episode counts as one. NaN with too few held-out failures."""
        return self._threshold

    @property
    def dim(self) -> int:
        """Of a frame's features, with their changes since the episode's first frame if they are read too."""
        return self.encoder.dim * (2 if self.config.first_frame else 1)

    def features(self, episodes: Episodes) -> EpisodeFeatures:
        """The input of ``score_features``: compute it once per episode and keep it for later fits."""
        return episode_features(
            self.encoder,
            episodes,
            only_last=self.config.frames == "last" and self.heads == ("return",),
            first_frame=self.config.first_frame,
        )

    def score(self, episodes: Episodes) -> Float[np.ndarray, " N"]:
        return self.score_features(self.features(episodes))

    def score_features(self, features: EpisodeFeatures) -> Float[np.ndarray, " N"]:
        members = self._standardised(features)
        match self.config.combination:
            case "mean":
                return members.mean(axis=0)
            case "min":
                return members.min(axis=0)
            case "pessimistic":
                return members.mean(axis=0) - self.config.variance_weight * members.var(axis=0)

    def progress(self, episodes: Episodes) -> Float[np.ndarray, "N F"]:
        """How far the task is in every frame, in [0, 1]; NaN after the end and in invalid episodes."""
        return self.frame_values(self.features(episodes), "progress").mean(axis=0)

    def success(self, episodes: Episodes) -> Float[np.ndarray, "N F"]:
        """Probability that the task is done in every frame, of the members' mean log-odds; NaN like ``progress``."""
        return _sigmoid(self.frame_values(self.features(episodes), "success").mean(axis=0))

    def success_of_frames(self, values: Float[np.ndarray, "R D"]) -> Float[np.ndarray, " R"]:
        """As ``success``, of single frames by their features."""
        features = EpisodeFeatures(values=values[:, None], live=np.ones((len(values), 1), bool))
        return _sigmoid(self.frame_values(features, "success").mean(axis=0)[:, 0])

    def disagreement(self, episodes: Episodes) -> Float[np.ndarray, " N"]:
        """Std over the members of the standardised scores: how unsure the ensemble is of each episode."""
        return self._standardised(self.features(episodes)).std(axis=0)

    def probabilities(self, episodes: Episodes, pairs: Int[np.ndarray, "M 2"]) -> Float[np.ndarray, " M"]:
        """Calibrated probability that the first is better; NaN where either episode is invalid."""
        logits = self.member_logits(self.features(episodes))
        return probability(logits[:, pairs[:, 0]] - logits[:, pairs[:, 1]], 1.0)

    def member_logits(self, features: EpisodeFeatures) -> Float[np.ndarray, "E N"]:
        """Returns of each member divided by the temperature: differences are log-odds. NaN for invalid episodes."""
        return self._returns(features) / self._temperature

    def fit(self, data: PairData, seed: int, clips: ClipFrames | None = None) -> FitReport:
        """Train from scratch on every pair so far; equal data and seeds give bit-equal weights.

        The heads beside "return" learn from ``clips``.
        """
        start = time.perf_counter()
        if not (~data.held_out).any():
            raise ValueError("The preference reward has no pair to train on: every label so far is held out or a skip.")
        live_values = data.values[data.live]
        mean = live_values.mean(axis=0)
        std = live_values.std(axis=0) + np.float32(self.config.std_floor)
        if self.config.cnn is not None:  # one scale for all pixels, or the noise of constant ones is blown up
            std = np.full_like(std, std.mean())
        self._scales = {"feature_mean": mean, "feature_std": std}
        self._temperature = 1.0
        self._check_clips(clips)
        self._network = self._build(data.values.shape[-1], seed)
        features = EpisodeFeatures(values=data.values, live=data.live)
        summed = self._summed(features)
        with one_thread():
            steps = fit_network(
                self._network,
                torch.from_numpy(self._scaled(summed.values)),
                torch.from_numpy(summed.live),
                data,
                self.fit_config,
                seed,
                layout=self._layout,
                stop_on_frames=self.config.score != "return",
                clips=None
                if clips is None or self.heads == ("return",)
                else replace(clips, values=self._scaled(clips.values)),
            )

        raw = self._returns(features)
        reference = raw[:, : self.config.num_reference]
        self._scales["member_mean"] = reference.mean(axis=1)
        self._scales["member_std"] = reference.std(axis=1) + np.float32(1e-6)
        for head in self.heads[1:]:
            value = self._at_end(features, head)[:, : self.config.num_reference]
            self._scales[f"{head}_mean"] = np.nanmean(value, axis=1)
            self._scales[f"{head}_std"] = np.nanstd(value, axis=1) + np.float32(1e-6)
        delta = raw[:, data.pairs[:, 0]] - raw[:, data.pairs[:, 1]]
        held, train = data.held_out, ~data.held_out
        ece = float("nan")
        if held.any():
            self._temperature = calibrate(delta[:, held], data.target[held])[0]
            ece = expected_calibration_error(probability(delta[:, held], self._temperature), data.target[held])
        self._version += 1
        score = self.score_features(features)
        return FitReport(
            loss=float(np.mean([cross_entropy(probability(d[None, train], 1.0), data.target[train]) for d in delta])),
            train_accuracy=pair_accuracy(score, data.pairs[train], data.target[train]),
            held_out_accuracy=pair_accuracy(score, data.pairs[held], data.target[held]),
            ece=ece,
            temperature=self._temperature,
            num_pairs=int(train.sum()),
            num_steps=steps,
            seconds=time.perf_counter() - start,
            **self._judge_clips(clips),
        )

    def state(self) -> Mapping[str, np.ndarray]:
        """Everything but the encoder, which the caller must build alike before ``restore``."""
        network = {} if self._network is None else self._network.state_dict()
        return {
            "version": np.asarray(self._version),
            "temperature": np.asarray(self._temperature),
            **({"threshold": np.asarray(self._threshold)} if "success" in self.heads else {}),
            **{f"scale/{name}": value for name, value in self._scales.items()},
            **{f"network/{name}": to_numpy(value).copy() for name, value in network.items()},
        }

    def restore(self, state: Mapping[str, np.ndarray]) -> None:
        scales = {name: np.array(value) for name, value in under("scale/", state).items()}
        if scales and len(scales["feature_mean"]) != self.dim:
            raise ValueError(
                f"The saved reward was fitted on {len(scales['feature_mean'])} features, but its encoder now gives "
                f"{self.dim}: build the encoder as in the run that saved it."
            )
        if self.config.heads != self._heads_of(state):
            raise ValueError(
                f"The saved reward has the heads {self._heads_of(state)}, this one {self.heads}: build it as it was."
            )
        self._version, self._temperature = int(state["version"]), float(state["temperature"])
        self._threshold = float(state["threshold"]) if "success" in self.heads else float("nan")
        self._scales = scales
        self._network = None
        if self._version:
            self._network = self._build(self.dim, seed=0)
            weights = under("network/", state)
            self._network.load_state_dict({name: torch.tensor(value) for name, value in weights.items()})

    def _heads_of(self, state: Mapping[str, np.ndarray]) -> tuple[Head, ...]:
        """Those that a saved state was fitted with; of an unfitted one, ours."""
        if not int(state["version"]):
            return self.heads
        return tuple(head for head in HEADS if head == "return" or f"scale/{head}_mean" in state)

    def _check_clips(self, clips: ClipFrames | None) -> None:
        if len(self.heads) == 1:
            return
        if clips is None or not (clips.success[clips.is_end & ~clips.held_out] > 0.5).any():
            raise ValueError(
                f"reward.heads {list(self.heads)} learn from clips that are known to have succeeded, and there is "
                "none: give demonstrations or outcome labels (reward.outcomes), or use only the head return."
            )

    def _judge_clips(self, clips: ClipFrames | None) -> dict[str, float]:
        """Sets the threshold of "success", and measures on held-out clips what the fit report says of them."""
        if clips is None or len(self.heads) == 1:
            return {}
        held = clips.held_out
        features = EpisodeFeatures(values=clips.values[held][:, None], live=np.ones((int(held.sum()), 1), bool))
        found: dict[str, float] = {}
        if "progress" in self.heads:
            error = np.abs(self.frame_values(features, "progress").mean(axis=0)[:, 0] - clips.progress[held])
            known = ~np.isnan(error)
            found["progress_error"] = float(error[known].mean()) if known.any() else float("nan")
        if "success" in self.heads:
            end, rate = held & clips.is_end, self.config.false_positive_rate
            p, target = self.success_of_frames(clips.values[end]), clips.success[end]
            self._threshold = threshold_at(p[target < 0.5], rate)
            above = cross_fit(p[target < 0.5], clips.source[end][target < 0.5], rate).above
            found["success_threshold"] = self._threshold
            found["success_recall"] = share_above(p[target > 0.5], self._threshold)
            found["false_positives"] = float("nan") if above is None else float(above.mean())
        return found

    def _build(self, dim: int, seed: int) -> Network:
        config = self.config
        return Network(
            num_members=config.num_members,
            dim=dim,
            hidden=config.hidden,
            cnn=config.cnn,
            rng=generator(seed),
            num_outputs=self._layout.num_outputs,
        )

    def _scaled(self, values: Float[np.ndarray, "*batch D"]) -> Float[np.ndarray, "*batch D"]:
        return ((values - self._scales["feature_mean"]) / self._scales["feature_std"]).astype(np.float32)

    def _summed(self, features: EpisodeFeatures) -> EpisodeFeatures:
        """The frames whose Bradley-Terry rewards make an episode's return."""
        return features if self.config.frames == "all" else last_frames(features)

    def _returns(self, features: EpisodeFeatures) -> Float[np.ndarray, "E N"]:
        result = self._read(self._summed(features), returns)
        result[:, ~features.live.any(axis=1)] = np.nan
        return result

    def frame_values(self, features: EpisodeFeatures, head: Head) -> Float[np.ndarray, "E N K"]:
        """Of each member: "progress" in [0, 1] or the logit of "success"; NaN where not live."""
        if head not in self.heads or head == "return":
            raise ValueError(f"This reward has the heads {self.heads}; {head!r} of single frames is none of them.")
        decode = self._layout.progress if head == "progress" else self._layout.success
        result = self._read(features, lambda network, x, live: decode(network(x.flatten(1, 2))).reshape(live.shape))
        return np.where(features.live, result, np.float32(np.nan))

    def _read(self, features: EpisodeFeatures, read: Read) -> np.ndarray:
        """What ``read`` makes of the scaled features, a number of episodes at a time."""
        if self._network is None:
            raise ValueError("The preference reward has not been fitted yet: label pairs and call fit before scoring.")
        with torch.no_grad(), one_thread():
            return read_in_parts(self._network, self._scaled(features.values), features.live, read)

    def _at_end(self, features: EpisodeFeatures, head: Head) -> Float[np.ndarray, "E N"]:
        """A frame head at the last live frame; NaN for invalid episodes."""
        return self.frame_values(last_frames(features), head)[..., 0]

    def _standardised(self, features: EpisodeFeatures) -> Float[np.ndarray, "E N"]:
        wanted = self.heads if self.config.score == "mix" else (self.config.score,)
        terms = [self._standardised_head(features, head) for head in wanted]
        return terms[0] if len(terms) == 1 else np.mean(terms, axis=0)

    def _standardised_head(self, features: EpisodeFeatures, head: Head) -> Float[np.ndarray, "E N"]:
        name = "member" if head == "return" else head
        raw = self._returns(features) if head == "return" else self._at_end(features, head)
        return (raw - self._scales[f"{name}_mean"][:, None]) / self._scales[f"{name}_std"][:, None]


def _sigmoid(x: Float[np.ndarray, "*batch"]) -> Float[np.ndarray, "*batch"]:
    return 1 / (1 + np.exp(-np.clip(x, -50, 50)))
