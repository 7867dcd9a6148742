"""A user's own labeller, named in the config as ``package.module:function``."""

import numpy as np
from jaxtyping import Float, Int

from vla_rlaif.seen import seen
from vla_rlaif.symbols import load_symbol
from vla_rlaif.types import Episodes


class PythonLabeller:
    """Calls ``f(episodes, pairs) -> [M]``: the probability that the first of each pair is better, NaN for a skip.

    Pairs with an invalid episode are skipped without asking. What comes back is checked by ``labelling.ask``.
    """

    def __init__(self, path: str, *, blind: bool = False) -> None:
        """A blind one is shown ``SeenEpisodes``."""
        self._path, self._blind = path, blind
        self._function = load_symbol(path)

    @property
    def name(self) -> str:
        return f"python/1({self._path})"

    def label(self, episodes: Episodes, pairs: Int[np.ndarray, "M 2"], seed: int) -> Float[np.ndarray, " M"]:
        usable = episodes.valid[pairs].all(axis=1)
        labels = np.full(len(pairs), np.nan)
        value = np.asarray(self._function(seen(episodes) if self._blind else episodes, pairs[usable]))
        if value.shape != (int(usable.sum()),) or value.dtype.kind not in "fiub":
            raise ValueError(
                f"The labeller {self._path!r} returned shape {value.shape} of {value.dtype} for {int(usable.sum())} "
                "pairs: return one probability for each."
            )
        labels[usable] = value
        return labels
