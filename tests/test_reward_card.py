"""The figures of a reward card against SciPy, scikit-learn and numbers worked out by hand; its page needs nothing else.

Episodes a to d succeed or fail, e cannot be scored.
"""

import json
import re
from dataclasses import replace
from html.parser import HTMLParser

import numpy as np
import pytest
import scipy.stats
from sklearn.calibration import calibration_curve

from vla_rlaif.metrics import score_interval
from vla_rlaif.reward_card import failed_gates, make_card, write_card_json
from vla_rlaif.reward_card_data import Judged
from vla_rlaif.reward_card_page import render, write_card_page
from vla_rlaif.success_threshold import threshold_at

NAN = float("nan")
HAND = Judged(
    ids=("a", "b", "c", "d", "e"),
    instruction=("push", "push", "lift", "lift", "push"),
    score=np.array([3.0, 1.0, 2.0, 0.0, NAN]),
    group=np.array([0, 0, 1, 1, 1]),
    pairs=np.array([[0, 1], [2, 3], [1, 2], [0, 2], [3, 0]]),
    label=np.array([1.0, 0.0, 0.1, 0.5, 0.0]),
    p_first=np.array([0.9, 0.8, 0.3, 0.6, 0.02]),
    truth=np.array([1.0, 0.2, 0.9, 0.1, NAN]),
    success=np.array([1.0, 0.0, 1.0, 0.0, NAN]),
    clip_kinds=("succeeded", "succeeded", "failed", "cut", "cut", "failed", "rewound", "cut", "failed"),
    clip_success=np.array([1.0, 0.9, 0.0, 0.0, 0.1, 0.0, 0.0, 0.0, 0.5]),
    clip_p=np.array([0.9, 0.4, 0.6, 0.1, 0.5, 0.2, 0.7, 0.3, 0.99]),
    clip_source=np.array([0, 1, 0, 0, 1, 1, 2, 3, 3]),
    threshold=0.5,
    false_positive_rate=0.25,
)


