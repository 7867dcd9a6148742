"""Strict models filled from YAML, and what is said about mistakes in them: one line each, with the nearest known name.

Light on purpose: importing this file must not import torch, jax, ray or mujoco.
"""

import difflib
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError


class Model(BaseModel):
    """Frozen; unknown keys are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=False)


def read_mapping(path: Path, *, what: str, sections: str) -> dict[str, Any]:
    """The mapping in a YAML file. ``what`` and ``sections`` describe it: 'a run', 'env, policy, ...'.

    Raises ValueError if there is no such file, or if it holds something else.
    """
    try:
        text = path.read_text()
    except FileNotFoundError:
        found = ", ".join(sorted(p.name for p in path.parent.glob("*.yaml"))) or "no YAML file"
        raise ValueError(f"no config {path}; {path.parent} has: {found}.") from None
    try:
        data = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(f"{path} is not valid YAML: {error}") from None
    if not isinstance(data, dict):
        raise ValueError(f"{path} holds a {type(data).__name__}; {what} is a mapping of sections ({sections}).")
    return data


def parse[M: Model](kind: type[M], data: dict[str, Any], *, source: str) -> M:
    """Fill a model. Raises ValueError that names every mistake, with the key and the nearest known name."""
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        raise ValueError(explain(error, source, kind)) from None


def explain(error: ValidationError, source: str, root: type[Model]) -> str:
    """One line per mistake, with a suggestion for unknown keys."""
    lines = []
    for item in error.errors():
        # Discriminated unions put the tag (the `type`) into the location; it is not a key of the file.
        where = ".".join(str(p) for p in item["loc"]) or "together"
        if item["type"] == "extra_forbidden":
            known = _known_keys(root, item["loc"][:-1])
            lines.append(f"{where}: unknown key{suggest(str(item['loc'][-1]), known)}")
        elif item["type"] == "union_tag_not_found":
            types = {m.model_fields["type"].default for m in _options(root, item["loc"])}
            lines.append(f"{where}: has no type; add type: one of {', '.join(sorted(types))}.")
        else:
            message = item["msg"].removeprefix("Value error, ")
            got = "" if item["type"] == "value_error" else f" (got {item['input']!r})"
            lines.append(f"{where}: {message}{got}")
    return f"{source}: " + "; ".join(lines)


def suggest(name: str, known: Collection[str]) -> str:
    """The end of a message about an unknown name: the nearest known one, else all of them."""
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"; did you mean {near[0]}?" if near else f"; known here: {', '.join(sorted(known)) or 'none'}."


def _known_keys(root: type[Model], location: Sequence[str | int]) -> list[str]:
    """Keys of the models at a location of a validation error; the tag of a union is a part of the location."""
    return sorted({f.alias or name for m in _options(root, location) for name, f in m.model_fields.items()})


def _options(root: type[Model], location: Sequence[str | int]) -> list[type[Model]]:
    """The models that may stand at a location."""
    models: list[type[Model]] = [root]
    for part in location:
        tagged = [m for m in models if "type" in m.model_fields and m.model_fields["type"].default == part]
        fields = [m.model_fields[str(part)] for m in models if part in m.model_fields]
        models = tagged or [nested for field in fields for nested in _models(field.annotation)] or models
    return models


def _models(annotation: Any) -> list[type[Model]]:
    found = [annotation] if isinstance(annotation, type) and issubclass(annotation, Model) else []
    return found + [model for argument in get_args(annotation) for model in _models(argument)]
