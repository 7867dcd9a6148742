"""Agreement beyond chance, against published and hand-worked numbers."""

import json
from pathlib import Path

import numpy as np
import pytest

from vla_rlaif.preferences.agreement import (
    cohen_kappa,
    describe_agreement,
    krippendorff_alpha,
    measure_agreement,
    to_answers,
    write_agreement,
)
from vla_rlaif.preferences.store import Preference


def record(first: str, second: str, p_first: float | None, labeller: str, both=None) -> Preference:
    return Preference(
        first=first,
        second=second,
        segment=(0, 4),
        instruction="reach",
        p_first=p_first,
        labeller=labeller,
        step=0,
        held_out=False,
        time=0.0,
        both_orders=both,
    )


def test_kappa_by_hand() -> None:
    # 20 yes-yes, 5 yes-no, 10 no-yes, 15 no-no: p_o = 0.7, p_e = 0.5 * 0.6 + 0.5 * 0.4 = 0.5, kappa = 0.2 / 0.5.
    first = np.repeat([2, 2, 0, 0], [20, 5, 10, 15])
    second = np.repeat([2, 0, 2, 0], [20, 5, 10, 15])
    assert cohen_kappa(first, second) == pytest.approx(0.4)
    assert cohen_kappa(first, first) == 1
    assert cohen_kappa(np.append(first, -1), np.append(second, 2)) == pytest.approx(0.4)  # a skip has no vote


def test_kappa_is_zero_where_agreement_is_chance() -> None:
    """90 % raw agreement, and worth nothing: the second labeller always says the same."""
    assert cohen_kappa(np.repeat([2, 0], [90, 10]), np.full(100, 2)) == pytest.approx(0)
    assert np.isnan(cohen_kappa(np.full(5, 2), np.full(5, 2)))
    assert np.isnan(cohen_kappa(np.full(5, -1), np.full(5, 2)))


def test_alpha_of_krippendorffs_example() -> None:
    """The data of his "Computing Krippendorff's alpha-reliability" (2011), section C: nominal alpha is 0.743."""
    nothing = -1
    data = np.array(
        [
            [1, 2, 3, 3, 2, 1, 4, 1, 2, nothing, nothing, nothing],
            [1, 2, 3, 3, 2, 2, 4, 1, 2, 5, nothing, 3],
            [nothing, 3, 3, 3, 2, 3, 4, 2, 2, 5, 1, nothing],
            [1, 2, 3, 3, 2, 4, 4, 1, 2, 5, 1, nothing],
        ]
    )
    assert krippendorff_alpha(data) == pytest.approx(0.743, abs=5e-4)


def test_alpha_by_hand() -> None:
    # Two labellers, pairs (2, 2), (0, 0), (2, 0): D_o = 2 / 6; n = 6 with 3 of each: D_e = 2 * 3 * 3 / (6 * 5) = 0.6.
    assert krippendorff_alpha(np.array([[2, 0, 2], [2, 0, 0]])) == pytest.approx(1 - (1 / 3) / 0.6)
    assert np.isnan(krippendorff_alpha(np.array([[2, 2], [2, 2]])))
    assert np.isnan(krippendorff_alpha(np.array([[2, -1], [-1, 0]])))


def test_answers_of_probabilities() -> None:
    assert to_answers(np.array([0.9, 0.5, 0.1, np.nan])).tolist() == [2, 1, 0, -1]


def test_labellers_meet_on_pairs_whichever_way_round(tmp_path: Path) -> None:
    records = [
        record("a", "b", 1.0, "oracle"),
        record("c", "d", 0.0, "oracle"),
        record("e", "f", 0.5, "oracle"),
        record("g", "h", None, "oracle"),
        # In both orders: consistent, inconsistent (first), inconsistent (second), consistent.
        record("b", "a", 0.2, "vlm", (0.3, 0.9)),
        record("c", "d", 0.6, "vlm", (0.9, 0.7)),
        record("e", "f", 0.5, "vlm", (0.4, 0.4)),
        record("g", "h", 0.9, "vlm", (0.9, 0.1)),
        record("c", "d", 0.1, "vlm", (0.1, 0.9)),  # asked again: the newest counts
    ]
    found = measure_agreement(records)
    oracle, vlm = found.labellers
    assert (oracle.labeller, oracle.num, oracle.tie_rate, oracle.skip_rate) == ("oracle", 4, 0.25, 0.25)
    assert oracle.num_both_orders == 0 and np.isnan(oracle.position_bias)
    assert (vlm.num, vlm.num_both_orders, vlm.inconsistent_rate) == (5, 5, 2 / 5)
    # p_AB + p_BA - 1: 0.2, 0.6, -0.2, 0.0, 0.0
    assert vlm.position_bias == pytest.approx(0.12)
    (both,) = found.pairs
    assert (both.labellers, both.num, both.raw, both.kappa) == (("oracle", "vlm"), 3, 1.0, 1.0)
    assert found.alpha == 1.0
    text = "\n".join(describe_agreement(found))
    assert "oracle: 4 labels, 25.0% ties, 25.0% skips" in text
    assert "asked in both orders 5 times: 40.0% inconsistent, position bias +0.120" in text
    assert "oracle and vlm: 3 pairs in common, Cohen's kappa 1.000 (100.0% equal)" in text
    write_agreement(found, tmp_path / "agreement.json")
    written = json.loads((tmp_path / "agreement.json").read_text())
    assert written["labellers"][0]["position_bias"] is None and written["pairs"][0]["kappa"] == 1.0


def test_nothing_to_compare() -> None:
    assert np.isnan(measure_agreement([]).alpha) and describe_agreement(measure_agreement([])) == []
    found = measure_agreement([record("a", "b", 1.0, "one"), record("c", "d", 1.0, "two")])
    assert found.pairs[0].num == 0 and np.isnan(found.pairs[0].kappa)
