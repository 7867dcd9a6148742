"""torch learner: autograd and torch.optim. Same loss, same contract, same numbers as the JAX one."""

from collections.abc import Mapping
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Float, Int

from vla_rlaif.config import LearnerConfig
from vla_rlaif.grpo import importance_weights
from vla_rlaif.interfaces import Algorithm
from vla_rlaif.learning import merge_micro_batches, split_minibatches, summarise
from vla_rlaif.types import Array, Batch, Observation, Targets, Weights

Params = dict[str, torch.Tensor]


@runtime_checkable
class TorchPolicy(Protocol):
    """What this learner needs beyond Policy: parameters and functions of them (torch.func.functional_call inside)."""

    @property
    def params(self) -> Params: ...

    @property
    def trainable(self) -> frozenset[str]: ...

    def inputs(
        self, obs: Observation, trace: Mapping[str, np.ndarray], executed: Int[np.ndarray, " B"]
    ) -> Mapping[str, np.ndarray]: ...

    def means(self, params: Params, inputs: Mapping[str, Array]) -> Float[Array, "B S D"]: ...

    def score(
        self, params: Params, inputs: Mapping[str, Array], reference: Float[Array, "B S D"] | None
    ) -> tuple[Float[Array, "B S"], Float[Array, "B S"] | None]: ...


class TorchLearner:
    """Owns the trainable parameters, their running average, the reference and the optimiser."""

    def __init__(self, policy: TorchPolicy, algorithm: Algorithm, config: LearnerConfig):
        if config.devices not in (None, 1):
            raise ValueError(f"learner.devices is {config.devices}; a torch policy trains on one. Remove the key.")
        self.version, self._num_updates = 0, 0
        self._policy, self._algorithm, self._config = policy, algorithm, config
        copy = lambda: {k: policy.params[k].detach().clone() for k in sorted(policy.trainable)}  # noqa: E731
        self._frozen = {k: v.detach() for k, v in policy.params.items() if k not in policy.trainable}
        self._trained, self._average, self._reference = copy(), copy(), copy()
        for value in self._trained.values():
            value.requires_grad_(True)
        self._optimizer = self._new_optimizer()

    def _new_optimizer(self) -> torch.optim.AdamW:
        """AdamW that decays the kernels only; which they are, `adamw` of jax_learner.py says too."""
        kernels, rest = [], []
        for name, value in self._trained.items():
            is_kernel = "kernel" in name or (name.endswith("weight") and value.ndim > 1)
            (kernels if is_kernel else rest).append(value)
        groups = [{"params": kernels, "weight_decay": self._config.weight_decay}, {"params": rest, "weight_decay": 0.0}]
        return torch.optim.AdamW([g for g in groups if g["params"]], lr=self._config.lr)

    def update(self, batch: Batch, seed: int) -> dict[str, float]:
        """All epochs over one batch; see JaxLearner.update."""
        if not len(batch.mask):
            return {"updates": 0.0}
        rng = np.random.default_rng(seed)
        minibatches = self._minibatches(batch, rng)
        log, braked = [], False
        for _ in range(self._config.epochs):
            for i in rng.permutation(len(minibatches)):
                log.append(self._step(minibatches[i]))
                braked = self._config.target_kl is not None and log[-1]["policy_kl"] > self._config.target_kl
                if braked:
                    break
            if braked:
                break
        self.version += 1
        keep = self._config.ema
        self._average = {k: keep * a + (1 - keep) * self._trained[k].detach() for k, a in self._average.items()}
        return summarise(log, braked=braked)

    def _step(self, micro: list[tuple]) -> dict[str, float]:
        self._optimizer.zero_grad()
        metrics, rows = [], []
        for inputs, targets, reference in micro:
            logp, kl = self._policy.score({**self._frozen, **self._trained}, inputs, reference)
            loss, extra = self._algorithm.loss(logp, targets, kl)
            loss.backward()  # micro-batches add up: every one divides by the same num_valid
            metrics.append({"loss": loss.item(), **{k: v.item() for k, v in extra.items()}})
            rows.append(float(targets.mask.sum()))
        norm = torch.nn.utils.clip_grad_norm_(self._trained.values(), self._config.max_grad_norm)
        for group in self._optimizer.param_groups:
            group["lr"] = self._config.lr * min(1.0, (self._num_updates + 1) / max(1, self._config.warmup_updates))
        self._optimizer.step()
        self._num_updates += 1
        return {**merge_micro_batches(metrics, rows), "grad_norm": norm.item()}

    @torch.no_grad()
    def _minibatches(self, batch: Batch, rng: np.random.Generator) -> list[list[tuple]]:
        inputs = self._policy.inputs(batch.obs, batch.trace, batch.executed)
        parts = split_minibatches(rng, len(batch.mask), self._config.minibatch, self._config.micro_batches)
        minibatches = []
        for part in parts:
            micro = []
            for index, valid in part:
                x = {k: torch.as_tensor(v[index]) for k, v in inputs.items()}
                logp_old = self._policy.score({**self._frozen, **self._trained}, x, None)[0]
                acted = None if batch.logp_acted is None else torch.as_tensor(batch.logp_acted[index])
                cap = self._config.importance_cap
                targets = Targets(
                    logp_old=logp_old,
                    importance=None if acted is None else importance_weights(logp_old, acted, cap=cap),
                    advantage=torch.as_tensor(batch.advantage[index]),
                    mask=torch.as_tensor(valid & batch.mask[index]),
                    num_valid=batch.num_valid / len(parts),
                )
                micro.append((x, targets, self._policy.means({**self._frozen, **self._reference}, x)))
            minibatches.append(micro)
        return minibatches

    def weights(self, *, averaged: bool = False) -> Weights:
        trained = self._average if averaged else self._trained
        return {k: v.detach().numpy().copy() for k, v in {**self._frozen, **trained}.items()}

    def state(self) -> Weights:
        parts = {"params": self._trained, "average": self._average, "reference": self._reference}
        flat = {f"{part}/{k}": v.detach().numpy().copy() for part, tree in parts.items() for k, v in tree.items()}
        for name, value in self._trained.items():
            for key, moment in self._optimizer.state.get(value, {}).items():
                flat[f"optimizer/{name}/{key}"] = moment.numpy().copy()
        return {**flat, "num_updates": np.array(self._num_updates), "version": np.array(self.version)}

    def restore(self, state: Weights) -> None:
        part = lambda name: {k: torch.tensor(state[f"{name}/{k}"]) for k in self._trained}  # noqa: E731
        self._average, self._reference = part("average"), part("reference")
        with torch.no_grad():
            for name, value in part("params").items():
                self._trained[name].copy_(value)
        self._optimizer = self._new_optimizer()
        for name, value in self._trained.items():
            prefix = f"optimizer/{name}/"
            moments = {k.removeprefix(prefix): torch.tensor(v) for k, v in state.items() if k.startswith(prefix)}
            if moments:
                self._optimizer.state[value] = moments
        self.version, self._num_updates = int(state["version"]), int(state["num_updates"])
