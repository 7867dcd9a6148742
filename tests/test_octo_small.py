"""Octo-Small in its official format through the command: train, resume, export, evaluate. The weights are random."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from octo_small import SIZES, T5, write_octo_small

from vla_rlaif.checkpoint import load_policy
from vla_rlaif.cli import main
from vla_rlaif.metrics import read_metrics
from vla_rlaif.policies.octo.official import read_folder

CONFIG = {
    "name": "octo_small",
    "env": {"type": "tabletop", "num_envs": 4, "image_size": 256, "chunk": 4, "max_steps": 8, "threads": 1},
    "policy": {"type": "octo_checkpoint", "clip_prediction": 3.0, "tune": {"type": "lora", "rank": 4, "blocks": 2}},
    "reward": {"type": "python", "function": "rewards_for_tests:leftwards"},
    "algorithm": {"group_size": 2},
    "learner": {"epochs": 1, "minibatch": 8, "micro_batches": 2},
    "loop": {"steps": 2, "validate_every": 8, "validation_episodes": 4, "checkpoint_every": 1, "min_live_share": 0},
    "evaluate": {"episodes": 4, "clips": 0},
}


def run(*argv: object) -> None:
    with pytest.raises(SystemExit) as stop:
        main([str(a) for a in argv])
    assert stop.value.code in (0, None)


def measured(path: Path) -> dict[str, Any]:
    """All that an evaluation has found; what it was made of and when differs."""
    found = json.loads(path.read_text())
    del found["config"], found["manifest"]
    for policy in found["a"]["policies"]:
        del policy["source"], policy["kind"]
    return found


def test_octo_small_trains_resumes_exports_and_evaluates(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    source = write_octo_small(tmp_path / "octo-small")
    policy = {**CONFIG["policy"], "folder": str(source)}
    data = {**CONFIG, "policy": policy, "out": str(tmp_path / "run")}
    config = tmp_path / "small.yaml"
    config.write_text(yaml.safe_dump(data))

    run("train", config)
    assert "copied 267 of 267" in capfd.readouterr().out
    run("train", config, "--resume", "--loop.steps", 3)
    metrics = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert [line["step"] for line in metrics] == [0, 1, 2]
    assert all(line["updates"] == 1 and line["ratio_error_first"] == 0 for line in metrics)
    assert metrics[1]["jax/compilations"] == 0

    best = tmp_path / "run" / "best"
    run("export", config, "--policy", best, "--to", tmp_path / "tuned", "--step", 3)
    tuned, before = read_folder(tmp_path / "tuned"), read_folder(source)
    assert tuned.params.keys() == before.params.keys() and tuned.spec == before.spec
    changed = {k for k, v in tuned.params.items() if not np.array_equal(v, before.params[k])}
    assert changed and not any(k.startswith(T5) for k in changed)
    blocks = {k.split("encoderblock_")[1].split("/")[0] for k in changed if "encoderblock_" in k}
    assert blocks == {"10", "11"} and all("encoderblock_" in k or k.startswith("heads_action") for k in changed)
    sizes = {k: tuned.example_batch["observation"][k].shape[-2] for k in SIZES}
    assert sizes == SIZES

    tokenizer = ("--policy.tokenizer", source / "t5-base")
    run("evaluate", config, "--policy", best, "--to", tmp_path / "a.json")
    run("evaluate", config, "--policy", tmp_path / "tuned", "--to", tmp_path / "b.json", *tokenizer)
    assert measured(tmp_path / "a.json") == measured(tmp_path / "b.json")
    _, weights = load_policy(best)
    assert not any(k.startswith(T5) for k in weights)  # the encoder stays where it is: the run carries features only
