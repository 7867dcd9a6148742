"""The verbs. Imports are inside the verbs: `--help`, validation and `plan` answer without loading torch, jax or mujoco.

Exit codes: 0 done, 1 a fault (ours, or the machine's), 2 a user's mistake.
"""

import contextlib
import dataclasses
import difflib
import errno
import io
import os
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro
from pydantic import ValidationError

from vla_rlaif.config import RunConfig, explain, load_config, validate_again
from vla_rlaif.serve.settings import ServedSettings, ServeSettings

ConfigFile = tyro.conf.Positional[Path]


@dataclass(frozen=True)
class Train:
    """Align a policy: start policy, preference labels, reward model, GRPO, evaluation, report."""

    config: ConfigFile
    resume: bool = False  # go on from the newest checkpoint of the run directory
    overwrite: bool = False  # replace what the run directory holds
    same_as: Path | None = None  # another run's manifest.json: say which versions, code or machine differ here

    def __call__(self, config: RunConfig) -> None:
        from vla_rlaif.run import align

        align(config, resume=self.resume, overwrite=self.overwrite, say=say, same_as=self.same_as)


@dataclass(frozen=True)
class Collect:
    """Record demonstrations of the scripted expert, or episodes of a policy (to be labelled)."""

    config: ConfigFile
    to: Path  # folder of the dataset; a policy's episodes are appended
    policy: Path | None = None  # a policy folder; without it the expert acts
    episodes: int = 512  # episodes of a policy; demonstrations: warm_start.collect.episodes
    format: Literal["npz", "lerobot"] = "npz"  # lerobot: a LeRobotDataset v3, slower to write
    video: bool = False  # of a LeRobotDataset: lossy videos instead of images
    fps: int | None = None  # of a LeRobotDataset: env steps a second, if the env does not say

    def __call__(self, config: RunConfig) -> None:
        from vla_rlaif.record import Storage, collect

        storage = Storage(format=self.format, video=self.video, fps=self.fps)
        collect(config, self.to, self.policy, self.episodes, storage, say)


@dataclass(frozen=True)
class Convert:
    """Write a dataset of ours as a LeRobotDataset, or the other way round."""

    config: ConfigFile
    data: Path  # dataset to read
    to: Path  # folder to write
    format: Literal["npz", "lerobot"] = "lerobot"  # to write
    video: bool = False  # as for collect
    fps: int | None = None  # as for collect

    def __call__(self, config: RunConfig) -> None:
        from vla_rlaif.record import Storage, convert

        convert(config, self.data, self.to, Storage(format=self.format, video=self.video, fps=self.fps), say)


@dataclass(frozen=True)
class Imitate:
    """Fit a fresh policy to demonstrations."""

    config: ConfigFile
    data: Path  # folder that `collect` wrote, any LeRobotDataset, or its name on the Hugging Face Hub
    to: Path  # policy folder to write

    def __call__(self, config: RunConfig) -> None:
        from vla_rlaif import offline

        offline.imitate(config, self.data, self.to, say)


@dataclass(frozen=True)
class Label:
    """Label pairs of collected episodes with the config's labeller. `label DATA --ui` opens a page for people."""

    config: ConfigFile
    data: Path  # folder of a policy's episodes that `collect` wrote
    store: Path  # SQLite file; new records are appended
    pairs: int = 400
    again: bool = False  # label pairs that only other labellers have labelled, to see how far they agree
    outcomes: int = 0  # of compared episodes that the labeller is asked about one by one: has it succeeded?

    def __call__(self, config: RunConfig) -> None:
        from vla_rlaif import offline

        offline.label(config, self.data, self.store, self.pairs, say, again=self.again, num_outcomes=self.outcomes)


@dataclass(frozen=True)
class Labels:
    """Write a store of labels as Parquet, take one in, or show how far its labellers agree."""

    action: tyro.conf.Positional[Literal["export", "import", "agreement"]]
    store: tyro.conf.Positional[Path]  # SQLite file that `label` or a run wrote; import makes a new one
    file: Path | None = None  # Parquet file; of agreement the JSON file to write


