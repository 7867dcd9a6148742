"""Every method of docs/algorithms.md on one task, from the same start policies, with the same episodes and labels.

For each seed one start policy is imitated, and one run a method is made from it, one after the other. What is there
already is not made again, so the table may be stopped and gone on with. Nothing is tuned for a seed.

    python benchmarks/alignment.py                       # all methods, seeds 0 1 2, then the table
    python benchmarks/alignment.py --task point          # a point on a plane instead of the robot arm: minutes
    python benchmarks/alignment.py --methods ppo --seeds 7
    python benchmarks/alignment.py --table-only          # of the rows that are there
    python benchmarks/alignment.py --figure docs/images/alignment.png --table-only
"""

import json
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import tyro
import yaml
from students_t import mean_and_half_width

from vla_rlaif.config import load_config
from vla_rlaif.metrics import read_metrics
from vla_rlaif.run import align

CONFIGS = Path(__file__).parents[1] / "configs"
LABELS = {
    "type": "preference",
    "budget": 416,
    "initial_labels": 200,
    "initial_episodes": 256,
    "labels_per_refresh": 108,
    "refresh_every": 10,
}
UNBRAKED = {"target_kl": None}  # what preference optimisation asks for: its beta holds the policy


@dataclass(frozen=True, kw_only=True)
class Task:
    """A recipe, and what depends on how its policy's log-probs are made."""

    config: Path
    changes: Mapping[str, Any]
    clip: float
    kl_coef: float  # of all methods that have one
    beta: float  # 0.1 for summed log-probs, as in the papers; means over n dims are n times as small
    has_start: bool  # whether a start policy is imitated; else it is the untrained one

    def methods(self) -> dict[str, dict[str, Any]]:
        """Sections by method. Each learns from every episode of a step once an epoch: of 8 groups of 8, so from 4 pairs
        a group; DPO draws as many pairs from the labelled ones."""
        clipped = {"group_size": 8, "clip_low": self.clip, "clip_high": self.clip, "kl_coef": self.kl_coef}
        grpo, pairs = {"type": "grpo", **clipped}, {"group_size": 8, "beta": self.beta}
        filtered = {"type": "filtered_bc", "group_size": 8, "kl_coef": self.kl_coef}
        return {
            "grpo": {"reward": LABELS, "algorithm": grpo},
            "grpo_oracle": {"reward": {"type": "oracle"}, "algorithm": grpo},
            "grpo_success": {"reward": {"type": "success"}, "algorithm": grpo},
            "ppo": {"reward": LABELS, "algorithm": {"type": "ppo", **clipped}},
            "dpo": {
                "reward": LABELS,
                "algorithm": {"type": "dpo", **pairs, "pairs_per_step": 32},
                "learner": UNBRAKED,
            },
            "tpo": {
                "reward": LABELS,
                "algorithm": {"type": "tpo", **pairs, "pairs_per_group": 4},
                "learner": UNBRAKED,
            },
            "filtered_bc": {"reward": LABELS, "algorithm": filtered},
        }


TASKS = {
    # `make align`, made smaller: less imitation, half the episodes of a step, a quarter of the labels.
    "reach": Task(
        config=CONFIGS / "tabletop_reach.yaml",
        changes={
            "env": {"num_envs": 64},
            "warm_start": {"collect": {"episodes": 512}, "imitate": {"steps": 400}},
            "learner": {"minibatch": 128},
            "loop": {"validation_episodes": 128},
        },
        clip=0.02,
        kl_coef=0.002,
        beta=2.8,  # 28 dims
        has_start=True,
    ),
    "point": Task(
        config=CONFIGS / "point_reach.yaml",
        changes={"policy": {"type": "gaussian", "backend": "torch"}, "loop": {"validate_every": 10}},
        clip=0.2,
        kl_coef=0.0,
        beta=0.1,
        has_start=False,
    ),
}
METHODS = tuple(TASKS["reach"].methods())


@dataclass(frozen=True)
class Options:
    out: Path = Path("runs/alignment")
    task: Literal["reach", "point"] = "reach"
    methods: tuple[str, ...] = METHODS
    seeds: tuple[int, ...] = (0, 1, 2)
    steps: int = 30  # of every method
    table_only: bool = False
    figure: Path | None = None  # validation success by step, mean of the seeds


def main(options: Options) -> None:
    unknown = sorted(set(options.methods) - set(METHODS))
    if unknown:
        raise SystemExit(f"no method {unknown[0]!r}; there are {', '.join(METHODS)}.")
    if not options.table_only:
        for seed in options.seeds:
            start = start_policy(options, seed) if TASKS[options.task].has_start else None
            for method in options.methods:
                train(options, method, seed, start)
    print(table(options))
    if options.figure is not None:
        draw(options, options.figure)


