"""Tokenizers: what is stacked, bins, and parameter names; golden numbers of the original where there are some."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from octo_extra import array, assert_close, drawn, extra, golden_shapes, shapes, variables

from vla_rlaif.policies.octo.bins import bin_centres, bin_index, thresholds
from vla_rlaif.policies.octo.spec import ImageSpec, KeypointSpec, LowdimSpec, PatchSpec, Stem32Spec
from vla_rlaif.policies.octo.tokenizers import (
    ImageTokenizer,
    LowdimTokenizer,
    TokenLearner,
    film_condition,
    matching,
    stack_frames,
    stack_lowdim,
)

PATCH = PatchSpec(patch_size=8, num_features=20)
STACKED = ImageSpec(encoder=PATCH, obs_stack_keys=("image_.*",), task_stack_keys=("image_.*",))


def frames(value: int, channels: int = 3, window: int = 2) -> jax.Array:
    return jnp.full((1, window, 8, 8, channels), value, jnp.uint8)


def channels(spec: ImageSpec, observation: dict[str, jax.Array], goals: dict[str, jax.Array]) -> list[int]:
    """The value of every channel of the stack; each image of these tests is of one grey."""
    stack = stack_frames(spec, observation, goals)
    assert stack is not None and stack.dtype == jnp.uint8
    values = np.asarray(stack)
    assert (values == values[:1, :1, :1, :1]).all()
    return values[0, 0, 0, 0].tolist()


def test_matching_starts_at_the_start_and_sorts() -> None:
    keys = ["image_wrist", "wrist_image_", "image_primary", "image_primary_old"]
    assert matching(["image_primary", "image_w"], keys) == ["image_primary", "image_primary_old", "image_wrist"]
    assert matching([], keys) == []


def test_goals_stand_behind_the_sorted_observations() -> None:
    observation = {"image_wrist": frames(2), "image_primary": frames(1), "proprio": jnp.zeros((1, 2, 5))}
    goals = {"image_wrist": frames(4)[:, 0], "image_primary": frames(3)[:, 0], "timestep": jnp.zeros(1)}
    assert channels(STACKED, observation, goals) == [1] * 3 + [2] * 3 + [3] * 3 + [4] * 3


def test_goals_that_are_missing_are_black() -> None:
    observation = {"image_wrist": frames(2), "image_primary": frames(1)}
    assert channels(STACKED, observation, {"image_wrist": frames(4)[:, 0]}) == [1] * 3 + [2] * 3 + [0] * 3 + [4] * 3
    assert channels(STACKED, observation, {}) == [1] * 3 + [2] * 3 + [0] * 6


def test_a_goal_without_an_observation_is_stacked_too() -> None:
    """As upstream: the goals are matched among the task's keys, whatever is observed."""
    assert (
        channels(STACKED, {"image_primary": frames(1)}, {"image_wrist": frames(4)[:, 0]}) == [1] * 3 + [0] * 3 + [4] * 3
    )


def test_without_goal_patterns_goals_are_ignored() -> None:
    spec = ImageSpec(encoder=PATCH)
    observation = {"depth_primary": frames(9, channels=1), "image_primary": frames(1)}
    assert channels(spec, observation, {"image_primary": frames(3)[:, 0]}) == [9] + [1] * 3


def test_a_group_without_images_is_left_out() -> None:
    assert stack_frames(STACKED, {"proprio": jnp.zeros((1, 2, 5))}, {"image_primary": frames(3)[:, 0]}) is None


def test_mistakes_in_patterns_are_named() -> None:
    with pytest.raises(ValueError, match="match no image: the observation has image_primary, the task has none"):
        spec = ImageSpec(encoder=PATCH, task_stack_keys=("goal_.*",))
        stack_frames(spec, {"image_primary": frames(1)}, {})
    with pytest.raises(ValueError, match=r"proprio has shape \(1, 2, 5\), wanted an image \[B T h w C\]"):
        stack_frames(ImageSpec(encoder=PATCH, obs_stack_keys=(".*",)), {"proprio": jnp.zeros((1, 2, 5))}, {})
    with pytest.raises(ValueError, match="'language' in the task, which has image_primary"):
        film_condition(ImageSpec(encoder=PATCH, task_film_keys=("language",)), {"image_primary": frames(1)[:, 0]})
    with pytest.raises(ValueError, match="no obs_keys"):
        stack_lowdim(LowdimSpec(), {})
    with pytest.raises(ValueError, match="wanted numbers"):
        stack_lowdim(LowdimSpec(obs_keys=("image_.*",)), {"image_primary": frames(1)})


def test_film_conditions_are_named_not_matched() -> None:
    task = {"a": jnp.ones((2, 3)), "b": jnp.zeros((2, 1)), "ab": jnp.full((2, 1), 5.0)}
    condition = film_condition(ImageSpec(encoder=PATCH, task_film_keys=("b", "a")), task)
    np.testing.assert_array_equal(jnp.asarray(condition), [[0, 1, 1, 1]] * 2)
    assert film_condition(ImageSpec(encoder=PATCH), task) is None


def test_numbers_are_stacked_pattern_by_pattern() -> None:
    observation = {name: jnp.full((1, 1, 1), value) for name, value in (("b1", 1), ("a", 2.0), ("b0", 0.0))}
    got = stack_lowdim(LowdimSpec(obs_keys=("b.*", "a")), observation)
    assert got is not None and got.dtype == jnp.float32 and got.tolist() == [[[0, 1, 2]]]
    assert stack_lowdim(LowdimSpec(obs_keys=("c",)), observation) is None


