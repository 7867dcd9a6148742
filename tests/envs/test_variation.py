"""The tabletop randomised: drawn by the start seed, shared by a group, kept by a snapshot, free when off."""

from collections.abc import Mapping
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env
from gymnasium.vector import AutoresetMode

from vla_rlaif.build import build_env
from vla_rlaif.env_config import TabletopConfig
from vla_rlaif.envs.randomization import KINDS, ModelRandomizer
from vla_rlaif.envs.tabletop import Tabletop
from vla_rlaif.envs.tabletop.gl_canvas import GLCanvas
from vla_rlaif.envs.tabletop.gym_env import register
from vla_rlaif.envs.tabletop.physics import Physics
from vla_rlaif.envs.tabletop.ray_render import RayRenderer
from vla_rlaif.envs.tabletop.scene import CAMERAS, load_model
from vla_rlaif.types import Transition

ALL = {"lighting": 0.5, "texture": 0.5, "camera": 0.03, "mass": 0.5, "friction": 0.5}
SEEDS = np.array([5, 8, 5, 5])


def make(randomize: Mapping[str, float], num_envs: int = 4, renderer: str = "ray", **change: Any) -> Tabletop:
    return Tabletop(
        "push",
        num_envs=num_envs,
        image_size=32,
        max_steps=100,
        renderer=renderer,
        randomize=randomize,
        **({"physics_threads": 1, "render_threads": 1} | change),
    )


def follow_expert(env: Tabletop, num_steps: int) -> Transition:
    for _ in range(num_steps - 1):
        env.step(env.expert()[:, None])
    return env.step(env.expert()[:, None])


@pytest.mark.parametrize("renderer", ["ray", "egl"])
def test_members_of_a_group_share_model_state_and_images(renderer: str) -> None:
    env = make(ALL, renderer=renderer)
    now = env.reset(SEEDS)
    for _ in range(2):
        a, b, c, d = env.state_hash()
        assert a == c == d != b
        for image in now.obs.images.values():
            np.testing.assert_array_equal(image[0], image[2])
            np.testing.assert_array_equal(image[0], image[3])
        now = follow_expert(env, 12)
    assert now.valid.all()
    env.close()


def test_each_kind_changes_what_it_names_and_nothing_else() -> None:
    plain = make({})
    start = plain.reset(SEEDS)
    touched = follow_expert(plain, 14)
    for kind in KINDS:
        env = make({kind: 0.05 if kind == "camera" else 0.5})
        first = env.reset(SEEDS)
        last = follow_expert(env, 14)
        np.testing.assert_array_equal(first.obs.state, start.obs.state)
        is_seen = any((first.obs.images[c] != start.obs.images[c]).any() for c in CAMERAS)
        is_felt = bool((last.obs.state != touched.obs.state).any() or (last.truth != touched.truth).any())
        assert (is_seen, is_felt) == (kind in ("lighting", "texture", "camera"), kind in ("mass", "friction")), kind
        assert (env.state_hash()[0] != plain.state_hash()[0]) and env.state_hash()[0] == env.state_hash()[2]
        env.close()
    plain.close()


def test_a_member_is_felt_and_seen_as_an_ordinary_model_with_its_draws() -> None:
    seed = int(SEEDS[1])
    model = load_model(32)
    ModelRandomizer(model, ALL).apply(seed)
    heavier = model.body_mass / np.maximum(load_model(32).body_mass, 1e-12)
    assert 0.5 <= heavier[heavier > 0].min() < 0.8 and 1.2 < heavier.max() <= 1.5
    canvas, image = GLCanvas(model, CAMERAS, 32, "egl"), np.empty((len(CAMERAS), 32, 32, 3), np.uint8)
    alone = Physics(model, num_envs=1, num_threads=1)
    env = make(ALL, renderer="egl")
    env.reset(SEEDS)
    alone.states[0] = env._physics.states[1]
    alone.refresh(np.array([0]))
    for _ in range(14):
        action = env.expert()
        now = env.step(action[:, None])
        alone.advance(np.array([0]), action[1:2].astype(np.float64))
        np.testing.assert_array_equal(alone.states[0], env._physics.states[1])
        canvas.draw(alone.states[0], image)
        for k, camera in enumerate(CAMERAS):
            np.testing.assert_array_equal(image[k], now.obs.images[camera][1])
    canvas.free()
    env.close()


def test_both_renderers_show_the_same_scene() -> None:
    images = []
    for renderer in ("egl", "ray"):
        env = make(ALL, renderer=renderer)
        images.append(env.reset(SEEDS).obs.images)
        env.close()
    for camera in CAMERAS:
        egl, ray = images[0][camera].astype(int), images[1][camera].astype(int)
        assert np.corrcoef(egl.ravel(), ray.ravel())[0, 1] > 0.94
        assert np.abs(egl.mean(axis=(1, 2)) - ray.mean(axis=(1, 2))).max() < 8  # of 255, each channel of each member


