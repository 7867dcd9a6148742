"""Our GRPO against numbers that TRL's own code gave; benchmarks/trl_golden.py made them.

TRL's token is our sub-step and its completion is our episode: [N, T * S] there is [N * T, S] here. What is the same:
- The ratio is TRL's importance_sampling_level="token", one per sub-step; we never multiply a decision's sub-steps into
  one ratio, nor an episode's (GSPO, "sequence").
- Our one-sided bound is TRL's min(r * A, clamp(r) * A), value and gradient.
- "decisions" is TRL's bnpo when a step is one micro-batch and dapo when it is several. "constant" is dr_grpo with
  max_completion_length = T * S, on batches without dead episodes.

Where we differ:
- Zero-advantage episodes (dead groups, unscorable members) are in no denominator of ours and never reach the loss, so
  they get no KL either; TRL counts them and pulls them to the reference.
- "grpo", the mean over episodes of their mean over tokens, is none of our normalisers.
- TRL's KL is the k3 estimate from log-probabilities of samples. Ours is handed in, in closed form: here, k3.
- Advantages: TRL divides by (sample std + 1e-4), we by the population std; we also call a group with little spread
  dead, where TRL has no floor but the 1e-4.
- We clip log-ratios to +-LOG_RATIO_LIMIT, TRL does not. No number here is that far out.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from array_api_compat import array_namespace

from vla_rlaif.grpo import GRPO, LOG_RATIO_LIMIT, num_valid
from vla_rlaif.types import Targets

GOLDEN = json.loads((Path(__file__).parent / "golden" / "trl_grpo.json").read_text())
CASES = {f"{case['loss_type']}-{case['beta']}": case for case in GOLDEN["cases"]}
N, T, S, SIZE = (GOLDEN["shape"][name] for name in ("N", "T", "S", "group_size"))
MASK = np.array(GOLDEN["mask"], bool)[:, ::S]  # N T
ADVANTAGE = np.array(GOLDEN["advantage"])  # N
LOGP, LOGP_OLD, LOGP_REF = (np.reshape(GOLDEN[name], (N * T, S)) for name in ("logp", "logp_old", "logp_ref"))
every_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


def algorithm(kl_coef: float = 0.0, *, scale_by_std: bool = True, std_floor: float = 1e-2) -> GRPO:
    return GRPO(
        group_size=SIZE,
        clip_low=GOLDEN["epsilon_low"],
        clip_high=GOLDEN["epsilon_high"],
        kl_coef=kl_coef,
        scale_by_std=scale_by_std,
        std_floor=std_floor,
    )


def loss(
    logp: Any,  # [N * T, S], whose backend and dtype `convert` matches
    kl_coef: float,
    total: float,
    convert: Callable[[np.ndarray], Any] = np.asarray,
    *,
    mask: np.ndarray = MASK,
    episodes: slice = slice(None),
) -> tuple[Any, Mapping[str, Any]]:
    rows = np.arange(N * T).reshape(N, T)[episodes].ravel()
    targets = Targets(
        logp_old=convert(LOGP_OLD[rows]),
        advantage=convert(np.repeat(ADVANTAGE, T)[rows]),
        mask=convert(mask.ravel()[rows]),
        num_valid=total,
    )
    log_ratio = convert(LOGP_REF[rows]) - logp[rows]
    return algorithm(kl_coef).loss(logp[rows], targets, array_namespace(logp).exp(log_ratio) - log_ratio - 1)


def losses(case: Mapping[str, Any], logp: Any, convert: Callable[[np.ndarray], Any] = np.asarray) -> list[Any]:
    """One for each of TRL's."""
    if case["loss_type"] == "grpo":  # no num_valid gives it: episode by episode, each divided by its own length
        return [
            sum(
                loss(logp, case["beta"], float(N * MASK[n].sum()), convert, episodes=slice(n, n + 1))[0]
                for n in range(N)
            )
        ]
    total = float(N * T if case["loss_type"] == "dr_grpo" else MASK.sum())
    size = N // len(case["losses"])
    return [loss(logp, case["beta"], total, convert, episodes=slice(n, n + size))[0] for n in range(0, N, size)]


