"""Runs of every kind write what the schema describes, the schema describes nothing that no run writes, and the docs
show it."""

import json
import re
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest

from vla_rlaif.build import build_env, build_parts, build_policy
from vla_rlaif.config import parse_config
from vla_rlaif.dataset import save_demonstrations
from vla_rlaif.episode_store import EpisodeStore
from vla_rlaif.metric_schema import SCHEMA, Metric, described, main, markdown_table, undescribed
from vla_rlaif.metrics import MetricsLog, read_metrics
from vla_rlaif.rollout import train_starts
from vla_rlaif.start import start_policy
from vla_rlaif.train import train

DOCS = Path(__file__).parents[1] / "docs" / "metrics.md"
SMALL: dict[str, Any] = {
    "env": {"type": "point_reach", "num_envs": 8},
    "policy": {"type": "gaussian"},
    "reward": {"type": "pixel_distance"},
    "algorithm": {"group_size": 4, "clip_low": 0.2, "clip_high": 0.2, "kl_coef": 0.01},
    "learner": {"lr": 0.05, "epochs": 1, "minibatch": 64, "target_kl": None},
    "loop": {"steps": 2, "validate_every": 1, "validation_episodes": 8, "checkpoint_every": 2, "act_batch": 4},
}
TERMS = [{"reward": {"type": "pixel_distance"}}, {"reward": {"type": "success"}, "weight": 0.5, "scale": 1.0}]
LEARNED = {
    "type": "preference",
    "encoder": {"type": "policy"},
    "budget": 60,
    "initial_labels": 20,
    "initial_episodes": 16,
    "labels_per_refresh": 20,
    "refresh_every": 1,
    "fit_steps": 5,
}


class Point(gymnasium.Env):
    """A point that an action moves; for worker processes."""

    action_space = gymnasium.spaces.Box(-1, 1, (2,), np.float32)
    metadata = {"render_fps": 10, "render_modes": ["rgb_array"]}  # noqa: RUF012 (as gymnasium declares it)

    def __init__(self, render_mode: str | None = None) -> None:
        self.render_mode = render_mode

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None):
        super().reset(seed=seed)
        self.at = self.np_random.uniform(-1, 1, 2)
        return self.at, {}

    def step(self, action: np.ndarray):
        self.at = self.at + 0.1 * action
        distance = float(np.abs(self.at).sum())
        return self.at, -distance, False, False, {"is_success": distance < 0.2}

    def render(self):
        return np.full((16, 16, 3), int(100 + 50 * np.clip(self.at[0], -1, 1)), np.uint8)


def sections(folder: Path, **changes: Any) -> dict[str, Any]:
    """A section of another type replaces the small one; others change it."""
    whole = {**SMALL, "out": str(folder)}
    for name, change in changes.items():
        same = change.get("type", whole.get(name, {}).get("type")) == whole.get(name, {}).get("type")
        whole[name] = {**(whole.get(name, {}) if same else {}), **change}
    return whole


def run(folder: Path, **changes: Any) -> list[dict[str, Any]]:
    folder.mkdir(parents=True)
    config = parse_config(sections(folder, **changes), source="test")
    env = build_env(config.env)
    try:
        policy = start_policy(config, env, folder, lambda text: None)
        parts = build_parts(config, env, policy, folder)
        with MetricsLog(folder) as log:
            train(config, parts, log, folder, resume=False, say=lambda text: None)
    finally:
        env.close()
    return read_metrics(folder / "metrics.jsonl")


def learned_in_processes(folder: Path) -> list[dict[str, Any]]:
    """JAX, labels and fits, steps played ahead, env worker processes."""
    env = {
        **{"type": "gymnasium", "factory": f"{__name__}:Point", "num_envs": 8, "image_size": 16, "max_steps": 4},
        **{"chunk": 2, "cameras": {"top": "render"}, "state": ["observation"], "instructions": ["go"]},
    }
    return run(folder, env=env, reward=LEARNED, loop={"steps": 3, "overlap": True, "staleness": 1})


def from_a_store(folder: Path) -> list[dict[str, Any]]:
    """Torch, and episodes that others have played."""
    store = EpisodeStore(folder / "store")
    config = parse_config(sections(folder), source="test")
    env = build_env(config.env)
    parts = build_parts(config, env, build_policy(config.policy, env.spec, 0), folder)
    for _ in range(2):
        played = parts.rollouts.play(train_starts(9, 0, 2, 4), seed=9).episodes
        assert played is not None
        store.append("night", replace(played, version=0))
    stored = {"stored": str(folder / "store"), "staleness": 1}
    return run(folder / "run", policy={"backend": "torch"}, loop=stored)


