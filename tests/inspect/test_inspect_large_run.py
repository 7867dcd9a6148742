"""Many episodes: the list comes page by page, an episode is read from its own file, and no frames are held."""

import json
import tracemalloc

import numpy as np
import pytest
from inspect_runs import recorded, scene_episodes

from vla_rlaif.inspect.answers import list_episodes, list_groups
from vla_rlaif.inspect.details import describe_episode
from vla_rlaif.inspect.run import Run
from vla_rlaif.recording import INDEX, Recording

STEPS, EACH = 500, 20


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """10,000 episodes: one step's file under many names, as copies would be."""
    run = tmp_path_factory.mktemp("large")
    (run / "config.yaml").write_text("name: large\n")
    Recording(run / "episodes").write(0, recorded(scene_episodes(EACH // 4)))
    index, shard = run / "episodes" / INDEX, run / "episodes/step-000000.zip"
    line = json.loads(index.read_text())
    with index.open("w") as file:
        for step in range(STEPS):
            name = f"step-{step:06d}.zip"
            if step:
                (run / "episodes" / name).hardlink_to(shard)
            file.write(json.dumps(line | {"step": step, "file": name}) + "\n")
    return run


def test_a_list_of_ten_thousand(folder):
    run = Run(folder)
    said = list_episodes(run, "", "-step", 100, 1000)
    assert said["total"] == said["all"] == STEPS * EACH and len(said["episodes"]) == 200  # no more in one answer
    assert said["episodes"][0]["id"] == "494:0"  # 100 episodes are five steps
    last = list_episodes(run, "", "step", STEPS * EACH - 1, 100)["episodes"]
    assert [row["id"] for row in last] == [f"{STEPS - 1}:{EACH - 1}"]
    groups = list_groups(run, "step:100..199", "-spread", 0, 50)
    assert groups["total"] == 100 * EACH // 4 and len(groups["groups"]) == 50
    assert describe_episode(run, "321:7")["frames"] == describe_episode(run, "0:7")["frames"]


def test_looking_through_it_holds_no_frames(folder):
    run = Run(folder)
    assert len(run.table.id) == STEPS * EACH
    tracemalloc.start()
    for step in range(0, STEPS, 10):
        name = f"{step}:{step % EACH}"
        assert run.sheet(name, "top")[:4] == b"RIFF" and np.isfinite(run.numbers(name).logp).all()
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert held < 2**20
