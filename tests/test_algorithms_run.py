"""Every algorithm in the real loop on the smallest env and policy: it learns, resumes bit-equal, and refuses what it
cannot do."""

from typing import Any

import numpy as np
import pytest
from test_train import BASE, LEARNED, comparable, go

from vla_rlaif.algorithm_checks import cautions, kl_coef
from vla_rlaif.config import parse_config
from vla_rlaif.metric_schema import undescribed

CLIP = {"clip_low": 0.2, "clip_high": 0.2}
PPO = {"type": "ppo", "group_size": 1, **CLIP, "kl_coef": 0.0, "value_clip": None, "critic": {"hidden": [16]}}
ADAPTIVE = {**PPO, "kl_coef": 0.01, "kl_target": 0.05, "value_clip": 0.2}
DPO = {"type": "dpo", "group_size": 16, "beta": 0.5, "pairs_per_step": 32}
TPO = {"type": "tpo", "group_size": 16, "beta": 0.5, "pairs_per_group": 4}
FILTERED = {"type": "filtered_bc", "group_size": 16, "kl_coef": 0.0}
METHODS: dict[str, dict[str, Any]] = {
    "ppo": {"algorithm": PPO},
    "dpo": {"algorithm": DPO, "reward": LEARNED},
    "tpo": {"algorithm": TPO},
    "filtered_bc": {"algorithm": FILTERED},
}
TORCH = {"type": "gaussian", "backend": "torch"}


@pytest.mark.parametrize("method", METHODS)
def test_it_learns(tmp_path, method):
    """Success doubles in a dozen steps. DPO sees labels only, and no reward."""
    history = go(tmp_path, policy=TORCH, until=12, **METHODS[method])
    assert undescribed({name for line in history for name in line}) == []
    first, last = (np.mean([h["rollout/success"] for h in part]) for part in (history[:2], history[-3:]))
    assert last > max(2 * first, first + 0.15)


@pytest.mark.parametrize(
    ("method", "backend", "changes"),
    [
        ("ppo", "torch", {"algorithm": ADAPTIVE, "reward": LEARNED}),
        ("dpo", "jax", {}),
        ("tpo", "torch", {"reward": LEARNED}),
        ("filtered_bc", "torch", {}),
    ],
)
def test_it_resumes_bit_equal(tmp_path, method, backend, changes):
    sections = {"policy": {**TORCH, "backend": backend}, **METHODS[method], **changes}
    straight = go(tmp_path / "a", until=6, **sections)
    go(tmp_path / "b", until=5, **sections)  # the newest checkpoint is of step 4: step 4 is played again
    assert comparable(go(tmp_path / "b", until=6, resume=True, **sections)) == comparable(straight)
    if method == "ppo":
        assert len({line["kl_coef"] for line in straight}) > 1  # it has adapted
        assert all(line["critic/loss"] > 0 for line in straight)


def test_backends_agree_on_pairs(tmp_path):
    """DPO compares with the reference, which each learner keeps in its own way."""
    logs = [
        go(tmp_path / backend, until=3, policy={**TORCH, "backend": backend}, **METHODS["dpo"])
        for backend in ("jax", "torch")
    ]
    for name in ("loss", "pair_accuracy", "log_ratio_preferred", "log_ratio_rejected", "reference_kl", "grad_norm"):
        a, b = ([line[name] for line in log] for log in logs)
        assert a == pytest.approx(b, abs=1e-4), name


def test_dpo_learns_from_labelled_pairs_alone(tmp_path):
    line = go(tmp_path, until=3, policy=TORCH, **METHODS["dpo"])[-1]
    # of 100 labels and 40 more at step 2, 15 % are held out
    assert line["pairs/labelled"] + line["labels/skips"] == 85 + 34
    assert (line["pairs/trained"], line["episodes/trained"]) == (32, 0)


def test_successes_are_imitated_by_a_threshold(tmp_path):
    algorithm = {**FILTERED, "share": 1.0, "threshold": 0.5}
    for line in go(tmp_path, until=2, policy=TORCH, algorithm=algorithm, reward={"type": "success"}):
        assert line["episodes/trained"] == 64 * line["rollout/success"]


def refused(**sections):
    with pytest.raises(ValueError) as caught:
        parse_config({**BASE, **sections}, source="test")
    return str(caught.value)


BRAKED = {**BASE["learner"], "target_kl": 0.05}
CLUSTER = {"type": "ray"}


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"algorithm": {"type": "trpo"}}, "type is one of grpo, ppo, dpo, tpo, filtered_bc"),
        ({"algorithm": {"type": "dpo", "clip_low": 0.2}}, "clip_low: unknown key"),
        ({"algorithm": {"type": "grpo", "gamma": 0.9}}, "gamma: unknown key"),
        ({"algorithm": {"type": "ppo"}}, "clip 0.02 clips nearly every summed log-prob"),
        ({"algorithm": PPO, "loop": {"overlap": True}}, "ppo learns from episodes of the newest weights"),
        ({"algorithm": TPO, "loop": {"stored": "x"}}, "tpo learns from episodes of the newest weights"),
        ({"algorithm": PPO, "cluster": CLUSTER}, "ppo runs in one process: set cluster to local"),
        ({"algorithm": {**PPO, "entropy_coef": 0.01}}, "gaussian has a fixed std, so its entropy is constant"),
        ({"algorithm": {**PPO, "kl_target": 0.1}}, "kl_target adapts kl_coef, which is 0"),
        ({"algorithm": DPO}, "dpo learns from labelled pairs: use reward.type preference"),
        ({"algorithm": TPO, "learner": BRAKED}, "set it to null; algorithm.beta holds the policy"),
        (
            {"algorithm": TPO, "policy": TORCH, "learner": {**BASE["learner"], "devices": 2}},
            "tpo trains on one device; set learner.devices to 1",
        ),
    ],
)
def test_what_does_not_fit_is_refused(sections, message):
    assert message in refused(**sections)


def test_a_minibatch_has_room_for_a_pair(tmp_path):
    """A pair of point_reach is 2 x 8 decisions."""
    with pytest.raises(ValueError, match=r"no room for \d+ decisions that belong together; set it to at least"):
        go(tmp_path, until=1, policy=TORCH, learner={**BASE["learner"], "minibatch": 8}, **METHODS["tpo"])


def test_preference_optimisation_is_held_by_beta():
    config = parse_config({**BASE, "algorithm": DPO, "reward": LEARNED}, source="test")
    assert kl_coef(config) == 0.0 and cautions(config) == []
    filtered = {**BASE, "algorithm": FILTERED, "reward": LEARNED}
    assert any("reward hacking" in text for text in cautions(parse_config(filtered, source="test")))
