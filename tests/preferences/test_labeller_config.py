"""Which labeller a config makes, and what is said about mistakes in it."""

import re
from pathlib import Path
from typing import Any

import pytest

from vla_rlaif.algorithm_checks import cautions
from vla_rlaif.build_labeller import build_labeller, pair_mix
from vla_rlaif.config import load_config, parse_config
from vla_rlaif.preferences.judge import VLMJudge
from vla_rlaif.preferences.oracle import OracleLabeller
from vla_rlaif.preferences.python_labeller import PythonLabeller
from vla_rlaif.preferences.rubric import RubricLabeller
from vla_rlaif.reward_config import PreferenceRewardConfig

OPENAI = {"type": "openai", "model": "some-vlm"}


def preference(**reward: Any) -> PreferenceRewardConfig:
    found = parse_config({"reward": {"type": "preference", **reward}}, source="test").reward
    assert isinstance(found, PreferenceRewardConfig)
    return found


@pytest.mark.parametrize(
    ("labeller", "kind", "name"),
    [
        ({"type": "oracle", "noise": 0.1, "gamma": 0.9}, OracleLabeller, r"^oracle/1\(.*noise=0.1, gamma=0.9"),
        ({"type": "python", "function": "numpy:equal"}, PythonLabeller, r"python/1\(numpy:equal\)"),
        ({"type": "vlm", "backend": OPENAI}, VLMJudge, r"^vlm/1\(openai some-vlm@unknown revision, pairwise ABC"),
        ({"type": "vlm", "backend": OPENAI, "ties": False}, VLMJudge, "pairwise AB, frames=4"),
        ({"type": "vlm", "backend": OPENAI, "mode": "rubric"}, RubricLabeller, "rubric 1-5"),
    ],
)
def test_labellers(tmp_path: Path, labeller: dict[str, Any], kind: type, name: str) -> None:
    built = build_labeller(preference(labeller=labeller).labeller, tmp_path)
    assert isinstance(built, kind) and re.search(name, built.name)


def test_pairs() -> None:
    assert dict(pair_mix(preference().pairs)) == {
        "within_group": 0.5,
        "disagreement": 0.0,
        "entropy": 0.0,
        "uniform": 0.5,
    }
    mixed = preference(pairs={"disagreement": 0.75, "within_group": 0.25}).pairs
    assert (mixed.uniform, mixed.disagreement) == (0.0, 0.75)


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        ({"labeller": {"equal_threshold": 0.1}}, "labeller: has no type; add type: one of .*oracle.*vlm"),
        ({"labeller": {"type": "vlm"}}, "backend: Field required"),
        ({"labeller": {"type": "vlm", "backend": {"type": "openai"}}}, "model: Field required"),
        ({"labeller": {"type": "vlm", "backend": OPENAI, "frame": 3}}, r"frame: unknown key; did you mean frames\?"),
        ({"labeller": {"type": "vlm", "backend": OPENAI | {"concurency": 3}}}, r"did you mean concurrency\?"),
        ({"labeller": {"type": "vlm", "backend": OPENAI, "prompt": "{first} or {second}?"}}, "{instruction} 0 times"),
        ({"labeller": {"type": "vlm", "backend": OPENAI, "tie_margin": 0.5}}, "less than 0.5"),
        ({"type": "vlm_judge", "backend": OPENAI, "prompt": "{instruction}?"}, "{clip} 0 times; wanted once"),
        ({"pairs": {"disagreement": 0.5}}, "shares sum to 0.5, wanted 1"),
        ({"pairs": {"random": 1.0}}, "random: unknown key"),
    ],
)
def test_mistakes_are_named(reward: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_config({"reward": {"type": "preference", **reward}}, source="test")


def test_a_judge_as_reward_is_held_to_the_start_policy() -> None:
    raw = {"reward": {"type": "vlm_judge", "backend": OPENAI}, "algorithm": {"kl_coef": 0.0}}
    assert any("reward hacking" in text for text in cautions(parse_config(raw, source="test")))


def test_the_committed_config() -> None:
    reward = load_config(Path(__file__).parents[2] / "configs" / "tabletop_vlm_judge.yaml").reward
    assert isinstance(reward, PreferenceRewardConfig) and reward.labeller.type == "vlm"
