"""The reward that configs/octo_small_custom_reward.yaml names agrees with the simulator, which it does not read."""

import dataclasses
from pathlib import Path

import numpy as np
from synthetic import make_episodes

from vla_rlaif.config import load_config
from vla_rlaif.envs.tabletop import Tabletop
from vla_rlaif.reward_models.python import PythonReward

ROOT = Path(__file__).parents[1]


def test_it_ranks_episodes_of_the_expert_by_success(monkeypatch):
    """Half-hearted experts: some arrive, some do not. Measured: the share of (success, failure) pairs ranked right."""
    monkeypatch.syspath_prepend(str(ROOT))
    config = load_config(ROOT / "configs" / "octo_small_custom_reward.yaml")
    assert config.reward.type == "python"
    num, rng = 48, np.random.default_rng(0)
    env = Tabletop("reach", num_envs=num, image_size=64, max_steps=16)
    try:
        after = env.reset(np.arange(num))
        effort = rng.uniform(0, 0.5, (num, 1, 1))
        for _ in range(4):
            after = env.step(np.repeat(env.expert()[:, None], env.spec.chunk, axis=1) * effort)
    finally:
        env.close()
    episodes = make_episodes(num)
    seen = {k: np.repeat(v[:, None], episodes.state.shape[1], axis=1) for k, v in after.obs.images.items()}
    reward = PythonReward(config.reward.function).score(dataclasses.replace(episodes, images=seen))
    good, bad = reward[after.success], reward[~after.success]
    assert min(len(good), len(bad)) > 8
    right = (good[:, None] > bad).mean() + 0.5 * (good[:, None] == bad).mean()
    assert right > 0.8
