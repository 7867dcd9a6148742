"""Runs of a small job in which something dies, hangs or raises at a random moment: what became of them, as a table.

    python benchmarks/faults.py --runs 60 --out faults.json --markdown faults.md

One Ray cluster on this machine for all runs; every run is the real `vla-rlaif train` in a process of its own, with a
learner, two rollout workers whose envs are in env workers, a reward worker that learns from labels and a reference
worker. Faults come from outside: signals to processes, found by their ids in the run's logs. What is pure or resumes
from a checkpoint must end with the very numbers of an undisturbed run; of the rest the counts must add up.
"""

import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import tyro
import yaml
from fault_env import BROKEN
from fault_job import DECISIONS, GROUP, NUM_ENVS, STEPS, TEST_EPISODES, Machine, job
from students_t import mean_and_half_width

from vla_rlaif.metrics import read_metrics, wilson

ALONE_S = 30.0  # for workers to end after their driver
HERE = Path(__file__).resolve().parent


@dataclass(frozen=True)
class Kind:
    """A way to fail. ``is_exact``: the run's numbers must be those of the undisturbed one."""

    what: str
    strike: Callable[["Run"], None]
    is_exact: bool = False
    resumes: bool = False  # the run is gone, and is started again with --resume
    fails: bool = False  # the run must end with the user's traceback
    breaks_envs: bool = False  # episodes may fail of groups that are not lost
    ranks: int = 1  # of the learner; the undisturbed run has as many, for sums over ranks round differently


@dataclass(frozen=True, kw_only=True)
class Result:
    kind: str
    seed: int
    at_step: int  # steps that were done when it struck
    seconds: float
    is_ok: bool
    problem: str  # empty if it is
    lost_groups: int
    failed_episodes: int  # those of lost groups too
    success: float
    slowest_step_s: float


class Run:
    """One process of the job, and those that work for it."""

    def __init__(self, folder: Path, config: Mapping[str, Any], deadline_s: float) -> None:
        self.folder, self._deadline = folder, time.monotonic() + deadline_s
        self._config = folder.with_suffix(".yaml")
        self._config.write_text(yaml.safe_dump(dict(config)))
        self.node: Callable[[], None] | None = None
        self.process = self._start()

    def _start(self, *flags: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "vla_rlaif", "train", str(self._config), "--out", str(self.folder), *flags]
        with self.folder.with_suffix(".log").open("ab") as log:
            return subprocess.Popen(command, cwd=HERE, stdout=log, stderr=log)

    def resume(self) -> None:
        self.process = self._start("--resume")

    @property
    def steps(self) -> int:
        path = self.folder / "metrics.jsonl"
        return path.read_bytes().count(b"\n") if path.exists() else 0

    def wait_for_step(self, step: int) -> None:
        while self.steps < step and self.process.poll() is None:
            self._in_time(f"step {step}")
            time.sleep(0.02)

    def end(self) -> int:
        while self.process.poll() is None:
            self._in_time("its end")
            time.sleep(0.05)
        return self.process.returncode

    def pid(self, worker: str) -> int:
        """Of the newest incarnation."""
        lines = (self.folder / "logs" / f"{worker}.log").read_text().splitlines()
        return int([line for line in lines if line.startswith("-- process ")][-1].split()[2])

    def last_words(self) -> str:
        return self.folder.with_suffix(".log").read_text().rstrip()

    def workers(self) -> list[int]:
        """Those of all incarnations that still run."""
        logs = [log.read_text().splitlines() for log in (self.folder / "logs").glob("*.log")]
        pids = [int(line.split()[2]) for lines in logs for line in lines if line.startswith("-- process ")]
        return [pid for pid in pids if b"ray::" in cmdline(pid)]

    def wait_until_alone(self) -> None:
        """Workers end by themselves when their driver is gone."""
        until = time.monotonic() + ALONE_S
        while self.workers():
            if time.monotonic() > until:
                raise TimeoutError(f"workers {self.workers()} run on {ALONE_S:g} s after their driver's death")
            time.sleep(0.2)

    def bury(self) -> None:
        """Whatever is left of it, stopped processes too."""
        if self.process.poll() is None:
            self.process.kill()
        for pid in self.workers():
            os.kill(pid, signal.SIGKILL)

    def _in_time(self, what: str) -> None:
        if time.monotonic() > self._deadline:
            raise TimeoutError(f"hung: no {what}")


