"""A run can be repeated from what it wrote: the same numbers, and what differs about code or machine is said."""

import copy
import hashlib
import json
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import yaml

from vla_rlaif import manifest as module
from vla_rlaif.cli import main
from vla_rlaif.config import parse_config
from vla_rlaif.manifest import continued, differences, manifest, read_manifest
from vla_rlaif.metrics import read_metrics

RUN: dict[str, Any] = {
    "name": "repeated",
    "seed": 3,
    "env": {"type": "point_reach", "num_envs": 16},
    "policy": {"type": "gaussian"},
    "reward": {
        **{"type": "preference", "encoder": {"type": "policy"}, "budget": 60, "initial_labels": 30, "fit_steps": 10},
        **{"initial_episodes": 16, "labels_per_refresh": 15, "refresh_every": 1},
    },
    "algorithm": {"group_size": 4, "clip_low": 0.2, "clip_high": 0.2, "kl_coef": 0.01},
    "learner": {"lr": 0.05, "minibatch": 64, "target_kl": None},
    "loop": {"steps": 3, "validate_every": 1, "validation_episodes": 16, "checkpoint_every": 3},
    "evaluate": {"episodes": 16, "clips": 1},
}
TIMES = ("time/", "minutes", "reward/fit_s", "jax/", "idle/", "sync/gather_s", "sync/transfer_s", "sync/commit_s")


def succeed(*words: object) -> None:
    said = [str(word) for word in words]
    with pytest.MonkeyPatch.context() as patched, pytest.raises(SystemExit) as end:
        patched.setattr(sys, "argv", ["vla-rlaif", *said])  # as in a process of its own
        main(said)
    assert end.value.code == 0


def numbers(run: Path) -> list[dict[str, Any]]:
    lines = read_metrics(run / "metrics.jsonl")
    return [{k: v for k, v in line.items() if not k.startswith(TIMES)} for line in lines]


def test_a_runs_own_config_repeats_it(tmp_path, capsys, monkeypatch):
    """Of a learned reward: labels, fits, rollouts, updates, validation and both evaluations are the same."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "first.yaml").write_text(yaml.safe_dump(RUN))
    succeed("train", "first.yaml")
    first = tmp_path / "runs" / "repeated-seed3"
    capsys.readouterr()
    succeed("train", first / "config.yaml", "--out", "again", "--same-as", first / "manifest.json")
    assert f"differs from {first / 'manifest.json'}: nothing" in capsys.readouterr().out
    again = tmp_path / "again"
    assert numbers(again) == numbers(first) and len(numbers(first)) == 3
    assert numbers(first)[-1]["labels/total"] == 60 and numbers(first)[0]["loss"] != numbers(first)[1]["loss"]
    results = [json.loads((run / "result.json").read_text()) for run in (first, again)]
    for key in ("success_before", "success_after", "ci95_after", "best_step", "labels", "seed"):
        assert results[0][key] == results[1][key], key
    params = [(run / "best" / "params.safetensors").read_bytes() for run in (first, again)]
    assert params[0] == params[1]
    made = [read_manifest(run) for run in (first, again)]
    assert made[0]["seed"] == 3 and made[0]["command"].startswith("vla-rlaif ")
    text = (first / "config.yaml").read_bytes()
    assert made[0]["config_sha256"] == hashlib.sha256(text).hexdigest() != made[1]["config_sha256"]  # another `out`


@pytest.fixture(scope="module")
def made() -> dict[str, Any]:
    return manifest(parse_config(RUN, source="test"))


def test_what_is_recorded(made, monkeypatch):
    assert json.loads(json.dumps(made)) == made
    assert made["packages"]["numpy"] == made["versions"]["numpy"] == metadata.version("numpy")
    assert made["machine"]["cores"] >= 1 and made["machine"]["cpu"]
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=true")
    assert manifest(parse_config(RUN, source="test"))["environment"]["XLA_FLAGS"] == "--xla_cpu_enable_fast_math=true"


def test_the_state_of_the_code(tmp_path):
    """A clean checkout, one with a change, one with a new file, and no checkout."""
    run = lambda *words: subprocess.run(  # noqa: E731
        ["git", "-c", "user.name=a", "-c", "user.email=a@b", *words], cwd=tmp_path, check=True, capture_output=True
    )
    assert module._git(tmp_path) == {"commit": None, "dirty": None, "diff_sha256": None}
    run("init", "-q")
    (tmp_path / "code.py").write_text("a = 1\n")
    run("add", "code.py")
    run("commit", "-qm", "first")
    clean = module._git(tmp_path)
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=tmp_path, capture_output=True, text=True).stdout.strip()
    assert clean == {"commit": commit, "dirty": False, "diff_sha256": None}
    (tmp_path / "new.py").write_text("b = 2\n")
    assert module._git(tmp_path) == {"commit": commit, "dirty": True, "diff_sha256": None}
    (tmp_path / "code.py").write_text("a = 2\n")
    diff = subprocess.run(["git", "diff", "HEAD"], cwd=tmp_path, capture_output=True).stdout
    assert module._git(tmp_path)["diff_sha256"] == hashlib.sha256(diff).hexdigest()


def test_differences_are_named_and_others_are_not(made):
    now = copy.deepcopy(made)
    now |= {"started": "later", "command": "another", "config_sha256": "x", "python": "3.99.0"}
    now["packages"] |= {"numpy": "0.1", "extra_package": "1.0"}
    now["machine"] |= {"gpus": ["NVIDIA X, 1.2"]}
    now["environment"] |= {"OMP_NUM_THREADS": "7"}
    now["git"] = {"commit": "abc", "dirty": True, "diff_sha256": made["git"]["diff_sha256"]}
    threads = made["environment"].get("OMP_NUM_THREADS", "none")
    assert differences(made, now) == [
        "extra_package: none then, 1.0 now",
        f"numpy: {made['packages']['numpy']} then, 0.1 now",
        f"OMP_NUM_THREADS: {threads} then, 7 now",
        f"gpus: {made['machine']['gpus'] or 'none'} then, ['NVIDIA X, 1.2'] now",
        f"python: {made['python']} then, 3.99.0 now",
        f"code: {made['git']['commit'] or 'none'} then, abc now",
    ]
    assert differences(made, made) == []


def test_a_run_that_goes_on_keeps_its_first_manifest(made, tmp_path):
    path = tmp_path / "manifest.json"
    assert continued(path, made) == (made, [])
    path.write_text(json.dumps(made))
    second = {**made, "python": "3.98.0"}
    whole, found = continued(path, second)
    assert whole == {**made, "resumed": [second]} and found == [f"python: {made['python']} then, 3.98.0 now"]
    path.write_text(json.dumps(whole))
    third, found = continued(path, second)
    assert third["resumed"] == [second, second] and found == []
    path.write_text('{"git": "9e674f1"}')  # of a version that recorded less
    assert continued(path, made) == (made, [])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "there is no manifest"),
        ("{", "is not JSON"),
        ("[]", "not a run's manifest"),
        ('{"git": "x"}', "of format 1"),
    ],
)
def test_what_is_no_manifest(tmp_path, text, message):
    if text is not None:
        (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(ValueError, match=message):
        read_manifest(tmp_path)
