"""Transitions of envs side by side as one, and of members that have none. N members, L of them chosen."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from jaxtyping import Bool, Int

from vla_rlaif.types import EnvSpec, Observation, Transition

_FIELDS = ("done", "truncated", "success", "truth", "executed", "valid")


def joined(parts: Sequence[Transition]) -> Transition:
    """What envs side by side have answered, as of one env."""
    cat = lambda name: np.concatenate([getattr(p, name) for p in parts])  # noqa: E731
    return Transition(
        obs=Observation(
            images={c: np.concatenate([p.obs.images[c] for p in parts]) for c in parts[0].obs.images},
            state=np.concatenate([p.obs.state for p in parts]),
            instruction=tuple(sentence for p in parts for sentence in p.obs.instruction),
        ),
        **{k: cat(k) for k in _FIELDS},
    )


def untouched(spec: EnvSpec, num: int) -> Transition:
    """Of members that were never reset: done and invalid."""
    shape = (num, spec.image_size, spec.image_size, 3)
    off = np.zeros(num, bool)
    return Transition(
        obs=Observation(
            images={camera: np.zeros(shape, np.uint8) for camera in spec.cameras},
            state=np.zeros((num, spec.state_dim), np.float32),
            instruction=(spec.instructions[0],) * num,
        ),
        done=~off,
        truncated=off,
        success=off,
        truth=np.zeros(num),
        executed=np.zeros(num, int),
        valid=off,
    )


def lost(part: Transition, rows: Bool[np.ndarray, " N"]) -> Transition:
    """``rows`` lose their episode: done and invalid. What they show stays."""
    return replace(
        part,
        done=part.done | rows,
        valid=part.valid & ~rows,
        success=part.success & ~rows,
        truncated=part.truncated & ~rows,
        truth=np.where(rows, 0.0, part.truth),
        executed=np.where(rows, 0, part.executed),
    )


def merged(old: Transition, new: Transition, rows: Int[np.ndarray, " L"]) -> Transition:
    """``old`` with some members of ``new``."""

    def taken(before: np.ndarray, after: np.ndarray) -> np.ndarray:
        whole = before.copy()
        whole[rows] = after[rows]
        return whole

    chosen = set(rows.tolist())
    sentences = zip(old.obs.instruction, new.obs.instruction, strict=True)
    return Transition(
        obs=Observation(
            images={c: taken(image, new.obs.images[c]) for c, image in old.obs.images.items()},
            state=taken(old.obs.state, new.obs.state),
            instruction=tuple(b if i in chosen else a for i, (a, b) in enumerate(sentences)),
        ),
        **{name: taken(getattr(old, name), getattr(new, name)) for name in _FIELDS},
    )
