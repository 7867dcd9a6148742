"""The reward section of a run."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from vla_rlaif.config_base import Fraction, Model, Positive
from vla_rlaif.labeller_config import JudgeSettings, LabellerConfig, OracleConfig, check_prompt
from vla_rlaif.reward_terms_config import LeRobotRewardConfig, RobometerRewardConfig


class PolicyEncoderConfig(Model):
    """Frozen features of the start policy."""

    type: Literal["policy"] = "policy"


class CnnEncoderConfig(Model):
    """A small CNN trained with the reward heads."""

    type: Literal["cnn"] = "cnn"


class PretrainedEncoderConfig(Model):
    """EfficientNet-Lite0 from a pip package (extra `encoders`)."""

    type: Literal["pretrained"] = "pretrained"


Share = Annotated[float, Field(ge=0, le=1)]
TABLETOP_THINGS = {  # as instructions of the tabletop call them; the disc's is between those of its renderers
    "red cube": (0.9, 0.1, 0.1),
    "blue cube": (0.1, 0.25, 0.9),
    "green cube": (0.1, 0.7, 0.15),
    "green disc": (0.16, 0.95, 0.13),
}


class ColorPointsEncoderConfig(Model):
    """Where the things that the instruction names are in each image, found by their colour. Nothing is learned, so it
    needs no policy and few labels; for scenes whose things differ in colour."""

    type: Literal["color_points"] = "color_points"
    things: dict[str, tuple[Share, Share, Share]] = Field(default_factory=lambda: dict(TABLETOP_THINGS))  # phrase: RGB

    @model_validator(mode="after")
    def _can_be_seen(self) -> "ColorPointsEncoderConfig":
        if not self.things or not all(sum(color) for color in self.things.values()):
            raise ValueError(
                "things maps phrases of the instructions to colours, red, green and blue in [0, 1], no black."
            )
        return self


EncoderConfig = PolicyEncoderConfig | CnnEncoderConfig | PretrainedEncoderConfig | ColorPointsEncoderConfig


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

    privileged: ClassVar[str | None] = None  # what it reads of the simulator's truth; its labeller may read more

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
    assumed_mistakes: Annotated[float, Field(ge=0, lt=0.5)] = 0.0  # share of the labels that the fit takes to be wrong
    held_out: Annotated[float, Field(gt=0, lt=0.5)] = 0.15
    recent_share: Fraction = 0.5  # of each fit minibatch that comes from the newest pairs
    frames: Literal["last", "all"] = "last"
    combine: Literal["mean", "min", "pessimistic"] = "mean"
    bootstrap: bool = False  # every member has its own resample of the labels
    first_frame: bool = False  # read every frame beside its change since the first one: how far it came
    heads: tuple[Literal["return", "progress", "success"], ...] = ("return",)  # the others learn from known outcomes
    score: Literal["return", "progress", "success", "mix"] = "return"  # the reward; mix: the mean of all heads
    outcomes: tuple[Literal["demonstrations", "labeller"], ...] = ()  # who says which clips have succeeded
    outcome_share: Annotated[float, Field(ge=0, lt=1)] = 0.2  # of the labels, asked of single clips; outcomes: labeller
    false_positive_rate: Annotated[float, Field(gt=0, lt=1)] = 0.05  # that the threshold of success allows

    @model_validator(mode="after")
    def _within_budget(self) -> "PreferenceRewardConfig":
        if self.initial_labels > self.budget:
            raise ValueError(f"initial_labels {self.initial_labels} exceeds the label budget {self.budget}.")
        return self

    @model_validator(mode="after")
    def _heads_fit(self) -> "PreferenceRewardConfig":
        if self.heads[:1] != ("return",) or len(set(self.heads)) != len(self.heads):
            raise ValueError(f"heads are return and then others, each once; got {list(self.heads)}.")
        if self.score != "mix" and self.score not in self.heads:
            raise ValueError(f"score is {self.score}, which is none of the heads {list(self.heads)}; add it to them.")
        if (len(self.heads) > 1) != bool(self.outcomes):
            raise ValueError(
                f"heads {list(self.heads)} and outcomes {list(self.outcomes)} do not fit: progress and success learn "
                "from clips that are known to have succeeded (outcomes: [demonstrations, labeller], one or both); "
                "return does not."
            )
        return self


class PythonRewardConfig(Model):
    """The user's own reward: `package.module:function`, f(episodes) -> [N] floats."""

    privileged: ClassVar[str | None] = None  # unless it is not blind

    type: Literal["python"] = "python"
    function: str
    blind: bool = False  # the function is not shown success, truth and start seeds; an audited run wants it so


