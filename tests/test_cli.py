"""The command: every verb works, every mistake is told in one paragraph with exit code 2, a full disk harms nothing."""

import contextlib
import errno
import io
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml
from compilation import little_optimised

from vla_rlaif.checkpoint import load_policy, save_policy
from vla_rlaif.cli import VERBS, main
from vla_rlaif.metrics import read_metrics

POINT = {
    "name": "point",
    "env": {"type": "point_reach", "num_envs": 16},
    "policy": {"type": "gaussian", "backend": "torch"},
    "reward": {"type": "pixel_distance"},
    "algorithm": {"group_size": 4, "clip_low": 0.2, "clip_high": 0.2},
    "loop": {"steps": 4, "validate_every": 2, "validation_episodes": 16, "checkpoint_every": 2},
    "evaluate": {"episodes": 16, "clips": 1},
}
TABLETOP = {
    "name": "tabletop",
    "env": {
        **{"type": "tabletop", "num_envs": 8, "image_size": 16, "renderer": "ray", "threads": 1},
        **{"chunk": 2, "max_steps": 4},
    },
    "policy": {
        **{"type": "octo", "token_dim": 16, "num_layers": 1, "mlp_dim": 16, "language_tokens": 7, "language_dim": 8},
        **{"head_dim": 16, "head_blocks": 1, "time_dim": 8, "diffusion_steps": 2, "tuned_steps": 2},
    },
    "warm_start": {"collect": {"episodes": 8}, "imitate": {"steps": 3, "batch": 16, "samples": 1}},
    "reward": {"type": "preference", "members": 2, "hidden": [8], "fit_steps": 10},
    "algorithm": {"group_size": 4},
    "evaluate": {"episodes": 8, "clips": 1},
}


@dataclass(frozen=True)
class Outcome:
    code: int
    out: str
    err: str


