"""The shell of a replica, with real duties: each order once, whoever repeats it; phases as the planner expects them."""

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from live_work import audited, commit, damage_newest, make_work, until

from vla_rlaif.pool.actions import Admit, Checkpoint, Drain, Release, Sync, Warm
from vla_rlaif.pool.replica import Claim, Leave, Order, Replica, Report
from vla_rlaif.pool.rollout_duty import RolloutDuty
from vla_rlaif.pool.state import Gpu, Phase
from vla_rlaif.pool.train_duty import TrainDuty
from vla_rlaif.pool.work import Work

NAME = "train-n0-0-0"
CLAIM = Claim(replica=NAME, role="train", gpus=(Gpu("n0", 0),))
WARM, ADMIT = Warm(replica=NAME, reason=""), Admit(replica=NAME, reason="")
DRAIN = Drain(replica=NAME, reason="", within=10_000_000, carry_unfinished=False)
RELEASE = Release(replica=NAME, reason="")


def checkpoint(attempt: int) -> Checkpoint:
    return Checkpoint(replica=NAME, attempt=attempt, within=10_000_000, reason="")


def sync(version: int, attempt: int, *, abort: bool = False) -> Sync:
    return Sync(replica=NAME, version=version, attempt=attempt, reason="", abort=abort)


@pytest.fixture
def work(tmp_path: Path) -> Work:
    return make_work(tmp_path)


@pytest.fixture
def trainer(work: Work) -> Replica:
    return Replica(CLAIM, TrainDuty(NAME, work), work.audit, (3,))


def phase_of(replica: Replica) -> Phase:
    return replica.status(1).phase


def reach(replica: Replica, order: Order, phase: Phase) -> None:
    assert replica.apply(1, order) == "begun"
    until(lambda: phase_of(replica) is phase, f"{phase} after {order.key}")


def test_a_training_replica_from_its_acquisition_to_its_end(trainer: Replica, work: Work) -> None:
    assert trainer.status(1).gpu_ids == (3,)
    assert phase_of(trainer) is Phase.ACQUIRED
    reach(trainer, WARM, Phase.WARM)
    reach(trainer, ADMIT, Phase.ACTIVE)
    assert trainer.apply(1, DRAIN) == "begun"
    assert trainer.status(1).leaving_s is not None
    threading.Event().wait(0.05)
    assert phase_of(trainer) is Phase.DRAINING  # the run still uses its GPUs
    reach(trainer, Leave(replica=NAME), Phase.DRAINED)
    commit(work.run.run_dir, 1)
    reach(trainer, checkpoint(0), Phase.SAVED)
    trainer.apply(1, RELEASE)
    until(lambda: trainer.status(1).is_over, "released")
    assert [step for step, _ in trainer.status(1).took] == ["warmup", "drain", "checkpoint", "release"]


def test_a_repeated_order_is_known_and_done_once(trainer: Replica, work: Work) -> None:
    reach(trainer, WARM, Phase.WARM)
    reach(trainer, ADMIT, Phase.ACTIVE)
    assert [trainer.apply(1, order) for order in (WARM, ADMIT)] == ["known", "known"]
    assert phase_of(trainer) is Phase.ACTIVE
    assert audited(work) == [WARM.key, ADMIT.key]


def test_of_orders_at_the_same_moment_one_is_begun(trainer: Replica, work: Work) -> None:
    barrier, answers = threading.Barrier(8), []

    def give() -> None:
        barrier.wait()
        answers.append(trainer.apply(1, WARM))

    threads = [threading.Thread(target=give) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(answers) == ["begun"] + ["known"] * 7
    assert audited(work) == [WARM.key]


def test_an_older_scheduler_is_shut_out_by_an_order_and_by_a_look(trainer: Replica) -> None:
    assert trainer.apply(5, WARM) == "begun"
    assert trainer.apply(4, ADMIT) == "fenced"
    trainer.status(6)
    assert trainer.apply(5, ADMIT) == "fenced"
    until(lambda: trainer.status(6).phase is Phase.WARM, "warm")
    assert trainer.apply(6, ADMIT) == "begun"


def test_a_checkpoint_that_reads_back_damaged_is_not_saved(trainer: Replica, work: Work) -> None:
    for version in (1, 2):
        commit(work.run.run_dir, version)
    damage_newest(work.run.run_dir)
    reach(trainer, checkpoint(0), Phase.UNSAVED)
    status = trainer.status(1)
    assert status.attempts == 1
    assert "cannot be used" in str(status.error)
    commit(work.run.run_dir, 3)
    reach(trainer, checkpoint(1), Phase.SAVED)


def test_a_sync_loads_the_committed_weights(work: Work) -> None:
    replica = Replica(CLAIM, RolloutDuty(NAME, work), work.audit, ())
    reach(replica, WARM, Phase.WARM)
    commit(work.run.run_dir, 4)
    reach(replica, sync(4, 0), Phase.SYNCED)
    assert replica.status(1).report.version == 4


class GatedDuty:
    """Every order waits for the gate, and then tells whether it still counted."""

    def __init__(self) -> None:
        self.gate, self.counted = threading.Event(), list[bool]()

    def do(self, order: Order, is_current: Callable[[], bool]) -> None:
        assert self.gate.wait(timeout=20)
        self.counted.append(is_current())

    def report(self) -> Report:
        return Report()

    def close(self) -> None:
        pass


def test_a_sync_that_is_aborted_commits_nothing_and_is_tried_again(work: Work) -> None:
    duty = GatedDuty()
    replica = Replica(CLAIM, duty, work.audit, ())
    replica.apply(1, sync(5, 0))
    assert phase_of(replica) is Phase.SYNCING
    replica.apply(1, sync(5, 0, abort=True))
    assert phase_of(replica) is Phase.WARM
    assert replica.status(1).attempts == 1
    replica.apply(1, sync(5, 1))
    duty.gate.set()
    until(lambda: phase_of(replica) is Phase.SYNCED and len(duty.counted) == 2, "both syncs ended")
    assert sorted(duty.counted) == [False, True]


def test_a_newcomer_that_cannot_start_is_lost_and_says_why(tmp_path: Path) -> None:
    work = make_work(tmp_path)
    broken = work.run.model_copy(update={"env": work.run.env.model_copy(update={"max_decisions": 0})})
    work = Work(run=broken, state_dir=work.state_dir, serve=work.serve)
    replica = Replica(CLAIM, RolloutDuty(NAME, work), work.audit, ())
    reach(replica, WARM, Phase.LOST)
    assert "max_decisions 0" in str(replica.status(1).error)
