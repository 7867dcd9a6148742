"""What users of the original Octo report again and again (numbers of its issues), as tests.

| pain | issues | tested in |
| --- | --- | --- |
| 1 folders of another machine or number of devices | 119 | test_octo_official, test_octo_golden |
| 2 fine-tuned folders with other heads or tokenizers | 34, 165 | test_octo_official(_writing), test_octo_model |
| 3 a head that is stuck at the bound | 43, 105 | here; test_octo_policy (saturation) |
| 4 patterns that match no parameter | 107 | test_octo_adapt |
| 5 one task for many observations | 111 | here |
| 6 statistics by dataset or flat | 113 | here; test_octo_dataset_statistics, test_octo_action_stats |
| 7 order of wrappers, windows that are too long | 93 | test_octo_wrappers |
| 8 a camera that nobody reads | 11 | here |
| 9 walls of warnings, meaning of masks, one key for all steps | 29, 27, 165 | here |
| 10 is the gripper normalised | 137, 12 | here; test_octo_action_stats |
| 11 proprioception in evaluation as in training | 80, 127 | test_octo_wrappers |
| 12 which parameters start anew | 95, 134, 153, 13 | test_octo_adapt |
| 13 goal images that are not there | 152, 8 | here; test_octo_golden (no_goal_images) |
| 14 folders of older and newer code | 91 | test_octo_official |
| 15 heavy dependencies, slow compilation | 71, 174, 10, 65, 70, 169 | here |
| 16 wrong image size, statistics without dims | 118, 161 | here; test_octo_action_stats |
| 17 actions of another robot | 63, 27 | here |
"""

import dataclasses
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from octo_golden import case, counted_compilations, frames, golden, model, noise, without

from vla_rlaif.policies.octo.adapt import adapted_spec
from vla_rlaif.policies.octo.attention import Span, attention_rule


def actions(observations: Any, tasks: Any, **changes: Any) -> np.ndarray:
    return model().sample_actions(observations, tasks, **{"noise": noise(), **changes})


def test_pain_3_a_trained_head_is_not_at_the_bound_and_a_broken_one_is_reported() -> None:
    octo, observations, tasks = case()
    stored = golden()["sample/x"][0, :, -1], golden()["sample/z"][:, :, -1]
    good = octo.sample_actions(observations, tasks, noise=stored)
    assert (np.abs(good) > 0.98 * 5).mean() < 0.02
    last = "heads_action/diffusion_model/reverse_network/Dense_1/kernel"
    broken = dataclasses.replace(octo, params={**octo.params, last: 100 * octo.params[last]})
    with pytest.warns(UserWarning, match=r"\d+% of the predicted numbers are at the bound of 5: the head is untrained"):
        broken.sample_actions(observations, tasks, noise=stored)


def test_pain_5_one_task_serves_every_observation() -> None:
    _, observations, tasks = case()
    one = frames(tasks, lambda x: x[1:2])
    repeated = frames(tasks, lambda x: np.repeat(x[1:2], 3, axis=0))
    np.testing.assert_array_equal(actions(observations, one), actions(observations, repeated))
    with pytest.raises(
        ValueError, match=r"image_primary has 2, .* rows, the observations 3: give one task, or one for"
    ):
        actions(observations, frames(tasks, lambda x: x[:2]))


def test_pain_6_statistics_by_name_or_of_the_only_dataset() -> None:
    octo = model()
    one = octo.stats("tiny_bridge")
    assert one.keys() == {"action", "proprio"}
    with pytest.raises(ValueError, match="knows 2 datasets; say whose statistics to use: tiny_bridge, tiny_two_arm"):
        octo.stats()
    finetuned = dataclasses.replace(octo, statistics=one)
    assert finetuned.stats() == one
    assert dataclasses.replace(octo, statistics={"only": one}).stats() == one


def test_pain_8_a_camera_that_nobody_reads_is_refused() -> None:
    octo, observations, tasks = case()
    no_wrist = dataclasses.replace(octo, spec=adapted_spec(octo.spec, cameras={"primary": "image_primary"}))
    with pytest.raises(
        ValueError, match="no tokenizer reads image_wrist of the observation; the model reads image_prim"
    ):
        no_wrist.sample_actions(observations, tasks, noise=noise())
    with pytest.raises(ValueError, match="no tokenizer reads proprio of the observation"):
        actions({**observations, "proprio": np.zeros((3, 2, 7), np.float32)}, tasks)
    with pytest.raises(ValueError, match=r"no tokenizer reads language of the task; .*language_instruction"):
        actions(observations, {**tasks, "language": tasks["language_instruction"]})
    with pytest.raises(ValueError, match="pad_mask_dict has image_wirst; known are"):
        actions({**observations, "pad_mask_dict": {"image_wirst": np.ones((3, 2), bool)}}, tasks)


