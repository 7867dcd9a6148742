"""The host draws what flax's initialisers would: compared by the spread of every parameter of every part."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from octo_extra import flattened

from vla_rlaif.policies.octo.heads import head_module
from vla_rlaif.policies.octo.initial import initial_params
from vla_rlaif.policies.octo.spec import DiscreteSpec, ImageSpec, KeypointSpec, StemSpec
from vla_rlaif.policies.octo.tokenizers import ImageTokenizer

STEM = StemSpec(
    features=(32,), kernel_sizes=(3,), strides=(2,), padding=(1,), num_features=32, patch_size=32, use_film=True
)


def every_part(key: jax.Array) -> Any:
    """Flax's own parameters; those of the official parts are compared in test_octo_policy.py."""
    frames, tokens, film = jnp.zeros((1, 1, 8, 8, 3)), jnp.zeros((1, 4, 64)), jnp.zeros((1, 1, 8))
    learner = ImageSpec(encoder=STEM, use_token_learner=True, num_tokens=40)
    discrete = DiscreteSpec(readout_key="readout_action", use_map=True, token_per="", vocab_size=32)
    return {
        "image": ImageTokenizer(learner).init(key, frames, film)["params"],
        "keypoints": ImageTokenizer(ImageSpec(encoder=KeypointSpec())).init(key, frames)["params"],
        "discrete": head_module(discrete).init(key, tokens, method="init_all")["params"],
    }


def test_initial_params_have_flaxs_distributions() -> None:
    theirs = jax.jit(every_part, compiler_options={"xla_backend_optimization_level": 0})(jax.random.key(0))
    flat = flattened(theirs)
    ours = initial_params({name: jax.ShapeDtypeStruct(v.shape, v.dtype) for name, v in flat.items()}, 0)
    kinds = ("FilmConditioning_0/Dense_1/kernel", "MAPHead_0/probe", "pos_embed", "StdConv_0/kernel", "Conv_1/kernel")
    for kind in (*kinds, "map_head/probe", "vocab_proj/kernel"):
        assert any(name.endswith(kind) for name in ours), kind
    for name, value in flat.items():
        assert ours[name].shape == value.shape and ours[name].dtype == np.float32
        tolerance = 1.5 * 5 / math.sqrt(2 * value.size)  # five standard errors of a std, and half as much again
        want = np.asarray(value)
        np.testing.assert_allclose(ours[name].std(), want.std(), rtol=tolerance, atol=1e-8, err_msg=name)
        np.testing.assert_allclose(ours[name].mean(), want.mean(), atol=10 * want.std() / math.sqrt(value.size) + 1e-8)


def test_a_value_depends_on_the_seed_and_its_name_only() -> None:
    shapes = {name: jax.ShapeDtypeStruct((3, 4), jnp.float32) for name in ("a/kernel", "b/kernel")}
    both, again = initial_params(shapes, 1), initial_params({"b/kernel": shapes["b/kernel"]}, 1)
    np.testing.assert_array_equal(both["b/kernel"], again["b/kernel"])
    assert (both["a/kernel"] != both["b/kernel"]).all()
    assert (initial_params(shapes, 2)["b/kernel"] != both["b/kernel"]).all()
