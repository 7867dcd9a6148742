"""A robot's observation reaches the policy as it was sent, and every way of sending a wrong one has its own message."""

import re

import numpy as np
import pytest
from serving import SPEC, observation, pack, settings

from vla_rlaif.serve.requests import RequestReader
from vla_rlaif.serve.settings import ServeSettings, require_guard


def read(message: dict, **changes):
    return RequestReader(SPEC, settings(**changes)).read(pack(message))


def test_frame_is_what_was_sent():
    sent = observation(1)
    request = read(sent | {"observation/gripper": np.zeros(1), "deadline_ms": 20})
    assert request.frame is not None
    np.testing.assert_array_equal(request.frame.images["primary"], sent["observation/image"])
    np.testing.assert_array_equal(request.frame.images["wrist"], sent["observation/wrist_image"])
    np.testing.assert_array_equal(request.frame.state, sent["observation/state"])
    assert (request.frame.instruction, request.reset, request.deadline_s) == ("reach the goal", False, 0.02)


def test_names_of_another_robot():
    """As ALOHA's clients send it: images in a map of their own. Two vectors make the state."""
    sent = observation(2)
    request = read(
        {
            "images": {"high": sent["observation/image"], "left": sent["observation/wrist_image"]},
            "joints": np.array([1, 2, 3], np.float64),
            "gripper": np.array([4], np.float16),
            "task": "push the cube",
        },
        cameras={"primary": "images/high", "wrist": "images/left"},
        state_keys=("joints", "gripper"),
        prompt_key="task",
    )
    assert request.frame is not None
    np.testing.assert_array_equal(request.frame.images["wrist"], sent["observation/wrist_image"])
    assert request.frame.state.tolist() == [1, 2, 3, 4] and request.frame.state.dtype == np.float32
    assert request.frame.instruction == "push the cube"


def test_prompts():
    sent = observation(3)
    del sent["prompt"]
    frame = read(sent, default_prompt="push the cube").frame
    assert frame is not None and frame.instruction == "push the cube"
    frame = read(sent | {"prompt": "dance"}, any_prompt=True).frame
    assert frame is not None and frame.instruction == "dance"


def test_deadline_is_the_server_s_at_most():
    assert read(observation(0) | {"deadline_ms": 5000.0}).deadline_s == 1.0


def test_reset_alone_and_with_an_observation():
    assert read({"reset": True}).frame is None
    request = read({"reset": True} | observation(0))
    assert request.reset and request.frame is not None


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"observation/image": np.zeros((8, 8, 3), np.float32)}, "float32 [8 8 3], wanted uint8 [8 8 3]"),
        ({"observation/image": np.zeros((3, 8, 8), np.uint8)}, "uint8 [3 8 8], wanted uint8 [8 8 3]"),
        ({"observation/wrist_image": np.zeros((16, 16, 3), np.uint8)}, "observation/wrist_image is uint8 [16 16 3]"),
        ({"observation/image": "a picture"}, "'a picture' (str)"),
        ({"observation/state": np.zeros(5, np.float32)}, "the state has 5 values (observation/state 5), wanted 4"),
        ({"observation/state": np.zeros((1, 4), np.float32)}, "float32 [1 4], wanted a vector of floats"),
        ({"observation/state": np.zeros(4, np.int32)}, "int32 [4], wanted a vector of floats"),
        ({"observation/state": [0.0] * 4}, "wanted a vector of floats"),
        ({"observation/state": np.array([0, np.nan, 0, 0])}, "not finite"),
        ({"observation/state": np.array([0, 1e300, 0, 0])}, "not finite"),
        ({"prompt": "reach the gaol"}, "not trained on 'reach the gaol'; the nearest of its 2"),
        ({"prompt": b"reach the goal"}, "(bytes), wanted a sentence"),
        ({"prompt": ""}, "wanted a sentence"),
        ({"deadline_ms": 0}, "deadline_ms is 0"),
        ({"deadline_ms": float("nan")}, "deadline_ms is nan"),
        ({"deadline_ms": "soon"}, "deadline_ms is 'soon'"),
        ({"reset": 1}, "reset is 1"),
    ],
)
def test_what_is_refused(change, why):
    with pytest.raises(ValueError, match=re.escape(why)):
        read(observation(0) | change)


def test_missing_keys_list_both_sides():
    sent = observation(0)
    sent["observation/imag"] = sent.pop("observation/image")
    with pytest.raises(ValueError) as error:
        read(sent)
    text = str(error.value)
    assert "lacks observation/image." in text
    assert "Wanted observation/image, observation/wrist_image, observation/state, prompt;" in text
    assert "got observation/wrist_image, observation/state, prompt, observation/imag." in text


def test_metadata():
    assert RequestReader(SPEC, settings()).metadata() == {
        "images": {"observation/image": [8, 8, 3], "observation/wrist_image": [8, 8, 3]},
        "state": {"keys": ["observation/state"], "size": 4},
        "prompt": "prompt",
        "instructions": ["reach the goal", "push the cube"],
        "action_horizon": 3,
        "action_dim": 2,
        "noise_scale": 0.0,
    }


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"cameras": {"left": "x"}}, "cameras names 'left'; the policy has primary, wrist"),
        ({"default_prompt": "dance"}, "not trained on 'dance'"),
        ({"max_message_bytes": 3000}, "max_message_bytes 3000 is too small"),
        ({"port": 70000}, "port is 70000"),
        ({"deadline_ms": 0.0}, "deadline_ms is 0.0"),
        ({"drain_s": float("inf")}, "drain_s is inf"),
        ({"max_batch": 0}, "max_batch is 0"),
        ({"max_batch": 8, "max_queue": 4}, "max_batch 8 can never fill"),
        ({"state_keys": ()}, "state_keys names no key"),
    ],
)
def test_settings_that_cannot_work(changes, why):
    with pytest.raises(ValueError, match=re.escape(why)):
        RequestReader(SPEC, settings(**changes))


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "::1", "localhost"])
def test_loopback_needs_no_token(host):
    require_guard(ServeSettings(host=host), ())


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.5", "robots.example"])
def test_a_network_needs_a_token(host):
    with pytest.raises(ValueError, match="--token-file"):
        require_guard(ServeSettings(host=host), ())
    require_guard(ServeSettings(host=host, insecure=True), ())
    require_guard(ServeSettings(host=host), ("0123456789abcdef",))
    with pytest.raises(ValueError, match="fewer than 16"):
        require_guard(ServeSettings(host=host), ("0123456789abcdef", "short"))
