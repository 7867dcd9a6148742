"""Meta-World behind our seam, against the suite's own loop, renderer and experts."""

import functools
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from vla_rlaif.build import build_env
from vla_rlaif.collect import collect_demonstrations
from vla_rlaif.config import parse_config
from vla_rlaif.env_config import MetaWorldConfig
from vla_rlaif.envs.metaworld import MetaWorldTask
from vla_rlaif.envs.metaworld_tasks import MT10, SENTENCES, chosen
from vla_rlaif.run import align
from vla_rlaif.warm_start_config import CollectConfig

pytestmark = pytest.mark.filterwarnings("ignore:Constant")  # the suite's experts say that their gains are high
STEPS = 40


def make(tasks: tuple[str, ...] = MT10, **change: Any) -> MetaWorldTask:
    settings: dict[str, Any] = {"observation": "proprio", "cameras": ("corner2",), "image_size": 32}
    settings |= {"renderer": "egl", "fast_render": True, "randomize": {}} | change
    return MetaWorldTask(tasks=tasks, **settings)


@pytest.fixture(scope="module")
def mt10() -> Iterator[MetaWorldTask]:
    env = make()
    yield env
    env.close()


def seed_of(task: str, number: int) -> int:
    """Seed modulo 10 says which of MT10's tasks is played."""
    return 10 * number + MT10.index(task)


def frame(env: MetaWorldTask) -> np.ndarray:
    size = env.spec.image_size
    image = np.empty((len(env.spec.cameras), size, size, 3), np.uint8)
    env.render(image)
    return image


@pytest.mark.parametrize("task", ["reach-v3", "drawer-open-v3", "peg-insert-side-v3"])
def test_an_episode_is_the_suites_own_step_by_step(mt10: MetaWorldTask, task: str) -> None:
    import metaworld
    from metaworld.env_dict import ALL_V3_ENVIRONMENTS
    from metaworld.policies import ENV_POLICY_MAP

    mt10.reset(seed_of(task, 3))
    # The suite's way to a start state: a task with a fixed random vector.
    start = {"rand_vec": mt10._env._last_rand_vec, "env_cls": ALL_V3_ENVIRONMENTS[task], "partially_observable": False}
    suite: Any = ALL_V3_ENVIRONMENTS[task]()
    suite.set_task(metaworld._encode_task(task, start))
    obs, _ = suite.reset()
    policy = ENV_POLICY_MAP[task]()
    for step in range(STEPS):
        np.testing.assert_array_equal(mt10._obs, obs)
        if step % 4 == 0:
            frame(mt10)  # looking changes nothing
        action = np.clip(policy.get_action(obs), -1, 1).astype(np.float32)
        np.testing.assert_array_equal(mt10.expert(), action)
        now = mt10.step(action.astype(np.float64))
        obs, reward, _, _, info = suite.step(action)
        assert now.success == bool(info["success"]) and now.truth == np.clip(reward / 10, -1, 1) + now.success
    suite.close()


@pytest.mark.parametrize("task", ["reach-v3", "drawer-close-v3", "button-press-topdown-v3"])
def test_the_expert_solves_the_task(mt10: MetaWorldTask, task: str) -> None:
    for number in range(2):
        mt10.reset(seed_of(task, number))
        assert any(mt10.step(mt10.expert().astype(float)).success for _ in range(150))


def test_equal_seeds_are_one_start_whatever_was_played_before(
    mt10: MetaWorldTask, monkeypatch: pytest.MonkeyPatch
) -> None:
    for task in ("push-v3", "door-open-v3", "peg-insert-side-v3"):
        fresh = make((task,))
        fresh.reset(seed := seed_of(task, 5))
        mt10.reset(seed_of(task, 6))
        for _ in range(3):
            mt10.step(np.array([1.0, -1.0, 1.0, 1.0]))
        assert mt10.fingerprint() != fresh.fingerprint()
        monkeypatch.setattr(MetaWorldTask, "_last_start", None)  # or it would take over the start of the other
        again = mt10.reset(seed)
        assert mt10.fingerprint() == fresh.fingerprint(), task
        assert again.instruction == SENTENCES[task]
        fresh.close()


