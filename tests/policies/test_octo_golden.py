"""Octo against numbers of the original implementation; see tests/golden/octo/README.md."""

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict, unflatten_dict

from vla_rlaif.config import OctoConfig, SmallStemConfig
from vla_rlaif.policies.octo import diffusion
from vla_rlaif.policies.octo.diffusion import DiffusionHead, Schedule
from vla_rlaif.policies.octo.model import Inputs, OctoTransformer, Trunk
from vla_rlaif.policies.octo.network import OctoNetwork
from vla_rlaif.policies.octo.t5 import T5Encoder
from vla_rlaif.types import EnvSpec

GOLDEN = Path(__file__).parents[1] / "golden" / "octo"
T5 = "octo_transformer/task_tokenizers_language/hf_model/"
TRUNK = OctoTransformer(
    token_dim=64,
    num_layers=2,
    num_heads=4,
    mlp_dim=128,
    stem=SmallStemConfig(features=(32, 32, 64, 64), groups=32, embedding=48),
    repeat_task_tokens=True,
    max_horizon=4,
)
HEAD = DiffusionHead(width=28, hidden=64, num_blocks=3, time_dim=32)
CASES = (
    "full",
    "no_wrist",
    "no_goal_images",
    "no_language",
    "no_pad_mask_dict",
    "window1",
    "window4",
    "old_attention",
    "no_repeat_task_tokens",
)


@cache
def golden() -> Mapping[str, np.ndarray]:
    return dict(np.load(GOLDEN / "tiny_golden.npz"))


@cache
def params() -> Mapping[str, jax.Array]:
    return {name: jnp.asarray(value) for name, value in np.load(GOLDEN / "tiny_params.npz").items()}


def subtree(prefix: str, flat: Mapping[str, jax.Array] | None = None) -> dict[str, Any]:
    flat = params() if flat is None else flat
    below = {name.removeprefix(prefix): value for name, value in flat.items() if name.startswith(prefix)}
    return {"params": unflatten_dict(below, sep="/")}


@cache
def language() -> jax.Array:
    ids, mask = (
        golden()[f"in/task/language_instruction/{name}"].astype(int) for name in ("input_ids", "attention_mask")
    )
    encoder = T5Encoder(vocabulary=64, width=32, head_dim=8, num_heads=4, hidden=64, num_layers=2)
    return jax.jit(encoder.apply)(subtree(T5), ids, mask)


def case_inputs(case: str) -> Inputs:
    g = golden()
    cameras = ("primary",) if case == "no_wrist" else ("primary", "wrist")
    masked, goals = case != "no_pad_mask_dict", case != "no_goal_images"

    def frames(name: str) -> jax.Array:
        x = g[f"in/observation/{name}"]
        x = x[:, -1:] if case == "window1" else x
        return jnp.asarray(np.concatenate([x, x[:, ::-1]], 1) if case == "window4" else x)

    return Inputs(
        images={c: frames(f"image_{c}") for c in cameras},
        language=None if case == "no_language" else language(),
        goals={c: jnp.asarray(g[f"in/task/image_{c}"]) for c in cameras} if goals else {},
        frame_ok=frames("timestep_pad_mask"),
        image_ok={c: frames(f"pad_mask_dict/image_{c}") for c in cameras} if masked else {},
        language_ok=jnp.asarray(g["in/task/pad_mask_dict/language_instruction"]) if masked else None,
    )


def run_case(case: str, readout_only: bool = False) -> Trunk:
    """Not compiled as a whole: the cases share most of their operations, and so their compilation."""
    model = TRUNK.clone(correct_attention=case != "old_attention", repeat_task_tokens=case != "no_repeat_task_tokens")
    inputs = case_inputs(case)
    return model.apply(subtree("octo_transformer/"), inputs, readout_only)  # pyright: ignore[reportReturnType]


def assert_close(got: Any, want: np.ndarray, atol: float) -> None:
    assert got.shape == want.shape
    np.testing.assert_allclose(np.asarray(got), want, rtol=0, atol=atol)


def test_t5_features() -> None:
    assert_close(language(), golden()["inter/full/t5_last_hidden_state"], 2e-5)


@pytest.mark.parametrize("case", CASES)
def test_readout_and_attention_mask(case: str) -> None:
    g, trunk = golden(), run_case(case)
    if case != "no_repeat_task_tokens":
        want = g[f"out/{case}/attention_mask"]
        np.testing.assert_array_equal(np.broadcast_to(trunk.mask, want.shape), want)
    assert_close(trunk.readout, g[f"out/{case}/readout_action/tokens"], 2e-5)


def test_every_token_group() -> None:
    g, trunk = golden(), run_case("full")
    assert set(trunk.outputs) == {"task_language", "obs_primary", "obs_wrist", "obs_task_language", "readout_action"}
    for name, tokens in trunk.outputs.items():
        assert_close(tokens, g[f"out/full/{name}/tokens"], 2e-5)


@pytest.mark.parametrize("case", ["full", "window4"])
def test_computing_the_readout_only_changes_nothing(case: str) -> None:
    assert_close(run_case(case, readout_only=True).readout, golden()[f"out/{case}/readout_action/tokens"], 2e-5)