def many(num=400, seed=0):
    """A reward that knows half of the truth, with decided labels only and one unscorable episode that no pair has."""
    rng = np.random.default_rng(seed)
    truth = rng.normal(size=num)
    score = truth + rng.normal(size=num)
    pairs = rng.permutation(num - 1)[: 2 * (num // 2 - 1)].reshape(-1, 2)
    delta = score[pairs[:, 0]] - score[pairs[:, 1]]
    return Judged(
        ids=[f"0:{n}" for n in range(num)],
        instruction=["push"] * num,
        score=np.append(score[:-1], NAN),
        group=np.arange(num) // 4,
        pairs=pairs,
        label=(truth[pairs[:, 0]] > truth[pairs[:, 1]]).astype(float),
        p_first=1 / (1 + np.exp(-delta)),
        truth=truth,
        success=(truth > 1).astype(float),
    )


def test_accuracy_and_its_interval():
    # Decided: ab right, cd wrong (2 > 0, labelled 0), bc right, da right; ac is a tie. 3 of 4.
    card = make_card(HAND, {})
    low, high = scipy.stats.binomtest(3, 4).proportion_ci(method="wilson")
    assert (card.accuracy.rate, card.accuracy.num, card.num_ties) == (0.75, 4, 1)
    assert (card.accuracy.low, card.accuracy.high) == pytest.approx((low, high))
    card = make_card(many(), {})
    hits = round(card.accuracy.rate * card.accuracy.num)
    low, high = scipy.stats.binomtest(hits, card.accuracy.num).proportion_ci(method="wilson")
    assert (card.accuracy.low, card.accuracy.high) == pytest.approx((low, high))


def test_tau_is_scipys_with_successes_tied():
    judged = many()
    assert judged.truth is not None
    tied = np.where(judged.truth > 1, judged.truth.max(), judged.truth)
    card = make_card(judged, {})
    tau, _ = scipy.stats.kendalltau(judged.score[:-1], tied[:-1])
    assert card.tau == pytest.approx(tau)
    assert card.tau_against == "truth, successes tied"
    # By hand: of 6 pairs all agree but the tie of the two successes: 5 / sqrt(6 * 5).
    assert make_card(HAND, {}).tau == pytest.approx(5 / 30**0.5)
    # Without a truth: 3 labels agree, 1 does not.
    blind = make_card(replace(HAND, truth=None), {})
    assert (blind.tau, blind.tau_against) == (0.5, "labels of held-out pairs")


def test_calibration_is_scikit_learns():
    judged = many()
    confidence = np.maximum(judged.p_first, 1 - judged.p_first)
    right = np.where(judged.p_first > 0.5, judged.label, 1 - judged.label)
    # Twenty bins of [0, 1] are ten of [0.5, 1] and ten empty ones.
    share, mean = calibration_curve(right, confidence, n_bins=20)
    num = np.histogram(confidence, np.linspace(0, 1, 21))[0]
    num = num[num > 0]
    card = make_card(judged, {})
    assert [b.accuracy for b in card.reliability] == pytest.approx(share)
    assert [b.confidence for b in card.reliability] == pytest.approx(mean)
    assert [b.num for b in card.reliability] == num.tolist()
    assert card.ece == pytest.approx(np.abs(share - mean) @ num / num.sum())


def test_gap_and_spread_by_hand():
    card = make_card(HAND, {})
    # Scores 3 1 2 0 have the std sqrt(1.25); successes have the mean 2.5, failures 0.5.
    assert card.success_failure_gap == pytest.approx(2 / 1.25**0.5)
    # Groups (3, 1) and (2, 0) have the std 1.
    assert card.within_group_std == pytest.approx(1 / 1.25**0.5)
    assert card.num_episodes == 4
    # push: a 3 over b 1, std 1; lift: c 2 over d 0, std 1.
    assert [(t.instruction, t.gap, t.episodes) for t in card.tasks] == [
        ("push", pytest.approx(2), 3),
        ("lift", pytest.approx(2), 2),
    ]
    assert [(t.accuracy.rate, t.accuracy.num) for t in card.tasks] == [(1, 1), (0, 1)]
    assert np.isnan(make_card(replace(HAND, success=np.ones(5)), {}).success_failure_gap)


def test_false_positives_at_the_thresholds_of_other_clips():
    card = make_card(HAND, {})
    # Negatives of the sources 0 and 2 have 0.6 0.1 0.7, those of 1 and 3 have 0.5 0.2 0.3. At 0.25 the largest of three
    # is the threshold: above that of the other half are 0.6 and 0.7. Of 0.99 nobody knows. Successes have 0.9 and 0.4,
    # of which the model's own threshold lets one pass.
    assert (card.false_positives.rate, card.false_positives.num) == (pytest.approx(1 / 3), 6)
    assert (card.recall.rate, card.recall.num) == (0.5, 2)
    # Worked out in test_success_threshold.py: as good as 5.4 independent negatives.
    assert (card.false_positives.low, card.false_positives.high) == pytest.approx(score_interval(1 / 3, 5.4))
    assert {kind: rate.num for kind, rate in card.by_kind.items()} == dict(succeeded=2, failed=2, rewound=1, cut=3)
    assert {kind: rate.rate for kind, rate in card.by_kind.items()} == dict(succeeded=0.5, failed=0.5, rewound=1, cut=0)
    assert "(3 and 3 negatives)" in render(card, {})
    none = make_card(replace(HAND, threshold=NAN), {})
    assert np.isnan(none.recall.rate) and "The model has no threshold of success." in render(none, {})


def test_too_few_negatives_are_not_measured_and_the_card_says_how_many_are_needed():
    card = make_card(replace(HAND, false_positive_rate=0.05), {})
    assert np.isnan([card.false_positives.rate, card.false_positives.low]).all() and set(card.by_kind) == {"succeeded"}
    wanted = "needs 19 held-out negatives in each half of the start states, and there are 3 and 3."
    gate = card.gates[3]
    assert gate.passed is None and gate.note.endswith(wanted)
    assert f"asked for, 0.05. A threshold at the rate 0.05 {wanted}</td>" in render(card, {})
    headless = make_card(replace(HAND, threshold=NAN, false_positive_rate=NAN), {})
    assert headless.gates[3].note == "The reward has no head success."
    assert headless.gates[3].wanted == "not asked for" and ">nan" not in render(headless, {})


def test_the_gate_fails_though_the_threshold_keeps_its_promise_on_the_clips_that_it_was_chosen_on():
    """20 start states of eight negatives each, and those of every other one look successful: a model that knows the
    scene and not the task. The largest 5 % decide the threshold, so of the clips themselves at most 5 % exceed it."""
    source = np.repeat(np.arange(20), 8)
    p = np.where(source % 2 == 0, 0.8, 0.1) + 0.01 * np.random.default_rng(0).random(160)
    threshold = threshold_at(p, 0.05)
    assert (p > threshold).mean() <= 0.05
    fooled = replace(
        HAND,
        **{"clip_kinds": ("failed",) * 160, "clip_success": np.zeros(160), "clip_p": p, "clip_source": source},
        **{"threshold": threshold, "false_positive_rate": 0.05},
    )
    card = make_card(fooled, {})
    assert card.false_positives.rate == pytest.approx(0.5, abs=0.05) and card.gates[3].passed is False
    honest = make_card(replace(fooled, clip_p=np.random.default_rng(0).random(160)), {})
    assert honest.gates[3].passed is True


def test_gates_pass_fail_or_are_not_measured():
    # Accuracy 3 of 4 has the low end 0.30; tau 0.91, gap 1.79, low end of a third of 5.4 false positives 0.09, spread
    # 0.89.
    card = make_card(HAND, {})
    assert [gate.passed for gate in card.gates] == [False, True, True, True, True]
    (sentence,) = failed_gates(card)
    assert sentence.startswith("held-out pairwise accuracy") and sentence.endswith("is 0.301, wanted at least 0.6")
    strict = make_card(replace(HAND, false_positive_rate=0.05), {})
    assert [gate.passed for gate in strict.gates] == [False, True, True, None, True]
    upside_down = make_card(replace(HAND, score=-HAND.score), {})
    assert [gate.passed for gate in upside_down.gates] == [False, False, False, True, True]
    constant = make_card(replace(HAND, score=np.where(np.isnan(HAND.score), NAN, 2.0)), {})
    assert [gate.passed for gate in constant.gates] == [False, None, False, True, False]
    nothing = replace(
        HAND,
        **{"pairs": np.empty((0, 2), np.int64), "label": np.empty(0), "p_first": np.empty(0)},
        **{"truth": None, "success": None, "group": np.arange(5), "threshold": NAN, "false_positive_rate": NAN},
    )
    card = make_card(nothing, {})
    assert [gate.passed for gate in card.gates] == [None] * 5 and not failed_gates(card)
    assert "No gate failed, 5 could not be measured." in render(card, {})


def test_mistakes_are_the_surest_first():
    # Wrong: only cd (0.8, labelled 0). Turned round, bc and da are wrong too, and da is the surest.
    assert [(m.first, m.second) for m in make_card(HAND, {}).mistakes] == [("c", "d")]
    card = make_card(replace(HAND, p_first=1 - HAND.p_first), {})
    assert [(m.first, m.second) for m in card.mistakes] == [("d", "a"), ("a", "b"), ("b", "c")]
    assert [m.p_first for m in card.mistakes] == pytest.approx([0.98, 0.1, 0.7])


def test_the_file_is_json_without_nan(tmp_path):
    write_card_json(make_card(replace(HAND, threshold=NAN), {"reward.heads": "return"}), tmp_path / "card.json")
    read = json.loads((tmp_path / "card.json").read_text(), parse_constant=pytest.fail)
    assert read["threshold"] is None and read["accuracy"]["rate"] == 0.75
    assert read["about"] == {"reward.heads": "return"}
    assert read["mistakes"] == [{"first": "c", "second": "d", "label": 0.0, "p_first": 0.8}]


class Resources(HTMLParser):
    """Collects what a browser would fetch or run, and which elements are left open."""

    def __init__(self, page):
        super().__init__()
        self.fetched, self.tags, self.open = [], set(), []
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        self.fetched += [v for k, v in attrs if k in ("src", "srcset", "href", "data", "poster", "action")]
        if tag not in ("meta", "img", "source"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_the_page_needs_nothing_else_and_shows_the_mistakes(tmp_path):
    hostile = replace(HAND, instruction=("<script>alert(1)</script>", *HAND.instruction[1:]))
    clips = {name: np.random.default_rng(0).integers(0, 256, (3, 8, 8, 3), np.uint8) for name in ("c", "d")}
    write_card_page(make_card(hostile, {"reward.heads": "<b>"}), tmp_path / "card.html", clips)
    page = (tmp_path / "card.html").read_text()
    found = Resources(page)
    assert not found.open
    assert not found.tags & {"script", "link", "iframe", "object", "embed", "base"}
    assert len(found.fetched) == 4 and all(value.startswith("data:image/") for value in found.fetched)
    style = page[page.index("<style>") : page.index("</style>")]
    assert "http" not in page.replace("http-equiv", "") and "@import" not in style and "url(" not in style
    assert re.search(r"<h3>d over c, label 0</h3>", page)
    assert "80 % sure that this is better" in page
    assert "&lt;script&gt;alert(1)" in page and "&lt;b&gt;" in page
    # Episodes without frames are named.
    assert render(make_card(HAND, {}), {}, missing="not <kept>").count("not &lt;kept&gt;") == 2
