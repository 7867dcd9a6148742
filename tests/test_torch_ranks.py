"""Several ranks train as one does, replicated and sharded, on gloo. Each group is started once for the whole file."""

import os
import signal
import time
from collections.abc import Iterator

import numpy as np
import pytest
from mlp_policy import MlpPolicy, make_anchor, make_batch, reload

from vla_rlaif.build import build_learner
from vla_rlaif.config import LearnerConfig, parse_config
from vla_rlaif.envs.point_reach import PointReach
from vla_rlaif.grpo import GRPO
from vla_rlaif.interfaces import Learner
from vla_rlaif.rank_group import RankError
from vla_rlaif.torch_learner import TorchLearner
from vla_rlaif.torch_parallel import micro_rows
from vla_rlaif.torch_ranks import TorchRanks

ALGORITHM = GRPO(group_size=8, kl_coef=0.05)
SETTINGS = {"lr": 2e-3, "epochs": 2, "minibatch": 16, "micro_batches": 2, "target_kl": None, "weight_decay": 0.1}
LEARNER = LearnerConfig(**SETTINGS)
LAYOUTS = ("replicated", "fsdp")  # on 2 ranks and on 4


def built() -> Learner:
    """On 2 ranks, from a config that names the policy's factory."""
    config = parse_config(
        {
            "env": {"type": "point_reach", "num_envs": 64},
            "policy": {"type": "custom", "factory": "mlp_policy:for_env", "backend": "torch"},
            "reward": {"type": "pixel_distance"},
            "algorithm": {"clip_low": 0.2, "clip_high": 0.2, "kl_coef": 0.05},
            "learner": {**SETTINGS, "devices": 2, "timeout_s": 120},
        },
        source="test",
    )
    return build_learner(config, MlpPolicy(), PointReach(1).spec, make_anchor())


@pytest.fixture(scope="module")
def groups() -> Iterator[dict[str, TorchRanks]]:
    replicated = built()
    assert isinstance(replicated, TorchRanks)
    sharded = LearnerConfig(**SETTINGS, sharding="fsdp", timeout_s=120)
    made = {
        "replicated": replicated,
        "fsdp": TorchRanks(MlpPolicy(), ALGORITHM, sharded, make_anchor(), reload=reload, num_ranks=4),
    }
    yield made
    for each in made.values():
        each.close()


@pytest.fixture(scope="module")
def alone() -> TorchLearner:
    return TorchLearner(MlpPolicy(), ALGORITHM, LEARNER, make_anchor())


@pytest.fixture(scope="module")
def start(alone) -> dict[str, np.ndarray]:
    return alone.state()


def updates(learner: Learner, seeds: range) -> list[dict[str, float]]:
    return [dict(learner.update(make_batch(45 - 7 * s, s, is_stale=s % 2 == 1), seed=s)) for s in seeds]


def assert_close(got, wanted):
    assert got.keys() == wanted.keys()
    for name, value in wanted.items():
        np.testing.assert_allclose(got[name], value, rtol=1e-6, atol=1e-6, err_msg=name)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_updates_are_equal_and_resume_on_any_number_of_ranks(groups, alone, start, layout):
    """Moments, averages and weights to 1e-6; the logs, whose ratios amplify, to 5e-6. 1 -> N -> 1 and N -> 1 -> N."""
    group = groups[layout]
    alone.restore(start)
    group.restore(start)
    assert_close(group.state(), start)
    logs = [updates(each, range(4)) for each in (alone, group)]
    for one, several in zip(*logs, strict=True):
        assert several == pytest.approx(one, rel=1e-5, abs=5e-6)
        assert several["ratio_error_first"] == 0.0
        assert several["anchor_loss"] > 0 and several["updates"] >= 4
    states = alone.state(), group.state()
    assert_close(states[1], states[0])
    assert group.version == alone.version == 4
    for averaged in (False, True):
        assert_close(group.weights(averaged=averaged), alone.weights(averaged=averaged))

    straight = updates(alone, range(4, 6))
    end = alone.state()
    for each, state in ((alone, states[1]), (group, states[0])):
        each.restore(state)
        for log, wanted in zip(updates(each, range(4, 6)), straight, strict=True):
            assert log == pytest.approx(wanted, rel=1e-5, abs=5e-6)
        assert_close(each.state(), end)


def test_a_checkpoint_of_replicas_resumes_in_shards(groups, start):
    for each in (groups["replicated"], groups["fsdp"]):
        each.restore(start)
    updates(groups["replicated"], range(2))
    groups["fsdp"].restore(groups["replicated"].state())
    for seed in range(2, 4):
        logs = [updates(groups[name], range(seed, seed + 1)) for name in ("replicated", "fsdp")]
        assert logs[1][0] == pytest.approx(logs[0][0], rel=1e-5, abs=5e-6)
    assert_close(groups["fsdp"].state(), groups["replicated"].state())


def test_an_empty_batch_changes_nothing(groups, start):
    group = groups["replicated"]
    group.restore(start)
    assert group.update(make_batch(0, 0), seed=0) == {"updates": 0.0}
    assert group.version == 0
    assert_close(group.state(), start)


def test_rows_that_do_not_split_are_refused():
    with pytest.raises(ValueError, match=r"learner\.minibatch 18 does .* 3 micro-batches on 4 .* multiple of 12"):
        micro_rows(18, 3, 4, "learner.minibatch")
    with pytest.raises(ValueError, match=r"algorithm\.anchor_batch 8 does not split into 2 micro-batches on 8 devices"):
        wide = LEARNER.model_copy(update={"minibatch": 32})
        TorchRanks(MlpPolicy(), ALGORITHM, wide, make_anchor(), reload=reload, num_ranks=8)


def test_an_error_in_a_rank_ends_with_its_traceback(groups):
    """Rows of NaN reach rank 1 and, as rows are shuffled, maybe rank 0."""
    batch = make_batch(45, 0)
    batch.obs.state[:] = np.nan
    with pytest.raises(RankError) as error:
        groups["fsdp"].update(batch, seed=0)
    assert str(error.value).endswith("ValueError: x is not finite; the camera is broken.")
    with pytest.raises(RankError, match="The ranks have stopped"):
        groups["fsdp"].weights()


def test_a_rank_that_is_killed_is_named(groups):
    learner = groups["replicated"]
    begun = time.monotonic()
    os.kill(learner.pids[1], signal.SIGKILL)
    with pytest.raises(RankError, match=r"rank 1 of 2 \(process \d+\) was killed by signal 9 \(SIGKILL"):
        learner.update(make_batch(45, 0), seed=0)
    assert time.monotonic() - begun < 10
