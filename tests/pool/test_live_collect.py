"""Collecting replicas play the groups that the trainer would play: bit for bit, each once, whoever is interrupted."""

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from live_work import make_work, until

from vla_rlaif.build import build_env, build_parts, build_policy
from vla_rlaif.config import RunConfig, parse_config
from vla_rlaif.dataset import num_shards, read_shard
from vla_rlaif.metrics import MetricsLog, read_metrics
from vla_rlaif.pool.actions import Admit, Drain, Sync, Warm
from vla_rlaif.pool.rollout_duty import Lanes, RolloutDuty, num_groups
from vla_rlaif.pool.work import Work
from vla_rlaif.rollout import train_starts
from vla_rlaif.train import train


def trained(run: RunConfig, *, until_step: int, out: Path, resume: bool = False) -> list[dict[str, Any]]:
    run = run.model_copy(update={"out": out})
    env = build_env(run.env)
    parts = build_parts(run, env, build_policy(run.policy, env.spec, run.seed), out)
    with MetricsLog(out) as log:
        train(run, parts, log, out, resume=resume, say=lambda _: None, until=until_step)
    return read_metrics(out / "metrics.jsonl")


def plain(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What does not depend on time, or on who played."""
    timed = ("time/", "minutes", "jax/", "stored/", "idle/", "sync/")
    return [{k: v for k, v in line.items() if not k.startswith(timed)} for line in lines]


def begin(work: Work, name: str) -> RolloutDuty:
    duty = RolloutDuty(name, work)
    duty.do(Warm(replica=name, reason=""), lambda: True)
    duty.do(Sync(replica=name, version=0, attempt=0, reason=""), lambda: True)
    duty.do(Admit(replica=name, reason=""), lambda: True)
    return duty


def drain(duty: RolloutDuty) -> None:
    duty.do(Drain(replica="", within=20_000_000, carry_unfinished=True, reason=""), lambda: True)
    duty.close()


def versions(store: Path) -> dict[str, list[int]]:
    return {p.name: [read_shard(p, i).version for i in range(num_shards(p))] for p in sorted(store.iterdir())}


def is_full(store: Path) -> bool:
    """One group in each of the four lanes."""
    return store.exists() and sum(num_shards(lane) for lane in store.iterdir()) == 4


def test_a_step_on_collected_groups_is_the_step_that_plays_them_itself(tmp_path: Path) -> None:
    work = make_work(tmp_path)
    run, store = work.run, tmp_path / "store"
    unstored = run.model_copy(update={"loop": run.loop.model_copy(update={"stored": None})})
    alone = trained(unstored, until_step=6, out=tmp_path / "alone")
    trained(run, until_step=2, out=run.run_dir)
    duties = [begin(work, "a"), begin(work, "b")]
    until(lambda: is_full(store), "all groups of the version")
    for duty in duties:
        drain(duty)
    assert versions(store) == {f"r0-g000{g}": [2] for g in range(4)}
    assert sum(duty.report().groups for duty in duties) == 4
    together = trained(run, until_step=6, out=run.run_dir, resume=True)
    assert [line["stored/used"] for line in together] == [0, 0, 16, 0, 0, 0]
    assert plain(together) == plain(alone)


def test_stale_groups_are_those_of_the_steps_that_take_them_each_used_once(tmp_path: Path) -> None:
    """Collected at version 2 with bound 2: step 2 takes the first round, 3 the second, 4 the third; none is left."""
    work = make_work(tmp_path, staleness=2)
    trained(work.run, until_step=2, out=work.run.run_dir)
    duty = begin(work, "a")
    until(lambda: duty.report().groups == 12, "three rounds of four groups")
    drain(duty)
    lines = trained(work.run, until_step=6, out=work.run.run_dir, resume=True)
    assert [line["stored/used"] for line in lines] == [0, 0, 16, 16, 16, 0]
    assert [line["stored/age"] for line in lines[2:5]] == [0, 1, 2]
    assert sum(line["stored/evicted"] for line in lines) == 0
    for step in (2, 3, 4):
        starts = train_starts(work.run.seed, step * (1 + work.run.loop.max_refills), 4, 4)
        played = [read_shard(tmp_path / "store" / f"r{step - 2}-g000{g}", 0).starts.seed for g in range(4)]
        assert np.array_equal(np.concatenate(played), starts.seed)


def slow_work(folder: Path) -> Work:
    """6 decisions of 50 ms a group."""
    work = make_work(folder)
    data = work.run.model_dump(mode="json")
    data["env"] = {"type": "custom", "factory": "slow_reach:SlowReach", "num_envs": 16, "options": {"pause_s": 0.05}}
    data["reward"] = {"type": "success"}
    return replace(work, run=parse_config(data, source="test"))


def test_an_interrupted_group_is_played_by_the_next_worker_from_its_start(tmp_path: Path) -> None:
    whole, cut = make_work(tmp_path / "whole"), slow_work(tmp_path / "cut")
    first = begin(cut, "a")
    until(lambda: first.report().groups == 1, "one group")
    threading.Event().wait(0.1)  # the second one is at its second decision
    drain(first)
    assert (first.report().groups, first.report().carried) == (1, 1)
    assert versions(tmp_path / "cut" / "store") == {"r0-g0000": [0]}
    for work, name in ((whole, "whole"), (cut, "cut")):
        duty = begin(work, "b")
        until(lambda name=name: is_full(tmp_path / name / "store"), "all groups of the version")
        drain(duty)
    for lane in (tmp_path / "whole" / "store").iterdir():
        played, again = read_shard(lane, 0), read_shard(tmp_path / "cut" / "store" / lane.name, 0)
        for key in ("state", "action", "logp", "mask", "success"):
            assert np.array_equal(vars(played)[key], vars(again)[key])


def test_rounds_go_up_to_the_staleness_bound_and_no_further(tmp_path: Path) -> None:
    work = make_work(tmp_path, staleness=2)
    duty = begin(work, "a")
    until(lambda: duty.report().groups == 12, "three rounds of four groups")
    threading.Event().wait(0.5)
    drain(duty)
    assert versions(tmp_path / "store") == {f"r{r}-g000{g}": [0] for r in range(3) for g in range(4)}
    starts = {tuple(read_shard(p, 0).starts.seed) for p in (tmp_path / "store").iterdir()}
    assert len(starts) == 12  # no start state twice


def test_a_lane_has_one_worker_at_a_time_and_one_group_of_a_version(tmp_path: Path) -> None:
    run = make_work(tmp_path).run
    one, two = (Lanes(tmp_path / "store", rounds=1, groups=num_groups(run)) for _ in range(2))
    with one.next(0) as first, two.next(0) as second:
        assert first is not None and second is not None
        assert (first.name, second.name) == ("r0-g0000", "r0-g0001")
    with two.next(0) as again:
        assert again is not None and again.name == "r0-g0000"
