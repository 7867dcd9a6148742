"""Rows that see the same, as the members of a group do before their first action, share what is computed of it.

Axes: N rows, U distinct ones.
"""

from collections.abc import Mapping

import numpy as np
from jaxtyping import Int


def distinct_rows(inputs: Mapping[str, np.ndarray]) -> tuple[Int[np.ndarray, " U"], Int[np.ndarray, " N"]]:
    """(first row of each distinct one, which of those each row equals): compared byte by byte over all inputs."""
    num = len(inputs["state"])
    flat = [np.ascontiguousarray(value).reshape(num, -1).view(np.uint8) for value in inputs.values()]
    seen: dict[bytes, int] = {}
    inverse = np.array([seen.setdefault(b"".join(v[i].tobytes() for v in flat), len(seen)) for i in range(num)])
    _, rows = np.unique(inverse, return_index=True)
    return rows, inverse
