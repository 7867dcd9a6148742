"""Small made-up episodes and features for tests of preferences and rewards."""

import numpy as np
from jaxtyping import Bool, Float

from vla_rlaif.preferences.data import PairData
from vla_rlaif.types import EnvSpec, Episodes, Observation, Starts

NUM_DECISIONS = 4
DIM = 8  # features of StateEncoder
SPEC = EnvSpec(
    cameras=("top",),
    image_size=8,
    state_dim=DIM,
    action_dim=2,
    chunk=2,
    max_decisions=NUM_DECISIONS,
    instructions=("reach the red cube", "reach the blue cube"),
)
UTILITY = np.linspace(1.0, -1.0, DIM)  # of the last state: the truth that a reward should recover


class StateEncoder:
    """Proprioception as features: the smallest real encoder."""

    @property
    def dim(self) -> int:
        return DIM

    def encode(self, obs: Observation) -> Float[np.ndarray, "N D"]:
        return obs.state.astype(np.float32)


def make_episodes(
    num: int,
    *,
    group_size: int = 4,
    seed: int = 0,
    valid: Bool[np.ndarray, " N"] | None = None,
    truth: Float[np.ndarray, " N"] | None = None,
    success: Bool[np.ndarray, " N"] | None = None,
    length: np.ndarray | None = None,
) -> Episodes:
    """Random states; by default truth is a linear utility of the last state, and nothing succeeds or breaks."""
    rng = np.random.default_rng(seed)
    frames = NUM_DECISIONS + 1
    length = np.full(num, NUM_DECISIONS) if length is None else length
    step = np.arange(NUM_DECISIONS)
    state = rng.normal(size=(num, frames, DIM))
    images = rng.integers(0, 256, (num, frames, 8, 8, 3), dtype=np.uint8)
    for row in range(num):  # frames after the end repeat the last
        state[row, length[row] :] = state[row, length[row]]
        images[row, length[row] :] = images[row, length[row]]
    group = np.arange(num) // group_size
    return Episodes(
        images={"top": images},
        state=state,
        instruction=tuple(SPEC.instructions[g % 2] for g in group),
        action=np.zeros((num, NUM_DECISIONS, 2, 2)),
        logp=np.zeros((num, NUM_DECISIONS, 1)),
        trace={},
        mask=step < length[:, None],
        executed=np.where(step < length[:, None], 2, 0),
        success=np.zeros(num, bool) if success is None else success,
        truth=state[:, -1] @ UTILITY if truth is None else truth,
        valid=np.ones(num, bool) if valid is None else valid,
        starts=Starts(seed=group, group=group, member=np.arange(num) % group_size),
        version=0,
    )


def make_pair_data(
    num_pairs: int, *, dim: int = DIM, held_out: float = 0.2, seed: int = 0, num_frames: int = 1
) -> PairData:
    """Pairs labelled without errors by a linear utility of the features; the held-out pairs have their own episodes."""
    rng = np.random.default_rng(seed)
    values = rng.normal(size=(2 * num_pairs, num_frames, dim)).astype(np.float32)
    utility = values.sum(axis=1) @ np.linspace(1.0, -1.0, dim)
    pairs = np.arange(2 * num_pairs).reshape(num_pairs, 2)
    return PairData(
        values=values,
        live=np.ones((2 * num_pairs, num_frames), bool),
        pairs=pairs,
        target=(utility[pairs[:, 0]] > utility[pairs[:, 1]]).astype(float),
        held_out=rng.random(num_pairs) < held_out,
    )
