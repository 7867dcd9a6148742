"""Arrays into a payload and out of it, with checksums on the way; bfloat16 where the wire is. NumPy only."""

import os
from bisect import bisect_right
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from jaxtyping import Float32, UInt16

from vla_rlaif.dist.manifest import BLOCK, ROW, Bytes, Entry, Manifest, Sums, checksums_of, sum_rows
from vla_rlaif.types import Weights

# Bytes that are copied, then summed while they are in the cache. With less at a time threads would wait for each other:
# between two calls of NumPy each needs Python's lock.
STRIDE = 4 * BLOCK
PARTS = 4  # for each thread
FEW = 32  # blocks for each thread: to start it takes as long as to sum some of them


def num_threads() -> int:
    """For copying and summing: more than four gain nothing, as memory is the limit."""
    return min(4, len(os.sched_getaffinity(0)))


def pack(weights: Weights, entries: Sequence[Entry], memory: Bytes, *, threads: int) -> tuple[int, ...]:
    """Write the payload into ``memory``; its checksums. Gaps between arrays become zero."""
    sources = [_flat(weights[entry.name], entry) for entry in entries]
    offsets = [entry.offset for entry in entries]
    rows = np.empty(len(memory) // ROW, np.uint64)

    def fill(start: int, stop: int) -> None:
        at = summed = start
        for i in range(bisect_right(offsets, start) - 1, len(entries)):
            entry = entries[i]
            if entry.offset >= stop:
                break
            first, last = max(start, entry.offset), min(stop, entry.offset + entry.num_bytes)
            if last <= first:
                continue
            memory[at:first] = 0
            _copy(sources[i], entry, memory[first:last], first - entry.offset)
            at = last
            inner, end = -(-first // ROW) * ROW, last // ROW * ROW
            if entry.wire == entry.dtype and inner < end:
                # Rows of one array are summed where they were read: what was written may have passed by the cache.
                _sum(memory[summed:inner], rows, summed)
                _sum(sources[i][inner - entry.offset : end - entry.offset], rows, inner)
                summed = end
        memory[at:stop] = 0
        _sum(memory[summed:stop], rows, summed)

    def fill_part(part: slice) -> None:
        for start in range(part.start, part.stop, STRIDE):
            fill(start, min(start + STRIDE, part.stop))

    _in_parts(fill_part, len(memory), threads=threads)
    return checksums_of(rows, memory[len(rows) * ROW :])


def checksums(memory: Bytes, *, threads: int) -> tuple[int, ...]:
    rows = np.empty(len(memory) // ROW, np.uint64)
    _in_parts(lambda part: _sum(memory[part], rows, part.start), len(memory), threads=threads)
    return checksums_of(rows, memory[len(rows) * ROW :])


def _sum(memory: Bytes, rows: Sums, start: int) -> None:
    """The whole rows of ``memory``, which begins at byte ``start`` of what has all the ``rows``."""
    if num := len(memory) // ROW:
        first = start // ROW
        sum_rows(memory[: num * ROW], rows[first : first + num])


def _in_parts(work: Callable[[slice], None], num_bytes: int, *, threads: int) -> None:
    """``work`` on parts of whole blocks. NumPy lets threads run side by side; there are more parts than threads, so
    that one that is held up leaves its rest to the others."""
    num_blocks = -(-num_bytes // BLOCK)
    if threads == 1 or num_blocks < FEW * threads:
        work(slice(0, num_bytes))
        return
    size = -(-num_blocks // (PARTS * threads)) * BLOCK
    parts = [slice(start, min(start + size, num_bytes)) for start in range(0, num_bytes, size)]
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(work, parts))


def unpack(manifest: Manifest, memory: Bytes, room: Callable[[int], Bytes]) -> dict[str, np.ndarray]:
    """The arrays by name: views of ``memory``, or of room for what the wire has rounded, widened again."""
    rounded = [entry for entry in manifest.entries if entry.wire != entry.dtype]
    wide = room(sum(2 * entry.num_bytes for entry in rounded)) if rounded else memory[:0]
    weights, at = {}, 0
    for entry in manifest.entries:
        sent = memory[entry.offset : entry.offset + entry.num_bytes]
        if entry.wire == entry.dtype:
            weights[entry.name] = sent.view(entry.dtype).reshape(entry.shape)
            continue
        values = wide[at : at + 2 * entry.num_bytes].view(np.float32)
        widen(sent.view(np.uint16), values)
        weights[entry.name] = values.reshape(entry.shape)
        at += 2 * entry.num_bytes
    return weights


def to_bfloat16(values: Float32[np.ndarray, " n"]) -> UInt16[np.ndarray, " n"]:
    """The bits of the nearest bfloat16, ties to even: a relative error of at most 2^-8 (2^-9 on average or less)."""
    bits = values.view(np.uint32)
    rounded = (bits + (np.uint32(0x7FFF) + ((bits >> 16) & 1))) >> 16
    quiet = (bits >> 16) | np.uint32(0x40)  # rounding could make infinity of what is not a number
    return np.where(np.isnan(values), quiet, rounded).astype(np.uint16)


def widen(bits: UInt16[np.ndarray, " n"], out: Float32[np.ndarray, " n"]) -> None:
    """Exact: every bfloat16 is a float32."""
    np.left_shift(bits, 16, out=out.view(np.uint32), dtype=np.uint32, casting="unsafe")


def _flat(value: np.ndarray, entry: Entry) -> np.ndarray:
    """In memory order; bytes, or numbers where they are to be rounded. No copy if the array is contiguous."""
    value = np.asarray(value)
    assert (value.dtype.name, value.shape) == (entry.dtype, entry.shape), f"{entry.name} is not what was laid out"
    flat = np.ascontiguousarray(value).reshape(-1)
    return flat if entry.wire != entry.dtype else flat.view(np.uint8)


def _copy(source: np.ndarray, entry: Entry, out: Bytes, start: int) -> None:
    if entry.wire == entry.dtype:
        out[:] = source[start : start + len(out)]
    else:
        out.view(np.uint16)[:] = to_bfloat16(source[start // 2 : (start + len(out)) // 2])
