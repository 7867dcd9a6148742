"""In an audited run nothing that only a simulator knows comes into the reward; what would is named."""

import dataclasses
import json

import numpy as np
import pytest
from synthetic import make_episodes

from vla_rlaif.audit import privileged_terms
from vla_rlaif.config import RunConfig, parse_config
from vla_rlaif.manifest import manifest
from vla_rlaif.reward_config import OracleRewardConfig, PixelDistanceConfig, SuccessRewardConfig, VLMJudgeRewardConfig
from vla_rlaif.reward_models.oracle import OracleReward
from vla_rlaif.reward_models.pixel_distance import PixelDistance
from vla_rlaif.reward_models.preference import PreferenceReward
from vla_rlaif.reward_models.python import PythonReward
from vla_rlaif.reward_models.success import SuccessReward
from vla_rlaif.reward_models.vlm_judge import VLMJudgeReward
from vla_rlaif.reward_terms_config import LeRobotRewardConfig, RobometerRewardConfig
from vla_rlaif.seen import SeenEpisodes

VLM = {"type": "vlm", "backend": {"type": "openai", "model": "m"}}
PYTHON = {"type": "python", "function": "a:b"}
BLIND = {**PYTHON, "blind": True}


def parse(reward: dict, **sections) -> RunConfig:
    base = {"env": {"type": "point_reach", "num_envs": 64}, "policy": {"type": "gaussian"}, "audited": True}
    base |= {"algorithm": {"group_size": 16, "clip_low": 0.2, "clip_high": 0.2}}
    return parse_config({**base, "reward": reward, **sections}, source="test")


@pytest.mark.parametrize(
    ("reward", "named"),
    [
        ({"type": "success"}, r"reward \(success\) reads the simulator's success"),
        ({"type": "oracle"}, r"reward \(oracle\) reads the simulator's"),
        (PYTHON, r"reward \(python, a:b\) may read the truth; set blind: true"),
        ({"type": "preference"}, r"reward.labeller \(oracle\) reads the simulator's return"),
        ({"type": "preference", "labeller": PYTHON}, r"reward.labeller \(python, a:b\) may read the truth"),
        (
            {"type": "composite", "terms": [{"reward": {"type": "pixel_distance"}}, {"reward": {"type": "success"}}]},
            r"reward.terms\[1\].reward \(success\)",
        ),
    ],
)
def test_what_is_privileged_is_refused_by_name(reward, named):
    with pytest.raises(ValueError, match=f"declared audited, but {named}"):
        parse(reward)
    assert privileged_terms(parse(reward, audited=False).reward)


@pytest.mark.parametrize(
    "reward",
    [
        {"type": "pixel_distance"},
        BLIND,
        {"type": "preference", "labeller": VLM},
        {"type": "preference", "labeller": {"type": "human"}},
        {"type": "preference", "labeller": BLIND},
        {"type": "robometer"},
        {"type": "lerobot", "folder": "x"},
        {"type": "vlm_judge", "backend": {"type": "openai", "model": "m"}},
        {
            "type": "composite",
            "terms": [{"reward": {"type": "pixel_distance"}}, {"weight": 0, "reward": {"type": "success"}}],
        },
    ],
)
def test_what_a_person_could_see_is_allowed_and_a_term_of_weight_0_is_only_measured(reward):
    config = parse(reward)
    written = json.loads(json.dumps(manifest(config)))
    assert (written["audited"], written["privileged"]) == (True, [])


def test_configs_say_of_themselves_what_the_rewards_say():
    pairs = [
        (SuccessRewardConfig, SuccessReward),
        (OracleRewardConfig, OracleReward),
        (PixelDistanceConfig, PixelDistance),
        (VLMJudgeRewardConfig, VLMJudgeReward),
    ]
    for config, reward in pairs:
        assert (config.privileged is not None) == reward.privileged, config
    assert not PreferenceReward.privileged and PythonReward.privileged
    assert RobometerRewardConfig.privileged is None and LeRobotRewardConfig.privileged is None


def test_a_blind_function_cannot_read_the_truth(monkeypatch, tmp_path):
    code = "def peeks(e): return e.truth\ndef looks(e): return e.state[:, -1, 0] + e.num_decisions\n"
    (tmp_path / "blind_rewards.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    episodes = make_episodes(4)
    np.testing.assert_allclose(
        PythonReward("blind_rewards:looks", blind=True).score(episodes), episodes.state[:, -1, 0] + 4, rtol=1e-6
    )
    assert np.isfinite(PythonReward("blind_rewards:peeks").score(episodes)).all()
    with pytest.raises(AttributeError, match="'SeenEpisodes' object has no attribute 'truth'"):
        PythonReward("blind_rewards:peeks", blind=True).score(episodes)
    assert not {"success", "truth", "starts"} & {field.name for field in dataclasses.fields(SeenEpisodes)}
