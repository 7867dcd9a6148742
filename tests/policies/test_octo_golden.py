"""Octo against every stored number of the original implementation; see tests/golden/octo/README.md."""

import json
from collections.abc import Mapping
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from octo_golden import CHECKPOINT, GOLDEN, assert_close, batch, below, case, flat, golden, model, reporting, without

from vla_rlaif.policies.octo import diffusion
from vla_rlaif.policies.octo.action_stats import ActionStatistics
from vla_rlaif.policies.octo.forward import BODY, TRUNK, Draws, OctoForward, Params, TokenGroup, subtree
from vla_rlaif.policies.octo.model import Inputs, OctoTokens, attention_mask
from vla_rlaif.policies.octo.octo_model import OctoModel
from vla_rlaif.policies.octo.spec import ModelSpec
from vla_rlaif.policies.octo.t5 import T5Encoder

CASES = sorted({name.split("/")[1] for name in golden() if name.startswith("out/")})
T5 = "octo_transformer/task_tokenizers_language/hf_model/"
TOKENS, NOISE, LOSS, GRADIENT, ACTION, ROUNDING = 2e-5, 2e-5, 1e-5, 1e-4, 1e-3, 1e-6


# Tokens


@cache
def readouts(name: str) -> dict[str, TokenGroup]:
    octo, observations, tasks = case(name)
    with reporting(name):
        return octo.readouts(observations, tasks)


def test_all_cases_are_here() -> None:
    assert len(CASES) == 9


@pytest.mark.parametrize("name", CASES)
def test_tokens_and_masks(name: str) -> None:
    groups = sorted(
        {key.split("/")[2] for key in golden() if key.startswith(f"out/{name}/") and key.endswith("tokens")}
    )
    got = readouts(name)
    assert groups == (sorted(got) if name == "full" else ["readout_action"])
    for group in groups:
        want = golden()[f"out/{name}/{group}/tokens"]
        assert_close(got[group].tokens, want, TOKENS, f"out/{name}/{group}")
        np.testing.assert_array_equal(got[group].mask, golden()[f"out/{name}/{group}/mask"])


@partial(jax.jit, static_argnums=0)
def mask_of(forward: OctoForward, params: Params, inputs: Inputs) -> jax.Array:
    tokens = forward.encode(params, inputs)
    return attention_mask(forward.spec, tokens.layout, tokens.key_ok)


@pytest.mark.parametrize("name", [name for name in CASES if f"out/{name}/attention_mask" in golden()])
def test_attention_masks(name: str) -> None:
    octo, observations, tasks = case(name)
    with reporting(name):
        inputs = octo.inputs(observations, tasks)
    np.testing.assert_array_equal(mask_of(octo.forward, octo.params, inputs), golden()[f"out/{name}/attention_mask"])


@partial(jax.jit, static_argnums=0)
def inner_values(forward: OctoForward, params: Params, inputs: Inputs) -> dict[str, Any]:
    """What every module inside the trunk gives, by name."""

    def inside(module: Any, _: str) -> bool:
        return not isinstance(module, OctoTokens)

    tokens, found = forward.tokens.apply(  # pyright: ignore[reportGeneralTypeIssues]
        {"params": subtree(params, TRUNK)}, inputs, capture_intermediates=inside, mutable=["intermediates"]
    )
    mask = attention_mask(forward.spec, tokens.layout, tokens.key_ok)  # pyright: ignore[reportAttributeAccessIssue]
    _, body = forward.body.apply(  # pyright: ignore[reportGeneralTypeIssues]
        {"params": subtree(params, BODY)},
        tokens.x,  # pyright: ignore[reportAttributeAccessIssue]
        mask,
        capture_intermediates=True,
        mutable=["intermediates"],
    )
    below_trunk = {TRUNK + name: value for name, value in flat(found["intermediates"]).items()}
    below_body = {BODY + name: value for name, value in flat(body["intermediates"]).items()}
    return {name.removesuffix("/__call__"): value[0] for name, value in (below_trunk | below_body).items()}


def test_values_inside() -> None:
    octo, observations, tasks = case()
    got = inner_values(octo.forward, octo.params, octo.inputs(observations, tasks))
    stored = {name.removeprefix("inter/full/"): v for name, v in golden().items() if name.startswith("inter/full/")}
    language = stored.pop("t5_last_hidden_state")
    ids = tasks["language_instruction"]
    features = octo.instructions.features(ids["input_ids"], ids["attention_mask"])
    assert_close(features, language, TOKENS, "inter/full/t5_last_hidden_state")
    assert len(stored) == 3 + 2 * 9 + 3  # projections, stems, blocks
    for name, want in stored.items():
        value = got[name.removesuffix("/first_frame")]
        value = value.reshape(want.shape) if "projection" in name else value[: len(want)]
        scale = max(1.0, float(np.abs(want).max()))  # a convolution before its normalisation reaches 10
        assert_close(value, want, TOKENS * scale, f"inter/full/{name}")


