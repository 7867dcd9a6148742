"""Run directories to look at, made up or played: with groups, labels, curves, clips and a card."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import yaml
from synthetic import make_episodes

from vla_rlaif.metrics import MetricsLog
from vla_rlaif.preferences.store import Preference, PreferenceStore
from vla_rlaif.recording import Recorded, Recording
from vla_rlaif.reward_card import make_card, write_card_json
from vla_rlaif.reward_card_data import Judged
from vla_rlaif.types import Episodes

GROUP = 4
CAMERAS = ("top", "wrist")


def scene_episodes(num_groups: int, *, seed: int = 0, size: int = 32) -> Episodes:
    """Groups of four: a dot moves towards a disc from the identical start, and comes near it or not."""
    rng, num = np.random.default_rng(seed), num_groups * GROUP
    episodes = make_episodes(num, group_size=GROUP, seed=seed, length=rng.integers(2, 5, num))
    y, x = np.mgrid[:size, :size] / size
    images = {camera: np.full((num, 5, size, size, 3), (58, 62, 70), np.uint8) for camera in CAMERAS}
    state, near = episodes.state.copy(), rng.uniform(0.2, 1.0, num)
    for group in range(num_groups):
        start, goal = rng.uniform(0.2, 0.8, 2), rng.uniform(0.2, 0.8, 2)
        for row in range(group * GROUP, group * GROUP + GROUP):
            state[row, 0] = np.arange(8) + group
            length = int(episodes.num_decisions[row])
            for frame in range(5):
                hand = start + near[row] * min(1.0, frame / length) * (goal - start)
                for zoom, camera in enumerate(CAMERAS, start=1):
                    picture = images[camera][row, frame]
                    picture[(y - goal[0]) ** 2 + (x - goal[1]) ** 2 < (0.11 * zoom) ** 2] = (70, 170, 90)
                    picture[(y - hand[0]) ** 2 + (x - hand[1]) ** 2 < (0.06 * zoom) ** 2] = (230, 120, 60)
            for camera in CAMERAS:
                images[camera][row, length:] = images[camera][row, length]
    action = rng.normal(size=episodes.action.shape)
    logp = rng.normal(-1.5, 0.4, (num, 4, 3))
    return replace(
        episodes, images=images, state=state, action=action, logp=logp, success=near > 0.75, truth=2 * near - 1
    )


def recorded(episodes: Episodes, *, seed: int = 0) -> Recorded:
    """Rewards that mostly order as the truth does, and progress that grows."""
    rng, num = np.random.default_rng(seed), len(episodes.success)
    reward = episodes.truth + rng.normal(0, 0.35, num)
    by_group = reward.reshape(-1, GROUP)
    advantage = ((by_group - by_group.mean(1, keepdims=True)) / by_group.std(1, keepdims=True)).reshape(-1)
    progress = np.cumsum(rng.uniform(0, 0.25, (num, 5)), axis=1)
    return Recorded(
        episodes=replace(episodes, trace={}),
        row=np.arange(num),
        reward=reward,
        advantage=advantage,
        progress=progress,
    )


def make_run(folder: Path, *, steps: int = 12, every: int = 3, groups: int = 2, finished: bool = True) -> Path:
    """A run as `train` leaves it. ``finished=False``: it is going on, and ``add_steps`` goes on with it."""
    folder.mkdir(parents=True)
    config = {
        "name": folder.name,
        "seed": 0,
        "env": {"type": "tabletop", "task": "reach"},
        "policy": {"type": "octo"},
        "reward": {"type": "preference"},
        "algorithm": {"group_size": GROUP},
        "loop": {"steps": steps},
        "record": {"every": every, "groups": groups},
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    (folder / "manifest.json").write_text(
        json.dumps({"versions": {"vla_rlaif": "0.1.0"}, "git": {"commit": "abc1234", "dirty": True}})
    )
    add_steps(folder, 0, steps, every=every, groups=groups)
    _label(folder, groups)
    if finished:
        _finish(folder)
    return folder


def add_steps(folder: Path, first: int, end: int, *, every: int = 3, groups: int = 2) -> None:
    recording = Recording(folder / "episodes")
    with MetricsLog(folder) as log:
        for step in range(first, end):
            log.write(step, metrics_of(step))
            if step % every == 0:
                recording.write(step, recorded(scene_episodes(groups, seed=step), seed=step))


def metrics_of(step: int) -> dict[str, float | None]:
    rng = np.random.default_rng(step)
    wave = lambda low, high: float(low + (high - low) * (1 - np.exp(-step / 8)) + rng.normal(0, 0.02))  # noqa: E731
    line: dict[str, float | None] = {
        "minutes": 0.05 * (step + 1),
        "rollout/success": min(1.0, wave(0.4, 0.9)),
        "rollout/truth": wave(0.5, 1.5),
        "reward/mean": wave(0.1, 0.8),
        "reward/success_correlation": wave(0.6, 0.85) if step else None,
        "reward/std_in_group": wave(0.5, 0.3),
        "reference_kl": max(0.0, wave(0.0, 0.6)),
        "policy_kl": abs(wave(2e-4, 4e-4)) * 1e-2,
        "clip_fraction": wave(0.1, 0.17),
        "loss": wave(0.2, 0.1),
        "grad_norm": wave(0.3, 0.2),
        "groups/total": 16.0,
        "groups/live": 14.0 - step % 3,
        "groups/all_success": float(step % 4),
        "groups/all_fail": float(2 - step % 2),
        "groups/zero_spread": float(step % 3),
        "episodes/trained": 120.0,
        "episodes/evicted": 0.0,
        "episodes/failed": 8.0,
        "time/rollout_s": wave(1.2, 0.9),
        "time/physics_s": 0.3,
        "time/render_s": 0.4,
        "time/policy_s": 0.15,
        "time/reward_s": 0.05,
        "time/update_s": wave(0.3, 0.28),
        "time/sync_s": 0.01,
        "time/step_s": 1.6,
        "idle/rollout": 0.2,
        "idle/learner": 0.75,
        "sync/gather_s": 0.002,
        "sync/transfer_s": 0.004,
        "term/progress/mean": wave(0.1, 0.6),
        "term/progress/std": 0.2,
        "term/energy/mean": 40 * wave(-1.0, -1.3),
        "term/energy/std": 9.0,
    }
    if step % 4 == 3:
        line |= {"validation/success": wave(0.45, 0.92), "validation/low": 0.4, "validation/high": 0.97}
        line |= {"monitor/sqrt_kl": 0.03 * step, "monitor/proxy_gain": wave(0, 4), "monitor/strikes": float(step > 15)}
        line |= {"monitor/gold": min(0.9, 0.4 + 0.05 * step) - 0.06 * max(0, step - 11), "monitor/alarm": 0.0}
        line |= {"monitor/term/progress": wave(0.1, 0.7), "monitor/term/energy": 40 * wave(-1.0, -1.2)}
    return line


def _label(folder: Path, groups: int) -> None:
    """Some pairs of kept episodes, and some of episodes that were not kept."""
    num = groups * GROUP
    records = [
        Preference(
            first=f"{step}:{k}",
            second=f"{step}:{k + gap}",
            segment=(0, 4),
            instruction="reach the red cube",
            p_first=(1.0, 0.0, 0.5, None, 0.8)[k % 5],
            labeller="oracle/1" if k % 2 else "human/ana",
            step=step,
            held_out=k % 4 == 0,
            time=1e9 + k,
        )
        for step in (0, 3)
        for k, gap in [(k, 1) for k in range(num - 1)] + [(num + 1, 40)]
    ]
    with PreferenceStore(folder / "preferences.sqlite") as store:
        store.append(records)


def _finish(folder: Path) -> None:
    rng = np.random.default_rng(1)
    frames = rng.integers(0, 256, (2, 4, 24, 24, 3), dtype=np.uint8)
    np.savez_compressed(
        folder / "clips.npz",
        before=frames,
        after=frames[:, ::-1],
        before_success=np.array([False, True]),
        after_success=np.array([True, True]),
        instruction=np.array(["reach the red cube", "reach the blue cube"]),
    )
    result = {
        "task": "reach",
        "success_before": 0.45,
        "ci95_before": [0.4, 0.5],
        "success_after": 0.9,
        "ci95_after": [0.87, 0.93],
        "minutes": 0.7,
        "labels": 16,
        "best_step": 8,
        "seed": 0,
    }
    (folder / "result.json").write_text(json.dumps(result))
    score = rng.normal(size=40)
    pairs = rng.permutation(40).reshape(20, 2)
    odds = 1 / (1 + np.exp(-2 * (score[pairs[:, 0]] - score[pairs[:, 1]])))
    judged = Judged(
        ids=[f"0:{k}" for k in range(40)],
        instruction=["reach the red cube", "reach the blue cube"] * 20,
        score=score,
        group=np.arange(40) // GROUP,
        pairs=pairs,
        label=(rng.random(20) < odds).astype(float),
        p_first=odds,
        success=(score > 0).astype(float),
        truth=score + rng.normal(size=40),
    )
    write_card_json(make_card(judged, {"reward.members": "3"}), folder / "reward_card.json")
