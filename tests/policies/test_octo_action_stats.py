"""Normalisation against upstream's sampled actions; the mask both ways; statistics that cannot be right."""

import json
from functools import cache
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np
import pytest
import torch

from vla_rlaif.policies.octo.action_stats import ActionStatistics

GOLDEN = Path(__file__).parents[1] / "golden" / "octo"
KINDS: tuple[Literal["normal", "bounds"], ...] = ("normal", "bounds")


@cache
def golden() -> dict[str, np.ndarray]:
    return dict(np.load(GOLDEN / "tiny_golden.npz"))


@cache
def params() -> dict[str, np.ndarray]:
    return dict(np.load(GOLDEN / "tiny_params.npz"))


@cache
def official() -> dict[str, Any]:
    return json.loads((GOLDEN / "tiny_ckpt" / "dataset_statistics.json").read_text())


def tiny(kind: Literal["normal", "bounds"] = "normal", **changes: Any) -> ActionStatistics:
    values = {name: golden()[f"stats/tiny_bridge/{name}"] for name in ("mean", "std", "mask", "p01", "p99")}
    return ActionStatistics.from_official(values | changes, kind=kind)


@pytest.mark.parametrize("kind", KINDS)
def test_actions_are_upstreams(kind: Literal["normal", "bounds"]) -> None:
    got = tiny(kind).unnormalise(golden()["sample/actions_normalized"])
    assert got.dtype == np.float32
    np.testing.assert_allclose(got, golden()[f"sample/actions_unnorm_{kind}"], rtol=0, atol=1e-5)


def predicted_noise(x: np.ndarray, emb: np.ndarray, step: int) -> np.ndarray:
    """The diffusion head in plain NumPy."""
    stored = params()

    def dense(name: str, y: np.ndarray) -> np.ndarray:
        name = f"heads_action/diffusion_model/{name}"
        return y @ stored[f"{name}/kernel"] + stored[f"{name}/bias"]

    def swish(y: np.ndarray) -> np.ndarray:
        return y / (1 + np.exp(-y))

    angle = 2 * np.pi * step * stored["heads_action/diffusion_model/time_preprocess/kernel"][:, 0]
    time = dense("cond_encoder/Dense_1", swish(dense("cond_encoder/Dense_0", np.r_[np.cos(angle), np.sin(angle)])))
    y = np.concatenate([np.broadcast_to(time, (len(x), len(time))), emb, x], -1)
    y = dense("reverse_network/Dense_0", y)
    for i in range(3):
        block = f"reverse_network/MLPResNetBlock_{i}"
        norm = f"heads_action/diffusion_model/{block}/LayerNorm_0"
        z = (y - y.mean(-1, keepdims=True)) / np.sqrt(y.var(-1, keepdims=True) + 1e-6)
        z = z * stored[f"{norm}/scale"] + stored[f"{norm}/bias"]
        y = y + dense(f"{block}/Dense_1", swish(dense(f"{block}/Dense_0", z)))
    return dense("reverse_network/Dense_1", swish(y))