@dataclass(frozen=True)
class Reward:
    """Fit a reward model to labelled episodes, or evaluate a fitted one. Both write its card, MODEL.card.html."""

    action: tyro.conf.Positional[Literal["fit", "eval"]]
    config: ConfigFile
    data: Path  # folder of the episodes
    store: Path  # SQLite file of their labels
    model: Path  # reward model file (.safetensors), written by fit and read by eval
    policy: Path | None = None  # policy folder, for reward.encoder policy
    demos: Path | None = None  # folder of demonstrations, for reward.outcomes demonstrations

    def __call__(self, config: RunConfig) -> None:
        from vla_rlaif.reward_verb import Files, reward

        files = Files(data=self.data, store=self.store, model=self.model, policy=self.policy, demos=self.demos)
        reward(self.action, config, files, say)


@dataclass(frozen=True)
class Score:
    """Try the config's reward on episodes, before anything is trained on it."""

    config: ConfigFile
    data: Path | None = None  # folder of a policy's episodes that `collect` wrote; without it some are played
    policy: Path | None = None  # policy folder that plays them; without it the config's policy, untrained
    episodes: int = 64  # to play, whole groups

    def __call__(self, config: RunConfig) -> None:
        from vla_rlaif.score import score

        score(config, self.data, self.policy, self.episodes, say)


@dataclass(frozen=True)
class Evaluate:
    """Success of policies on the test start states, with 95 % intervals; of two, compared on the same ones."""

    config: ConfigFile
    policy: tuple[str, ...]  # folders (ours, official Octo, LeRobot's) or addresses of policy servers, ws://HOST:PORT
    against: tuple[str, ...] = ()  # policies to compare with, on the same start states
    against_config: Path | None = None  # config whose policy section reads them; without it the same one
    noise_seeds: tuple[int, ...] = (0,)  # of the noise that a policy starts from: a repetition of all episodes each
    first_seed: int | None = None  # start states of these seeds: FIRST_SEED and those after it, as lerobot-eval's
    served: ServedSettings = dataclasses.field(default_factory=ServedSettings)
    to: Path | None = None  # JSON file to write; a page with clips of wins and losses goes beside it, as .html

    def __call__(self, config: RunConfig) -> None:
        from vla_rlaif.evaluation_verb import Request, evaluate_policies

        asked = Request(
            policy=self.policy,
            against=self.against,
            against_config=self.against_config,
            noise_seeds=self.noise_seeds,
            first_seed=self.first_seed,
            served=self.served,
            to=self.to,
        )
        evaluate_policies(config, asked, say)


@dataclass(frozen=True)
class Export:
    """Write a policy folder in its origin's form: LeRobot's `pretrained_model`, transformers', or official Octo."""

    config: ConfigFile
    policy: Path
    to: Path  # the folder; to an official Octo one that is there already a step is added
    step: int = 0  # the number that the step gets; LeRobot's folders have none

    def __call__(self, config: RunConfig) -> None:
        from vla_rlaif import offline

        offline.export(config, self.policy, self.to, self.step, say)


@dataclass(frozen=True)
class Serve:
    """Answer robots that speak openpi's protocol, with health and metrics over HTTP."""

    config: ConfigFile
    policy: Path  # policy folder, such as runs/NAME/best
    watch: bool = False  # swap the weights whenever the folder is replaced
    token_file: Path | None = None  # one token a line; a robot sends any of them as its API key
    settings: Annotated[ServeSettings, tyro.conf.arg(name="")] = dataclasses.field(default_factory=ServeSettings)

    def __call__(self, config: RunConfig) -> None:
        from vla_rlaif.serve.verbs import serve_policy

        serve_policy(config, self.policy, self.settings, token_file=self.token_file, follow=self.watch, say=say)


@dataclass(frozen=True)
class Plan:
    """What a run will do and need, before anything starts."""

    config: ConfigFile

    def __call__(self, config: RunConfig) -> None:
        from vla_rlaif.plan import describe

        print(describe(config))


