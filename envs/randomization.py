"""Domain randomisation of a MuJoCo model: what is drawn depends on the seed of the start state alone, so members of a
group share it. Numpy and mujoco only (see single.py).

Strengths are half-widths of a uniform range: of a relative change for lighting, texture (a tint of each colour), mass
and friction; for the camera of a shift in metres and of a turn in radians about each axis.
"""

from __future__ import annotations

from collections.abc import Mapping

import mujoco
import numpy as np

KINDS = ("lighting", "texture", "camera", "mass", "friction")
_STREAM = 0x5EED  # keeps the draws apart from those of the start state


class ModelRandomizer:
    """Changes one model in place; every call starts from the model as it was given."""

    def __init__(self, model: mujoco.MjModel, strength: Mapping[str, float]) -> None:
        self._model, self._strength = model, {kind: float(strength.get(kind, 0)) for kind in KINDS}
        self._data = mujoco.MjData(model)  # scratch of mj_setConst
        self._nominal = {
            "light_diffuse": model.light_diffuse.copy(),
            "geom_rgba": model.geom_rgba.copy(),
            "mat_rgba": model.mat_rgba.copy(),
            "cam_pos": model.cam_pos.copy(),
            "cam_quat": model.cam_quat.copy(),
            "body_mass": model.body_mass.copy(),
            "body_inertia": model.body_inertia.copy(),
            "geom_friction": model.geom_friction.copy(),
        }
        self._headlight = model.vis.headlight.diffuse.copy()

    def apply(self, seed: int) -> None:
        model, nominal, strength = self._model, self._nominal, self._strength
        rng = np.random.default_rng((seed, _STREAM))

        def factor(kind: str, *shape: int) -> np.ndarray:
            return np.asarray(1 + strength[kind] * rng.uniform(-1, 1, shape))

        brightness = factor("lighting", model.nlight, 1)
        model.light_diffuse[:] = np.clip(nominal["light_diffuse"] * brightness, 0, 1)
        model.vis.headlight.diffuse[:] = np.clip(self._headlight * factor("lighting"), 0, 1)
        model.geom_rgba[:, :3] = np.clip(nominal["geom_rgba"][:, :3] * factor("texture", model.ngeom, 3), 0, 1)
        model.mat_rgba[:, :3] = np.clip(nominal["mat_rgba"][:, :3] * factor("texture", model.nmat, 3), 0, 1)
        model.cam_pos[:] = nominal["cam_pos"] + strength["camera"] * rng.uniform(-1, 1, (model.ncam, 3))
        for quat, before in zip(model.cam_quat, nominal["cam_quat"], strict=True):
            quat[:] = before
            mujoco.mju_quatIntegrate(quat, strength["camera"] * rng.uniform(-1, 1, 3), 1)
        heavier = factor("mass", model.nbody)
        model.body_mass[:] = nominal["body_mass"] * heavier
        model.body_inertia[:] = nominal["body_inertia"] * heavier[:, None]
        model.geom_friction[:] = nominal["geom_friction"] * factor("friction", model.ngeom, 1)
        if strength["mass"]:
            mujoco.mj_setConst(model, self._data)  # what the solver derives from masses
