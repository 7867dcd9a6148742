"""OpenGL rendering on a pool of threads.

N members, L of them drawn in a call, C cameras, S the length of a state vector. Images are uint8, rows from the top.

Hazard: a process forked after its parent has rendered hangs in the driver. Start workers with spawn or forkserver.
"""

import atexit
import weakref
from collections import deque
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import mujoco
import numpy as np
from jaxtyping import Float, Int, UInt8

from vla_rlaif.envs.tabletop.gl_canvas import CanvasThread, GLCanvas
from vla_rlaif.envs.tabletop.variation import ALIKE, Looks

RENDERERS = ("egl", "osmesa", "ray", "warp")


@runtime_checkable
class Renderer(Protocol):
    def __call__(
        self,
        states: Float[np.ndarray, "N S"],
        images: UInt8[np.ndarray, "N C height width 3"],
        ids: Int[np.ndarray, " L"],
    ) -> None:
        """Draw the members ``ids`` from their states into ``images``, in place; other rows are left alone."""
        ...

    def close(self) -> None: ...


def check(renderer: str) -> None:
    """Raise a ValueError that says what to install if ``renderer`` cannot draw on this machine.

    A process can load one of egl and osmesa only, so whoever compares them checks each in a process of its own.
    """
    if renderer not in RENDERERS:
        raise ValueError(f"Unknown renderer {renderer!r}; choose one of {', '.join(RENDERERS)}.")
    if renderer == "warp":
        from vla_rlaif.envs.tabletop.warp_render import import_warp

        import_warp()
    elif renderer != "ray":
        model = mujoco.MjModel.from_xml_string('<mujoco><worldbody><camera name="eye"/></worldbody></mujoco>')
        GLRenderer(model, cameras=("eye",), image_size=16, backend=renderer, num_threads=1).close()


class GLRenderer:
    """Draws with MuJoCo's rasteriser. Rendering releases the interpreter lock, so two threads use two cores."""

    def __init__(
        self,
        model: mujoco.MjModel,
        *,
        cameras: Sequence[str],
        image_size: int,
        backend: str,
        num_threads: int,
        looks: Looks = ALIKE,
    ) -> None:
        self._threads: list[CanvasThread] = []
        # Dropping the last reference closes too: the finalizer holds the threads, not this object.
        self._close = weakref.finalize(self, _stop, self._threads)
        for _ in range(num_threads):
            thread = CanvasThread(lambda: GLCanvas(model, cameras, image_size, backend, looks))
            thread.ready.result()  # before the next one starts: setting a driver up is not thread-safe
            self._threads.append(thread)
        # mujoco.egl shuts the display down in an exit handler of its own. Handlers run last in, first out, so this one
        # frees the contexts before that.
        atexit.register(self._close)

    def __call__(
        self,
        states: Float[np.ndarray, "N S"],
        images: UInt8[np.ndarray, "N C height width 3"],
        ids: Int[np.ndarray, " L"],
    ) -> None:
        todo = deque(ids.tolist())  # shared, so that a slow frame on one thread does not hold up the others

        def draw_remaining(canvas: GLCanvas) -> None:
            while todo:
                try:
                    i = todo.popleft()
                except IndexError:  # another thread was faster
                    return
                canvas.draw(states[i], images[i], i)

        for call in [thread.submit(draw_remaining) for thread in self._threads]:
            call.result()

    def close(self) -> None:
        """Free the contexts, each on its own thread. A second call does nothing."""
        self._close()
        atexit.unregister(self._close)


def _stop(threads: list[CanvasThread]) -> None:
    for thread in threads:
        thread.stop()
