"""Action heads against numbers of the original implementation; see octo_extra.py."""

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from octo_extra import array, assert_close, error, extra, golden_shapes, shapes, variables

from vla_rlaif.policies.octo.bins import bin_centres, thresholds
from vla_rlaif.policies.octo.diffusion import masked_mean, masked_mse
from vla_rlaif.policies.octo.heads import (
    continuous_loss,
    discrete_argmax,
    discrete_label,
    discrete_loss,
    discrete_sample,
    head_module,
)
from vla_rlaif.policies.octo.map_head import MAPHead
from vla_rlaif.policies.octo.spec import ContinuousSpec, DiffusionSpec, DiscreteSpec, HeadSpec, L1Spec, MseSpec

SIZES: dict[str, Any] = {"readout_key": "readout_action", "action_horizon": 4, "action_dim": 5}
CONTINUOUS = {"l1": L1Spec(**SIZES), "mse": MseSpec(**SIZES), "cont_mean": ContinuousSpec(**SIZES, loss_type="l1")}
DISCRETE = {
    "disc_map": DiscreteSpec(**SIZES, use_map=True, token_per="", vocab_size=16, normalization_type="normal"),
    "disc_hor": DiscreteSpec(**SIZES, use_map=True, token_per="action_horizon", vocab_size=16),
}
DIFFUSION = {
    "diff_map": DiffusionSpec(**SIZES, use_map=True, time_dim=16, num_blocks=2, hidden_dim=32, use_layer_norm=False)
}
HEADS: dict[str, HeadSpec] = {**CONTINUOUS, **DISCRETE, **DIFFUSION}


def targets() -> tuple[jax.Array, jax.Array]:
    """Actions [B T H A] and which of them count."""
    mask = extra()["heads/in/timestep_pad_mask"][..., None, None] & extra()["heads/in/action_pad_mask"]
    return array("heads/in/action"), jnp.asarray(mask)


@cache
def predicted(name: str, dtype: Any = jnp.float32) -> jax.Array:
    """Through both methods, as a policy does."""
    head, params = head_module(HEADS[name], dtype), variables(f"heads/{name}")

    @jax.jit
    def run(*args: jax.Array) -> Any:
        embedding: Any = head.apply(params, array("heads/in/tokens"), array("heads/in/mask"), method="embed")
        return head.apply(params, embedding[None] if args else embedding, *args)

    if name not in DIFFUSION:
        return run()
    return run(array(f"heads/{name}/noisy_actions"), array(f"heads/{name}/time")[..., 0])


@pytest.mark.parametrize("name", HEADS)
def test_prediction(name: str) -> None:
    assert_close(predicted(name), f"heads/{name}/out")


@pytest.mark.parametrize("name", HEADS)
def test_parameters_have_upstreams_names_and_shapes(name: str) -> None:
    head = head_module(HEADS[name])
    more = (jnp.zeros((2, 2, 20)), jnp.zeros((2, 2))) if name in DIFFUSION else ()

    def init(key: jax.Array) -> Any:
        return head.init(key, array("heads/in/tokens"), *more, method="init_all")

    assert shapes(init) == golden_shapes(f"heads/{name}")


@pytest.mark.parametrize("name", CONTINUOUS)
def test_continuous_losses(name: str) -> None:
    action, mask = targets()
    out = array(f"heads/{name}/out")
    assert_close(continuous_loss(CONTINUOUS[name], out, action, mask), f"heads/{name}/loss", 1e-5)
    assert_close(continuous_loss(MseSpec(**SIZES), out, action, mask), f"heads/{name}/metric_mse", 1e-5)
    assert_close(predicted(name)[:, -1], f"heads/{name}/predict")


@pytest.mark.parametrize("name", DISCRETE)
def test_discrete_losses(name: str) -> None:
    action, mask = targets()
    spec, logits = DISCRETE[name], array(f"heads/{name}/out")
    assert_close(discrete_loss(spec, logits, action, mask), f"heads/{name}/loss", 1e-5)
    mse = masked_mse(discrete_argmax(spec, logits), action, mask) * spec.action_dim
    assert_close(mse, f"heads/{name}/metric_mse", 1e-5)
    hit = jnp.argmax(logits, axis=-1) == discrete_label(spec, action)
    assert_close(masked_mean(hit, mask), f"heads/{name}/metric_accuracy", 1e-6)


