"""What an Octo model reads and gives, for people."""

from collections.abc import Mapping
from typing import Any

from vla_rlaif.policies.octo.dataset_statistics import DatasetStatistics, is_flat
from vla_rlaif.policies.octo.model import LANGUAGE
from vla_rlaif.policies.octo.model_inputs import InputRules
from vla_rlaif.policies.octo.spec import ModelSpec


def describe(
    spec: ModelSpec,
    rules: InputRules,
    *,
    config: Mapping[str, Any],
    statistics: DatasetStatistics,
    num_params: int,
    num_encoder_params: int,
) -> str:
    """Several lines. ``num_encoder_params`` are the language encoder's, and not among ``num_params``."""
    total, window = num_params + num_encoder_params, config.get("window_size", "?")
    lines = [
        f"Octo with {total:,} parameters, {num_encoder_params:,} of them in the frozen language encoder",
        f"observations (window T: trained with {window}, at most {spec.max_horizon}):",
    ]
    for name, keys in rules.reads.items():
        lines += [f"  {key}: {rules.observation[key]}, read by {name}" for key in keys]
        lines += [] if keys else [f"  {name}: reads nothing that was there in training"]
    lines.append("tasks:")
    if rules.language is not None:
        num, width = rules.language
        ids = f"input_ids and attention_mask int [B, {num}], or " if num_encoder_params else ""
        lines.append(f"  {LANGUAGE}: {ids}features float32 [B, {num}, {width}]")
    lines += [f"  {key}: {wanted}, black if absent" for key, wanted in rules.task.items()]
    head = spec.head
    lines.append(f"actions: {head.NAME}, chunks of {head.action_horizon} with {head.action_dim} dims")
    lines.append(f"statistics: {', '.join(_datasets(statistics)) or 'none'}")
    return "\n".join(lines)


def _datasets(statistics: DatasetStatistics) -> list[str]:
    named = {"one dataset": statistics} if is_flat(statistics) else statistics
    return [f"{name} ({len(next(iter(value['action'].values())))} action dims)" for name, value in named.items()]
