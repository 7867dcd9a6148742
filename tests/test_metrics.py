"""Metrics survive crashes and resumes, are strict JSON, and TensorBoard shows the same numbers."""

import json
import os
import re
import select
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import binomtest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from vla_rlaif.metrics import MetricsLog, read_metrics, wilson
from vla_rlaif.progress import Progress


def test_writes_strict_json_a_line_a_step(tmp_path: Path) -> None:
    with MetricsLog(tmp_path) as log:
        log.write(0, {"loss": 0.5, "labels/total": np.int64(40), "reward/mean": np.float32(0.25), "gap": None})
        log.write(1, {"loss": float("nan"), "grad_norm": float("inf")})
        # Flushed: a reader sees both lines while the run goes on.
        assert read_metrics(tmp_path / "metrics.jsonl") == [
            {"step": 0, "loss": 0.5, "labels/total": 40, "reward/mean": 0.25, "gap": None},
            {"step": 1, "loss": None, "grad_norm": None},
        ]
    assert '"labels/total": 40,' in (tmp_path / "metrics.jsonl").read_text()


def test_tensorboard_shows_the_same_and_follows_a_rewind(tmp_path: Path) -> None:
    with MetricsLog(tmp_path) as log:
        for step in range(4):
            log.write(step, {"loss": step / 2, "kl": float("nan")})
    with MetricsLog(tmp_path) as log:
        log.rewind(2)
        log.write(2, {"loss": 9.0})
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert events.Tags()["scalars"] == ["loss"]
    assert [(e.step, e.value) for e in events.Scalars("loss")] == [(0, 0.0), (1, 0.5), (2, 9.0)]


def test_rewind_drops_the_resumed_step_and_later(tmp_path: Path) -> None:
    with MetricsLog(tmp_path) as log:
        for step in range(5):
            log.write(step, {"loss": float(step)})
        log.rewind(3)
        assert log.last_step == 2
        log.write(3, {"loss": -1.0})
        assert [row["loss"] for row in read_metrics(tmp_path / "metrics.jsonl")] == [0.0, 1.0, 2.0, -1.0]
        log.rewind(0)
        assert log.last_step is None
    assert read_metrics(tmp_path / "metrics.jsonl") == []
    assert not list(tmp_path.glob("*.tmp"))


def test_a_step_is_written_once(tmp_path: Path) -> None:
    with MetricsLog(tmp_path) as log:
        log.write(3, {})
    with MetricsLog(tmp_path) as log:
        with pytest.raises(ValueError, match=r"step 3 does not follow step 3.*rewind\(3\)"):
            log.write(3, {})
        with pytest.raises(ValueError, match="value named 'step'"):
            log.write(4, {"step": 4})


@pytest.mark.parametrize("torn", [b'{"step": 2, "lo', b'{"step": 2, "loss": 1.5', b"\0\0\0\0"])
def test_a_torn_last_line_moves_to_a_sidecar(tmp_path: Path, torn: bytes, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "metrics.jsonl"
    whole = b'{"step": 0}\n{"step": 1}\n'
    path.write_bytes(whole + torn)
    assert [row["step"] for row in read_metrics(path)] == [0, 1]  # reading alone changes nothing
    assert path.read_bytes() == whole + torn
    with MetricsLog(tmp_path) as log:
        assert "torn line" in caplog.text
        log.write(2, {"loss": 1.0})
    assert path.read_bytes() == whole + b'{"step": 2, "loss": 1.0}\n'
    assert (tmp_path / "metrics.jsonl.torn").read_bytes() == torn + b"\n"


def test_a_last_line_that_lacks_only_its_newline_is_kept(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 0}\n{"step": 1}')
    with MetricsLog(tmp_path) as log:
        log.write(2, {})
    assert [row["step"] for row in read_metrics(tmp_path / "metrics.jsonl")] == [0, 1, 2]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"step": 0}\n{"st\n{"step": 2}\n', "line 2 is not strict JSON"),
        ('{"step": 0, "loss": NaN}\n', "line 1 is not strict JSON.*NaN"),
        ('{"loss": 1.0}\n', "line 1 is not a step"),
        ("[1]\n", "line 1 is not a step"),
        ('{"step": 0, "loss": "low"}\n', "number or null for 'loss', got 'low'"),
    ],
)
def test_damage_names_its_line(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        read_metrics(path)


def test_no_metrics_file(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="does not exist"):
        read_metrics(tmp_path / "metrics.jsonl")


def test_wilson_equals_newcombes_published_example() -> None:
    # Newcombe 1998, Statistics in Medicine 17:857, table I: 81 of 263 is 0.2553 to 0.3662.
    assert wilson(81, 263) == pytest.approx((0.2553, 0.3662), abs=5e-5)


@pytest.mark.parametrize(("successes", "n"), [(0, 1), (1, 1), (0, 400), (400, 400), (1, 3), (298, 400)])
def test_wilson_equals_scipy(successes: int, n: int) -> None:
    expected = binomtest(successes, n).proportion_ci(method="wilson")
    assert wilson(np.int64(successes), n) == pytest.approx((expected.low, expected.high), abs=1e-12)


@pytest.mark.parametrize(("successes", "n"), [(0, 0), (3, 2), (-1, 2)])
def test_wilson_refuses_impossible_counts(successes: int, n: int) -> None:
    with pytest.raises(ValueError, match="at least 1 episode"):
        wilson(successes, n)


def test_progress_in_a_log_file_is_plain_lines(tmp_path: Path) -> None:
    # 2 of 10 steps done before; 2 more take 60 s, so the 6 that remain take 180 s.
    path, times = tmp_path / "log", iter([100.0, 160.0])
    with path.open("w") as stream, Progress(10, start=2, stream=stream, clock=lambda: next(times)) as progress:
        progress.update(4, "success 50 % [live 3/4]")
    assert path.read_text() == "step 4/10 | 0:01:00 elapsed, 0:03:00 left | success 50 % [live 3/4]\n"


def test_progress_on_a_terminal_is_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("TERM", "xterm")
    terminal, stream_fd = os.openpty()
    times = iter([0.0, 30.0])
    with open(stream_fd, "w") as stream, Progress(4, stream=stream, clock=lambda: next(times)) as progress:
        progress.update(1, "success [50] %")
        progress.close()
        written = b""
        while b"1/4" not in written and select.select([terminal], [], [], 10)[0]:  # it may come in pieces
            written += os.read(terminal, 65536)
        shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", written.decode())
    os.close(terminal)
    assert "1/4" in shown
    assert "0:01:30 left" in shown
    assert "success [50] %" in shown  # not taken for markup


def test_progress_refuses_a_start_beyond_the_end() -> None:
    with pytest.raises(ValueError, match="start 5 of 4"):
        Progress(4, start=5)


def test_import_is_light() -> None:
    code = "import sys, vla_rlaif.metrics, vla_rlaif.progress, vla_rlaif.report; print(json.dumps(list(sys.modules)))"
    out = subprocess.run([sys.executable, "-c", f"import json; {code}"], capture_output=True, text=True, check=True)
    loaded = set(json.loads(out.stdout))
    assert not loaded & {"torch", "jax", "mujoco", "tensorflow", "ray", "matplotlib.pyplot"}
