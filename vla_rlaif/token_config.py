"""The policy section of a run for vision-language models that write actions as tokens."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from vla_rlaif.config_base import Model, Positive
from vla_rlaif.tune_config import FullTuning, HeadTuning, TuneConfig

PROMPT = "{images}In: What action should the robot take to {instruction}?\nOut:"  # OpenVLA's sentence


class TinyVLMConfig(Model):
    """A small model of a published architecture, built here with random weights: needs no file."""

    type: Literal["tiny"] = "tiny"
    family: Literal["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "idefics3", "paligemma"] = "qwen2_vl"
    hidden_dim: Positive = 64
    num_layers: Positive = 2
    num_heads: Positive = 2
    mlp_dim: Positive = 128
    vision_dim: Positive = 32
    vision_layers: Positive = 1
    patch_size: Positive = 4  # pixels; a token shows 2 by 2 patches to the language model, 1 with paligemma

    @model_validator(mode="after")
    def _sizes_fit(self) -> "TinyVLMConfig":
        for name in ("hidden_dim", "vision_dim"):
            if getattr(self, name) % (8 * self.num_heads):
                wanted = f"a multiple of 8 x num_heads ({8 * self.num_heads}): rotary positions need that"
                raise ValueError(f"{name} {getattr(self, name)}: wanted {wanted}.")
        return self


class FolderVLMConfig(Model):
    """A transformers folder: config.json, safetensors, tokenizer and image processor. Nothing in it is executed."""

    type: Literal["folder"] = "folder"
    folder: Path
    dataset: str | None = None  # whose statistics unnormalise actions; null: the only ones there, or none
    action_ids: Literal["last", "added"] = "last"  # the tokenizer's last ids (OpenVLA), or new ones behind all others
    dtype: Literal["float32", "bfloat16"] = "float32"  # of the parameters in memory


class InProcessConfig(Model):
    """Generation by transformers, in the process that acts."""

    type: Literal["in_process"] = "in_process"


class VLLMConfig(Model):
    """Generation by a vLLM server on this machine, a process of its own environment; docs/tokens.md has its limits."""

    type: Literal["vllm"] = "vllm"
    python: Path  # interpreter of the environment that `make env-vllm` builds
    device: Literal["cpu", "cuda"] = "cpu"
    dtype: Literal["float32", "bfloat16"] = "float32"
    memory_gb: Annotated[float, Field(gt=0)] = 1.0  # of the KV cache
    max_rows: Positive = 64  # sequences at a time; the rest wait
    start_s: Annotated[float, Field(gt=0)] = 300.0  # how long the server may take to come up
    request_s: Annotated[float, Field(gt=0)] = 120.0  # how long it may take to answer one batch, or to take weights
    sleep: bool = False  # give the GPU's memory back while the learner updates

    @model_validator(mode="after")
    def _sleeps_on_a_gpu(self) -> "VLLMConfig":
        if self.sleep and self.device == "cpu":
            raise ValueError("sleep gives a GPU's memory back; with device cpu there is none. Remove the key.")
        return self


EngineConfig = Annotated[InProcessConfig | VLLMConfig, Field(discriminator="type")]


class TokenVLAConfig(Model):
    """A vision-language model that writes a chunk as H x A tokens, each one of 256 bins (RT-2, OpenVLA)."""

    type: Literal["token_vla"] = "token_vla"
    vlm: Annotated[TinyVLMConfig | FolderVLMConfig, Field(discriminator="type")] = TinyVLMConfig()
    prompt: str = PROMPT  # special tokens included, none are added; {images}, {instruction} and, if it helps, {state}
    image_size: Positive | None = None  # pixels that the model's image processor is given; null: as the env renders
    action_scale: Literal["env", "q99"] = "env"  # what the bins span: [-1, 1], or quantiles 0.01 to 0.99 of the data
    bins: Literal["uniform", "quantile"] = "uniform"  # of equal width, or equally often used by the demonstrations
    temperature: Annotated[float, Field(gt=0)] = 1.0  # of acting and scoring alike
    tune: TuneConfig = FullTuning()
    compute: Literal["float32", "bfloat16"] = "float32"  # of the transformer (autocast); log-probs are float32
    checkpointing: bool = False  # recompute the transformer's activations backwards: less memory, a third slower
    engine: EngineConfig = InProcessConfig()

    @property
    def backend(self) -> Literal["torch"]:
        return "torch"

    @property
    def logp_reduction(self) -> Literal["sum"]:
        """A token's log-prob is that of one action dim: ratios move by tenths, as with text."""
        return "sum"

    @model_validator(mode="after")
    def _parts_fit(self) -> "TokenVLAConfig":
        for name in ("{images}", "{instruction}"):
            if self.prompt.count(name) != 1:
                raise ValueError(f"prompt has {name} {self.prompt.count(name)} times; wanted once.")
        if isinstance(self.vlm, FolderVLMConfig):
            if self.vlm.dtype == "bfloat16" and isinstance(self.tune, FullTuning | HeadTuning):
                raise ValueError("vlm.dtype bfloat16 loses updates of trained parameters; tune lora, or use float32.")
            if self.vlm.action_ids == "added" and isinstance(self.tune, HeadTuning):
                raise ValueError("vlm.action_ids added starts from untrained tokens: imitate with tune full first.")
        return self
