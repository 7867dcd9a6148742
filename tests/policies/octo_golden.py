"""Numbers of the original Octo, tiny, and our model with the same parameters; see tests/golden/octo/README.md."""

import dataclasses
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from flax.traverse_util import flatten_dict

from vla_rlaif.policies.octo.adapt import adapted_spec
from vla_rlaif.policies.octo.octo_model import OctoModel
from vla_rlaif.policies.octo.spec import HeadSpec

GOLDEN = Path(__file__).parents[1] / "golden" / "octo"
CHECKPOINT = GOLDEN / "tiny_ckpt"
ABSENT = {"no_wrist": r"wrist \(image_wrist\)", "no_language": "language_instruction"}  # what a warning names
SHAPES_OF_FULL = ("full", "no_goal_images", "no_pad_mask_dict")  # what is absent there is filled in


@cache
def golden() -> dict[str, np.ndarray]:
    return dict(np.load(GOLDEN / "tiny_golden.npz"))


@cache
def model() -> OctoModel:
    return OctoModel.load(CHECKPOINT)


def below(prefix: str) -> dict[str, Any]:
    """The nested values whose names begin so."""
    tree: dict[str, Any] = {}
    for name, value in golden().items():
        if name.startswith(prefix):
            *path, last = name.removeprefix(prefix).split("/")
            node = tree
            for key in path:
                node = node.setdefault(key, {})
            node[last] = value
    return tree


def flat(tree: Any) -> dict[str, Any]:
    return flatten_dict(tree, sep="/")  # pyright: ignore[reportReturnType]


def without(tree: Mapping[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in tree.items() if key not in keys}


def frames(tree: Mapping[str, Any], what: Any) -> dict[str, Any]:
    """``what`` of every leaf's array."""
    return {key: frames(value, what) if isinstance(value, dict) else what(value) for key, value in tree.items()}


def case(name: str = "full") -> tuple[OctoModel, dict[str, Any], dict[str, Any]]:
    """(model, observations, tasks) of a golden case."""
    observations, tasks, spec = below("in/observation/"), below("in/task/"), model().spec
    match name:
        case "no_wrist":
            observations = without(observations, "image_wrist")
        case "no_goal_images":
            tasks = without(tasks, "image_primary", "image_wrist")
        case "no_language":
            tasks = without(tasks, "language_instruction")
        case "no_pad_mask_dict":
            observations, tasks = without(observations, "pad_mask_dict"), without(tasks, "pad_mask_dict")
        case "window1":
            observations = frames(observations, lambda x: x[:, -1:])
        case "window4":
            observations = frames(observations, lambda x: np.concatenate([x, x[:, ::-1]], axis=1))
        case "old_attention":
            spec = dataclasses.replace(spec, use_correct_attention=False)
        case "no_repeat_task_tokens":
            spec = dataclasses.replace(spec, repeat_task_tokens=False)
    return model() if spec is model().spec else dataclasses.replace(model(), spec=spec), observations, tasks


def reporting(name: str) -> AbstractContextManager[Any]:
    """Around a call for a case: expects the one line about what it leaves out."""
    if name not in ABSENT:
        return nullcontext()
    return pytest.warns(UserWarning, match=f"^no input for {ABSENT[name]}: left out of the sequence.$")


def batch() -> dict[str, Any]:
    """What the golden loss was computed on."""
    _, observations, tasks = case()
    actions = {"action": golden()["in/action"], "action_pad_mask": golden()["in/action_pad_mask"]}
    return {"observation": observations, "task": tasks, **actions}


def assert_close(got: Any, want: np.ndarray, atol: float, name: str) -> None:
    """Prints how much of the tolerance is used (``pytest -s``)."""
    got = np.asarray(got)
    assert got.shape == want.shape, (name, got.shape, want.shape)
    worst = float(np.abs(got.astype(np.float64) - want).max())
    print(f"{name}: {worst:.1e} of {atol:.0e}")
    assert worst <= atol, f"{name}: {worst}"


def noise(batch: int = 3, seed: int = 0, shape: tuple[int, ...] = ()) -> tuple[np.ndarray, np.ndarray]:
    """What a sampler of the tiny head starts from and adds: any numbers."""
    x = np.random.default_rng(seed).normal(size=(21, *shape, batch, 28)).astype(np.float32)
    return x[0], x[1:]


@cache
def with_head(head: HeadSpec) -> OctoModel:
    """Our model with a fresh head."""
    spec = adapted_spec(model().spec, head=head)
    octo, report = model().adapted(spec, seed=0, allow_new=("heads_action/*",), skip=("heads_action/*",))
    assert all(name.startswith("heads_action/") for name in report.initialised)
    return octo


@contextmanager
def counted_compilations() -> Iterator[list[str]]:
    names: list[str] = []

    def count(event: str, duration_secs: float, **_: str | int) -> None:
        names.extend([event] * ("backend_compile" in event))

    jax.monitoring.register_event_duration_secs_listener(count)
    try:
        yield names
    finally:
        jax.monitoring.unregister_event_duration_listener(count)
