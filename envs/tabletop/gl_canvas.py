"""An off-screen OpenGL context with all it needs to draw, and the thread that owns it.

A context belongs to one thread: it is made, used and freed there. Axes as in render.py.
"""

import copy
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from queue import SimpleQueue

import mujoco
import numpy as np
from jaxtyping import Float, UInt8

from vla_rlaif.envs.gl import make_context
from vla_rlaif.envs.randomization import field
from vla_rlaif.envs.tabletop.variation import ALIKE, Looks

_STATE = int(mujoco.mjtState.mjSTATE_INTEGRATION)


class GLCanvas:
    """Draws one member at a time."""

    def __init__(
        self, model: mujoco.MjModel, cameras: Sequence[str], image_size: int, backend: str, looks: Looks = ALIKE
    ) -> None:
        self._gl = make_context(backend, image_size)
        self._gl.make_current()
        self._context = mujoco.MjrContext(model, mujoco.mjtFontScale.mjFONTSCALE_50)
        mujoco.mjr_setBuffer(mujoco.mjtFramebuffer.mjFB_OFFSCREEN, self._context)
        self._looks = looks
        self._model = copy.copy(model) if looks else model  # threads draw different members at the same time
        self._data = mujoco.MjData(model)
        self._scene = mujoco.MjvScene(model, maxgeom=model.ngeom + 50)
        self._option = mujoco.MjvOption()
        self._cameras = [_fixed_camera(model.camera(name).id) for name in cameras]
        self._rect = mujoco.MjrRect(0, 0, image_size, image_size)
        self._pixels = np.empty((image_size, image_size, 3), np.uint8)

    def draw(
        self, state: Float[np.ndarray, " S"], images: UInt8[np.ndarray, "C height width 3"], member: int = 0
    ) -> None:
        """``member`` says whose looks it has."""
        for name, values in self._looks.items():
            field(self._model, name)[:] = values[member]
        mujoco.mj_setState(self._model, self._data, state, _STATE)
        mujoco.mj_kinematics(self._model, self._data)
        mujoco.mj_camlight(self._model, self._data)
        for image, camera in zip(images, self._cameras, strict=True):
            mujoco.mjv_updateScene(
                self._model, self._data, self._option, None, camera, mujoco.mjtCatBit.mjCAT_ALL, self._scene
            )
            mujoco.mjr_render(self._rect, self._scene, self._context)
            mujoco.mjr_readPixels(self._pixels, None, self._rect, self._context)
            image[:] = self._pixels[::-1]  # OpenGL counts rows from the bottom

    def free(self) -> None:
        self._context.free()
        self._gl.free()


class CanvasThread:
    """Makes a canvas on a new thread, then runs calls on it in order. ``ready`` raises what making it raised."""

    def __init__(self, make_canvas: Callable[[], GLCanvas]) -> None:
        self.ready: Future[None] = Future()
        self._calls: SimpleQueue[tuple[Callable[[GLCanvas], None], Future[None]] | None] = SimpleQueue()
        # daemon: the interpreter joins other threads before it runs exit handlers, and an exit handler stops this one.
        self._thread = threading.Thread(target=self._serve, args=(make_canvas,), name="canvas", daemon=True)
        self._thread.start()

    def submit(self, call: Callable[[GLCanvas], None]) -> "Future[None]":
        future: Future[None] = Future()
        self._calls.put((call, future))
        return future

    def stop(self) -> None:
        self._calls.put(None)
        self._thread.join()

    def _serve(self, make_canvas: Callable[[], GLCanvas]) -> None:
        try:
            canvas = make_canvas()
        except Exception as error:  # handed to whoever waits for ``ready``
            self.ready.set_exception(error)
            return
        self.ready.set_result(None)
        while (item := self._calls.get()) is not None:
            call, future = item
            try:
                call(canvas)
            except Exception as error:  # handed to whoever waits for the call
                future.set_exception(error)
            else:
                future.set_result(None)
        canvas.free()


def _fixed_camera(camera_id: int) -> mujoco.MjvCamera:
    camera = mujoco.MjvCamera()
    camera.type = mujoco.mjtCamera.mjCAMERA_FIXED
    camera.fixedcamid = camera_id
    return camera
