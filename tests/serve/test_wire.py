"""The wire format: what openpi's client packs is read, what it unpacks is written, and nothing malformed gets in."""

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vla_rlaif.serve.protocol import MAX_CONTAINERS, decode, encode

# openpi_client.msgpack_numpy.packb of openpi-client 0.1.2 under NumPy 1.26, of the values in the test.
REQUEST = bytes.fromhex(
    "85b16f62736572766174696f6e2f696d61676584c40b5f5f6e6461727261795f5fc3c40464617461c40c000102030405060708090a0bc4056474"
    "797065a37c7531c405736861706593020203b16f62736572766174696f6e2f737461746584c40b5f5f6e6461727261795f5fc3c40464617461"
    "c4080000003f000080bfc4056474797065a33c6634c40573686170659102a670726f6d7074a57265616368ab646561646c696e655f6d7383c40d"
    "5f5f6e7067656e657269635f5fc3c40464617461cb4004000000000000c4056474797065a33c6634a66e657374656481a4666c616783c40d5f5f"
    "6e7067656e657269635f5fc3c40464617461c3c4056474797065a37c6231"
)
REPLY = bytes.fromhex(
    "83a7616374696f6e7384c40b5f5f6e6461727261795f5fc3c40464617461c4080000c03f000000c0c4056474797065a33c6634c4057368617065"
    "920102a776657273696f6e03ad7365727665725f74696d696e6781a8696e6665725f6d73cb3fe0000000000000"
)


def test_request_of_the_client():
    items = decode(REQUEST)
    image, state = items["observation/image"], items["observation/state"]
    assert image.dtype == np.uint8 and image.tolist() == np.arange(12).reshape(2, 2, 3).tolist()
    assert state.dtype == np.float32 and state.tolist() == [0.5, -1.0]
    assert (items["prompt"], items["deadline_ms"], items["nested/flag"]) == ("reach", 2.5, True)
    with pytest.raises(ValueError, match="read-only"):
        image[0] = 0


def test_reply_to_the_client():
    reply = {"actions": np.array([[1.5, -2.0]], np.float32), "version": 3, "server_timing": {"infer_ms": 0.5}}
    assert encode(reply) == REPLY


def packed(message: object) -> bytes:
    data = msgpack.packb(message)
    assert data is not None
    return data


def array(**changes: object) -> dict[str, object]:
    fields = {b"__ndarray__": True, b"data": b"\0" * 8, b"dtype": "<f4", b"shape": [2]}
    return {"x": fields | {key.encode(): value for key, value in changes.items()}}


@pytest.mark.parametrize(
    ("message", "why"),
    [
        (array(dtype="|O"), "dtype"),
        (array(dtype="<U2"), "dtype"),
        (array(dtype=">f4"), "dtype"),
        (array(dtype=[["a", "<f4"]]), "dtype"),
        (array(dtype=None), "dtype"),
        (array(shape=[3]), "needs 12 bytes, got 8"),
        (array(shape=[-1, -2]), "shape"),
        (array(shape=[2.0]), "shape"),
        (array(shape=[True, 2]), "shape"),
        (array(shape=[1] * 9), "at most 8 sizes"),
        (array(shape=[2**63, 2**63]), "needs"),
        (array(data="text"), "got str"),
        (array(data=[0] * 8), "got list"),
        ({"x": {b"__npgeneric__": True, b"data": b"", b"dtype": "<f4"}}, "NumPy scalar"),
        ([1, 2], "is a list"),
        ({1: 2}, "msgpack"),
        ({b"key": 2}, "not a string"),
        ({"a/b": 1, "a": {"b": 2}}, "twice"),
        ({"a": {"b": {"c": {"d": {"e": 1}}}}}, "deep"),
        ({"x": [[]] * 60 * 5}, "msgpack"),
        ({"x": [[[]] * 60] * 5}, f"more than {MAX_CONTAINERS}"),
        ({"x": "a" * 5000}, "msgpack"),
        ({"x": msgpack.ExtType(5, b"12")}, "msgpack"),
        ({"x": msgpack.Timestamp(0, 0)}, "msgpack"),
    ],
)
def test_malformed_messages(message, why):
    with pytest.raises(ValueError, match=why):
        decode(packed(message))


def test_arrays_without_elements_and_without_dims():
    items = decode(packed(array(data=b"", shape=[0, 3]) | {"y": array(data=b"\0\0\0\0", shape=[])["x"]}))
    assert items["x"].shape == (0, 3) and items["y"].shape == ()


@pytest.mark.parametrize("data", [b"", REQUEST[:-1], REQUEST + b"\0", b"\x91" * 100_000, b"\xc1", b"\x81\xa1\xff\xc0"])
def test_bytes_that_are_no_message(data):
    with pytest.raises(ValueError, match="not msgpack"):
        decode(data)


@given(st.binary(max_size=64) | st.tuples(st.integers(0, len(REQUEST) - 1), st.integers(0, 255)))
def test_nothing_but_value_errors(data):
    """Random bytes, and the client's request with one byte changed."""
    if isinstance(data, tuple):
        data = REQUEST[: data[0]] + bytes([data[1]]) + REQUEST[data[0] + 1 :]
    try:
        items = decode(data)
    except ValueError:
        return
    assert all(isinstance(key, str) for key in items)