def test_a_robot_with_fewer_dims_than_the_head() -> None:
    """5 of 7: while denoising, upstream overwrites the other dims with noise, which the head's network sees."""
    g, is_real = golden(), np.tile(np.arange(7) < 5, 4)
    emb, x = g["out/full/readout_action/tokens"].mean(-2)[:, -1], g["sample/x"][0, :, -1]
    for step, z in zip(range(19, -1, -1), g["sample/z"][:, :, -1], strict=True):
        alpha, hat, beta = (g[f"head/{name}"][step] for name in ("alphas", "alpha_hats", "betas"))
        mean = (x - (1 - alpha) / np.sqrt(1 - hat) * predicted_noise(x, emb, step)) / np.sqrt(alpha)
        x = np.where(is_real, np.clip(mean + (step > 0) * np.sqrt(beta) * z, -5, 5), np.sqrt(1 - hat) * z)
    five = ActionStatistics.from_official(
        {name: g[f"stats/tiny_bridge/{name}"][:5] for name in ("mean", "std", "mask", "p01", "p99")}
    )
    got = five.unnormalise(x.reshape(3, 4, 7))
    np.testing.assert_allclose(got, g["sample/actions_unnorm_5dim"], rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_pain_10_the_gripper_is_raw_both_ways(kind: Literal["normal", "bounds"]) -> None:
    """octo-models/octo issues 137 and 12: dim 6 is not in the mask."""
    statistics = tiny(kind)
    low, high = golden()["stats/tiny_bridge/p01"], golden()["stats/tiny_bridge/p99"]
    actions = np.random.default_rng(0).uniform(low, high, (50, 7)).astype(np.float32)
    actions[:, 6] = np.arange(50) % 2
    inside = statistics.normalise(actions)
    np.testing.assert_array_equal(inside[:, 6], actions[:, 6])
    assert np.abs(inside[:, :6] - actions[:, :6]).max() > 0.5
    back = statistics.unnormalise(inside)
    np.testing.assert_array_equal(back[:, 6], actions[:, 6])
    np.testing.assert_allclose(back, actions, rtol=0, atol=1e-6)


def test_without_a_mask_the_gripper_is_normalised_too() -> None:
    values = {"mean": [1.0, 2.0], "std": [2.0, 4.0]}
    got = ActionStatistics.from_official(values).normalise(np.array([3.0, 0.0], np.float32))
    np.testing.assert_allclose(got, [1.0, -0.5], rtol=1e-6)


def test_numbers_by_hand() -> None:
    """Bounds: -1 + 2 * (x - p01) / (p99 - p01), clipped on the way in only."""
    values = {"mean": [0.0] * 3, "std": [1.0] * 3, "p01": [0.0] * 3, "p99": [4.0] * 3, "mask": [True, True, False]}
    statistics = ActionStatistics.from_official(values, kind="bounds")
    inside, outside = np.array([-0.5, 2.0, 9.0], np.float32), np.array([1.0, 9.0, 9.0], np.float32)
    np.testing.assert_allclose(statistics.unnormalise(inside), [1.0, 6.0, 9.0], rtol=1e-6)
    np.testing.assert_allclose(statistics.normalise(outside), [-0.5, 1.0, 9.0], rtol=1e-6)


def test_epsilon_is_added_on_the_way_in_only() -> None:
    """std 1e-8: 3e-8 becomes 3e-8 / 2e-8 = 1.5; 1.5 becomes 1.5e-8."""
    statistics = ActionStatistics.from_official({"mean": [0.0], "std": [1e-8]})
    np.testing.assert_allclose(statistics.normalise(np.array([3e-8], np.float32)), [1.5], rtol=1e-5)
    np.testing.assert_allclose(statistics.unnormalise(np.array([1.5], np.float32)), [1.5e-8], rtol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_jax_and_torch_arrays(kind: Literal["normal", "bounds"]) -> None:
    """The same numbers; gradients and compilation work, as a training loss needs them."""
    x, statistics = golden()["in/action"], tiny(kind)
    for method in (statistics.normalise, statistics.unnormalise):
        want = method(x)
        np.testing.assert_allclose(jax.jit(method)(x), want, rtol=0, atol=1e-4)
        np.testing.assert_allclose(method(torch.from_numpy(x)).numpy(), want, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("changes", "kind", "match"),
    [
        ({"mean": 0.1, "std": 0.2}, "normal", "one number for each dim"),
        ({"std": [0.1] * 6}, "normal", r"'std': \(6,\)"),
        ({"mask": [True] * 3}, "normal", r"'mask': \(3,\)"),
        ({"std": [1.0, 0.0, 1.0, 1.0, -1.0, 1.0, 0.0]}, "normal", r"std is not positive in dims \[1, 4\]"),
        ({"std": [1.0, np.nan] + [1.0] * 5}, "normal", r"dims \[1\]"),
        ({"p01": [0.0] * 7, "p99": [0.0] + [1.0] * 5 + [0.0]}, "bounds", r"p99 - p01 is not positive in dims \[0\]"),
    ],
)
def test_wrong_statistics_are_refused(changes: dict[str, Any], kind: Any, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        tiny(kind, **changes)


def test_incomplete_statistics_are_refused() -> None:
    with pytest.raises(ValueError, match="have mean; std is missing"):
        ActionStatistics.from_official({"mean": [0.0]})
    with pytest.raises(ValueError, match="no p01 and p99"):
        ActionStatistics.from_official({"mean": [0.0], "std": [1.0]}, kind="bounds")


def test_arrays_of_another_size_are_refused() -> None:
    with pytest.raises(ValueError, match="got 8 dims, the statistics have 7"):
        tiny().normalise(np.zeros((2, 8), np.float32))
    with pytest.raises(ValueError, match="head has 6 dims, the statistics have 7"):
        tiny().unnormalise(np.zeros((2, 6), np.float32))