@pytest.mark.parametrize("task", ["bin-picking-v3", "peg-insert-side-v3", "coffee-button-v3"])
def test_a_member_that_takes_over_a_start_goes_on_as_the_one_that_made_it(
    task: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, taken = (make((task,), observation="full", cameras=(), randomize={"mass": 0.3}) for _ in range(2))
    taken.reset(1)
    for _ in range(3):
        taken.step(np.ones(4))  # its attributes are another episode's
    start = made.reset(2)
    forbidden = functools.partial(pytest.fail, "the suite's reset ran again")
    with monkeypatch.context() as patch:
        patch.setattr(taken._env, "reset_model", forbidden)
        again = taken.reset(2)
    assert taken.fingerprint() == made.fingerprint()
    np.testing.assert_array_equal(again.state, start.state)
    monkeypatch.setattr(MetaWorldTask, "_last_start", None)
    for _ in range(STEPS // 2):
        action = made.expert().astype(float)
        a, b = made.step(action), taken.step(action)
        np.testing.assert_array_equal(a.state, b.state)
        assert (a.truth, a.success) == (b.truth, b.success)
    assert taken.fingerprint() == made.fingerprint()
    other = make((task,), observation="full", cameras=(), randomize={"mass": 0.4}, image_size=16)
    made.reset(2)
    other.reset(2)
    assert other.fingerprint() != made.fingerprint()  # a start is of its model too
    for env in (made, taken, other):
        env.close()


@pytest.mark.parametrize("task", MT10)
def test_a_snapshot_continues_bit_for_bit(mt10: MetaWorldTask, task: str) -> None:
    mt10.reset(seed_of(task, 2))
    for _ in range(15):
        mt10.step(mt10.expert().astype(float))
    saved, before, image = mt10.snapshot(), mt10.fingerprint(), frame(mt10)
    expected = [mt10.step(mt10.expert().astype(float)) for _ in range(STEPS)]
    after = mt10.fingerprint()
    mt10.reset(seed_of(task, 9))
    mt10.restore(saved)
    assert mt10.fingerprint() == before
    np.testing.assert_array_equal(frame(mt10), image)
    for wanted in expected:
        now = mt10.step(mt10.expert().astype(float))
        np.testing.assert_array_equal(now.state, wanted.state)
        assert (now.success, now.truth) == (wanted.success, wanted.truth)
    assert mt10.fingerprint() == after


def test_images_are_the_suites_turned_upright(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MUJOCO_GL", "egl")  # for the suite's renderer
    from gymnasium.envs.mujoco.mujoco_rendering import MujocoRenderer

    env = make(("drawer-open-v3",), fast_render=False, image_size=64, cameras=("corner2", "topview"))
    env.reset(1)
    ours = frame(env)
    for image, camera, turn in zip(ours, ("corner2", "topview"), (True, False), strict=True):
        renderer = MujocoRenderer(env._env.model, env._env.data, width=64, height=64, camera_name=camera)
        theirs = np.asarray(renderer.render("rgb_array"))
        np.testing.assert_array_equal(image, theirs[::-1, ::-1] if turn else theirs)
        renderer.close()
    fast = make(("drawer-open-v3",), image_size=64)
    fast.reset(1)
    difference = np.abs(frame(fast)[0].astype(int) - ours[0])
    assert 0 < difference.mean() < 12  # of 255: shadows are gone
    env.close()


def test_randomisation_is_of_the_seed_and_changes_what_it_names() -> None:
    plain, look = make(("push-v3",)), {"lighting": 0.5, "texture": 0.5, "camera": 0.05}
    random, other = (
        make(("push-v3",), randomize=look),
        make(("push-v3",), randomize=look | {"mass": 0.5, "friction": 0.5}),
    )
    images = []
    for seed in (4, 5, 4):
        plain.reset(seed)
        random.reset(seed)
        images.append(frame(random))
        np.testing.assert_array_equal(random._obs, plain._obs)  # only the look differs
        assert np.abs(frame(plain).astype(int) - images[-1]).mean() > 3
    np.testing.assert_array_equal(images[0], images[2])
    assert not np.array_equal(images[0], images[1])
    other.reset(4)
    for _ in range(30):
        other.step(other.expert().astype(float))
    saved, image = other.snapshot(), frame(other)
    factor = other._env.model.body_mass / np.maximum(plain._env.model.body_mass, 1e-12)
    assert 0.5 <= factor[factor > 0].min() < 0.8 and 1.2 < factor.max() <= 1.5
    other.reset(6)
    other.restore(saved)
    np.testing.assert_array_equal(frame(other), image)
    np.testing.assert_array_equal(other._env.model.body_mass / np.maximum(plain._env.model.body_mass, 1e-12), factor)


def test_the_full_observation_is_the_suites_and_needs_no_camera() -> None:
    env = make(("push-v3",), observation="full", cameras=())
    before = env.reset(3)
    now = env.step(np.array([0.5, 0.5, -0.5, 1.0]))
    suite = env._env
    assert env.spec.state_dim == 39 and now.state.dtype == np.float32
    hand = suite.get_endeff_pos()
    puck = suite.get_body_com("obj")  # metres; push-v3 has one object, and nothing at the second place
    for where, wanted in (
        (slice(0, 3), hand),
        (slice(4, 7), puck),
        (slice(11, 18), 0),
        (slice(36, 39), suite._target_pos),
    ):
        np.testing.assert_allclose(now.state[where], wanted, atol=1e-6)
    np.testing.assert_array_equal(now.state[18:36], before.state[:18])  # an env step ago
    saved = env.snapshot()
    later = env.step(np.ones(4))
    env.restore(saved)
    np.testing.assert_array_equal(env.step(np.ones(4)).state, later.state)
    env.render(np.empty((0, 32, 32, 3), np.uint8))
    env.close()


def test_a_run_from_states_draws_nothing(tmp_path: Path) -> None:
    data = {
        "env": {"type": "metaworld", "observation": "full", "cameras": [], "num_envs": 8, "workers": 1, "chunk": 5},
        "policy": {"type": "mlp", "hidden": [8]},
        "warm_start": {"collect": {"episodes": 8, "max_steps": 10}, "imitate": {"steps": 5, "batch": 16}},
        "reward": {"type": "success"},
        "algorithm": {"group_size": 4, "clip_low": 0.2, "clip_high": 0.2},
        "loop": {"steps": 1, "max_refills": 0, "validation_episodes": 8},
        "evaluate": {"episodes": 8, "clips": 0},
        "out": str(tmp_path / "run"),
    }
    data["env"]["max_steps"] = 10
    config = parse_config(data, source="test")
    said: list[str] = []
    result = align(config, resume=False, overwrite=False, say=said.append)
    assert result["episodes"] == 8 and "collected 8 demonstrations, 80 steps" in said
    assert (config.run_dir / "report.html").exists()


def test_the_rate_is_the_simulators(mt10: MetaWorldTask) -> None:
    assert mt10.spec.fps == round(1 / mt10._env.dt) == 80


def test_the_sentences_cover_the_suite() -> None:
    from metaworld.env_dict import ALL_V3_ENVIRONMENTS, MT10_V3

    assert set(SENTENCES) == set(ALL_V3_ENVIRONMENTS) and len(set(SENTENCES.values())) == 50
    assert tuple(MT10_V3) == MT10 == chosen(["MT10"]) and set(chosen(["reach-v3", "MT50"])) == set(SENTENCES)


def test_mistakes_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"no task 'drawer-opn-v3'; did you mean drawer-open-v3"):
        build_env(MetaWorldConfig(tasks=("drawer-opn-v3",)))
    with pytest.raises(ValueError, match=r"reach-v3 has no camera corner9; it has .*corner2"):
        make(("reach-v3",), cameras=("corner9",))
    with pytest.raises(ValueError, match="600 env steps are too long"):
        build_env(MetaWorldConfig(), max_steps=600)
    with pytest.raises(ValueError, match="lerobot is corner2"):
        MetaWorldConfig(cameras=("corner2", "lerobot"))
    monkeypatch.setitem(sys.modules, "metaworld", None)
    with pytest.raises(ValueError, match=r"pip install 'vla_rlaif\[suites\]'"):
        make()


def test_missing_assets_name_the_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from metaworld import asset_path_utils

    monkeypatch.setattr(asset_path_utils, "ENV_ASSET_DIR_V3", tmp_path)
    with pytest.raises(ValueError, match=r"(?s)cannot load the scene of reach-v3: .*reach_v3.xml.*--force-reinstall"):
        make(("reach-v3",))


def test_demonstrations_are_collected_through_worker_processes() -> None:
    tasks = ("reach-v3", "drawer-close-v3")
    config = MetaWorldConfig(tasks=tasks, num_envs=4, image_size=32, chunk=4, max_steps=88, cameras=("lerobot",))
    env: Any = build_env(config)
    demos = collect_demonstrations(
        env, CollectConfig(episodes=4, noise=0.05, scatter_steps=2, label_noise=0.0, max_steps=80), seed=0
    )
    assert demos.success.all() and demos.action.shape == (4, 80, 4) and demos.images["lerobot"].std() > 10
    assert [demos.instruction.count(SENTENCES[task]) for task in tasks] == [2, 2]
    env.reset(np.array([5, 6, 5, 6]))
    a, b, c, d = env.state_hash()
    assert a == c != b == d
    env.close()
