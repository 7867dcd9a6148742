"""The exactness table of docs/envs.md, measured on each suite through the seam that training uses. With -s it prints

    suite | restore error | equal digests over a group

where the error is the largest difference of any number of the state, over the steps that follow a restore.
"""

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from vla_rlaif.build import build_env
from vla_rlaif.env_config import EnvConfig, GymnasiumConfig, LiberoConfig, MetaWorldConfig, TabletopConfig
from vla_rlaif.rollout import Split, start_seed

pytestmark = pytest.mark.filterwarnings("ignore:pkg_resources", "ignore:Deprecated call to:DeprecationWarning")
NUM_ENVS, CHUNK, STEPS = 3, 4, 24
PLAYED = {"num_envs": NUM_ENVS, "workers": 2, "chunk": CHUNK, "max_steps": 2 * STEPS, "image_size": 32}
TABLETOP = {"task": "pick_place", "num_envs": NUM_ENVS, "max_steps": 2 * STEPS, "image_size": 32, "renderer": "ray"}
LIBERO_PYTHON = os.environ.get("LIBERO_PYTHON")
ALOHA_PYTHON = os.environ.get("ALOHA_PYTHON")
SUITES: dict[str, EnvConfig] = {
    "tabletop": TabletopConfig.model_validate(TABLETOP),
    "tabletop, randomised": TabletopConfig.model_validate(
        TABLETOP | {"randomize": {"lighting": 0.3, "texture": 0.3, "camera": 0.02, "mass": 0.3, "friction": 0.3}}
    ),
    "metaworld": MetaWorldConfig.model_validate(PLAYED | {"tasks": ("pick-place-v3",)}),
    "metaworld, randomised": MetaWorldConfig.model_validate(
        PLAYED | {"tasks": ("push-v3",), "randomize": {"texture": 0.3, "mass": 0.3, "friction": 0.3}}
    ),
    "gymnasium, PushT": GymnasiumConfig.model_validate(
        PLAYED
        | {
            "factory": "vla_rlaif.envs.pusht:make_env",
            "cameras": {"top": "render"},
            "state": ("agent_pos", "environment_state"),
            "instructions": ("push the block onto the target",),
            "image_size": 96,
        }
    ),
    "gymnasium, Pendulum": GymnasiumConfig.model_validate(
        PLAYED
        | {
            "id": "Pendulum-v1",
            "cameras": {"top": "render"},
            "state": ("observation",),
            "success": "terminated",
            "instructions": ("swing the pole up",),
        }
    ),
    "gymnasium, ALOHA": GymnasiumConfig.model_validate(
        PLAYED
        | {
            "interpreter": ALOHA_PYTHON and Path(ALOHA_PYTHON),
            "id": "gym_aloha/AlohaTransferCube-v0",
            "module": "gym_aloha",
            "options": {"obs_type": "pixels_agent_pos"},
            "cameras": {"top": "pixels/top"},
            "state": ("agent_pos",),
            "success": "is_success",
            "seed_bits": 32,
            "instructions": ("hand over the cube",),
        }
    ),
    "libero": LiberoConfig.model_validate(
        PLAYED | {"interpreter": LIBERO_PYTHON and Path(LIBERO_PYTHON), "tasks": (0,)}
    ),
}


def action(env: Any, step: int) -> np.ndarray:
    """The same for every member: what a group of one policy without noise would do."""
    return np.broadcast_to(
        np.random.default_rng(step).uniform(-1, 1, (CHUNK, env.spec.action_dim)),
        (env.num_envs, CHUNK, env.spec.action_dim),
    )


def are_alike(env: Any, now: Any) -> bool:
    """Digests, states and frames of a group."""
    images = all((image == image[:1]).all() for image in now.obs.images.values())
    return len(set(env.state_hash())) == 1 and bool((now.obs.state == now.obs.state[:1]).all()) and images


@pytest.mark.parametrize("suite", SUITES)
def test_a_group_is_equal_and_a_snapshot_continues_exactly(suite: str) -> None:
    if suite == "libero" and LIBERO_PYTHON is None:
        pytest.skip("LIBERO_PYTHON is not set; `make env-libero` sets it")
    if suite == "gymnasium, ALOHA" and ALOHA_PYTHON is None:
        pytest.skip("ALOHA_PYTHON is not set; `make env-aloha` sets it")
    env: Any = build_env(SUITES[suite])
    seed = start_seed(Split.TRAIN, 7)
    now = env.reset(np.full(env.num_envs, seed))
    assert now.valid.all()
    equal = are_alike(env, now)
    for step in range(STEPS // CHUNK):
        now = env.step(action(env, step))
    equal &= are_alike(env, now)
    saved, expected = env.snapshot(0), []
    for step in range(3):
        expected.append((env.step(action(env, 100 + step)), env.state_hash()[0]))
    env.reset(np.arange(env.num_envs))  # a past of its own
    env.step(action(env, 50))
    env.restore(np.arange(1, env.num_envs), saved)
    error, is_same_frame = 0.0, True
    for step, (wanted, digest) in enumerate(expected):
        now = env.step(action(env, 100 + step))
        error = max(error, float(np.abs(now.obs.state[1:] - wanted.obs.state[0]).max()))
        equal &= set(env.state_hash()[1:]) == {digest}
        is_same_frame &= all((now.obs.images[k][1:] == v[0]).all() for k, v in wanted.obs.images.items())
    env.close()
    print(f"{suite} | {'bit-identical' if error == 0 and is_same_frame else error} | {'equal' if equal else 'differ'}")
    assert (error, equal, is_same_frame) == (0.0, True, True)
