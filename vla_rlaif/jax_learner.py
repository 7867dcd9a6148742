"""JAX learner: jax.value_and_grad and optax. Same loss, same contract as the torch one."""

from collections.abc import Mapping
from functools import partial
from typing import Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Float, Int

from vla_rlaif.config import LearnerConfig
from vla_rlaif.interfaces import Algorithm
from vla_rlaif.learning import merge_micro_batches, split_minibatches, summarise
from vla_rlaif.types import Array, Batch, Observation, Targets, Weights

Params = dict[str, jax.Array]


@runtime_checkable
class JaxPolicy(Protocol):
    """What this learner needs beyond Policy: parameters and pure functions of them."""

    @property
    def params(self) -> Params: ...

    @property
    def trainable(self) -> frozenset[str]:
        """Names of the parameters that the optimiser may move."""
        ...

    def inputs(
        self, obs: Observation, trace: Mapping[str, np.ndarray], executed: Int[np.ndarray, " B"]
    ) -> Mapping[str, np.ndarray]:
        """Arrays for the two functions below, leaves "B ...": only what re-scoring needs."""
        ...

    def means(self, params: Params, inputs: Mapping[str, Array]) -> Float[Array, "B S D"]:
        """Means of the S Gaussians, for a closed-form KL."""
        ...

    def score(
        self, params: Params, inputs: Mapping[str, Array], reference: Float[Array, "B S D"] | None
    ) -> tuple[Float[Array, "B S"], Float[Array, "B S"] | None]:
        """Log-probabilities and, given the reference's means, the KL to it; nats."""
        ...


class JaxLearner:
    """Owns the trainable parameters, their running average, the reference and the optimiser."""

    def __init__(self, policy: JaxPolicy, algorithm: Algorithm, config: LearnerConfig):
        self.version = 0
        self._policy, self._config = policy, config
        trained = {k: v for k, v in policy.params.items() if k in policy.trainable}
        self._frozen = {k: v for k, v in policy.params.items() if k not in policy.trainable}
        self._trained, self._average, self._reference = trained, trained, trained
        self._optimizer = optax.chain(optax.clip_by_global_norm(config.max_grad_norm), optax.adam(config.lr))
        self._opt_state = self._optimizer.init(trained)
        self._means = jax.jit(lambda trained, frozen, inputs: policy.means({**frozen, **trained}, inputs))
        self._score = jax.jit(lambda trained, frozen, inputs: policy.score({**frozen, **trained}, inputs, None)[0])

        def loss(trained, frozen, inputs, targets, reference):
            logp, kl = jax.lax.optimization_barrier(policy.score({**frozen, **trained}, inputs, reference))
            return algorithm.loss(logp, Targets(**targets), kl)

        @partial(jax.jit, donate_argnums=(1,))
        def step(trained, opt_state, frozen, micro):
            # Gradients of the micro-batches add up: every one divides by the same num_valid.
            grads, metrics = jax.tree.map(jnp.zeros_like, trained), []
            for inputs, targets, reference in micro:
                (value, extra), grad = jax.value_and_grad(loss, has_aux=True)(
                    trained, frozen, inputs, targets, reference
                )
                grads = jax.tree.map(jnp.add, grads, grad)
                metrics.append({"loss": value, **extra})
            updates, opt_state = self._optimizer.update(grads, opt_state, trained)
            return optax.apply_updates(trained, updates), opt_state, metrics, optax.tree.norm(grads)

        self._step = step

    def update(self, batch: Batch, seed: int) -> dict[str, float]:
        """All epochs over one batch. The composition of the minibatches is fixed for the call, only their order changes
        from epoch to epoch, so that at lr 0 every ratio is exactly 1 in every epoch."""
        if not len(batch.mask):
            return {"updates": 0.0}
        rng = np.random.default_rng(seed)
        minibatches = self._minibatches(batch, rng)
        log, braked = [], False
        for _ in range(self._config.epochs):
            for i in rng.permutation(len(minibatches)):
                self._trained, self._opt_state, metrics, norm = self._step(
                    self._trained, self._opt_state, self._frozen, minibatches[i]
                )
                rows = [float(targets["mask"].sum()) for _, targets, _ in minibatches[i]]
                log.append({**merge_micro_batches(metrics, rows), "grad_norm": float(norm)})
                braked = self._config.target_kl is not None and log[-1]["policy_kl"] > self._config.target_kl
                if braked:
                    break
            if braked:
                break
        self.version += 1
        keep = self._config.ema
        self._average = jax.tree.map(lambda a, p: keep * a + (1 - keep) * p, self._average, self._trained)
        return summarise(log, braked=braked)

    def _minibatches(self, batch: Batch, rng: np.random.Generator) -> list[list[tuple]]:
        """Micro-batches of one static shape, with the log-probs of the weights that acted and the reference's means."""
        inputs = self._policy.inputs(batch.obs, batch.trace, batch.executed)
        parts = split_minibatches(rng, len(batch.mask), self._config.minibatch, self._config.micro_batches)
        minibatches = []
        for part in parts:
            micro = []
            for index, valid in part:
                x = {k: jnp.asarray(v[index]) for k, v in inputs.items()}
                targets = {
                    "logp_old": self._score(self._trained, self._frozen, x),
                    "advantage": jnp.asarray(batch.advantage[index]),
                    "mask": jnp.asarray(valid & batch.mask[index]),
                    "num_valid": jnp.float32(batch.num_valid / len(parts)),
                }
                micro.append((x, targets, self._means(self._reference, self._frozen, x)))
            minibatches.append(micro)
        return minibatches

    def weights(self, *, averaged: bool = False) -> Weights:
        trained = self._average if averaged else self._trained
        return {k: np.asarray(v) for k, v in {**self._frozen, **trained}.items()}

    def state(self) -> Weights:
        parts = {"params": self._trained, "average": self._average, "reference": self._reference}
        flat = {f"{part}/{k}": np.array(v) for part, tree in parts.items() for k, v in tree.items()}
        leaves = jax.tree.leaves(self._opt_state)
        optimizer = {f"optimizer/{i}": np.array(v) for i, v in enumerate(leaves)}
        return {**flat, **optimizer, "version": np.array(self.version)}

    def restore(self, state: Weights) -> None:
        part = lambda name: {k: jnp.asarray(state[f"{name}/{k}"]) for k in self._trained}  # noqa: E731
        self._trained, self._average, self._reference = part("params"), part("average"), part("reference")
        leaves, tree = jax.tree.flatten(self._opt_state)
        self._opt_state = jax.tree.unflatten(
            tree, [jnp.asarray(state[f"optimizer/{i}"], leaf.dtype) for i, leaf in enumerate(leaves)]
        )
        self.version = int(state["version"])
