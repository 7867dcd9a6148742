"""The reward section of a run."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from vla_rlaif.config_base import Fraction, Model, Positive
from vla_rlaif.labeller_config import JudgeSettings, LabellerConfig, OracleConfig, check_prompt


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


class PairsConfig(Model):
    """Which episodes are compared: shares of the pairs, by how they are chosen. Those by the ensemble's scores are
    uniform until there is an ensemble."""

    within_group: Fraction = 0.0  # of one start state
    uniform: Fraction = 0.0
    disagreement: Fraction = 0.0  # on whose order the ensemble's members differ most
    entropy: Fraction = 0.0  # of whose order the ensemble is least sure

    @model_validator(mode="after")
    def _sum_to_one(self) -> "PairsConfig":
        total = sum(vars(self).values())
        if abs(total - 1) > 1e-6:
            raise ValueError(f"the shares sum to {total:g}, wanted 1; a strategy that is not named has 0.")
        return self


class PreferenceRewardConfig(Model):
    """Bradley-Terry ensemble learned from preferences, refreshed during the run within a label budget."""

    type: Literal["preference"] = "preference"
    encoder: EncoderConfig = Field(default_factory=PolicyEncoderConfig, discriminator="type")
    labeller: LabellerConfig = Field(default_factory=OracleConfig, discriminator="type")
    budget: Positive = 1500  # labels in the whole run
    initial_labels: Positive = 400
    initial_episodes: Positive = 512
    labels_per_refresh: Positive = 40
    refresh_every: Positive = 4  # steps
    pairs: PairsConfig = PairsConfig(within_group=0.5, uniform=0.5)
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


class VLMJudgeRewardConfig(JudgeSettings):
    """A vision-language model's rating of each episode on a rubric of 1 to 5, scaled to [0, 1]."""

    type: Literal["vlm_judge"] = "vlm_judge"

    @model_validator(mode="after")
    def _names_fit(self) -> "VLMJudgeRewardConfig":
        check_prompt(self.prompt, ("{instruction}", "{clip}"))
        return self


class SuccessRewardConfig(Model):
    """Simulator success: a baseline, not a learned reward."""

    type: Literal["success"] = "success"


class PixelDistanceConfig(Model):
    """Reads the distance of two dots from the last frame of point_reach: for tests."""

    type: Literal["pixel_distance"] = "pixel_distance"


RewardConfig = (
    PreferenceRewardConfig | PythonRewardConfig | VLMJudgeRewardConfig | SuccessRewardConfig | PixelDistanceConfig
)
