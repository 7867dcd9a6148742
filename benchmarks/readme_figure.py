"""The picture of the README, from run directories.

    python benchmarks/readme_figure.py runs/tabletop_reach-seed0 runs/tabletop_reach-seed1 --out docs/images/align.png

Left: success on the validation starts over the training steps, one line a run. Right: last frames of the same start
states before and after, of the first run.
"""

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tyro
from matplotlib.figure import Figure

from vla_rlaif.metrics import read_metrics


@dataclass(frozen=True)
class Options:
    runs: tyro.conf.Positional[tuple[Path, ...]]
    out: Path = Path("docs/images/align.png")


def main(options: Options) -> None:
    figure = Figure(figsize=(10, 3.2), dpi=110, layout="constrained")
    left, right = np.ravel(np.array(figure.subfigures(1, 2, width_ratios=(1, 1.15)), dtype=object))
    axes = left.subplots()
    for run in options.runs:
        lines = [line for line in read_metrics(run / "metrics.jsonl") if "validation/success" in line]
        result = json.loads((run / "result.json").read_text())
        label = f"seed {result['seed']}: {result['success_before']:.0%} to {result['success_after']:.0%}"
        axes.plot([line["step"] + 1 for line in lines], [line["validation/success"] for line in lines], label=label)
    axes.set(xlabel="GRPO step", ylabel="success, validation starts", ylim=(0, 1))
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right", title="test starts, before to after", fontsize=8, title_fontsize=8)
    with np.load(options.runs[0] / "clips.npz", allow_pickle=False) as clips:
        shown = min(5, len(clips["before"]))
        grid = right.subplots(2, shown, squeeze=False)
        for row, name in enumerate(("before", "after")):
            for column in range(shown):
                cell = grid[row, column]
                cell.imshow(clips[name][column, -1])
                cell.set(xticks=[], yticks=[])
                cell.set_title("success" if clips[f"{name}_success"][column] else "failure", fontsize=8)
            grid[row, 0].set_ylabel(name)
        right.suptitle(f'"{clips["instruction"][0]}": last frames of the same starts', fontsize=9)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(options.out)


if __name__ == "__main__":
    main(tyro.cli(Options))
