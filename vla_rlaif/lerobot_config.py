"""The policy section of a run for LeRobot's policies: pi0, pi0.5, SmolVLA, ACT, diffusion policy."""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from vla_rlaif.config_base import Model, Positive
from vla_rlaif.tune_config import FullTuning

Noise = Annotated[float, Field(gt=0)]


class SdeSampler(Model):
    """Every denoising step of a flow policy is stochastic, with the same marginals as the ODE (Flow-SDE,
    https://arxiv.org/abs/2505.05470)."""

    type: Literal["sde"] = "sde"
    noise: Noise = 0.5  # of s_t = noise * sqrt(t / (1 - t))


class HybridSampler(Model):
    """As sde, but in a window of steps drawn anew for every decision, the others by the ODE: log-probs cost a forward
    for each step of the window (https://arxiv.org/abs/2510.25889)."""

    type: Literal["hybrid"] = "hybrid"
    noise: Noise = 0.5
    steps: Positive = 1  # of the window


class NoiseSampler(Model):
    """Every denoising step is stochastic, with a spread that a small head learns (Flow-Noise,
    https://arxiv.org/abs/2510.25889)."""

    type: Literal["noise"] = "noise"
    low: Noise = 0.05  # bounds of the spread of a step, normalised action units; it starts at their geometric mean
    high: Noise = 0.3
    hidden: Positive = 64

    @model_validator(mode="after")
    def _in_order(self) -> "NoiseSampler":
        if self.low >= self.high:
            raise ValueError(f"low {self.low} is not below high {self.high}.")
        return self


class GaussianSampler(Model):
    """For ACT: noise around the chunk that it predicts."""

    type: Literal["gaussian"] = "gaussian"
    std: Noise = 0.1  # normalised action units


class DdpmSampler(Model):
    """For diffusion policies: the posterior of every denoising step, its spread at least ``std_floor``
    (https://arxiv.org/abs/2409.00588)."""

    type: Literal["ddpm"] = "ddpm"
    std_floor: Noise = 0.1  # normalised action units


SamplerConfig = Annotated[
    SdeSampler | HybridSampler | NoiseSampler | GaussianSampler | DdpmSampler, Field(discriminator="type")
]


class ExpertTuning(Model):
    """The action expert only. The prefix (images, language) runs once a batch, without gradients."""

    type: Literal["expert"] = "expert"


class AdapterTuning(Model):
    """Low-rank adapters on linear layers of the action expert. An export has them merged."""

    type: Literal["lora"] = "lora"
    rank: Positive = 8
    alpha: Annotated[float, Field(gt=0)] = 16.0  # the update is scaled by alpha / rank
    targets: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj")  # last parts of the layers' names


LeRobotTuning = Annotated[ExpertTuning | AdapterTuning | FullTuning, Field(discriminator="type")]


class LeRobotSettings(Model):
    """How a LeRobot policy acts and what of it is trained: free to differ from the run that made a checkpoint."""

    sampler: SamplerConfig = SdeSampler()
    denoising_steps: Positive | None = None  # null: what the policy's own config says
    tune: LeRobotTuning = ExpertTuning()
    logp_reduction: Literal["mean", "sum"] = "mean"  # over the numbers of a denoising step
    padded_dims: Literal["score", "drop"] = "score"  # action dims beyond the env's feed back into it: score is exact
    fold: Positive | None = None  # denoising steps in one forward when learning; null: all
    cache_prefix: bool = True  # keep the prefix of a whole batch on the device, where tune leaves it alone
    checkpointing: bool = False  # recompute activations backwards: less memory, a third slower
    compute: Literal["float32", "bfloat16"] = "float32"  # of the transformers (autocast); log-probs are float32
    compiled: bool = False  # torch.compile of the denoising step
    device: Literal["auto", "cpu", "cuda"] = "auto"  # where it acts; auto: a GPU if there is one

    @property
    def backend(self) -> Literal["torch"]:
        return "torch"


