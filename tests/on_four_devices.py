"""Four devices train as one does. Run by test_devices.py in a process of its own, where XLA shows the CPU as four."""

from collections.abc import Iterator

import jax
import numpy as np
import pytest
from compilation import little_optimised
from stem_policy import E, S, StemPolicy, make_batch, observations

from vla_rlaif.config import LearnerConfig
from vla_rlaif.devices import Placement
from vla_rlaif.grpo import GRPO
from vla_rlaif.jax_imitation import imitate
from vla_rlaif.jax_learner import JaxLearner
from vla_rlaif.warm_start_config import ImitateConfig


def make_learner(devices: int | None, policy: StemPolicy | None = None, **config) -> JaxLearner:
    settings = {"lr": 2e-3, "epochs": 2, "minibatch": 16, "micro_batches": 2, "target_kl": None, **config}
    algorithm = GRPO(group_size=8, kl_coef=0.05)
    return JaxLearner(policy or StemPolicy(), algorithm, LearnerConfig(devices=devices, **settings))


def updates(learner: JaxLearner, seeds: range) -> list[dict[str, float]]:
    return [learner.update(make_batch(45 - 7 * seed, seed), seed=seed) for seed in seeds]


@pytest.fixture
def quick_compilation() -> Iterator[None]:
    with little_optimised():
        yield


def assert_close(got, wanted):
    assert got.keys() == wanted.keys()
    for name, value in wanted.items():
        np.testing.assert_allclose(got[name], value, rtol=1e-6, atol=1e-6, err_msg=name)


@pytest.mark.usefixtures("quick_compilation")
def test_updates_are_equal_and_resume_on_either_number_of_devices():
    """Gradients (Adam's moments in the state) and weights to 1e-6; the logs, whose ratios amplify, to 5e-6."""
    policy = StemPolicy()
    learners = {devices: make_learner(devices, policy) for devices in (1, 4)}
    logs = {devices: updates(learner, range(4)) for devices, learner in learners.items()}
    for one, four in zip(logs[1], logs[4], strict=True):
        assert four == pytest.approx(one, rel=1e-5, abs=5e-6)
    states = {devices: learner.state() for devices, learner in learners.items()}
    assert_close(states[4], states[1])
    assert_close(learners[4].weights(), learners[1].weights())

    compiled = learners[4].compilations
    straight = updates(learners[1], range(4, 6))
    end = learners[1].state()
    for devices, learner in learners.items():
        learner.restore(states[5 - devices])
        for log, wanted in zip(updates(learner, range(4, 6)), straight, strict=True):
            assert log == pytest.approx(wanted, rel=1e-5, abs=5e-6)
        assert_close(learner.state(), end)
    assert learners[4].compilations == compiled
    # device_put of an array to four devices shares its buffer; the ones that were overwritten are the learners' own.
    assert_close(policy.params, StemPolicy().params)


def test_without_a_step_the_ratio_is_exactly_one():
    log = make_learner(None, lr=1e-30).update(make_batch(45, 0), seed=0)
    assert log["updates"] == 6
    assert (log["ratio_error"], log["policy_kl"], log["reference_kl"]) == (0.0, 0.0, 0.0)


@pytest.mark.usefixtures("quick_compilation")
def test_imitation_is_equal():
    action = np.random.default_rng(0).normal(size=(64, S, E)).astype(np.float32)
    fitted = [
        imitate(
            StemPolicy(),
            observations(64, 0),
            action,
            ImitateConfig(steps=20, batch=16, micro_batches=2, devices=devices, samples=2),
            seed=0,
        )
        for devices in (1, 4)
    ]
    assert_close(fitted[1], fitted[0])


def test_rows_are_split_and_parameters_are_everywhere():
    placement = Placement.of(None)
    assert placement.num_devices == jax.local_device_count() == 4
    rows = jax.device_put(np.arange(48.0).reshape(8, 6), placement.rows)
    assert [shard.data.shape for shard in rows.addressable_shards] == [(2, 6)] * 4
    copy = placement.copies({"a": np.arange(3.0)})["a"]
    assert [shard.data.shape for shard in copy.addressable_shards] == [(3,)] * 4
    assert Placement.of(2).num_devices == 2


def test_rows_that_do_not_split_are_refused():
    with pytest.raises(ValueError, match=r"learner\.minibatch 18 does .* 3 micro-batches on 4 .* multiple of 12"):
        make_learner(4, minibatch=18, micro_batches=3)
    with pytest.raises(ValueError, match=r"devices is 5, but this process has 4"):
        make_learner(5)
    config = ImitateConfig(batch=6, devices=4)
    with pytest.raises(ValueError, match=r"imitate\.batch 6 does not split into 1 micro-batches on 4 devices"):
        imitate(StemPolicy(), observations(8, 0), np.zeros((8, S, E), np.float32), config, seed=0)
