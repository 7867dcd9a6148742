"""Supervised warm start of a torch policy on demonstrations. Same schedule and rows as jax_imitation.py.

Axes: D samples, H chunk, A action dims, B rows of a micro-batch.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Float

from vla_rlaif.learning import fitted_names
from vla_rlaif.torch_parallel import Rank
from vla_rlaif.torch_training import adamw, clipped_step, generator_for, on_device, trainable_copy
from vla_rlaif.torch_weights import as_arrays, named_tensors, to_arrays
from vla_rlaif.types import Observation, Weights
from vla_rlaif.warm_start_config import ImitateConfig

AVERAGE = 0.99  # of the weights that are returned; they lag the last steps by about 100


@runtime_checkable
class TorchImitable(Protocol):
    """What imitation and the anchor of a TorchLearner need of a policy."""

    @property
    def module(self) -> torch.nn.Module: ...

    @property
    def imitable(self) -> frozenset[str]:
        """Names of the parameters to fit."""
        ...

    def imitation_inputs(self, obs: Observation) -> Mapping[str, np.ndarray]: ...

    def imitation_loss(
        self,
        inputs: Mapping[str, torch.Tensor],
        action: Float[torch.Tensor, "B H A"],
        generator: torch.Generator,
        samples: int,
    ) -> Float[torch.Tensor, ""]:
        """The mean over the rows. ``generator`` is on the device of the inputs."""
        ...


def imitable(policy: object) -> TorchImitable:
    """``policy``, if it can imitate; a ValueError otherwise."""
    if not isinstance(policy, TorchImitable):
        raise ValueError(
            f"{type(policy).__name__} cannot imitate: it has no imitable, imitation_inputs and imitation_loss. "
            "Do without warm_start and set algorithm.anchor_coef to 0."
        )
    return policy


def imitate(
    policy: TorchImitable,
    obs: Observation,
    action: Float[np.ndarray, "D H A"],
    config: ImitateConfig,
    *,
    seed: int,
    on_start: Callable[[int, int], None] = lambda trained, frozen: None,
    on_step: Callable[[int, float], None] = lambda step, loss: None,
) -> Weights:
    """Fit the policy's imitable parameters, without ``config.frozen``, to the demonstrated chunks. Returns all weights,
    fitted or not, because ``load`` of a torch policy wants all.

    AdamW with a cosine schedule. ``on_start`` is called with the sizes of all parameters that are fitted and of all
    that are not; ``on_step`` with (steps done, mean loss since the last call), every fiftieth step and at the end.

    Raises:
        ValueError: too few demonstrations, more than one device, or a ``frozen`` that is no use.
    """
    num = len(action)
    if num < config.batch:
        raise ValueError(
            f"{num} demonstrated steps are fewer than imitate.batch {config.batch}; collect more or lower it."
        )
    if config.devices not in (None, 1):
        raise ValueError(f"imitate.devices is {config.devices}; a torch policy imitates on one. Set it to 1 or null.")
    fit = Fit(policy, config, seed)
    on_start(*fit.sizes)
    inputs, losses = policy.imitation_inputs(obs), []
    rng = np.random.default_rng(seed)
    for i in range(config.steps):
        parts = np.split(rng.integers(0, num, config.batch), config.micro_batches)
        losses += fit.step([({k: v[rows] for k, v in inputs.items()}, action[rows]) for rows in parts])
        if (i + 1) % 50 == 0 or i + 1 == config.steps:
            on_step(i + 1, torch.stack(losses).mean().item())
            losses = []
    return fit.weights()


class Fit:
    """A copy of a policy that is fitted step by step, and the average of its parameters."""

    def __init__(self, policy: TorchImitable, config: ImitateConfig, seed: int):
        self._config, self._device, self._done = config, Rank.alone().device, 0
        names = fitted_names(dict(policy.module.named_parameters()), policy.imitable, config.frozen)
        self._policy = trainable_copy(policy, names, self._device)
        tensors = named_tensors(self._policy.module)
        self._trained = {name: tensors[name] for name in names}
        self._rest = {name: value for name, value in tensors.items() if name not in self._trained}
        self._average = {name: value.detach().clone() for name, value in self._trained.items()}
        self._optimizer = adamw(self._trained, lr=config.lr, weight_decay=config.weight_decay)
        self._generator = generator_for(self._device, seed)

    @property
    def sizes(self) -> tuple[int, int]:
        """Numbers that are fitted, and those that are not."""
        return sum(v.numel() for v in self._trained.values()), sum(v.numel() for v in self._rest.values())

    def step(self, parts: Sequence[tuple[Mapping[str, np.ndarray], np.ndarray]]) -> list[torch.Tensor]:
        """One update on micro-batches of (inputs, action); the loss of each of them."""
        self._optimizer.zero_grad()
        losses = []
        for inputs, action in parts:
            x, a = on_device(inputs, self._device), torch.tensor(action, device=self._device)
            loss = self._policy.imitation_loss(x, a, self._generator, self._config.samples)
            (loss / len(parts)).backward()
            losses.append(loss.detach())
        lr = self._config.lr * cosine(self._done, self._config.warmup, self._config.steps)
        clipped_step(self._optimizer, self._trained, lr=lr, max_grad_norm=1.0)
        self._done += 1
        for name, value in self._average.items():
            value.mul_(AVERAGE).add_(self._trained[name].detach(), alpha=1 - AVERAGE)
        return losses

    def weights(self) -> Weights:
        return {**as_arrays(self._rest), **to_arrays(self._average)}


def cosine(done: int, warmup: int, steps: int) -> float:
    """The share of the learning rate in force after ``done`` of ``steps`` updates: a line up, then half a wave down."""
    if done < warmup:
        return done / warmup
    return 0.5 * (1 + math.cos(math.pi * (done - warmup) / (steps - warmup)))