def test_schedule() -> None:
    schedule = Schedule.cosine(20)
    for name in ("betas", "alphas", "alpha_hats"):
        assert_close(vars(schedule)[name], golden()[f"head/{name}"], 3e-6)


def readout() -> jax.Array:
    return jnp.asarray(golden()["out/full/readout_action/tokens"]).mean(-2)


@pytest.mark.parametrize("name", ["eps", "eps_lead", "eps_alltimes"])
def test_predicted_noise(name: str) -> None:
    g = golden()
    if name == "eps_alltimes":
        x = np.broadcast_to(g["head/eps/noisy_actions"], (20, 3, 2, 28))
        step = np.broadcast_to(np.arange(20)[:, None, None], (20, 3, 2))
    else:
        x, step = g[f"head/{name}/noisy_actions"], g[f"head/{name}/time"][..., 0]
    emb = readout() if name == "eps" else readout()[None]
    assert_close(
        HEAD.apply(subtree("heads_action/"), emb, jnp.asarray(x), jnp.asarray(step)), g[f"head/{name}/out"], 2e-5
    )


def test_loss_and_gradients() -> None:
    g, schedule = golden(), Schedule.cosine(20)
    clean = jnp.clip(jnp.asarray(g["in/action"]).reshape(1, 3, 2, -1), -5.0, 5.0)
    noise, step = jnp.asarray(g["loss/noise"]), jnp.asarray(g["loss/time"][..., 0])
    mask = g["in/observation/timestep_pad_mask"][..., None, None] & g["in/action_pad_mask"]
    inputs = case_inputs("full")

    def loss(flat: Mapping[str, jax.Array]) -> jax.Array:
        emb = TRUNK.apply(subtree("octo_transformer/", flat), inputs).readout.mean(-2)  # pyright: ignore
        x = schedule.corrupt(clean, step, noise)
        predicted: Any = HEAD.apply(subtree("heads_action/", flat), emb[None], x, step)
        return diffusion.masked_mse(predicted, noise, jnp.asarray(mask).reshape(1, 3, 2, -1)) * 7

    value, grads = jax.jit(jax.value_and_grad(loss))(params())
    assert_close(value, g["loss/loss"], 1e-5)
    for name, grad in grads.items():
        norm = float(g[f"loss/grad_norm/{name}"])
        assert abs(float(jnp.linalg.norm(grad)) - norm) <= 1e-4 * max(1.0, norm), name
        if f"loss/grad/{name}" in g:
            assert_close(grad, g[f"loss/grad/{name}"], 1e-4)


def test_whole_trajectory() -> None:
    """On the last window position only, which is exact: the head acts on each position alone."""
    g, schedule = golden(), Schedule.cosine(20)
    emb, variables = readout()[:, -1], subtree("heads_action/")
    final, samples, means = diffusion.denoise(
        lambda x, step: HEAD.apply(variables, emb, x, step),  # pyright: ignore
        schedule,
        jnp.asarray(g["sample/x"][0, :, -1]),
        jnp.asarray(g["sample/z"][:, :, -1]),
        np.arange(19, -1, -1),
        jnp.asarray(schedule.stds(0.0)[::-1].copy()),
        5.0,
    )
    assert_close(jnp.clip(samples, -5.0, 5.0), g["sample/x"][1:, :, -1], 1e-3)
    assert_close(means, g["sample/mean"][:, :, -1], 1e-3)
    assert_close(final.reshape(3, 4, 7), g["sample/actions_normalized"], 1e-3)


def test_small_has_upstreams_parameters() -> None:
    manifest = json.loads((GOLDEN / "octo_small_15_params.json").read_text())["params"]
    want = {name: tuple(leaf["shape"]) for name, leaf in manifest.items()}
    config = OctoConfig(
        token_dim=384,
        num_layers=12,
        num_heads=6,
        mlp_dim=1536,
        stem=SmallStemConfig(),
        language_tokens=16,
        language_dim=768,
        proprio=False,
        max_horizon=10,
        head_dim=256,
        head_blocks=3,
        diffusion_steps=20,
    )
    spec = EnvSpec(
        cameras=("primary", "wrist"),
        image_size=256,
        state_dim=8,
        action_dim=7,
        chunk=4,
        max_decisions=1,
        instructions=("lift",),
    )
    got = {name: leaf.shape for name, leaf in OctoNetwork(config, spec, 2).shapes().items() if "word_table" not in name}
    wrist = "octo_transformer/obs_wrist_pos_embedding"  # upstream's wrist camera has 128 pixels, a spec has one size
    assert got.pop(wrist) == (1, 10, 256, 384) and want.pop(wrist) == (1, 10, 64, 384)
    ids = jnp.zeros((1, 16), jnp.int32)
    t5: dict[str, Any] = flatten_dict(jax.eval_shape(T5Encoder().init, jax.random.key(0), ids, ids)["params"], sep="/")  # pyright: ignore
    assert got | {T5 + name: leaf.shape for name, leaf in t5.items()} == want
