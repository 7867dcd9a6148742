"""OctoPolicy as a policy: rows, seeds, storage, and the numbers that reinforcement learning rests on."""

import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tiny import make_config, make_obs, make_spec

from vla_rlaif.interfaces import Policy
from vla_rlaif.policies.octo.construct import from_parts, from_scratch
from vla_rlaif.policies.octo.initial import initial_params
from vla_rlaif.policies.octo.lora import PREFIX as LORA
from vla_rlaif.policies.octo.network import HEAD, REFERENCE, TABLE
from vla_rlaif.policies.octo.policy import OctoPolicy
from vla_rlaif.policies.octo.statistics import Statistics
from vla_rlaif.rollout import windowed
from vla_rlaif.tune_config import FullTuning, LoraTuning
from vla_rlaif.types import Observation


def weights_of(policy: OctoPolicy) -> dict[str, np.ndarray]:
    return {name: np.asarray(value) for name, value in policy.params.items()}


SEEDS = np.arange(6, dtype=np.uint32) + 40


def test_is_a_policy(policy: OctoPolicy) -> None:
    assert isinstance(policy, Policy)
    decision = policy.act(make_obs(6), SEEDS)
    assert decision.action.shape == (6, 3, 2) and decision.action.dtype == np.float32
    assert np.abs(decision.action).max() <= 1.0
    assert decision.logp.shape == (6, 3)
    assert {name: leaf.shape for name, leaf in decision.trace.items()} == {
        "readout": (6, 1, 16),
        "start": (6, 6),
        "chain": (6, 3, 6),
    }


def test_rows_depend_on_their_own_seed_only(policy: OctoPolicy) -> None:
    obs, rows = make_obs(6), [4, 1]
    whole = policy.act(obs, SEEDS)
    images = {camera: frames[rows] for camera, frames in obs.images.items()}
    two = type(obs)(images=images, state=obs.state[rows], instruction=tuple(obs.instruction[i] for i in rows))
    part = policy.act(two, SEEDS[rows])
    np.testing.assert_allclose(part.action, whole.action[rows], atol=1e-4)
    np.testing.assert_allclose(part.trace["chain"], whole.trace["chain"][rows], atol=1e-3)


def test_seeds_fix_the_action_and_noise_scale_0_its_noise(policy: OctoPolicy) -> None:
    obs = make_obs(6)
    first, again, other = policy.act(obs, SEEDS), policy.act(obs, SEEDS), policy.act(obs, SEEDS + 9)
    np.testing.assert_array_equal(first.action, again.action)
    assert np.abs(first.action - other.action).max() > 1e-3
    calm = policy.act(obs, SEEDS, noise_scale=0.0)
    inputs = policy.inputs(obs, calm.trace, np.full(6, 3))
    np.testing.assert_allclose(calm.trace["chain"], jax.jit(policy.means)(policy.params, inputs), atol=1e-5)


def test_nothing_recompiles() -> None:
    policy = from_scratch(make_config(max_action=4.0), make_spec(), seed=0)  # unlike the other tests' networks
    counts: list[str] = []

    def count(event: str, duration_secs: float, **_: str | int) -> None:
        counts.append(event)

    jax.monitoring.register_event_duration_secs_listener(count)
    try:
        policy.act(make_obs(6), SEEDS)
        policy.features(make_obs(70))
        compiled = sum("backend_compile" in name for name in counts)
        assert compiled > 0
        for seed in range(3):
            policy.act(make_obs(6, seed), SEEDS + np.uint32(seed), noise_scale=float(seed))
            policy.features(make_obs(5 + 60 * seed, seed))
            policy.load(weights_of(policy), seed)
            policy.freeze_reference()
        assert sum("backend_compile" in name for name in counts) == compiled
    finally:
        jax.monitoring.unregister_event_duration_listener(count)


def test_rescoring_agrees_with_acting_and_with_itself(policy: OctoPolicy) -> None:
    obs = make_obs(6)
    decision = policy.act(obs, SEEDS)
    inputs = policy.inputs(obs, decision.trace, np.full(6, 3))
    score = jax.jit(policy.score)
    first, _ = score(policy.params, inputs)
    again, divergence = score(policy.params, inputs, jax.jit(policy.means)(policy.params, inputs))
    np.testing.assert_allclose(first, decision.logp, atol=1e-4)
    assert np.exp(np.asarray(score(policy.params, inputs)[0] - first)).tolist() == np.ones((6, 3)).tolist()
    np.testing.assert_allclose(again, first, atol=1e-5)
    assert divergence is not None and np.abs(divergence).max() < 1e-8


