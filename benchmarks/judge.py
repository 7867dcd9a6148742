"""A small judge for the tabletop, taught here: is it better than chance on episodes that it has not seen?

    python benchmarks/judge.py --config configs/tabletop_vlm_judge.yaml --to runs/judge
    vla-rlaif train configs/tabletop_vlm_judge.yaml --overwrite      # GRPO on what the judge says

Clips are made by the scripted expert mixed with noise and cut at random, so that they end at all distances. The judge
(a Qwen3-VL of about a million parameters with random weights) is taught what the config's mode asks for: the
simulator's order of pairs of one start state, or its progress as a rating. It is measured on pairs of other start
states by the same labeller that a run uses.
Axes: N clips of two frames, M pairs, A action dims.
"""

import json
import os
import platform
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import tyro
from jaxtyping import Int

from vla_rlaif.build import build_env
from vla_rlaif.build_labeller import build_labeller
from vla_rlaif.collect import ExpertEnv
from vla_rlaif.config import RunConfig, load_config
from vla_rlaif.interfaces import VectorEnv
from vla_rlaif.labeller_config import TransformersConfig, VLMLabellerConfig
from vla_rlaif.preferences.data import Answers
from vla_rlaif.preferences.labelling import answer_counts, ask
from vla_rlaif.preferences.oracle import OracleLabeller
from vla_rlaif.preferences.tiny_judge import Lessons, PairLesson, RatingLesson, teach, write_tiny_judge
from vla_rlaif.reward_config import PreferenceRewardConfig
from vla_rlaif.rollout import Split, concatenate, start_seed
from vla_rlaif.token_config import TinyVLMConfig
from vla_rlaif.types import Episodes, Starts

ORACLE = OracleLabeller(equal_threshold=0.02)


@dataclass(frozen=True)
class Options:
    config: Path = Path("configs/tabletop_vlm_judge.yaml")  # its env, and what its labeller shows the judge
    to: Path = Path("runs/judge")
    clips: int = 4096  # to learn from
    held_out_clips: int = 512
    group_size: int = 8  # clips of one start state
    steps: int = 600
    batch: int = 32
    lr: float = 1e-3
    hidden_dim: int = 128
    num_layers: int = 3
    vision_dim: int = 64
    vision_layers: int = 2
    patch_size: int = 8
    threads: int = 2
    seed: int = 0


def main(options: Options) -> None:
    torch.set_num_threads(options.threads)
    config = load_config(options.config)
    settings = judge_of(config)
    env = build_env(config.env)
    try:
        begun = time.perf_counter()
        clips = make_clips(env, options.clips, options.group_size, seed=options.seed)
        unseen = make_clips(env, options.held_out_clips, options.group_size, seed=options.seed + 1)
        played_s = time.perf_counter() - begun
    finally:
        env.close()
    vlm = TinyVLMConfig(
        family="qwen3_vl",
        hidden_dim=options.hidden_dim,
        num_layers=options.num_layers,
        mlp_dim=2 * options.hidden_dim,
        vision_dim=options.vision_dim,
        vision_layers=options.vision_layers,
        patch_size=options.patch_size,
    )
    frames = np.concatenate([clips.images[name].reshape(-1, *clips.images[name].shape[-3:]) for name in clips.images])
    write_tiny_judge(options.to / "random", env.spec, frames=frames, config=vlm, seed=options.seed)
    begun = time.perf_counter()
    losses = teach(
        options.to / "random",
        options.to / "taught",
        lesson_of(settings, clips),
        Lessons(steps=options.steps, batch=options.batch, lr=options.lr, seed=options.seed),
        say=lambda text: print(text, flush=True),
    )
    taught_s = time.perf_counter() - begun
    pairs = pairs_of_groups(unseen)
    target = ORACLE.label(unseen, pairs, 0)
    result: dict[str, Any] = {
        "machine": f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores",
        "seconds_of_playing": played_s,
        "seconds_of_teaching": taught_s,
        "steps": options.steps,
        "last_loss_nats": float(np.mean(losses[-50:])),
        "held_out_pairs": len(pairs),
    }
    for name in ("random", "taught"):
        begun = time.perf_counter()
        answers = judged(settings, options.to / name, unseen, pairs)
        num = max(answers.num_asked, 1)
        result[name] = measured(answers, target) | {"seconds_per_question": (time.perf_counter() - begun) / num}
    text = json.dumps(result, indent=1)
    print(text)
    (options.to / "judge.json").write_text(text)


