"""Can the learned reward be trusted? Labels of the oracle, few and with mistakes, against the truth on fresh episodes.

    python benchmarks/reward_model.py --task push --data runs/reward_clips
    python benchmarks/reward_model.py --speed            # a fit on 10,000 pairs

Episodes are those of reward_clips.py, played once into ``--data``: 140 start states to learn from and 35 to test, other
ones with another ``--data-seed``. Settings are chosen on data seed 0; the figures of the docs are of data seed 1.
"Counterfactual": a successful test clip under another colour than was asked and brought scores lower.
"""

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Literal

import numpy as np
import tyro
from reward_clips import GROUP_SIZE, play_mixture

from vla_rlaif.build import build_env
from vla_rlaif.build_reward import build_preference_reward
from vla_rlaif.config import parse_config
from vla_rlaif.dataset import append_episodes
from vla_rlaif.envs.tabletop import Tabletop
from vla_rlaif.metrics import wilson
from vla_rlaif.preferences.clips import make_clips
from vla_rlaif.preferences.data import EpisodeFeatures, FitReport, PairData, kendall_tau
from vla_rlaif.preferences.labelled import gather_episodes
from vla_rlaif.preferences.labelling import choose_pairs, make_pair_data
from vla_rlaif.preferences.oracle import OracleLabeller
from vla_rlaif.preferences.sampling import Strategy, split_by_group
from vla_rlaif.reward_config import PreferenceRewardConfig
from vla_rlaif.reward_models.preference import PreferenceReward
from vla_rlaif.rollout import Split, take, train_starts
from vla_rlaif.types import EnvSpec, Episodes

MAX_STEPS = {"reach": 16, "push": 64}
GROUPS = {"train": (Split.TRAIN, 140), "test": (Split.TEST, 35)}
MIX: dict[Strategy, float] = {"within_group": 0.5, "uniform": 0.5}
NUM_TEST_PAIRS = 2000
SETTINGS = {
    "type": "preference",
    "encoder": {"type": "color_points"},
    "first_frame": True,
    "heads": ["return", "progress", "success"],
    "outcomes": ["labeller"],
    "outcome_share": 0.1,
    "input_noise": 0.3,
    "weight_decay": 3.0,
    "assumed_mistakes": 0.1,  # whatever --mistakes are: nobody knows the share beforehand
    "fit_steps": 600,
    "recent_share": 0.0,  # no label is newer than another here
}


@dataclass(frozen=True)
class Options:
    task: Literal["reach", "push"] = "push"
    data: Path = Path("runs/reward_clips")  # episodes, played once
    data_seed: int = 0  # of the start states and of what is played from them
    labels: int = 500
    mistakes: tuple[float, ...] = (0.0, 0.2)  # shares of the labels that are wrong, one fit and seed each
    seeds: int = 3
    speed: bool = False  # only time a fit on 10,000 pairs


def main(args: Options) -> None:
    if args.speed:
        speed()
        return
    spec, settings = setting(args.task)
    episodes = {part: played(args.task, args.data, part, args.data_seed) for part in GROUPS}
    reward = build_preference_reward(settings, None, spec)
    begun = time.perf_counter()
    features = {part: reward.features(e) for part, e in episodes.items()}
    others = under_others(reward, spec, episodes["test"])
    encode_s = time.perf_counter() - begun
    for mistake, seed in product(args.mistakes, range(args.seeds)):
        report = fit(reward, spec, settings, episodes["train"], features["train"], args.labels, mistake, seed)
        row = {"task": args.task, "data": args.data_seed, "labels": args.labels, "mistake": mistake, "seed": seed}
        row |= measure(reward, spec, settings, episodes["test"], features["test"], others)
        row |= {"ece": report.ece, "success recall": report.success_recall, "false positives": report.false_positives}
        row |= {"steps": report.num_steps, "fit_s": report.seconds, "encode_s": encode_s}
        print(json.dumps({k: round(v, 3) if isinstance(v, float) else v for k, v in row.items()}), flush=True)


def setting(task: str) -> tuple[EnvSpec, PreferenceRewardConfig]:
    run = {
        "env": {"type": "tabletop", "task": task, "num_envs": 8, "max_steps": MAX_STEPS[task], "renderer": "ray"},
        "policy": {"type": "octo"},
        "algorithm": {"type": "grpo", "group_size": 8},
        "reward": SETTINGS,
    }
    config = parse_config(run, source="benchmarks/reward_model.py")
    env = build_env(config.env)
    env.close()
    assert isinstance(config.reward, PreferenceRewardConfig)
    return env.spec, config.reward


def played(task: str, data: Path, part: str, seed: int) -> Episodes:
    folder = data / f"{task}-{part}-{seed}"
    if not folder.exists():
        split, num_groups = GROUPS[part]
        steps = MAX_STEPS[task]
        env = Tabletop(task, num_envs=10 * GROUP_SIZE, chunk=1, max_steps=steps)
        try:
            starts = train_starts(seed, 0, num_groups, GROUP_SIZE, split)
            append_episodes(folder, play_mixture(env, starts, task=task, seed=seed), {})
        finally:
            env.close()
    return gather_episodes(folder)[1]


