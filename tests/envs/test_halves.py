"""Two envs as one. How ``rollout`` plays them is in tests/test_rollout.py, the contract in test_contract.py."""

from typing import Any

import numpy as np
import pytest

from vla_rlaif.build import build_env
from vla_rlaif.env_config import TabletopConfig
from vla_rlaif.envs.halves import Halves
from vla_rlaif.envs.tabletop import Tabletop

WHOLE = TabletopConfig(task="push", num_envs=4, image_size=16, chunk=2, max_steps=6, renderer="ray", threads=1)


def test_the_config_makes_halves_that_are_one_env_to_everybody_else() -> None:
    halves: Any = build_env(WHOLE.model_copy(update={"double_buffer": True}))
    whole: Any = build_env(WHOLE)
    assert isinstance(halves, Halves) and [env.num_envs for env in halves.halves] == [2, 2]
    assert halves.num_envs == 4 and halves.spec == whole.spec
    seeds, action = np.array([8, 8, 9, 8]), np.random.default_rng(0).uniform(-1, 1, (4, 2, 7))
    for env in (halves, whole):
        env.reset(seeds)
    np.testing.assert_array_equal(halves.expert(), whole.expert())
    assert halves.state_hash() == whole.state_hash()
    for env in (halves, whole):
        env.step(action)
    a, b = (env.restore([0, 3], env.snapshot(2)) for env in (halves, whole))
    np.testing.assert_array_equal(a.obs.images["wrist"], b.obs.images["wrist"])
    assert a.obs.instruction == b.obs.instruction and halves.state_hash() == whole.state_hash()
    assert len(set(halves.state_hash())) == 2
    action[3, 1, 2] = np.nan
    with pytest.raises(ValueError, match=r"live members \[3\] are not finite"):
        halves.step(action)
    for env in (halves, whole):
        env.close()


def test_demonstrations_need_no_halves() -> None:
    env = build_env(WHOLE.model_copy(update={"double_buffer": True, "num_envs": 3}), max_steps=20)
    assert isinstance(env, Tabletop) and env.num_envs == 3
    env.close()
