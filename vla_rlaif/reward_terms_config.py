"""Rewards that come from elsewhere: other people's servers and folders."""

from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from vla_rlaif.config_base import Fraction, Model, Positive
from vla_rlaif.labeller_config import LabellerConfig

Seconds = Annotated[float, Field(gt=0)]


class RobometerRewardConfig(Model):
    """Robometer's evaluation server (https://github.com/robometer/robometer): how far the task is done at the end of
    an episode, in [0, 1]."""

    privileged: ClassVar[str | None] = None

    type: Literal["robometer"] = "robometer"
    url: str = "http://127.0.0.1:8001"  # of the server, without a path
    model: str | None = None  # its model_path, as /model_info says; another one stops the run. null: not checked
    score: Literal["progress", "success"] = "progress"  # the head that is the reward: of the last frame
    frames: Annotated[int, Field(ge=2)] = 8  # of each episode, evenly spaced, the first and the last included
    camera: str | None = None  # null: the env's first
    batch: Positive = 16  # episodes in one request
    concurrency: Positive = 2  # requests at a time
    retries: Annotated[int, Field(ge=0)] = 5  # of 429, 5xx and broken connections; nothing else is asked again
    retry_s: Seconds = 0.5  # before the first retry; twice as long before each further one
    request_s: Seconds = 120.0  # how long an answer may take
    first_s: Seconds = 600.0  # how long the first one may take
    invalid_budget: Annotated[int, Field(ge=0)] = 10  # episodes without a usable answer; one more stops the run


class LeRobotRewardConfig(Model):
    """A reward model of LeRobot in a local folder (config.json, model.safetensors). Nothing in it is executed."""

    privileged: ClassVar[str | None] = None

    type: Literal["lerobot"] = "lerobot"
    folder: Path  # as LeRobot's save_pretrained writes it
    cameras: dict[str, str] = Field(
        default_factory=dict
    )  # its image keys to the env's cameras; those of equal names need no entry
    encoder: Path | None = None  # local transformers folder in place of a classifier's `model_name`
    frames: Positive = 8  # of each episode that a video model sees, evenly spaced, the first and the last included
    over: Literal["last", "max", "mean"] = (
        "last"  # which frames of the episode a classifier's success probability is of
    )
    batch: Positive = 64  # frames, or episodes of a video model, at a time
    device: str = "cpu"


class AuditConfig(Model):
    """A labeller that the reward does not learn from: it compares validation episodes of the present policy with those
    of the best one, start by start (monitor.gold: labels). Its answers are in ``audit/preferences.sqlite``."""

    labeller: LabellerConfig = Field(discriminator="type")
    pairs: Annotated[int, Field(ge=30)] = 40  # of each validation; fewer say nothing beyond doubt
    budget: Positive = 600  # labels in the whole run, besides the reward's; then the monitor has no gold


class MonitorConfig(Model):
    """Watches for reward hacking at every validation: the reward (proxy) rises while what is wanted (gold) falls,
    against the best validation so far, on the same start states (docs/reward_hacking.md)."""

    action: Literal["off", "warn", "stop", "rollback"] = "warn"  # rollback: go on from the best validation's weights
    gold: Literal["success", "truth", "labels"] = (
        "success"  # success and truth are measured by the simulator, never trained on; labels: what audit says
    )
    audit: AuditConfig | None = None  # who says what is wanted, with gold: labels
    patience: Positive = 2  # validations in a row that say so before something is done
    tolerance: Fraction = 0.02  # by how much gold has to have fallen, beyond doubt
    confidence: Annotated[float, Field(gt=0.5, lt=1)] = 0.95  # of each of the two one-sided bounds
    max_rollbacks: Positive = 3  # then the run stops

    @model_validator(mode="after")
    def _gold_fits(self) -> "MonitorConfig":
        if (self.gold == "labels") != (self.audit is not None):
            raise ValueError(
                f"gold is {self.gold} and audit is {'not ' if self.audit is None else ''}given: gold labels are those "
                "of audit.labeller, and nothing else asks it. Set both or neither."
            )
        return self