# Head


def embedding() -> jax.Array:
    """Of the golden readout, at every position, as [B T D]."""
    return jnp.asarray(golden()["out/full/readout_action/tokens"]).mean(-2)


predict_noise = jax.jit(OctoForward.predict, static_argnums=0)


def predicted(emb: jax.Array, x: np.ndarray | jax.Array, step: np.ndarray | jax.Array) -> jax.Array:
    return predict_noise(model().forward, model().params, emb, jnp.asarray(x), jnp.asarray(step))


def test_schedule() -> None:
    schedule = model().forward.schedule
    for name in ("betas", "alphas", "alpha_hats"):
        assert_close(vars(schedule)[name], golden()[f"head/{name}"], 3e-6, f"head/{name}")


@pytest.mark.parametrize("name", ["eps", "eps_lead", "eps_alltimes"])
def test_predicted_noise(name: str) -> None:
    g = golden()
    if name == "eps_alltimes":
        x = np.broadcast_to(g["head/eps/noisy_actions"], (20, 3, 2, 28))
        step = np.broadcast_to(np.arange(20)[:, None, None], (20, 3, 2))
    else:
        x, step = g[f"head/{name}/noisy_actions"], g[f"head/{name}/time"][..., 0]
    assert_close(predicted(embedding(), x, step), g[f"head/{name}/out"], NOISE, f"head/{name}")


# Sampling


def test_whole_trajectory_at_all_positions() -> None:
    g, forward = golden(), model().forward
    emb, shape = embedding(), (3, 2, 28)

    def predict(x: jax.Array, step: jax.Array) -> jax.Array:
        return forward.predict(model().params, emb, x.reshape(shape), step.reshape(shape[:-1])).reshape(-1, 28)

    steps = np.arange(19, -1, -1)
    x, z = jnp.asarray(g["sample/x"][0].reshape(-1, 28)), jnp.asarray(g["sample/z"].reshape(20, -1, 28))
    stds, live = jnp.asarray(forward.schedule.stds(0.0)[steps]), np.ones(28, bool)
    _, samples, means = diffusion.denoise(predict, forward.schedule, x, z, steps, stds, 5.0, live)
    states = diffusion.next_state(samples, live, 5.0).reshape(20, *shape)
    assert_close(states, g["sample/x"][1:], ACTION, "sample/x")
    assert_close(means.reshape(20, *shape), g["sample/mean"], ACTION, "sample/mean")
    before = np.concatenate([g["sample/x"][:1], states[:-1]])
    eps = predicted(emb, before, np.broadcast_to(steps[:, None, None], (20, 3, 2)))
    assert_close(eps, g["sample/eps"], ACTION, "sample/eps")


@cache
def noise(shape: tuple[int, ...] = (), window: int = 2) -> tuple[jax.Array, jax.Array]:
    """What upstream drew for its key. ``sample_actions`` draws the same way (test_octo_model.py)."""
    with jax.threefry_partitionable(False):
        return model().forward.noise(jnp.asarray(golden()["sample/key"]), shape, 3, window)


def test_noise_of_a_key_is_upstreams() -> None:
    g, (x, z) = golden(), noise()
    assert_close(x, g["sample/x"][0, :, -1], ROUNDING, "sample/x of the key")
    assert_close(z, g["sample/z"][:, :, -1], ROUNDING, "sample/z of the key")
    assert_close(noise((2,))[1], g["sample/z_shape2"][..., -1, :], ROUNDING, "sample/z_shape2 of the key")
    other, _ = model().forward.noise(jnp.asarray(g["sample/key"]), (), 3, 2)  # as current jax draws by default
    assert np.abs(other - x).max() > 0.1


def statistics(kind: str) -> ActionStatistics | dict[str, Any] | None:
    entry = model().stats("tiny_bridge")["action"]
    for name, value in below("stats/tiny_bridge/").items():
        np.testing.assert_array_equal(entry[name], value.astype(entry[name].dtype))
    if kind == "bounds":
        return ActionStatistics.from_official(entry, kind="bounds")
    if kind == "5dim":
        return {name: value[:5] for name, value in entry.items()}
    return entry if kind == "normal" else None


