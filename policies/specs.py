"""An EnvSpec as JSON and back: part of what every stored policy carries."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from vla_rlaif.types import EnvSpec


def spec_to_json(spec: EnvSpec) -> dict[str, Any]:
    return {name: list(v) if isinstance(v, tuple) else v for name, v in dataclasses.asdict(spec).items()}


def spec_from_json(values: Mapping[str, Any]) -> EnvSpec:
    fields: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in values.items()}
    return EnvSpec(**fields)
