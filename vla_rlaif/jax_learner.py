"""JAX learner: jax.value_and_grad and optax, data parallel over the local devices. Same loss and contract as torch's.

Axes: see types.py.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding
from jax.typing import DTypeLike
from jaxtyping import Float, Int

from vla_rlaif.config import LearnerConfig
from vla_rlaif.devices import CompileCounter, Placement, lent_to_host, to_host
from vla_rlaif.grpo import importance_weights
from vla_rlaif.interfaces import Algorithm
from vla_rlaif.learning import (
    Anchor,
    Chunks,
    Work,
    divide,
    is_kernel,
    merge_micro_batches,
    summarise,
)
from vla_rlaif.types import Array, Batch, Observation, Targets, Weights

Params = Mapping[str, jax.Array]
Prepared = list[tuple[Any, dict[str, Any], Any]]  # the micro-batches of a minibatch on the devices


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
        """Arrays for the functions below, leaves "B ...": only what re-scoring needs."""
        ...

    def prepare(self, params: Params, inputs: Mapping[str, Array]) -> Mapping[str, Array]:
        """Run what no trained parameter touches, once a batch; the result replaces the inputs of ``means`` and
        ``score``. ``params`` holds the parameters that are not trainable, and no others."""
        ...

    def means(self, params: Params, inputs: Mapping[str, Array]) -> Float[Array, "B S D"]:
        """Means of the S Gaussians, for a closed-form KL."""
        ...

    def score(
        self, params: Params, inputs: Mapping[str, Array], reference: Float[Array, "B S D"] | None
    ) -> tuple[Float[Array, "B S"], Float[Array, "B S"] | None]:
        """Log-probabilities and, given the reference's means, the KL to it; nats."""
        ...


@runtime_checkable
class JaxImitable(Protocol):
    """What imitation and the anchor of a JaxLearner need of a policy."""

    @property
    def params(self) -> Params: ...

    @property
    def imitable(self) -> frozenset[str]:
        """Names of the parameters to fit."""
        ...

    def imitation_inputs(self, obs: Observation) -> Mapping[str, np.ndarray]: ...

    def imitation_loss(
        self, params: Params, inputs: Mapping[str, Array], action: Float[Array, "B H A"], key: jax.Array, samples: int
    ) -> Float[Array, ""]:
        """The mean over the rows."""
        ...


def adamw(
    lr: float | Callable[[Any], Any],
    *,
    max_grad_norm: float,
    weight_decay: float,
    mu_dtype: DTypeLike | None = None,
) -> optax.GradientTransformation:
    """Clipped AdamW, which decays the kernels only, as upstream's Octo. ``lr`` may be a schedule of the update count;
    upstream keeps the first moment in bfloat16 (``mu_dtype``)."""

    def kernels(params: Params) -> dict[str, bool]:
        return {name: is_kernel(name, v.ndim) for name, v in params.items()}

    return optax.chain(
        optax.clip_by_global_norm(max_grad_norm),
        optax.adamw(lr, weight_decay=weight_decay, mask=kernels, mu_dtype=mu_dtype),
    )


def gradient_adder(loss: Callable[..., tuple[jax.Array, Any]], replicated: NamedSharding) -> jax.stages.Wrapped:
    """A compiled function (params, total, *rest) -> (total + gradient of ``loss``(params, *rest), (value, extra)).

    ``total`` is overwritten. Micro-batches are a loop on the host over this function: only one of them has its
    activations in memory. A loop on the device would do the same, but XLA's convolutions inside one are 30 times as
    slow on the CPU.
    """

    @partial(jax.jit, donate_argnums=1, out_shardings=(replicated, replicated))
    def add(params, total, *rest):
        value, gradient = jax.value_and_grad(loss, has_aux=True)(params, *rest)
        return jax.tree.map(jnp.add, total, gradient), value

    return add


def is_product(primitive: Any, *_: Any, **__: Any) -> bool:
    """What the backward pass keeps of the forward pass; it computes the rest, which is cheap, again.

    Keeping more would change how XLA fuses the forward pass, and thereby its last bits. As it is, the loss and the
    program without gradients, which gives the log-probs to compare with, agree exactly: at lr 0 every ratio is 1.
    """
    return primitive in (jax.lax.dot_general_p, jax.lax.conv_general_dilated_p)


