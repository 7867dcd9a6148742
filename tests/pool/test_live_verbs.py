"""What operators see of a live pool, and mistakes that are found before anything starts."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from live_work import make_work
from pool_worlds import SMALL, at, small
from rich.console import Console

from vla_rlaif.pool.archive import Archive
from vla_rlaif.pool.clock import HOUR, MINUTE
from vla_rlaif.pool.lease import FileLease
from vla_rlaif.pool.live_clock import LiveClock
from vla_rlaif.pool.store import PoolStore
from vla_rlaif.pool.verbs import main
from vla_rlaif.pool.work import check_work

NOW = at("2026-11-02T21:50", "UTC")


@pytest.fixture
def pool(tmp_path: Path) -> Path:
    path = tmp_path / "pool.yaml"
    path.write_text(yaml.safe_dump(SMALL | {"state_dir": str(tmp_path / "state")}))
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / "clock.json").write_text(json.dumps({"real": 4e9, "pool": NOW, "speed": 1e-12}))
    return path


def run(*arguments: object) -> str:
    console = Console(width=160, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    with console.file:
        main([str(a) for a in arguments], now=NOW, console=console)
        return console.export_text()


def status(**changes: Any) -> dict[str, Any]:
    replicas = [
        {
            "name": "serve-n0-0-0",
            "role": "serve",
            "phase": "active",
            "gpus": ["n0:0"],
            "for": HOUR,
            "next": "",
            "error": "",
        },
        {
            **{"name": "train-n0-1-0", "role": "train", "phase": "draining", "gpus": ["n0:1", "n0:2"]},
            **{"for": 2 * MINUTE, "next": "rollout is to hold 8 GPUs", "error": ""},
        },
    ]
    return {
        **{"at": NOW, "holder": "host:1:a", "window": "day", "source": "calendar", "until": NOW + 10 * MINUTE},
        **{"goals": {"serve": 4, "train": 8, "rollout": 0}, "version": 7, "replicas": replicas},
        **{"reasons": ["train gives 6 GPUs"], "violations": ["serve: 1 of at least 3 GPUs (on their way)"]},
        **{"next": NOW + MINUTE, **changes},
    }


def test_status_says_what_holds_what_changes_and_why(pool: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no scheduler has run"):
        run("status", pool)
    archive = Archive(tmp_path / "state")
    record = archive.open(LiveClock(), small(), NOW)
    archive.write(record, status())
    FileLease(tmp_path / "state" / "lease.json").claim(holder="host:1:a", now=NOW, duration=MINUTE)
    store = PoolStore(tmp_path / "state" / "pool.sqlite")
    store.add(now=NOW, start=NOW, end=NOW + HOUR, use=None, targets={"serve": 5}, note="trade fair")
    text = run("status", pool)
    for part in (
        "day by calendar, until Mon 2026-11-02 22:00 UTC",
        "lease: host:1:a, token 1, until Mon 2026-11-02 21:51",
        "committed weights: version 7",
        "override 1: serve=5",
        "trade fair",
        "train-n0-1-0   draining    2m   n0:1, n0:2   rollout is to hold 8 GPUs",
        "- train gives 6 GPUs",
        "- violation: serve: 1 of at least 3 GPUs (on their way)",
    ):
        assert part in text
    rows = [line.split() for line in text.splitlines()]
    assert ["serve", "4", "1", "1"] in rows  # to hold, holds, active
    assert ["train", "8", "2", "2"] in rows  # draining


def test_status_tells_that_nobody_schedules_any_more(pool: Path, tmp_path: Path) -> None:
    archive = Archive(tmp_path / "state")
    (tmp_path / "state" / "clock.json").write_text(json.dumps({"real": 0, "pool": 0, "speed": 1}))
    archive.write(archive.open(LiveClock(), small(), NOW), status(at=0))
    assert "nobody schedules any more" in run("status", pool)


def test_a_pool_is_not_taken_down_under_its_scheduler(pool: Path, tmp_path: Path) -> None:
    FileLease(tmp_path / "state" / "lease.json").claim(holder="host:1:a", now=NOW, duration=MINUTE)
    with pytest.raises(ValueError, match="host:1:a schedules this pool; stop it first"):
        run("down", pool)


def test_a_pool_that_does_not_fit_its_run_is_refused(tmp_path: Path) -> None:
    work = make_work(tmp_path)
    check_work(small(), work)
    unstored = work.run.model_copy(update={"loop": work.run.loop.model_copy(update={"stored": None})})
    with pytest.raises(ValueError, match=r"role rollout collects groups.*set loop\.stored"):
        check_work(small(), replace(work, run=unstored))
    with pytest.raises(ValueError, match=r"train on 5 GPUs cannot share learner\.minibatch 96 evenly"):
        check_work(small(lambda data: data["shares"]["day"].update(train={"target": 5})), work)
    with pytest.raises(ValueError, match=r"train gets 8 GPUs, and a run is one process on one node, which has 4"):
        check_work(small(), replace(work, fake_gpus=False))

    with pytest.raises(ValueError, match="port 8000 cannot be had by every server"):
        check_work(small(), replace(work, serve=replace(work.serve, port=8000)))

    def second(data: dict[str, Any]) -> None:
        data["roles"]["align"] = dict(data["roles"]["train"])

    with pytest.raises(ValueError, match=r"roles train and align both train"):
        check_work(small(second), work)