@pytest.mark.parametrize("renderer", ["ray", "egl"])
def test_a_snapshot_brings_its_model_back(renderer: str) -> None:
    env = make(ALL, renderer=renderer)
    env.reset(SEEDS)
    follow_expert(env, 12)
    snapshot = env.snapshot(1)
    actions = np.random.default_rng(0).uniform(-1, 1, (4, 3, 7))
    expected = [env.step(np.broadcast_to(action, (4, 3, 7))) for action in actions][-1]
    digest = env.state_hash()[1]
    env.close()
    other = make(ALL, num_envs=3, renderer=renderer, physics_threads=2, render_threads=2)
    other.reset(np.array([1, 2, 3]))
    follow_expert(other, 5)  # a past of its own
    other.restore([0, 2], snapshot)
    now = [other.step(np.broadcast_to(action, (3, 3, 7))) for action in actions][-1]
    assert other.state_hash()[0] == other.state_hash()[2] == digest != other.state_hash()[1]
    for camera, image in expected.obs.images.items():
        np.testing.assert_array_equal(now.obs.images[camera][0], image[1])
        np.testing.assert_array_equal(now.obs.images[camera][2], image[1])
    other.close()


def test_without_strengths_the_model_is_shared_and_the_play_is_the_same_bits() -> None:
    plain, zero = make({}), make(dict.fromkeys(KINDS, 0.0))
    for env in (plain, zero):
        assert not env._variation.looks and not env._physics._batch._expanded
    a, b = plain.reset(SEEDS), zero.reset(SEEDS)
    np.testing.assert_array_equal(a.obs.images["primary"], b.obs.images["primary"])
    assert plain.state_hash() == zero.state_hash()


@pytest.mark.parametrize("strength", [{"lights": 0.1}, {"mass": -0.1}])
def test_unknown_kinds_and_negative_strengths_are_named(strength: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=r"randomize has .*kinds are lighting, texture, camera, mass, friction"):
        make(strength)


def test_a_config_and_its_envs_randomise() -> None:
    config = TabletopConfig.model_validate(
        {"num_envs": 4, "image_size": 32, "renderer": "ray", "randomize": {"mass": 0.2, "camera": 0.02}}
    )
    env: Any = build_env(config)
    direct = make({"mass": 0.2, "camera": 0.02})
    ours = env.reset(SEEDS).obs.images["wrist"]
    assert not np.array_equal(ours[0], ours[1])
    assert sorted(env._variation.looks) == sorted(direct._variation.looks) == ["cam_pos", "cam_quat"]
    assert set(env._physics._batch._expanded) >= {"body_mass", "body_inertia"}
    with pytest.raises(ValueError, match="less than or equal to 1"):
        TabletopConfig.model_validate({"randomize": {"lighting": 1.5}})


def test_gymnasium_envs_take_it() -> None:
    register()
    settings: dict[str, Any] = {"image_size": 16, "max_steps": 4, "renderer": "ray", "randomize": ALL}
    check_env(gymnasium.make("VlaRlaif/Push-v0", **settings).unwrapped)
    vector: Any = gymnasium.make_vec(
        "VlaRlaif/Push-v0", num_envs=2, vectorization_mode="vector_entry_point", **settings
    )
    single: Any = gymnasium.make_vec(
        "VlaRlaif/Push-v0",
        num_envs=2,
        vectorization_mode="sync",
        vector_kwargs={"autoreset_mode": AutoresetMode.DISABLED},
        **settings,
    )
    (ours, _), (theirs, _) = (env.reset(seed=[7, 8]) for env in (vector, single))
    actions = np.random.default_rng(0).uniform(-1, 1, (2, 2, 7)).astype(np.float32)
    for action in actions:
        for key, value in ours.items():
            np.testing.assert_array_equal(value, theirs[key])
        ours, theirs = vector.step(action)[0], single.step(action)[0]
    again, _ = vector.reset(seed=[9, 8], options={"reset_mask": np.array([False, True])})  # member 0 goes on
    np.testing.assert_array_equal(again["primary"][0], ours["primary"][0])
    vector.close()
    single.close()


def test_the_ray_renderer_draws_blocks_of_members_in_their_own_looks() -> None:
    env = make(ALL, num_envs=10)  # more than are traced together
    images = env.reset(np.arange(10)).obs.images["primary"]
    few = make(ALL, num_envs=1)
    np.testing.assert_array_equal(few.reset(np.array([9])).obs.images["primary"][0], images[9])
    assert isinstance(env._renderer, RayRenderer)