def test_pain_8_a_tokenizer_without_input_is_named() -> None:
    _, observations, tasks = case()
    with pytest.warns(UserWarning) as caught:
        actions(without(observations, "image_wrist"), without(tasks, "language_instruction"))
    assert [str(w.message) for w in caught] == [
        "no input for wrist (image_wrist), language_instruction: left out of the sequence."
    ]
    with pytest.raises(ValueError, match="have none of image_primary, image_wrist, which the model reads"):
        actions(without(observations, "image_wrist", "image_primary"), tasks)


def test_pain_9_what_can_be_derived_may_be_left_out_without_a_word() -> None:
    """Warnings are errors here."""
    _, observations, tasks = case()
    observations = {**observations, "timestep_pad_mask": np.ones((3, 2), bool)}
    observations["pad_mask_dict"] = {key: np.ones((3, 2), bool) for key in ("image_primary", "image_wrist", "timestep")}
    tasks = {**tasks, "pad_mask_dict": {"language_instruction": np.ones(3, bool)}}
    images = {key: observations[key] for key in ("image_primary", "image_wrist")}
    few = actions(images, without(tasks, "pad_mask_dict", "timestep"))
    np.testing.assert_array_equal(few, actions(observations, tasks))


def test_pain_9_every_call_needs_a_key_of_its_own() -> None:
    _, observations, tasks = case()
    with pytest.raises(ValueError, match="another one for every call"):
        model().sample_actions(observations, tasks)
    first, second = (model().sample_actions(observations, tasks, rng=jax.random.key(i)) for i in range(2))
    assert np.abs(first - second).max() > 0.1


def test_pain_10_the_gripper_is_raw_where_the_mask_says_so() -> None:
    _, observations, tasks = case()
    entry = model().stats("tiny_bridge")["action"]
    assert entry["mask"].tolist() == [True] * 6 + [False]
    raw, units = actions(observations, tasks), actions(observations, tasks, statistics=entry)
    np.testing.assert_array_equal(units[..., 6], raw[..., 6])
    np.testing.assert_allclose(units[..., :6], raw[..., :6] * entry["std"][:6] + entry["mean"][:6], atol=1e-6)


def test_pain_13_goal_images_that_are_not_there_are_black() -> None:
    """Silently: warnings are errors here."""
    _, observations, tasks = case()
    goals = ("image_primary", "image_wrist")
    black = {**tasks, **{key: np.zeros_like(tasks[key]) for key in goals}}
    got = actions(observations, without(tasks, *goals))
    np.testing.assert_array_equal(got, actions(observations, black))
    assert np.abs(got - actions(observations, tasks)).max() > 1e-2


def test_pain_15_no_heavy_dependencies() -> None:
    heavy = {"tensorflow", "tensorflow_datasets", "tensorflow_hub", "tf_keras", "dlimp", "torch", "transformers"}
    modules = ("octo_model", "policy", "official", "adapt", "wrappers", "windows", "text")
    imports = "; ".join(f"import vla_rlaif.policies.octo.{name}" for name in modules)
    code = f"import sys; {imports}; print({heavy!r} & sys.modules.keys())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.strip() == "set()"


def num_calls(function: Callable[[], object]) -> int:
    """Of Python and C functions, during one call."""
    found = 0

    def count(_: object, event: str, __: object) -> None:
        nonlocal found
        found += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        function()
    finally:
        sys.setprofile(None)
    return found


def test_pain_15_the_mask_is_not_made_pair_by_pair() -> None:
    def small_and_wide(scale: int) -> Callable[[], object]:
        task = Span("task", "task_language", 16 * scale)
        step = [Span("obs", "obs_primary", 25 * scale), Span("readout", "readout_action", scale)]
        return lambda: attention_rule([task], step, 2)

    attention_rule([], [Span("obs", "a", 1)], 1)  # imports and caches
    few, many = num_calls(small_and_wide(1)), num_calls(small_and_wide(10))
    assert few == many < 1000 < 68 * 68


