"""The report of a synthetic run: complete, self-contained, and equal to the files it is made from."""

import base64
import io
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from scipy.stats import binomtest

from vla_rlaif.metrics import MetricsLog, wilson
from vla_rlaif.report import difference, write_report
from vla_rlaif.report_training import CHARTS, phase_seconds

SECTIONS = ["Success before and after", "Clips", "Training", "Time", "Setting", "Look inside"]
CONFIG = """name: push <b>hard</b>
seed: 3
env: {type: tabletop, task: push}
policy: {type: octo, token_dim: 64, num_layers: 2, proprio: true}
reward: {type: preference}
loop: {steps: 6}
"""
RESULT = {
    "task": "push",
    "success_before": 0.305,
    "success_after": 0.745,
    "ci95_before": [0.2619, 0.3518],
    "ci95_after": [0.7001, 0.7852],
    "episodes": 400,
    "labels": 1360,
    "minutes": 33.25,
    "seed": 3,
    "versions": {"vla_rlaif": "0.1.0", "mujoco": "3.17.0"},
    "best_step": 4,
    "peak_memory_gb": 1.234,
}


class Page(HTMLParser):
    """What a reader gets: headings, text, images and what they would load."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.headings: list[str] = []
        self.images: list[dict[str, str | None]] = []
        self.charts: list[str] = []
        self.sources: list[str] = []
        self.ids: list[str] = []
        self.text = ""
        self.open: list[str] = []
        self.feed(path.read_text(encoding="utf-8"))
        assert self.open == [], "every tag is closed"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        if tag not in ("meta", "img", "source"):
            self.open.append(tag)
        assert tag not in ("script", "link", "iframe")
        self._note(tag, values)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._note(tag, dict(attrs))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "h2":
            self.headings.append(data)
        if "style" not in self.open:
            self.text += data

    def _note(self, tag: str, values: dict[str, str | None]) -> None:
        if tag == "img":
            self.images.append(values)
        if tag == "svg":
            self.charts.append(values["aria-label"] or "")
        self.sources += [values[key] or "" for key in ("src", "srcset", "href") if key in values]
        self.ids += [values["id"] or ""] if "id" in values else []


def write_metrics(run_dir: Path, *, steps: int, validate: bool) -> None:
    keys = {line.key for chart in CHARTS for panel in chart.panels for line in panel.lines}
    keys |= {chart.x for chart in CHARTS} - {"step"}
    keys |= {line.share_of for chart in CHARTS for panel in chart.panels for line in panel.lines if line.share_of}
    keys |= {"time/rollout_s", "time/physics_s", "time/render_s", "time/policy_s", "time/update_s"}
    with MetricsLog(run_dir) as log:
        for step in range(steps):
            values: dict[str, float] = {key: 0.5 + step / 20 for key in keys if not key.startswith("validation")}
            if validate and step % 2 == 0:
                low, high = wilson(40 + step, 128)
                values |= {"validation/success": (40 + step) / 128, "validation/low": low, "validation/high": high}
            log.write(step, {"minutes": 1.5 * step, **values, "reward/success_correlation": float("nan")})


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The report of a finished run, written once."""
    return write_report(write_run(tmp_path_factory.mktemp("run")))


def write_run(tmp_path: Path) -> Path:
    (tmp_path / "config.yaml").write_text(CONFIG)
    (tmp_path / "result.json").write_text(json.dumps(RESULT))
    write_metrics(tmp_path, steps=6, validate=True)
    frames = np.random.default_rng(0).integers(0, 256, (2, 5, 16, 24, 3), dtype=np.uint8)
    np.savez(
        tmp_path / "clips.npz",
        before=frames,
        after=frames[:, ::-1],
        before_success=np.array([False, True]),
        after_success=np.array([True, True]),
        instruction=np.array(["push the red cube", 'push the "<blue>" cube']),
    )
    return tmp_path


def test_a_finished_run_is_told_in_full(report: Path) -> None:
    page = Page(report)
    assert report.name == "report.html"
    assert page.headings == SECTIONS
    for shown in ("30.5 %", "26.2 % to 35.2 %", "74.5 %", "70.0 % to 78.5 %", "+44.0 points", "400 episodes each"):
        assert shown in page.text
    table = re.findall(r'<th scope="row">([^<]*)</th><td>([^<]*)</td>', report.read_text(encoding="utf-8"))
    assert dict(table) == {
        "Task": "push",
        "Policy": "octo: token_dim 64, num_layers 2",
        "Reward": "preference",
        "Labels used": "1360",
        "Minutes": "33.2",
        "Seed": "3",
        "Training steps": "6 on record, 6 planned",
        "Best step": "4",
        "Evaluation episodes": "400",
        "Peak memory": "1.23 GB",
        "Versions": "vla_rlaif 0.1.0, mujoco 3.17.0",
    }
    assert f"vla-rlaif inspect {report.parent}" in page.text and "01_inspect_trajectories.ipynb" in page.text
    assert "push <b>hard</b>" in page.text  # escaped: shown, not obeyed
    assert [chart.title for chart in CHARTS] == [label.split(".")[0] for label in page.charts[1:-1]]
    assert "validation success: from 31.2 % at step 0 to 34.4 % at step 4." in page.charts[1]
    assert "Not recorded (yet): correlation." in page.text  # all NaN


