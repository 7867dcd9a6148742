"""Rendering without OpenGL: a ray a pixel through ``mujoco.batch``, shaded with NumPy.

Same call as ``GLRenderer``. The colours approximate OpenGL's: no textures, highlights or transparency. Axes as in
render.py; R = rays of all cameras of one member, C * height * width.
"""

from collections.abc import Sequence

import mujoco
import numpy as np
from jaxtyping import Float, Int, UInt8
from mujoco import batch

from vla_rlaif.envs.randomization import HEADLIGHT, field
from vla_rlaif.envs.tabletop.variation import ALIKE, Looks

_SHADING = ("light_diffuse", HEADLIGHT, "geom_rgba", "mat_rgba")
_BLOCK = 8  # members traced together: bounds the memory, 25 MB at 128 pixels


class RayRenderer:
    def __init__(
        self, model: mujoco.MjModel, *, cameras: Sequence[str], image_size: int, num_threads: int, looks: Looks = ALIKE
    ) -> None:
        self._batch, self._looks = batch.Batch(model, _BLOCK, num_threads), looks
        self._poses = {name: self._batch.expand(name) for name in ("cam_pos", "cam_quat") if name in looks}
        self._camera_pos, self._camera_mat = self._batch.bind("cam_xpos"), self._batch.bind("cam_xmat")
        self._cameras = [model.camera(name).id for name in cameras]
        self._rays = [_pixel_rays(float(model.cam_fovy[camera]), image_size) for camera in self._cameras]
        self._material = model.geom_matid.copy()
        self._texture = np.array([_mean_texture(model, geom) for geom in range(model.ngeom)])
        self._nominal = {name: field(model, name)[None].copy() for name in _SHADING}
        self._ambient = model.vis.headlight.ambient.mean()
        self._to_sun = -model.light_dir[0] / np.linalg.norm(model.light_dir[0])

    def __call__(
        self,
        states: Float[np.ndarray, "N S"],
        images: UInt8[np.ndarray, "N C height width 3"],
        ids: Int[np.ndarray, " L"],
    ) -> None:
        for start in range(0, len(ids), _BLOCK):
            block = ids[start : start + _BLOCK]
            images[block] = self._trace(block, states[block]).reshape(len(block), *images.shape[1:])

    def close(self) -> None:
        """Nothing to free: the pool of threads goes with the last reference."""

    def _trace(self, members: Int[np.ndarray, " L"], states: Float[np.ndarray, "L S"]) -> UInt8[np.ndarray, "L R 3"]:
        rows = np.arange(len(states))
        self._batch.state[rows] = states
        for name, poses in self._poses.items():
            poses[rows] = self._looks[name][members]
        self._batch.forward(rows, stage=mujoco.mjtStage.mjSTAGE_POS)
        origins, directions, to_headlight = [], [], []
        for camera, rays in zip(self._cameras, self._rays, strict=True):
            rotation = self._camera_mat[rows, camera].reshape(-1, 3, 3)
            directions.append(rays @ rotation.transpose(0, 2, 1))
            origins.append(np.broadcast_to(self._camera_pos[rows, camera][:, None], directions[-1].shape))
            to_headlight.append(np.broadcast_to(rotation[:, None, :, 2], directions[-1].shape))
        direction = np.concatenate(directions, axis=1)
        _, geom, normal = self._batch.ray(np.concatenate(origins, axis=1), direction, ids=rows, normal=True)
        headlight = (normal * np.concatenate(to_headlight, axis=1)).sum(axis=-1)
        return self._shade(members, geom, normal @ self._to_sun, headlight, direction)

    def _shade(
        self,
        members: Int[np.ndarray, " L"],
        geom: Int[np.ndarray, "L R"],  # -1: the sky
        sun: Float[np.ndarray, "L R"],  # cosines between the surface and the lights
        headlight: Float[np.ndarray, "L R"],  # a directional light along the camera's axis, as in MuJoCo
        direction: Float[np.ndarray, "L R 3"],
    ) -> UInt8[np.ndarray, "L R 3"]:
        look = {name: self._looks[name][members] if name in self._looks else self._nominal[name] for name in _SHADING}
        head, lamp = look[HEADLIGHT].mean(axis=1)[:, None], look["light_diffuse"][:, 0].mean(axis=1)[:, None]
        light = self._ambient + head * np.clip(headlight, 0, 1) + lamp * np.clip(sun, 0, 1)
        colors = self._colors(look["geom_rgba"], look["mat_rgba"])
        colors = colors[0][geom] if len(colors) == 1 else colors[np.arange(len(geom))[:, None], geom]
        color = colors * light[..., None].astype(np.float32)
        color = np.where((geom < 0)[..., None], _sky(direction), color)
        return (np.clip(color, 0, 1) * 255).astype(np.uint8)

    def _colors(
        self, geom_rgba: Float[np.ndarray, "K G 4"], mat_rgba: Float[np.ndarray, "K M 4"]
    ) -> Float[np.ndarray, "K G 3"]:
        """Of each geom: its own, or its material's times the mean of the texture. K is L, or 1 where all agree."""
        plain = (self._material < 0)[None, :, None]
        textured = mat_rgba[:, self._material, :3] * self._texture / 255
        return np.where(plain, geom_rgba[..., :3], textured).astype(np.float32)


def _pixel_rays(fovy: float, size: int) -> Float[np.ndarray, "rays 3"]:
    """Unit directions through the pixel centres, row by row from the top, in the camera's frame (it looks along -z)."""
    edge = np.tan(np.deg2rad(fovy) / 2)
    centres = (2 * (np.arange(size) + 0.5) / size - 1) * edge
    y, x = np.meshgrid(-centres, centres, indexing="ij")
    rays = np.stack([x, y, -np.ones_like(x)], axis=-1).reshape(-1, 3)
    return rays / np.linalg.norm(rays, axis=-1, keepdims=True)


def _mean_texture(model: mujoco.MjModel, geom: int) -> Float[np.ndarray, " 3"]:
    """Of 255. A texture without a material cannot be."""
    material = model.geom_matid[geom]
    if material < 0:
        return np.zeros(3)
    texture = model.mat_texid[material, mujoco.mjtTextureRole.mjTEXROLE_RGB]
    start = model.tex_adr[texture]
    size = model.tex_height[texture] * model.tex_width[texture] * model.tex_nchannel[texture]
    return model.tex_data[start : start + size].reshape(-1, model.tex_nchannel[texture])[:, :3].mean(axis=0)


def _sky(direction: Float[np.ndarray, "L R 3"]) -> Float[np.ndarray, "L R 3"]:
    """The scene's gradient sky box: lighter above."""
    above, below = np.array([0.75, 0.82, 0.9], np.float32), np.array([0.4, 0.45, 0.55], np.float32)
    share = (direction[..., 2:].astype(np.float32) + 1) / 2
    return share * above + (1 - share) * below