@dataclass(frozen=True)
class Report:
    """Write report.html again from a run directory."""

    run: tyro.conf.Positional[Path]


@dataclass(frozen=True)
class Inspect:
    """Open a local page on a run, a folder of runs or a dataset; with --export write some of its episodes to a file."""

    path: tyro.conf.Positional[Path]  # run directory, folder of runs, dataset of ours, or LeRobotDataset
    export: Path | None = None  # file to write: .rrd (Rerun), .mp4, .gif, .csv or .parquet
    filter: str = ""  # of the exported episodes, such as "success:no reward:0.5.. task:push"
    order: str = "step"  # of the exported episodes: step, reward, spread, disagreement, ...; =-reward: downwards
    limit: int | None = None  # export the first so many
    fps: float = 5.0  # frames a second of an exported video; there is one frame a decision
    host: str = "127.0.0.1"  # address of the page; beyond loopback whoever has its token can look
    port: int = 0  # of the page; 0 lets the system choose
    names: tuple[str, ...] = ()  # host names besides localhost that the page is opened under


@dataclass(frozen=True)
class Doctor:
    """Check this machine: rendering, GPUs, extras, versions, memory, disk; each failure with its remedy."""

    renderer: Annotated[Literal["egl", "osmesa", "ray", "warp"], tyro.conf.arg(help="which one must work")] = "egl"
    full: bool = False  # also start what takes a while: every renderer, NCCL, Ray, an env of each suite
    config: Path | None = None  # also step the env of this run
    manifest: Path | None = None  # manifest.json of a run: say what differs here
    json: bool = False  # print JSON, for programs


