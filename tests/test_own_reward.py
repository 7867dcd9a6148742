"""docs/own_reward.md: its files run as written; and the verb `score` says what is wrong with a reward."""

import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest
from synthetic import make_episodes

from vla_rlaif import cli
from vla_rlaif.config import load_config
from vla_rlaif.metrics import read_metrics
from vla_rlaif.reward_config import PreferenceRewardConfig
from vla_rlaif.score import described, score

PAGE = Path(__file__).parents[1] / "docs" / "own_reward.md"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with the page's files."""
    for name, text in re.findall(r"```(?:python|yaml)\n# (\S+)\n(.*?)```", PAGE.read_text(), re.DOTALL):
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield tmp_path
    sys.modules.pop("my_reward", None)


def run(*words: str) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.main(words)
    assert not stopped.value.code, words


def test_the_page_names_the_commands_that_are_run_here():
    text = PAGE.read_text()
    for name in ("my_reward", "my_sum"):
        assert f"    vla-rlaif score {name}.yaml --episodes 64\n" in text
        assert f"    vla-rlaif train {name}.yaml\n" in text


def test_one_function(folder, capsys):
    run("score", "my_reward.yaml", "--episodes", "64")
    said = capsys.readouterr().out
    assert "64 episodes, 0 unscorable (NaN)" in said and "0 of 8 without spread" in said
    tau = float(re.findall(r"tau with the simulator's return: (\S+)", said)[0])
    assert tau > 0.5
    run("train", "my_reward.yaml")
    result = json.loads((folder / "runs/my_reward-seed0/result.json").read_text())
    assert result["success_after"] > result["success_before"] + 0.2


def test_a_sum_of_terms(folder, capsys):
    run("score", "my_sum.yaml", "--episodes", "64")
    said = capsys.readouterr().out
    assert "term/near/std" in said and "term/fast/unscorable" in said and "64 episodes, 0 unscorable" in said
    run("train", "my_sum.yaml")
    at = folder / "runs/my_sum-seed0"
    manifest = json.loads((at / "manifest.json").read_text())
    assert (manifest["audited"], manifest["privileged"]) == (True, [])
    lines = read_metrics(at / "metrics.jsonl")
    assert lines[-1]["term/truth/mean"] > lines[0]["term/truth/mean"] + 0.2
    assert any("monitor/term/near/mean" in line for line in lines)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("return 1.0", r"returned shape \(\) for"),
        ("return episodes.success", "no attribute 'success'"),
        ("raise ZeroDivisionError('mine')", "mine"),
    ],
)
def test_a_broken_function_costs_seconds_and_leaves_nothing(folder, capsys, body, message):
    (folder / "my_reward.py").write_text(f"def close_to_goal(episodes):\n    {body}\n")
    with pytest.raises((SystemExit, AttributeError, ZeroDivisionError)) as stopped:
        cli.main(["train", "my_reward.yaml"])
    text = capsys.readouterr().err if isinstance(stopped.value, SystemExit) else str(stopped.value)
    assert re.search(message, text)
    assert not (folder / "runs").exists()


def test_what_cannot_be_tried_is_said(folder, capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.main(["score", "my_reward.yaml", "--episodes", "65"])
    assert stopped.value.code == 2
    assert "--episodes 65 does not split into groups of 8" in capsys.readouterr().err
    with pytest.raises(ValueError, match="is learned from labels: see `vla-rlaif reward fit`"):
        score(
            load_config(folder / "my_reward.yaml").model_copy(update={"reward": PreferenceRewardConfig()}),
            None,
            None,
            64,
            print,
        )


def test_the_figures_of_a_reward():
    """8 episodes in 2 groups of 4; truths are 0 to 7, the last four succeed."""
    episodes = make_episodes(8, success=np.arange(8) >= 4, truth=np.arange(8.0))
    good = described(np.arange(8, dtype=np.float32), episodes)
    assert good[0] == "8 episodes, 0 unscorable (NaN), 4 successes"
    assert good[1] == "reward: mean 3.5, std 2.291, from 0 to 7"
    assert good[2] == "within a group (one start state): std 1.118; 0 of 2 without spread"
    assert good[3:] == ["successes against failures: +4 on average", "Kendall's tau with the simulator's return: 1.000"]
    backwards = described(-np.arange(8, dtype=np.float32), episodes)
    assert "caution: failures are rewarded as much as successes, or more" in backwards
    by_start = described(np.repeat(np.array([1, 2], np.float32), 4), episodes)
    assert any("no group has spread" in line for line in by_start)
    assert "caution: nothing can be scored" in described(np.full(8, np.nan, np.float32), episodes)[-1]
