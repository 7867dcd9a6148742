"""A reward of one's own; a config names it as ``function: "configs.example_reward:disc_below_the_gripper"``."""

import numpy as np
from jaxtyping import Float

from vla_rlaif.types import Episodes

ROWS, COLUMNS = (0.2, 0.5), (0.3, 0.7)  # shares of the wrist picture: the place between the fingers


def disc_below_the_gripper(episodes: Episodes) -> Float[np.ndarray, " N"]:
    """How much of the place between the fingers is bright green at the end, in [0, 1]: of pixels only."""
    last = episodes.images["wrist"][:, -1]
    height, width = last.shape[1:3]
    rows = slice(int(ROWS[0] * height), int(ROWS[1] * height))
    columns = slice(int(COLUMNS[0] * width), int(COLUMNS[1] * width))
    red, green, blue = np.moveaxis(last[:, rows, columns], -1, 0)
    return np.mean((green > 180) & (red < 100) & (blue < 100), axis=(1, 2))
