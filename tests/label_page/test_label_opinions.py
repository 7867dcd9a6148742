"""Agreement on repeated pairs, by hand."""

import pytest
from desks import NOON, desk_of, listed, open_store

from vla_rlaif.label_page import opinions
from vla_rlaif.preferences.store import Preference


def record(name, b, p_first, *, swapped=False):
    """An answer to the pair (0, b), shown as (b, 0) if swapped."""
    first, second = (f"0:{b}", "0:0") if swapped else ("0:0", f"0:{b}")
    return Preference(
        first=first,
        second=second,
        segment=(0, 4),
        instruction="reach the cube",
        p_first=p_first,
        labeller=f"human/{name}",
        step=0,
        held_out=False,
        time=NOON,
    )


@pytest.fixture
def desk_with(tmp_path):
    with open_store(tmp_path) as store:

        def make(*records):
            store.append(records)
            desk = desk_of(store, listed(*[(0, b) for b in range(1, 16)]), wanted=30)
            desk.join("ana")
            desk.join("ben")
            return desk

        yield make


def test_agreement_with_oneself_sees_through_the_sides(desk_with):
    desk = desk_with(
        record("ana", 1, 1.0),
        record("ana", 1, 0.0, swapped=True),  # the same opinion
        record("ana", 2, 1.0),
        record("ana", 2, 1.0, swapped=True),  # left again: another opinion
        record("ana", 3, 0.5),
        record("ana", 3, 0.5, swapped=True),
        record("ana", 4, None),
        record("ana", 4, 1.0),  # a skip is no opinion
    )
    assert opinions.with_self(desk, "ana") == {"count": 3, "same": 2}
    assert opinions.with_self(desk, "ben") == {"count": 0, "same": 0}
    assert opinions.with_others(desk, "ana") == {"count": 0, "same": 0, "kappa": None}


def test_agreement_with_others_by_hand(desk_with):
    # Ten common pairs. Ana: 5 first, 5 second. Ben agrees on 4 firsts and 4 seconds: p_o = 0.8, p_e = 0.5, kappa 0.6.
    records = []
    for b in range(1, 11):
        ana = float(b <= 5)
        ben = 1 - ana if b in (5, 10) else ana
        records += [record("ana", b, ana), record("ben", b, 1 - ben, swapped=True)]
    desk = desk_with(*records)
    expected = {"count": 10, "same": 8, "kappa": 0.6}
    assert opinions.with_others(desk, "ana") == opinions.with_others(desk, "ben") == expected
    # Alpha: 20 values, 10 of each. D_o = 2 of 10 pairs, D_e = 2 * 10 * 10 / (20 * 19): 1 - 0.2 / 0.5263 = 0.62.
    assert opinions.alpha(desk) == pytest.approx(0.62, abs=1e-3)


def test_few_common_pairs_give_no_kappa(desk_with):
    desk = desk_with(*[record(name, b, 1.0) for b in range(1, 10) for name in ("ana", "ben")])
    assert opinions.with_others(desk, "ana") == {"count": 9, "same": 9, "kappa": None}
    assert opinions.alpha(desk) is None
    desk = desk_with(*[record(name, 10, 1.0) for name in ("ana", "ben")])
    assert opinions.with_others(desk, "ana")["kappa"] is None  # one answer only: chance explains everything
