"""Metrics beyond the run's own files: each sink gets the same numbers, goes on after a resume, and is asked for."""

import json
import socket
import urllib.request
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from vla_rlaif.config import parse_config
from vla_rlaif.metric_sinks import PrometheusSink, check_logging, open_log
from vla_rlaif.metrics import MetricsLog, read_metrics
from vla_rlaif.run import align

RUN: dict[str, Any] = {
    "env": {"type": "point_reach", "num_envs": 8},
    "policy": {"type": "gaussian", "backend": "torch"},
    "reward": {"type": "pixel_distance"},
    "algorithm": {"group_size": 4, "clip_low": 0.2, "clip_high": 0.2},
    "loop": {"steps": 2, "validate_every": 2, "validation_episodes": 8},
    "evaluate": {"episodes": 8, "clips": 1},
}


def config(folder: Path, **logging: Any):
    return parse_config({**RUN, "out": str(folder), "logging": logging}, source="test")


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


class Kept:
    def __init__(self):
        self.rows, self.is_closed = [], False

    def write(self, step, numbers):
        self.rows.append((step, dict(numbers)))

    def close(self):
        self.is_closed = True


def test_a_sink_gets_every_step_as_it_is_written(tmp_path):
    kept = Kept()
    with MetricsLog(tmp_path, sinks=[kept]) as log:
        log.write(0, {"loss": 1.0, "gap": float("nan"), "none": None})
        log.write(1, {"loss": 2})
        log.rewind(1)
        log.write(1, {"loss": 3})
        assert not kept.is_closed
    assert kept.rows == [(0, {"loss": 1.0}), (1, {"loss": 2}), (1, {"loss": 3})] and kept.is_closed


def scrape(port: int) -> dict[str, tuple[float, str]]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        families = text_string_to_metric_families(answer.read().decode())
    return {s.name: (s.value, f.documentation) for f in families for s in f.samples}


def test_prometheus_scrapes_the_newest_step():
    port = free_port()
    sink = PrometheusSink(port)
    assert scrape(port) == {"vla_rlaif_train_step": (-1, "The newest step; -1 before the first")}
    sink.write(4, {"rollout/success": 0.25, "loss": 1.5})
    sink.write(5, {"rollout/success": 0.5, "mine": 3.0})
    found = scrape(port)
    assert {name: value for name, (value, _) in found.items()} == {
        "vla_rlaif_train_step": 5,
        "vla_rlaif_train_rollout_success": 0.5,
        "vla_rlaif_train_mine": 3.0,
    }
    assert "Share of the training episodes" in found["vla_rlaif_train_rollout_success"][1]
    sink.close()
    with pytest.raises(OSError, match="refused"):
        scrape(port)


def test_a_port_that_is_taken_is_named(tmp_path):
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        with pytest.raises(ValueError, match=rf"logging\.prometheus_port {port} cannot be opened: Address already"):
            open_log(config(tmp_path, prometheus_port=port), tmp_path)


def test_a_run_answers_scrapes_while_it_lasts(tmp_path):
    port, seen = free_port(), []

    def look(text: str) -> None:
        if text.startswith("labels:"):  # said when the log is open and no step is done
            seen.append(scrape(port)["vla_rlaif_train_step"][0])

    align(config(tmp_path / "run", prometheus_port=port), resume=False, overwrite=False, say=look)
    assert seen == [-1]
    with pytest.raises(OSError, match="refused"):
        scrape(port)


def test_a_package_that_is_not_there_is_named_before_anything_is_done(tmp_path, monkeypatch):
    monkeypatch.setattr("vla_rlaif.doctor.importlib.util.find_spec", lambda name: None)
    for asked, package in (({"wandb": {"project": "p"}}, "wandb"), ({"trackio": {"project": "p"}}, "trackio")):
        with pytest.raises(ValueError, match=rf"logging\.{package} needs the package {package}.*pip install {package}"):
            check_logging(config(tmp_path, **asked).logging)


def wandb_rows(folder: Path) -> tuple[list[dict[str, float]], set[str], dict[str, Any]]:
    """The history, run ids and config of an offline run, as W&B's own reader finds them in its file."""
    from wandb.proto import wandb_internal_pb2
    from wandb.sdk.internal.datastore import DataStore

    rows, ids, settings = [], set(), {}
    for path in sorted(folder.glob("wandb/offline-run-*/run-*.wandb")):
        store = DataStore()
        store.open_for_scan(str(path))
        while (data := store.scan_data()) is not None:
            record = wandb_internal_pb2.Record()  # pyright: ignore[reportAttributeAccessIssue]
            record.ParseFromString(data)
            if record.WhichOneof("record_type") == "history":
                items = {item.key or "/".join(item.nested_key): item.value_json for item in record.history.item}
                rows.append({k: json.loads(v) for k, v in items.items() if not k.startswith("_")})
            if record.WhichOneof("record_type") == "run":
                ids.add(record.run.run_id)
                settings |= {item.key: json.loads(item.value_json) for item in record.run.config.update}
    return rows, ids, settings


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")
def test_wandb_offline_has_the_numbers_of_the_file_and_goes_on(tmp_path, monkeypatch):
    """A run of two steps and its resume to three are two files of one id, which `wandb sync` puts together."""
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    folder = tmp_path / "run"
    asked = config(folder, wandb={"project": "tests", "mode": "offline", "tags": ["small"]})
    align(asked, resume=False, overwrite=False, say=lambda text: None)
    longer = asked.model_copy(update={"loop": asked.loop.model_copy(update={"steps": 3})})
    align(longer, resume=True, overwrite=False, say=lambda text: None)
    lines = read_metrics(folder / "metrics.jsonl")
    rows, ids, settings = wandb_rows(folder)
    assert ids == {(folder / "wandb_id").read_text()}
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert rows == [{k: v for k, v in line.items() if v is not None} for line in lines]
    assert settings["algorithm"]["group_size"] == 4 and settings["loop"]["steps"] == 3


@pytest.mark.skipif(find_spec("trackio") is None, reason="no extra brings trackio: pip install trackio to run this")
@pytest.mark.filterwarnings("ignore")
def test_trackio_has_the_numbers_of_the_file(tmp_path, monkeypatch):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    folder = tmp_path / "run"
    asked = config(folder, trackio={"project": "tests"})
    align(asked, resume=False, overwrite=False, say=lambda text: None)
    import trackio  # pyright: ignore[reportMissingImports]

    history = {row["step"]: row for row in trackio.SQLiteStorage.get_logs("tests", "run")}
    assert sorted(history) == [0, 1]
    for line in read_metrics(folder / "metrics.jsonl"):
        for name, value in line.items():
            assert value is None or history[line["step"]][name] == pytest.approx(value), name
