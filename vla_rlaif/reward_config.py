"""The reward section of a run."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from vla_rlaif.config_base import Fraction, Model, Positive


class PolicyEncoderConfig(Model):
    """Frozen features of the start policy."""

    type: Literal["policy"] = "policy"


class CnnEncoderConfig(Model):
    """A small CNN trained with the reward heads."""

    type: Literal["cnn"] = "cnn"


class PretrainedEncoderConfig(Model):
    """EfficientNet-Lite0 from a pip package (extra `encoders`)."""

    type: Literal["pretrained"] = "pretrained"


EncoderConfig = PolicyEncoderConfig | CnnEncoderConfig | PretrainedEncoderConfig


class OracleConfig(Model):
    """Simulator ground truth with B-Pref's teacher errors (https://arxiv.org/abs/2111.03026)."""

    type: Literal["oracle"] = "oracle"
    beta: float | None = None  # None: perfectly rational; otherwise Boltzmann
    mistake: Fraction = 0.0  # probability of a flipped label
    equal_threshold: Annotated[float, Field(ge=0)] = 0.02  # closer than this is a tie
    skip_threshold: float | None = None  # both below this: skipped
    successes_tie: bool = True  # two successes are equally good


class PreferenceRewardConfig(Model):
    """Bradley-Terry ensemble learned from preferences, refreshed during the run within a label budget."""

    type: Literal["preference"] = "preference"
    encoder: EncoderConfig = Field(default_factory=PolicyEncoderConfig, discriminator="type")
    labeller: OracleConfig = OracleConfig()
    budget: Positive = 1500  # labels in the whole run
    initial_labels: Positive = 400
    initial_episodes: Positive = 512
    labels_per_refresh: Positive = 40
    refresh_every: Positive = 4  # steps
    within_group: Fraction = 0.5  # share of the pairs that share their start state
    members: Positive = 3
    hidden: tuple[int, ...] = (128, 128)
    fit_steps: Positive = 200
    lr: Annotated[float, Field(gt=0)] = 1e-3
    weight_decay: Annotated[float, Field(ge=0)] = 1e-2
    input_noise: Annotated[float, Field(ge=0)] = 0.1
    held_out: Annotated[float, Field(gt=0, lt=0.5)] = 0.15
    recent_share: Fraction = 0.5  # of each fit minibatch that comes from the newest pairs
    frames: Literal["last", "all"] = "last"
    combine: Literal["mean", "min", "pessimistic"] = "mean"

    @model_validator(mode="after")
    def _within_budget(self) -> "PreferenceRewardConfig":
        if self.initial_labels > self.budget:
            raise ValueError(f"initial_labels {self.initial_labels} exceeds the label budget {self.budget}.")
        return self


class PythonRewardConfig(Model):
    """The user's own reward: `package.module:function`, f(episodes) -> [N] floats."""

    type: Literal["python"] = "python"
    function: str


class SuccessRewardConfig(Model):
    """Simulator success: a baseline, not a learned reward."""

    type: Literal["success"] = "success"


class PixelDistanceConfig(Model):
    """Reads the distance of two dots from the last frame of point_reach: for tests."""

    type: Literal["pixel_distance"] = "pixel_distance"


RewardConfig = PreferenceRewardConfig | PythonRewardConfig | SuccessRewardConfig | PixelDistanceConfig