def test_full_tuning_scores_through_the_trunk(policy: OctoPolicy) -> None:
    full = from_parts(make_config(tune=FullTuning()), policy.metadata(), weights_of(policy))
    obs = make_obs(6)
    decision = full.act(obs, SEEDS)
    logp, _ = jax.jit(full.score)(full.params, full.inputs(obs, decision.trace, np.full(6, 3)))
    np.testing.assert_allclose(logp, decision.logp, atol=1e-4)
    assert policy.trainable < full.trainable < full.imitable < full.params.keys()
    assert not any(name == TABLE for name in full.trainable)


def test_reduction_is_a_mean_or_a_sum(policy: OctoPolicy) -> None:
    obs = make_obs(6)
    decision = policy.act(obs, SEEDS)
    inputs = policy.inputs(obs, decision.trace, np.array([0, 1, 2, 3, 3, 3]))
    total = from_parts(make_config(logp_reduction="sum"), policy.metadata(), weights_of(policy))
    mean, _ = jax.jit(policy.score)(policy.params, inputs)
    summed, _ = jax.jit(total.score)(policy.params, inputs)
    np.testing.assert_allclose(summed, np.asarray(mean) * np.array([0, 2, 4, 6, 6, 6])[:, None], rtol=1e-5, atol=1e-6)


def test_unexecuted_dims_have_no_gradient(policy: OctoPolicy) -> None:
    obs = make_obs(2)
    trace = policy.act(obs, SEEDS[:2]).trace
    inputs = {k: jnp.asarray(v) for k, v in policy.inputs(obs, trace, np.array([1, 0])).items()}

    def of_means(shift: jax.Array) -> jax.Array:
        """The score as a function of the sampled last step, which enters no other density."""
        chain = inputs["chain"].at[:, -1].add(shift)
        return policy.score(policy.params, inputs | {"chain": chain})[0].sum()

    grad = np.asarray(jax.jit(jax.grad(of_means))(jnp.zeros((2, 6))))
    assert (grad[0, :2] != 0).all()
    assert (grad[0, 2:] == 0).all() and (grad[1] == 0).all()


def test_gradients_equal_finite_differences(policy: OctoPolicy) -> None:
    obs = make_obs(4)
    trace = policy.act(obs, SEEDS[:4]).trace
    with jax.enable_x64(True):
        params = {k: jnp.asarray(np.asarray(v), jnp.float64) for k, v in policy.params.items()}
        inputs = policy.inputs(obs, trace, np.array([3, 2, 1, 3]))
        inputs = {k: v.astype(np.float64) if v.dtype == np.float32 else v for k, v in inputs.items()}
        weights = jnp.asarray(np.random.default_rng(0).normal(size=(4, 3)))

        @jax.jit
        def score(head: dict[str, jax.Array]) -> jax.Array:
            return (weights * policy.score(params | head, inputs)[0]).sum()

        head = {name: params[name] for name in sorted(policy.trainable)}
        rng = np.random.default_rng(1)
        direction = {name: jnp.asarray(rng.normal(size=value.shape)) for name, value in head.items()}
        slope = sum(float((g * direction[n]).sum()) for n, g in jax.grad(score)(head).items())

        def moved(h: float) -> float:
            return float(score({name: value + h * direction[name] for name, value in head.items()}))

        assert slope == pytest.approx((moved(1e-6) - moved(-1e-6)) / 2e-6, rel=1e-6)


def test_divergence_equals_monte_carlo(policy: OctoPolicy) -> None:
    """E_mu[log p_mu - log p_ref] over fresh samples of the last step; it conditions on the stored one before it."""
    obs, num = make_obs(1), 20_000
    trace = policy.act(obs, SEEDS[:1]).trace
    inputs = {k: jnp.asarray(v) for k, v in policy.inputs(obs, trace, np.array([2])).items()}
    reference = {k: policy.params[REFERENCE + k] if k.startswith(HEAD) else v for k, v in policy.params.items()}
    means, score = jax.jit(policy.means), jax.jit(policy.score)
    _, divergence = score(policy.params, inputs, means(reference, inputs))
    assert divergence is not None
    noise = jax.random.normal(jax.random.key(0), (num, 6)) * policy.network.tuned_stds[-1]
    many = {k: jnp.repeat(v, num, axis=0) for k, v in inputs.items()}
    many["chain"] = many["chain"].at[:, -1].set(means(policy.params, inputs)[0, -1] + noise)
    ratio = np.asarray(score(policy.params, many)[0] - score(reference, many)[0])[:, -1]
    assert divergence[0, -1] > 1e-3
    assert abs(ratio.mean() - float(divergence[0, -1])) < 4 * ratio.std() / math.sqrt(num)


