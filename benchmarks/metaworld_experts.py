"""How often Meta-World's experts solve their tasks through our adapter, and whether each episode is the suite's own.

Every episode is played twice: by the adapter, and by the suite's own env at the same start; observation, reward and
success must agree bit for bit at every step.

    python benchmarks/metaworld_experts.py --tasks MT10 --seeds 20
"""

import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np
import tyro

from vla_rlaif.envs.metaworld import MetaWorldTask
from vla_rlaif.envs.metaworld_tasks import MAX_STEPS, chosen
from vla_rlaif.metrics import wilson


@dataclass(frozen=True, kw_only=True)
class Options:
    tasks: tuple[str, ...] = ("MT10",)
    seeds: int = 20


def main(options: Options) -> None:
    warnings.simplefilter("ignore")  # the experts' gains are high, they say
    tasks, won = chosen(options.tasks), {}
    for task in tasks:
        results = [play(task, seed) for seed in range(options.seeds)]
        won[task] = [success for success, _ in results]
        steps = np.mean([steps for _, steps in results])
        print(f"{task:26} {np.mean(won[task]):5.0%} of {options.seeds}, {steps:4.0f} steps", flush=True)
    total = sum(map(sum, won.values()))
    low, high = wilson(total, options.seeds * len(tasks))
    print(f"all: {total} of {options.seeds * len(tasks)} [{low:.1%}, {high:.1%}], each step as the suite's own")


def play(task: str, seed: int) -> tuple[bool, int]:
    """Whether the expert succeeded, and its env steps."""
    import metaworld
    from metaworld.env_dict import ALL_V3_ENVIRONMENTS

    ours = MetaWorldTask(
        tasks=(task,), observation="proprio", cameras=(), image_size=16, renderer="egl", fast_render=True, randomize={}
    )
    ours.reset(seed)
    kind = ALL_V3_ENVIRONMENTS[task]
    start = {"rand_vec": ours._env._last_rand_vec, "env_cls": kind, "partially_observable": False}
    suite: Any = kind()
    suite.set_task(metaworld._encode_task(task, start))
    obs, _ = suite.reset()
    for step in range(MAX_STEPS):
        np.testing.assert_array_equal(ours._obs, obs)
        action = ours.expert()
        now = ours.step(action.astype(float))
        obs, reward, _, _, info = suite.step(action)
        assert now.success == bool(info["success"]) and now.truth == np.clip(reward / 10, -1, 1) + now.success
        if now.success:
            return True, step + 1
    return False, MAX_STEPS


if __name__ == "__main__":
    main(tyro.cli(Options))
