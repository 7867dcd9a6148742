"""What ``Tabletop`` promises beyond the ``VectorEnv`` contract: groups, snapshots, experts, gymnasium."""

import dataclasses
import pathlib
from collections.abc import Iterator
from itertools import pairwise

import gymnasium
import mujoco
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

from vla_rlaif.envs.tabletop import Tabletop, rotations
from vla_rlaif.envs.tabletop.gym_env import IDS, register
from vla_rlaif.envs.tabletop.tasks import TASKS, Positions
from vla_rlaif.types import Transition


@pytest.fixture
def env() -> Iterator[Tabletop]:
    env = Tabletop("pick_place", num_envs=4, image_size=16, max_steps=100, renderer="ray")
    env.reset(np.arange(4))
    yield env
    env.close()


def follow_expert(env: Tabletop, num_steps: int) -> Transition:
    for _ in range(num_steps - 1):
        env.step(env.expert()[:, None])
    return env.step(env.expert()[:, None])


@pytest.mark.parametrize("task", TASKS)
def test_the_expert_succeeds(task: str) -> None:
    env = Tabletop(task, num_envs=64, image_size=2, max_steps=100, renderer="ray")
    end = env.reset(np.arange(64))
    while not end.done.all():
        end = env.step(env.expert()[:, None])
    assert end.success.mean() >= 0.95
    np.testing.assert_array_less(1.5, end.truth[end.success])
    assert (end.success ^ end.truncated).all() and end.valid.all()
    env.close()


def test_equal_seeds_are_one_group_in_states_and_images() -> None:
    env = Tabletop("push", num_envs=4, image_size=32)
    start = env.reset(np.array([5, 8, 5, 5]))
    digests = [
        (state, *(image[i].tobytes() for image in start.obs.images.values()))
        for i, state in enumerate(env.state_hash())
    ]
    assert digests[0] == digests[2] == digests[3] != digests[1]
    env.close()


def test_a_start_depends_on_its_own_seed_only() -> None:
    small, large = (Tabletop("push", num_envs=n, image_size=16, renderer="ray") for n in (1, 3))
    small.reset(np.array([7]))
    large.reset(np.array([1, 2, 7]))
    assert small.state_hash()[0] == large.state_hash()[2]


def test_a_snapshot_taken_in_contact_continues_bit_for_bit() -> None:
    env = Tabletop("pick_place", num_envs=4, image_size=16, max_steps=100)
    env.reset(np.arange(4))
    follow_expert(env, 14)
    grasping = int(np.flatnonzero(env.expert()[:, 6] == 1)[0])  # a gripper that closes on its cube
    snapshot = env.snapshot(grasping)
    actions = np.random.default_rng(0).uniform(-1, 1, (6, 3, 7))
    expected = []
    for action in actions:
        after = env.step(np.broadcast_to(action, (4, 3, 7)))
        expected.append((env.state_hash()[grasping], after.obs.images["wrist"][grasping].tobytes()))
    env.close()
    for threads in (1, 2):
        other = Tabletop(
            "pick_place", num_envs=3, image_size=16, max_steps=100, physics_threads=threads, render_threads=threads
        )
        other.reset(np.full(3, 99))
        follow_expert(other, 5)  # a past of its own, which must not leak into the restored future
        other.restore([0, 2], snapshot)
        for action, (state, image) in zip(actions, expected, strict=True):
            after = other.step(np.broadcast_to(action, (3, 3, 7)))
            assert other.state_hash()[0] == other.state_hash()[2] == state
            assert after.obs.images["wrist"][0].tobytes() == after.obs.images["wrist"][2].tobytes() == image
        other.close()


def test_restore_brings_back_what_was_observed(env: Tabletop) -> None:
    before = follow_expert(env, 6)
    snapshot = env.snapshot(1)
    follow_expert(env, 5)
    after = env.restore([1, 3], snapshot)
    for i in (1, 3):
        np.testing.assert_array_equal(after.obs.state[i], before.obs.state[1])
        np.testing.assert_array_equal(after.obs.images["primary"][i], before.obs.images["primary"][1])
        assert after.truth[i] == before.truth[1] and after.obs.instruction[i] == before.obs.instruction[1]


def test_a_snapshot_of_another_task_is_refused(env: Tabletop) -> None:
    with pytest.raises(ValueError, match="The snapshot is of 'push', not 'pick_place'"):
        env.restore([0], dataclasses.replace(env.snapshot(0), task="push"))


def test_finished_members_are_frozen_while_others_go_on() -> None:
    env = Tabletop("reach", num_envs=6, image_size=16, max_steps=100)
    now = env.reset(np.arange(6))
    while not now.done.any():
        now = env.step(env.expert()[:, None])
    assert not now.done.all()
    finished, hashes = now.done, env.state_hash()
    later = env.step(np.ones((6, 2, 7)))
    assert later.success[finished].all() and (later.executed[finished] == 0).all()
    assert (later.executed[~finished] == 2).all()
    for i, (was, now_) in enumerate(zip(hashes, env.state_hash(), strict=True)):
        assert (was == now_) == finished[i]
    for camera, image in later.obs.images.items():
        np.testing.assert_array_equal(image[finished], now.obs.images[camera][finished])
    env.close()


