"""The warm_start section of a run: where its start policy comes from."""

from pathlib import Path
from typing import Annotated

from pydantic import Field, model_validator

from vla_rlaif.config_base import Model, Positive


class CollectConfig(Model):
    """Demonstrations of the scripted expert under action noise."""

    episodes: Positive = 256
    noise: Annotated[float, Field(ge=0)] = 0.1  # std of the noise on the executed translation, action units
    scatter_steps: Annotated[int, Field(ge=0)] = 2  # random steps before the demonstration starts, at most
    label_noise: Annotated[float, Field(ge=0)] = 0.0  # std of an error in the demonstrator's own actions
    max_steps: Positive = 12  # env steps recorded per demonstration


class ImitateConfig(Model):
    """Supervised warm start on demonstrations."""

    steps: Positive = 1000
    batch: Positive = 128
    lr: Annotated[float, Field(gt=0)] = 1e-3
    samples: Positive = 4  # (time, noise) draws per trunk pass
    micro_batches: Positive = 1  # gradient accumulation inside a batch
    devices: Positive | None = None  # local ones; null: all. They share the rows of a micro-batch. Torch: 1 or null
    warmup: Annotated[int, Field(ge=0)] = 0  # steps until lr is reached, linearly; then it falls along a cosine
    weight_decay: Annotated[float, Field(ge=0)] = 1e-4  # AdamW's, of kernels only
    frozen: tuple[str, ...] = ()  # fnmatch patterns of parameter names that stay as they are

    @model_validator(mode="after")
    def _sizes_fit(self) -> "ImitateConfig":
        if self.batch % self.micro_batches:
            raise ValueError(f"batch {self.batch} does not split into {self.micro_batches} micro-batches.")
        if self.warmup >= self.steps:
            raise ValueError(f"warmup {self.warmup} leaves none of the {self.steps} steps; use fewer than steps.")
        return self


class WarmStartConfig(Model):
    """Where the start policy comes from: demonstrations made here or already there, or a checkpoint on disk.

    The keys that begin with data_ say how a dataset fits the env: those of `data`, and of `vla-rlaif imitate --data`.
    """

    checkpoint: Path | None = None
    data: Path | None = None  # folder of demonstrations, ours or a LeRobotDataset, or a Hub name, instead of `collect`
    data_cameras: dict[str, str] = Field(default_factory=dict)  # env camera: dataset key; without, the same name
    data_resize: bool = False  # scale a LeRobotDataset's images to the env's size; their aspect is not kept
    data_any_fps: bool = False  # take demonstrations recorded at another rate than the env's
    data_action_low: tuple[float, ...] = ()  # of each dim: what becomes -1; empty: the actions are in [-1, 1] already
    data_action_high: tuple[float, ...] = ()  # of each dim: what becomes 1
    data_tasks: dict[str, str] = Field(default_factory=dict)  # dataset task: the env's instruction; without, the same
    data_episodes: Positive | None = None  # take the first ones; null: all
    collect: CollectConfig = CollectConfig()
    imitate: ImitateConfig = ImitateConfig()

    @model_validator(mode="after")
    def _one_source(self) -> "WarmStartConfig":
        if self.checkpoint is not None and self.data is not None:
            raise ValueError("checkpoint and data are two start policies; remove one of them.")
        low, high = self.data_action_low, self.data_action_high
        if len(low) != len(high) or any(a >= b for a, b in zip(low, high, strict=True)):
            raise ValueError(f"data_action_low {low} is not below data_action_high {high} in every dim.")
        return self
