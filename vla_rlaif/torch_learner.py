"""torch learner: autograd and torch.optim. Same loss, same contract, same numbers as the JAX one.

Axes: see types.py.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Float, Int

from vla_rlaif.config import LearnerConfig
from vla_rlaif.grpo import importance_weights
from vla_rlaif.interfaces import Algorithm
from vla_rlaif.learning import Anchor, Chunks, Rows, Work, divide, merge_micro_batches, share, summarise
from vla_rlaif.torch_imitation import imitable
from vla_rlaif.torch_parallel import Blocked, Rank, Scorer, exchanged, like, local, micro_rows, whole
from vla_rlaif.torch_training import Parameters, adamw, clipped_step, generator_for, on_device, trainable_copy
from vla_rlaif.torch_weights import as_arrays, from_array, named_tensors, to_arrays
from vla_rlaif.types import Batch, Observation, Targets, Weights, under

Inputs = Mapping[str, torch.Tensor]


@runtime_checkable
class TorchPolicy(Protocol):
    """What this learner needs beyond Policy. The functions below read the current parameters of ``module``."""

    @property
    def module(self) -> torch.nn.Module:
        """All parameters, in eval mode. Their names are those of the weights; tied ones count once."""
        ...

    @property
    def trainable(self) -> frozenset[str]:
        """Names of the parameters that the optimiser may move; float32."""
        ...

    def inputs(
        self, obs: Observation, trace: Mapping[str, np.ndarray], executed: Int[np.ndarray, " B"]
    ) -> Mapping[str, np.ndarray]:
        """Arrays for the functions below, leaves "B ...": only what re-scoring needs."""
        ...

    def prepare(self, inputs: Inputs) -> Inputs:
        """Run what no trainable parameter touches, once a batch; the result replaces the inputs of ``means`` and
        ``score``. Called without gradients."""
        ...

    def means(self, inputs: Inputs) -> Float[torch.Tensor, "B S D"]:
        """Means of the S Gaussians, for a closed-form KL."""
        ...

    def score(
        self, inputs: Inputs, reference: Float[torch.Tensor, "B S D"] | None
    ) -> tuple[Float[torch.Tensor, "B S"], Float[torch.Tensor, "B S"] | None]:
        """Log-probabilities and, given the reference's means, the KL to it; nats, float32."""
        ...


@dataclass(frozen=True, kw_only=True)
class Micro:
    """One micro-batch on the device."""

    inputs: Inputs
    targets: Targets
    reference: Float[torch.Tensor, "B S D"]