def cmdline(pid: int) -> bytes:
    """How the process was started; empty if there is none with this id."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def children(pid: int) -> list[int]:
    path = Path(f"/proc/{pid}/task")
    return [int(child) for task in path.iterdir() for child in (task / "children").read_text().split()]


def signals(worker: str, number: int) -> Callable[[Run], None]:
    return lambda run: os.kill(run.pid(worker), number)


def signals_env(number: int) -> Callable[[Run], None]:
    def strike(run: Run) -> None:
        workers = [p for p in children(run.pid("rollout-0")) if b"worker_start.py" in cmdline(p)]
        os.kill(workers[0], number)

    return strike


def ends_node(run: Run) -> None:
    assert run.node is not None
    run.node()


KILL, STOP = signal.SIGKILL, signal.SIGSTOP
PLAIN = {1: "none", 2: "none_ranks"}  # undisturbed runs by the number of ranks
KINDS = {
    "none": Kind("nothing happens", lambda run: None, is_exact=True),
    "none_ranks": Kind("nothing happens, two learner ranks", lambda run: None, is_exact=True, ranks=2),
    "env_killed": Kind("an env worker is killed", signals_env(KILL), breaks_envs=True),
    "env_frozen": Kind("an env worker freezes", signals_env(STOP), breaks_envs=True),
    "rollout_killed": Kind("a rollout worker is killed", signals("rollout-1", KILL)),
    "rollout_frozen": Kind("a rollout worker freezes", signals("rollout-1", STOP)),
    "reward_killed": Kind("the reward worker is killed", signals("reward-0", KILL), is_exact=True),
    "reward_frozen": Kind("the reward worker freezes", signals("reward-0", STOP), is_exact=True),
    "reward_raises": Kind("the reward raises", lambda run: None, fails=True),
    "reference_killed": Kind("the reference worker is killed", signals("reference-0", KILL), is_exact=True),
    "learner_killed": Kind("the learner is killed", signals("learner-0", KILL), is_exact=True),
    "learner_frozen": Kind("the learner freezes", signals("learner-0", STOP), is_exact=True),
    "rank_killed": Kind("one of two learner ranks is killed", signals("learner-1", KILL), is_exact=True, ranks=2),
    "node_killed": Kind("a node dies", ends_node),
    "driver_killed": Kind(
        "the driver is killed, and resumed", lambda run: run.process.kill(), is_exact=True, resumes=True
    ),
}


@dataclass(frozen=True)
class Options:
    runs: int = 60  # besides the undisturbed ones
    kinds: tuple[str, ...] = tuple(name for name in KINDS if name not in PLAIN.values())  # in turns
    seeds: int = 3  # of the job; with each there is an undisturbed run, which the others are compared with
    seed: int = 0  # of the moments
    deadline_s: float = 300.0  # of a run: past it, it hangs
    pause_s: float = 0.003  # of an env's step: with 0, playing is so short that few moments hit it
    work: Path | None = None  # folder for the runs, short; kept if given
    out: Path | None = None  # JSON file to write
    markdown: Path | None = None  # table to write


def main(options: Options) -> None:
    work = options.work or Path(tempfile.mkdtemp(prefix="faults-"))
    work.mkdir(parents=True, exist_ok=True)
    machine = Machine(work / "ray")
    results: list[Result] = []
    try:
        needed = sorted({PLAIN[KINDS[name].ranks] for name in options.kinds})
        keys = [(name, seed) for name in needed for seed in range(options.seeds)]
        plain = {(name, seed): strike(name, seed, 0.0, machine, work, options, {}) for name, seed in keys}
        results += [result for result, _ in plain.values()]
        lines = {key: metrics for key, (_, metrics) in plain.items()}
        draw = random.Random(options.seed)
        for number in range(options.runs):
            kind = options.kinds[number % len(options.kinds)]
            seed, moment = number // len(options.kinds) % options.seeds, draw.random()
            result, _ = strike(kind, seed, moment, machine, work, options, lines, number=number)
            results.append(result)
            print(f"{number + 1} of {options.runs}: {result}", flush=True)
    finally:
        machine.close()
        if options.work is None:
            shutil.rmtree(work, ignore_errors=True)
    if options.out is not None:
        options.out.write_text(json.dumps([asdict(result) for result in results], indent=1))
    table = as_table(results)
    print(table)
    if options.markdown is not None:
        options.markdown.write_text(table)


def strike(
    name: str,
    seed: int,
    moment: float,
    machine: Machine,
    work: Path,
    options: Options,
    plain: Mapping[tuple[str, int], Sequence[Mapping[str, float]]],
    *,
    number: int = -1,
) -> tuple[Result, list[dict[str, float]]]:
    """One run, struck ``moment`` (in [0, 1)) of the way through its training."""
    kind, begun = KINDS[name], time.monotonic()
    at, rest = divmod(moment * (STEPS - 1), 1.0)
    reward = {"type": "python", "function": f"fault_env:breaks_at_{(2, 5, 8)[seed % 3]}"} if kind.fails else None
    folder = work / (f"{number}-{name}" if number >= 0 else f"{name}-{seed}")
    if kind.strike is ends_node:
        machine.add_node()
    run = Run(
        folder, job(seed, machine.address, pause_s=options.pause_s, reward=reward, ranks=kind.ranks), options.deadline_s
    )
    run.node = machine.end_node
    at_step, problem = 0, ""
    try:
        run.wait_for_step(int(at) + 1)
        playing_s = options.pause_s * NUM_ENVS / 2 * DECISIONS  # two rollout workers, each with its members in turn
        time.sleep(rest * (0.5 + playing_s))  # a step takes about so long
        at_step = run.steps
        if run.process.poll() is not None and not kind.fails:
            raise LookupError("it ended before it was struck")
        kind.strike(run)
        code = run.end()
        if kind.resumes:
            run.wait_until_alone()
            run.resume()
            code = run.end()
        problem = judge(kind, run, code, plain.get((PLAIN[kind.ranks], seed)))
    except (TimeoutError, OSError, LookupError) as error:
        problem = f"{type(error).__name__}: {error}"
    finally:
        run.bury()
        machine.end_node()
    metrics = read_metrics(folder / "metrics.jsonl") if (folder / "metrics.jsonl").exists() else []
    ended = folder / "result.json"
    return Result(
        kind=name,
        seed=seed,
        at_step=at_step,
        seconds=time.monotonic() - begun,
        is_ok=not problem,
        problem=problem,
        lost_groups=int(sum(line["groups/lost"] for line in metrics)),
        failed_episodes=int(sum(line["episodes/failed"] for line in metrics)),
        success=json.loads(ended.read_text())["success_after"] if ended.exists() else float("nan"),
        slowest_step_s=max((line["time/step_s"] for line in metrics), default=float("nan")),
    ), metrics


def judge(kind: Kind, run: Run, code: int, plain: Sequence[Mapping[str, float]] | None) -> str:
    """What is wrong; empty if nothing is."""
    last = run.last_words().splitlines()
    if kind.fails:
        wanted = f"ZeroDivisionError: {BROKEN}"
        return "" if code and last[-1] == wanted else f"exit code {code}, and the last line was {last[-1]!r}"
    if code:
        return f"exit code {code}: {' / '.join(last[-3:])}"
    metrics = read_metrics(run.folder / "metrics.jsonl")
    if [line["step"] for line in metrics] != list(range(STEPS)):
        return f"its steps are {[line['step'] for line in metrics]}"
    for line in metrics:
        ended = line["episodes/trained"] + line["episodes/failed"] + line["episodes/evicted"]
        failed, lost = line["episodes/failed"], GROUP * line["groups/lost"]
        if failed < lost or (failed > lost and not kind.breaks_envs):
            return f"step {line['step']}: {failed:.0f} episodes failed, and lost groups had {lost:.0f}"
        if line["episodes/ordered"] != ended or line["episodes/ordered"] % NUM_ENVS:
            return f"step {line['step']}: {line['episodes/ordered']:.0f} episodes were ordered, and {ended:.0f} ended"
    if kind.is_exact and plain is not None and comparable(metrics) != comparable(plain):
        return "its numbers are not those of the undisturbed run"
    return ""


def comparable(lines: Sequence[Mapping[str, float]]) -> list[dict[str, float]]:
    """Everything but times and what counts faults."""
    timed = ("time/", "idle/", "sync/", "env/", "minutes", "reward/fit_s", "jax/")
    return [{k: v for k, v in line.items() if not k.startswith(timed)} for line in lines]


def compared(results: Sequence[Result], plain: Mapping[tuple[str, int], float]) -> str:
    """Success of runs that lost episodes, against that of the undisturbed runs, ``plain`` by kind and seed."""
    losing = [each for each in results if each.failed_episodes]
    differences = [each.success - plain[PLAIN[KINDS[each.kind].ranks], each.seed] for each in losing]
    if len(differences) < 2:
        return ""
    mean, half = mean_and_half_width(differences)
    assert half is not None, differences
    words = f"{len(differences)} runs lost episodes; their success less that of the undisturbed runs of their seeds"
    return f"\n{words}: {mean:+.3f} [{mean - half:+.3f}, {mean + half:+.3f}] (mean, 95 % of Student's t).\n"


def as_table(results: Sequence[Result]) -> str:
    lines = [
        "| what happens | runs | as it should be | episodes failed | groups lost | success after | undisturbed "
        "| longest step, s |",
        "|---|---|---|---|---|---|---|---|",
    ]
    plain = {(each.kind, each.seed): each.success for each in results if each.kind in PLAIN.values()}
    for name, kind in KINDS.items():
        mine = [result for result in results if result.kind == name]
        if not mine:
            continue
        fine = sum(result.is_ok for result in mine)
        ended = [result for result in mine if result.success == result.success]
        known, same = [each.success for each in ended], [plain[PLAIN[kind.ranks], each.seed] for each in ended]
        low, high = wilson(round(sum(known) * TEST_EPISODES), len(known) * TEST_EPISODES) if known else (0.0, 0.0)
        success = f"{statistics.mean(known):.3f} [{low:.3f}, {high:.3f}]" if known else "-"
        slowest = max(result.slowest_step_s for result in mine)
        lost, failed = sum(result.lost_groups for result in mine), sum(result.failed_episodes for result in mine)
        undisturbed = f"{statistics.mean(same):.3f}" if same else "-"
        counts = f"{len(mine)} | {fine} | {failed} | {lost}"
        lines.append(f"| {kind.what} | {counts} | {success} | {undisturbed} | {slowest:.1f} |")
    problems = [f"- {result.kind}, seed {result.seed}: {result.problem}" for result in results if not result.is_ok]
    wrong = ["", "Not as it should be:", *problems] if problems else []
    return "\n".join([*lines, *wrong]) + "\n" + compared(results, plain)


if __name__ == "__main__":
    main(tyro.cli(Options))
