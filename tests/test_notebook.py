"""What notebooks show: curves that follow a run, and clips."""

import json
import time
from pathlib import Path

import numpy as np
import pytest

from vla_rlaif.metrics import MetricsLog
from vla_rlaif.notebook import Html, Picture, before_after, clip_row, curves, live_curves

PANELS = [{"success": "acting"}, {"loss": "loss"}]


def test_curves_are_a_png_even_of_a_metric_that_is_not_there():
    shown = curves([{"step": 0, "success": 0.5}, {"step": 1, "success": 1.0}], PANELS)
    assert shown._repr_png_().startswith(b"\x89PNG")


def test_live_curves_follow_a_run_and_end_with_its_last_step(tmp_path: Path):
    shown: list[Picture] = []
    with live_curves(tmp_path, PANELS, shown.append, every_s=0.02), MetricsLog(tmp_path) as log:
        log.write(0, {"success": 0.1})
        deadline = time.monotonic() + 60
        while not shown and time.monotonic() < deadline:
            time.sleep(0.02)
        log.write(1, {"success": 0.9})
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert shown[0] == curves(lines[:1], PANELS) and shown[-1] == curves(lines, PANELS)


def test_an_error_of_the_display_is_not_lost(tmp_path: Path):
    def show(_: Picture) -> None:
        raise OSError("the page is gone")

    with pytest.raises(OSError, match="gone"), MetricsLog(tmp_path) as log, live_curves(tmp_path, PANELS, show):
        log.write(0, {"success": 0.1})


def test_captions_and_pages_are_escaped():
    frames = np.zeros((2, 16, 16, 3), np.uint8)
    row = clip_row([("<b>reward</b>", frames)])._repr_html_()
    assert "<b>" not in row and "&lt;b&gt;reward" in row and row.count("data:image/gif;base64,") == 1
    assert '<p class="x">' not in Html.framed('<p class="x">').text and "sandbox" in Html.framed("").text


def test_clips_of_an_unfinished_run(tmp_path: Path):
    (tmp_path / "config.yaml").write_text("name: run\n")
    with pytest.raises(ValueError, match="has not finished"):
        before_after(tmp_path)
