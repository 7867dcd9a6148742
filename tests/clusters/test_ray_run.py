"""Runs on real Ray: a learner, two rollout workers, a reward and a reference worker in processes of their own."""

import os
import signal
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
from cluster_runs import BASE, LEARNED, after_steps, comparable, run_here, run_on
from ray_session import START_S, start

from vla_rlaif.cluster_config import RayClusterConfig
from vla_rlaif.dist.ray_cluster import RayCluster
from vla_rlaif.metrics import read_metrics

# Ray starts its processes by fork, and execs at once; JAX, which other tests of this process loaded, warns of it.
pytestmark = pytest.mark.filterwarnings(r"ignore:os\.fork\(\) was called:RuntimeWarning")

PART = {"cpus": 0.5}


def on_ray(**roles: Any) -> dict[str, Any]:
    faults = {**BASE["cluster"]["faults"], "start_timeout_s": START_S}
    return {"type": "ray", "roles": {name: {**PART, **role} for name, role in roles.items()}, "faults": faults}


@pytest.fixture
def ray() -> Iterator[Any]:
    made = []

    def cluster(section: dict[str, Any]) -> RayCluster:
        start()
        made.append(RayCluster(RayClusterConfig.model_validate(section)))
        return made[-1]

    yield cluster
    for each in made:
        each.close()


def kill(role: str, workers: Any, *, index: int = 0) -> None:
    os.kill(getattr(workers, role).handles[index].pid, signal.SIGKILL)


def test_the_numbers_are_those_of_one_process_though_the_judge_is_killed(tmp_path, ray):
    """At staleness 0: rewards, losses and all other numbers to the bit; kill -9 of the reward worker changes none."""
    plain = run_here(tmp_path / "here")
    section = on_ray(learner={}, rollout={"workers": 2}, reward={}, reference={})
    strike = partial(after_steps, num=1, strike=partial(kill, "judges"))
    lines = run_on(ray(section), tmp_path / "there", cluster=section, meanwhile=strike)
    assert [line["loss"] for line in lines] == [line["loss"] for line in plain]
    assert [line["reward/mean"] for line in lines] == [line["reward/mean"] for line in plain]
    assert comparable(lines) == comparable(plain)


def test_a_learner_of_two_ranks_learns_what_one_does_though_a_rank_is_killed(tmp_path, ray):
    """Sums over ranks round differently, so the numbers agree only up to that. kill -9 of the second rank takes the
    first with it; both begin again where the newest checkpoint was written, and so does everybody else."""
    torch: dict[str, Any] = {"policy": {"type": "gaussian", "backend": "torch"}, "reward": {"type": "pixel_distance"}}
    torch |= {"loop": {**BASE["loop"], "steps": 3, "checkpoint_every": 1}}
    plain, said = run_here(tmp_path / "here", **torch), list[str]()
    section = on_ray(learner={"workers": 2}, rollout={}, reward={})
    strike = partial(after_steps, num=1, strike=partial(kill, "learners", index=1))
    lines = run_on(ray(section), tmp_path / "there", cluster=section, meanwhile=strike, say=said.append, **torch)
    [death] = [text for text in said if "Going on from the newest checkpoint" in text]
    assert "learner/1 is lost" in death
    assert [line["step"] for line in lines] == [0, 1, 2]
    for line, wanted in zip(lines, plain, strict=True):
        for name in ("loss", "reference_kl", "reward/mean", "grad_norm"):
            assert line[name] == pytest.approx(wanted[name], rel=1e-4), name


COMPOSITE = {
    "type": "composite",
    "reference_episodes": 64,
    "terms": [
        {"name": "learned", "reward": {**LEARNED, "refresh_every": 1}},
        {"name": "left", "weight": -0.1, "reward": {"type": "python", "function": "rewards_for_tests:leftwards"}},
        {"name": "success", "weight": 0.5, "scale": 1.0, "reward": {"type": "success"}},
    ],
}


def test_a_composite_with_a_learned_term_is_that_of_one_process(tmp_path, ray):
    """Two workers score the terms, one of them fits; the run sums them, watches each, and writes the reward's card."""
    loop = {**BASE["loop"], "steps": 2, "validate_every": 1}
    run_here(tmp_path / "here", reward=COMPOSITE, loop=loop)
    section = on_ray(learner={}, rollout={}, reward={"workers": 2})
    run_on(ray(section), tmp_path / "there", cluster=section, reward=COMPOSITE, loop=loop)
    plain, lines = (comparable(read_metrics(tmp_path / name / "metrics.jsonl")) for name in ("here", "there"))
    assert lines == plain
    assert [line["reward/version"] for line in lines] == [1, 2]
    assert {"term/learned/mean", "term/left/std", "monitor/term/success/mean"} <= lines[-1].keys()
    cards = [(tmp_path / name / "reward_card.json").read_bytes() for name in ("here", "there")]
    assert cards[0] == cards[1]
