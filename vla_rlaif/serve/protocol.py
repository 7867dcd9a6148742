"""The wire format of openpi clients: msgpack in which an array is a map. Nothing is unpickled, everything is bounded.

    array   {b"__ndarray__": true, b"data": bytes, b"dtype": "<f4", b"shape": [height, width, 3]}
    scalar  {b"__npgeneric__": true, b"data": number, b"dtype": "<f4"}

Source: openpi-client 0.1.2, openpi_client/msgpack_numpy.py (https://github.com/Physical-Intelligence/openpi).
"""

import math
from collections.abc import Mapping
from typing import Any

import msgpack
import numpy as np

MAX_CONTAINERS = 256  # maps, lists and arrays in one message: an empty map is 1 byte on the wire and 64 in memory
MAX_ITEMS = 64  # of one map or list
MAX_TEXT = 4096  # bytes of one string
MAX_DEPTH = 4  # maps within maps
MAX_DIMS = 8

DTYPES = {
    np.dtype(code).str: np.dtype(code) for code in ("?", *"bBhHiIqQ", *"efd")
}  # little-endian numbers, no objects


def encode(message: Mapping[str, Any]) -> bytes:
    packed = msgpack.packb(message, default=_pack)
    assert isinstance(packed, bytes)
    return packed


def decode(data: bytes, *, max_items: int = MAX_ITEMS) -> dict[str, Any]:
    """The values of a message by '/'-joined key; arrays are read-only. ValueError if it is malformed."""
    counter = _Containers()
    try:
        message = msgpack.unpackb(
            data,
            object_hook=counter.map,
            list_hook=counter.list,
            max_map_len=max_items,
            max_array_len=max_items,
            max_str_len=MAX_TEXT,
            max_ext_len=0,
        )
    except (ValueError, msgpack.UnpackException) as error:
        raise ValueError(
            f"the message is not msgpack as openpi clients send it: {str(error) or type(error).__name__}"
        ) from None
    if not isinstance(message, dict):
        raise ValueError(f"the message is a {type(message).__name__}, wanted a map of observations.")
    flat: dict[str, Any] = {}
    _flatten(message, "", flat, MAX_DEPTH)
    return flat


class _Containers:
    """Builds what msgpack has read; counts, so that a small message cannot become a large object."""

    def __init__(self) -> None:
        self._num = 0

    def list(self, items: list[Any]) -> list[Any]:
        self._count()
        return items

    def map(self, items: dict[Any, Any]) -> Any:
        self._count()
        if b"__ndarray__" in items:
            return _array(items)
        if b"__npgeneric__" in items:
            if not isinstance(number := items.get(b"data"), bool | int | float):
                raise ValueError(f"a NumPy scalar holds a {type(number).__name__}, wanted a number")
            return number
        return items

    def _count(self) -> None:
        self._num += 1
        if self._num > MAX_CONTAINERS:
            raise ValueError(f"more than {MAX_CONTAINERS} maps, lists and arrays in one message")


def _array(items: dict[Any, Any]) -> np.ndarray:
    name, shape, data = (items.get(key) for key in (b"dtype", b"shape", b"data"))
    if not isinstance(name, str) or name not in DTYPES:
        raise ValueError(f"an array of dtype {name!r}; allowed are {' '.join(DTYPES)}")
    if not isinstance(shape, list) or len(shape) > MAX_DIMS or any(type(n) is not int or n < 0 for n in shape):
        raise ValueError(f"an array of shape {shape!r}; wanted at most {MAX_DIMS} sizes")
    wanted = math.prod(shape) * DTYPES[name].itemsize
    if not isinstance(data, bytes) or len(data) != wanted:
        have = f"{len(data)} bytes" if isinstance(data, bytes) else type(data).__name__
        raise ValueError(f"an array of shape {shape} and dtype {name} needs {wanted} bytes, got {have}")
    return np.frombuffer(data, DTYPES[name]).reshape(shape) if data else np.empty(shape, DTYPES[name])


def _flatten(items: Mapping[Any, Any], prefix: str, flat: dict[str, Any], depth: int) -> None:
    if depth == 0:
        raise ValueError(f"maps within maps, more than {MAX_DEPTH} deep.")
    for key, value in items.items():
        if not isinstance(key, str):
            raise ValueError(f"the key {key!r} is not a string.")
        if isinstance(value, dict):
            _flatten(value, f"{prefix}{key}/", flat, depth - 1)
        elif prefix + key in flat:
            raise ValueError(f"the key {prefix + key!r} is there twice.")
        else:
            flat[prefix + key] = value


def _pack(value: object) -> dict[bytes, Any]:
    assert isinstance(value, np.ndarray) and value.dtype.str in DTYPES, f"cannot send a {type(value).__name__}"
    return {b"__ndarray__": True, b"data": value.tobytes(), b"dtype": value.dtype.str, b"shape": value.shape}