class VLMJudgeRewardConfig(JudgeSettings):
    """A vision-language model's rating of each episode on a rubric of 1 to 5, scaled to [0, 1]."""

    privileged: ClassVar[str | None] = None

    type: Literal["vlm_judge"] = "vlm_judge"

    @model_validator(mode="after")
    def _names_fit(self) -> "VLMJudgeRewardConfig":
        check_prompt(self.prompt, ("{instruction}", "{clip}"))
        return self


class SuccessRewardConfig(Model):
    """Simulator success: a baseline, not a learned reward."""

    privileged: ClassVar[str | None] = "the simulator's success"

    type: Literal["success"] = "success"


class OracleRewardConfig(Model):
    """The simulator's dense ground truth: a baseline that shows what a perfect reward would give."""

    privileged: ClassVar[str | None] = "the simulator's dense truth"

    type: Literal["oracle"] = "oracle"


class PixelDistanceConfig(Model):
    """Reads the distance of two dots from the last frame of point_reach: for tests."""

    privileged: ClassVar[str | None] = None

    type: Literal["pixel_distance"] = "pixel_distance"


TermRewardConfig = (
    PreferenceRewardConfig
    | PythonRewardConfig
    | VLMJudgeRewardConfig
    | RobometerRewardConfig
    | LeRobotRewardConfig
    | SuccessRewardConfig
    | OracleRewardConfig
    | PixelDistanceConfig
)


class TermConfig(Model):
    """One part of a composite reward."""

    name: Annotated[str, Field(pattern=r"^[a-z0-9_]+$")] | None = None  # in the metrics; null: the reward's type
    weight: float = 1.0  # of the standardised term. 0: measured only
    scale: Annotated[float, Field(gt=0)] | None = (
        None  # what a term is divided by; null: its std on the reference batch
    )
    reward: TermRewardConfig = Field(discriminator="type")

    @property
    def label(self) -> str:
        return self.name or self.reward.type


class CompositeRewardConfig(Model):
    """A weighted sum of rewards, each in standard deviations of what it gives to episodes of the start policy."""

    privileged: ClassVar[str | None] = None  # its terms may be

    type: Literal["composite"] = "composite"
    terms: tuple[TermConfig, ...]
    reference_episodes: Positive = 128  # of the start policy, on which terms are standardised, once

    @model_validator(mode="after")
    def _terms_fit(self) -> "CompositeRewardConfig":
        names = [term.label for term in self.terms]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise ValueError(f"two terms are called {twice!r}: give each a name of its own.")
        if not any(term.weight for term in self.terms):
            raise ValueError("no term has a weight other than 0: nothing would be rewarded.")
        if sum(isinstance(term.reward, PreferenceRewardConfig) for term in self.terms) > 1:
            raise ValueError("two terms are learned from preferences; one run learns one reward.")
        return self


RewardConfig = (
    PreferenceRewardConfig
    | PythonRewardConfig
    | VLMJudgeRewardConfig
    | RobometerRewardConfig
    | LeRobotRewardConfig
    | CompositeRewardConfig
    | SuccessRewardConfig
    | OracleRewardConfig
    | PixelDistanceConfig
)


def parts_of(reward: RewardConfig) -> tuple[TermRewardConfig, ...]:
    """The terms of a composite, else the reward itself."""
    return tuple(term.reward for term in reward.terms) if isinstance(reward, CompositeRewardConfig) else (reward,)


def learned_part(reward: RewardConfig) -> PreferenceRewardConfig | None:
    """What is learned from preferences: the reward itself, or a term of it."""
    return next((part for part in parts_of(reward) if isinstance(part, PreferenceRewardConfig)), None)
