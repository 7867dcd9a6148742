"""LIBERO under an interpreter of its own: LIBERO_PYTHON names it, `make env-libero` builds it and runs this file."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from vla_rlaif.build import build_env
from vla_rlaif.env_config import LiberoConfig
from vla_rlaif.rollout import Split, start_seed

PYTHON = os.environ.get("LIBERO_PYTHON")
needs_libero = pytest.mark.skipif(PYTHON is None, reason="LIBERO_PYTHON is not set; `make env-libero` sets it")
SEED = start_seed(Split.TEST, 1)


@pytest.fixture(scope="module")
def env() -> Iterator[Any]:
    assert PYTHON is not None
    env = build_env(LiberoConfig(interpreter=Path(PYTHON), num_envs=3, workers=2, chunk=5, max_steps=20, image_size=64))
    yield env
    env.close()


@needs_libero
def test_groups_restart_exactly_in_every_worker_and_after_play(env: Any) -> None:
    seeds = np.array([SEED, SEED + 1, SEED])
    start = env.reset(seeds)
    assert start.valid.all(), env.last_fault
    assert "black bowl" in start.obs.instruction[0]
    a, b, c = env.state_hash()
    assert a == c != b
    np.testing.assert_array_equal(start.obs.images["agentview"][0], start.obs.images["agentview"][2])
    env.step(np.random.default_rng(0).uniform(-1, 1, (3, 5, 7)))
    env.reset(seeds)
    assert env.state_hash() == (a, b, c)


@needs_libero
def test_a_snapshot_continues_bit_for_bit(env: Any) -> None:
    env.reset(np.array([SEED, SEED + 1, SEED + 2]))
    action = np.random.default_rng(0).uniform(-1, 1, (3, 5, 7))
    env.step(action)
    saved = env.snapshot(0)
    expected = env.step(action)
    env.restore([2], saved)
    now = env.step(np.repeat(action[:1], 3, axis=0))
    np.testing.assert_array_equal(now.obs.state[2], expected.obs.state[0])
    np.testing.assert_array_equal(now.obs.images["agentview"][2], expected.obs.images["agentview"][0])


def test_without_the_suite_it_says_how_to_get_it() -> None:
    with pytest.raises(ValueError, match="run `make env-libero`"):
        build_env(LiberoConfig(num_envs=1, workers=1))
