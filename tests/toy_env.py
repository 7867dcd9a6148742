"""A point on a line as a ``SingleEnv``, with every fault that an env worker must survive. Numpy only."""

import json
import os
import sys
import time

import numpy as np

from vla_rlaif.envs.single import Reading, SingleSpec


class Toy:
    """A unit action moves the point 0.1; the goal lies in [0.5, 1] and is reached within 0.05.

    Episodes whose seed is 7 modulo 10 have the ``fault``: "reset" fails their reset, the others strike at env step 2.
    "build" fails the construction, "no GL" draws on a machine without OpenGL. With "modules" the only sentence names
    the packages that this process has loaded.
    """

    teaches = True

    def __init__(self, fault: str = "", size: int = 32) -> None:
        if fault == "build":
            raise RuntimeError("this toy cannot be built")
        if fault == "slow build":
            time.sleep(1000)
        if fault == "no GL":
            hide_opengl()
        if size > 64:
            raise ValueError(f"size {size} is more than 64.")
        loaded = {name.partition(".")[0] for name in sys.modules} - sys.stdlib_module_names
        sentences = (" ".join(sorted(loaded)),) if fault == "modules" else ("go to the goal", "go there")
        self.spec = SingleSpec(("top",), size, 2, 2, sentences)
        self._fault = fault

    def reset(self, seed: int) -> Reading:
        self._seed, self._step = seed, 0
        if self._fault == "reset" and seed % 10 == 7:
            raise RuntimeError("the reset of 7 fails")
        self._x, self._goal = 0.0, np.random.default_rng(seed).uniform(0.5, 1)
        return self._reading()

    def step(self, action: np.ndarray) -> Reading:
        self._step += 1
        self._x += 0.1 * float(action[0])
        if self._seed % 10 == 7 and self._step == 2:
            if self._fault == "raise":
                raise ArithmeticError("the toy is broken")
            if self._fault == "hang":
                time.sleep(1000)
            if self._fault == "spin":
                sum(range(10**14))  # never lets go of the interpreter
            if self._fault == "die":
                os.abort()
            if self._fault == "nan":
                self._x = float("nan")
        return self._reading()

    def render(self, images: np.ndarray) -> None:
        images[:] = 0
        size = self.spec.image_size
        for channel, at in enumerate((self._x, self._goal)):
            images[0, :, int(np.clip((at + 1) / 2 * (size - 1), 0, size - 1)), channel] = 255

    def expert(self) -> np.ndarray:
        return np.array([np.clip((self._goal - self._x) / 0.1, -1, 1), 0], np.float32)

    def fingerprint(self) -> bytes:
        return json.dumps([self._x, self._goal]).encode()

    def snapshot(self) -> bytes:
        return json.dumps([self._seed, self._step, self._x, self._goal]).encode()

    def restore(self, snapshot: bytes) -> Reading:
        self._seed, self._step, self._x, self._goal = json.loads(snapshot)
        return self._reading()

    def close(self) -> None:
        pass

    def _reading(self) -> Reading:
        success = abs(self._x - self._goal) < 0.05
        truth = float(np.clip(self._x / self._goal, -1, 1)) + success
        return Reading(
            state=np.array([self._x, self._goal], np.float32),
            instruction=self.spec.instructions[self._seed % len(self.spec.instructions)],
            success=bool(success),
            ended=False,
            truth=truth,
        )


def hide_opengl() -> None:
    """Ask for a context where PyOpenGL finds no library, as on a machine that has none."""
    import ctypes
    import ctypes.util

    load = ctypes.CDLL.__init__

    def load_other(self, name, *args, **kwargs):
        if name and any(part in str(name) for part in ("GL", "OSMesa")):
            raise OSError(f"{name}: cannot open shared object file")
        load(self, name, *args, **kwargs)

    setattr(ctypes.CDLL, "__init__", load_other)  # noqa: B010
    setattr(ctypes.util, "find_library", lambda name: None)  # noqa: B010
    from vla_rlaif.envs.gl import make_context  # not before: mujoco loads OpenGL as soon as it is imported

    make_context("egl", 16)