@pytest.mark.parametrize("name", DISCRETE)
def test_discrete_actions(name: str) -> None:
    """With upstream's random numbers: those of jax before it changed its default."""
    logits = array(f"heads/{name}/out")[:, -1]
    assert_close(discrete_argmax(DISCRETE[name], logits), f"heads/{name}/predict_argmax", 1e-6)
    with jax.threefry_partitionable(False):
        drawn = discrete_sample(DISCRETE[name], logits, jax.random.PRNGKey(4), 0.7, (2,))
    assert_close(drawn, f"heads/{name}/predict_sample_key4", 1e-6)


def test_a_sample_is_as_likely_as_its_logit_says() -> None:
    # Two bins with logits 0 and log 3 at temperature 1: probabilities 1/4 and 3/4. At temperature 1/2: 1/10 and 9/10.
    spec = DiscreteSpec(readout_key="readout_action", vocab_size=2)
    logits = jnp.log(jnp.array([1.0, 3.0]))
    for temperature, want in ((1.0, 0.75), (0.5, 0.9)):
        drawn = discrete_sample(spec, logits, jax.random.key(0), temperature, (4000,))
        assert set(np.unique(drawn)) == {np.float32(0.25), np.float32(0.75)}
        assert abs(float((drawn == 0.75).mean()) - want) < 4 * (want * (1 - want) / 4000) ** 0.5


def test_masked_mean_by_hand() -> None:
    # (1 + 3) / 2 over the two that count; a mask without any gives 0, not a division by zero.
    x = jnp.array([1.0, 100.0, 3.0])
    assert float(masked_mean(x, jnp.array([True, False, True]))) == pytest.approx(2.0)
    assert float(masked_mean(x, jnp.zeros(3, bool))) == 0.0


def test_tokens_of_a_discrete_head_without_pooling() -> None:
    """One token a number: each token's projection is that number's logits."""
    spec = DiscreteSpec(readout_key="readout_action", action_horizon=2, action_dim=3, vocab_size=4)
    head, rng = head_module(spec), np.random.default_rng(0)
    kernel = rng.normal(size=(8, 4)).astype(np.float32)
    params = {"params": {"vocab_proj": {"kernel": jnp.asarray(kernel), "bias": jnp.zeros(4)}}}
    tokens = rng.normal(size=(1, 6, 8)).astype(np.float32)
    embedding = head.apply(params, jnp.asarray(tokens), method="embed")
    np.testing.assert_allclose(
        jnp.asarray(head.apply(params, embedding)), (tokens @ kernel).reshape(1, 2, 3, 4), atol=1e-5
    )
    with pytest.raises(ValueError, match="the readout has 1 tokens, wanted 6"):
        head.apply(params, jnp.asarray(tokens[:, :1]), method="embed")


def test_the_mask_of_a_map_head_hides_tokens() -> None:
    params = {"params": variables("heads/l1")["params"]["map_head"]}
    tokens, mask = array("heads/in/tokens"), array("heads/in/mask")
    assert not mask.all() and mask.any(-1).all()
    other = jnp.where(mask[..., None], tokens, 100.0)
    run = jax.jit(MAPHead().apply)
    np.testing.assert_allclose(run(params, other, mask), run(params, tokens, mask), atol=1e-6)
    assert np.abs(run(params, other, jnp.ones_like(mask)) - run(params, other, mask)).max() > 0.1


def test_uniform_bins_of_the_head_span_zero_to_one() -> None:
    np.testing.assert_allclose(bin_centres(thresholds("uniform", 16))[:2], [1 / 32, 3 / 32])


@pytest.mark.parametrize("name", ["l1", "disc_map", "diff_map"])
def test_bfloat16_computes_close_to_float32(name: str) -> None:
    out = predicted(name, jnp.bfloat16)
    assert out.dtype == jnp.float32
    scale = np.abs(extra()[f"heads/{name}/out"]).max()
    assert 1e-4 * scale < error(out, f"heads/{name}/out") < 0.03 * scale
