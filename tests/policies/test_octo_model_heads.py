"""Acting and training with every head of OctoModel. Numbers of the original are compared in test_octo_golden.py."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from octo_extra import array, extra
from octo_golden import CHECKPOINT, batch, case, counted_compilations, golden, model, noise, with_head, without

from vla_rlaif.policies.octo.forward import Draws, OctoForward
from vla_rlaif.policies.octo.heads import head_module
from vla_rlaif.policies.octo.octo_model import OctoModel
from vla_rlaif.policies.octo.spec import ContinuousSpec, DiscreteSpec, HeadSpec, L1Spec, MseSpec

READS: dict[str, Any] = {"readout_key": "readout_action", "action_horizon": 4}


def test_equal_models_share_what_was_compiled() -> None:
    _, observations, tasks = case()
    first = OctoModel.load(CHECKPOINT)  # model() may be of another module, from before the caches were cleared
    first.sample_actions(observations, tasks, noise=noise())
    first.readouts(observations, tasks)
    with counted_compilations() as names:
        other = OctoModel.load(CHECKPOINT)
        half = dataclasses.replace(other, params={name: value for name, value in other.params.items()})
        half.sample_actions(observations, without(tasks, "image_primary"), noise=noise(seed=1))
        half.readouts(without(observations, "pad_mask_dict", "timestep"), tasks)
    assert not names


def test_a_key_stands_for_the_noise_that_it_draws() -> None:
    octo, observations, tasks = case()
    key = jax.random.key(3)
    got = octo.sample_actions(observations, tasks, rng=key)
    want = octo.sample_actions(observations, tasks, noise=octo.forward.noise(key, (), 3, 2))
    np.testing.assert_allclose(got, want, atol=1e-3)
    np.testing.assert_array_equal(octo.sample_actions(observations, tasks, rng=key), got)


def test_rows_do_not_see_each_other_and_samples_differ() -> None:
    octo, observations, tasks = case()
    x, z = noise(shape=(2,))
    both = octo.sample_actions(observations, tasks, noise=(x, z), sample_shape=(2,))
    for i in range(2):
        one = octo.sample_actions(observations, tasks, noise=(x[i], z[:, i]))
        np.testing.assert_allclose(both[i], one, atol=1e-3)
    assert np.abs(both[0] - both[1]).max() > 0.1
    changed = {**observations, "image_primary": observations["image_primary"].copy()}
    changed["image_primary"][0] = 255 - changed["image_primary"][0]
    other = octo.sample_actions(changed, tasks, noise=(x[0], z[:, 0]))
    np.testing.assert_allclose(other[1:], both[0, 1:], atol=1e-3)
    assert np.abs(other[0] - both[0, 0]).max() > 1e-2


def test_the_given_window_mask_counts_and_numbers_may_stand_for_booleans() -> None:
    octo, observations, tasks = case()
    mask = observations["timestep_pad_mask"]
    assert not mask.all()
    all_there = octo.readouts(without(observations, "timestep_pad_mask"), tasks)["readout_action"].tokens
    given = octo.readouts(observations, tasks, np.ones_like(mask))["readout_action"].tokens
    np.testing.assert_array_equal(given, all_there)
    want = octo.readouts(observations, tasks)["readout_action"].tokens
    assert np.abs(want - given).max() > 1e-2
    numbers = {**observations, "timestep_pad_mask": mask.astype(np.float64)}  # as upstream's wrapper gives it
    np.testing.assert_array_equal(octo.readouts(numbers, tasks)["readout_action"].tokens, want)


def test_arrays_may_be_on_the_device() -> None:
    octo, observations, tasks = case()
    moved = jax.device_put((observations, tasks))
    got = octo.sample_actions(*moved, noise=jax.device_put(noise()))
    np.testing.assert_array_equal(got, octo.sample_actions(observations, tasks, noise=noise()))


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({}, r"samples: give rng=jax\.random\.key\(n\), another one for every call"),
        ({"rng": jax.random.key(0), "argmax": True}, "argmax True, temperature 1.0: DiffusionActionHead has neither"),
        ({"rng": jax.random.key(0), "temperature": 0.5}, "temperature 0.5: DiffusionActionHead has neither"),
        ({"rng": jax.random.key(0), "noise": noise()}, "in place of rng"),
        ({"noise": noise(2)}, r"shapes \(2, 28\) and \(20, 2, 28\), wanted \(3, 28\) and \(20, 3, 28\)"),
        ({"noise": noise(), "sample_shape": (2,)}, r"wanted \(2, 3, 28\) and \(20, 2, 3, 28\)"),
        (
            {"rng": jax.random.key(0), "statistics": {"mean": np.zeros(8), "std": np.ones(8)}},
            "statistics have 8 action dims, the head has 7",
        ),
    ],
)
def test_arguments_that_mean_nothing_to_a_diffusion_head(kwargs: dict[str, Any], message: str) -> None:
    octo, observations, tasks = case()
    with pytest.raises(ValueError, match=message):
        octo.sample_actions(observations, tasks, **kwargs)


# Other heads, by hand from the golden readouts, in float64


def projected(octo: OctoModel, layer: str, tokens: np.ndarray) -> np.ndarray:
    kernel, bias = (np.asarray(octo.params[f"heads_action/{layer}/{name}"], np.float64) for name in ("kernel", "bias"))
    return tokens.astype(np.float64) @ kernel + bias


def readout() -> np.ndarray:
    """[B T D]"""
    return golden()["out/full/readout_action/tokens"][:, :, 0]


def test_a_continuous_head() -> None:
    octo, (_, observations, tasks) = with_head(ContinuousSpec(**READS, action_dim=5)), case()
    want = np.tanh(projected(octo, "mean_proj", readout()).reshape(3, 2, 4, 5) / 5) * 5
    got = octo.sample_actions(observations, tasks, sample_shape=(2,))
    np.testing.assert_allclose(got, np.stack([want[:, -1]] * 2), atol=2e-5)
    entry = {"mean": np.full(5, 2.0), "std": np.full(5, 3.0), "mask": np.array([True] * 4 + [False])}
    units = octo.sample_actions(observations, tasks, statistics=entry, sample_shape=(2,))
    np.testing.assert_allclose(units, np.concatenate([got[..., :4] * 3 + 2, got[..., 4:]], axis=-1), atol=1e-5)

    action = golden()["in/action"][..., :5]
    ok = observations["timestep_pad_mask"][..., None, None] & golden()["in/action_pad_mask"][..., :5]
    assert not ok.all()
    loss = octo.loss({**batch(), "action": action, "action_pad_mask": golden()["in/action_pad_mask"][..., :5]})
    assert float(loss["loss"]) == pytest.approx(((want - action)[ok] ** 2).mean() * 5, rel=1e-5)
    assert float(loss["mse"]) == float(loss["loss"])
    with pytest.raises(ValueError, match="noise is for a diffusion head"):
        octo.sample_actions(observations, tasks, noise=noise())


def test_a_discrete_head() -> None:
    head = DiscreteSpec(**READS, action_dim=2, vocab_size=6, token_per="")
    octo, (_, observations, tasks) = with_head(head), case()
    logits = projected(octo, "vocab_proj", readout()[:, -1]).reshape(3, 4, 2, 6)
    centres = (np.arange(6) + 0.5) / 6  # of uniform bins on [0, 1]
    best = centres[logits.argmax(-1)]
    np.testing.assert_allclose(octo.sample_actions(observations, tasks, argmax=True), best, atol=1e-6)
    cold = octo.sample_actions(observations, tasks, rng=jax.random.key(0), temperature=1e-5)
    np.testing.assert_allclose(cold, best, atol=1e-6)
    drawn = octo.sample_actions(observations, tasks, rng=jax.random.key(0), sample_shape=(2000,))
    chance = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    share = np.stack([(np.abs(drawn - centre) < 1e-4).mean(0) for centre in centres], axis=-1)
    assert np.abs(share - chance).max() < 5 * 0.5 / 2000**0.5
    with pytest.raises(ValueError, match="DiscreteActionHead samples: give rng"):
        octo.sample_actions(observations, tasks)


@pytest.mark.parametrize("name", ["l1", "mse", "cont_mean", "disc_map", "disc_hor"])
def test_losses_of_the_other_heads_are_upstreams(name: str) -> None:
    kwargs: dict[str, Any] = {**READS, "action_dim": 5}
    heads: Mapping[str, HeadSpec] = {
        "l1": L1Spec(**kwargs),
        "mse": MseSpec(**kwargs),
        "cont_mean": ContinuousSpec(**kwargs, loss_type="l1"),
        "disc_map": DiscreteSpec(**kwargs, use_map=True, token_per="", vocab_size=16, normalization_type="normal"),
        "disc_hor": DiscreteSpec(**kwargs, use_map=True, token_per="action_horizon", vocab_size=16),
    }
    spec = dataclasses.replace(model().spec, heads=(("action", heads[name]),))
    prefix = f"heads/{name}/params/"
    params = {key.replace(prefix, "heads_action/"): array(key) for key in extra() if key.startswith(prefix)}
    nested = {"params": {}}
    for key, value in params.items():
        *path, last = key.split("/")[1:]
        node = nested["params"]
        for part in path:
            node = node.setdefault(part, {})
        node[last] = value
    tokens, mask = array("heads/in/tokens"), array("heads/in/mask")
    embedding = head_module(heads[name]).apply(nested, tokens, mask, method="embed")
    ok = extra()["heads/in/timestep_pad_mask"][..., None, None] & extra()["heads/in/action_pad_mask"]
    got = OctoForward(spec).head_loss(params, jnp.asarray(embedding), array("heads/in/action"), jnp.asarray(ok), None)
    want = {key: extra()[f"heads/{name}/metric_{key}"] for key in got}
    assert {"loss", "mse"} <= got.keys() and ("accuracy" in got) == name.startswith("disc")
    for key, value in want.items():
        assert float(got[key]) == pytest.approx(float(value), abs=1e-4), key


# Training


def test_the_loss_of_a_diffusion_head() -> None:
    """Its gradients are in test_octo_golden.py."""
    octo, key = model(), jax.random.key(5)
    stored = Draws(jnp.asarray(golden()["loss/time"][..., 0]), jnp.asarray(golden()["loss/noise"]))
    assert float(octo.loss(batch(), draws=stored)["loss"]) == pytest.approx(float(golden()["loss/loss"]), abs=1e-5)
    metrics = octo.loss(batch(), rng=key)
    assert metrics.keys() == {"loss", "mse"}
    same = octo.loss(batch(), draws=octo.forward.draws(key, 3, 2))
    assert float(same["loss"]) == pytest.approx(float(metrics["loss"]), rel=1e-5)
    other = octo.loss(batch(), rng=jax.random.key(6))
    assert abs(float(other["loss"]) - float(metrics["loss"])) > 1e-3
    every = octo.loss(without(batch(), "action_pad_mask"), draws=stored)  # all actions count
    assert abs(float(every["loss"]) - float(golden()["loss/loss"])) > 1e-3


@pytest.mark.parametrize(
    ("changes", "kwargs", "message"),
    [
        ({}, {}, "give rng, another key for every call, or draws"),
        ({"action": np.zeros((3, 2, 4, 6), np.float32)}, {}, r"action is float32 \[3, 2, 4, 6\], wanted floats \[3, 2"),
        ({"action": np.zeros((3, 2, 4, 7), int)}, {}, "action is int64 .*wanted floats"),
        ({"action_pad_mask": np.ones((3, 2, 4, 7))}, {}, "action_pad_mask is float64 .*wanted booleans"),
        (
            {},
            {"draws": Draws(jnp.zeros((1, 3, 1), int), jnp.zeros((1, 3, 1, 28)))},
            r"\(1, 3, 1\) and \(1, 3, 1, 28\), wanted \(1, 3, 2\) and \(1, 3, 2, 28\)",
        ),
    ],
)
def test_batches_that_do_not_fit(changes: dict[str, Any], kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        model().loss({**batch(), **changes}, **kwargs)