def test_numbers_reach_every_branch():
    ratio = np.exp(LOGP - LOGP_OLD)[MASK.ravel()]
    advantage = np.repeat(ADVANTAGE, T)[MASK.ravel(), None]
    low, high = 1 - GOLDEN["epsilon_low"], 1 + GOLDEN["epsilon_high"]
    for side in (advantage > 0, advantage < 0):
        for region in (ratio < low, (ratio > low) & (ratio < high), ratio > high):
            assert (side & region).any()
    assert np.abs(np.log(ratio)).max() < LOG_RATIO_LIMIT
    assert set(MASK.sum(axis=1)) == set(range(1, T + 1))


@every_case
def test_loss_in_numpy(case):
    np.testing.assert_allclose(losses(case, LOGP), case["losses"], rtol=0, atol=1e-12)


@every_case
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-6)])
def test_loss_and_gradient_in_torch(case, dtype, tolerance):
    def convert(x: np.ndarray) -> torch.Tensor:
        return torch.tensor(x, dtype=torch.bool if x.dtype == bool else dtype)

    logp = convert(LOGP).requires_grad_()
    values = torch.stack(losses(case, logp, convert))
    values.sum().backward()
    np.testing.assert_allclose(values.detach().numpy(), case["losses"], rtol=0, atol=tolerance)
    assert logp.grad is not None and logp.grad.dtype == dtype
    np.testing.assert_allclose(logp.grad.numpy().reshape(N, T * S), case["grad"], rtol=0, atol=tolerance)


def test_metrics():
    case = CASES["bnpo-0.05"]
    _, metrics = loss(LOGP, case["beta"], float(MASK.sum()))
    assert float(metrics["clip_fraction"]) == pytest.approx(case["clip_fraction"], abs=1e-6)  # float32 in TRL
    assert float(metrics["reference_kl"]) == pytest.approx(case["kl"], abs=1e-12)


@pytest.mark.parametrize(("normalizer", "loss_type"), [("constant", "dr_grpo"), ("decisions", "bnpo")])
@pytest.mark.parametrize("beta", [0.0, 0.05])
def test_what_training_makes_of_zero_advantage_episodes(normalizer, loss_type, beta):
    """Here they are in no denominator and have no KL, as in ``make_batch``; TRL keeps both."""
    theirs, denominator = CASES[f"{loss_type}-{beta}"]["losses"][0], N * T if loss_type == "dr_grpo" else MASK.sum()
    live = MASK & (ADVANTAGE != 0)[:, None]
    total = num_valid(normalizer, ADVANTAGE, MASK)
    ours, _ = loss(LOGP, beta, total, mask=live)
    log_ratio = (LOGP_REF - LOGP)[(MASK & ~live).ravel()]
    dropped = beta * (np.exp(log_ratio) - log_ratio - 1).sum() / S
    assert total < denominator and log_ratio.size
    assert float(ours) * total == pytest.approx(theirs * denominator - dropped, abs=1e-12)


def test_advantages():
    """Groups: plain, with an unscorable member, tied, with a spread of 1e-3."""
    reward = np.array(GOLDEN["reward"], float)  # None becomes NaN
    group = np.repeat(np.arange(N // SIZE), SIZE)
    grouped = reward.reshape(-1, SIZE)
    population, sample = (np.repeat(np.nanstd(grouped, axis=1, ddof=ddof), SIZE) for ddof in (0, 1))
    ours, _ = algorithm(std_floor=0.0).advantages(reward, group)
    # (r - mean) / population against (r - mean) / (sample + 1e-4), and sample = population * sqrt(n / (n - 1)), so in a
    # full group of 4 ours are 1.15 times TRL's: one scale for every group, but a KL term weighs that much less.
    # 1e-7 because n / (n - 1) is a float32 in TRL.
    np.testing.assert_allclose(ours * population, ADVANTAGE * (sample + 1e-4), rtol=1e-7, atol=1e-12)
    np.testing.assert_allclose(ours[:SIZE] / ADVANTAGE[:SIZE], np.sqrt(SIZE / (SIZE - 1)), rtol=1e-3)
    unscaled, _ = algorithm(scale_by_std=False, std_floor=0.0).advantages(reward, group)
    np.testing.assert_allclose(unscaled, GOLDEN["advantage_unscaled"], rtol=0, atol=1e-12)

    floored, stats = algorithm().advantages(reward, group)
    np.testing.assert_array_equal(floored[: 2 * SIZE], ours[: 2 * SIZE])
    assert (floored[2 * SIZE :] == 0).all() and stats["groups/zero_spread"] == 2
    assert np.abs(ADVANTAGE[3 * SIZE :]).max() > 1  # a spread of 1e-3 is a full-size advantage to TRL
