"""Any gymnasium env by a mapping of keys: PushT, an env of the test's own, and every mistake in the mapping."""

import sys
import time
from typing import Any

import gymnasium
import numpy as np
import pytest

from vla_rlaif.build import build_env
from vla_rlaif.env_config import GymnasiumConfig
from vla_rlaif.envs.gymnasium_env import GymnasiumTask, _short
from vla_rlaif.rollout import Split, start_seed

# pygame, which gym-pusht draws with, imports what setuptools is about to drop.
pytestmark = pytest.mark.filterwarnings("ignore:pkg_resources", "ignore:Deprecated call to:DeprecationWarning")
PUSHT = {
    "factory": "vla_rlaif.envs.pusht:make_env",
    "cameras": {"top": "render"},
    "state": ["agent_pos"],
    "progress": "coverage",
    "instructions": ["push the block onto the target"],
}
NESTED = {
    "factory": f"{__name__}:Nested",
    "cameras": {"front": "pixels/front"},
    "state": ["joints", "hand/grip"],
    "success": "terminated",
    "progress": "reward",
    "instructions": ["lift", "lower"],
    "instruction_key": "task",
}


class Nested(gymnasium.Env):
    """Observations in dicts of dicts, actions in [0, 10] x [-2, 2]; the upper bound of both terminates."""

    def __init__(self, bounded: bool = True, render_mode: str | None = None) -> None:
        high = np.array([10, 2 if bounded else np.inf], np.float32)
        self.action_space = gymnasium.spaces.Box(np.array([0, -2], np.float32), high)
        self.last = np.zeros(2)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None):
        super().reset(seed=seed)
        self.level = float(self.np_random.uniform())
        return self.observe(), {"task": "lift" if self.level > 0.5 else "lower"}

    def step(self, action: np.ndarray):
        self.last = action
        self.level += 0.01 * float(action[1])
        return self.observe(), 0.25, bool((action == [10, 2]).all()), False, {}

    def observe(self) -> dict[str, Any]:
        picture = np.full((40, 20, 3), 100, np.uint8)
        return {
            "pixels": {"front": picture, "depth": picture[..., 0]},
            "joints": np.array([self.level, 1.0]),
            "hand": {"grip": np.array([0.5])},
        }


def make(settings: dict, **change: Any) -> GymnasiumTask:
    config = GymnasiumConfig.model_validate(settings | change)
    names = ("id", "factory", "module", "options", "cameras", "state", "success", "progress", "instructions")
    chosen = {name: getattr(config, name) for name in (*names, "instruction_key", "seed_bits", "fps")}
    return GymnasiumTask(**chosen, image_size=change.get("image_size", 96))


def frame(env: GymnasiumTask) -> np.ndarray:
    size = env.spec.image_size
    image = np.empty((1, size, size, 3), np.uint8)
    env.render(image)
    return image[0]


def test_keys_are_mapped_and_actions_scaled() -> None:
    env = make(NESTED, image_size=16)
    assert (env.spec.cameras, env.spec.state_dim, env.spec.action_dim) == (("front",), 3, 2)
    start = env.reset(3)
    level = np.random.default_rng(3).uniform()  # how gymnasium seeds its generators
    np.testing.assert_allclose(start.state, [level, 1.0, 0.5], rtol=1e-6)
    assert start.instruction == ("lift" if level > 0.5 else "lower") and start.truth == 0
    now = env.step(np.array([-1.0, 0.5]))
    inner: Any = env._env
    np.testing.assert_array_equal(inner.last, np.array([0, 1], np.float32))
    assert (now.success, now.ended, now.truth) == (False, False, 0.25)
    end = env.step(np.array([1.0, 1.0]))
    assert (end.success, end.ended, end.truth) == (True, False, 1.25)
    assert (frame(env) == 100).all()  # 40 x 20 pixels became 16 x 16


def test_an_env_of_states_alone_needs_no_camera() -> None:
    config = GymnasiumConfig(
        id="Pendulum-v1",
        cameras={},
        state=("observation",),
        success="terminated",
        instructions=("swing the pole up",),
        num_envs=2,
        workers=1,
        chunk=2,
        max_steps=4,
    )
    env = build_env(config)
    start = env.reset(np.array([1, 1]))
    now = env.step(np.array([[[0.5], [0.5]], [[0.5], [-0.5]]]))
    env.close()
    assert env.spec.cameras == () and not start.obs.images and not now.obs.images
    np.testing.assert_allclose(np.hypot(*start.obs.state[:, :2].T), 1, rtol=1e-6)  # cosine and sine of the angle
    assert now.executed.tolist() == [2, 2] and (now.obs.state[0] != now.obs.state[1]).any()


def test_a_rate_is_the_envs_own_or_the_configs() -> None:
    pendulum = {
        "id": "Pendulum-v1",
        "cameras": {"top": "render"},
        "state": ["observation"],
        "success": "terminated",
        "instructions": ["swing the pole up"],
    }
    env, right = make(pendulum), make(pendulum, fps=20)
    inner: Any = env._env.unwrapped
    assert (env.spec.fps, round(1 / inner.dt), right.spec.fps) == (30, 20, 20)  # its videos are faster than it is
    env.close()
    right.close()


