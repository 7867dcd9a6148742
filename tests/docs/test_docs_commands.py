"""Every command in README and docs: run at a small size, or parsed by the program that it calls, or named below with
the reason why neither is possible. A command that is none of these fails."""

import runpy
import shutil
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import tyro
from commands import ROOT, Command, commands_of, documented

from vla_rlaif import cli
from vla_rlaif.config import RunConfig
from vla_rlaif.pool.verbs import VERBS as POOL_VERBS

# Other people's programs: whether they take these words is theirs to say, and they are not here or need a network.
FOREIGN = {
    "ray start": "starts a cluster that outlives the test; tests/clusters starts Ray in its own way",
    "hf download": "downloads gigabytes",
    "python -m vllm": "vLLM is in an environment of its own (`make test-vllm`)",
    "python -m pip install": "changes the environment that runs the test; the extras are checked",
    "pip install": "changes the environment that runs the test; the extras are checked",
    "lerobot-eval": "tests/envs/test_lerobot_env.py and tests/policies call what it calls",
    "tensorboard --logdir": "a server that runs until it is stopped; tests/test_metrics.py reads its files",
    "jupyter lab": "opens a browser; tests/test_notebooks.py runs the notebooks",
}
OUTPUT = {"label at http://127.0.0.1:8765/hX3...Q/": "what the command before it prints"}
# Words that stand for a file of the reader's own.
CONFIGS = {
    **dict.fromkeys(("CONFIG", "CONFIG.yaml", "OTHER.yaml", "run.yaml", "RUN.yaml"), "configs/tabletop_reach.yaml"),
    **dict.fromkeys(("runs/NAME/config.yaml", "runs/X/config.yaml", "my_policy.yaml"), "configs/point_reach.yaml"),
    **dict.fromkeys(("my_reward.yaml", "my_sum.yaml"), "configs/point_reach.yaml"),
    "pool.yaml": "configs/pool_factory.yaml",
}
# Run with these words behind theirs, each in a fresh folder; what takes minutes or hours of work is parsed only.
ALONE: dict[str, tuple[str, ...]] = {
    "vla-rlaif --help": (),
    "vla-rlaif plan configs/tabletop_reach.yaml": (),
    "vla-rlaif pool plan configs/pool_factory.yaml --at 2026-11-02T00:00 --picture docs/images/week.png": (),
    "vla-rlaif pool simulate configs/pool_factory.yaml --at 2026-11-02T00:00 --node-failures 1": ("--days", "1"),
}
# Run one after the other in one folder, with these words in place of theirs: the same commands on a tiny run.
TINY = {
    "CONFIG": "tiny.yaml",
    "OTHER.yaml": "tiny.yaml",
    "configs/tabletop_reach.yaml": "tiny.yaml",
    "FOLDER": "data",
    "runs/NAME/start": "runs/NAME/best",  # the tiny run has no warm start
    "labels.sqlite": "data/labels.sqlite",
    "512": "32",
    "400": "20",
}
CHAIN = (
    "vla-rlaif train CONFIG",
    "vla-rlaif evaluate CONFIG --policy runs/NAME/best --to success.json",
    "vla-rlaif evaluate CONFIG --policy runs/NAME/best --against runs/NAME/start --to better.json",
    "vla-rlaif collect configs/tabletop_reach.yaml --policy runs/NAME/best --to data --episodes 512",
    "vla-rlaif label CONFIG --data FOLDER --store labels.sqlite --pairs 400",
    "vla-rlaif labels agreement labels.sqlite",
    "vla-rlaif labels export labels.sqlite --file labels.parquet",
    "vla-rlaif reward fit CONFIG --data data --store data/labels.sqlite --model m.safetensors",
    "vla-rlaif train CONFIG --resume",
)
TINY_RUN = """
name: tiny
out: runs/NAME
env: {type: point_reach, num_envs: 16}
policy: {type: gaussian}
reward: {type: preference, encoder: {type: cnn}, initial_episodes: 16, initial_labels: 12, budget: 24, members: 1,
  fit_steps: 5}
algorithm: {group_size: 4, clip_low: 0.2, clip_high: 0.2}
learner: {lr: 0.05, minibatch: 64}
loop: {steps: 1, validate_every: 1, validation_episodes: 16}
evaluate: {episodes: 16, clips: 1}
"""


class Parsed(Exception):
    """The command line is understood; what comes next would be the work."""


def vla_commands() -> list[Command]:
    return [c for c in documented() if c.words[0] == "vla-rlaif"]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project's folder: its configs, and nothing else."""
    shutil.copytree(ROOT / "configs", tmp_path / "configs")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    return tmp_path


