"""What of a vision-language model is trained: everything, low-rank adapters (peft), or the output head."""

import re
from typing import Any

import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora import Linear as LoraLinear
from torch import Tensor, nn

from vla_rlaif.tune_config import HeadTuning, LoraTuning, TuneConfig

ADAPTER = "default"
# The language model's linear layers, in every family; the vision tower's have other names.
_KERNEL = re.compile(r"model\.(?:language_model|text_model)\.layers\.(\d+)\..*_proj")


def adapt(model: Any, tune: TuneConfig, seed: int) -> None:
    """Put low-rank adapters into a model, in place, if they are to be tuned. They start at no effect.

    Raises:
        ValueError: more blocks are to be adapted than there are.
    """
    if not isinstance(tune, LoraTuning):
        return
    blocks = model.config.get_text_config().num_hidden_layers
    if (tune.blocks or 0) > blocks:
        raise ValueError(f"tune.blocks {tune.blocks} exceeds the {blocks} blocks of the language model.")
    first = blocks - (tune.blocks or blocks)
    kernels = [
        name
        for name, module in model.named_modules()
        if (at := _KERNEL.fullmatch(name)) and isinstance(module, nn.Linear) and int(at[1]) >= first
    ]
    config = LoraConfig(r=tune.rank, lora_alpha=tune.alpha, lora_dropout=0.0, target_modules=kernels)  # pyright: ignore[reportArgumentType]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        inject_adapter_in_model(config, model, ADAPTER)
    for name, parameter in model.named_parameters():
        if is_adapter(name):  # beside kernels in bfloat16 too: small updates would be lost in it
            parameter.data = parameter.data.float()
    model.eval()


def is_adapter(name: str) -> bool:
    return ".lora_A." in name or ".lora_B." in name


def trainable_names(model: Any, tune: TuneConfig) -> frozenset[str]:
    """Names of the parameters that reinforcement learning changes.

    Raises:
        ValueError: the head shares its weights with the input embedding, so it cannot be tuned alone.
    """
    names = frozenset(name for name, _ in model.named_parameters())
    if isinstance(tune, LoraTuning):
        return frozenset(filter(is_adapter, names))
    if isinstance(tune, HeadTuning):
        head = frozenset(name for name in names if name.startswith("lm_head."))
        if not head:
            raise ValueError("tune head: this model's output head is its input embedding. Tune lora or full.")
        return head
    return names


@torch.no_grad()
def merged_tensors(model: Any) -> dict[str, Tensor]:
    """Parameters and saved buffers under the names that they have without adapters, whose effect is added in.

    Tied parameters are there once. What has no adapter shares the model's memory.
    """
    saved = model.state_dict(keep_vars=True)
    tensors = dict(model.named_parameters())
    tensors |= {name: value for name, value in model.named_buffers() if name in saved}
    plain = {name.replace(".base_layer.", "."): v.detach() for name, v in tensors.items() if not is_adapter(name)}
    for name, module in model.named_modules():
        if isinstance(module, LoraLinear):
            kernel = plain[f"{name}.weight"]
            plain[f"{name}.weight"] = (kernel.float() + module.get_delta_weight(ADAPTER).float()).to(kernel.dtype)
    return plain
