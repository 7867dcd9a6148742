"""Off-screen OpenGL contexts for MuJoCo, and named cameras of a model drawn as fast as the driver allows.

Needs numpy and mujoco only (see single.py). C cameras.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Sequence
from typing import Any

import mujoco
import numpy as np

from vla_rlaif.envs.gl_missing import how_to_get_it


def make_context(backend: str, image_size: int) -> Any:
    """A context that is not current yet; it belongs to the thread that makes it current.

    mujoco.GLContext would take the backend from MUJOCO_GL as it was when mujoco was imported, so the module is named.
    """
    loaded = os.environ.get("PYOPENGL_PLATFORM", backend)  # set by whichever of mujoco.egl and mujoco.osmesa came first
    if loaded != backend:
        raise ValueError(
            f"This process has loaded OpenGL for {loaded!r} and cannot use renderer {backend!r} as well. Start a new "
            f"process, with MUJOCO_GL and PYOPENGL_PLATFORM unset. The tabletop has renderer: ray as well."
        )
    # Worker threads inside llvmpipe gain nothing on images this small, and deadlock after a fork.
    os.environ.setdefault("LP_NUM_THREADS", "0")
    try:
        context = importlib.import_module(f"mujoco.{backend}").GLContext(image_size, image_size)
    except (ImportError, AttributeError, OSError, RuntimeError) as error:  # PyOpenGL reports a missing library as any
        raise ValueError(how_to_get_it(backend, error)) from error
    return context


def make_fast(model: mujoco.MjModel, image_size: int) -> None:
    """Set what makes software rendering slow to the least that still shows the scene; before a context is made of it.

    No multisampling and fewer slices: a pixel differs by 2 of 255 on average. Shadows are switched off in ``Cameras``.
    """
    quality, screen = model.vis.quality, model.vis.global_
    quality.offsamples, quality.shadowsize = 0, 1024
    quality.numslices = quality.numstacks = 12
    quality.numquads = 1
    screen.offwidth = screen.offheight = image_size


class Cameras:
    """Draws fixed cameras of one model, for any MjData of a model with the same meshes and textures."""

    def __init__(
        self,
        model: mujoco.MjModel,
        cameras: Sequence[str],
        image_size: int,
        *,
        backend: str,
        fast: bool,
        hidden_groups: Sequence[int] = (),
    ) -> None:
        """With ``fast`` there are no shadows and no reflections. ``hidden_groups`` of geoms are not drawn."""
        self._gl = make_context(backend, image_size)
        self._gl.make_current()
        self._context = mujoco.MjrContext(model, mujoco.mjtFontScale.mjFONTSCALE_50)
        self._scene = mujoco.MjvScene(model, maxgeom=model.ngeom + 200)
        if fast:
            self._scene.flags[mujoco.mjtRndFlag.mjRND_SHADOW] = 0
            self._scene.flags[mujoco.mjtRndFlag.mjRND_REFLECTION] = 0
        self._option = mujoco.MjvOption()
        self._option.geomgroup[list(hidden_groups)] = 0
        self._cameras = [_fixed_camera(model.camera(name).id) for name in cameras]
        self._rect = mujoco.MjrRect(0, 0, image_size, image_size)
        self._pixels = np.empty((image_size, image_size, 3), np.uint8)

    def draw(self, model: mujoco.MjModel, data: mujoco.MjData, images: np.ndarray) -> None:
        """Into "C height width 3". The derived fields of ``data`` must be current."""
        self._gl.make_current()
        mujoco.mjr_setBuffer(mujoco.mjtFramebuffer.mjFB_OFFSCREEN, self._context)
        for image, camera in zip(images, self._cameras, strict=True):
            mujoco.mjv_updateScene(model, data, self._option, None, camera, mujoco.mjtCatBit.mjCAT_ALL, self._scene)
            mujoco.mjr_render(self._rect, self._scene, self._context)
            mujoco.mjr_readPixels(self._pixels, None, self._rect, self._context)
            image[:] = self._pixels[::-1]  # OpenGL counts rows from the bottom


def _fixed_camera(camera_id: int) -> mujoco.MjvCamera:
    camera = mujoco.MjvCamera()
    camera.type = mujoco.mjtCamera.mjCAMERA_FIXED
    camera.fixedcamid = camera_id
    return camera