@pytest.mark.parametrize("kind", ["normalized", "unnorm_normal", "unnorm_bounds", "unnorm_5dim", "shape2"])
def test_actions(kind: str) -> None:
    octo, observations, tasks = case()
    shape, stats = (2,) if kind == "shape2" else (), statistics(kind.removeprefix("unnorm_"))
    got = octo.sample_actions(observations, tasks, statistics=stats, sample_shape=shape, noise=noise(shape))
    assert_close(got, golden()[f"sample/actions_{kind}"], ACTION, f"sample/actions_{kind}")


@pytest.mark.parametrize("name", ["no_wrist", "window1"])
def test_actions_of_other_inputs(name: str) -> None:
    octo, observations, tasks = case(name)
    with reporting(name):
        got = octo.sample_actions(observations, tasks, noise=noise(window=1 if name == "window1" else 2))
    assert_close(got, golden()[f"sample/actions_{name}"], ACTION, f"sample/actions_{name}")


def test_actions_from_stored_noise() -> None:
    octo, observations, tasks = case()
    stored = golden()["sample/x"][0, :, -1], golden()["sample/z"][:, :, -1]
    got = octo.sample_actions(observations, tasks, noise=stored)
    assert_close(got, golden()["sample/actions_normalized"], ACTION, "sample/actions_normalized (stored)")


# Training


@cache
def gradients() -> tuple[dict[str, jax.Array], dict[str, jax.Array]]:
    draws = Draws(jnp.asarray(golden()["loss/time"][..., 0]), jnp.asarray(golden()["loss/noise"]))
    return model().gradients(batch(), draws=draws)


def test_random_numbers_of_the_loss_are_upstreams() -> None:
    with jax.threefry_partitionable(False):
        draws = model().forward.draws(jnp.asarray(golden()["loss/key"]), 3, 2)
    np.testing.assert_array_equal(draws.time, golden()["loss/time"][..., 0])
    assert_close(draws.noise, golden()["loss/noise"], ROUNDING, "loss/noise of the key")


def test_loss_and_gradients() -> None:
    g, (grads, metrics) = golden(), gradients()
    for name in ("loss", "mse"):
        assert_close(metrics[name], g[f"loss/{name}"], LOSS, f"loss/{name}")
    norms = {
        name.removeprefix("loss/grad_norm/"): float(v) for name, v in g.items() if name.startswith("loss/grad_norm")
    }
    assert {name for name, norm in norms.items() if name not in grads and norm == 0} == norms.keys() - grads.keys()
    assert norms.keys() - grads.keys() == model().instructions.params.keys()
    worst = max(abs(float(jnp.linalg.norm(v)) - norms[k]) / max(1.0, norms[k]) for k, v in grads.items())
    assert_close(np.float32(worst), np.zeros(()), GRADIENT, "loss/grad_norm (relative)")
    stored = [name for name in g if name.startswith("loss/grad/")]
    assert len(stored) == 6
    for name in stored:
        assert_close(grads[name.removeprefix("loss/grad/")], g[name], GRADIENT, name)


def is_without_effect(name: str) -> bool:
    """Parameters whose true gradient is 0, so that AdamW divides rounding errors by each other: a bias of all keys
    shifts the logits of a softmax alike; one before a normalisation of groups of one channel is subtracted again."""
    return name.endswith("key/bias") or name.endswith(("StdConv_0/bias", "StdConv_1/bias"))  # 32 channels, 32 groups


def test_an_optimiser_step() -> None:
    """Upstream's: clip to norm 1, AdamW with decay on kernels and first moments in bfloat16; T5 stays.

    Everything but the norm is number by number, so all kernels are one array here, and all other parameters one.
    """
    octo, (grads, _) = model(), gradients()
    optimiser = optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.adamw(3e-4, weight_decay=0.1, mu_dtype=jnp.bfloat16, mask={"kernels": True, "others": False}),
    )
    kernels = [name for name in octo.params if "kernel" in name]
    groups = {"kernels": kernels, "others": [name for name in octo.params if name not in kernels]}

    def joined(values: Mapping[str, jax.Array]) -> dict[str, np.ndarray]:
        return {key: np.concatenate([np.ravel(values[name]) for name in names]) for key, names in groups.items()}

    params = joined(octo.params)
    updates, _ = jax.jit(optimiser.update)(joined(grads), optimiser.init(params), params)
    got = {}
    for key, names in groups.items():
        ends = np.cumsum([octo.params[name].size for name in names])
        got |= dict(zip(names, np.split(np.asarray(updates[key]), ends[:-1]), strict=True))
    want = {
        name.removeprefix("optim/update_norm/"): float(v) for name, v in golden().items() if name.startswith("optim/")
    }
    assert len(want) == 126
    assert all(want[name] == 0 for name in octo.instructions.params)
    checked = [name for name in got if not is_without_effect(name)]
    assert len(got) - len(checked) == 2 + 4
    worst = max(abs(float(np.linalg.norm(got[name])) / want[name] - 1) for name in checked)
    assert_close(np.float32(worst), np.zeros(()), GRADIENT, "optim/update_norm (relative)")


