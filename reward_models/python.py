"""A user's own reward, named in the config as ``package.module:function``."""

import importlib
from typing import ClassVar

import numpy as np
from jaxtyping import Float

from vla_rlaif.types import Episodes


class PythonReward:
    """Calls ``f(episodes) -> [N] floats`` and checks what comes back. NaN says that an episode cannot be scored.

    The function may read anything of the episodes, the truth too, so it counts as privileged.
    """

    privileged: ClassVar[bool] = True

    def __init__(self, path: str) -> None:
        module_name, colon, function_name = path.partition(":")
        if not (module_name and colon and function_name):
            raise ValueError(f"A Python reward is written 'package.module:function', got {path!r}.")
        try:
            module = importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
                raise  # the user's module was found, but something that it imports was not
            raise ValueError(
                f"The reward {path!r} names the module {error.name!r}, which cannot be found: install its package or "
                "add its folder to PYTHONPATH."
            ) from error
        function = vars(module).get(function_name)
        if not callable(function):
            raise ValueError(f"The module {module_name!r} has no function {function_name!r} to use as a reward.")
        self._path = path
        self._function = function

    @property
    def version(self) -> int:
        return 0

    def score(self, episodes: Episodes) -> Float[np.ndarray, " N"]:
        value = np.asarray(self._function(episodes))
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