def test_samples_have_the_scored_marginals(policy: OctoPolicy) -> None:
    """Given the means, chains of many seeds are standard normal noise in units of the std of each step."""
    num = 500
    one = make_obs(1)
    images = {camera: np.repeat(frames, num, 0) for camera, frames in one.images.items()}
    obs = type(one)(images=images, state=np.repeat(one.state, num, 0), instruction=one.instruction * num)
    decision = policy.act(obs, np.arange(num, dtype=np.uint32))
    means = jax.jit(policy.means)(policy.params, policy.inputs(obs, decision.trace, np.full(num, 3)))
    noise = (decision.trace["chain"] - np.asarray(means)) / policy.network.tuned_stds[:, None]
    samples = noise.reshape(num, -1)
    assert abs(samples.mean()) < 4 / math.sqrt(samples.size)
    assert abs(samples.std() - 1) < 4 / math.sqrt(2 * samples.size)
    correlation = np.corrcoef(samples.T) - np.eye(samples.shape[1])
    assert np.abs(correlation).max() < 5 / math.sqrt(num)
    # E[log N] = -1/2 - log sigma - 1/2 log 2 pi for each dim
    expected = -0.5 - np.log(policy.network.tuned_stds) - 0.5 * math.log(2 * math.pi)
    np.testing.assert_allclose(decision.logp.mean(0), expected, atol=4 * math.sqrt(0.5 / (num * 6)))


def test_early_steps_run_on_the_frozen_head(policy: OctoPolicy) -> None:
    obs = make_obs(6)
    moved = from_parts(make_config(), policy.metadata(), weights_of(policy))
    moved.load({name: np.asarray(policy.params[name]) * 1.5 for name in policy.trainable}, 1)
    before, after = policy.act(obs, SEEDS), moved.act(obs, SEEDS)
    np.testing.assert_array_equal(before.trace["start"], after.trace["start"])
    assert np.abs(before.trace["chain"] - after.trace["chain"]).max() > 1e-3
    moved.freeze_reference()
    assert np.abs(moved.act(obs, SEEDS).trace["start"] - before.trace["start"]).max() > 1e-3


def test_a_step_without_density_is_frozen_too(policy: OctoPolicy) -> None:
    upstream = from_parts(make_config(std_floor=0.0), policy.metadata(), weights_of(policy))
    obs = make_obs(6)
    decision = upstream.act(obs, SEEDS)
    assert decision.logp.shape == (6, 2) and np.isfinite(decision.logp).all()
    with pytest.raises(ValueError, match="leaves no denoising step"):
        from_scratch(make_config(std_floor=0.0, tuned_steps=1), make_spec(), seed=0)


def test_storage_round_trip(policy: OctoPolicy) -> None:
    statistics = Statistics.measured(np.random.default_rng(0).normal(size=(9, 2)), np.eye(9, 3))
    stored = policy.with_statistics(statistics)
    metadata = json.loads(json.dumps(stored.metadata()))
    weights = weights_of(stored)
    restored = from_parts(make_config(), metadata, weights)
    np.testing.assert_array_equal(restored.act(make_obs(6), SEEDS).action, stored.act(make_obs(6), SEEDS).action)
    assert restored.metadata() == metadata
    with pytest.raises(ValueError, match="token_dim is 32, but the stored policy has 16"):
        from_parts(make_config(token_dim=32), metadata, weights)
    older = {k: v for k, v in metadata["config"].items() if k != "image_sizes"}
    with pytest.raises(ValueError, match="does not say its image_sizes: it is of an older version"):
        from_parts(make_config(), {**metadata, "config": older}, weights)
    weights.pop("heads_action/diffusion_model/time_preprocess/kernel")
    with pytest.raises(ValueError, match="lack 1 parameters, the first is 'heads_action/diffusion_model/time"):
        from_parts(make_config(), metadata, weights)


