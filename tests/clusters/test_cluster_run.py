"""A run on workers that are threads: the numbers of a run in one process, and what is left when one of them dies."""

import json
from functools import partial
from typing import Any

import pytest
from cluster_runs import BASE, after_steps, comparable, run_here, run_on

from vla_rlaif.dist.answers import WorkerError
from vla_rlaif.dist.thread_cluster import ThreadCluster
from vla_rlaif.metrics import read_metrics


@pytest.fixture
def threads():
    cluster = ThreadCluster(max_restarts=3)
    yield cluster
    cluster.close()


@pytest.fixture(scope="module")
def here(tmp_path_factory):
    folder = tmp_path_factory.mktemp("plain") / "run"
    run_here(folder)
    return folder


@pytest.fixture(scope="module")
def plain(here):
    return read_metrics(here / "metrics.jsonl")


def test_the_numbers_are_those_of_one_process(tmp_path, threads, here, plain):
    assert comparable(run_on(threads, tmp_path / "run")) == comparable(plain)
    cards = [(folder / "reward_card.json").read_bytes() for folder in (here, tmp_path / "run")]
    assert cards[0] == cards[1] and (tmp_path / "run/reward_card.html").exists()
    lines = (tmp_path / "run/episodes/index.jsonl").read_text().splitlines()  # what is kept for looking at
    assert [json.loads(line)["step"] for line in lines] == [0] and len(json.loads(lines[0])["row"]) == 16


def kill(role, workers):
    getattr(workers, role).handles[0].kill()


def test_steps_played_ahead_are_those_of_one_process(tmp_path, threads):
    """Weights go out between rounds only, so which version plays what does not depend on who is faster."""
    ahead: dict[str, Any] = {"loop": {**BASE["loop"], "overlap": True, "staleness": 1}}
    here = run_here(tmp_path / "here", **ahead)
    assert comparable(run_on(threads, tmp_path / "there", **ahead)) == comparable(here)
    assert [line["rollout/version"] for line in here] == [0, 0, 1, 2]


@pytest.mark.parametrize("role", ["judges", "references"])
def test_a_judge_or_a_reference_that_dies_changes_no_number(tmp_path, threads, plain, role):
    strike = partial(after_steps, num=1, strike=partial(kill, role))
    lines = run_on(threads, tmp_path / "run", meanwhile=strike)
    assert comparable(lines) == comparable(plain)


def test_a_rollout_worker_that_dies_loses_its_groups_and_no_more(tmp_path, threads):
    """64 episodes are ordered in every round, 32 of each worker: so many more may be lost as were in its hands."""
    lines = run_on(threads, tmp_path / "run", meanwhile=partial(after_steps, num=1, strike=partial(kill, "players")))
    assert [line["step"] for line in lines] == [0, 1, 2, 3]
    for line in lines:
        assert line["episodes/ordered"] == line["episodes/judged"] + 8 * line["groups/lost"]
        assert line["episodes/ordered"] == line["episodes/trained"] + line["episodes/failed"] + line["episodes/evicted"]
        assert line["episodes/ordered"] % 64 == 0
    assert sum(line["groups/lost"] for line in lines) in (0, 4)


def test_the_run_survives_its_learner(tmp_path, threads, plain):
    said = []
    strike = partial(after_steps, num=3, strike=partial(kill, "learners"))
    lines = run_on(threads, tmp_path / "run", meanwhile=strike, say=said.append)
    assert any("Going on from the newest checkpoint with new workers" in text for text in said)
    assert comparable(lines) == comparable(plain)


def test_without_restarts_it_says_how_to_go_on(tmp_path, threads, plain):
    never = {**BASE["cluster"], "faults": {**BASE["cluster"]["faults"], "max_restarts": 0}}
    strike = partial(after_steps, num=3, strike=partial(kill, "learners"))
    with pytest.raises(RuntimeError, match=r"learner/0 is lost.*\n.*--resume"):
        run_on(threads, tmp_path / "run", meanwhile=strike, cluster=never)
    one = {"type": "ray", "roles": {"rollout": {"workers": 1}}}  # it goes on elsewhere, without a reference worker
    assert comparable(run_on(threads, tmp_path / "run", resume=True, cluster=one)) == comparable(plain)


def test_a_reward_that_raises_ends_the_run_with_its_traceback(tmp_path, threads):
    reward = {"type": "python", "function": "rewards_for_tests:raises"}
    with pytest.raises(WorkerError) as caught:
        run_on(threads, tmp_path / "run", reward=reward)
    lines = str(caught.value).splitlines()
    assert lines[-1] == "ZeroDivisionError: the reward is broken"
    assert any("rewards_for_tests.py" in line for line in lines)


def test_a_torch_run_is_that_of_one_process_too(tmp_path, threads):
    torch: dict[str, Any] = {"policy": {"type": "gaussian", "backend": "torch"}, "loop": {**BASE["loop"], "steps": 2}}
    here = run_here(tmp_path / "here", **torch)
    assert comparable(run_on(threads, tmp_path / "there", **torch)) == comparable(here)
