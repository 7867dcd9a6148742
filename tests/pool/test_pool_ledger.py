from collections import Counter

import pytest

from vla_rlaif.pool.clock import HOUR, MINUTE, SECOND
from vla_rlaif.pool.config import Learning
from vla_rlaif.pool.ledger import DEAD, IDLE, NOBODY, Handover, Lateness, Ledger, weighted_percentile
from vla_rlaif.pool.staleness import Bucket, Use, total, usable_rollout_gpus


def test_gpu_time_sums_exactly():
    ledger = Ledger(start=7, num_gpus=3)
    ledger.advance(10, window="day", held={("serve", "active"): 2, (NOBODY, IDLE): 1}, minimums={"serve": 2})
    ledger.advance(10, window="day", held={("serve", "active"): 3}, minimums={})  # no time passed
    ledger.advance(
        15,
        window="night",
        held={("serve", "active"): 1, ("serve", "draining"): 1, (NOBODY, DEAD): 1},
        minimums={"serve": 2},
    )
    assert ledger.total == 3 * (15 - 7)
    assert ledger.spent == {
        ("serve", "day", "active"): 6,
        (NOBODY, "day", IDLE): 3,
        ("serve", "night", "active"): 5,
        ("serve", "night", "draining"): 5,
        (NOBODY, "night", DEAD): 5,
    }
    assert ledger.by("role") == Counter({("serve",): 16, (NOBODY,): 8})
    assert ledger.by("window", "state")["night", "active"] == 5
    assert ledger.useful_share == 11 / 24
    # For five microseconds one GPU of two was missing.
    assert ledger.below == {"serve": 5} and ledger.missing == {"serve": 5}


def test_a_ledger_goes_forward_and_knows_every_gpu():
    ledger = Ledger(start=0, num_gpus=2)
    with pytest.raises(AssertionError, match="every GPU has one state"):
        ledger.advance(1, window="day", held={("serve", "active"): 1}, minimums={})
    ledger.advance(5, window="day", held={(NOBODY, IDLE): 2}, minimums={})
    with pytest.raises(AssertionError, match="only goes forward"):
        ledger.advance(4, window="day", held={(NOBODY, IDLE): 2}, minimums={})


def test_percentiles_of_handovers_count_gpus():
    ledger = Ledger(start=0, num_gpus=2)
    ledger.handovers = [
        Handover(role="serve", taken_from="rollout", num_gpus=1, duration=10 * SECOND),
        Handover(role="train", taken_from="rollout", num_gpus=19, duration=30 * SECOND),
    ]
    # Of twenty GPUs one took 10 s: p50 and p95 are 30 s, of serve alone 10 s.
    assert ledger.transition(0.5) == ledger.transition(0.95) == 30 * SECOND
    assert ledger.transition(0.05) == ledger.transition(0.95, role="serve") == 10 * SECOND
    assert ledger.transition(0.5, role="nobody") is None


def test_lateness_by_role():
    ledger = Ledger(start=0, num_gpus=1)
    late = [0, 0, 5 * SECOND, MINUTE]
    ledger.lateness = [Lateness(boundary=i, window="day", role="train", late=n) for i, n in enumerate(late)]
    assert ledger.late(0.5, role="train") == 0 and ledger.late(0.95, role="train") == MINUTE
    assert ledger.late(0.5, role="serve") is None


def test_latency_in_and_out_of_transitions_is_weighted_by_time():
    ledger = Ledger(start=0, num_gpus=1)
    for p99, duration in ((20.0, 99 * SECOND), (500.0, SECOND)):
        ledger.record_latency(p99, duration, in_transition=True)
    assert ledger.p99_ms(in_transition=True) == 20.0  # 500 ms is exceeded in 0 %, reached in 1 %
    assert ledger.p99_ms(in_transition=False) is None
    assert weighted_percentile([(1.0, 1), (2.0, 1), (3.0, 98)], 0.02) == 2.0


LEARNING = Learning(staleness=4, episodes_per_gpu_hour=100, episodes_per_update=1000, updates_per_gpu_hour=2)


def test_night_work_that_the_morning_could_not_use():
    # Ten GPUs make 1000 episodes an hour, nobody trains. Five batches (staleness 4, and the current version) can be
    # used later: full after 5 hours, and the next 3 hours of 10 GPUs are for nothing.
    bucket = Bucket(LEARNING)
    assert bucket.advance(8 * HOUR, rollout_gpus=10, trainer_gpus=0) == Use(discarded=30.0)
    assert bucket.episodes == 5000
    # In the morning four GPUs train: 8 updates of 1000 an hour, 5 batches last 37.5 minutes of the hour; for the other
    # 22.5 minutes four GPUs have nothing fresh.
    use = bucket.advance(HOUR, rollout_gpus=0, trainer_gpus=4)
    assert (use.discarded, use.starved, use.updates) == (0, pytest.approx(1.5), pytest.approx(5))


def test_strictly_on_policy_keeps_one_batch():
    strict = LEARNING.model_copy(update={"staleness": 0})
    assert Bucket(strict).advance(8 * HOUR, rollout_gpus=10, trainer_gpus=0).discarded == pytest.approx(70.0)


def test_steps_of_any_length_add_up():
    whole, parts = Bucket(LEARNING), Bucket(LEARNING)
    once = whole.advance(9 * HOUR, rollout_gpus=30, trainer_gpus=1)
    often = total(parts.advance(9 * MINUTE, rollout_gpus=30, trainer_gpus=1) for _ in range(60))
    # 3000 an hour come in, 2000 go out: full after 5 hours, then 1000 an hour (10 GPUs) for 4 hours.
    assert once.discarded == pytest.approx(40.0) and often.discarded == pytest.approx(40.0)
    assert once.updates == pytest.approx(18) and whole.episodes == parts.episodes == 5000


def test_discrete_episodes_agree_with_the_bucket():
    """The oracle plays single episodes: each has the version it was made under, and the trainer checks its age."""
    made_per_step, capacity_per_step, batch, bound = 3, 2, 10, 2
    queue, version, discarded, credit = [], 0, 0, 0.0
    for _ in range(2000):
        queue += [version] * made_per_step
        credit += capacity_per_step
        while credit >= batch:
            fresh = [v for v in queue if version - v <= bound]
            discarded += len(queue) - len(fresh)
            queue = fresh
            if len(queue) < batch:
                break
            queue, version, credit = queue[batch:], version + 1, credit - batch
    learning = Learning(staleness=bound, episodes_per_gpu_hour=3, episodes_per_update=batch, updates_per_gpu_hour=0.2)
    expected = Bucket(learning).advance(2000 * HOUR, rollout_gpus=1, trainer_gpus=1).discarded * 3
    assert expected == 2000 - 30
    assert discarded == pytest.approx(expected, rel=0.02)


def test_how_many_rollout_gpus_a_trainer_can_use():
    assert usable_rollout_gpus(LEARNING, 4) == 80  # 4 x 2 x 1000 / 100
