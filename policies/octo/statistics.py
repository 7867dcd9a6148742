"""Normalisation of actions and proprioception, as measured on demonstrations.

Axes: A action dims, P proprioception dims.
"""

from dataclasses import dataclass

import jax
import numpy as np
from jaxtyping import Float

from vla_rlaif.policies.octo.action_stats import ActionStatistics


@dataclass(frozen=True, kw_only=True)
class Statistics:
    """Means and stds in env units. A dim that never moves needs a std chosen by hand: 0 is refused."""

    action_mean: Float[np.ndarray, " A"]
    action_std: Float[np.ndarray, " A"]
    state_mean: Float[np.ndarray, " P"]
    state_std: Float[np.ndarray, " P"]

    def __post_init__(self) -> None:
        for name in ("action_std", "state_std"):
            bad = np.flatnonzero(~(vars(self)[name] > 0))
            if bad.size:
                raise ValueError(f"{name} must be positive, but is not in dims {bad.tolist()}: give them a floor.")

    @classmethod
    def identity(cls, action_dim: int, state_dim: int) -> "Statistics":
        zeros, ones = np.zeros, np.ones
        return cls(
            action_mean=zeros(action_dim, np.float32),
            action_std=ones(action_dim, np.float32),
            state_mean=zeros(state_dim, np.float32),
            state_std=ones(state_dim, np.float32),
        )

    @classmethod
    def measured(
        cls, action: Float[np.ndarray, "n A"], state: Float[np.ndarray, "m P"], floor: float = 0.1
    ) -> "Statistics":
        """Of demonstrations; stds below ``floor`` (env units) are raised to it."""
        return cls(
            action_mean=action.mean(0, dtype=np.float64).astype(np.float32),
            action_std=np.maximum(action.std(0, dtype=np.float64), floor).astype(np.float32),
            state_mean=state.mean(0, dtype=np.float64).astype(np.float32),
            state_std=np.maximum(state.std(0, dtype=np.float64), floor).astype(np.float32),
        )

    @classmethod
    def from_official(cls, action: ActionStatistics, state: ActionStatistics) -> "Statistics":
        """Both kinds of normalisation as one shift and scale; dims that a mask leaves out are raw."""
        (action_mean, action_std), (state_mean, state_std) = action.shift_and_scale(), state.shift_and_scale()
        return cls(action_mean=action_mean, action_std=action_std, state_mean=state_mean, state_std=state_std)

    @classmethod
    def from_lists(cls, lists: dict[str, list[float]]) -> "Statistics":
        return cls(**{name: np.asarray(values, np.float32) for name, values in lists.items()})

    def to_lists(self) -> dict[str, list[float]]:
        return {name: values.tolist() for name, values in vars(self).items()}

    def normalise_state(self, state: Float[np.ndarray, "*b P"]) -> Float[np.ndarray, "*b P"]:
        return ((state - self.state_mean) / self.state_std).astype(np.float32)

    def normalise_action(self, action: Float[jax.Array, "*b A"]) -> Float[jax.Array, "*b A"]:
        return (action - self.action_mean) / self.action_std

    def unnormalise_action(self, action: Float[np.ndarray, "*b A"]) -> Float[np.ndarray, "*b A"]:
        """Into the action space of an environment, [-1, 1]."""
        return np.clip(action * self.action_std + self.action_mean, -1.0, 1.0).astype(np.float32)