class TinyVLM(Model):
    """A SmolVLM with random weights and a tokenizer of single bytes, both made here: needs no file."""

    type: Literal["tiny"] = "tiny"
    image_size: Positive = 32  # pixels, resized to with padding
    patch_size: Positive = 8  # pixels
    merged_patches: Positive = 2  # patches along each side that make one token
    vision_dim: Positive = 64
    vision_layers: Positive = 2
    vision_heads: Positive = 2
    vision_mlp_dim: Positive = 128
    hidden_dim: Positive = 64
    num_layers: Positive = 2
    num_heads: Positive = 2
    num_kv_heads: Positive = 1
    mlp_dim: Positive = 128

    @model_validator(mode="after")
    def _sizes_fit(self) -> "TinyVLM":
        if self.image_size % (self.patch_size * self.merged_patches):
            unit = self.patch_size * self.merged_patches
            raise ValueError(f"image_size {self.image_size} is not a multiple of {unit} pixels, those of a token.")
        for name, parts in (("hidden_dim", self.num_heads), ("vision_dim", self.vision_heads)):
            if getattr(self, name) % (2 * parts):
                raise ValueError(f"{name} {getattr(self, name)} is not a multiple of {2 * parts}, twice its heads.")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads {self.num_heads} is not a multiple of num_kv_heads {self.num_kv_heads}.")
        return self


class NamedVLM(Model):
    """A SmolVLM from the hub or a folder: config, tokenizer and, if wanted, weights."""

    type: Literal["named"] = "named"
    name: str = "HuggingFaceTB/SmolVLM2-500M-Video-Instruct"
    weights: bool = True  # false: random ones
    num_layers: Positive = 16  # of the language model, from the first
    image_size: Positive = 512  # pixels, resized to with padding


class SmolVLAConfig(LeRobotSettings):
    """SmolVLA (https://arxiv.org/abs/2506.01844) for the env, from scratch or on a pretrained VLM.

    The default is a tiny one that needs no file.
    """

    type: Literal["smolvla"] = "smolvla"
    vlm: Annotated[TinyVLM | NamedVLM, Field(discriminator="type")] = TinyVLM()
    expert_width: Annotated[float, Field(gt=0)] = 0.75  # times the language model's
    self_attention_every: Positive = 2  # layers; those between read the prefix only
    language_tokens: Positive = 64  # of the longest sentence; bytes with the tiny VLM
    flow_steps: Positive = 10  # denoising steps, unless ``denoising_steps`` says otherwise
    max_action_dim: Positive | None = None  # null: the env's
    max_state_dim: Positive | None = None


class LeRobotConfig(LeRobotSettings):
    """A `pretrained_model` folder of LeRobot, or one on the hub, of any supported type."""

    type: Literal["lerobot"] = "lerobot"
    path: str  # folder or hub id
    revision: str | None = None  # of a hub id
    cameras: dict[str, str] = Field(default_factory=dict)  # LeRobot key: camera of the env; empty: those named alike
    absent_cameras: tuple[str, ...] = ()  # LeRobot keys that the policy does without
    adapt: bool = False  # let a model that pads them take states and actions of the env's sizes; needs statistics
    statistics: Path | None = None  # a dataset's stats.json in place of the folder's
    tokenizer: Path | None = None  # folder; null: where the folder's processor says
    action_low: tuple[float, ...] | None = None  # the folder's action units at the env's -1; null: they are the env's
    action_high: tuple[float, ...] | None = None  # and at its 1
    options: dict[str, Any] = Field(default_factory=dict)  # keys of the folder's config.json to change

    @model_validator(mode="after")
    def _parts_fit(self) -> "LeRobotConfig":
        low, high = self.action_low, self.action_high
        if (low is None) != (high is None):
            raise ValueError("action_low and action_high go together; give both or none.")
        if low is not None and high is not None:
            if len(low) != len(high):
                raise ValueError(f"action_low has {len(low)} numbers, action_high {len(high)}.")
            if any(a >= b for a, b in zip(low, high, strict=True)):
                raise ValueError(f"action_low {low} is not below action_high {high} everywhere.")
        return self