def test_load_copies_and_checks(policy: OctoPolicy) -> None:
    other = from_parts(make_config(), policy.metadata(), weights_of(policy))
    name = "heads_action/diffusion_model/time_preprocess/kernel"
    mine = np.ones(other.params[name].shape, np.float32)
    other.load({name: mine}, 3)
    mine[:] = 0
    assert other.version == 3 and (np.asarray(other.params[name]) == 1).all()
    with pytest.raises(ValueError, match="no such parameter"):
        other.load({"heads_action/typo": mine}, 4)
    with pytest.raises(ValueError, match="of shape"):
        other.load({name: mine[:1]}, 4)


def test_words_outside_the_vocabulary_are_refused(policy: OctoPolicy) -> None:
    obs = make_obs(1)
    with pytest.raises(
        ValueError, match="'green' in 'push the green cube' is not in the policy's vocabulary: blue cube"
    ):
        policy.act(type(obs)(images=obs.images, state=obs.state, instruction=("push the green cube",)), SEEDS[:1])
    with pytest.raises(ValueError, match="9 words, language_tokens is 8"):
        policy.language.encode(["push " * 9])


def test_statistics_reach_state_and_action(policy: OctoPolicy) -> None:
    identity = policy.statistics
    shifted = Statistics(
        action_mean=np.array([0.5, 0.0], np.float32),
        action_std=np.array([0.1, 0.2], np.float32),
        state_mean=identity.state_mean + 1,
        state_std=identity.state_std * 2,
    )
    obs = make_obs(6)
    moved = type(obs)(images=obs.images, state=obs.state * 2 + 1, instruction=obs.instruction)
    decision = policy.with_statistics(shifted).act(moved, SEEDS)
    last = np.clip(decision.trace["chain"][:, -1], -5, 5).reshape(6, 3, 2)
    np.testing.assert_allclose(decision.action, np.clip(last * [0.1, 0.2] + [0.5, 0.0], -1, 1), atol=1e-6)
    np.testing.assert_allclose(decision.trace["chain"], policy.act(obs, SEEDS).trace["chain"], atol=1e-4)
    with pytest.raises(ValueError, match=r"action_std must be positive, but is not in dims \[1\]"):
        Statistics(**(vars(shifted) | {"action_std": np.array([1.0, 0.0], np.float32)}))


def test_imitation_learns_a_constant_action() -> None:
    """Every observation is answered with the same chunk, so after a few hundred steps the samples are near it."""
    policy = from_scratch(make_config(head_dim=32), make_spec(), seed=0)
    action = np.tile(np.array([0.6, -0.4], np.float32), (6, 3, 1))
    inputs = policy.imitation_inputs(make_obs(6))
    readout = jax.jit(policy.network.readout)(policy.params, {k: jnp.asarray(v) for k, v in inputs.items()})
    inputs = {"readout": readout}  # the head alone is enough here, and quick

    optimizer = optax.adam(3e-3)

    @jax.jit
    def run(head: dict[str, jax.Array]) -> tuple[dict[str, jax.Array], jax.Array]:
        def step(carry: tuple, key: jax.Array) -> tuple[tuple, jax.Array]:
            head, state = carry
            loss, grads = jax.value_and_grad(
                lambda head: policy.imitation_loss(dict(policy.params) | head, inputs, action, key, samples=16)
            )(head)
            updates, state = optimizer.update(grads, state)
            return (optax.apply_updates(head, updates), state), loss

        (head, _), losses = jax.lax.scan(step, (head, optimizer.init(head)), jax.random.split(jax.random.key(0), 500))
        return head, losses

    head, losses = run({name: policy.params[name] for name in policy.trainable})
    assert losses[-20:].mean() < 0.2 * losses[0]
    policy.load({name: np.asarray(value) for name, value in head.items()}, 1)
    policy.freeze_reference()
    error = policy.act(make_obs(6), SEEDS).action - action
    assert np.abs(error).mean() < 0.2


def test_imitation_ignores_padded_steps(policy: OctoPolicy) -> None:
    inputs = policy.imitation_inputs(make_obs(4))
    action = np.zeros((4, 3, 2), np.float32)
    mask = np.ones((4, 3, 2), bool)
    mask[:, 2] = False

    @jax.jit
    @jax.grad
    def slope(params: dict[str, jax.Array]) -> jax.Array:
        return policy.imitation_loss(params, inputs, action, jax.random.key(0), 2, mask)

    grad = slope(dict(policy.params))
    bias = np.asarray(grad["heads_action/diffusion_model/reverse_network/Dense_1/bias"])
    assert (bias[:4] != 0).all() and (bias[4:] == 0).all()
    assert all((np.asarray(g) == 0).all() for name, g in grad.items() if name.startswith(REFERENCE))
    assert (np.abs(np.asarray(grad[TABLE])) > 0).any()


