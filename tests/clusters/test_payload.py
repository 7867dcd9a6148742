"""Payloads and their manifests: layout, checksums, rounding, and what is refused."""

import zlib
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest

from vla_rlaif.dist.manifest import (
    ALIGN,
    BLOCK,
    ROW,
    Manifest,
    ManifestError,
    Wire,
    check_manifest,
    lay_out,
    layout_of,
)
from vla_rlaif.dist.payload import checksums, pack, to_bfloat16, unpack, widen

WEIGHTS = {
    "b/kernel": np.arange(600_000, dtype=np.float32).reshape(600, 1000),
    "a/bias": np.arange(5, dtype=np.float32),
    "a/empty": np.zeros((0, 4), np.float32),
    "c/steps": np.asarray(np.int64(9)),
    "c/mask": np.array([True, False, True]),
    "d/half": np.arange(7, dtype=np.float16),
}


def checksum(block) -> int:
    """Of one block, by its definition."""
    words = block.view(np.uint64)
    whole = len(block) // ROW
    rows = [int(np.sum(words[i * ROW // 8 : (i + 1) * ROW // 8])) for i in range(whole)]
    sums = [*rows, int(np.sum(words[whole * ROW // 8 :]))]
    return zlib.crc32(b"".join(value.to_bytes(8, "little") for value in sums), len(words))


def packed(weights, wire: Wire = "float32", **changes):
    entries, num_bytes = lay_out(layout_of(weights), wire=wire)
    memory = np.full(num_bytes, 255, np.uint8)  # so that a gap that is not cleared would show
    sums = pack(weights, entries, memory, threads=1)
    fields = {"serial": 1, "version": 3, "base": "", "is_base": False}
    manifest = Manifest(**fields, entries=entries, num_bytes=num_bytes, checksums=sums)
    return replace(manifest, **changes), memory


def test_a_payload_brings_every_array_back():
    manifest, memory = packed(WEIGHTS)
    assert [entry.name for entry in manifest.entries] == sorted(WEIGHTS)
    assert all(entry.offset % ALIGN == 0 for entry in manifest.entries)
    # 600,000 floats, and six small arrays of a slot each but for the empty one
    assert manifest.num_bytes == 2_400_000 + 4 * 64
    assert checksums(memory, threads=1) == manifest.checksums
    arrays = unpack(manifest, memory, lambda num_bytes: pytest.fail("nothing is widened"))
    for name, value in WEIGHTS.items():
        np.testing.assert_array_equal(arrays[name], value)
        assert arrays[name].dtype == value.dtype and arrays[name].shape == value.shape
        assert value.size == 0 or np.shares_memory(arrays[name], memory)


@pytest.mark.parametrize("extra", [0, 1, 100_000])
def test_several_threads_do_what_one_does(extra):
    """26 MB: 100 blocks, more than a thread is started for, and a last one that is not whole."""
    weights = {"a": np.arange(6_500_000 + extra, dtype=np.float32), "b": np.arange(77, dtype=np.float32)}
    manifest, memory = packed(weights)
    again = np.empty_like(memory)
    assert pack(weights, manifest.entries, again, threads=3) == manifest.checksums
    np.testing.assert_array_equal(again, memory)
    assert checksums(memory, threads=3) == manifest.checksums
    blocks = [memory[start : start + BLOCK] for start in range(0, len(memory), BLOCK)]
    assert tuple(checksum(block) for block in blocks) == manifest.checksums


@pytest.mark.parametrize("wire", ["float32", "bfloat16"])
@pytest.mark.parametrize("seed", range(12))
def test_the_sums_are_of_what_was_written(seed, wire):
    """Blocks within one array are summed where they were read; those with an end of one, where they were written."""
    rng = np.random.default_rng(seed)
    kinds = (np.float32, np.uint8, np.float64)
    sizes = [int(rng.choice([0, 1, 63, BLOCK, int(rng.integers(3 * BLOCK))])) for _ in range(8)]
    weights = {f"{i}": rng.integers(0, 255, size).astype(kinds[i % 3]) for i, size in enumerate(sizes)}
    manifest, memory = packed(weights, wire)
    blocks = [memory[start : start + BLOCK] for start in range(0, len(memory), BLOCK)]
    assert tuple(checksum(block) for block in blocks) == manifest.checksums
    arrays = unpack(manifest, memory, lambda num_bytes: np.empty(num_bytes, np.uint8))
    for name, value in weights.items():  # numbers below 256 are not rounded
        np.testing.assert_array_equal(arrays[name], value)


def test_the_order_of_the_dict_does_not_matter():
    backwards = dict(reversed(WEIGHTS.items()))
    assert packed(backwards)[0].digest == packed(WEIGHTS)[0].digest


def test_arrays_that_are_not_contiguous():
    value = np.arange(24, dtype=np.float32).reshape(4, 6)
    manifest, memory = packed({"x": value.T, "y": value[:, ::2]})
    arrays = unpack(manifest, memory, np.empty)
    np.testing.assert_array_equal(arrays["x"], value.T)
    np.testing.assert_array_equal(arrays["y"], value[:, ::2])


def test_rounding_is_that_of_another_library():
    rng = np.random.default_rng(0)
    bits = rng.integers(0, 1 << 32, 200_000, np.uint32)
    edges = np.array([0x7F7FFFFF, 0x7F800000, 0xFF800000, 0x7FC00000, 0x7F800001, 0xFFFFFFFF, 1])
    ties = np.array([0x3F808000, 0x3F818000])
    values = np.concatenate([bits, edges.astype(np.uint32), ties.astype(np.uint32)]).view(np.float32)
    with np.errstate(invalid="ignore"):
        theirs = values.astype(ml_dtypes.bfloat16)
    ours = to_bfloat16(values)
    number = ~np.isnan(values)
    np.testing.assert_array_equal(ours[number], theirs.view(np.uint16)[number])
    wide = np.empty(len(values), np.float32)
    widen(ours, wide)
    assert np.isnan(wide[~number]).all()
    np.testing.assert_array_equal(wide[number], theirs[number].astype(np.float32))
    fine = np.abs(values[number]) > 1e-37
    fine &= np.abs(values[number]) < 3e38
    assert np.max(np.abs(wide[number][fine] / values[number][fine] - 1)) <= 2**-8


def test_bfloat16_on_the_wire():
    manifest, memory = packed(WEIGHTS, "bfloat16")
    assert manifest.num_bytes == 1_200_000 + 4 * 64
    arrays = unpack(manifest, memory, lambda num_bytes: np.empty(num_bytes, np.uint8))
    for name, value in WEIGHTS.items():
        wanted = value.astype(ml_dtypes.bfloat16).astype(np.float32) if value.dtype == np.float32 else value
        np.testing.assert_array_equal(arrays[name], wanted)
        assert arrays[name].dtype == value.dtype


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(lambda m: m.__setitem__(17, m[17] ^ 1), id="a bit"),
        pytest.param(lambda m: m.__setitem__(slice(-64, None), 0), id="the end is missing"),
        pytest.param(lambda m: m.__setitem__(slice(0, 4096), m[4096:8192].copy()), id="a page repeated"),
        pytest.param(lambda m: m.__setitem__(slice(0, 65536), np.roll(m[:65536], 32768)), id="rows exchanged"),
        pytest.param(lambda m: m.__setitem__(slice(0, BLOCK), 0), id="never written"),
    ],
)
def test_checksums_notice(damage):
    memory = np.random.default_rng(1).integers(0, 256, 2 * BLOCK + 640).astype(np.uint8)
    before = checksums(memory, threads=1)
    assert len(before) == 3
    damage(memory)
    after = checksums(memory, threads=1)
    assert after != before and after[1] == before[1]


def test_a_checksum_by_hand():
    """Two words that fill no row: their sum, 3 + 2^64 - 1 = 2 modulo 2^64, after a CRC of nothing that began at 8."""
    block = np.zeros(64, np.uint8)
    block.view(np.uint64)[:2] = [3, 2**64 - 1]
    assert checksums(block, threads=1) == (checksum(block),)
    assert checksum(block) == zlib.crc32((2).to_bytes(8, "little"), 8)


def test_the_digest_covers_everything():
    manifest, _ = packed(WEIGHTS)
    others = [
        replace(manifest, version=4),
        replace(manifest, serial=2),
        replace(manifest, base="x"),
        replace(manifest, is_base=True),
        replace(manifest, checksums=(1, *manifest.checksums[1:])),
        replace(manifest, entries=(replace(manifest.entries[0], shape=(5, 1)), *manifest.entries[1:])),
    ]
    assert len({manifest.digest, *(each.digest for each in others)}) == 1 + len(others)


def test_what_a_receiver_refuses():
    manifest, _ = packed(WEIGHTS)
    layout = layout_of(WEIGHTS)
    check_manifest(manifest, held=None, expected=layout)
    check_manifest(manifest, held=None, expected=None)
    with pytest.raises(ManifestError, match=r"lacks 1 of the 7 arrays of the receiver's policy: \['z'\]"):
        check_manifest(manifest, held=None, expected={**layout, "z": ("float32", (1,))})
    less = {name: value for name, value in layout.items() if name != "a/bias"}
    with pytest.raises(ManifestError, match=r"has 1 arrays that the receiver's policy lacks: \['a/bias'\]"):
        check_manifest(manifest, held=None, expected=less)
    with pytest.raises(ManifestError, match=r"'a/bias' is float32 \(5,\) in the payload, but float32 \(6,\)"):
        check_manifest(manifest, held=None, expected={**layout, "a/bias": ("float32", (6,))})
    with pytest.raises(ManifestError, match="'d/half' is float16"):
        check_manifest(manifest, held=None, expected={**layout, "d/half": ("float32", (7,))})
    with pytest.raises(ManifestError, match="offsets"):
        check_manifest(replace(manifest, num_bytes=manifest.num_bytes + 64), held=None, expected=None)
    with pytest.raises(ManifestError, match="checksums for"):
        check_manifest(replace(manifest, checksums=()), held=None, expected=None)


def test_frozen_weights_complete_the_others():
    frozen, _ = packed({"a": np.zeros(3, np.float32)}, base="abc", is_base=True)
    rest, _ = packed({"b": np.ones(2, np.float32)}, base="abc")
    expected = {"a": ("float32", (3,)), "b": ("float32", (2,))}
    check_manifest(frozen, held=None, expected=expected)
    check_manifest(rest, held=frozen, expected=expected)
    with pytest.raises(ManifestError, match="the receiver has none"):
        check_manifest(rest, held=None, expected=expected)
    with pytest.raises(ManifestError, match="complete the frozen weights other"):
        check_manifest(replace(rest, base="other"), held=frozen, expected=expected)
