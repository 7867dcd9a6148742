"""What every ``VectorEnv`` promises, checked on each of ours."""

from collections.abc import Callable, Iterator

import numpy as np
import pytest

from vla_rlaif.dist.remote_env import start_remote_env
from vla_rlaif.dist.thread_cluster import ThreadCluster
from vla_rlaif.env_config import TabletopConfig
from vla_rlaif.envs.halves import Halves
from vla_rlaif.envs.point_reach import PointReach
from vla_rlaif.envs.processes import ProcessVectorEnv
from vla_rlaif.envs.tabletop import Tabletop
from vla_rlaif.envs.worker_process import WorkerSpec
from vla_rlaif.interfaces import VectorEnv
from vla_rlaif.types import Transition

NUM_ENVS = 3


def make_point_reach() -> VectorEnv:
    return PointReach(NUM_ENVS, chunk=2, max_decisions=3)


def make_tabletop(task: str, renderer: str) -> VectorEnv:
    return Tabletop(task, num_envs=NUM_ENVS, image_size=16, chunk=2, max_steps=6, renderer=renderer, render_threads=1)


def make_toys(num_envs: int) -> ProcessVectorEnv:
    worker = WorkerSpec(factory="toy_env:Toy", options={}, interpreter=None, extra_path=(), renderer="egl", max_steps=6)
    return ProcessVectorEnv(worker, num_envs=num_envs, num_workers=2, chunk=2)


def make_remote() -> VectorEnv:
    config = TabletopConfig(task="push", num_envs=NUM_ENVS, image_size=16, chunk=2, max_steps=6, renderer="ray")
    return start_remote_env(ThreadCluster(), config, num_workers=2, timeout_s=60.0)


MAKERS: dict[str, Callable[[], VectorEnv]] = {
    "point_reach": make_point_reach,
    "processes": lambda: make_toys(NUM_ENVS),
    "remote": make_remote,
    "halves": lambda: Halves(make_toys(1), make_toys(NUM_ENVS - 1)),
    **{
        f"{task}-{renderer}": lambda task=task, renderer=renderer: make_tabletop(task, renderer)
        for task in ("reach", "push", "pick_place")
        for renderer in ("ray", "egl")
    },
}


@pytest.fixture(params=MAKERS, scope="module")  # shared: an OpenGL context takes a quarter of a second
def env(request: pytest.FixtureRequest) -> Iterator[VectorEnv]:
    env = MAKERS[request.param]()
    yield env
    env.close()


def random_action(env: VectorEnv, chunk: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).uniform(-1, 1, (env.num_envs, chunk, env.spec.action_dim))


def assert_equal(a: Transition, b: Transition) -> None:
    for camera, image in a.obs.images.items():
        np.testing.assert_array_equal(image, b.obs.images[camera])
    np.testing.assert_array_equal(a.obs.state, b.obs.state)
    assert a.obs.instruction == b.obs.instruction
    for field in ("done", "truncated", "success", "truth", "executed", "valid"):
        np.testing.assert_array_equal(getattr(a, field), getattr(b, field))


def test_it_is_a_vector_env_whose_observations_fit_its_spec(env: VectorEnv) -> None:
    assert isinstance(env, VectorEnv)
    spec, n = env.spec, env.num_envs
    assert (n, spec.chunk, spec.max_decisions) == (NUM_ENVS, 2, 3)  # 6 steps
    obs = env.reset(np.arange(n)).obs
    assert tuple(obs.images) == spec.cameras
    for image in obs.images.values():
        assert image.shape == (n, spec.image_size, spec.image_size, 3) and image.dtype == np.uint8
        assert image.std() > 0
    assert obs.state.shape == (n, spec.state_dim) and obs.state.dtype == np.float32
    assert len(obs.instruction) == n and set(obs.instruction) <= set(spec.instructions)


def test_reset_reports_a_fresh_episode(env: VectorEnv) -> None:
    start = env.reset(np.arange(NUM_ENVS))
    assert not start.done.any() and not start.success.any() and not start.truncated.any() and start.valid.all()
    np.testing.assert_array_equal(start.executed, 0)
    np.testing.assert_allclose(start.truth, 0, atol=1e-12)


