"""How fast a large run opens: `python benchmarks/inspect_large_run.py`. Makes a run of 10,000 episodes and looks at it.

The files are made as a run makes them (recording.py), with frames of 64 x 64 pixels of one camera. Times are of this
process with the files in the page cache; memory is by how much its peak has grown from before it opened the run.
"""

import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import tyro

from vla_rlaif.inspect.library import Library
from vla_rlaif.inspect.routes import Routes
from vla_rlaif.recording import Recorded, Recording
from vla_rlaif.types import Episodes, Starts

GROUP, DECISIONS, SIZE = 8, 12, 64


def made_up(num: int, seed: int) -> Episodes:
    """Scenes of few colours, as a simulator renders them."""
    rng = np.random.default_rng(seed)
    length = rng.integers(DECISIONS // 2, DECISIONS + 1, num)
    images = np.full((num, DECISIONS + 1, SIZE, SIZE, 3), (58, 62, 70), np.uint8)
    for row in range(num):
        for frame, (x, y) in enumerate(rng.integers(0, SIZE - 8, (DECISIONS + 1, 2))):
            images[row, frame, y : y + 8, x : x + 8] = rng.integers(0, 256, (8, 8, 3))
    group = np.arange(num) // GROUP
    return Episodes(
        images={"top": images},
        state=rng.normal(size=(num, DECISIONS + 1, 8)).astype(np.float32),
        instruction=tuple(f"move the gripper to disc {g % 5}" for g in group),
        action=rng.normal(size=(num, DECISIONS, 4, 7)).astype(np.float32),
        logp=rng.normal(size=(num, DECISIONS, 10)).astype(np.float32),
        trace={},
        mask=np.arange(DECISIONS) < length[:, None],
        executed=np.full((num, DECISIONS), 4),
        success=rng.random(num) < 0.5,
        truth=rng.random(num),
        valid=np.ones(num, bool),
        starts=Starts(seed=group, group=group, member=np.arange(num) % GROUP),
        version=seed,
    )


def make_run(folder: Path, *, episodes: int, each: int) -> None:
    """``each`` episodes a recorded step."""
    (folder / "config.yaml").write_text("name: large\n")
    recording, scenes = Recording(folder / "episodes"), made_up(each, 0)
    rng = np.random.default_rng(0)
    with (folder / "metrics.jsonl").open("w") as file:
        for step in range(-(-episodes // each)):
            reward = rng.normal(size=each)
            part = replace(scenes, truth=rng.random(each), success=rng.random(each) < 0.5, version=step)
            kept = Recorded(episodes=part, row=np.arange(each), reward=reward, advantage=reward, progress=None)
            recording.write(step, kept)
            file.write(json.dumps({"step": step, "rollout/success": float(part.success.mean())}) + "\n")


def timed(work: Callable[[], object]) -> float:
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


def measure(folder: Path) -> dict[str, float]:
    """Seconds, and megabytes."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    library: list[Routes] = []
    first = timed(lambda: library.append(Routes(Library(folder))) or library[0].answer("api/episodes?run=."))
    routes = library[0]
    said = json.loads(routes.answer("api/episodes?run=.&limit=200").body)
    names = [row["id"] for row in said["episodes"]]

    def open_one(name: str) -> None:
        assert b"problem" not in routes.answer(f"api/episode?run=.&id={name}").body
        assert routes.answer(f"sheet?run=.&id={name}&camera=top").kind == "image/webp"

    opened = [timed(lambda name=name: open_one(name)) for name in names]
    groups = [timed(lambda name=name: routes.answer(f"api/group?run=.&id={name}")) for name in names[::GROUP]]
    filters = "success:no reward:0.5.. disagreement:0.3.."
    return {
        "episodes": said["all"],
        "disk_mb": sum(path.stat().st_size for path in (folder / "episodes").iterdir()) / 1e6,
        "list_first_s": first,
        "list_again_s": timed(lambda: routes.answer("api/episodes?run=.")),
        "list_filtered_s": timed(lambda: routes.answer(f"api/episodes?run=.&filter={filters.replace(' ', '+')}")),
        "groups_s": timed(lambda: routes.answer("api/groups?run=.&order=-disagreement")),
        "episode_median_s": statistics.median(opened),
        "episode_worst_s": max(opened),
        "group_median_s": statistics.median(groups),
        "memory_mb": (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024,
    }


@dataclass(frozen=True)
class Options:
    """Make a run of many episodes, and measure in a process of its own how fast it opens."""

    episodes: int = 10_000
    each: int = 16  # episodes a recorded step
    measure: Path | None = None  # only measure this run, which is there already


def main() -> None:
    options = tyro.cli(Options)
    if options.measure is not None:
        for name, value in measure(options.measure).items():
            print(f"{name:18} {value:10.3f}")
        return
    with tempfile.TemporaryDirectory() as folder:
        make_run(Path(folder), episodes=options.episodes, each=options.each)
        subprocess.run([sys.executable, __file__, "--measure", folder], check=True)


if __name__ == "__main__":
    main()
