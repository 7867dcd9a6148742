"""PPO's half that sees episodes: generalised advantages from a critic, and a KL coefficient that follows the KL.

Axes: N episodes, T decisions.
"""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
from jaxtyping import Bool, Float

from vla_rlaif.credit import count_groups
from vla_rlaif.critic import Critic
from vla_rlaif.ppo import PPO, gae, whitened
from vla_rlaif.rollout import make_batch
from vla_rlaif.types import Credited, Episodes, Weights, under


class CriticCredit:
    """The reward of an episode falls to its last decision. Critic and coefficient learn after the policy has."""

    def __init__(self, algorithm: PPO, critic: Critic) -> None:
        self._algorithm, self._critic = algorithm, critic
        self._kl_coef = algorithm.kl_coef
        self._seen: tuple[np.ndarray, ...] = ()  # features, returns and values of the decisions of the last answer

    def assign(
        self, episodes: Episodes, reward: Float[np.ndarray, " N"], *, step: int, window: int, is_stale: bool
    ) -> Credited:
        del step
        scored = np.isfinite(reward) & episodes.mask.any(axis=1)
        mask = episodes.mask & scored[:, None]
        features = self._critic.features(episodes)
        value = np.where(mask, self._critic.values(features), 0.0)
        given = at_the_end(reward, mask)
        advantage = gae(given, value, mask, gamma=self._algorithm.gamma, lam=self._algorithm.lam)
        self._seen = features[mask], (advantage + value)[mask], value[mask]
        worth = whitened(advantage, mask)
        batch = make_batch(episodes, worth, float(mask.sum()), window=window, is_stale=is_stale)
        mean = worth.sum(axis=1) / np.maximum(mask.sum(axis=1), 1)
        metrics = count_groups(episodes.starts.group, reward, (worth != 0).any(axis=1))
        return Credited(batch=replace(batch, kl_coef=self._kl_coef), advantage=mean, metrics=metrics)

    def learned(self, metrics: Mapping[str, float], step: int) -> Mapping[str, float]:
        used = {"kl_coef": self._kl_coef}
        if "reference_kl" in metrics:
            self._kl_coef = self._algorithm.adapted(self._kl_coef, metrics["reference_kl"])
        features, returns, value = self._seen
        return {**used, **self._critic.fit(features, returns, value, seed=step)}

    def state(self) -> Weights:
        return {"kl_coef": np.array(self._kl_coef), **{f"critic/{k}": v for k, v in self._critic.state().items()}}

    def restore(self, state: Weights) -> None:
        self._kl_coef = float(state["kl_coef"])
        self._critic.restore(under("critic/", state))


def at_the_end(reward: Float[np.ndarray, " N"], mask: Bool[np.ndarray, "N T"]) -> Float[np.ndarray, "N T"]:
    """The reward of each episode at its last decision of ``mask``; nothing where it has none."""
    given = np.zeros(mask.shape)
    rows = np.flatnonzero(mask.any(axis=1))
    last = mask.shape[1] - 1 - mask[rows, ::-1].argmax(axis=1)
    given[rows, last] = reward[rows]
    return given
