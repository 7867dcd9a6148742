"""LIBERO under an interpreter of its own: LIBERO_PYTHON names it, `make env-libero` builds it and runs this file."""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from vla_rlaif.build import build_env
from vla_rlaif.collect import collect_demonstrations
from vla_rlaif.config import load_config
from vla_rlaif.env_config import LiberoConfig
from vla_rlaif.envs.libero import NUM_STARTS, SUITES, initial_state
from vla_rlaif.rollout import Split, held_out_starts, start_seed
from vla_rlaif.run import align
from vla_rlaif.warm_start_config import CollectConfig

PYTHON = os.environ.get("LIBERO_PYTHON")
needs_libero = pytest.mark.skipif(PYTHON is None, reason="LIBERO_PYTHON is not set; `make env-libero` sets it")
SEED = start_seed(Split.TEST, 1)
CONFIG = Path(__file__).parents[2] / "configs/libero_spatial_expert.yaml"


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


@needs_libero
@pytest.mark.parametrize("suite", SUITES)
def test_each_suite_starts_and_looks_as_by_its_own_means(suite: str, tmp_path: Path) -> None:
    assert PYTHON is not None
    number, oracle = 7, tmp_path / "oracle.npz"
    task = 0 if suite == "libero_10" else 3  # in others of libero_10 the suite draws before it places the furniture
    script = Path(__file__).with_name("libero_oracle.py")
    environment = os.environ | {"MUJOCO_GL": "egl", "PYOPENGL_PLATFORM": "egl", "LP_NUM_THREADS": "0"}
    arguments = [PYTHON, str(script), suite, str(task), str(number), str(oracle)]
    subprocess.run(arguments, check=True, env=environment, timeout=300, capture_output=True)
    with np.load(oracle) as saved:
        theirs = dict(saved)
    assert theirs["num_states"] == 50
    for turned in (True, False):
        settings = {"suite": suite, "tasks": (task,), "turned": turned, "settle_steps": 0, "fast_render": False}
        settings |= {"interpreter": PYTHON, "num_envs": 1, "workers": 1, "image_size": 64}
        env: Any = build_env(LiberoConfig.model_validate(settings))
        now = env.reset(
            np.array([(int(Split.TEST) << 48) - (int(Split.TEST) << 48) % NUM_STARTS + NUM_STARTS + number])
        )
        env.close()
        assert now.obs.instruction == (str(theirs["sentence"]),) and env.spec.fps == theirs["hertz"]
        np.testing.assert_allclose(now.obs.state[0, :3], theirs["position"], atol=1e-6)
        np.testing.assert_allclose(now.obs.state[0, 6:], theirs["fingers"], atol=1e-6)
        for ours, name in (("agentview", "agentview"), ("robot0_eye_in_hand", "wrist")):
            wanted = theirs[name][::-1, ::-1] if turned else theirs[name][::-1]  # half a turn, or upright
            np.testing.assert_array_equal(now.obs.images[ours][0], wanted)


@needs_libero
def test_the_expert_solves_its_task() -> None:
    config = load_config(CONFIG).env.model_copy(
        update={"interpreter": PYTHON and Path(PYTHON), "num_envs": 4, "image_size": 32}
    )
    env: Any = build_env(config, max_steps=130)
    demos = collect_demonstrations(
        env, CollectConfig(episodes=8, noise=0.1, scatter_steps=4, label_noise=0.0, max_steps=120), seed=0
    )
    assert demos.success.sum() >= 7 and demos.mask.sum(axis=1).mean() < 100
    env.close()


@needs_libero
def test_a_task_without_an_expert_says_so(env: Any) -> None:
    assert PYTHON is not None
    config = LiberoConfig(suite="libero_goal", interpreter=Path(PYTHON), num_envs=1, workers=1, image_size=32)
    without: Any = build_env(config)
    without.reset(np.array([SEED]))
    with pytest.raises(ValueError, match=r"LiberoTask has no expert.*checkpoint"):
        without.expert()
    without.close()


@needs_libero
def test_demonstrations_imitation_training_and_evaluation_run_end_to_end(tmp_path: Path) -> None:
    whole = load_config(CONFIG)
    assert whole.warm_start is not None and PYTHON is not None
    change: dict[str, Any] = {"interpreter": Path(PYTHON), "num_envs": 2, "workers": 2, "image_size": 32}
    env = whole.env.model_copy(update=change | {"max_steps": 20})
    collect = whole.warm_start.collect.model_copy(update={"episodes": 2, "max_steps": 80})
    imitate = whole.warm_start.imitate.model_copy(update={"steps": 3, "batch": 8})
    loop = whole.loop.model_copy(update={"steps": 1, "validate_every": 1, "validation_episodes": 2})
    config = whole.model_copy(
        update={
            "env": env,
            "out": tmp_path / "run",
            "warm_start": whole.warm_start.model_copy(update={"collect": collect, "imitate": imitate}),
            "algorithm": whole.algorithm.model_copy(update={"group_size": 2}),
            "loop": loop,
            "evaluate": whole.evaluate.model_copy(update={"episodes": 2, "clips": 1}),
        }
    )
    said: list[str] = []
    result = align(config, resume=False, overwrite=False, say=said.append)
    assert result["episodes"] == 2 and "black bowl" in result["task"]
    assert any("collected 2 demonstrations" in line for line in said)
    assert (config.run_dir / "report.html").exists()


@pytest.mark.parametrize("num_tasks", [1, 3, 10])
def test_initial_states_are_dealt_out_by_split_and_enumerated(num_tasks: int) -> None:
    def played(split: Split, num: int) -> list[tuple[int, int]]:
        seeds = held_out_starts(split, num, num_tasks, NUM_STARTS).seed.tolist()
        return [(seed % num_tasks, initial_state(seed, num_tasks)) for seed in seeds]

    every = [(task, number) for task in range(num_tasks) for number in range(50)]
    test, validation = played(Split.TEST, 20 * num_tasks), played(Split.VALIDATION, 10 * num_tasks)
    assert sorted(test) == [s for s in every if s[1] < 20]  # each of them once
    assert sorted(validation) == [s for s in every if 20 <= s[1] < 30]
    for split in (Split.TRAIN, Split.DEMONSTRATION, Split.REWARD):
        states = {initial_state(start_seed(split, i), num_tasks) for i in range(400)}
        assert states == set(range(30, 50))


def test_without_the_suite_it_says_how_to_get_it() -> None:
    with pytest.raises(ValueError, match="run `make env-libero`"):
        build_env(LiberoConfig(num_envs=1, workers=1))