def judge_of(config: RunConfig) -> VLMLabellerConfig:
    if not (
        isinstance(config.reward, PreferenceRewardConfig) and isinstance(config.reward.labeller, VLMLabellerConfig)
    ):
        raise ValueError("the config's reward.labeller is not of type vlm.")
    return config.reward.labeller


def make_clips(env: VectorEnv, num: int, group_size: int, *, seed: int) -> Episodes:
    """Start and end of plays of random length, by actions between the expert's and noise."""
    rounds = -(-num // env.num_envs)
    return concatenate([_play(env, group_size, seed, number) for number in range(rounds)])


def _play(env: VectorEnv, group_size: int, seed: int, number: int) -> Episodes:
    assert isinstance(env, ExpertEnv)
    rng, count, spec = np.random.default_rng((seed, number)), env.num_envs, env.spec
    group = number * count + np.arange(count) // group_size
    seeds = np.array([start_seed(Split.REWARD, 97, seed, int(g)) for g in group])  # no start of a run
    first = now = env.reset(seeds)
    skill, length = rng.uniform(0, 1, (count, 1)), rng.integers(1, spec.max_decisions * spec.chunk, count)
    drift = rng.uniform(-1, 1, (count, spec.action_dim))
    images, truth = {name: frames.copy() for name, frames in first.obs.images.items()}, first.truth.copy()
    for step in range(int(length.max())):
        noise = np.clip(drift + 0.5 * rng.normal(size=drift.shape), -1, 1)
        action = skill * env.expert() + (1 - skill) * noise
        now = env.step(np.clip(action, -1, 1).astype(np.float32)[:, None])
        playing = length > step
        for name, frames in now.obs.images.items():
            images[name][playing] = frames[playing]
        truth[playing] = now.truth[playing]
    one = np.ones((count, 1), bool)
    return Episodes(
        images={name: np.stack([first.obs.images[name], images[name]], axis=1) for name in images},
        state=np.stack([first.obs.state, first.obs.state], axis=1),
        instruction=first.obs.instruction,
        action=np.zeros((count, 1, spec.chunk, spec.action_dim)),
        logp=np.zeros((count, 1, 1)),
        trace={},
        mask=one,
        executed=one.astype(int),
        success=truth > 1,
        truth=truth,
        valid=now.valid,
        starts=Starts(seed=seeds, group=group, member=np.arange(count) % group_size),
        version=0,
    )


def pairs_of_groups(episodes: Episodes) -> Int[np.ndarray, "M 2"]:
    """Every pair of clips of one start state."""
    group = episodes.starts.group
    size = int((group == group[0]).sum())
    first, second = np.triu_indices(size, k=1)
    pairs = np.stack([first, second], axis=1) + np.arange(0, len(group), size)[:, None, None]
    return pairs.reshape(-1, 2)


def lesson_of(settings: VLMLabellerConfig, clips: Episodes) -> PairLesson | RatingLesson:
    """What the config's mode asks for: the simulator's order of pairs, or its progress from 0 to 1."""
    shown: Any = {"num_frames": settings.frames, "cameras": settings.cameras, "prompt": settings.prompt}
    if settings.mode == "rubric":
        return RatingLesson(episodes=clips, score=np.clip(clips.truth, 0, 1), **shown)
    pairs = pairs_of_groups(clips)
    return PairLesson(episodes=clips, pairs=pairs, p_first=ORACLE.label(clips, pairs, 0), **shown)


def judged(settings: VLMLabellerConfig, folder: Path, episodes: Episodes, pairs: Int[np.ndarray, "M 2"]) -> Answers:
    backend = TransformersConfig(folder=folder, batch=32)
    config = settings.model_copy(update={"backend": backend, "cache": folder.parent / f"{folder.name}.sqlite"})
    return ask(build_labeller(config, folder), episodes, pairs, 0)


def measured(answers: Answers, target: np.ndarray) -> dict[str, float]:
    """Accuracy on pairs that the simulator orders, with its standard error, and how steady the judge is."""
    decided = target != 0.5
    right = np.where(answers.p_first == 0.5, 0.5, (answers.p_first > 0.5) == (target > 0.5))[decided]
    accuracy = float(right.mean())
    error = float(np.sqrt(accuracy * (1 - accuracy) / decided.sum()))
    return {"accuracy": accuracy, "standard_error": error, "pairs": float(decided.sum()), **answer_counts(answers)}


if __name__ == "__main__":
    main(tyro.cli(Options))