VERBS: dict[str, type] = {
    "train": Train,
    "collect": Collect,
    "convert": Convert,
    "imitate": Imitate,
    "label": Label,
    "labels": Labels,
    "reward": Reward,
    "score": Score,
    "evaluate": Evaluate,
    "serve": Serve,
    "export": Export,
    "plan": Plan,
    "report": Report,
    "inspect": Inspect,
    "doctor": Doctor,
}


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point of `vla-rlaif`."""
    sys.exit(_exit_code(lambda: _run(list(sys.argv[1:] if argv is None else argv))))


def _run(argv: list[str]) -> None:
    if not argv or argv[0] in ("-h", "--help"):
        print(_usage())
        return
    verb, rest = argv[0], argv[1:]
    sys.path.append(str(Path.cwd()))  # so that a config can name code that lies beside it, `my_reward:function`
    if verb == "pool":
        from vla_rlaif.pool.verbs import main as pool

        pool(rest, now=time.time_ns() // 1000)
        return
    if verb not in VERBS:
        raise ValueError(f"unknown verb {verb!r}; the verbs are {', '.join([*VERBS, 'pool'])}.")
    if verb == "doctor":
        options = tyro.cli(Doctor, args=rest, prog="vla-rlaif doctor")
        from vla_rlaif.doctor import Options, check

        asked = Options(
            renderer=options.renderer,
            full=options.full,
            config=options.config,
            manifest=options.manifest,
            as_json=options.json,
        )
        if not check(asked):
            sys.exit(1)
        return
    if verb == "labels":
        given = tyro.cli(Labels, args=rest, prog="vla-rlaif labels")
        from vla_rlaif.preferences.verbs import labels

        labels(given.action, given.store, given.file, say)
        return
    if verb == "label" and "--ui" in rest:
        from vla_rlaif.label_page.verb import main as label_by_hand

        label_by_hand(rest, say)
        return
    if verb == "inspect":
        given = tyro.cli(Inspect, args=rest, prog="vla-rlaif inspect")
        from vla_rlaif.inspect.verb import inspect

        inspect(**vars(given), say=say)
        return
    if verb == "report":
        run = tyro.cli(Report, args=rest, prog="vla-rlaif report").run
        from vla_rlaif.report import write_report

        print(write_report(run))
        return
    # Every key of the config is a flag too; with a config named, --help lists them with the file's values.
    path = next((Path(a) for a in rest if a.endswith((".yaml", ".yml"))), None)
    if {"-h", "--help"} & set(rest):
        if path is None:
            tyro.cli(VERBS[verb], args=["--help"], prog=f"vla-rlaif {verb}")  # exits
        else:
            _overrides(load_config(path), ["--help"], f"vla-rlaif {verb} {path}")
    options, flags = tyro.cli(VERBS[verb], args=rest, return_unknown_args=True, prog=f"vla-rlaif {verb}")
    _refuse_near_misses(verb, flags)
    options(_overrides(load_config(options.config), flags, f"vla-rlaif {verb} {options.config}"))


def _overrides(config: RunConfig, flags: list[str], prog: str) -> RunConfig:
    if not flags:
        return config
    printed = io.StringIO()
    try:
        with contextlib.redirect_stderr(printed):
            changed = tyro.cli(
                RunConfig,
                args=flags,
                default=config,
                prog=prog,
                config=(tyro.conf.AvoidSubcommands, tyro.conf.FlagConversionOff),
            )
    except SystemExit as stop:
        # tyro shows a ValidationError in pydantic's words; what raised its exit tells whether it was one.
        cause: BaseException | None = stop
        while (cause := cause.__context__) is not None:
            if isinstance(cause, ValidationError):
                raise ValueError(explain(cause, "command line")) from None
        sys.stderr.write(printed.getvalue())
        raise
    return validate_again(changed)


def _refuse_near_misses(verb: str, flags: list[str]) -> None:
    """Flags that the verb does not know are taken for keys of the config, so its own names must be suggested here."""
    fields = [*dataclasses.fields(VERBS[verb]), *(dataclasses.fields(ServeSettings) if verb == "serve" else ())]
    own = [
        f"--{field.name.replace('_', '-')}" for field in fields if field.name not in ("config", "settings", "served")
    ]
    for flag in flags:
        near = difflib.get_close_matches(flag.partition("=")[0], own, n=1, cutoff=0.8)
        if flag.startswith("--") and near:
            raise ValueError(f"unknown option {flag}; did you mean {near[0]}?")


def _exit_code(run: Callable[[], None]) -> int:
    try:
        run()
        sys.stdout.flush()
    except ValueError as error:
        return _fail(2, f"error: {error}")
    except ModuleNotFoundError as error:
        from vla_rlaif.doctor import remedy

        package = (error.name or "").partition(".")[0]
        if (what_to_do := remedy(package)) is not None:
            return _fail(2, f"error: this needs the package {package}, which is not installed: {what_to_do}")
        traceback.print_exc()
        return _fail(1, f"error: {error}")
    except BrokenPipeError:  # the reader has seen enough, as in `| head`; what is buffered must not be tried again
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        return _fail(130, "stopped; a run goes on with --resume")
    except OSError as error:
        if error.errno == errno.ENOSPC:
            where = error.filename or "while writing"
            return _fail(1, f"error: the disk is full ({where}). Free some space and go on; a run takes --resume.")
        traceback.print_exc()
        return _fail(1, f"error: {error}")
    return 0


def _fail(code: int, message: str) -> int:
    print(message, file=sys.stderr, flush=True)
    return code


def _usage() -> str:
    lines = [f"  {name:9} {(kind.__doc__ or '').strip()}" for name, kind in VERBS.items()]
    lines.append("  pool      One GPU pool by the calendar: plan, simulate, override, run, status, down.")
    return "\n".join(
        [
            "usage: vla-rlaif VERB [CONFIG.yaml] [options] [--section.key value ...]",
            "",
            "Align vision-language-action robot policies with AI or human preferences.",
            "",
            *lines,
            "",
            "vla-rlaif VERB --help lists a verb's options; vla-rlaif VERB CONFIG.yaml --help every key of the run.",
        ]
    )


def say(text: str) -> None:
    print(text, flush=True)
