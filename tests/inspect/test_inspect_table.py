"""Spread, disagreement and filters, against numbers worked out by hand."""

from dataclasses import replace

import numpy as np
import pytest

from vla_rlaif.inspect.filters import Filter, ordered
from vla_rlaif.inspect.table import bare_table, empty_table, joined


def table():
    """Two groups of three, one of two; the last has no rewards."""
    nan = np.nan
    return replace(
        bare_table(8),
        step=np.array([0, 0, 0, 0, 0, 0, 5, 5]),
        group=np.array([0, 0, 0, 1, 1, 1, 0, 0]),
        instruction=("push the red cube",) * 6 + ("reach the Blue disc",) * 2,
        reward=np.array([1.0, 2.0, 3.0, 1.0, nan, 1.0, nan, nan]),
        truth=np.array([0.1, 0.3, 0.2, 0.5, 0.6, 0.7, 1.0, 0.0]),
        success=np.array([0.0, 1.0, 0.0, 0.0, 1.0, 1.0, nan, nan]),
    )


def test_spread_is_the_standard_deviation_of_known_rewards():
    # 1, 2, 3 have variance 2/3; 1, NaN, 1 have none; no reward is not no spread
    np.testing.assert_allclose(table().spread, [(2 / 3) ** 0.5] * 3 + [0.0] * 3 + [np.nan] * 2)


def test_disagreement_counts_discordant_mates():
    # group 0 by reward: a < b < c; by truth: a < c < b. Only (b, c) is discordant, of two comparisons for each member.
    # group 1: equal rewards and an unknown one, so nothing compares.
    np.testing.assert_allclose(table().disagreement, [0.0, 0.5, 0.5] + [np.nan] * 5)


def test_disagreement_is_one_when_all_is_reversed():
    reversed_ = replace(bare_table(3), group=np.zeros(3, int), reward=np.arange(3.0), truth=-np.arange(3.0))
    assert reversed_.disagreement.tolist() == [1, 1, 1]


@pytest.mark.parametrize(
    ("text", "rows"),
    [
        ("", list(range(8))),
        ("success:yes", [1, 4, 5]),
        ("success:no", [0, 2, 3]),
        ("task:PUSH step:0", [0, 1, 2, 3, 4, 5]),
        ('task:"blue disc"', [6, 7]),
        ("reward:2..", [1, 2]),
        ("reward:..1", [0, 3, 5]),
        ("reward:1.5..2.5", [1]),
        ("reward:3", [2]),
        ("disagreement:0.4..", [1, 2]),
        ("spread:..0.1", [3, 4, 5]),
        ("step:5 group:0", [6, 7]),
        ("id:3 id:5", [3, 5]),
        ("success:yes reward:2..", [1]),
        ("reward:0.. task:disc", []),
    ],
)
def test_filters(text, rows):
    assert Filter.parse(text).rows(table()).tolist() == rows


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("sucess:yes", "did you mean success"),
        ("success:maybe", "success:yes or success:no"),
        ("success:yes success:no", "once"),
        ("reward:high", "no number"),
        ("red", "NAME:VALUE"),
        ('task:"red', "quote"),
    ],
)
def test_mistaken_filters_are_explained(text, words):
    with pytest.raises(ValueError, match=words):
        Filter.parse(text)


def test_orders_put_what_is_unknown_last():
    rows = np.arange(8)
    assert ordered(table(), rows, "-reward").tolist() == [2, 1, 0, 3, 5, 4, 6, 7]
    assert ordered(table(), rows, "reward").tolist() == [0, 3, 5, 1, 2, 4, 6, 7]
    with pytest.raises(ValueError, match="order 'colour'"):
        ordered(table(), rows, "colour")


def test_an_empty_table_has_no_groups():
    whole = joined([empty_table(), table(), empty_table()])
    assert len(empty_table().spread) == 0 and len(empty_table().disagreement) == 0
    np.testing.assert_array_equal(whole.disagreement, table().disagreement)
