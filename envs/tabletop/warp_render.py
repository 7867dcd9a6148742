"""Rendering on a GPU: MuJoCo Warp's batch renderer, a ray a pixel, all members at once.

Same call as ``GLRenderer``, same MJCF. Needs the extra `warp`; without a GPU it runs on the CPU, slowly, which is for
tests. The physics stays MuJoCo's own: states come from the host, images go back there. Axes as in render.py.
"""

from collections.abc import Sequence
from typing import Any

import mujoco
import numpy as np
from jaxtyping import Float, Int, UInt8

from vla_rlaif.envs.randomization import HEADLIGHT
from vla_rlaif.envs.tabletop.variation import ALIKE, Looks

_STATE = mujoco.mjtState.mjSTATE_INTEGRATION


def import_warp() -> Any:
    """The package mujoco_warp.

    Raises ValueError if it is not installed.
    """
    try:
        import mujoco_warp  # pyright: ignore[reportMissingImports] (an extra)
        import warp  # pyright: ignore[reportMissingImports]
    except ModuleNotFoundError as error:
        raise ValueError(
            f"renderer warp needs the package {error.name}: pip install 'vla_rlaif[warp]'. Renderers egl, osmesa and "
            "ray work without it."
        ) from error
    warp.config.log_level = warp.LOG_WARNING  # else it tells of every kernel that it loads
    return mujoco_warp


class WarpRenderer:
    """Holds a world for each member. A call draws all of them, also where few are asked for."""

    def __init__(
        self, model: mujoco.MjModel, *, cameras: Sequence[str], image_size: int, num_envs: int, looks: Looks = ALIKE
    ) -> None:
        """Raises ValueError if the packages are missing, or lighting varies: Warp has one headlight for all worlds."""
        mjw = import_warp()
        if HEADLIGHT in looks:
            raise ValueError("renderer warp has one headlight for all members; set env.randomize.lighting to 0.")
        self._mjw, self._looks, self._num_envs = mjw, looks, num_envs
        self._model = mjw.put_model(model, batch_sizes=dict.fromkeys(looks, num_envs))
        self._data = mjw.make_data(model, nworld=num_envs)
        self._context = mjw.create_render_context(
            model,
            nworld=num_envs,
            cam_res=(image_size, image_size),
            render_rgb=True,
            render_depth=False,
            render_seg=False,
            cam_active=list(cameras),
            render_skybox=True,
            use_fast_math=False,
            enable_specular=False,  # OpenGL lights the corners of the table only, and shows no highlight on it
        )
        self._shape = (len(cameras), image_size, image_size)
        host = mujoco.MjData(model)
        # Where the parts that pose the scene lie in a state vector: set one that counts, and read them.
        mujoco.mj_setState(model, host, np.arange(float(mujoco.mj_stateSize(model, _STATE))), _STATE)
        self._columns = {name: getattr(host, name).astype(int) for name in ("qpos", "mocap_pos", "mocap_quat")}

    def __call__(
        self,
        states: Float[np.ndarray, "N S"],
        images: UInt8[np.ndarray, "N C height width 3"],
        ids: Int[np.ndarray, " L"],
    ) -> None:
        mjw, model, data = self._mjw, self._model, self._data
        for name, columns in self._columns.items():
            getattr(data, name).assign(states[:, columns].astype(np.float32))
        for name, values in self._looks.items():
            getattr(model, name).assign(values.astype(np.float32))
        mjw.kinematics(model, data)
        mjw.com_pos(model, data)
        mjw.camlight(model, data)
        mjw.refit_bvh(model, data, self._context)
        mjw.render(model, data, self._context)
        packed = self._context.rgb_data.numpy()  # 0xAARRGGBB, the cameras one after the other
        drawn = packed.view(np.uint8).reshape(self._num_envs, *self._shape, 4)[ids, ..., 2::-1]
        images[ids] = drawn

    def close(self) -> None:
        """Nothing to free: device memory goes with the last reference."""