def test_features_do_not_depend_on_the_batch(policy: OctoPolicy) -> None:
    obs = make_obs(70)
    whole = policy.features(obs)
    images = {camera: frames[-3:] for camera, frames in obs.images.items()}
    tail = type(obs)(images=images, state=obs.state[-3:], instruction=obs.instruction[-3:])
    assert whole.dtype == np.float32 and whole.shape[0] == 70
    np.testing.assert_allclose(policy.features(tail), whole[-3:], atol=1e-5)
    assert whole.std(axis=0).min() > 0


def test_initial_params_have_flaxs_distributions() -> None:
    """The host draws what flax's initialisers would; compared by the std of every parameter."""
    network = from_scratch(make_config(token_dim=64, mlp_dim=32, head_dim=64), make_spec(), seed=0).network
    ours = initial_params(network.shapes(), 0)
    options = {"xla_backend_optimization_level": 0}
    theirs = jax.jit(network.flax_init, compiler_options=options)(jax.random.key(0))
    for name, value in theirs.items():
        assert ours[name].shape == value.shape
        tolerance = 5 / math.sqrt(2 * value.size)
        np.testing.assert_allclose(
            ours[name].std(), np.asarray(value).std(), rtol=tolerance * 1.5, atol=1e-8, err_msg=name
        )


def rows_of(obs: Observation, rows: list[int]) -> Observation:
    images = {camera: frames[rows] for camera, frames in obs.images.items()}
    return Observation(images=images, state=obs.state[rows], instruction=tuple(obs.instruction[i] for i in rows))


def test_rows_that_see_the_same_share_a_trunk_pass(policy: OctoPolicy) -> None:
    """Two groups of three: the readouts of a group are one row of a batch of 2, the chains are each member's own."""
    obs = rows_of(make_obs(2), [0, 1, 0, 1, 0, 1])
    together = policy.act(obs, SEEDS)
    for group in (0, 1):
        members = together.trace["readout"][group::2]
        assert (members == members[:1]).all()
    np.testing.assert_allclose(
        together.trace["readout"][:2], policy.act(make_obs(2), SEEDS[:2]).trace["readout"], atol=1e-5
    )
    assert np.abs(np.diff(together.trace["chain"][::2], axis=0)).max() > 1e-2
    nearly = rows_of(make_obs(2), [0, 1, 0, 1, 0, 1])
    nearly.images["primary"][4, 0, 0, 0] ^= 255  # one pixel of one row differs
    readout = policy.act(nearly, SEEDS).trace["readout"]
    assert np.abs(readout[4] - readout[0]).max() > 0


@pytest.mark.parametrize("tune", [LoraTuning(rank=2, blocks=1), LoraTuning(rank=2), FullTuning()])
def test_what_is_prepared_once_scores_the_same(policy: OctoPolicy, tune: LoraTuning | FullTuning) -> None:
    """Below the first trained block nothing changes, so one pass serves actor, reference and every epoch."""
    tuned = from_parts(make_config(tune=tune, num_layers=2), *two_blocks(policy))
    rng = np.random.default_rng(0)
    names = [name for name in tuned.trainable if name.endswith("/b")]
    tuned.load({n: 0.1 * rng.standard_normal(tuned.params[n].shape) for n in names}, 1)
    obs = make_obs(6)
    decision = tuned.act(obs, SEEDS)
    inputs = tuned.inputs(obs, decision.trace, np.full(6, 3))
    prepared = jax.jit(tuned.prepare)(tuned.params, inputs)
    assert ("hidden" in prepared) == isinstance(tune, LoraTuning)
    assert any(name.startswith("image/") for name in prepared) == isinstance(tune, FullTuning)
    score = jax.jit(tuned.score)
    np.testing.assert_allclose(score(tuned.params, prepared)[0], decision.logp, atol=1e-4)
    untouched = {k: v for k, v in tuned.params.items() if k not in tuned.trainable}
    if isinstance(tune, LoraTuning):  # the pass reads no trained parameter at all
        assert jax.eval_shape(tuned.prepare, untouched, inputs).keys() == prepared.keys()


def two_blocks(policy: OctoPolicy) -> tuple[dict, dict[str, np.ndarray]]:
    """The shared policy with its only block twice."""
    deeper = from_scratch(make_config(num_layers=2), make_spec(), seed=2)
    mine = {name: value for name, value in weights_of(policy).items() if not name.startswith(REFERENCE)}
    return deeper.metadata(), weights_of(deeper) | mine


