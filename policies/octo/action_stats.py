"""Normalisation as official checkpoints mean it: ``dataset_statistics.json`` of octo-models/octo.

Axes: A dims of the statistics, D dims of a head's output.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from array_api_compat import array_namespace
from jaxtyping import Bool, Float

from vla_rlaif.types import Array

EPS = 1e-8  # upstream's; on the way in only


@dataclass(frozen=True, kw_only=True)
class ActionStatistics:
    """Of actions; proprioception is normalised the same way. One object serves training and evaluation.

    Dims that ``mask`` leaves out (e.g. a gripper that is 0 or 1) are raw values both ways. Works on NumPy, JAX and
    torch arrays. ``dataset`` says whose units these are: actions of another robot or camera set-up mean nothing.
    """

    mean: Float[np.ndarray, " A"]
    std: Float[np.ndarray, " A"]
    p01: Float[np.ndarray, " A"] | None = None
    p99: Float[np.ndarray, " A"] | None = None
    mask: Bool[np.ndarray, " A"]
    kind: Literal["normal", "bounds"] = "normal"  # to mean 0 and std 1, or percentiles 1 and 99 to -1 and 1
    dataset: str | None = None

    def __post_init__(self) -> None:
        if self.kind == "bounds" and (self.p01 is None or self.p99 is None):
            raise ValueError("the statistics have no p01 and p99, which kind bounds needs.")
        bad = np.flatnonzero(self.mask & ~(self._scale() > 0))
        if bad.size:
            what = "std" if self.kind == "normal" else "p99 - p01"
            raise ValueError(
                f"{what} is not positive in dims {bad.tolist()}: they never move. Set mask to false there, or give them"
                " a scale by hand."
            )

    @classmethod
    def from_official(
        cls, values: Mapping[str, Any], *, kind: Literal["normal", "bounds"] = "normal", dataset: str | None = None
    ) -> "ActionStatistics":
        """From the ``action`` or ``proprio`` entry of one dataset; without a mask every dim is normalised.

        Raises:
            ValueError: a missing entry, numbers that are not one for each dim, or a dim that never moves.
        """
        missing = sorted({"mean", "std"} - values.keys())
        if missing:
            raise ValueError(f"the statistics have {', '.join(sorted(values)) or 'nothing'}; {missing[0]} is missing.")
        arrays = {k: np.asarray(values[k], np.float32) for k in ("mean", "std", "p01", "p99") if k in values}
        mask = np.asarray(values.get("mask", np.ones(arrays["mean"].shape, bool)), bool)
        shapes = {name: array.shape for name, array in [*arrays.items(), ("mask", mask)]}
        if mask.ndim != 1 or len(set(shapes.values())) > 1:
            raise ValueError(f"statistics of shapes {shapes}; wanted one number for each dim in all of them.")
        return cls(**arrays, mask=mask, kind=kind, dataset=dataset)

    def normalise(self, x: Float[Array, "*b A"]) -> Float[Array, "*b A"]:
        """To what a head predicts. Bounds clip to [-1, 1]."""
        if x.shape[-1] != len(self.mean):
            raise ValueError(f"got {x.shape[-1]} dims, the statistics have {len(self.mean)}.")
        xp = array_namespace(x)
        if self.kind == "normal":
            y = (x - xp.asarray(self.mean)) / xp.asarray(self.std + np.float32(EPS))
        else:
            y = 2 * (x - xp.asarray(self.p01)) / xp.asarray(self._scale() + np.float32(EPS)) - 1
            y = xp.clip(y, -1, 1)
        return xp.where(xp.asarray(self.mask), y, x)

    def unnormalise(self, x: Float[Array, "*b D"]) -> Float[Array, "*b A"]:
        """To the units of the dataset. A head may have more dims than the robot: the last are dropped."""
        if x.shape[-1] < len(self.mean):
            raise ValueError(f"the head has {x.shape[-1]} dims, the statistics have {len(self.mean)}.")
        xp, x = array_namespace(x), x[..., : len(self.mean)]
        if self.kind == "normal":
            y = x * xp.asarray(self.std) + xp.asarray(self.mean)
        else:
            y = (x + 1) * xp.asarray(self._scale() / 2) + xp.asarray(self.p01)
        return xp.where(xp.asarray(self.mask), y, x)

    def shift_and_scale(self) -> tuple[Float[np.ndarray, " A"], Float[np.ndarray, " A"]]:
        """(b, a) of ``unnormalise(x) = a x + b``; 0 and 1 in dims that the mask leaves out."""
        if self.kind == "normal":
            shift, scale = self.mean, self.std
        else:
            assert self.p01 is not None
            shift, scale = self.p01 + self._scale() / 2, self._scale() / 2
        return np.where(self.mask, shift, 0).astype(np.float32), np.where(self.mask, scale, 1).astype(np.float32)

    def _scale(self) -> Float[np.ndarray, " A"]:
        """Units of the dataset that one normalised unit (bounds: two) stands for."""
        if self.kind == "normal":
            return self.std
        assert self.p01 is not None and self.p99 is not None
        return self.p99 - self.p01
