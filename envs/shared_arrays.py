"""What an env worker and its driver share: arrays in one anonymous file, mapped by both.

N members, K workers, C cameras, P proprioception dims, L the longest episode in env steps, A action dims. Numpy and the
standard library only (see single.py).
"""

from __future__ import annotations

import mmap
import os

import numpy as np

from vla_rlaif.envs.single import SingleSpec

_ALIGN = 64  # bytes: a cache line, so that no two arrays share one


class SharedArrays:
    """A member's row is written by its worker while a request is under way, and by the driver otherwise."""

    def __init__(self, fd: int, spec: SingleSpec, *, num_envs: int, num_workers: int, max_steps: int) -> None:
        """Map the file ``fd``; whoever comes first gives it its size."""
        n, c, size = num_envs, len(spec.cameras), spec.image_size
        shapes: dict[str, tuple[type, tuple[int, ...]]] = {
            "images": (np.uint8, (n, c, size, size, 3)),
            "state": (np.float32, (n, spec.state_dim)),
            "action": (np.float64, (n, max_steps, spec.action_dim)),
            "expert": (np.float32, (n, spec.action_dim)),
            "truth": (np.float64, (n,)),
            "executed": (np.int64, (n,)),
            "done": (np.bool_, (n,)),
            "truncated": (np.bool_, (n,)),
            "success": (np.bool_, (n,)),
            "valid": (np.bool_, (n,)),
            "beat": (np.int64, (num_workers,)),  # counts env steps, resets and frames: a sign of life
            "busy": (np.int64, (num_workers,)),  # the member that the worker is at
            "physics_s": (np.float64, (num_workers,)),  # wall seconds of this request
            "render_s": (np.float64, (num_workers,)),
        }
        offsets, end = {}, 0
        for name, (dtype, shape) in shapes.items():
            offsets[name] = end
            end += -(-int(np.prod(shape)) * np.dtype(dtype).itemsize // _ALIGN) * _ALIGN
        if os.fstat(fd).st_size < end:
            os.ftruncate(fd, end)
        self._map = mmap.mmap(fd, end)

        def view(name: str) -> np.ndarray:
            dtype, shape = shapes[name]
            return np.frombuffer(self._map, dtype, int(np.prod(shape)), offsets[name]).reshape(shape)

        self.images, self.state, self.action, self.expert = (view(k) for k in ("images", "state", "action", "expert"))
        self.truth, self.executed, self.done = (view(k) for k in ("truth", "executed", "done"))
        self.truncated, self.success, self.valid = (view(k) for k in ("truncated", "success", "valid"))
        self.beat, self.busy = view("beat"), view("busy")
        self.physics_s, self.render_s = view("physics_s"), view("render_s")
