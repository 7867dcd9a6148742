"""The table of docs/results.md, from run directories: every row is a run as it came out.

python benchmarks/results_table.py runs/tabletop_reach-seed0 runs/tabletop_reach-seed1
"""

import json
from dataclasses import dataclass
from pathlib import Path

import tyro

from vla_rlaif.metrics import read_metrics

COLUMNS = ("run", "seed", "before", "after", "labels", "best step", "on-policy accuracy", "minutes", "peak memory")


@dataclass(frozen=True)
class Options:
    runs: tyro.conf.Positional[tuple[Path, ...]]


def main(options: Options) -> None:
    print(f"| {' | '.join(COLUMNS)} |\n|{' --- |' * len(COLUMNS)}")
    for run in options.runs:
        print(f"| {' | '.join(row(run))} |")


def row(run: Path) -> list[str]:
    result = json.loads((run / "result.json").read_text())
    name = "reward/on_policy_accuracy"
    accuracy = [line[name] for line in read_metrics(run / "metrics.jsonl") if line.get(name) is not None]
    return [
        run.name.rpartition("-seed")[0] or run.name,
        str(result["seed"]),
        *(rate(result, when) for when in ("before", "after")),
        str(result["labels"]),
        str(result["best_step"]),
        f"{sum(accuracy) / len(accuracy):.2f}" if accuracy else "no labels",
        f"{result['minutes']:.1f}",
        f"{result['peak_memory_gb']:.1f} GB",
    ]


def rate(result: dict, when: str) -> str:
    low, high = result[f"ci95_{when}"]
    return f"{result[f'success_{when}']:.1%} [{low:.1%}, {high:.1%}]"


if __name__ == "__main__":
    main(tyro.cli(Options))
