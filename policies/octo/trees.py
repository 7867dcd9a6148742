"""The two kinds of file that hold arrays in an official Octo folder: msgpack trees as flax writes them, and the array
stores of orbax. Names are '/'-joined in memory and '.'-joined in a store. Nothing in these files can name code.
"""

import mmap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import tensorstore

STORES = {"/.zarray": "zarr", "/zarr.json": "zarr3"}  # the file that describes an array, and tensorstore's name for it
ARRAY, SCALAR = 1, 3  # flax's extension types
DTYPES = {
    np.dtype(kind).name.encode(): np.dtype(kind)  # those that JAX has; names that numpy would parse are not looked up
    for kind in ("?", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8")
}


def read_tree(path: Path) -> dict[str, Any]:
    """A nested dict of read-only arrays and strings. The file is mapped, so that its bytes are held once, as arrays."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            tree = msgpack.unpackb(data, ext_hook=_unpack_array, max_array_len=0, max_bin_len=0)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path} is truncated or damaged ({error}). {again(path)}") from None
    if not isinstance(tree, dict):
        raise ValueError(f"{path} holds a {type(tree).__name__}, wanted a tree of arrays.")
    return tree


def again(path: Path) -> str:
    """What to do about a file that cannot be read."""
    with path.open("rb") as file:
        if file.read(19) == b"version https://git":
            return "It is a git-lfs pointer, not the file itself: run `git lfs pull`, or download with `hf download`."
    return "Download or copy it again."


def _unpack_array(code: int, data: bytes) -> np.ndarray:
    if code not in (ARRAY, SCALAR):
        raise ValueError(f"extension type {code} is no array")
    shape, dtype, values = msgpack.unpackb(data, raw=True)
    if dtype not in DTYPES:
        raise ValueError(f"an array of dtype {dtype!r}, wanted numbers or booleans")
    return np.frombuffer(values, DTYPES[dtype]).reshape(shape)


def flatten(tree: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The leaves of a tree by name, sorted."""
    leaves, left = {}, [("", tree)]
    while left:
        prefix, node = left.pop()
        for key, value in node.items():
            if not isinstance(key, str) or "/" in key or not key:
                raise ValueError(f"{where}: {prefix}{key!r} is no name of an array.")
            if isinstance(value, Mapping):
                left.append((f"{prefix}{key}/", value))
            else:
                leaves[prefix + key] = value
    return dict(sorted(leaves.items()))


def read_stores(folder: Path) -> dict[str, np.ndarray]:
    """Arrays by '.'-joined name. Orbax is not used for this: it wants the devices that saved them, or its metadata."""
    base = f"{folder.resolve()}/"
    is_database = (folder / "manifest.ocdbt").exists()
    files = {"driver": "file", "path": base}
    try:
        keys = tensorstore.KvStore.open({"driver": "ocdbt", "base": files} if is_database else files).result().list()
        found: dict[str, np.ndarray] = {}
        for key in sorted(k.decode() for k in keys.result()):
            for ending, driver in STORES.items():
                if key.endswith(ending):
                    name = key.removesuffix(ending)
                    inside = {"driver": "ocdbt", "base": files, "path": f"{name}/"}
                    store = inside if is_database else {"driver": "file", "path": f"{base}{name}/"}
                    # a missing piece is an error, not zeros
                    spec = {"driver": driver, "kvstore": store, "fill_missing_data_reads": False}
                    found[name] = tensorstore.open(spec, open=True, read=True).result().read().result()
    except ValueError as error:
        raise ValueError(
            f"the array stores in {folder} are damaged or incomplete ({error}). Copy them again."
        ) from None
    for value in found.values():
        value.flags.writeable = False
    return found


def check_arrays(tree: Mapping[str, Any], where: str) -> None:
    """Raises ValueError unless every leaf is an array that a tree's file can hold."""
    for name, value in flatten(tree, where).items():
        if not isinstance(value, np.ndarray) or value.dtype not in DTYPES.values():
            kind = value.dtype if isinstance(value, np.ndarray) else type(value).__name__
            raise ValueError(f"{where}: {name} is {kind}, wanted an array of numbers or booleans.")


def pack_tree(tree: Mapping[str, Any]) -> Iterator[bytes]:
    """The bytes that flax.serialization.msgpack_serialize makes, in pieces of an array at most."""
    yield msgpack.Packer().pack_map_header(len(tree))
    for key, value in tree.items():
        yield _pack(key)
        if isinstance(value, Mapping):
            yield from pack_tree(value)
        else:
            yield _pack(msgpack.ExtType(ARRAY, _pack((value.shape, value.dtype.name, value.tobytes()))))


def _pack(value: Any) -> bytes:
    return msgpack.Packer().pack(value)


def nest(leaves: Mapping[str, Any]) -> dict[str, Any]:
    """The tree of '/'-joined names, its keys sorted."""
    tree: dict[str, Any] = {}
    for name in sorted(leaves, key=lambda n: n.split("/")):
        *path, last = name.split("/")
        node = tree
        for key in path:
            node = node.setdefault(key, {})
            if not isinstance(node, dict):
                raise ValueError(f"{name} lies below another array.")
        node[last] = leaves[name]
    flatten(tree, "names")  # refuses empty ones
    return tree