def test_adapters_start_at_nothing_and_are_merged_for_other_settings(policy: OctoPolicy) -> None:
    lora = from_parts(make_config(tune=LoraTuning(rank=2)), policy.metadata(), weights_of(policy))
    obs = make_obs(6)
    np.testing.assert_array_equal(lora.act(obs, SEEDS).trace["readout"], policy.act(obs, SEEDS).trace["readout"])
    added = {name for name in lora.params if name.startswith(LORA)}
    # attention has 4 kernels and the MLP 2, each with two factors
    assert len(added) == 12 and lora.trainable == policy.trainable | added
    lora.load({n: np.full(lora.params[n].shape, 0.1, np.float32) for n in added if n.endswith("/b")}, 1)
    moved = lora.act(obs, SEEDS).trace["readout"]
    assert np.abs(moved - policy.act(obs, SEEDS).trace["readout"]).max() > 1e-3
    merged = from_parts(make_config(), lora.metadata(), weights_of(lora))
    assert not any(name.startswith(LORA) for name in merged.params)
    np.testing.assert_allclose(merged.act(obs, SEEDS).trace["readout"], moved, atol=1e-5)
    again = from_parts(make_config(tune=LoraTuning(rank=2)), lora.metadata(), weights_of(lora))
    np.testing.assert_array_equal(again.act(obs, SEEDS).trace["readout"], moved)


def test_few_deterministic_steps_have_no_density(policy: OctoPolicy) -> None:
    served = from_parts(make_config(ddim_steps=3), policy.metadata(), weights_of(policy))
    obs = make_obs(6)
    calm, again = (served.act(obs, SEEDS, noise_scale=0.0) for _ in range(2))
    np.testing.assert_array_equal(calm.action, again.action)
    assert np.isnan(calm.logp).all() and calm.logp.shape == (6, 3) and not calm.trace
    drawn = served.act(obs, SEEDS)
    np.testing.assert_array_equal(drawn.action, policy.act(obs, SEEDS).action)


def test_a_window_sees_the_frame_before(policy: OctoPolicy) -> None:
    double = from_parts(make_config(window=2), policy.metadata(), weights_of(policy))
    before, now = make_obs(6, 1), make_obs(6)
    first = windowed([now], 2)
    assert first.frame_ok is not None and first.frame_ok.tolist() == [[False, True]] * 6
    readout = double.act(windowed([before, now], 2), SEEDS).trace["readout"]
    assert np.abs(readout - double.act(windowed([now, now], 2), SEEDS).trace["readout"]).max() > 1e-4
    padded = double.act(first, SEEDS).trace["readout"]
    other = Observation(
        images={c: np.stack([before.images[c], v], 1) for c, v in now.images.items()},
        state=first.state,
        instruction=now.instruction,
        frame_ok=first.frame_ok,
    )
    np.testing.assert_allclose(double.act(other, SEEDS).trace["readout"], padded, atol=1e-5)  # padding is not looked at
    assert double.features(now).shape == policy.features(now).shape


def test_saturation_is_counted_once(policy: OctoPolicy) -> None:
    """A bias of 100 in the last layer pushes every coordinate to the bound of 5."""
    stuck = from_parts(make_config(clip_prediction=None), policy.metadata(), weights_of(policy))
    stuck.load({"heads_action/diffusion_model/reverse_network/Dense_1/bias": np.full(6, -100, np.float32)}, 1)
    stuck.act(make_obs(6), SEEDS)
    assert stuck.diagnostics() == {"policy/saturated_share": 1.0}
    assert math.isnan(stuck.diagnostics()["policy/saturated_share"])


def test_bfloat16_acts_alike_with_float32_log_probs(policy: OctoPolicy) -> None:
    half = from_parts(make_config(compute="bfloat16"), policy.metadata(), weights_of(policy))
    obs = make_obs(6)
    decision, exact = half.act(obs, SEEDS), policy.act(obs, SEEDS)
    error = np.abs(decision.trace["readout"] - exact.trace["readout"])
    assert 0 < error.max() < 0.1  # 8 bits of mantissa
    assert all(leaf.dtype == np.float32 for leaf in (decision.logp, *decision.trace.values()))
    inputs = half.inputs(obs, decision.trace, np.full(6, 3))
    np.testing.assert_allclose(jax.jit(half.score)(half.params, inputs)[0], decision.logp, atol=1e-4)