def fit(
    reward: PreferenceReward,
    spec: EnvSpec,
    settings: PreferenceRewardConfig,
    episodes: Episodes,
    features: EpisodeFeatures,
    num_labels: int,
    mistake: float,
    seed: int,
) -> FitReport:
    """Of all labels the share ``outcome_share`` says of single clips whether they succeeded, the rest compares."""
    labeller = OracleLabeller(mistake=mistake, equal_threshold=0.02)
    num_outcomes = round(settings.outcome_share * num_labels)
    num_pairs = num_labels - num_outcomes
    held = split_by_group(episodes.starts.group, episodes.valid, settings.held_out, seed)
    num_held = round(settings.held_out * num_pairs)
    pairs = np.concatenate(
        [
            choose_pairs(episodes, num, np.flatnonzero(rows), seed + 10, mix=MIX)
            for num, rows in ((num_pairs - num_held, ~held), (num_held, held))
        ]
    )
    labels = labeller.label(episodes, pairs, seed)
    _, data = make_pair_data(features, pairs, labels, np.arange(num_pairs) >= num_pairs - num_held)
    rows = np.random.default_rng(seed).permutation(np.unique(pairs))[:num_outcomes]
    outcome = np.full(len(held), np.nan)
    outcome[rows] = labeller.outcomes(episodes, rows, seed)
    return reward.fit(data, seed, make_clips(episodes, outcome, held, spec.instructions, reward.features, seed))


def measure(
    reward: PreferenceReward,
    spec: EnvSpec,
    settings: PreferenceRewardConfig,
    episodes: Episodes,
    features: EpisodeFeatures,
    others: Sequence[EpisodeFeatures],
) -> dict[str, object]:
    """On episodes from other start states, against the truth; ``others`` are those that succeeded, asked otherwise.
    "Counterfactual" is the share of the latter that score lower than as asked, counted one by one."""
    pairs = choose_pairs(episodes, NUM_TEST_PAIRS, np.arange(len(episodes.valid)), 0, mix=MIX)
    target = OracleLabeller(equal_threshold=0.02).label(episodes, pairs, 0)
    decided = target != 0.5
    gold = np.where(episodes.success, 2.0, episodes.truth)  # successes are equally good, as the labeller has them
    won = np.flatnonzero(episodes.success)
    row: dict[str, object] = {}
    for score in ("return", "progress", "success", "mix"):
        view = build_preference_reward(settings.model_copy(update={"score": score}), None, spec)
        view.restore(reward.state())
        value = view.score_features(features)
        right = (value[pairs[:, 0]] > value[pairs[:, 1]])[decided] == (target[decided] > 0.5)
        low, high = wilson(int(right.sum()), len(right))
        row[f"{score} accuracy"] = float(right.mean())
        row[f"{score} interval"] = [round(low, 3), round(high, 3)]
        row[f"{score} tau"] = kendall_tau(value, gold)
        if others:
            lower = [view.score_features(other) < value[won] for other in others]
            row[f"{score} counterfactual"] = float(np.mean(lower))
    return row


def under_others(reward: PreferenceReward, spec: EnvSpec, episodes: Episodes) -> list[EpisodeFeatures]:
    """Features of the clips that succeeded, as if each other instruction of the task had been given."""
    won = take(episodes, np.flatnonzero(episodes.success))
    asked = [spec.instructions.index(text) for text in won.instruction]
    num = len(spec.instructions)
    said = [tuple(spec.instructions[(i + shift) % num] for i in asked) for shift in range(1, num)]
    return [reward.features(replace(won, instruction=other)) for other in said]


def speed() -> None:
    """10,000 pairs of 4,000 episodes with 60 features, a tenth of them held out; time of the fit alone."""
    rng = np.random.default_rng(0)
    spec, settings = setting("push")
    reward = build_preference_reward(settings.model_copy(update={"heads": ("return",), "outcomes": ()}), None, spec)
    values = rng.normal(size=(4000, 1, reward.dim)).astype(np.float32)
    utility = values[:, 0] @ rng.normal(size=reward.dim)
    pairs = rng.integers(0, 4000, (10000, 2))
    target = (utility[pairs[:, 0]] > utility[pairs[:, 1]]).astype(float)
    data = PairData(
        values=values, live=np.ones((4000, 1), bool), pairs=pairs, target=target, held_out=rng.random(10000) < 0.1
    )
    report = reward.fit(data, 0)
    print(f"{len(pairs)} pairs: {report.seconds:.1f} s, held-out accuracy {report.held_out_accuracy:.3f}")


if __name__ == "__main__":
    main(tyro.cli(Options))
