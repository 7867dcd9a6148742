"""Exports, read back by other libraries."""

import csv
import math

import numpy as np
import pytest
from inspect_runs import make_run
from PIL import Image, ImageSequence

from vla_rlaif.inspect import Filter, export, open_source
from vla_rlaif.inspect.notebook import show_episode, show_group, show_table
from vla_rlaif.inspect.source import load_episode, load_group


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return open_source(make_run(tmp_path_factory.mktemp("runs") / "run", steps=4))


def rows_of(source, text):
    return Filter.parse(text).rows(source.table)


def test_csv(source, tmp_path):
    rows = rows_of(source, "step:3")
    with export(source, rows, tmp_path / "new/a.csv").open(newline="") as file:
        lines = list(csv.DictReader(file))
    assert [line["id"] for line in lines] == [f"3:{k}" for k in range(8)]
    assert [float(line["reward"]) for line in lines] == source.table.reward[rows].tolist()
    np.testing.assert_allclose([float(line["disagreement"]) for line in lines], source.table.disagreement[rows])


def test_parquet(source, tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet", reason="extra inspect")
    table = parquet.read_table(export(source, np.arange(len(source.table.id)), tmp_path / "a.parquet")).to_pydict()
    assert table["id"] == list(source.table.id) and table["success"] == source.table.success.tolist()
    known = [math.nan if value is None else value for value in table["reward"]]
    np.testing.assert_array_equal(known, source.table.reward)


def test_mp4_shows_the_frames_in_order(source, tmp_path):
    av = pytest.importorskip("av", reason="extra inspect")
    rows = rows_of(source, "step:0 group:0")
    path = export(source, rows, tmp_path / "a.mp4", fps=4.0)
    with av.open(str(path)) as file:
        stream = file.streams.video[0]
        frames = [frame.to_ndarray(format="rgb24") for frame in file.decode(stream)]
        assert stream.average_rate == 4
    longest = max(len(source.frames(source.table.id[row])["top"]) for row in rows)
    assert len(frames) == longest + 5  # the last one is held
    first = source.frames(source.table.id[rows[0]])["top"][0]
    shown = frames[0][4 : 4 + 192, 4 : 4 + 192].reshape(32, 6, 32, 6, 3).astype(float).mean(axis=(1, 3))
    assert np.abs(shown - first).mean() < 6  # enlarged six times, and H.264 is lossy
    assert not list(tmp_path.glob("*.part*"))


def test_gif(source, tmp_path):
    with Image.open(export(source, rows_of(source, "id:3:1"), tmp_path / "a.gif", fps=5.0)) as image:
        assert len(list(ImageSequence.Iterator(image))) == len(source.frames("3:1")["top"])
        image.seek(0)
        assert image.info["duration"] == 200


def test_rerun(source, tmp_path):
    chunks = pytest.importorskip("rerun.chunk", reason="extra inspect")
    path = export(source, rows_of(source, "step:3 group:1"), tmp_path / "a.rrd")
    found: dict[str, int] = {}
    for chunk in chunks.RrdReader(path).stream():
        found[chunk.entity_path] = found.get(chunk.entity_path, 0) + chunk.num_rows
    for name in ("3:4", "3:5", "3:6", "3:7"):
        root, numbers = f"/episode_{name.replace(':', '_')}", source.numbers(name)
        assert found[f"{root}/camera/wrist"] == found[f"{root}/progress"] == len(numbers.state)
        assert found[f"{root}/logp"] == found[f"{root}/action/1"] == len(numbers.action)
        assert found[f"{root}/about"] == 1


def test_what_cannot_be_exported_is_explained(source, tmp_path):
    with pytest.raises(ValueError, match=r"suffix '\.avi'"):
        export(source, np.arange(1), tmp_path / "a.avi")
    with pytest.raises(ValueError, match="no episode"):
        export(source, np.arange(0), tmp_path / "a.csv")
    with pytest.raises(ValueError, match="16 at most"):
        export(source, np.arange(17), tmp_path / "a.mp4")
    assert not list(tmp_path.iterdir())


def test_notebooks_show_what_there_is(source):
    episode = show_episode(load_episode(source, "3:1"))._repr_html_()
    assert episode.count("<img") == 2 and episode.count("<svg") == 3 and "reach the red cube" in episode
    group = show_group(load_group(source, "3:1"))._repr_html_()
    assert group.count("<img") == 8 and "start seed 0, step 3" in group
    table = show_table(source, np.arange(20), most=4)._repr_html_()
    assert table.count("<tr>") == 5 and "16 more" in table
    assert "None of the" in show_table(source, np.arange(0))._repr_html_()
    assert "<svg" not in show_episode(load_episode(source, "after:0"))._repr_html_()
