"""A robot's message to a checked observation: what could spoil a batch is refused here, for this robot alone.

Axes: see types.py.
"""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float, UInt8

from vla_rlaif.serve.protocol import decode
from vla_rlaif.serve.settings import ServeSettings
from vla_rlaif.types import EnvSpec

RESET, DEADLINE, SEED = "reset", "deadline_ms", "seed"  # our keys beside the observation


@dataclass(frozen=True, kw_only=True)
class Frame:
    """What one robot sees before one decision."""

    images: Mapping[str, UInt8[np.ndarray, "height width 3"]]
    state: Float[np.ndarray, " P"]
    instruction: str


@dataclass(frozen=True, kw_only=True)
class Request:
    frame: Frame | None  # None: nothing but a reset
    reset: bool  # forget what was seen, start counting decisions at 0
    deadline_s: float  # from receipt to reply
    seed: int | None = None  # of the noise, in place of the robot's own stream


class RequestReader:
    """Knows the policy's spec and the names that robots use; remembers nothing."""

    def __init__(self, spec: EnvSpec, settings: ServeSettings) -> None:
        strangers = sorted(settings.cameras.keys() - set(spec.cameras))
        if strangers:
            raise ValueError(f"cameras names {strangers[0]!r}; the policy has {', '.join(spec.cameras)}.")
        self._spec, self._settings = spec, settings
        defaults = ["observation/image", *(f"observation/{camera}_image" for camera in spec.cameras[1:])]
        self.cameras = {c: settings.cameras.get(c, key) for c, key in zip(spec.cameras, defaults, strict=True)}
        default = settings.default_prompt
        if default is not None:
            self._check_known(default)
        side = spec.image_size
        floats = 8 * (len(spec.cameras) * side * side * 3 + spec.state_dim)  # so that a wrong dtype gets its error
        if settings.max_message_bytes < floats:
            raise ValueError(
                f"max_message_bytes {settings.max_message_bytes} is too small for {len(spec.cameras)} images of "
                f"{side} pixels; give {floats} or more."
            )

    def metadata(self) -> dict[str, Any]:
        """What the server tells a robot of its requests."""
        side = self._spec.image_size
        return {
            "images": {key: [side, side, 3] for key in self.cameras.values()},
            "state": {"keys": list(self._settings.state_keys), "size": self._spec.state_dim},
            "prompt": self._settings.prompt_key,
            "instructions": list(self._spec.instructions),
            "action_horizon": self._spec.chunk,
            "action_dim": self._spec.action_dim,
            "noise_scale": self._settings.noise_scale,
        }

    def read(self, message: bytes | str) -> Request:
        """ValueError says what is wrong, to the robot's programmer."""
        if isinstance(message, str):
            raise ValueError("got a text frame, wanted a binary one (msgpack).")
        items = decode(message)
        reset, deadline_ms = items.pop(RESET, False), items.pop(DEADLINE, self._settings.deadline_ms)
        if not isinstance(reset, bool):
            raise ValueError(f"{RESET} is {reset!r}, wanted true or false.")
        if type(deadline_ms) not in (int, float) or not deadline_ms > 0:
            raise ValueError(f"{DEADLINE} is {deadline_ms!r}, wanted a positive number of milliseconds.")
        seed = items.pop(SEED, None)
        if seed is not None and (type(seed) is not int or not 0 <= seed < 2**32):
            raise ValueError(f"{SEED} is {seed!r}, wanted a whole number below 2**32.")
        return Request(
            frame=None if reset and not items else self._frame(items),
            reset=reset,
            deadline_s=min(deadline_ms, self._settings.deadline_ms) / 1e3,
            seed=seed,
        )

    def _frame(self, items: Mapping[str, Any]) -> Frame:
        prompt_key, default = self._settings.prompt_key, self._settings.default_prompt
        wanted = [*self.cameras.values(), *self._settings.state_keys, *([] if default else [prompt_key])]
        missing = [key for key in wanted if key not in items]
        if missing:
            raise ValueError(
                f"the request lacks {', '.join(missing)}. Wanted {', '.join(wanted)}; "
                f"got {', '.join(items) or 'nothing'}. "
                "The server's options --cameras, --state-keys and --prompt-key name the robot's keys."
            )
        return Frame(
            images={camera: self._image(key, items[key]) for camera, key in self.cameras.items()},
            state=self._state({key: items[key] for key in self._settings.state_keys}),
            instruction=self._instruction(items.get(prompt_key, default)),
        )

    def _image(self, key: str, image: object) -> UInt8[np.ndarray, "height width 3"]:
        side = self._spec.image_size
        if not isinstance(image, np.ndarray) or image.dtype != np.uint8 or image.shape != (side, side, 3):
            raise ValueError(
                f"{key} is {_describe(image)}, wanted uint8 [{side} {side} 3] (rows, columns, RGB). "
                "openpi_client.image_tools has convert_to_uint8 and resize_with_pad."
            )
        return image

    def _state(self, parts: Mapping[str, object]) -> Float[np.ndarray, " P"]:
        arrays = []
        for key, part in parts.items():
            if not isinstance(part, np.ndarray) or part.dtype.kind != "f" or part.ndim != 1:
                raise ValueError(f"{key} is {_describe(part)}, wanted a vector of floats.")
            arrays.append(part)
        with np.errstate(over="ignore"):  # beyond float32 is refused with the other infinities
            state = np.concatenate(arrays).astype(np.float32)
        if len(state) != self._spec.state_dim:
            sizes = ", ".join(f"{key} {len(part)}" for key, part in zip(parts, arrays, strict=True))
            raise ValueError(f"the state has {len(state)} values ({sizes}), wanted {self._spec.state_dim}.")
        if not np.isfinite(state).all():
            raise ValueError(f"the state has values that are not finite: {state.tolist()}.")
        return state

    def _instruction(self, prompt: object) -> str:
        if not isinstance(prompt, str) or not prompt:
            raise ValueError(f"{self._settings.prompt_key} is {_describe(prompt)}, wanted a sentence.")
        self._check_known(prompt)
        return prompt

    def _check_known(self, prompt: str) -> None:
        known = self._spec.instructions
        if prompt in known or self._settings.any_prompt:
            return
        near = difflib.get_close_matches(prompt, known, n=1, cutoff=0) or known[:1]
        raise ValueError(
            f"the policy was not trained on {prompt!r}; the nearest of its {len(known)} instructions is {near[0]!r}. "
            "The server's option --any-prompt lets others through."
        )


def _describe(value: object) -> str:
    if isinstance(value, np.ndarray):
        return f"{value.dtype} [{' '.join(map(str, value.shape))}]"
    return f"{value!r:.60} ({type(value).__name__})"
