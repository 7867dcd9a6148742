"""What training a torch policy takes, whatever the loss: a copy of it, an optimiser, one update."""

import copy
from collections.abc import Collection, Mapping
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch

from vla_rlaif.learning import is_kernel
from vla_rlaif.torch_parallel import whole
from vla_rlaif.torch_weights import named_tensors

Parameters = Mapping[str, torch.Tensor]


@runtime_checkable
class HasModule(Protocol):
    @property
    def module(self) -> torch.nn.Module: ...


def trainable_copy[P: HasModule](policy: P, names: Collection[str], device: torch.device) -> P:
    """A copy on ``device`` whose parameters ``names``, and no others, take gradients. The rest is shared with the
    original where it is on the device already.

    Raises:
        ValueError: the policy is not fit to be trained.
    """
    tensors = dict(policy.module.named_parameters())
    unknown = sorted(set(names) - tensors.keys())
    assert not unknown, f"the policy has no parameters {unknown}"
    if any(module.training for module in policy.module.modules()):
        raise ValueError("The policy's module is in training mode, in which dropout changes log-probs: call eval().")
    small = [f"{k} ({tensors[k].dtype})" for k in sorted(names) if tensors[k].dtype != torch.float32]
    if small:
        raise ValueError(
            f"Trained parameters must be float32, or small updates are rounded away; {len(small)} are not: "
            f"{', '.join(small[:3])}. Keep them in float32 and compute in bfloat16 under autocast."
        )
    shared = {id(v): v for k, v in named_tensors(policy.module).items() if k not in names and v.device == device}
    copied = copy.deepcopy(policy, shared)
    copied.module.to(device)
    for name, value in copied.module.named_parameters():
        value.requires_grad_(name in names)
    return copied


def adamw(parameters: Parameters, *, lr: float, weight_decay: float) -> torch.optim.AdamW:
    """AdamW that decays the kernels only, as in jax_learner.py. Fused: one pass over the memory of all parameters."""
    kernels = [value for name, value in parameters.items() if is_kernel(name, value.ndim)]
    rest = [value for name, value in parameters.items() if not is_kernel(name, value.ndim)]
    groups = [{"params": kernels, "weight_decay": weight_decay}, {"params": rest, "weight_decay": 0.0}]
    return torch.optim.AdamW([g for g in groups if g["params"]], lr=lr, fused=True)


def clipped_step(
    optimizer: torch.optim.Optimizer, parameters: Parameters, *, lr: float, max_grad_norm: float
) -> torch.Tensor:
    """One update with the gradients that are there; returns their norm before clipping."""
    for value in parameters.values():
        if value.grad is None:  # no part of the loss uses it: a gradient of 0, so that it decays as it does in JAX
            value.grad = torch.zeros_like(value)
    norm = torch.nn.utils.clip_grad_norm_(parameters.values(), max_grad_norm)
    for group in optimizer.param_groups:
        group["lr"] = lr
    optimizer.step()
    return whole(norm)


def on_device(values: Mapping[str, Any], device: torch.device) -> dict[str, torch.Tensor]:
    """Copies of arrays."""
    return {name: torch.tensor(value, device=device) for name, value in values.items()}


def generator_for(device: torch.device, *entropy: int) -> torch.Generator:
    """One stream of random numbers per device and entropy."""
    seed = np.random.SeedSequence(entropy).generate_state(1, np.uint64)[0]
    return torch.Generator(device).manual_seed(int(seed))