class JaxLearner:
    """Owns the trainable parameters, their running average, the reference and the optimiser.

    Parameters and optimiser state are on every device of ``config.devices``, the rows of a micro-batch are split among
    them. An update writes over the buffers of the old parameters: what leaves this class is a copy on the host.
    """

    def __init__(self, policy: JaxPolicy, algorithm: Algorithm, config: LearnerConfig, anchor: Anchor | None = None):
        self.version = 0
        self._policy, self._config, self._anchor = policy, config, anchor
        self._compiled = CompileCounter()
        self._placement = Placement.of(config.devices)
        self._placement.micro_rows(config.minibatch, config.micro_batches, "learner.minibatch")
        self._anchor_inputs: Mapping[str, np.ndarray] = {}
        if anchor is not None:
            self._placement.micro_rows(anchor.batch, config.micro_batches, "algorithm.anchor_batch")
            self._compile_anchor(policy, anchor)
        trained = {k: policy.params[k] for k in sorted(policy.trainable)}
        frozen = {k: v for k, v in policy.params.items() if k not in policy.trainable}
        self._frozen = jax.device_put(frozen, self._placement.replicated)  # never donated, so it may share buffers
        self._trained, self._average, self._reference = (self._placement.copies(trained) for _ in range(3))
        self._compile(algorithm)
        self._opt_state = self._init(self._trained)

    def _compile(self, algorithm: Algorithm) -> None:
        policy, config, replicated = self._policy, self._config, self._placement.replicated
        is_acting = algorithm.baseline == "acting"
        warmup, keep = config.warmup_updates, config.ema
        lr = (lambda done: config.lr * jnp.minimum(1.0, (done + 1) / warmup)) if warmup else config.lr
        optimizer = adamw(lr, max_grad_norm=config.max_grad_norm, weight_decay=config.weight_decay)
        self._init = jax.jit(optimizer.init, out_shardings=replicated)
        self._zeros = jax.jit(lambda trained: jax.tree.map(jnp.zeros_like, trained), out_shardings=replicated)

        @jax.jit
        def prepare(trained, reference, frozen, inputs):
            """The inputs of all epochs, the log-probs of the algorithm's baseline and the reference's means."""
            # Barriers around the same part as in `loss`: see `is_product`.
            x = jax.lax.optimization_barrier(dict(policy.prepare(frozen, inputs)))
            base = trained if is_acting else reference
            logp = jax.lax.optimization_barrier(policy.score({**frozen, **base}, x, None)[0])
            return x, logp, policy.means({**frozen, **reference}, x)

        @jax.jit
        def prepare_only(trained, frozen, inputs):
            """The same where a pool has computed the reference's means."""
            x = jax.lax.optimization_barrier(dict(policy.prepare(frozen, inputs)))
            return x, jax.lax.optimization_barrier(policy.score({**frozen, **trained}, x, None)[0])

        def loss(trained, frozen, inputs, targets, reference):
            score = jax.checkpoint(policy.score, policy=is_product)
            logp, kl = jax.lax.optimization_barrier(score({**frozen, **trained}, inputs, reference))
            return algorithm.loss(logp, Targets(**targets), kl)

        @partial(jax.jit, donate_argnums=(0, 1), out_shardings=replicated)
        def apply(trained, opt_state, grads):
            updates, opt_state = optimizer.update(grads, opt_state, trained)
            return optax.apply_updates(trained, updates), opt_state, optax.tree.norm(grads)

        @partial(jax.jit, donate_argnums=0, out_shardings=replicated)
        def blend(average, trained):
            return jax.tree.map(lambda a, p: keep * a + (1 - keep) * p, average, trained)

        self._weigh = jax.jit(partial(importance_weights, cap=config.importance_cap))
        self._add = gradient_adder(loss, replicated)
        self._prepare, self._prepare_only, self._apply, self._blend = prepare, prepare_only, apply, blend

    def _compile_anchor(self, policy: JaxPolicy, anchor: Anchor) -> None:
        if not isinstance(policy, JaxImitable):
            raise ValueError(
                f"{type(policy).__name__} cannot imitate: it has no imitable, imitation_inputs and imitation_loss. "
                "Set algorithm.anchor_coef to 0."
            )
        self._anchor_inputs = policy.imitation_inputs(anchor.obs)

        def loss(trained, frozen, inputs, action, weight, key, draw):
            here = jax.random.fold_in(key, draw)
            value = policy.imitation_loss({**frozen, **trained}, inputs, action, here, anchor.samples)
            return weight * value, value

        self._pull = gradient_adder(loss, self._placement.replicated)

    @property
    def compilations(self) -> int:
        """XLA compilations of this process since this learner was made."""
        return self._compiled.count

    def update(self, batch: Batch, seed: int) -> dict[str, float]:
        """All epochs over one batch, until the KL brake. An anchor's demonstrations depend on ``seed`` only."""
        if not len(batch.mask):
            return {"updates": 0.0}
        inputs = self._policy.inputs(batch.obs, batch.trace, batch.executed)
        work = divide(inputs, batch, seed, self._config, self._anchor, self._anchor_inputs)
        minibatches, log, braked = self._prepared(work), [], False
        for i in (i for order in work.orders for i in order):
            log.append(self._step(minibatches[i], next(work.anchors, ()), seed, len(log)))
            braked = self._config.target_kl is not None and log[-1]["policy_kl"] > self._config.target_kl
            if braked:
                break
        self.version += 1
        self._average = self._blend(self._average, self._trained)
        return summarise(log, braked=braked)

    def _step(self, micro: Prepared, chunks: Sequence[Chunks], seed: int, update: int) -> dict[str, float]:
        """One optimiser update. Gradients of the micro-batches add up: every one divides by the same num_valid."""
        grads, results, pulls = self._zeros(self._trained), [], []
        for one in micro:
            grads, result = self._add(self._trained, grads, self._frozen, *one)
            results.append(result)
        for m, part in enumerate(chunks):
            x, action = jax.device_put((dict(part.inputs), part.action), self._placement.rows)
            draw = np.int32(update * len(chunks) + m)  # each micro-batch of the call has its own random numbers
            weight, key = np.float32(part.weight), jax.device_put(jax.random.key(seed), self._placement.replicated)
            grads, result = self._pull(self._trained, grads, self._frozen, x, action, weight, key, draw)
            pulls.append(result[1])
        self._trained, self._opt_state, norm = self._apply(self._trained, self._opt_state, grads)
        masks = [targets["mask"] for _, targets, _ in micro]
        results, pulls, norm, masks = jax.device_get((results, pulls, norm, masks))
        metrics = [{"loss": value, **extra} for value, extra in results]
        if pulls:
            metrics = [{**m, "anchor_loss": pull} for m, pull in zip(metrics, pulls, strict=True)]
        return {**merge_micro_batches(metrics, [float(mask.sum()) for mask in masks]), "grad_norm": float(norm)}

    def _prepared(self, work: Work) -> list[Prepared]:
        """Micro-batches of one static shape, (inputs, targets, reference's means) of each on the devices."""
        minibatches = []
        for part in work.minibatches:
            micro = []
            for host in part:
                rows, targets = dict(host.inputs), {"advantage": host.advantage, "mask": host.mask}
                rows, targets = jax.device_put((rows, targets), self._placement.rows)
                if host.reference is None:
                    rows, logp_old, reference = self._prepare(self._trained, self._reference, self._frozen, rows)
                else:
                    rows, logp_old = self._prepare_only(self._trained, self._frozen, rows)
                    reference = jax.device_put(host.reference, self._placement.rows)
                targets |= {"logp_old": logp_old, "num_valid": np.float32(work.num_valid)}
                if work.kl_coef is not None:
                    targets |= {"kl_coef": np.float32(work.kl_coef)}
                if host.logp_acted is not None:
                    acted = jax.device_put(host.logp_acted, self._placement.rows)
                    targets |= {"importance": self._weigh(logp_old, acted)}
                micro.append((rows, targets, reference))
            minibatches.append(micro)
        return minibatches

    def weights(self, *, averaged: bool = False) -> Weights:
        frozen = {k: np.asarray(v) for k, v in self._frozen.items()}
        return {**frozen, **self.trained(averaged=averaged)}

    def trained(self, *, averaged: bool) -> Weights:
        """Copies of what is not frozen."""
        return to_host(self._average if averaged else self._trained)

    def lent(self, *, averaged: bool) -> Weights:
        """As ``trained``, but not copied where that can be avoided: for who reads it before the next update."""
        return lent_to_host(self._average if averaged else self._trained)

    def state(self) -> Weights:
        parts = {"params": self._trained, "average": self._average, "reference": self._reference}
        flat = {f"{part}/{k}": v for part, tree in parts.items() for k, v in tree.items()}
        optimizer = {f"optimizer/{i}": v for i, v in enumerate(jax.tree.leaves(self._opt_state))}
        return {**to_host({**flat, **optimizer}), "version": np.array(self.version)}

    def restore(self, state: Weights) -> None:
        part = lambda name: self._placement.copies({k: state[f"{name}/{k}"] for k in self._trained})  # noqa: E731
        self._trained, self._average, self._reference = part("params"), part("average"), part("reference")
        leaves, tree = jax.tree.flatten(self._opt_state)
        named = {str(i): np.asarray(state[f"optimizer/{i}"], leaf.dtype) for i, leaf in enumerate(leaves)}
        self._opt_state = jax.tree.unflatten(tree, list(self._placement.copies(named).values()))
        self.version = int(state["version"])