def test_tokens_are_the_patches_of_each_frame_row_by_row() -> None:
    tokenizer = ImageTokenizer(STACKED)
    params = {"params": {"PatchEncoder_0": variables("patch_encoder")["params"]}}
    run: Any = jax.jit(tokenizer.apply)
    tokens = run(params, array("patch_encoder/img")[:, None])
    assert tokens.shape == (2, 1, 16, 20)
    assert_close(tokens.reshape(2, 4, 4, 20), "patch_encoder/out")
    swapped = run(params, array("patch_encoder/img")[None, ::-1])
    np.testing.assert_allclose(swapped[0, ::-1].reshape(2, 4, 4, 20), extra()["patch_encoder/out"], atol=2e-5)


def test_one_condition_serves_the_whole_window() -> None:
    stem = Stem32Spec(
        features=(32, 32), kernel_sizes=(3, 3), strides=(2, 2), padding=(1, 1), num_features=24, use_film=True
    )
    tokenizer = ImageTokenizer(ImageSpec(encoder=stem, task_film_keys=("c",)))
    params = {"params": {"SmallStem32_0": variables("stem_film")["params"]}}
    window = jnp.repeat(array("stem_film/img")[:, None], 2, axis=1)
    tokens: Any = jax.jit(tokenizer.apply)(params, window, array("stem_film/cond_var")[:, None])
    for t in range(2):
        assert_close(tokens[:, t].reshape(2, 4, 4, 24), "stem_film/out")


def test_token_learner() -> None:
    out = jax.jit(TokenLearner(3).apply)(variables("token_learner"), array("heads/in/tokens"))
    assert_close(out, "token_learner/out")
    assert shapes(TokenLearner(3).init, array("heads/in/tokens")) == golden_shapes("token_learner")


def test_parameter_names_of_a_tokenizer() -> None:
    image = jnp.zeros((1, 1, 32, 32, 6))
    learner = ImageSpec(encoder=PatchSpec(patch_size=16, num_features=16), use_token_learner=True, num_tokens=2)
    names = shapes(ImageTokenizer(learner).init, image)
    assert names["PatchEncoder_0/embedding/kernel"] == (16, 16, 6, 16)
    assert names["TokenLearner_0/pos_embed"] == (4, 16)
    assert names["TokenLearner_0/MAPHead_0/probe"] == (1, 2, 16)
    assert jax.eval_shape(ImageTokenizer(learner).apply, drawn(ImageTokenizer(learner).init, image), image).shape == (
        1,
        1,
        2,
        16,
    )
    # The key-point stem has no level of its own.
    ours = shapes(ImageTokenizer(ImageSpec(encoder=KeypointSpec(channels=5))).init, image)
    assert ours == {
        "Conv_0/kernel": (6, 6, 6, 5),
        "Conv_0/bias": (5,),
        "Conv_1/kernel": (3, 3, 5, 5),
        "Conv_1/bias": (5,),
    }


LOWDIM: dict[str, LowdimSpec] = {
    "plain": LowdimSpec(obs_keys=("proprio",)),
    "uniform": LowdimSpec(obs_keys=("proprio",), discretize=True, n_bins=32, low=-2.0, high=2.0),
    "normal": LowdimSpec(obs_keys=("proprio",), discretize=True, n_bins=32, bin_type="normal"),
}


@pytest.mark.parametrize("name", LOWDIM)
def test_numbers_as_tokens(name: str) -> None:
    values = stack_lowdim(LOWDIM[name], {"proprio": array("lowdim/proprio")})
    assert values is not None
    tokens = jnp.asarray(LowdimTokenizer(LOWDIM[name]).apply({}, values))
    assert_close(tokens, f"lowdim/{name}/tokens", 0.0)


def test_normal_bins() -> None:
    edges = thresholds("normal", 32)
    assert_close(edges, "lowdim/normal/thresholds", 2e-6)
    assert_close(bin_centres(edges), "lowdim/normal/decode", 2e-6)


def test_bins_by_hand() -> None:
    # Edges 0, .25, .5, .75, 1: the left edge belongs to the bin, and numbers outside are clipped into the range.
    edges = thresholds("uniform", 4)
    x = jnp.array([-3.0, 0.0, 0.2499, 0.25, 0.75, 1.0, 7.0])
    assert bin_index(x, edges, "uniform").tolist() == [0, 0, 0, 1, 3, 3, 3]
    assert bin_centres(edges).tolist() == [0.125, 0.375, 0.625, 0.875]
    # Normal bins do not clip: beyond the outermost edges, at +-4.75, upstream says 0.
    normal = thresholds("normal", 4)
    assert bin_index(jnp.array([-9.0, -0.1, 0.1, 4.7, 9.0]), normal, "normal").tolist() == [0, 1, 2, 3, 0]


@pytest.mark.parametrize("kind", ["uniform", "normal"])
def test_a_number_lies_in_its_bin(kind: Any) -> None:
    edges, x = thresholds(kind, 16, -2.0, 2.0), np.random.default_rng(0).uniform(-2, 2, 1000).astype(np.float32)
    index = np.asarray(bin_index(jnp.asarray(x), edges, kind, -2.0, 2.0))
    low, high = np.asarray(edges)[index], np.asarray(edges)[index + 1]
    assert ((low <= x) & (x < high)).all() and len(set(index)) > 2