def test_each_decision_draws_the_live_members_once() -> None:
    env = Tabletop("reach", num_envs=3, image_size=16, max_steps=6)
    drawn: list[list[int]] = []
    renderer = env._renderer

    class Counting:
        def __call__(self, states: np.ndarray, images: np.ndarray, ids: np.ndarray) -> None:
            drawn.append(ids.tolist())
            renderer(states, images, ids)

        def close(self) -> None:
            renderer.close()

    env._renderer = Counting()
    env.reset(np.arange(3))
    for _ in range(3):
        env.step(np.zeros((3, 4, 7)))
    assert drawn == [[0, 1, 2], [0, 1, 2], [0, 1, 2]]  # reset, steps 1-4, steps 5-6; nobody is live after that
    assert set(env.seconds) == {"physics", "render"} and min(env.seconds.values()) > 0
    env.close()


def test_a_broken_simulation_is_invalid_and_done(
    env: Tabletop, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # MuJoCo writes a log file there
    start = env.snapshot(2)
    for _ in range(2):  # MuJoCo counts its warnings afresh after each; the second must be noticed too
        env.restore([2], start)
        env._physics.states[2, 1 + 3] = np.nan  # joint 4's angle: the vector begins with the time
        after = env.step(np.zeros((4, 2, 7)))
        assert after.valid.tolist() == [True, True, False, True] == (~after.done).tolist()
        assert after.executed.tolist() == [2, 2, 1, 2]
        assert not after.success.any() and not after.truncated.any()
        assert np.isfinite(after.obs.state).all() and np.isfinite(after.truth).all()
    assert env.reset(np.arange(4)).valid.all()


def test_the_last_chunk_may_be_cut_short() -> None:
    assert Tabletop("reach", num_envs=1, image_size=2, chunk=4, max_steps=10, renderer="ray").spec.max_decisions == 3


def test_truth_is_progress_plus_success() -> None:
    # Reach, 0.4 m to go at reset. At 0.1 m: 1 - 0.1 / 0.4 = 0.75.
    p = Positions(gripper=np.array([[0.0, 0.0, 0.1]]), cube=np.zeros((1, 3)), goal=np.zeros((1, 3)))
    assert TASKS["reach"].distance(p)[0] == pytest.approx(0.1)
    # Push: 0.05 m from cube to goal in the plane, plus 0.3 times 0.2 m from gripper to cube.
    p = Positions(
        gripper=np.array([[0.05, 0, 0.22]]), cube=np.array([[0.05, 0, 0.02]]), goal=np.array([[0.0, 0.0, 0.001]])
    )
    assert TASKS["push"].distance(p)[0] == pytest.approx(0.05 + 0.3 * 0.2)
    env = Tabletop("reach", num_envs=8, image_size=2, max_steps=100, renderer="ray")
    env.reset(np.arange(8))
    initial = env.truth_distance()
    now = follow_expert(env, 3)
    np.testing.assert_allclose(now.truth, 1 - env.truth_distance() / initial + now.success)


def test_placing_needs_a_released_cube_at_rest_on_the_disc() -> None:
    goal = np.zeros((4, 3))
    cube = np.array([[0.02, 0, 0.02], [0.02, 0, 0.02], [0.02, 0, 0.06], [0.04, 0, 0.02]])
    gripper = cube + np.array([[0, 0, 0.1], [0, 0, 0.01], [0, 0, 0.1], [0, 0, 0.1]])
    p = Positions(gripper=gripper, cube=cube, goal=goal)
    assert TASKS["pick_place"].success(p, 0.03).tolist() == [True, False, False, False]
    assert TASKS["push"].success(p, 0.03).tolist() == [True, True, False, False]


def test_rotations_agree_with_mujoco() -> None:
    q = np.random.default_rng(0).normal(size=(200, 4))
    q /= np.linalg.norm(q, axis=-1, keepdims=True)
    for a, b in pairwise(q):
        product, matrix, vector, back = np.empty(4), np.empty(9), np.empty(3), np.empty(4)
        mujoco.mju_mulQuat(product, a, b)
        mujoco.mju_quat2Mat(matrix, a)
        mujoco.mju_quat2Vel(vector, a, 1)
        mujoco.mju_mat2Quat(back, matrix)
        np.testing.assert_allclose(rotations.multiply(a, b), product, atol=1e-12)
        np.testing.assert_allclose(rotations.to_rotvec(a), vector, atol=1e-12)
        ours = rotations.from_matrix(matrix.reshape(1, 3, 3))[0]
        np.testing.assert_allclose(ours * np.sign(ours @ back), back, atol=1e-12)
        same = rotations.from_rotvec(vector)
        np.testing.assert_allclose(same * np.sign(same @ a), a, atol=1e-12)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"task": "juggle"}, "Unknown task 'juggle'; choose one of reach, push, pick_place"),
        ({"num_envs": 0}, "num_envs is 0"),
        ({"max_steps": 0}, "max_steps is 0"),
        ({"render_threads": 0}, "render_threads is 0"),
        ({"success_radius": 0.0}, "success_radius"),
    ],
)
def test_bad_settings_are_refused(change: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Tabletop(**({"task": "push", "num_envs": 1} | change))


def test_gymnasium_accepts_the_registered_environments() -> None:
    register()
    register()  # twice is once
    for env_id in IDS:
        env = gymnasium.make(env_id, image_size=16, max_steps=5, renderer="ray", render_mode="rgb_array")
        check_env(env.unwrapped)
        obs, info = env.reset(seed=3)
        assert info["instruction"] and env.render().shape == (16, 16, 3)  # pyright: ignore
        again, _ = env.reset(seed=3)
        np.testing.assert_array_equal(obs["primary"], again["primary"])
        for _ in range(4):
            env.step(np.zeros(7, np.float32))
        _, reward, terminated, truncated, info = env.step(np.zeros(7, np.float32))
        assert (reward, terminated, truncated, info["success"]) == (0.0, False, True, False)
        env.close()
        env.close()
