"""Gold by labels: what is asked, counted and kept; and a reward that a labeller contradicts sets off the monitor."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from synthetic import make_episodes
from test_monitor import Chosen

from vla_rlaif.audit_labels import Auditor
from vla_rlaif.build import build_env, build_parts, build_policy
from vla_rlaif.config import load_config, parse_config, validate_again
from vla_rlaif.dataset import from_arrays, to_arrays
from vla_rlaif.metrics import MetricsLog, read_metrics
from vla_rlaif.monitor import KeepScores, Monitor
from vla_rlaif.preferences.python_labeller import PythonLabeller
from vla_rlaif.preferences.store import PreferenceStore
from vla_rlaif.reward_terms_config import AuditConfig, MonitorConfig
from vla_rlaif.train import train
from vla_rlaif.types import Episodes

ROOT = Path(__file__).parents[1]
PYTHON = {"type": "python", "function": "rewards_for_tests:by_the_last_state", "blind": True}
AUDIT: dict[str, Any] = {"labeller": PYTHON, "pairs": 40, "budget": 100}


@pytest.fixture
def store(tmp_path):
    with PreferenceStore(tmp_path / "preferences.sqlite") as kept:
        yield kept


def auditor(store, *, function="by_the_last_state", budget=1000, num_pairs=40) -> Auditor:
    labeller = PythonLabeller(f"rewards_for_tests:{function}", blind=True)
    return Auditor(labeller, store, num_pairs=num_pairs, budget=budget, seed=0)


def validation(*, liked: float, proxy: float = 0.0, num: int = 60, valid: np.ndarray | None = None) -> Episodes:
    """Of ``num`` starts. ``liked`` is what the labeller reads, with a little that differs between the starts; ``proxy``
    is what the reward reads."""
    episodes = make_episodes(num, group_size=1, valid=valid)
    episodes.state[:, -1, :3] = np.stack([np.full(num, proxy), liked + np.arange(num) % 3 / 10, np.ones(num)], axis=1)
    episodes.state[:, -1, 0] += 0.1 * np.random.default_rng(int(100 * proxy)).normal(size=num)
    return episodes


def test_the_labeller_compares_the_first_starts_in_random_order(store):
    asked = auditor(store)
    now, best = asked.shown(validation(liked=0.0)), asked.shown(validation(liked=0.4))
    assert len(now.valid) == 40 and not now.trace and now.logp.shape[-1] == 0
    np.testing.assert_allclose(asked.margins(now, 8, best, 4), -0.4)
    records = store.records()
    assert len(records) == 40 and asked.counts() == {
        "monitor/audit_labels": 40.0,
        "monitor/audit_skips": 0.0,
        "monitor/audit_budget_left": 960.0,
    }
    # Each record names the two episodes of one start, and says that the one of step 4 is better by 0.4.
    for record in records:
        sides = {record.first, record.second}
        assert len({name.split(":")[1] for name in sides}) == 1
        assert {name.split(":")[0] for name in sides} == {"validation-8", "validation-4"}
        assert record.p_first == pytest.approx(0.7 if record.first.startswith("validation-4") else 0.3)
    assert {(r.labeller, r.step, r.held_out) for r in records} == {
        ("python/1(rewards_for_tests:by_the_last_state)", 8, True)
    }
    assert 10 < sum(r.first.startswith("validation-8") for r in records) < 30


def test_a_labeller_that_likes_the_first_shown_says_nothing(store):
    biased = auditor(store, function="always_the_first", num_pairs=400)
    now = biased.shown(validation(liked=1.0, num=400))
    margins = biased.margins(now, 1, biased.shown(validation(liked=0.0, num=400)), 0)
    assert set(margins) == {-1, 1} and abs(margins.mean()) < 0.15  # 3 standard deviations of 400 coins


def test_broken_episodes_are_not_asked_and_skips_are_counted(store):
    asked = auditor(store, num_pairs=6)
    broken = np.array([False, True, True, True, True, True])
    now, best = validation(liked=0.5, num=6, valid=broken), validation(liked=0.0, num=6)
    now.state[1, -1, 2] = -1  # a skip
    found = asked.margins(asked.shown(now), 1, asked.shown(best), 0)
    assert np.isnan(found).tolist() == [True, True, False, False, False, False]
    assert asked.counts() == {
        "monitor/audit_labels": 5.0,
        "monitor/audit_skips": 1.0,
        "monitor/audit_budget_left": 995.0,
    }


def test_the_budget_is_never_exceeded(store):
    asked = auditor(store, budget=100)
    now = asked.shown(validation(liked=0.5))
    for step in (1, 2):
        assert not asked.is_spent and np.isfinite(asked.margins(now, step, now, 0)).all()
    assert asked.is_spent and np.isnan(asked.margins(now, 3, now, 0)).all()
    assert store.count == 80


def test_it_goes_on_from_a_checkpoint_with_the_same_questions(store):
    asked = auditor(store)
    now, best = asked.shown(validation(liked=0.3)), asked.shown(validation(liked=0.0))
    asked.margins(now, 1, best, 0)
    saved = asked.state()
    asked.margins(now, 2, best, 0)
    lost = [(r.first, r.second) for r in store.records()[40:]]
    again = auditor(store)
    again.restore(saved)
    assert store.count == 40
    again.margins(now, 2, best, 0)
    assert [(r.first, r.second) for r in store.records()[40:]] == lost
    # A run that begins again before its first checkpoint puts all of it out of force.
    auditor(store).margins(now, 1, best, 0)
    assert store.count == 40 and len(store.records(history=True)) == 160


def test_what_is_shown_comes_back_from_arrays(store):
    shown = auditor(store).shown(validation(liked=0.0))
    back = from_arrays({name: np.array(value) for name, value in to_arrays(shown).items()})
    assert back.instruction == shown.instruction
    np.testing.assert_array_equal(back.images["top"], shown.images["top"])
    np.testing.assert_array_equal(back.starts.seed, shown.starts.seed)


def monitor(store, **changed) -> Monitor:
    config = MonitorConfig(gold="labels", audit=AuditConfig.model_validate(AUDIT), patience=2)
    return Monitor(config, KeepScores(Chosen()), auditor(store, **changed))


def looks(watching: Monitor, *points: tuple[float, float]) -> list[dict[str, float]]:
    return [
        watching.look(validation(liked=liked, proxy=proxy), step, 0.0) for step, (liked, proxy) in enumerate(points)
    ]


def test_the_monitor_fires_when_the_reward_rises_and_the_labeller_likes_the_best_better(store):
    found = looks(monitor(store), (0.0, 0.0), (0.5, 1.0), (0.2, 2.0), (0.1, 3.0))
    assert [line["monitor/strikes"] for line in found] == [0, 0, 1, 2] and found[-1]["monitor/alarm"] == 1
    assert [line["monitor/best_step"] for line in found] == [0, 1, 1, 1]
    assert found[-1]["monitor/gold_change"] == pytest.approx(-0.4)
    # Nothing is asked about the first one. Then the present is 0.5 better, 0.3 worse, 0.4 worse: of 1, half of it.
    gold = [line["monitor/gold"] for line in found]
    assert np.isnan(gold[0]) and gold[1:] == pytest.approx([0.75, 0.35, 0.3])
    assert [line["monitor/audit_labels"] for line in found] == [0, 40, 80, 120]


def test_no_alarm_where_both_rise_and_none_without_gold(store):
    found = looks(monitor(store), (0.0, 0.0), (0.2, 1.0), (0.4, 2.0), (0.6, 3.0))
    assert not any(line["monitor/alarm"] for line in found) and found[-1]["monitor/best_step"] == 3
    spent = looks(monitor(store, budget=40), (0.5, 0.0), (0.5, 1.0), (0.0, 2.0), (0.0, 3.0))
    assert not any(line["monitor/strikes"] for line in spent) and np.isnan(spent[-1]["monitor/gold_change"])


def test_a_lucky_validation_does_not_become_the_best_one(store):
    """Of 40 starts 21 are a little better and 19 a little worse: preferred, and not beyond doubt."""
    watching = monitor(store)
    watching.look(validation(liked=0.0), 0, 0.0)
    mixed = validation(liked=0.0)
    mixed.state[:, -1, 1] += np.where(np.arange(60) < 21, 0.1, -0.1)
    found = watching.look(mixed, 1, 0.0)
    assert found["monitor/gold"] > 0.5 and found["monitor/best_step"] == 0


def test_its_state_survives_a_checkpoint_and_other_gold_is_refused(store):
    first = monitor(store)
    looks(first, (0.0, 0.0), (0.5, 1.0), (0.2, 2.0))
    saved = {name: np.array(value) for name, value in first.state().items()}
    wanted = first.look(validation(liked=0.1, proxy=3.0), 3, 0.1)
    again = monitor(store)
    again.restore(saved)
    assert again.look(validation(liked=0.1, proxy=3.0), 3, 0.1) == wanted and again.is_alarmed
    other = Monitor(MonitorConfig(), KeepScores(Chosen()))
    other.look(validation(liked=0.0), 0, 0.0)
    with pytest.raises(ValueError, match=r"the checkpoint is of a run without them.*Resume with the monitor.gold"):
        monitor(store).restore(other.state())


def go(folder, *, until, resume=False, said=None) -> list[dict[str, Any]]:
    config = load_config(ROOT / "configs" / "point_reach_hacked_labels.yaml")
    loop = config.loop.model_copy(update={"validation_episodes": 64, "checkpoint_every": 7})
    config = validate_again(config.model_copy(update={"loop": loop}))
    folder.mkdir(exist_ok=True)
    env = build_env(config.env)
    parts = build_parts(config, env, build_policy(config.policy, env.spec, config.seed), folder)
    lines: list[str] = [] if said is None else said
    with MetricsLog(folder) as log:
        train(config, parts, log, folder, resume=resume, say=lines.append, until=until)
    timed = ("time/", "minutes", "jax/", "idle/", "sync/", "episodes/carried")
    return [
        {k: v for k, v in line.items() if not k.startswith(timed)} for line in read_metrics(folder / "metrics.jsonl")
    ]


def test_a_hackable_reward_is_caught_by_labels_and_resumes_bit_equal(tmp_path, monkeypatch):
    """The run of test_hacking.py, whose monitor is not told of success: a labeller sees whose point ends nearer."""
    monkeypatch.syspath_prepend(str(ROOT))
    said: list[str] = []
    straight = go(tmp_path / "a", until=16, said=said)
    seen = [line for line in straight if "monitor/strikes" in line]
    assert seen[-1]["monitor/alarm"] == 1 and seen[-1]["monitor/gold"] < 0.4
    assert seen[-1]["monitor/proxy"] > seen[0]["monitor/proxy"] + 1
    [caution] = [line for line in said if "caution: reward hacking" in line]
    assert "the audit's labeller prefers it, from -1 to 1, by -" in caution
    with PreferenceStore(tmp_path / "a/audit/preferences.sqlite") as kept:
        assert kept.count == seen[-1]["monitor/audit_labels"] == 40 * 4
        assert {r.step for r in kept.records()} == {4, 8, 12, 16}
    go(tmp_path / "b", until=13)  # the newest checkpoint is of step 7
    assert go(tmp_path / "b", until=16, resume=True) == straight


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"monitor": {"gold": "labels"}}, r"gold is labels and audit is not given"),
        ({"monitor": {"audit": AUDIT}}, r"gold is success and audit is given.*Set both or neither"),
        ({"monitor": {"gold": "labels", "audit": {**AUDIT, "pairs": 29}}}, r"audit.pairs.*greater than or equal to 30"),
        (
            {"monitor": {"gold": "labels", "audit": AUDIT}, "loop": {"validation_episodes": 32}},
            r"audit.pairs 40 compares as many validation episodes, and loop.validation_episodes is 32",
        ),
        (
            {
                "monitor": {"gold": "labels", "audit": {**AUDIT, "labeller": {"type": "human"}}},
                "reward": {"type": "preference", "labeller": {"type": "human"}},
            },
            r"both open a page at port 8765",
        ),
    ],
)
def test_what_does_not_fit_is_refused(sections, message):
    base = {"env": {"type": "point_reach"}, "policy": {"type": "gaussian"}, "reward": {"type": "pixel_distance"}}
    base |= {"algorithm": {"clip_low": 0.2, "clip_high": 0.2}}
    with pytest.raises(ValueError, match=message):
        parse_config({**base, **sections}, source="test")


def test_an_audited_run_may_be_audited_by_an_oracle():
    """It only measures; what the reward reads is what the claim is about."""
    base = {"env": {"type": "point_reach"}, "policy": {"type": "gaussian"}, "reward": {"type": "pixel_distance"}}
    base |= {"algorithm": {"clip_low": 0.2, "clip_high": 0.2}, "audited": True}
    audit = {**AUDIT, "labeller": {"type": "oracle"}}
    config = parse_config({**base, "monitor": {"gold": "labels", "audit": audit}}, source="test")
    assert config.monitor.audit is not None and config.audited
