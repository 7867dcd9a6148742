"""The oracle's errors against B-Pref's definitions."""

from typing import Any

import numpy as np
import pytest
from synthetic import NUM_DECISIONS, make_episodes

from vla_rlaif.interfaces import Labeller
from vla_rlaif.preferences.oracle import OracleLabeller

NUM = 20_000  # labels: a standard error of at most 0.0036


def ask(labeller: OracleLabeller, truths: tuple[float, float], num: int = 1, **columns: Any) -> np.ndarray:
    episodes = make_episodes(2, truth=np.array(truths), **columns)
    return labeller.label(episodes, np.tile([0, 1], (num, 1)), 0)


def test_is_a_labeller_that_says_how_it_errs():
    labeller = OracleLabeller(beta=2.0)
    assert isinstance(labeller, Labeller)
    assert labeller.name.startswith("oracle/1(beta=2.0, mistake=0.0")


@pytest.mark.parametrize(("truths", "label"), [((0.7, 0.2), 1.0), ((0.2, 0.7), 0.0), ((0.4, 0.4), 0.5)])
def test_a_perfect_teacher_prefers_the_larger_truth(truths, label):
    assert ask(OracleLabeller(), truths).tolist() == [label]


def test_mistakes_flip_at_their_rate():
    labels = ask(OracleLabeller(mistake=0.1), (0.7, 0.2), NUM)
    assert set(labels.tolist()) == {0.0, 1.0}
    assert abs(labels.mean() - 0.9) < 0.012


def test_a_boltzmann_teacher_follows_its_softmax():
    # sigmoid(4 * (0.7 - 0.2)) = 1 / (1 + e^-2) = 0.8808
    assert abs(ask(OracleLabeller(beta=4.0), (0.7, 0.2), NUM).mean() - 0.8808) < 0.012


def test_mistakes_come_after_the_boltzmann_choice():
    # 0.8808 * 0.8 + 0.1192 * 0.2 = 0.7285
    assert abs(ask(OracleLabeller(beta=4.0, mistake=0.2), (0.7, 0.2), NUM).mean() - 0.7285) < 0.012


def test_perception_noise_errs_by_the_normal_law():
    # The gap 0.5 meets noise of std 0.5 * sqrt(2), so P(right) = Phi(0.7071) = 0.7602.
    assert abs(ask(OracleLabeller(noise=0.5), (0.7, 0.2), NUM).mean() - 0.7602) < 0.012


def test_ties_are_strict_and_free_of_mistakes():
    labeller = OracleLabeller(equal_threshold=0.25, mistake=0.4)
    assert (ask(labeller, (0.5, 0.375), 100) == 0.5).all()
    assert set(ask(labeller, (0.5, 0.25), 100).tolist()) == {0.0, 1.0}  # a gap of the threshold is no tie


def test_skips_when_neither_shows_enough():
    labeller = OracleLabeller(skip_threshold=0.3)
    assert np.isnan(ask(labeller, (0.1, 0.2))).all()
    assert ask(labeller, (0.1, 0.3)).tolist() == [0.0]


def test_two_successes_are_a_tie_unless_told_otherwise():
    success = np.ones(2, bool)
    assert ask(OracleLabeller(), (1.9, 1.5), success=success).tolist() == [0.5]
    assert ask(OracleLabeller(success_ties=False), (1.9, 1.5), success=success).tolist() == [1.0]


def test_a_myopic_teacher_forgets_what_came_early():
    # 0.9 after 2 of 4 decisions has faded to 0.9 * 0.5^2 = 0.225 when the clip ends, below 0.3 after all 4.
    length = np.array([2, NUM_DECISIONS])
    assert ask(OracleLabeller(gamma=0.5), (0.9, 0.3), length=length).tolist() == [0.0]
    assert ask(OracleLabeller(), (0.9, 0.3), length=length).tolist() == [1.0]


def test_invalid_episodes_are_skipped():
    assert np.isnan(ask(OracleLabeller(), (0.9, 0.3), valid=np.array([True, False]))).all()


@pytest.mark.parametrize(
    "values", [{"beta": 0.0}, {"mistake": 0.5}, {"equal_threshold": -1.0}, {"noise": -1.0}, {"gamma": 0.0}]
)
def test_impossible_teachers_are_refused(values):
    with pytest.raises(ValueError, match="An oracle's"):
        OracleLabeller(**values)
