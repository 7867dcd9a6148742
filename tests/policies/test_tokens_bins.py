"""Bins of actions and states against OpenVLA's rules, worked out by hand."""

import json

import numpy as np
import pytest

from vla_rlaif.policies.tokens.bins import NUM_BINS, Bins

RNG = np.random.default_rng(0)


def test_openvla_numbers() -> None:
    bins = Bins.of_env(1, 1)
    # 256 edges from -1 to 1 are 2/255 apart. 0 lies in the middle of interval 127 (edges 127 and 128 are -+1/255);
    # -1 is on the first edge, so in interval 0, whose middle is -1 + 1/255; 0.5 = -1 + 191.25 * 2/255 is in 191.
    action = np.array([[[0.0], [-1.0], [0.5], [0.999], [-3.0]]])
    encoded = bins.encode(action)
    assert encoded.tolist() == [[127, 0, 191, 254, 0]]
    want = [0.0, -1 + 1 / 255, -1 + 383 / 255, 1 - 1 / 255, -1 + 1 / 255]
    np.testing.assert_allclose(bins.decode(encoded)[0, :, 0], want, atol=1e-6)
    np.testing.assert_array_equal(bins.decode(np.array([[255]])), bins.decode(np.array([[254]])))  # upstream's clip


def test_unnormalises_by_quantiles() -> None:
    # q01 = 0.1, q99 = 0.5: the middle is 0.3, and interval 254 ends at 0.5
    entry = {"q01": [0.1, -0.4], "q99": [0.5, 0.4], "mask": [True, False]}
    bins = Bins.from_official({"action": entry}, 2, 1)
    np.testing.assert_allclose(bins.decode(np.array([[127, 127]])), [[[0.3, 0.0]]], atol=1e-6)
    np.testing.assert_allclose(bins.decode(np.array([[254, 254]])), [[[0.5 - 0.4 / 510, 1 - 1 / 255]]], atol=1e-6)
    assert bins.encode(np.array([[[0.3, 0.0]]])).tolist() == [[127, 127]]


def test_a_chunk_is_written_step_by_step() -> None:
    bins = Bins.of_env(2, 1)
    chunk = np.array([[[-1.0, 0.0], [0.5, -1.0]]])
    assert bins.encode(chunk).tolist() == [[0, 127, 191, 0]]


@pytest.mark.parametrize("kind", ["uniform", "quantile"])
@pytest.mark.parametrize("scale", ["env", "q99"])
def test_round_trip(kind: str, scale: str) -> None:
    action = np.clip(RNG.normal(0.1, 0.2, (4000, 3)), -1, 1)
    bins = Bins.measured(action, RNG.normal(size=(10, 2)), scale=scale, bins=kind)  # pyright: ignore[reportArgumentType]
    inside = np.clip(action, bins.action_low, bins.action_high)
    error = np.abs(bins.decode(bins.encode(inside[:, None]))[:, 0] - inside)
    widths = np.diff(bins.edges, axis=1) * (bins.action_high - bins.action_low)[:, None] / 2
    assert (error.max(0) <= widths.max(1) / 2 + 1e-6).all()
    if kind == "quantile":  # each of the 255 intervals holds about 4000 / 255 = 15.7 samples
        counts = np.bincount(bins.encode(action[:, None])[:, 0], minlength=NUM_BINS)
        middle = counts[4:250]  # q99 clips two hundredths into the outer ones
        assert middle.min() >= 13 and middle.max() <= 18


def test_quantile_bins_of_actions_at_a_bound() -> None:
    action = np.concatenate([np.ones(500), RNG.uniform(-1, 1, 500)])[:, None]  # half of them are exactly 1
    bins = Bins.measured(action, np.zeros((1, 1)), scale="env", bins="quantile")
    np.testing.assert_allclose(bins.decode(bins.encode(np.array([[[1.0]]]))), 1.0, atol=1e-6)


def test_state_bins() -> None:
    # 256 bins of 2/256: 0 begins bin 128; outside is in the outer ones
    bins = Bins.of_env(1, 4)
    assert bins.encode_state(np.array([[0.001, -0.001, -7.0, 7.0]])).tolist() == [[128, 127, 0, 255]]


def test_storage() -> None:
    bins = Bins.measured(RNG.normal(size=(300, 2)), RNG.normal(size=(9, 1)), scale="q99", bins="quantile")
    for again in (
        Bins.from_lists(json.loads(json.dumps(bins.to_lists()))),
        Bins.from_official(json.loads(json.dumps(bins.to_official())), 2, 1),
    ):
        for name, value in vars(bins).items():
            np.testing.assert_array_equal(vars(again)[name], value)


def test_refused() -> None:
    still = np.concatenate([RNG.normal(size=(50, 1)), np.zeros((50, 1))], axis=1)
    with pytest.raises(ValueError, match=r"action dims \[1\] have no range \(\[0.0\] to \[0.0\]\).*action_scale env"):
        Bins.measured(still, still, scale="q99", bins="uniform")
    Bins.measured(still, still, scale="env", bins="uniform")  # of the state such a dim does no harm
    with pytest.raises(ValueError, match=r"3 numbers for action.q01; wanted 2"):
        Bins.from_official({"action": {"q01": [0, 0, 0], "q99": [1, 1, 1]}}, 2, 1)
    with pytest.raises(ValueError, match=r"no entry for action.q01"):
        Bins.from_official({}, 2, 1)
