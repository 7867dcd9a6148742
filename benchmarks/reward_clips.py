"""Episodes of every quality on the tabletop, for measuring reward models: the scripted expert, well and badly.

A policy's episodes are alike; a reward model must also order what no good policy does. Of each group of seven members,
all from the identical start state, some are of the expert under little noise, some under much, some are random walks,
some let go half way, and some do the other thing that their scene allows: they bring a cube that was not asked for, or
(reach, which has one thing to do) turn away from the goal.

Axes: N episodes, L env steps, H chunk.
"""

from dataclasses import replace

import numpy as np

from vla_rlaif.envs.tabletop import Tabletop
from vla_rlaif.rollout import concatenate, take, take_starts
from vla_rlaif.types import Episodes, Starts, Transition

KINDS = {  # of the members of a group; reach is so easy that every expert succeeds
    "reach": ("expert", "noisy", "random", "random", "half", "half", "other"),
    "push": ("expert", "expert", "noisy", "noisy", "random", "half", "other"),
}
GROUP_SIZE = 7
NOISE = {"expert": 0.15, "noisy": 0.6, "half": 0.3, "other": 0.2}  # std of the executed translation, action units
NUM_CUBES = 3
HALF = {"reach": (1, 6), "push": (8, 30)}  # env steps after which a member that goes half way lets go
DRIFT = {"reach": 0.15, "push": 0.7}  # of a random walk, action units; with more of it reach has only total failures
FRAME_EVERY = 4  # env steps: the chunk of the tabletop's configs


def play_mixture(env: Tabletop, starts: Starts, *, task: str, seed: int) -> Episodes:
    """One episode per start, in rounds of ``env.num_envs``; what a member does is its number modulo seven.

    ``env`` steps one action at a time (chunk 1); the frames that are kept are ``FRAME_EVERY`` steps apart.
    """
    rounds = []
    for first in range(0, len(starts.seed), env.num_envs):
        rows = np.arange(first, first + env.num_envs) % len(starts.seed)
        played = _round(env, take_starts(starts, rows), task=task, rng=np.random.default_rng((seed, first)))
        rounds.append(take(played, np.arange(min(env.num_envs, len(starts.seed) - first))))
    return concatenate(rounds)


def _round(env: Tabletop, starts: Starts, *, task: str, rng: np.random.Generator) -> Episodes:
    kind = np.array(KINDS[task])[starts.member % GROUP_SIZE]
    asked = env.reset(starts.seed)
    other = np.flatnonzero(kind == "other") if task != "reach" else np.empty(0, int)
    begun = {int(i): env.snapshot(int(i)) for i in other}
    for i, snapshot in begun.items():
        env.restore([i], replace(snapshot, cube=(snapshot.cube + 1 + int(rng.integers(NUM_CUBES - 1))) % NUM_CUBES))
    frames, live, now = [asked], [], asked
    walk = rng.normal(size=(env.num_envs, 7))
    half = rng.integers(*HALF[task], env.num_envs)
    for step in range(env.spec.max_decisions):
        if step % FRAME_EVERY == 0:
            live.append(~now.done)
        action = _actions(env, kind, walk * DRIFT[task], step >= half, rng)
        walk += 0.5 * rng.normal(size=walk.shape)
        now = env.step(action[:, None])
        if (step + 1) % FRAME_EVERY == 0:
            frames.append(now)
    end = _as_asked(env, begun, now)
    return _episodes(env, starts, asked.obs.instruction, frames, np.stack(live, axis=1), end)


def _actions(
    env: Tabletop, kind: np.ndarray, drift: np.ndarray, late: np.ndarray, rng: np.random.Generator
) -> np.ndarray:
    action = env.expert().astype(np.float64)
    noise = np.array([NOISE.get(k, 0.0) for k in kind])
    action[:, :3] += noise[:, None] * rng.normal(size=(env.num_envs, 3))
    drifting = (kind == "random") | ((kind == "half") & late)
    turning = (kind == "other") & late & (len(env.spec.instructions) == 1)
    action[drifting, :3] = drift[drifting, :3]
    action[drifting, 3:6] = 0.15 * drift[drifting, 3:6]
    action[turning, :3] *= -0.2
    return np.clip(action, -1, 1).astype(np.float32)


def _as_asked(env: Tabletop, begun: dict, now: Transition) -> Transition:
    """The outcome of members that did another thing than was asked, measured by what was asked."""
    if not begun:
        return now
    for i, snapshot in begun.items():
        fields = {"cube": snapshot.cube, "initial_distance": snapshot.initial_distance}
        env.restore([i], replace(env.snapshot(i), **fields, done=False, success=False, truncated=False, num_steps=0))
    judged = env.step(np.zeros((env.num_envs, 1, 7), np.float32))  # the others are done, or finish here unseen
    truth, success = now.truth.copy(), now.success.copy()
    rows = list(begun)
    truth[rows], success[rows] = judged.truth[rows], judged.success[rows]
    return replace(now, truth=truth, success=success, valid=judged.valid)


def _episodes(
    env: Tabletop,
    starts: Starts,
    instruction: tuple[str, ...],
    frames: list[Transition],
    live: np.ndarray,
    end: Transition,
) -> Episodes:
    num, decisions = live.shape
    return Episodes(
        images={c: np.stack([f.obs.images[c] for f in frames], axis=1) for c in env.spec.cameras},
        state=np.stack([f.obs.state for f in frames], axis=1),
        instruction=instruction,
        action=np.zeros((num, decisions, FRAME_EVERY, 7), np.float32),
        logp=np.zeros((num, decisions, 0), np.float32),
        trace={},
        mask=live,
        executed=np.where(live, FRAME_EVERY, 0),
        success=end.success,
        truth=end.truth.astype(np.float32),
        valid=end.valid,
        starts=starts,
        version=0,
    )