@pytest.fixture
def stops_before_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command line is read by the programs themselves, which then stop."""
    parse = tyro.cli

    def stop_after(*args: Any, **options: Any) -> Any:
        result = parse(*args, **options)
        if options.get("return_unknown_args") or (args and args[0] is RunConfig):
            return result  # there is more to read
        raise Parsed

    def stop(*_: object, **__: object) -> None:
        raise Parsed

    monkeypatch.setattr(tyro, "cli", stop_after)
    for kind in cli.VERBS.values():
        monkeypatch.setattr(kind, "__call__", stop, raising=False)


def run(words: list[str]) -> None:
    """A vla-rlaif command, which must succeed."""
    with pytest.raises(SystemExit) as stopped:
        cli.main(words[1:])
    assert not stopped.value.code, words


def test_a_command_that_nobody_can_run_is_found():
    page = (
        "Text `make nothing`, `not a command`.\n\n    vla-rlaif trian CONFIG   # a comment\n\n```bash\nrm -rf x\n```\n"
    )
    assert commands_of(page) == ["vla-rlaif trian CONFIG", "rm -rf x", "make nothing"]


def test_every_command_is_known():
    known = ("make", "vla-rlaif")
    for command in documented():
        words = command.words
        is_ours = words[0] in known or (words[0] == "python" and is_project_file(words))
        is_foreign = any(" ".join(words).startswith(program) for program in FOREIGN)
        assert is_ours or is_foreign or command.text in OUTPUT, f"{command.page}: {command.text}"


def is_project_file(words: list[str]) -> bool:
    path = words[2].replace(".", "/") + ".py" if words[1] == "-m" else words[1]
    return (ROOT / path).is_file()


def test_tables_name_commands_that_are_there():
    texts = {" ".join(c.words) for c in documented()}
    assert set(ALONE) | set(CHAIN) <= texts
    for program in FOREIGN:
        assert any(text.startswith(program) for text in texts), f"{program} is in no page any more"


def test_make_targets():
    targets = [line.partition(":")[0] for line in (ROOT / "Makefile").read_text().splitlines() if ":" in line]
    variables = [
        line.partition("?=")[0].strip() for line in (ROOT / "Makefile").read_text().splitlines() if "?=" in line
    ]
    for command in documented():
        if command.words[0] == "make":
            for word in command.words[1:]:
                name, is_set, _ = word.partition("=")
                assert name in (variables if is_set else targets), f"{command.page}: {command.text}"


def test_extras_exist():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for command in documented():
        if "pip" in command.words and "install" in command.words:
            named = command.text.partition(".[")[2].partition("]")[0]
            assert set(filter(None, named.split(","))) <= set(extras), f"{command.page}: {command.text}"


@pytest.mark.parametrize("command", vla_commands(), ids=lambda c: f"{c.page}: {c.text}")
def test_verbs_understand_it(folder: Path, stops_before_work: None, command: Command):
    words = [CONFIGS.get(word.partition("|")[0], word.partition("|")[0]) for word in command.words if word != "|"]
    verbs = POOL_VERBS if words[1:2] == ["pool"] else cli.VERBS
    is_a_list = (
        " | " in command.text
        or len(words) <= 2
        or " ".join(words) in ("vla-rlaif reward fit", "vla-rlaif labels export")
    )
    if is_a_list and "--help" not in words:  # verbs are named, nothing is called
        actions = {"fit", "eval", "pool"}
        assert set(words[1:]) - actions <= set(verbs) | ({"pool"} if "pool" in words else set()), command.text
        return
    with pytest.raises((Parsed, SystemExit)) as stopped:
        cli.main(words[1:])
    is_help = "--help" in words and isinstance(stopped.value, SystemExit) and not stopped.value.code
    assert isinstance(stopped.value, Parsed) or is_help, f"{command.page}: {command.text}"


@pytest.mark.parametrize(
    "command",
    [c for c in documented() if c.words[0] == "python" and is_project_file(c.words)],
    ids=lambda c: f"{c.page}: {c.text}",
)
def test_scripts_understand_it(
    folder: Path, stops_before_work: None, monkeypatch: pytest.MonkeyPatch, command: Command
):
    words = command.words[1:]
    if words == ["vla_rlaif/envs/egl_devices.py"]:
        return  # it takes no options
    monkeypatch.syspath_prepend(str(ROOT))
    monkeypatch.setattr(sys, "argv", words[1:] if words[0] == "-m" else words)
    with pytest.raises(Parsed):
        if words[0] == "-m":
            runpy.run_module(words[1], run_name="__main__", alter_sys=False)
        else:
            monkeypatch.syspath_prepend(str((ROOT / words[0]).parent))
            runpy.run_path(str(ROOT / words[0]), run_name="__main__")


@pytest.mark.parametrize(("text", "smaller"), ALONE.items())
def test_runs_alone(folder: Path, text: str, smaller: tuple[str, ...]):
    run([*text.removeprefix(".venv/bin/").split(), *smaller])


def test_the_chain_runs_on_a_tiny_run(folder: Path):
    (folder / "tiny.yaml").write_text(TINY_RUN)
    for text in CHAIN:
        run([TINY.get(word, word) for word in text.split()])
    assert (folder / "runs/NAME/report.html").exists()
    assert (folder / "m.safetensors").exists() and (folder / "labels.parquet").exists()
    assert (folder / "success.html").exists() and (folder / "better.json").exists()