def test_equal_seeds_and_actions_give_equal_episodes(env: VectorEnv) -> None:
    first = [env.reset(np.arange(NUM_ENVS)), env.step(random_action(env, 2)), env.step(random_action(env, 2, 1))]
    again = [env.reset(np.arange(NUM_ENVS)), env.step(random_action(env, 2)), env.step(random_action(env, 2, 1))]
    for a, b in zip(first, again, strict=True):
        assert_equal(a, b)


def test_members_with_one_seed_are_identical(env: VectorEnv) -> None:
    env.reset(np.full(NUM_ENVS, 9))
    after = env.step(np.repeat(random_action(env, 3)[:1], NUM_ENVS, axis=0))
    for i in range(1, NUM_ENVS):
        np.testing.assert_array_equal(after.obs.state[0], after.obs.state[i])
        for image in after.obs.images.values():
            np.testing.assert_array_equal(image[0], image[i])


def test_different_seeds_give_different_starts(env: VectorEnv) -> None:
    image = env.reset(np.arange(NUM_ENVS)).obs.images[env.spec.cameras[0]]
    assert not np.array_equal(image[0], image[1])


def test_episodes_end_at_the_step_limit_and_stay_frozen(env: VectorEnv) -> None:
    env.reset(np.arange(NUM_ENVS))
    action = np.zeros((NUM_ENVS, 5, env.spec.action_dim))  # standing still solves nothing
    middle = env.step(action)
    assert middle.executed.tolist() == [5] * NUM_ENVS and not middle.done.any()
    end = env.step(action)
    assert end.executed.tolist() == [1] * NUM_ENVS  # the sixth step; the rest of the chunk is skipped
    assert end.done.all() and end.truncated.all() and not end.success.any()
    later = env.step(np.full_like(action, np.nan))  # finished members ignore actions, even broken ones
    np.testing.assert_array_equal(later.executed, 0)
    np.testing.assert_array_equal(later.obs.state, end.obs.state)
    np.testing.assert_array_equal(later.truth, end.truth)


def test_a_chunk_equals_its_actions_one_by_one(env: VectorEnv) -> None:
    actions = random_action(env, 4)
    env.reset(np.arange(NUM_ENVS))
    whole = env.step(actions)
    env.reset(np.arange(NUM_ENVS))
    single = [env.step(actions[:, h : h + 1]) for h in range(4)][-1]
    np.testing.assert_array_equal(whole.obs.state, single.obs.state)
    np.testing.assert_array_equal(whole.truth, single.truth)
    for camera, image in whole.obs.images.items():
        np.testing.assert_array_equal(image, single.obs.images[camera])


def test_actions_are_clipped(env: VectorEnv) -> None:
    env.reset(np.arange(NUM_ENVS))
    wild = env.step(7 * np.ones((NUM_ENVS, 1, env.spec.action_dim)))
    env.reset(np.arange(NUM_ENVS))
    assert_equal(wild, env.step(np.ones((NUM_ENVS, 1, env.spec.action_dim))))


def test_what_it_returned_does_not_change_later(env: VectorEnv) -> None:
    start = env.reset(np.arange(NUM_ENVS))
    camera = env.spec.cameras[0]
    image, state, done = start.obs.images[camera].copy(), start.obs.state.copy(), start.done.copy()
    for _ in range(3):
        env.step(np.ones((NUM_ENVS, 2, env.spec.action_dim)))
    np.testing.assert_array_equal(start.obs.images[camera], image)
    np.testing.assert_array_equal(start.obs.state, state)
    np.testing.assert_array_equal(start.done, done)


def test_bad_inputs_are_named(env: VectorEnv) -> None:
    with pytest.raises(ValueError, match="seeds"):
        env.reset(np.arange(NUM_ENVS + 1))
    with pytest.raises(ValueError, match="negative"):
        env.reset(np.array([0, -1, 2]))
    env.reset(np.arange(NUM_ENVS))
    action = random_action(env, 2)
    with pytest.raises(ValueError, match="shape"):
        env.step(action[:, :0])
    action[1, 1, 0] = np.nan
    with pytest.raises(ValueError, match=r"members \[1\] are not finite"):
        env.step(action)


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_stepping_needs_a_reset_and_close_may_be_called_twice(make: Callable[[], VectorEnv]) -> None:
    env = make()
    with pytest.raises(ValueError, match="reset before step"):
        env.step(random_action(env, 2))
    env.close()
    env.close()