# Tasks


@pytest.mark.parametrize("kind", ["texts", "goals"])
def test_created_tasks(kind: str) -> None:
    texts = json.loads((GOLDEN / "create_tasks.json").read_text())["texts"]
    goals = {"image_primary": golden()["in/task/image_primary"]}
    got = model().create_tasks(texts=texts) if kind == "texts" else model().create_tasks(goals=goals)
    made, want = flat(got), flat(below(f"create_tasks/{kind}/"))
    assert made.keys() == want.keys()
    for name, value in want.items():
        assert made[name].dtype.kind == value.dtype.kind, name
        np.testing.assert_array_equal(made[name], value)


# Parameters and folders


@pytest.mark.parametrize("size", ["small", "base"])
def test_parameters_of_the_official_models(size: str) -> None:
    manifest = json.loads((GOLDEN / f"octo_{size}_15_params.json").read_text())
    observation = {
        "image_primary": jax.ShapeDtypeStruct((1, 2, 256, 256, 3), np.uint8),
        "image_wrist": jax.ShapeDtypeStruct((1, 2, 128, 128, 3), np.uint8),
    }
    task = {"language_instruction": jax.ShapeDtypeStruct((1, 16, 768), np.float32)}
    forward = OctoForward(ModelSpec.from_official(manifest["model_config"]))
    shapes = forward.shapes(Inputs(observation, task))  # pyright: ignore[reportArgumentType]
    ids = jax.ShapeDtypeStruct((1, 16), np.int32)
    encoder = flat(jax.eval_shape(T5Encoder().init, jax.random.key(0), ids, ids)["params"])
    got = shapes | {f"{T5}{name}": leaf for name, leaf in encoder.items()}
    assert {name: ([*leaf.shape], str(leaf.dtype)) for name, leaf in got.items()} == {
        name: (leaf["shape"], leaf["dtype"]) for name, leaf in manifest["params"].items()
    }
    counts = {
        "": "total",
        T5: "t5",
        "heads_action": "head",
        BODY: "transformer",
        f"{TRUNK}observation_tokenizers_primary": "stem_primary",
        f"{TRUNK}observation_tokenizers_wrist": "stem_wrist",
    }
    for prefix, name in counts.items():
        total = sum(leaf.size for key, leaf in got.items() if key.startswith(prefix))
        assert total == manifest["counts"][name], name
    assert len(got) == manifest["counts"]["leaves"]


def test_folders_of_one_and_of_two_devices_act_alike() -> None:
    stored = np.load(GOLDEN / "tiny_params.npz")
    sharded = OctoModel.load(GOLDEN / "tiny_ckpt_ocdbt", tokenizer=CHECKPOINT / "t5-tiny")
    for octo in (model(), sharded):
        own = {**octo.params, **octo.instructions.params}
        assert own.keys() == set(stored.files)
        for name, value in own.items():
            np.testing.assert_array_equal(value, stored[name])
    _, observations, tasks = case()
    made = sharded.create_tasks(texts=["pick up the red cube"])
    want = model().sample_actions(observations, made, noise=noise())
    np.testing.assert_array_equal(sharded.sample_actions(observations, made, noise=noise()), want)
    got = sharded.sample_actions(observations, tasks, noise=noise())
    assert_close(got, golden()["sample/actions_normalized"], ACTION, "sample/actions_normalized (ocdbt)")


def test_every_stored_number_is_compared_here() -> None:
    """Names that no test above reads."""
    read = ("in/", "out/", "inter/", "loss/", "optim/", "stats/", "create_tasks/", "sample/actions_")
    read += ("head/eps", "head/betas", "head/alpha", "sample/key", "sample/x", "sample/z", "sample/mean", "sample/eps")
    assert without(golden(), *[name for name in golden() if name.startswith(read)]) == {}