def vla(*argv: object) -> Outcome:
    """The command, in this process."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), pytest.raises(SystemExit) as exit:
        main([str(a) for a in argv])
    code = exit.value.code
    return Outcome(code if isinstance(code, int) else 0, out.getvalue(), err.getvalue())


def works(*argv: object) -> str:
    done = vla(*argv)
    assert done.code == 0, done.err
    return done.out


def refused(*argv: object, code: int = 2) -> str:
    """What the user reads: one paragraph, without a traceback."""
    done = vla(*argv)
    assert done.code == code, done.err
    assert done.err.strip() and "\n\n" not in done.err.strip() and "Traceback" not in done.err, done.err
    return " ".join(re.sub("[│╭╮╰╯─]", " ", done.err).split())


def write(path: Path, data: object) -> Path:
    path.write_text(yaml.safe_dump(data))
    return path


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


@pytest.fixture(autouse=True, scope="module")
def quick_compilation():
    """Nothing here runs long enough to repay optimised code."""
    with little_optimised():
        yield


@pytest.fixture
def point(tmp_path):
    return write(tmp_path / "point.yaml", {**POINT, "out": str(tmp_path / "run")})


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> tuple[Path, Path]:
    """(config, run directory) of a run that is over. Tests that change the directory copy it first."""
    folder = tmp_path_factory.mktemp("finished")
    config = write(folder / "point.yaml", {**POINT, "out": str(folder / "run")})
    assert "success after" in works("train", config)
    return config, folder / "run"


@pytest.fixture
def copied(finished, tmp_path) -> tuple[Path, Path]:
    shutil.copytree(finished[1], tmp_path / "run")
    return write(tmp_path / "point.yaml", {**POINT, "out": str(tmp_path / "run")}), tmp_path / "run"


# Help


def test_help_of_the_program_lists_every_verb():
    done = subprocess.run(
        [sys.executable, "-m", "vla_rlaif", "--help"], capture_output=True, text=True, timeout=60, check=True
    )
    assert all(re.search(rf"^  {verb} +\w", done.stdout, re.MULTILINE) for verb in VERBS)
    assert done.stdout == works("-h") == works() and not done.stderr


@pytest.mark.parametrize("verb", VERBS)
def test_help_of_each_verb(verb):
    text = works(verb, "--help")
    assert text.startswith(f"usage: vla-rlaif {verb}")
    doc = (VERBS[verb].__doc__ or "").split()
    assert " ".join(doc[:4]) in " ".join(text.split())


def test_help_with_a_config_lists_every_key_with_the_files_values(point):
    text = works("train", point, "--help")
    for key in ("--seed", "--learner.lr", "--env.num-envs", "--algorithm.group-size", "--loop.validate-every"):
        assert f"{key} " in text
    assert re.search(r"--env.num-envs INT\W+\(default: 16\)", text)


# Verbs


def test_train_writes_a_run_that_report_shows_again(copied):
    _, run = copied
    result = json.loads((run / "result.json").read_text())
    assert result["episodes"] == 16 and 0 <= result["success_after"] <= 1
    assert [line["step"] for line in read_metrics(run / "metrics.jsonl")] == [0, 1, 2, 3]
    (run / "report.html").unlink()
    assert works("report", run).strip() == str(run / "report.html")
    assert (run / "report.html").stat().st_size > 1000


def test_plan_and_overrides_have_effect(point, tmp_path):
    assert re.search(r"run directory +\S+/run\n", works("plan", point))
    assert re.search(r"steps +7, 112 episodes", works("plan", point, "--loop.steps", "7"))
    assert "-seed2" in works("plan", write(tmp_path / "free.yaml", POINT), "--seed=2")


def test_overrides_are_in_the_saved_config_and_change_the_run(point, finished, tmp_path):
    works("train", point, "--seed", 2, "--learner.lr", "1e-4", "--loop.steps", 1)
    saved = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    assert (saved["seed"], saved["learner"]["lr"], saved["loop"]["steps"]) == (2, 1e-4, 1)
    first, other = (read_metrics(run / "metrics.jsonl")[0] for run in (tmp_path / "run", finished[1]))
    assert first["rollout/truth"] != other["rollout/truth"]


def test_resume_and_overwrite(copied):
    config, run = copied
    elsewhere = ("--learner.devices", 1, "--learner.timeout-s", 60)  # a run may go on with other devices
    assert "resuming at step 4" in works("train", config, "--resume", "--loop.steps", 5, *elsewhere)
    assert [line["step"] for line in read_metrics(run / "metrics.jsonl")] == [0, 1, 2, 3, 4]
    works("train", config, "--overwrite", "--loop.steps", 1)
    assert len(read_metrics(run / "metrics.jsonl")) == 1


@dataclass(frozen=True)
class Chain:
    folder: Path
    config: Path
    said: dict[str, str]  # what each verb printed


@pytest.fixture(scope="module")
def chain(tmp_path_factory) -> Chain:
    """Every link by hand, on a tiny tabletop: demonstrations, policy, its episodes, labels, reward."""
    at = tmp_path_factory.mktemp("chain")
    config = write(at / "tabletop.yaml", TABLETOP)
    labelled = ("--data", at / "episodes", "--store", at / "labels.sqlite")
    fitted = (*labelled, "--model", at / "reward.safetensors", "--policy", at / "policy")
    collect = ("collect", config, "--to", at / "episodes", "--policy", at / "policy", "--episodes", 16)
    said = {
        "collect demonstrations": works("collect", config, "--to", at / "demos"),
        "imitate": works("imitate", config, "--data", at / "demos", "--to", at / "policy"),
        "evaluate": works("evaluate", config, "--policy", at / "policy", "--to", at / "success.json"),
        "collect": works(*collect),
        "label": works("label", config, *labelled, "--pairs", 40),
        "collect again": works(*collect),
        "label again": works("label", config, *labelled, "--pairs", 40),
        "fit": works("reward", "fit", config, *fitted),
        "eval": works("reward", "eval", config, *fitted),
    }
    return Chain(at, config, said)


def test_the_links_of_the_chain(chain):
    said = chain.said
    assert "8 demonstrations, " in said["collect demonstrations"]
    assert "imitate step 3: loss" in said["imitate"] and "policy written" in said["imitate"]
    assert re.match(r"success 0\.\d+, 95 % interval \[.*\], 8 episodes", said["evaluate"])
    outcomes = json.loads((chain.folder / "success.json").read_text())["outcomes"]
    assert len(outcomes) == 8
    assert "16 episodes more" in said["collect"]
    assert "40 labels (asked for 40)" in said["label"] and "80 in all" in said["label again"]
    assert "held_out_accuracy" in said["fit"] and "reward model written" in said["fit"]
    figures = json.loads((chain.folder / "reward.json").read_text())
    assert (figures["num_pairs"], figures["num_episodes"]) == (80, 32)
    assert -1 <= figures["kendall_tau"] <= 1 and 0 <= figures["held_out_accuracy"] <= 1


def test_a_second_collect_plays_other_start_states(chain):
    from vla_rlaif.dataset import load_episodes

    (_, first), (_, second) = load_episodes(chain.folder / "episodes")
    assert not set(first.starts.seed.tolist()) & set(second.starts.seed.tolist())


def test_doctor_answers():
    done = vla("doctor", "--renderer", "ray")
    assert done.code in (0, 1) and "rendering ray: works" in done.out and not done.err


# Mistakes


def test_an_unknown_verb_lists_the_verbs():
    message = refused("trian")
    assert "unknown verb 'trian'" in message and all(verb in message for verb in VERBS)


@pytest.mark.parametrize(
    ("flags", "near"),
    [
        (["--learner.lrr", "1"], "--learner.lr"),
        (["--algoritm.group-size", "4"], "--algorithm.group-size"),
        (["--resum"], "--resume"),
        (["--overwrit"], "--overwrite"),
    ],
)
def test_an_unknown_flag_names_the_near_miss(point, flags, near):
    message = refused("train", point, *flags)
    assert flags[0] in message and f"{near} " in f"{message} ".replace("?", " ")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"larner": {}}, "larner: unknown key; did you mean learner?"),
        ({"seed": "many"}, "seed: Input should be a valid integer"),
        ({"algorithm": {**POINT["algorithm"], "group_size": 5}}, "env.num_envs 16 does not split into groups of 5"),
        ({"env": {"type": "point_reech"}}, "'point_reach'"),
    ],
)
def test_mistakes_in_the_file(tmp_path, change, message):
    assert message in refused("train", write(tmp_path / "bad.yaml", {**POINT, **change}))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--seed", "many"], "invalid literal for int() with base 10: 'many'"),
        (["--algorithm.group-size", "5"], "env.num_envs 16 does not split into groups of 5"),
        (["--algorithm.group-size", "1"], "group_size: Input should be greater than or equal to 2 (got 1)"),
        (["--seed"], "--seed"),
        (["stray"], "stray"),
    ],
)
def test_mistakes_in_flags(point, flags, message):
    refusal = refused("train", point, *flags)
    assert message in refusal and "pydantic" not in refusal


def test_a_missing_config_or_option(tmp_path):
    write(tmp_path / "there.yaml", POINT)
    assert f"no config {tmp_path / 'none.yaml'}" in refused("plan", tmp_path / "none.yaml")
    assert "there.yaml" in refused("plan", tmp_path / "none.yaml")
    assert "PATH" in refused("train")
    assert "--store" in refused("label", tmp_path / "there.yaml", "--data", tmp_path)
    assert "fit" in refused("reward", "fti", tmp_path / "there.yaml")


def test_a_missing_run_to_report(tmp_path):
    assert str(tmp_path / "none") in refused("report", tmp_path / "none")


def test_an_existing_run_is_neither_mixed_nor_replaced(copied):
    config, run = copied
    before = contents(run)
    message = refused("train", config)
    assert f"{run} already holds a run" in message and "--resume" in message and "--overwrite" in message
    assert contents(run) == before


def test_nothing_to_resume(point, tmp_path):
    assert "nothing to resume" in refused("train", point, "--resume")
    assert not (tmp_path / "run").exists()


def test_a_run_is_not_resumed_with_other_settings(copied):
    config, run = copied
    before = contents(run)
    assert "other settings in: learner" in refused("train", config, "--resume", "--learner.lr", "0.5")
    assert contents(run) == before


def test_missing_and_truncated_policies(chain, tmp_path):
    assert "no policy checkpoint at" in refused("evaluate", chain.config, "--policy", tmp_path / "none")
    shutil.copytree(chain.folder / "policy", tmp_path / "policy")
    weights = tmp_path / "policy" / "params.safetensors"
    weights.write_bytes(weights.read_bytes()[:-10])
    assert "is damaged or incomplete" in refused("evaluate", chain.config, "--policy", tmp_path / "policy")
    data = {**TABLETOP, "out": str(tmp_path / "run"), "warm_start": {"checkpoint": str(tmp_path / "policy")}}
    assert "is damaged or incomplete" in refused("train", write(tmp_path / "c.yaml", data))


def test_a_policy_of_another_env_is_named(chain):
    message = refused("evaluate", chain.config, "--policy", chain.folder / "policy", "--env.image-size", "32")
    assert "image_size 16, not 32" in message


def test_all_checkpoints_of_a_run_torn(copied):
    config, run = copied
    for tensors in run.glob("checkpoints/*/tensors.safetensors"):
        tensors.write_bytes(tensors.read_bytes()[:-10])
    message = refused("train", config, "--resume", "--loop.steps", 6)
    assert "nothing to resume from" in message and "checksum" in message


def test_the_chain_names_what_is_missing(chain, tmp_path):
    labelled = ("--data", chain.folder / "episodes", "--store", chain.folder / "labels.sqlite")
    model = ("--model", tmp_path / "reward.safetensors")
    assert "pass its folder as --policy" in refused("reward", "fit", chain.config, *labelled, *model)
    assert "no reward model at" in refused("reward", "eval", chain.config, *labelled, *model)
    assert "holds demonstrations, wanted episodes" in refused(
        "label", chain.config, "--data", chain.folder / "demos", "--store", tmp_path / "s.sqlite"
    )
    assert "is not a dataset" in refused("imitate", chain.config, "--data", tmp_path, "--to", tmp_path / "p")
    assert "does not split into groups of 4" in refused(
        "collect", chain.config, "--to", tmp_path / "e", "--policy", chain.folder / "policy", "--episodes", 6
    )
    assert "already holds demonstrations" in refused(
        "collect", chain.config, "--to", chain.folder / "demos", "--policy", chain.folder / "policy"
    )


def test_another_policy_is_not_taken_for_the_one_of_the_fit(chain, tmp_path):
    metadata, weights = load_policy(chain.folder / "policy")
    save_policy(tmp_path / "policy", metadata, {name: 1.1 * value for name, value in weights.items()})
    labelled = ("--data", chain.folder / "episodes", "--store", chain.folder / "labels.sqlite")
    model = ("--model", chain.folder / "reward.safetensors", "--policy", tmp_path / "policy")
    assert "was fitted with --policy" in refused("reward", "eval", chain.config, *labelled, *model)


def test_an_env_without_an_expert_has_no_demonstrations(point, tmp_path):
    assert "PointReach has no expert()" in refused("collect", point, "--to", tmp_path / "d")


def test_a_reward_that_scores_nothing(tmp_path):
    reward = {"type": "python", "function": "rewards_for_tests:all_nan"}
    config = write(tmp_path / "nan.yaml", {**POINT, "out": str(tmp_path / "run"), "reward": reward})
    assert "scores no episode (all NaN)" in refused("train", config)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("rewards_for_tests:none", "'rewards_for_tests' has no 'none'"),
        ("no_such_module:f", "'no_such_module', which cannot be found"),
        ("rewards_for_tests", "'rewards_for_tests' does not name anything; wanted 'package.module:name'"),
    ],
)
def test_a_reward_that_does_not_exist(tmp_path, function, message):
    reward = {"type": "python", "function": function}
    config = write(tmp_path / "bad.yaml", {**POINT, "out": str(tmp_path / "run"), "reward": reward})
    assert message in refused("train", config)


def test_a_machine_without_opengl_is_told_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "mujoco.egl", None)  # importing it fails, as PyOpenGL does without its libraries
    monkeypatch.setenv("PYOPENGL_PLATFORM", "egl")
    data = {**TABLETOP, "env": {**TABLETOP["env"], "renderer": "egl"}, "out": str(tmp_path / "run")}
    message = refused("train", write(tmp_path / "egl.yaml", data))
    assert "apt install libegl1 libgl1" in message and "renderer: ray" in message


# A full disk


@pytest.fixture
def no_space(monkeypatch):
    def fsync(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", fsync)


def test_a_full_disk_leaves_a_run_as_it_was(copied, no_space):
    config, run = copied
    before = contents(run)
    assert "the disk is full" in refused("train", config, "--resume", "--loop.steps", 6, code=1)
    assert contents(run) == before


def test_a_full_disk_leaves_what_the_chain_wrote(chain, no_space):
    before = contents(chain.folder)
    at = chain.folder
    labelled = ("--data", at / "episodes", "--store", at / "labels.sqlite")
    for command in (
        ("evaluate", chain.config, "--policy", at / "policy", "--to", at / "success.json"),
        ("collect", chain.config, "--to", at / "episodes", "--policy", at / "policy", "--episodes", 8),
        ("reward", "fit", chain.config, *labelled, "--model", at / "reward.safetensors", "--policy", at / "policy"),
    ):
        assert "the disk is full" in refused(*command, code=1)
        assert contents(chain.folder) == before
    with pytest.raises(OSError, match="No space left"):  # what `imitate` ends with
        save_policy(at / "policy", {}, {})
    assert contents(chain.folder) == before


@pytest.fixture
def small_disk(tmp_path) -> Iterator[Path]:
    """A file system of half a megabyte."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=512k", "tmpfs", str(folder)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("mounting a small file system is not permitted here")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_run_goes_on_after_its_disk_was_full(finished, small_disk, tmp_path):
    run = small_disk / "run"
    shutil.copytree(finished[1], run)
    config = write(tmp_path / "point.yaml", {**POINT, "out": str(run)})
    checkpoints, before = contents(run / "checkpoints"), contents(run)
    filler = small_disk / "filler"
    with contextlib.suppress(OSError), filler.open("wb") as file:
        while file.write(bytes(4096)):
            file.flush()
    assert "the disk is full" in refused("train", config, "--resume", "--loop.steps", 6, code=1)
    now = contents(run)
    assert {name: now[name] for name in before if "tensorboard" not in name} == {
        name: data for name, data in before.items() if "tensorboard" not in name
    }
    assert contents(run / "checkpoints") == checkpoints
    filler.unlink()
    assert "resuming at step 4" in works("train", config, "--resume", "--loop.steps", 6)
    assert [line["step"] for line in read_metrics(run / "metrics.jsonl")] == list(range(6))
