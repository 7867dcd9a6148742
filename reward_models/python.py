"""A user's own reward, named in the config as ``package.module:function``."""

from typing import ClassVar

import numpy as np
from jaxtyping import Float

from vla_rlaif.seen import seen
from vla_rlaif.symbols import load_symbol
from vla_rlaif.types import Episodes


class PythonReward:
    """Calls ``f(episodes) -> [N] floats`` and checks what comes back. NaN says that an episode cannot be scored.

    The function may read anything of the episodes, the truth too, so it counts as privileged; a blind one gets
    ``SeenEpisodes``, which have none of it.
    """

    privileged: ClassVar[bool] = True

    def __init__(self, path: str, *, blind: bool = False) -> None:
        self._path, self._blind = path, blind
        self._function = load_symbol(path)

    @property
    def version(self) -> int:
        return 0

    def score(self, episodes: Episodes) -> Float[np.ndarray, " N"]:
        value = np.asarray(self._function(seen(episodes) if self._blind else episodes))
        num = len(episodes.valid)
        if value.shape != (num,):
            raise ValueError(
                f"The reward {self._path!r} returned shape {value.shape} for {num} episodes: return one number for "
                f"each, shape ({num},)."
            )
        if value.dtype.kind not in "fiub":
            raise ValueError(f"The reward {self._path!r} returned dtype {value.dtype}: return floats.")
        if np.isinf(value.astype(np.float64)).any():
            raise ValueError(f"The reward {self._path!r} returned infinities: return NaN for what cannot be scored.")
        return np.where(episodes.valid, value.astype(np.float32), np.float32(np.nan))
