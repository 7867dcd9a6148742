"""Actions as bins and back, the way OpenVLA does it; proprioception as bins, the way pi0-FAST does it.

Bin b of 256 is token number b + 1 of the action tokens. Upstream (openvla: prismatic/vla/action_tokenizer.py) has 256
edges and so 255 intervals; only an action on the last edge itself gets bin 255, which reads as bin 254.
Axes: see types.py; K = 256 edges.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from jaxtyping import Float, Int

NUM_BINS = 256
_STATE_EDGES = np.linspace(-1, 1, NUM_BINS + 1)[1:-1]


@dataclass(frozen=True, kw_only=True)
class Bins:
    """What the bins of each dim span, in env units. Edges are in scaled units, [-1, 1] from low to high."""

    action_low: Float[np.ndarray, " A"]
    action_high: Float[np.ndarray, " A"]
    edges: Float[np.ndarray, "A K"]
    state_low: Float[np.ndarray, " P"]
    state_high: Float[np.ndarray, " P"]

    def __post_init__(self) -> None:
        for name in ("action", "state"):
            low, high = vars(self)[f"{name}_low"], vars(self)[f"{name}_high"]
            if bad := np.flatnonzero(~(high > low)).tolist():
                raise ValueError(
                    f"{name} dims {bad} have no range ({low[bad].tolist()} to {high[bad].tolist()}): they never move "
                    "in the data. Use policy.action_scale env, or statistics with a mask for them."
                )
        if not (np.diff(self.edges) >= 0).all():
            raise ValueError("the edges of the action bins do not rise.")

    @classmethod
    def of_env(cls, action_dim: int, state_dim: int) -> "Bins":
        """Uniform bins over [-1, 1], the bounds of every env's actions; proprioception too is taken to lie there."""
        return cls(
            action_low=-np.ones(action_dim),
            action_high=np.ones(action_dim),
            edges=uniform_edges(action_dim),
            state_low=-np.ones(state_dim),
            state_high=np.ones(state_dim),
        )

    @classmethod
    def measured(
        cls,
        action: Float[np.ndarray, "n A"],
        state: Float[np.ndarray, "m P"],
        *,
        scale: Literal["env", "q99"],
        bins: Literal["uniform", "quantile"],
    ) -> "Bins":
        """Of demonstrations. A dim of the state that never moves is given a range of its own around its value."""
        dims = action.shape[1]
        low, high = -np.ones(dims), np.ones(dims)
        if scale == "q99":
            low, high = np.quantile(action.astype(np.float64), [0.01, 0.99], axis=0)
        edges = uniform_edges(dims)
        if bins == "quantile":
            scaled = np.clip(_scale(action.astype(np.float64), low, high), -1, 1)
            edges = np.quantile(scaled, np.linspace(0, 1, NUM_BINS), axis=0).T
        state_low, state_high = np.quantile(state.astype(np.float64), [0.01, 0.99], axis=0)
        still = state_high - state_low < 1e-6
        return cls(
            action_low=low,
            action_high=high,
            edges=edges,
            state_low=np.where(still, state_low - 1, state_low),
            state_high=np.where(still, state_high + 1, state_high),
        )

    @classmethod
    def from_official(cls, statistics: Mapping[str, Any], action_dim: int, state_dim: int) -> "Bins":
        """One dataset's entry of OpenVLA's ``norm_stats``; dims that its mask leaves out are already in [-1, 1].

        Raises:
            ValueError: q01 or q99 is missing, or has not one number a dim.
        """
        low, high = _official(statistics, "action", action_dim)
        state = _official(statistics, "proprio", state_dim) if "proprio" in statistics else None
        state_low, state_high = state or (-np.ones(state_dim), np.ones(state_dim))
        edges = np.asarray(statistics["action"].get("edges", uniform_edges(action_dim)))
        return cls(action_low=low, action_high=high, edges=edges, state_low=state_low, state_high=state_high)

    @classmethod
    def from_lists(cls, lists: Mapping[str, Any]) -> "Bins":
        return cls(**{name: np.asarray(values, np.float64) for name, values in lists.items()})

    def to_lists(self) -> dict[str, Any]:
        return {name: values.tolist() for name, values in vars(self).items()}

    def to_official(self) -> dict[str, Any]:
        """As OpenVLA stores them, for one dataset; edges that are not uniform are an entry of our own."""
        entry = lambda low, high: {"q01": low.tolist(), "q99": high.tolist(), "mask": [True] * len(low)}  # noqa: E731
        action, state = entry(self.action_low, self.action_high), entry(self.state_low, self.state_high)
        if not np.array_equal(self.edges, uniform_edges(len(self.edges))):
            action["edges"] = self.edges.tolist()
        return {"action": action, "proprio": state}

    def encode(self, action: Float[np.ndarray, "*b H A"]) -> Int[np.ndarray, "*b S"]:
        """Bins in [0, 255] of a chunk in env units, step by step and dim by dim (S = H * A)."""
        scaled = np.clip(_scale(action.astype(np.float64), self.action_low, self.action_high), -1, 1)
        columns = [np.digitize(scaled[..., a], edges) for a, edges in enumerate(self.edges)]
        # Quantile edges need not span [-1, 1]: below the first is bin 0, as on it.
        bins = np.maximum(np.stack(columns, axis=-1) - 1, 0)
        return bins.reshape(*action.shape[:-2], -1)

    def decode(self, bins: Int[np.ndarray, "*b S"]) -> Float[np.ndarray, "*b H A"]:
        """The middle of each bin, env units, within the env's [-1, 1]."""
        dims = len(self.action_low)
        by_step = bins.reshape(*bins.shape[:-1], -1, dims)
        centres = (self.edges[:, :-1] + self.edges[:, 1:]) / 2
        scaled = centres[np.arange(dims), np.minimum(by_step, NUM_BINS - 2)]
        action = 0.5 * (scaled + 1) * (self.action_high - self.action_low) + self.action_low
        return np.clip(action, -1, 1).astype(np.float32)

    def encode_state(self, state: Float[np.ndarray, "N P"]) -> Int[np.ndarray, "N P"]:
        """Bins in [0, 255] of equal width; what lies outside the range is in the first or the last."""
        return np.digitize(_scale(state.astype(np.float64), self.state_low, self.state_high), _STATE_EDGES)


def action_names() -> list[str]:
    """Of the tokens of the bins, where they have names of their own."""
    return [f"<action_{b}>" for b in range(NUM_BINS)]


def uniform_edges(action_dim: int) -> Float[np.ndarray, "A K"]:
    return np.tile(np.linspace(-1, 1, NUM_BINS), (action_dim, 1))


def _scale(value: np.ndarray, low: np.ndarray, high: np.ndarray) -> np.ndarray:
    return 2 * (value - low) / (high - low + 1e-8) - 1  # the 1e-8 is upstream's


def _official(statistics: Mapping[str, Any], part: str, dims: int) -> tuple[np.ndarray, np.ndarray]:
    entry = statistics.get(part, {})
    for name in ("q01", "q99"):
        if len(entry.get(name, ())) != dims:
            have = f"{len(entry[name])} numbers" if name in entry else "no entry"
            raise ValueError(f"the statistics have {have} for {part}.{name}; wanted {dims}, one a dim of the env.")
    used = np.asarray(entry.get("mask", [True] * dims), bool)
    return np.where(used, entry["q01"], -1.0), np.where(used, entry["q99"], 1.0)