def anchored(folder: Path) -> list[dict[str, Any]]:
    """A warm start, demonstrations in every update, and a reward of several terms."""
    from test_anchor_run import demonstrations

    save_demonstrations(folder / "data", demonstrations(), {})
    return run(
        folder / "run",
        env={"max_decisions": 2},
        policy={"type": "mlp", "hidden": [4]},
        warm_start={"data": str(folder / "data"), "imitate": {"steps": 2, "batch": 4}},
        reward={"type": "composite", "terms": TERMS, "reference_episodes": 8},
        algorithm={"anchor_coef": 0.5, "anchor_batch": 4},
        loop={"steps": 1},
    )


def on_a_cluster(folder: Path) -> list[dict[str, Any]]:
    from vla_rlaif.build_cluster import ClusterStage
    from vla_rlaif.dist.thread_cluster import ThreadCluster

    folder.mkdir()
    roles = {"rollout": {"workers": 2}, "reference": {"workers": 1}}
    config = parse_config(sections(folder, cluster={"type": "ray", "roles": roles}), source="test")
    threads = ThreadCluster(max_restarts=1)
    try:
        ClusterStage(config, folder, threads, lambda text: None).train(resume=False)
    finally:
        threads.close()
    return read_metrics(folder / "metrics.jsonl")


@pytest.fixture(scope="module")
def emitted(tmp_path_factory) -> dict[str, list[Any]]:
    """All values that the runs have written, by name."""
    found: dict[str, list[Any]] = {}
    for kind in (learned_in_processes, from_a_store, anchored, on_a_cluster):
        for line in kind(tmp_path_factory.mktemp(kind.__name__) / "run"):
            for name, value in line.items():
                found.setdefault(name, []).append(value)
    return found


def test_every_metric_is_described(emitted):
    assert not undescribed(emitted), "add them to vla_rlaif/metric_schema.py"


def test_every_description_is_of_a_metric_that_some_run_writes(emitted):
    silent = [m.name for m in SCHEMA if not any(fnmatchcase(name, m.name) for name in emitted)]
    assert silent == [m.name for m in SCHEMA if m.opt_in], "name what brings it (opt_in), or remove it"


def test_values_are_in_their_units(emitted):
    """Counts are whole and not negative, shares of episodes and times of a step too."""
    for name, values in emitted.items():
        metric = described(name)
        known = [v for v in values if v is not None]
        if metric is not None and metric.unit == "count":
            assert all(v >= 0 and v == int(v) for v in known), (name, known)
        if metric is not None and metric.unit in ("s", "min"):
            assert all(0 <= v < 600 for v in known), (name, known)


def test_names_are_unique_and_tell_their_unit():
    names = [m.name for m in SCHEMA]
    assert len(set(names)) == len(names)
    for metric in SCHEMA:
        assert re.fullmatch(r"([a-z0-9_]+/)?([a-z0-9_]+|\*)(/[a-z0-9_*]+)?", metric.name), metric.name
        if metric.unit == "s":
            assert metric.name.endswith("_s"), metric.name


def test_an_exact_name_goes_before_a_pattern():
    schema = [Metric(name="a/*", unit="1", meaning="any"), Metric(name="a/b", unit="s", meaning="one")]
    assert [described(name, schema) for name in ("a/b", "a/c", "b")] == [schema[1], schema[0], None]
    assert undescribed(["step", "a/b", "b", "b"], schema) == ["b"]


def test_the_page_shows_the_schema(tmp_path):
    assert markdown_table() in DOCS.read_text(), "run `python -m vla_rlaif.metric_schema docs/metrics.md`"
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- table -->\nold\n<!-- /table -->\nafter\n")
    main(page)
    assert page.read_text() == f"before\n<!-- table -->\n{markdown_table()}\n<!-- /table -->\nafter\n"
    page.write_text("nothing")
    with pytest.raises(ValueError, match="no lines <!-- table --> and <!-- /table -->"):
        main(page)


def test_old_runs_are_read_whatever_their_metrics_are_called(tmp_path):
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 0, "gone/by": 1.0}) + "\n")
    assert undescribed(read_metrics(tmp_path / "metrics.jsonl")[0]) == ["gone/by"]
