"""What a payload of weights holds, byte by byte: agreed on by both ends before anything is sent.

A payload is one run of bytes: the arrays in the order of their names, each beginning at a multiple of 64 bytes. The
order is that of the names and not of a module's or a set's, which may differ between processes.
"""

import hashlib
import json
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Literal

import numpy as np
from jaxtyping import UInt8, UInt64

from vla_rlaif.types import Weights

Wire = Literal["float32", "bfloat16"]
Bytes = UInt8[np.ndarray, " bytes"]
Sums = UInt64[np.ndarray, " rows"]
Layout = Mapping[str, tuple[str, tuple[int, ...]]]  # dtype and shape by name

ALIGN = 64  # bytes
BLOCK = 1 << 18  # bytes under one checksum
ROW = 1 << 15  # bytes under one sum
SHOWN = 3  # names in a message


class ManifestError(ValueError):
    """The two ends do not have the same weights: another model, another config or another version of the code."""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One array."""

    name: str
    dtype: str  # as numpy names it
    wire: str  # the same, or bfloat16
    shape: tuple[int, ...]
    offset: int  # bytes from the start of the payload
    num_bytes: int  # on the wire


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """A payload, described. ``base`` names the frozen weights that belong to it; of those, it is their own name."""

    serial: int  # of the publication: the newest and the averaged weights of one version differ in it
    version: int
    base: str
    is_base: bool  # the frozen weights, which are sent once; else those that are trained
    entries: tuple[Entry, ...]
    num_bytes: int
    checksums: tuple[int, ...]  # of every BLOCK of bytes

    @cached_property
    def digest(self) -> str:
        """Equal if and only if all of it is equal."""
        return hashlib.sha256(json.dumps(asdict(self)).encode()).hexdigest()

    @cached_property
    def form(self) -> str:
        """Equal for payloads that differ in their numbers only: what an end must know to take part in a broadcast."""
        parts = [self.base, self.is_base, [asdict(entry) for entry in self.entries]]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()

    @property
    def layout(self) -> Layout:
        return {entry.name: (entry.dtype, entry.shape) for entry in self.entries}


def layout_of(weights: Weights) -> Layout:
    return {name: (value.dtype.name, value.shape) for name, value in weights.items()}


def lay_out(layout: Layout, *, wire: Wire) -> tuple[tuple[Entry, ...], int]:
    """Where each array lies in a payload, and how many bytes that is. ``wire`` is for what is float32."""
    entries, offset = [], 0
    for name in sorted(layout):
        dtype, shape = layout[name]
        sent = wire if dtype == "float32" else dtype
        num_bytes = int(np.prod(shape, dtype=np.int64)) * item_bytes(sent)
        entries.append(Entry(name=name, dtype=dtype, wire=sent, shape=shape, offset=offset, num_bytes=num_bytes))
        offset += -(-num_bytes // ALIGN) * ALIGN
    return tuple(entries), offset


def item_bytes(wire: str) -> int:
    return 2 if wire == "bfloat16" else np.dtype(wire).itemsize


def check_manifest(manifest: Manifest, *, held: Manifest | None, expected: Layout | None) -> None:
    """``held`` are the frozen weights that the receiver has, ``expected`` is all that its policy consists of.

    Raises:
        ManifestError: the payload is not for this receiver, or contradicts itself.
    """
    if (manifest.entries, manifest.num_bytes) != _again(manifest):
        raise ManifestError(
            "The manifest's offsets are not those of its names and shapes: run the same code everywhere."
        )
    if len(manifest.checksums) != -(-manifest.num_bytes // BLOCK):
        raise ManifestError(
            f"The manifest has {len(manifest.checksums)} checksums for {manifest.num_bytes} bytes; "
            "run the same code everywhere."
        )
    has = "" if held is None else held.base
    if not manifest.is_base and manifest.base != has:
        raise ManifestError(
            f"These weights complete the frozen weights {manifest.base[:8] or '(none)'}; the receiver has "
            f"{has[:8] or 'none'}. Send it the frozen ones first."
        )
    if expected is None:
        return
    got = {**(held.layout if held is not None and not manifest.is_base else {}), **manifest.layout}
    missing = [] if manifest.is_base else sorted(expected.keys() - got.keys())
    if missing:
        raise ManifestError(
            f"The payload lacks {len(missing)} of the {len(expected)} arrays of the receiver's policy: "
            f"{missing[:SHOWN]}. Both ends must have the same policy section."
        )
    unknown = sorted(got.keys() - expected.keys())
    if unknown:
        raise ManifestError(
            f"The payload has {len(unknown)} arrays that the receiver's policy lacks: {unknown[:SHOWN]}. "
            "Both ends must have the same policy section."
        )
    for name in sorted(got):
        if got[name] != expected[name]:
            raise ManifestError(
                f"{name!r} is {_text(*got[name])} in the payload, but {_text(*expected[name])} in the receiver's "
                "policy. Both ends must have the same policy section."
            )


def sum_rows(memory: Bytes, out: Sums) -> None:
    """The sum of each ROW of ``memory``, which consists of whole ones, modulo 2^64."""
    memory.view(np.uint64).reshape(-1, ROW // 8).sum(axis=1, out=out)


def checksums_of(rows: Sums, rest: Bytes) -> tuple[int, ...]:
    """Of every BLOCK: the CRC of the sums of its rows and of what fills none, begun with the number of its words.
    ``rest`` follows the rows; its length is a multiple of ALIGN.

    They notice whatever changes, is missing, repeated or exchanged, but for 8-byte words that change places in one row,
    which no transport does.
    """
    each, row_words = BLOCK // ROW, ROW // 8
    whole, nothing = len(rows) // each * each, np.uint64(0).tobytes()
    sums = [zlib.crc32(nothing, zlib.crc32(of, BLOCK // 8)) for of in rows[:whole].reshape(-1, each)]
    if len(rows) > whole or len(rest):
        num_words = (len(rows) - whole) * row_words + len(rest) // 8
        end = rest.view(np.uint64).sum().tobytes()
        sums.append(zlib.crc32(end, zlib.crc32(rows[whole:].tobytes(), num_words)))
    return tuple(sums)


def _again(manifest: Manifest) -> tuple[tuple[Entry, ...], int]:
    is_rounded = any(entry.wire != entry.dtype for entry in manifest.entries)
    return lay_out(manifest.layout, wire="bfloat16" if is_rounded else "float32")


def _text(dtype: str, shape: tuple[int, ...]) -> str:
    return f"{dtype} {shape}"
