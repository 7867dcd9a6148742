"""Can the learned reward be trusted? Labels of the oracle, few and with mistakes, against the truth on fresh episodes.

    python benchmarks/reward_model.py --task push --data runs/reward_clips
    python benchmarks/reward_model.py --task push --data runs/reward_clips --mistake 0.2
    python benchmarks/reward_model.py --speed            # a fit on 10,000 pairs

Episodes are those of reward_clips.py, played once into ``--data``: 140 start states to learn from and 35 to test.
"Counterfactual": a successful test clip under another colour than was asked and brought scores lower.
"""

import json
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
import tyro
from reward_clips import GROUP_SIZE, play_mixture

from vla_rlaif.build import build_env, build_preference_reward
from vla_rlaif.config import parse_config
from vla_rlaif.dataset import append_episodes
from vla_rlaif.envs.tabletop import Tabletop
from vla_rlaif.metrics import wilson
from vla_rlaif.preferences.clips import make_clips
from vla_rlaif.preferences.data import EpisodeFeatures, PairData, kendall_tau
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
    "fit_steps": 600,
    "recent_share": 0.0,  # no label is newer than another here
}


@dataclass(frozen=True)
class Options:
    task: Literal["reach", "push"] = "push"
    data: Path = Path("runs/reward_clips")  # episodes, played once
    labels: int = 500
    mistake: float = 0.0  # share of the labels that is wrong
    seeds: int = 3
    speed: bool = False  # only time a fit on 10,000 pairs


def main(args: Options) -> None:
    if args.speed:
        speed()
        return
    spec, settings = setting(args.task)
    episodes = {part: played(args.task, args.data, part) for part in GROUPS}
    reward = build_preference_reward(settings, None, spec)
    begun = time.perf_counter()
    features = {part: reward.features(e) for part, e in episodes.items()}
    encode_s = time.perf_counter() - begun
    for seed in range(args.seeds):
        begun = time.perf_counter()
        report = fit(reward, spec, settings, episodes["train"], features["train"], args, seed)
        row = {"task": args.task, "labels": args.labels, "mistake": args.mistake, "seed": seed}
        row |= measure(reward, spec, settings, episodes["test"], features["test"])
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


def played(task: str, data: Path, part: str) -> Episodes:
    folder = data / f"{task}-{part}"
    if not folder.exists():
        split, num_groups = GROUPS[part]
        steps = MAX_STEPS[task]
        env = Tabletop(task, num_envs=10 * GROUP_SIZE, chunk=1, max_steps=steps)
        try:
            starts = train_starts(0, 0, num_groups, GROUP_SIZE, split)
            append_episodes(folder, play_mixture(env, starts, task=task, seed=0), {})
        finally:
            env.close()
    return gather_episodes(folder)[1]


def fit(
    reward: PreferenceReward,
    spec: EnvSpec,
    settings: PreferenceRewardConfig,
    episodes: Episodes,
    features: EpisodeFeatures,
    args: Options,
    seed: int,
):
    """Of all labels the share ``outcome_share`` says of single clips whether they succeeded, the rest compares."""
    labeller = OracleLabeller(mistake=args.mistake, equal_threshold=0.02)
    num_outcomes = round(settings.outcome_share * args.labels)
    num_pairs = args.labels - num_outcomes
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
) -> dict[str, object]:
    """On episodes from other start states, against the truth."""
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
        if len(spec.instructions) > 1:
            row[f"{score} counterfactual"] = counterfactual(view, spec, take(episodes, won), value[won])
    return row


def counterfactual(reward: PreferenceReward, spec: EnvSpec, episodes: Episodes, score: np.ndarray) -> float:
    """Share of the clips that score lower under every other instruction of the task, counted one by one."""
    lower = []
    for shift in range(1, len(spec.instructions)):
        said = [(spec.instructions.index(text) + shift) % len(spec.instructions) for text in episodes.instruction]
        other = reward.score(replace(episodes, instruction=tuple(spec.instructions[i] for i in said)))
        lower.append(other < score)
    return float(np.mean(lower))


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
