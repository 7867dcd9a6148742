"""Run directories as they are: going on, going back, half-written, old, or no runs at all."""

import json
import os

import numpy as np
import pytest
from inspect_runs import add_steps, make_run, metrics_of

from vla_rlaif.inspect import Filter, Library, load_episode, load_group, open_run, open_source
from vla_rlaif.inspect.metrics_columns import MetricsColumns
from vla_rlaif.metrics import MetricsLog
from vla_rlaif.recording import Recording


@pytest.fixture
def run(tmp_path):
    return make_run(tmp_path / "run", steps=6)


def test_a_run_is_read_whole(run):
    source = open_run(run)
    table = source.table
    assert table.id[:8] == tuple(f"0:{k}" for k in range(8)) and len(table.id) == 2 * 8 + 4
    assert sorted(set(table.origin)) == ["after", "before", "train"]
    episode = load_episode(source, "3:5")
    assert set(episode.frames) == {"top", "wrist"} and episode.about.step.tolist() == [3]
    assert episode.numbers.progress is not None
    assert len(episode.frames["top"]) == len(episode.numbers.action) + 1 == len(episode.numbers.progress)
    group = load_group(source, "3:5")
    assert [one.id for one in group] == ["3:4", "3:5", "3:6", "3:7"]
    for one in group:  # the identical start
        np.testing.assert_array_equal(one.numbers.state[0], group[0].numbers.state[0])
        np.testing.assert_array_equal(one.frames["top"][0], group[0].frames["top"][0])
    assert [one.id for one in load_group(source, "after:1")] == ["before:1", "after:1"]
    assert source.result is not None and source.card is not None
    assert source.result["best_step"] == 8 and 0 < source.card["tau"] < 1 and len(source.preferences()) == 16
    assert source.problems == []


def test_a_running_job_is_followed(run):
    source = open_run(run)
    before, part = len(source.table.id), source.metrics.part()
    add_steps(run, 6, 10)
    assert len(source.table.id) == before + 2 * 8 and source.numbers("9:0").action.ndim == 3
    news = source.metrics.part(part.epoch, part.num)
    assert news.first == 6 and news.columns["step"] == [6, 7, 8, 9] and news.num == 10


def test_a_run_that_goes_back_is_read_anew(run):
    source = open_run(run)
    epoch, name = source.metrics.part().epoch, "3:0"
    assert name in source.table.id
    Recording(run / "episodes").rewind(2)
    with MetricsLog(run) as log:
        log.rewind(2)
    assert name not in source.table.id and "0:0" in source.table.id
    part = source.metrics.part(epoch, 6)
    assert part.epoch != epoch and part.first == 0 and part.columns["step"] == [0, 1]
    with pytest.raises(ValueError, match="no episode '3:0'"):
        source.numbers(name)


def test_half_a_line_waits_for_its_end(tmp_path):
    line = json.dumps({"step": 0, **metrics_of(0)})
    path = tmp_path / "metrics.jsonl"
    columns = MetricsColumns(tmp_path)
    assert columns.part().num == 0
    path.write_text(line[:50])
    assert columns.part().num == 0
    path.write_text(line + "\n" + json.dumps({"step": 1, "new": 3})[:5])
    part = columns.part()
    assert part.num == 1 and part.columns["loss"] == [metrics_of(0)["loss"]]
    with path.open("a") as file:
        file.write(json.dumps({"step": 1, "new": 3})[5:] + "\nnonsense\n")
    part = columns.part()
    assert part.columns["new"] == [None, 3] and part.columns["loss"][1] is None and "nonsense" in columns.problems[0]


def test_half_written_files_are_said_and_the_rest_is_shown(run):
    (run / "result.json").write_text('{"task": ')
    (run / "clips.npz").write_bytes(b"PK half")
    (run / "preferences.sqlite").write_bytes(b"no database at all, but long enough to be looked into")
    with (run / "episodes/index.jsonl").open("a") as file:
        file.write('{"format": 1, "step": 9, "file": "step-0000')
    shard = run / "episodes/step-000003.zip"
    os.truncate(shard, shard.stat().st_size // 2)
    source = open_run(run)
    assert len(source.table.id) == 16 and source.result is None and source.preferences() == ()
    assert len(source.problems) == 3
    assert source.numbers("0:0").state.shape[0] == len(source.frames("0:0")["top"])
    with pytest.raises(ValueError, match=r"step-000003\.zip is damaged or missing"):
        source.numbers("3:0")


def test_an_old_run_without_episodes_opens(tmp_path):
    make_run(tmp_path / "old", steps=3)
    for path in sorted((tmp_path / "old/episodes").iterdir()):
        path.unlink()
    source = open_source(tmp_path / "old")
    assert source.table.origin == ("before", "before", "after", "after")
    assert Filter.parse("reward:0..").rows(source.table).tolist() == []


def test_a_folder_of_runs_survives_a_damaged_one(tmp_path):
    make_run(tmp_path / "a", steps=2)
    make_run(tmp_path / "nested/b", steps=2)
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad/manifest.json").write_text("{")
    (tmp_path / "notes").mkdir()
    library = Library(tmp_path)
    assert [(entry.name, entry.kind) for entry in library.entries()] == [
        ("a", "run"),
        ("bad", "dataset"),
        ("nested/b", "run"),
    ]
    with pytest.raises(ValueError, match="damaged"):
        library.source("bad")
    assert len(library.source("nested/b").table.id)


def test_what_is_no_run_is_explained(tmp_path):
    with pytest.raises(ValueError, match="does not exist"):
        open_source(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="nothing to look at"):
        Library(tmp_path)
    with pytest.raises(ValueError, match="nothing to look at"):
        open_run(tmp_path)
    (tmp_path / "file").write_text("x")
    with pytest.raises(ValueError, match="not a folder"):
        Library(tmp_path / "file")
    (tmp_path / "meta").mkdir()
    (tmp_path / "meta/info.json").write_text(json.dumps({"codebase_version": "v2.1"}))
    with pytest.raises(ValueError, match=r"info\.json is damaged|has format"):
        open_source(tmp_path)