def test_nothing_is_loaded_from_outside(report: Path) -> None:
    page = Page(report)
    assert page.sources
    assert all(source.startswith(("data:image/", "#")) for source in page.sources)
    assert not re.search(r"https?://|@import", report.read_text(encoding="utf-8"))
    assert len(page.ids) == len(set(page.ids))
    assert {source[1:] for source in page.sources if source.startswith("#")} <= set(page.ids)
    assert page.text.isascii()


def test_clips_are_animations_with_their_outcome(report: Path) -> None:
    page = Page(report)
    assert [image["alt"] for image in page.images] == [
        "Before training, start state 1: loss. Instruction: push the red cube",
        "After training, start state 1: win. Instruction: push the red cube",
        'Before training, start state 2: win. Instruction: push the "<blue>" cube',
        'After training, start state 2: win. Instruction: push the "<blue>" cube',
    ]
    for image in page.images:
        head, _, data = (image["src"] or "").partition(",")
        assert head == "data:image/gif;base64"
        gif = Image.open(io.BytesIO(base64.b64decode(data)))
        assert (gif.n_frames, gif.size, gif.info["loop"]) == (5, (24, 16), 0)  # pyright: ignore[reportAttributeAccessIssue]


def test_a_run_that_has_not_finished_says_what_is_missing(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(CONFIG)
    write_metrics(tmp_path, steps=1, validate=False)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 1, "lo')  # being written
    page = Page(write_report(tmp_path))
    assert page.headings == SECTIONS
    for words in (
        "Not finished: still running, or crashed. Last on record: step 0 at 0.0 minutes, 6 steps are planned",
        "not measured yet",
        "no before and after to compare",
        "No clips:",
        "Not recorded (yet): validation success.",
    ):
        assert words in page.text


def test_a_run_before_its_first_step(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(CONFIG)
    page = Page(write_report(tmp_path))
    assert page.headings == SECTIONS
    assert "No training step is on record" in page.text
    assert "No times are recorded" in page.text


def test_a_result_alone_is_enough(tmp_path: Path) -> None:
    bare = {"success_before": 0.5, "success_after": 0.5}
    (tmp_path / "result.json").write_text(json.dumps(bare))
    page = Page(write_report(tmp_path))
    assert "no interval recorded" in page.text
    assert "config.yaml is missing" in page.text
    assert "not recorded" in page.text


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("result.json", "{", "result.json is not valid JSON"),
        ("result.json", "[]", "result.json holds a list"),
        ("config.yaml", "a: [", "config.yaml is not valid YAML"),
        ("clips.npz", "PK", "clips.npz is not a clips file"),
    ],
)
def test_a_damaged_piece_is_named(tmp_path: Path, name: str, content: str, message: str) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=message):
        write_report(tmp_path)


def test_not_a_run_directory(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds neither config"):
        write_report(tmp_path)
    with pytest.raises(ValueError, match="is not a directory"):
        write_report(tmp_path / "nowhere")


def test_difference_equals_newcombes_published_example() -> None:
    # Newcombe 1998, Statistics in Medicine 17:873, table II: 56/70 - 48/80 is 0.2000 with 0.0524 to 0.3339 (method 10).
    intervals = [binomtest(k, n).proportion_ci(method="wilson") for k, n in ((48, 80), (56, 70))]
    before, after = ((ci.low, ci.high) for ci in intervals)
    assert difference(0.6, 0.8, before, after) == pytest.approx((0.0524, 0.3339), abs=5e-5)


def test_phases_add_up_to_the_minutes() -> None:
    rows = [
        {"step": 0, "minutes": 1.0, "time/rollout_s": 20.0, "time/physics_s": 5.0, "time/policy_s": 8.0},
        {"step": 1, "minutes": 2.0, "time/rollout_s": 20.0, "time/physics_s": 5.0, "time/update_s": 30.0},
    ]
    # rollout 40 = physics 10 + policy 8 + other 22; with update 30 that is 70 of 120 s.
    assert dict(phase_seconds(rows)) == {
        "rollout: physics": 10.0,
        "rollout: policy": 8.0,
        "rollout: other": 22.0,
        "update": 30.0,
        "outside the phases": 50.0,
    }
