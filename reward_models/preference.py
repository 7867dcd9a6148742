"""A reward learned from comparisons: an ensemble of Bradley-Terry heads on the features of an episode's frames.

Axes: E members, N episodes, K frames read, D features, M pairs. The fit itself is in ``preference_fit.py``.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
import torch
from jaxtyping import Float, Int

from vla_rlaif.interfaces import Encoder
from vla_rlaif.preferences.data import EpisodeFeatures, FitReport, PairData, pair_accuracy
from vla_rlaif.reward_models.bradley_terry import (
    calibrate,
    cross_entropy,
    expected_calibration_error,
    generator,
    one_thread,
    probability,
    to_numpy,
)
from vla_rlaif.reward_models.networks import CnnConfig, Network
from vla_rlaif.reward_models.preference_fit import FitConfig, fit_network, returns
from vla_rlaif.types import Episodes, Observation

FRAMES_PER_CALL = 256  # what an encoder sees at once
Combination = Literal["mean", "min", "pessimistic"]


@dataclass(frozen=True, kw_only=True)
class PreferenceConfig:
    """What the reward reads and how its members are combined. The defaults are those of the feasibility run."""

    num_members: int = 3
    hidden: tuple[int, ...] = (128, 128)
    frames: Literal["last", "all"] = "last"  # "all" sums the heads over the live frames
    combination: Combination = "mean"
    variance_weight: float = 1.0  # lambda of "pessimistic": mean - lambda * variance
    num_reference: int = 256  # the oldest labelled episodes: members are standardised on them, so they never move
    std_floor: float = 1e-2  # added to the std of every feature, in feature units
    cnn: CnnConfig | None = None  # trains a CNN with the heads; needs encoders.PixelEncoder

    def __post_init__(self) -> None:
        if self.num_members < 1 or self.num_reference < 2:
            raise ValueError(
                "A preference reward needs num_members >= 1 and num_reference >= 2, "
                f"got {self.num_members} and {self.num_reference}."
            )


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
        self._scales: dict[str, np.ndarray] = {}  # mean and std of features and of members

    @property
    def version(self) -> int:
        """0 until the first fit; one more with every fit."""
        return self._version

    def features(self, episodes: Episodes) -> EpisodeFeatures:
        """The input of ``score_features``: compute it once per episode and keep it for later fits."""
        num, num_frames = episodes.state.shape[:2]
        frame = np.arange(num_frames)
        if self.config.frames == "last":  # frames after the end repeat the last live one
            live = np.zeros((num, num_frames), bool)
            live[:, -1] = True
        else:
            live = frame <= episodes.num_decisions[:, None]
        live &= episodes.valid[:, None]
        row, column = np.nonzero(live)
        encoded = [
            self.encoder.encode(_observation(episodes, row[start:stop], column[start:stop]))
            for start, stop in _chunks(len(row))
        ]
        values = np.zeros((num, num_frames, self.encoder.dim), np.float32)
        values[row, column] = np.concatenate([np.empty((0, self.encoder.dim), np.float32), *encoded])
        first = num_frames - 1 if self.config.frames == "last" else 0
        return EpisodeFeatures(values=values[:, first:], live=live[:, first:])

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

    def fit(self, data: PairData, seed: int) -> FitReport:
        """Train from scratch on every pair so far; equal data and seeds give bit-equal weights."""
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
        self._network = self._build(data.values.shape[-1], seed)
        x = torch.from_numpy(self._scaled(data.values))
        with one_thread():
            steps = fit_network(self._network, x, torch.from_numpy(data.live), data, self.fit_config, seed)

        features = EpisodeFeatures(values=data.values, live=data.live)
        raw = self._returns(features)
        reference = raw[:, : self.config.num_reference]
        self._scales["member_mean"] = reference.mean(axis=1)
        self._scales["member_std"] = reference.std(axis=1) + np.float32(1e-6)
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
        )

    def state(self) -> Mapping[str, np.ndarray]:
        """Everything but the encoder, which the caller must build alike before ``restore``."""
        network = {} if self._network is None else self._network.state_dict()
        return {
            "version": np.asarray(self._version),
            "temperature": np.asarray(self._temperature),
            **{f"scale/{name}": value for name, value in self._scales.items()},
            **{f"network/{name}": to_numpy(value).copy() for name, value in network.items()},
        }

    def restore(self, state: Mapping[str, np.ndarray]) -> None:
        scales = _under("scale/", state)
        if scales and len(scales["feature_mean"]) != self.encoder.dim:
            raise ValueError(
                f"The saved reward was fitted on {len(scales['feature_mean'])} features, but its encoder now gives "
                f"{self.encoder.dim}: build the encoder as in the run that saved it."
            )
        self._version, self._temperature = int(state["version"]), float(state["temperature"])
        self._scales = scales
        self._network = None
        if self._version:
            self._network = self._build(self.encoder.dim, seed=0)
            weights = _under("network/", state)
            self._network.load_state_dict({name: torch.from_numpy(value) for name, value in weights.items()})

    def _build(self, dim: int, seed: int) -> Network:
        config = self.config
        return Network(
            num_members=config.num_members, dim=dim, hidden=config.hidden, cnn=config.cnn, rng=generator(seed)
        )

    def _scaled(self, values: Float[np.ndarray, "N K D"]) -> Float[np.ndarray, "N K D"]:
        return ((values - self._scales["feature_mean"]) / self._scales["feature_std"]).astype(np.float32)

    def _returns(self, features: EpisodeFeatures) -> Float[np.ndarray, "E N"]:
        if self._network is None:
            raise ValueError("The preference reward has not been fitted yet: label pairs and call fit before scoring.")
        x, live = torch.from_numpy(self._scaled(features.values)), torch.from_numpy(features.live)
        num_members = self.config.num_members
        with torch.no_grad(), one_thread():
            parts = [
                to_numpy(
                    returns(
                        self._network, x[a:b].expand(num_members, -1, -1, -1), live[a:b].expand(num_members, -1, -1)
                    )
                )
                for a, b in _chunks(len(x))
            ]
        result = np.concatenate([np.empty((num_members, 0), np.float32), *parts], axis=1)
        result[:, ~features.live.any(axis=1)] = np.nan
        return result

    def _standardised(self, features: EpisodeFeatures) -> Float[np.ndarray, "E N"]:
        raw = self._returns(features)
        return (raw - self._scales["member_mean"][:, None]) / self._scales["member_std"][:, None]


def _observation(episodes: Episodes, row: Int[np.ndarray, " B"], frame: Int[np.ndarray, " B"]) -> Observation:
    return Observation(
        images={camera: images[row, frame] for camera, images in episodes.images.items()},
        state=episodes.state[row, frame],
        instruction=tuple(episodes.instruction[i] for i in row),
    )


def _chunks(num: int) -> list[tuple[int, int]]:
    return [(start, min(start + FRAMES_PER_CALL, num)) for start in range(0, num, FRAMES_PER_CALL)]


def _under(prefix: str, state: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {name.removeprefix(prefix): np.array(value) for name, value in state.items() if name.startswith(prefix)}
