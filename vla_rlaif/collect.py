"""Demonstrations by the scripted expert of an env.

Axes: E demonstrations, L recorded env steps, N members played together.
"""

from typing import Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float

from vla_rlaif.dataset import Demonstrations
from vla_rlaif.interfaces import VectorEnv
from vla_rlaif.rollout import Split, dealt, start_seed
from vla_rlaif.warm_start_config import CollectConfig


@runtime_checkable
class ExpertEnv(Protocol):
    """A VectorEnv that knows how to solve its task."""

    def expert(self) -> Float[np.ndarray, "N A"]:
        """The expert's next action in every member's present state."""
        ...


def collect_demonstrations(env: VectorEnv, config: CollectConfig, seed: int) -> Demonstrations:
    """Play the expert under execution noise from scattered starts; recorded actions have only the demonstrator's error.

    The env must last ``config.scatter_steps + config.max_steps`` steps; it is stepped one action at a time.
    """
    if not isinstance(env, ExpertEnv):
        raise ValueError(
            f"{type(env).__name__} has no expert(); demonstrations need one. Start from a checkpoint instead."
        )
    rounds = -(-config.episodes // env.num_envs)
    parts = [_play(env, config, seed, r) for r in range(rounds)]
    cat = lambda name: np.concatenate([getattr(p, name) for p in parts])[: config.episodes]  # noqa: E731
    return Demonstrations(
        images={k: np.concatenate([p.images[k] for p in parts])[: config.episodes] for k in parts[0].images},
        instruction=tuple(s for p in parts for s in p.instruction)[: config.episodes],
        is_end_seen=True,
        **{k: cat(k) for k in ("state", "action", "mask", "success")},
    )


def _play(env: VectorEnv, config: CollectConfig, seed: int, part: int) -> Demonstrations:
    assert isinstance(env, ExpertEnv)
    rng = np.random.default_rng((seed, part))
    num, dims = env.num_envs, env.spec.action_dim
    moves = min(3, dims)  # dims of an action that move something
    now = env.reset(np.array([_start(env, seed, part * num + i) for i in range(num)]))
    # A straight random walk of random length first, so that demonstrations also start away from home.
    drift, length = rng.uniform(-1, 1, (num, dims)), rng.integers(0, config.scatter_steps + 1, num)
    drift[:, 3:6] *= 0.2  # small turns, where an action has them
    for step in range(config.scatter_steps):
        now = env.step(_chunk(np.where((step < length)[:, None], drift, 0.0)))
    obs, actions, live = [], [], []
    for _ in range(config.max_steps):
        action = env.expert() + config.label_noise * rng.normal(size=(num, dims))
        action = np.clip(action, -1, 1).astype(np.float32)
        obs.append(now.obs)
        actions.append(action)
        live.append(~now.done)
        executed = action.copy()
        executed[:, :moves] += config.noise * rng.normal(size=(num, moves))
        now = env.step(_chunk(executed))
    return Demonstrations(
        images={k: np.stack([o.images[k] for o in obs], axis=1) for k in obs[0].images},
        state=np.stack([o.state for o in obs], axis=1),
        instruction=obs[0].instruction,
        action=np.stack(actions, axis=1),
        mask=np.stack(live, axis=1),
        success=now.success,
        is_end_seen=True,  # a member that is done shows its last frame until all are
    )


def _start(env: VectorEnv, seed: int, number: int) -> int:
    """Of every task as many demonstrations as of any other."""
    return dealt(start_seed(Split.DEMONSTRATION, seed, number), number, env.spec.num_tasks, env.spec.num_starts)


def _chunk(action: np.ndarray) -> np.ndarray:
    return np.clip(action, -1, 1).astype(np.float32)[:, None]
