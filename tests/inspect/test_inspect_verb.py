"""`vla-rlaif inspect` from the command line: exports, and mistakes in words."""

import pytest
from inspect_runs import make_run

from vla_rlaif.cli import main


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("runs") / "run", steps=4)


def call(*arguments):
    with pytest.raises(SystemExit) as end:
        main(["inspect", *map(str, arguments)])
    return end.value.code


def test_an_export_takes_what_passes_the_filter(run, tmp_path, capsys):
    to = tmp_path / "a.csv"
    assert call(run, "--export", to, "--filter", "origin:train", "--order=-reward", "--limit", 3) == 0
    lines = to.read_text().splitlines()
    assert len(lines) == 4 and "3 of 20 episodes" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--export", "a.avi"], "exports are .csv"),
        (["--export", "a.csv", "--filter", "sucess:no"], "did you mean success"),
        (["--export", "a.csv", "--filter", "reward:99.."], "no episode"),
        (["--export", "a.csv", "--limit", "0"], "--limit is 0"),
        (["--export", "a.mp4", "--fps", "0"], "--fps is 0"),
        (["--filter", "success:no"], "what --export writes"),
        (["--port", "70000"], "ports are 0 to 65535"),
    ],
)
def test_mistakes(run, tmp_path, monkeypatch, capsys, flags, words):
    monkeypatch.chdir(tmp_path)
    assert call(run, *flags) == 2
    assert words in capsys.readouterr().err


def test_what_is_no_run(tmp_path, capsys):
    assert call(tmp_path) == 2 and "nothing to look at" in capsys.readouterr().err
