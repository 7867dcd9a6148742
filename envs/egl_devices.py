"""Which EGL device is which GPU. MuJoCo chooses by MUJOCO_EGL_DEVICE_ID, an index into EGL's list, which is neither in
the order of CUDA's nor as long (a software renderer may be in it).

Run as a script, it prints the CUDA index of each EGL device as JSON, null where a device is no NVIDIA GPU. That is done
in a process of its own, without CUDA_VISIBLE_DEVICES, so that indices are those of nvidia-smi and of Ray.
"""

import ctypes
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence

TIMEOUT_S = 60
# https://registry.khronos.org/EGL/extensions/NV/EGL_NV_device_cuda.txt
EGL_CUDA_DEVICE_NV = 0x323A
MAX_DEVICES = 64


def egl_device(gpu: str) -> int | None:
    """The EGL index of a GPU, as CUDA_VISIBLE_DEVICES names it: an index or a UUID. None: EGL does not know it, or this
    machine has no NVIDIA driver (a pretended GPU)."""
    if shutil.which("nvidia-smi") is None:
        return None
    listed = _run([sys.executable, __file__])
    return None if listed is None else index_of(gpu, json.loads(listed), _uuids())


def index_of(gpu: str, cuda_indices: Sequence[int | None], uuids: Sequence[str]) -> int | None:
    """``cuda_indices`` by EGL index, ``uuids`` by CUDA index."""
    if not gpu.isdigit():
        matching = [i for i, uuid in enumerate(uuids) if uuid.startswith(gpu)]
        if len(matching) != 1:
            return None  # a slice of a GPU (MIG), which EGL does not list
        gpu = str(matching[0])
    return cuda_indices.index(int(gpu)) if int(gpu) in cuda_indices else None


def _uuids() -> list[str]:
    listed = _run(["nvidia-smi", "--query-gpu=uuid", "--format=csv,noheader"])
    return [] if listed is None else listed.split()


def _run(command: list[str]) -> str | None:
    """What it prints; None if it fails: a driver without EGL may crash it."""
    environment = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    environment["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, env=environment, check=False)
    return done.stdout if done.returncode == 0 else None


def _cuda_indices() -> list[int | None]:
    egl = ctypes.CDLL("libEGL.so.1")
    egl.eglGetProcAddress.restype = ctypes.c_void_p
    address = egl.eglGetProcAddress(b"eglQueryDevicesEXT"), egl.eglGetProcAddress(b"eglQueryDeviceAttribEXT")
    if None in address:
        return []
    query_devices = ctypes.CFUNCTYPE(
        ctypes.c_uint, ctypes.c_int, ctypes.POINTER(ctypes.c_void_p), ctypes.POINTER(ctypes.c_int)
    )(address[0])
    query_attribute = ctypes.CFUNCTYPE(ctypes.c_uint, ctypes.c_void_p, ctypes.c_int, ctypes.POINTER(ctypes.c_ssize_t))(
        address[1]
    )
    devices, count = (ctypes.c_void_p * MAX_DEVICES)(), ctypes.c_int()
    if not query_devices(MAX_DEVICES, devices, ctypes.byref(count)):
        return []
    found: list[int | None] = []
    for i in range(count.value):
        index = ctypes.c_ssize_t(-1)
        known = query_attribute(devices[i], EGL_CUDA_DEVICE_NV, ctypes.byref(index))
        found.append(index.value if known else None)
    return found


if __name__ == "__main__":
    print(json.dumps(_cuda_indices()))
