"""The verbs that do one link of the chain on data on disk: collect, imitate, label, reward fit|eval, evaluate."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from vla_rlaif.build import build_encoder, build_env, load_octo
from vla_rlaif.checkpoint import save_policy
from vla_rlaif.config import PreferenceRewardConfig, RunConfig, WarmStartConfig
from vla_rlaif.dataset import append_episodes, load_demonstrations, load_episodes
from vla_rlaif.evaluate import evaluate
from vla_rlaif.rollout import Split, concatenate, rollout, train_starts
from vla_rlaif.types import Episodes

Say = Callable[[str], None]


def collect(config: RunConfig, to: Path, policy: Path | None, episodes: int, say: Say) -> None:
    from vla_rlaif.run import demonstrations, save_demos

    if policy is None:
        demos = demonstrations(config, config.warm_start or WarmStartConfig(), say)
        save_demos(to, demos, config)
        say(f"{to}: {len(demos.success)} demonstrations, {demos.success.mean():.0%} reach the goal within their length")
        return
    group = config.algorithm.group_size
    if episodes % group:
        raise ValueError(f"--episodes {episodes} does not split into groups of {group} (algorithm.group_size).")
    env = build_env(config.env)
    try:
        starts = train_starts(config.seed, 0, episodes // group, group, Split.REWARD)
        played = rollout(load_octo(policy), env, starts, seed=config.seed)
    finally:
        env.close()
    append_episodes(to, played, {"env": config.env.model_dump(mode="json"), "policy": str(policy)})
    say(f"{to}: {episodes} episodes more, {played.success.mean():.0%} of them successful")


def imitate(config: RunConfig, data: Path, to: Path, say: Say) -> None:
    from vla_rlaif.run import imitated_policy

    demos = load_demonstrations(data)
    config = config.model_copy(update={"warm_start": config.warm_start or WarmStartConfig()})
    env = build_env(config.env)
    try:
        policy = imitated_policy(config, demos, env, say)
    finally:
        env.close()
    save_policy(to, policy.metadata(), {k: np.asarray(v) for k, v in policy.params.items()})
    say(f"{to}: policy written")


def evaluate_policy(config: RunConfig, folder: Path, to: Path | None, say: Say) -> None:
    policy = load_octo(folder)
    env = build_env(config.env)
    try:
        result = evaluate(policy, env, split=Split.TEST, episodes=config.evaluate.episodes)
    finally:
        env.close()
    say(f"success {result.success:.3f}, 95 % interval [{result.low:.3f}, {result.high:.3f}], {result.episodes} episodes")
    if to is not None:
        numbers = {"success": result.success, "ci95": [result.low, result.high], "episodes": result.episodes}
        to.write_text(json.dumps({**numbers, "outcomes": result.outcomes.tolist()}, indent=1))
