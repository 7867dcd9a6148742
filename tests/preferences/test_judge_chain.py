"""The chain that nobody is told the truth in: a small VLM is taught to rate clips, its labels teach a reward, GRPO
follows the reward. Only the teaching sees the simulator's progress, on start states of its own."""

from pathlib import Path

import numpy as np
import pytest

from vla_rlaif.build import build_env, build_policy
from vla_rlaif.build_labeller import build_labeller
from vla_rlaif.config import RunConfig, parse_config
from vla_rlaif.preferences.labelling import ask
from vla_rlaif.preferences.oracle import OracleLabeller
from vla_rlaif.preferences.store import PreferenceStore
from vla_rlaif.preferences.tiny_judge import Lessons, RatingLesson, teach, write_tiny_judge
from vla_rlaif.reward_config import PreferenceRewardConfig
from vla_rlaif.rollout import Split, rollout, train_starts
from vla_rlaif.run import align
from vla_rlaif.token_config import TinyVLMConfig
from vla_rlaif.types import Episodes

GROUP = 8
JUDGE = TinyVLMConfig(
    family="qwen3_vl", hidden_dim=64, num_layers=2, mlp_dim=128, vision_dim=64, vision_layers=2, patch_size=4
)
PROMPT = "Clip: {clip} Task: {instruction} The rating is:"  # shorter than ours, so that teaching takes seconds


def make_config(folder: Path) -> RunConfig:
    labeller = {"type": "vlm", "mode": "rubric", "frames": 1, "prompt": PROMPT}
    labeller |= {"backend": {"type": "transformers", "folder": str(folder / "taught"), "batch": 64}}
    reward = {"type": "preference", "encoder": {"type": "policy"}, "labeller": labeller, "pairs": {"within_group": 1.0}}
    reward |= {"budget": 260, "initial_labels": 200, "initial_episodes": 128, "labels_per_refresh": 20}
    raw = {
        "name": "judged",
        "out": str(folder / "run"),
        "env": {"type": "point_reach", "num_envs": 64},
        "policy": {"type": "gaussian", "backend": "torch"},
        "reward": reward | {"refresh_every": 5, "fit_steps": 60},
        "algorithm": {"group_size": GROUP, "clip_low": 0.2, "clip_high": 0.2, "kl_coef": 0.0},
        "learner": {"lr": 0.05, "minibatch": 256, "ema": 0.5, "target_kl": None},
        "loop": {"steps": 16, "validate_every": 4, "validation_episodes": 64},
        "evaluate": {"episodes": 256, "clips": 0},
    }
    return parse_config(raw, source="test")


def play(config: RunConfig, num_groups: int, split: Split) -> Episodes:
    """Of the start policy, which wanders."""
    env = build_env(config.env.model_copy(update={"num_envs": num_groups * GROUP}))
    starts = train_starts(5, 0, num_groups, GROUP, split)
    return rollout(build_policy(config.policy, env.spec, 0), env, starts, seed=5)


def pairs_within_groups(episodes: Episodes) -> np.ndarray:
    first, second = np.triu_indices(GROUP, k=1)
    starts = np.arange(0, len(episodes.valid), GROUP)[:, None, None]
    return (np.stack([first, second], axis=1) + starts).reshape(-1, 2)


@pytest.fixture
def taught(tmp_path: Path) -> RunConfig:
    config = make_config(tmp_path)
    episodes = play(config, 128, Split.DEMONSTRATION)
    spec = build_env(config.env).spec
    frames = episodes.images["top"].reshape(-1, spec.image_size, spec.image_size, 3)
    write_tiny_judge(tmp_path / "random", spec, frames=frames, config=JUDGE)
    lesson = RatingLesson(episodes=episodes, score=np.clip(episodes.truth, 0, 1), prompt=PROMPT)
    teach(tmp_path / "random", tmp_path / "taught", lesson, Lessons(steps=200, batch=64, lr=1e-3))
    return config


def test_a_taught_judge_beats_chance_and_its_labels_improve_the_policy(taught: RunConfig, tmp_path: Path) -> None:
    unseen = play(taught, 16, Split.TEST)
    pairs = pairs_within_groups(unseen)
    reward = taught.reward
    assert isinstance(reward, PreferenceRewardConfig)
    judge = build_labeller(reward.labeller, tmp_path)
    p_first, truth = ask(judge, unseen, pairs, 0).p_first, OracleLabeller().label(unseen, pairs, 0)
    decided = truth != 0.5
    right = ((p_first > 0.5) == (truth > 0.5))[decided]
    assert len(right) > 300 and right.mean() > 0.65  # chance has a standard error of 0.03

    result = align(taught, resume=False, overwrite=False, say=lambda text: None)
    assert result["ci95_after"][0] > result["ci95_before"][1]
    with PreferenceStore(tmp_path / "run" / "preferences.sqlite") as store:
        records = store.records()
    assert len(records) == result["labels"] <= 260
    assert all(r.labeller == judge.name for r in records)