def test_pain_15_a_forward_pass_draws_no_parameters() -> None:
    """Upstream initialises a throw-away T5 at every trace."""
    octo, observations, tasks = case()
    traced = jax.make_jaxpr(octo.forward.embedding)(octo.params, octo.inputs(observations, tasks))
    assert "dot_general" in str(traced)
    assert "random" not in str(traced) and "threefry" not in str(traced)


@pytest.mark.parametrize(
    ("key", "change", "message"),
    [
        (
            "image_primary",
            lambda x: x[:, :, :1, :1],
            r"image_primary is uint8 \[3, 2, 1, 1, 3\], wanted uint8 \[B, T, 64",
        ),
        ("image_primary", lambda x: x[:, 0], r"is uint8 \[3, 64, 64, 3\], wanted .*: its axes are B, T first"),
        ("image_wrist", lambda x: x / 255, r"image_wrist is float64, wanted uint8 \[B, T, 32, 32, 3\]: convert it"),
        ("image_wrist", lambda x: jnp.asarray(x, jnp.float32), "image_wrist is float32, wanted uint8"),
        ("image_wrist", lambda x: x.astype(int), "image_wrist is int64, wanted uint8"),
        ("image_wrist", lambda x: x[:, :1], r"differ: .*image_primary has \(3, 2\), .*image_wrist has \(3, 1\)"),
        ("image_wrist", lambda x: x[:2], r"image_wrist has \(2, 2\)"),
        ("image_primary", lambda x: x.tolist(), "image_primary is a list, wanted an array uint8"),
        ("timestep_pad_mask", lambda x: x[:, 0], r"timestep_pad_mask has shape \[3\], wanted booleans \[3, 2\]"),
        ("timestep_pad_mask", lambda x: x + 1.5, "has values other than 0 and 1"),
    ],
)
def test_pain_16_shapes_and_types_are_checked_before_anything_is_compiled(
    key: str, change: Callable[[Any], Any], message: str
) -> None:
    _, observations, tasks = case()
    changed = {**observations, key: change(observations[key])}
    with counted_compilations() as names, pytest.raises(ValueError, match=message):
        model().sample_actions(changed, tasks, rng=jax.random.key(0))
    assert not names


def test_pain_16_goals_and_windows_are_checked() -> None:
    _, observations, tasks = case()
    with pytest.raises(ValueError, match=r"task image_primary is uint8 \[3, 1, 1, 3\], wanted uint8 \[B, 64, 64, 3\]"):
        actions(observations, {**tasks, "image_primary": tasks["image_primary"][:, :1, :1]})
    long = frames(observations, lambda x: np.repeat(x[:, :1], 5, axis=1))
    with pytest.raises(ValueError, match="a window of 5 frames; the model has positions for 4"):
        actions(long, tasks)


def test_pain_16_statistics_have_one_number_for_each_dim() -> None:
    _, observations, tasks = case()
    with pytest.raises(ValueError, match="wanted one number for each dim"):
        actions(observations, tasks, statistics={"mean": 0.1, "std": 1.0})
    scalar = dataclasses.replace(model(), statistics={"action": {"mean": np.array(0.0), "std": np.array(1.0)}})
    with pytest.raises(ValueError, match="must have one number per dimension"):
        scalar.stats()


def test_pain_17_actions_of_an_unknown_robot_are_refused() -> None:
    octo, observations, tasks = case()
    with pytest.raises(ValueError, match=r"no dataset 'my_robot'\. It knows tiny_bridge, tiny_two_arm"):
        octo.stats("my_robot")
    with pytest.raises(ValueError, match="Did you mean 'tiny_bridge'"):
        octo.stats("bridge")
    with pytest.raises(ValueError, match="have action, proprio; mean is missing"):  # the entry, not the dataset
        actions(observations, tasks, statistics=octo.stats("tiny_bridge"))
    wide = {name: np.ones(14, np.float32) for name in ("mean", "std")}
    with pytest.raises(ValueError, match="statistics have 14 action dims, the head has 7"):
        actions(observations, tasks, statistics=wide)
    assert "statistics: tiny_bridge (7 action dims), tiny_two_arm (7 action dims)" in octo.describe()