def test_short_seeds_keep_the_splits_apart() -> None:
    short = {split: {_short(start_seed(split, i)) for i in range(200)} for split in Split}
    assert len(set().union(*short.values())) == 200 * len(Split) and max(map(max, short.values())) < 2**32


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            NESTED | {"cameras": {"front": "pixels/frnt"}},
            r"maps 'front' to 'pixels/frnt', but .*pixels/front uint8\[40",
        ),
        (NESTED | {"cameras": {"front": "pixels/depth"}}, r"which is uint8\[40, 20\]; an image is uint8\[height"),
        (NESTED | {"state": ["hand"]}, r"names 'hand', but the vectors .*hand/grip float64\[1\]"),
        (NESTED | {"success": "won"}, r"success is 'won', but .* has in info nothing; or say terminated"),
        (NESTED | {"progress": "won"}, r"progress is 'won'.*or say reward"),
        (NESTED | {"instruction_key": "goal"}, r"instruction_key is 'goal', but info after reset has task"),
        (NESTED | {"options": {"colour": 1}}, r"does not take env.options .*colour"),
        (NESTED | {"options": {"bounded": False}}, r"unbounded actions.*RescaleAction"),
        (
            PUSHT | {"factory": None, "id": "gym_pusht/PushT-v9", "module": "gym_pusht"},
            r"did you mean gym_pusht/PushT-v0",
        ),
        (PUSHT | {"factory": None, "id": "Nothing/Here-v0"}, r"knows no env 'Nothing/Here-v0'; env.module must name"),
        (PUSHT | {"factory": None, "id": "CartPole-v1"}, r"action space Discrete\(2\)"),
        (PUSHT | {"module": "gym_nowhere.envs"}, r"needs the package gym_nowhere: pip install gym-nowhere"),
    ],
)
def test_mistakes_name_both_sides(settings: dict, message: str) -> None:
    begun = time.monotonic()
    with pytest.raises(ValueError, match=f"(?s){message}"):
        make(settings)
    assert time.monotonic() - begun < 3


def test_a_missing_suite_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gym_pusht", None)
    with pytest.raises(ValueError, match=r"needs the package gym_pusht: pip install 'vla_rlaif\[suites\]'"):
        make(PUSHT)


def test_pusht_draws_what_the_suite_observes_and_moves_as_it_does() -> None:
    import gym_pusht  # noqa: F401 (registers the id)

    suite = gymnasium.make("gym_pusht/PushT-v0", obs_type="pixels_agent_pos", disable_env_checker=True)
    env = make(PUSHT)
    assert env.spec.fps == suite.unwrapped.control_hz == 10  # pyright: ignore[reportAttributeAccessIssue] (PushTEnv's)
    obs, _ = suite.reset(seed=7)
    start = env.reset(7)
    rng = np.random.default_rng(0)
    for _ in range(8):
        np.testing.assert_array_equal(frame(env), obs["pixels"])
        np.testing.assert_array_equal(start.state, obs["agent_pos"].astype(np.float32))
        target = rng.uniform(100, 400, 2).astype(np.float32)
        obs, _, terminated, _, info = suite.step(target)
        start = env.step(target.astype(float) / 256 - 1)
        assert start.success == terminated and abs(start.truth - info["coverage"]) < 1e-6
    env.close()
    suite.close()


def test_pusht_groups_restart_and_continue_exactly() -> None:
    config = PUSHT | {"type": "gymnasium", "num_envs": 4, "workers": 2, "image_size": 96, "chunk": 5, "max_steps": 20}
    env: Any = build_env(GymnasiumConfig.model_validate(config))
    seed = start_seed(Split.TRAIN, 1)
    start = env.reset(np.array([seed, seed, 2, seed]))
    a, b, c, d = env.state_hash()
    assert a == b == d != c  # members in one worker and in another
    np.testing.assert_array_equal(start.obs.images["top"][0], start.obs.images["top"][3])
    action = np.random.default_rng(0).uniform(-1, 1, (4, 5, 2))
    env.step(action)
    saved = env.snapshot(0)
    expected = env.step(action)
    env.reset(np.arange(4))
    env.restore([1, 3], saved)
    now = env.step(np.repeat(action[:1], 4, axis=0))
    for member in (1, 3):
        np.testing.assert_array_equal(now.obs.state[member], expected.obs.state[0])
        np.testing.assert_array_equal(now.obs.images["top"][member], expected.obs.images["top"][0])
        assert now.truth[member] == expected.truth[0]
    env.close()


def test_a_mistake_reaches_the_driver_as_its_own_message() -> None:
    config = GymnasiumConfig.model_validate(PUSHT | {"cameras": {"top": "pixels"}, "num_envs": 2})
    with pytest.raises(ValueError, match=r"maps 'top' to 'pixels', but .*agent_pos float64\[2\]"):
        build_env(config)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"id": "a"}, "name an id or a factory, one of them"),
        ({"instructions": ["a", "b"]}, "2 instructions need instruction_key"),
        ({"state": []}, "must not be empty"),
        ({"max_steps": 10, "chunk": 4}, "10 is not a multiple of chunk 4"),
        ({"interpreter_path": ["x"]}, "for another interpreter"),
    ],
)
def test_configs_that_make_no_sense_are_refused(change: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GymnasiumConfig.model_validate(PUSHT | change)