class TorchLearner:
    """Owns the trainable parameters, their running average, the reference and the optimiser.

    It trains a copy of the policy, which shares what is frozen with the original. The copy's parameters have the newest
    values; the reference's are exchanged with them, in place, while its means are computed. One of several ranks does
    its part of every micro-batch; torch_ranks.py starts and feeds them.
    """

    def __init__(
        self,
        policy: TorchPolicy,
        algorithm: Algorithm,
        config: LearnerConfig,
        anchor: Anchor | None = None,
        *,
        rank: Rank | None = None,
    ):
        self.version, self._num_updates = 0, 0
        self._algorithm, self._config, self._anchor = algorithm, config, anchor
        self._rank = Rank.alone() if rank is None else rank
        check_sizes(config, anchor, self._rank.num_ranks)
        self._policy = trainable_copy(policy, policy.trainable, self._rank.device)
        self._anchor_inputs = {} if anchor is None else imitable(policy).imitation_inputs(anchor.obs)
        self._scorer = Scorer(self._policy.module)
        self._model = self._rank.place(self._scorer, self._policy.blocks if isinstance(self._policy, Blocked) else ())
        tensors = named_tensors(self._policy.module)
        self._frozen = {k: v for k, v in tensors.items() if k not in policy.trainable}
        self._trained = {k: tensors[k] for k in sorted(policy.trainable)}
        self._average, self._reference = ({k: v.detach().clone() for k, v in self._trained.items()} for _ in range(2))
        self._optimizer = adamw(self._trained, lr=config.lr, weight_decay=config.weight_decay)

    def update(self, batch: Batch, seed: int) -> dict[str, float]:
        """All epochs over one batch; see JaxLearner.update. Several ranks call it together, each with all rows."""
        if not len(batch.mask):
            return {"updates": 0.0}
        inputs = self._policy.inputs(batch.obs, batch.trace, batch.executed)
        work = divide(inputs, batch, seed, self._config, self._anchor, self._anchor_inputs)
        return self.learn(share(work, self._rank.index, self._rank.num_ranks))

    def learn(self, work: Work) -> dict[str, float]:
        """``update`` for work that has been cut up. Several ranks call it together, each with its part of the rows, and
        get the metrics of all."""
        minibatches = self._prepare(work)
        log, braked = [], False
        for i in (i for order in work.orders for i in order):
            generator = generator_for(self._rank.device, work.seed, len(log), self._rank.index)
            log.append(self._step(minibatches[i], next(work.anchors, ()), generator))
            braked = self._config.target_kl is not None and log[-1]["policy_kl"] > self._config.target_kl
            if braked:
                break
        self.version += 1
        keep = self._config.ema
        for name, value in self._average.items():
            local(value).mul_(keep).add_(local(self._trained[name]), alpha=1 - keep)
        return summarise(log, braked=braked)

    @torch.no_grad()
    def _prepare(self, work: Work) -> list[list[Micro]]:
        """The inputs of all epochs, the log-probs of the algorithm's baseline and the reference's means."""
        with self._baseline():
            minibatches = [[self._targets(rows, work) for rows in minibatch] for minibatch in work.minibatches]
        if all(means is not None for minibatch in minibatches for *_, means in minibatch):
            return [[_micro(*one) for one in minibatch] for minibatch in minibatches]
        with exchanged(self._trained, self._reference):
            return [
                [_micro(x, targets, self._scorer(self._policy.means, x)) for x, targets, _ in minibatch]
                for minibatch in minibatches
            ]

    def _baseline(self) -> AbstractContextManager[None]:
        """In which the policy has the parameters that the algorithm compares with."""
        is_acting = self._algorithm.baseline == "acting"
        return nullcontext() if is_acting else exchanged(self._trained, self._reference)

    def _targets(self, rows: Rows, work: Work) -> tuple[Inputs, Targets, torch.Tensor | None]:
        """Its last part: the reference's means, if a pool has computed them."""
        device = self._rank.device
        x = self._scorer(self._policy.prepare, on_device(rows.inputs, device))
        logp_old = self._scorer(self._policy.score, x, None)[0]
        importance = None
        if rows.logp_acted is not None:
            acted = torch.tensor(rows.logp_acted, device=device)
            importance = importance_weights(logp_old, acted, cap=self._config.importance_cap)
        targets = Targets(
            logp_old=logp_old,
            importance=importance,
            advantage=torch.tensor(rows.advantage, device=device),
            mask=torch.tensor(rows.mask, device=device),
            num_valid=work.num_valid,
            kl_coef=work.kl_coef,
        )
        return x, targets, None if rows.reference is None else torch.tensor(rows.reference, device=device)

    def _step(
        self, minibatch: Sequence[Micro], chunks: Sequence[Chunks], generator: torch.Generator
    ) -> dict[str, float]:
        """One optimiser update. Gradients of the micro-batches add up: every one divides by the same num_valid."""
        self._optimizer.zero_grad()
        results = []
        for m, micro in enumerate(minibatch):
            pull = {} if not chunks else {"anchor_loss": self._pull(chunks[m], generator)}
            with self._rank.accumulate(self._model, is_last=m + 1 == len(minibatch)):
                logp, kl = self._model(self._policy.score, micro.inputs, micro.reference)
                loss, extra = self._algorithm.loss(logp, micro.targets, kl)
                (loss * self._rank.num_ranks).backward()  # DDP and FSDP average over the ranks; the loss is a sum
            metrics = {"loss": loss, **extra, **pull, "rows": micro.targets.mask.sum().to(loss.dtype)}
            results.append({name: value.detach() for name, value in metrics.items()})  # keeps no activations
        warmth = min(1.0, (self._num_updates + 1) / max(1, self._config.warmup_updates))
        norm = clipped_step(
            self._optimizer,
            self._trained,
            lr=self._config.lr * warmth,
            max_grad_norm=self._config.max_grad_norm,
        )
        self._num_updates += 1
        return {**self._merge(results), "grad_norm": norm.item()}

    def _pull(self, chunks: Chunks, generator: torch.Generator) -> torch.Tensor:
        """Adds the gradient of the anchor's loss, a mean over rows: over those of all ranks, their mean."""
        x = on_device(chunks.inputs, self._rank.device)
        action = torch.tensor(chunks.action, device=self._rank.device)
        with self._rank.accumulate(self._model, is_last=False):
            loss = self._model(imitable(self._policy).imitation_loss, x, action, generator, chunks.samples)
            (loss * chunks.weight).backward()
        return loss

    def _merge(self, results: Sequence[Mapping[str, torch.Tensor]]) -> dict[str, float]:
        """Metrics of one update over the micro-batches of all ranks; one transfer from the device."""
        names = list(results[0])
        table = torch.stack([torch.stack([result[name] for name in names]) for result in results])
        metrics = [dict(zip(names, row, strict=True)) for row in self._rank.gather(table).tolist()]
        return merge_micro_batches(metrics, [one.pop("rows") for one in metrics])

    @cached_property
    def _frozen_arrays(self) -> Weights:
        return as_arrays(self._frozen)

    def weights(self, *, averaged: bool = False) -> Weights:
        return {**self._frozen_arrays, **self.trained(averaged=averaged)}

    def trained(self, *, averaged: bool) -> Weights:
        """Copies of what is not frozen. Collective; only the first rank gets them."""
        return self._on_host(self._average if averaged else self._trained)

    def lent(self, *, averaged: bool) -> Weights:
        """See JaxLearner.lent. Collective as ``trained``."""
        return self._on_host(self._average if averaged else self._trained, as_arrays)

    def state(self) -> Weights:
        parts = {"params": self._trained, "average": self._average, "reference": self._reference}
        flat = {f"{part}/{k}": v for part, tree in parts.items() for k, v in tree.items()}
        for name, value in self._trained.items():
            moments = self._optimizer.state.get(value, {})
            flat |= {f"optimizer/{name}/{key}": moment for key, moment in moments.items()}
        counts = {"num_updates": np.array(self._num_updates), "version": np.array(self.version)}
        return {**self._on_host(flat), **counts}

    def _on_host(
        self, tensors: Parameters, convert: Callable[[Parameters], dict[str, np.ndarray]] = to_arrays
    ) -> dict[str, np.ndarray]:
        found = {}
        for name, value in tensors.items():
            gathered = whole(value)  # one at a time: all together may not fit
            if self._rank.index == 0:
                found |= convert({name: gathered})
        return found

    @torch.no_grad()
    def restore(self, state: Weights) -> None:
        for name, value in self._trained.items():
            for part in (self._trained, self._average, self._reference):
                key = "params" if part is self._trained else "average" if part is self._average else "reference"
                local(part[name]).copy_(local(like(value, from_array(state[f"{key}/{name}"]))))
            moments = under(f"optimizer/{name}/", state)
            self._optimizer.state[value] = {k: like(value, from_array(v)) for k, v in moments.items()}
        self.version, self._num_updates = int(state["version"]), int(state["num_updates"])


def _micro(inputs: Inputs, targets: Targets, reference: torch.Tensor | None) -> Micro:
    assert reference is not None, "all rows of a batch have the reference's means, or none"
    return Micro(inputs=inputs, targets=targets, reference=reference)


def check_sizes(config: LearnerConfig, anchor: Anchor | None, num_ranks: int) -> None:
    """Raises ValueError if the micro-batches do not split over the ranks."""
    micro_rows(config.minibatch, config.micro_batches, num_ranks, "learner.minibatch")
    if anchor is not None:
        micro_rows(anchor.batch, config.micro_batches, num_ranks, "algorithm.anchor_batch")
