"""Domain randomisation of a MuJoCo model: what is drawn depends on the seed of the start state alone, so members of a
group share it. Numpy and mujoco only (see single.py).

Strengths are half-widths of a uniform range: of a relative change for lighting, texture (a tint of each colour), mass
and friction; for the camera of a shift in metres and of a turn in radians about each axis.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import mujoco
import numpy as np

UNCHANGED: Mapping[str, float] = MappingProxyType({})  # no strength of anything
KINDS = ("lighting", "texture", "camera", "mass", "friction")
HEADLIGHT = "vis.headlight.diffuse"  # the one field that is not an array of MjModel's own
_DEFAULT_RGBA = np.array([0.5, 0.5, 0.5, 1], np.float32)
_STREAM = 0x5EED  # keeps the draws apart from those of the start state
_FIELDS = {
    "lighting": ("light_diffuse", HEADLIGHT),
    "texture": ("geom_rgba", "mat_rgba"),
    "camera": ("cam_pos", "cam_quat"),
    "mass": ("body_mass", "body_inertia"),
    "friction": ("geom_friction",),
}


class ModelDraws:
    """Fields of a model as a seed has them, by name; each draw starts from the model as it was given."""

    def __init__(self, model: mujoco.MjModel, strength: Mapping[str, float]) -> None:
        """Only the fields of the kinds with a strength are drawn.

        Raises ValueError for an unknown kind or a negative strength.
        """
        for kind, value in strength.items():
            if kind not in KINDS or value < 0:
                raise ValueError(
                    f"randomize has {kind}: {value}; kinds are {', '.join(KINDS)}, strengths not negative."
                )
        self._strength = {kind: float(strength.get(kind, 0)) for kind in KINDS}
        self.nominal = {name: field(model, name).copy() for kind in KINDS for name in _FIELDS[kind]}
        # A geom with a material has its colour as long as its own is the default one, and would turn grey without it.
        self._has_materials_color = (model.geom_matid >= 0) & (model.geom_rgba == _DEFAULT_RGBA).all(axis=1)
        self.names = tuple(name for kind in KINDS if self._strength[kind] for name in _FIELDS[kind])

    def __call__(self, seed: int) -> dict[str, np.ndarray]:
        nominal, strength = self.nominal, self._strength
        rng = np.random.default_rng((seed, _STREAM))

        def scaled(name: str, kind: str, *shape: int) -> np.ndarray:
            return nominal[name] * (1 + strength[kind] * rng.uniform(-1, 1, shape))

        def tinted(name: str) -> np.ndarray:
            tint = np.ones_like(nominal[name])
            tint[:, :3] += strength["texture"] * rng.uniform(-1, 1, (len(tint), 3))
            return np.clip(nominal[name] * tint, 0, 1)

        # Every kind draws, whatever its strength: one that is changed does not change the others.
        drawn = {"light_diffuse": np.clip(scaled("light_diffuse", "lighting", len(nominal["light_diffuse"]), 1), 0, 1)}
        drawn[HEADLIGHT] = np.clip(scaled(HEADLIGHT, "lighting"), 0, 1)
        drawn["geom_rgba"], drawn["mat_rgba"] = tinted("geom_rgba"), tinted("mat_rgba")
        drawn["geom_rgba"][self._has_materials_color] = _DEFAULT_RGBA
        drawn["cam_pos"] = nominal["cam_pos"] + strength["camera"] * rng.uniform(-1, 1, nominal["cam_pos"].shape)
        drawn["cam_quat"] = nominal["cam_quat"].copy()
        for quat in drawn["cam_quat"]:
            mujoco.mju_quatIntegrate(quat, strength["camera"] * rng.uniform(-1, 1, 3), 1)
        heavier = 1 + strength["mass"] * rng.uniform(-1, 1, len(nominal["body_mass"]))
        drawn["body_mass"] = nominal["body_mass"] * heavier
        drawn["body_inertia"] = nominal["body_inertia"] * heavier[:, None]
        drawn["geom_friction"] = scaled("geom_friction", "friction", len(nominal["geom_friction"]), 1)
        return {name: drawn[name] for name in self.names}


class ModelRandomizer:
    """Changes one model in place."""

    def __init__(self, model: mujoco.MjModel, strength: Mapping[str, float]) -> None:
        self._model, self._draws = model, ModelDraws(model, strength)
        self._data = mujoco.MjData(model)  # scratch of mj_setConst

    def apply(self, seed: int) -> None:
        for name, value in self._draws(seed).items():
            field(self._model, name)[:] = value
        if "body_mass" in self._draws.names:
            mujoco.mj_setConst(self._model, self._data)  # what the solver derives from masses


def field(model: mujoco.MjModel, name: str) -> np.ndarray:
    """The live array of the model."""
    return model.vis.headlight.diffuse if name == HEADLIGHT else getattr(model, name)
