"""The policy section of a run."""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from vla_rlaif.config_base import Model, Positive
from vla_rlaif.lerobot_config import LeRobotConfig, LeRobotSettings, SmolVLAConfig
from vla_rlaif.token_config import TokenVLAConfig
from vla_rlaif.tune_config import HeadTuning, LoraTuning, TuneConfig


class SmallStemConfig(Model):
    """Octo's own image stem: four strided convolutions, one token a patch."""

    type: Literal["small16"] = "small16"
    features: tuple[int, ...] = (32, 96, 192, 384)
    groups: Positive = 32
    embedding: Positive = 512
    patch_size: Positive = 16  # pixels
    goal_images: bool = True  # the input has room for a goal image, as upstream

    @model_validator(mode="after")
    def _whole_groups(self) -> "SmallStemConfig":
        if any(f % self.groups for f in self.features):
            raise ValueError(f"features {self.features} do not split into {self.groups} groups.")
        return self


class KeypointStemConfig(Model):
    """A shallow CNN read as key points, one token a camera: learns where things are from a few hundred episodes."""

    type: Literal["keypoints"] = "keypoints"
    channels: Positive = 32


StemConfig = Annotated[SmallStemConfig | KeypointStemConfig, Field(discriminator="type")]


class OctoSettings(Model):
    """How an Octo acts and what of it is trained: free to differ from the run that made a checkpoint."""

    window: Positive = 1  # frames seen by a decision; the one before is one decision older
    clip_prediction: Annotated[float, Field(gt=0)] | None = None  # bound of the implied clean action; null is upstream
    tuned_steps: Positive = 10  # the last k denoising steps are trained; the first run on a frozen head
    std_floor: Annotated[float, Field(ge=0)] = 0.1  # normalised action units; 0 is upstream's sampler
    ddim_steps: Annotated[int, Field(ge=3)] | None = None  # deterministic acting by DDIM; null: the mean path
    tune: TuneConfig = HeadTuning()
    logp_reduction: Literal["mean", "sum"] = "mean"  # over the action dims of a denoising step
    compute: Literal["float32", "bfloat16"] = "float32"  # of the trunk; head and log-probs are always float32

    @property
    def backend(self) -> Literal["jax"]:
        return "jax"


class OctoConfig(OctoSettings):
    """Octo (https://arxiv.org/abs/2405.12213) from scratch, with a learned word table for language.

    The defaults are a tiny one; octo_small_reach.yaml has the sizes of Octo-Small.
    """

    type: Literal["octo"] = "octo"
    token_dim: Positive = 64
    num_layers: Positive = 2
    num_heads: Positive = 2
    mlp_dim: Positive = 128
    stem: StemConfig = KeypointStemConfig()
    # Pixels by camera, resized to; default: the env's.
    image_sizes: dict[str, Annotated[int, Field(ge=16)]] = Field(default_factory=dict)
    language_tokens: Positive = 12
    language_dim: Positive = 32
    proprio: bool = True
    repeat_task_tokens: bool = True
    max_horizon: Positive = 2
    head_dim: Positive = 128
    head_blocks: Positive = 2
    time_dim: Positive = 32
    diffusion_steps: Annotated[int, Field(ge=2)] = 10
    max_action: Annotated[float, Field(gt=0)] = 5.0  # bound of every denoising state, normalised action units
    clip_prediction: Annotated[float, Field(gt=0)] | None = 3.0
    tuned_steps: Positive = 5

    @model_validator(mode="after")
    def _sizes_fit(self) -> "OctoConfig":
        if self.tuned_steps > self.diffusion_steps:
            raise ValueError(f"tuned_steps {self.tuned_steps} exceeds diffusion_steps {self.diffusion_steps}.")
        if self.token_dim % self.num_heads:
            raise ValueError(f"token_dim {self.token_dim} does not split into {self.num_heads} heads.")
        if self.window > self.max_horizon:
            raise ValueError(f"window {self.window} exceeds max_horizon {self.max_horizon}.")
        if isinstance(self.tune, LoraTuning) and (self.tune.blocks or 0) > self.num_layers:
            raise ValueError(f"tune.blocks {self.tune.blocks} exceeds num_layers {self.num_layers}.")
        return self


class OctoCheckpointConfig(OctoSettings):
    """An official Octo folder (config.json, dataset_statistics.json, <step>/default), adapted to the env at load.

    Sizes come from the folder. What the env needs and the folder lacks is an error unless ``allow_new`` names it.
    """

    type: Literal["octo_checkpoint"] = "octo_checkpoint"
    folder: Path
    step: int | None = None  # null: the newest
    dataset: str | None = None  # whose statistics unnormalise actions; null: demonstrations', or the only ones there
    tokenizer: Path | None = None  # folder of T5's tokenizer; null: beside the checkpoint, or the hub
    # Observation key: camera of the env.
    cameras: dict[str, str] = Field(default={"image_primary": "primary", "image_wrist": "wrist"})
    # Pixels by observation key, of keys the folder lacks.
    image_sizes: dict[str, Annotated[int, Field(ge=16)]] = Field(default_factory=dict)
    proprio: bool = False  # add proprioception tokens if the folder has none
    new_head: bool = False  # a freshly initialised diffusion head for the env's chunk and action dims
    allow_new: tuple[str, ...] = ()  # patterns of parameters that may start from random values
    skip: tuple[str, ...] = ()  # patterns of the folder's parameters that may be left behind


class GaussianConfig(Model):
    """Linear Gaussian policy on the state, on either backend: the smallest one, for tests and notebooks."""

    type: Literal["gaussian"] = "gaussian"
    backend: Literal["jax", "torch"] = "jax"
    std: Annotated[float, Field(gt=0)] = 0.5

    @property
    def logp_reduction(self) -> Literal["sum"]:
        return "sum"


class MlpConfig(Model):
    """Gaussian policy around a multilayer perceptron on the state: for envs whose state says all that matters."""

    type: Literal["mlp"] = "mlp"
    hidden: tuple[Positive, ...] = (128, 128)  # units of each layer
    std: Annotated[float, Field(gt=0)] = 0.3  # of the noise on every action, action units

    @property
    def backend(self) -> Literal["jax"]:
        return "jax"

    @property
    def logp_reduction(self) -> Literal["sum"]:
        return "sum"


class CustomPolicyConfig(Model):
    """A policy from the user's own code: `package.module:name`, called with (spec, seed=) and ``options``."""

    type: Literal["custom"] = "custom"
    factory: str
    backend: Literal["jax", "torch"] = "jax"
    logp_reduction: Literal["mean", "sum"] = "sum"  # what its score() does: decides which clip range fits
    options: dict[str, Any] = Field(default_factory=dict)


# What can imitate demonstrations, is kept as a run's start, and has a form of its origin to be exported in.
VLASettings = OctoSettings | LeRobotSettings | TokenVLAConfig
# What can imitate demonstrations and is kept as a run's start.
ImitatorSettings = VLASettings | MlpConfig
PolicyConfig = (
    OctoConfig
    | OctoCheckpointConfig
    | SmolVLAConfig
    | LeRobotConfig
    | TokenVLAConfig
    | GaussianConfig
    | MlpConfig
    | CustomPolicyConfig
)