def start_policy(options: Options, seed: int) -> Path:
    """The one that all methods of a seed start from."""
    out = options.out / options.task
    policy = out / f"start-seed{seed}"
    if not (policy / "policy.json").exists():
        config = written(options, f"start-seed{seed}", {"seed": seed})
        demonstrations = out / f"demonstrations-seed{seed}"
        if not demonstrations.exists():
            verb("collect", config, "--to", demonstrations)
        verb("imitate", config, "--data", demonstrations, "--to", policy)
    return policy


def train(options: Options, method: str, seed: int, start: Path | None) -> None:
    run = folder(options, method, seed)
    if (run / "result.json").exists():
        return
    sections: dict[str, Any] = {"seed": seed, "name": method, "out": str(run), "loop": {"steps": options.steps}}
    if start is not None:
        sections["warm_start"] = {"checkpoint": str(start)}
    config = written(options, run.name, TASKS[options.task].methods()[method], sections)
    resume = any(run.glob("checkpoints/step-*"))
    align(load_config(config), resume=resume, overwrite=not resume, say=lambda text: print(text, flush=True))


def folder(options: Options, method: str, seed: int) -> Path:
    return options.out / options.task / f"{method}-seed{seed}"


def written(options: Options, name: str, *sections: Mapping[str, Any]) -> Path:
    """The task's config with changes, as a file."""
    task, path = TASKS[options.task], options.out / options.task / f"{name}.yaml"
    config = yaml.safe_load(task.config.read_text())
    for changes in (task.changes, *sections):
        config = merged(config, changes)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump(config, sort_keys=False))
    return path


def merged(config: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Section by section, key by key. Where a ``type`` is given the section is another one."""
    result = dict(config)
    for key, value in changes.items():
        nested = isinstance(value, Mapping) and "type" not in value
        result[key] = merged(result.get(key) or {}, value) if nested else value
    return result


def verb(name: str, config: Path, *flags: object) -> None:
    subprocess.run([sys.executable, "-m", "vla_rlaif", name, str(config), *map(str, flags)], check=True)


def table(options: Options) -> str:
    """A row a method: success after each run with its Wilson interval, and the gain with a t interval over seeds."""
    lines = [
        f"| method | {' | '.join(f'seed {seed}' for seed in options.seeds)} | mean | gain | labels | minutes a run |",
        f"| --- |{' --- |' * len(options.seeds)} --- | --- | --- | --- |",
    ]
    firsts = [read(folder(options, method, seed)) for seed in options.seeds for method in options.methods[:1]]
    if all(firsts):
        before = [r["success_before"] for r in firsts if r]
        cells = [rate(r, "before") for r in firsts if r]
        lines.append(f"| start policy | {' | '.join(cells)} | {statistics.mean(before):.1%} | | | |")
    for method in options.methods:
        found = [read(folder(options, method, seed)) for seed in options.seeds]
        cells = [rate(r, "after") if r else "not run" for r in found]
        done = [r for r in found if r]
        lines.append(f"| {method} | {' | '.join(cells)} | {' | '.join(summary(done))} |")
    return "\n".join(lines)


def read(run: Path) -> dict[str, Any] | None:
    path = run / "result.json"
    return json.loads(path.read_text()) if path.exists() else None


def rate(result: Mapping[str, Any], when: str) -> str:
    low, high = result[f"ci95_{when}"]
    return f"{result[f'success_{when}']:.1%} [{low:.1%}, {high:.1%}]"


def summary(results: Sequence[Mapping[str, Any]]) -> tuple[str, str, str, str]:
    if not results:
        return "", "", "", ""
    after = statistics.mean(r["success_after"] for r in results)
    gains = [100 * (r["success_after"] - r["success_before"]) for r in results]
    gain, half = mean_and_half_width(gains)
    shown = f"{gain:+.1f} points" + (f" [{gain - half:+.1f}, {gain + half:+.1f}]" if half is not None else "")
    minutes = statistics.mean(r["training_minutes"] for r in results)
    return f"{after:.1%}", shown, str(round(statistics.mean(r["labels"] for r in results))), f"{minutes:.1f}"


def draw(options: Options, path: Path) -> None:
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    for method in options.methods:
        runs = [folder(options, method, seed) for seed in options.seeds]
        curves = [validation(run) for run in runs if (run / "result.json").exists()]
        if curves:
            steps = sorted(set.intersection(*(set(curve) for curve in curves)))
            axes.plot(steps, [statistics.mean(curve[s] for curve in curves) for s in steps], label=method, marker=".")
    axes.set(xlabel="step", ylabel="validation success", ylim=(0, 1))
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    figure.savefig(path, dpi=110)


def validation(run: Path) -> dict[int, float]:
    """By the number of updates; the first line's is the start policy's."""
    name = "validation/success"
    lines = [line for line in read_metrics(run / "metrics.jsonl") if name in line]
    return {int(line["step"]) + 1 if line["step"] else 0: line[name] for line in lines}


if __name__ == "__main__":
    main(tyro.cli(Options))
