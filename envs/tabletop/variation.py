"""The members' models where they differ: domain randomisation by start seed, shared by the members of a group.

N members. What is seen (lights, colours, cameras) is kept here and read by the renderers; what is felt (masses,
frictions) lives in the batch of the physics. Without any strength there is neither, and no cost.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import mujoco
import numpy as np
from jaxtyping import Int

from vla_rlaif.envs.randomization import HEADLIGHT, ModelDraws
from vla_rlaif.envs.tabletop.physics import Physics

_SEEN = ("light_diffuse", HEADLIGHT, "geom_rgba", "mat_rgba", "cam_pos", "cam_quat")
Looks = Mapping[str, np.ndarray]  # those of the seen fields that vary, by name: live arrays "N ..."
ALIKE: Looks = MappingProxyType({})  # all members look as the model does


class Variation:
    def __init__(self, model: mujoco.MjModel, strength: Mapping[str, float], physics: Physics) -> None:
        """``strength`` as in randomization.py."""
        self._draws, self._physics = ModelDraws(model, strength), physics
        names, num = self._draws.names, physics.num_envs
        self.seeds: Int[np.ndarray, " N"] = np.zeros(num, int)
        self.looks: Looks = {k: np.repeat(self._draws.nominal[k][None], num, axis=0) for k in names if k in _SEEN}
        self._fields = {k: self.looks[k] if k in _SEEN else physics.model_field(k) for k in names}

    def apply(self, members: Int[np.ndarray, " L"], seeds: Sequence[int]) -> None:
        """Give each of ``members`` the model of its start seed. Derived fields follow with the next ``refresh``."""
        self.seeds[members] = seeds
        if not self._fields:
            return
        for seed in dict.fromkeys(seeds):  # one draw a group
            rows = members[np.asarray(seeds) == seed]
            for name, value in self._draws(seed).items():
                self._fields[name][rows] = value
        if "body_mass" in self._fields:
            self._physics.derive_constants(members)

    def digest(self, member: int) -> bytes:
        """What the member's model has of its own."""
        return b"".join(rows[member].tobytes() for rows in self._fields.values())
