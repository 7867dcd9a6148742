"""The policy that serving and collecting replicas act with: the run's start policy, with the committed weights."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from vla_rlaif.build import build_policy, load_folder
from vla_rlaif.config import RunConfig
from vla_rlaif.policy_config import ImitatorSettings
from vla_rlaif.types import EnvSpec, Weights


def start_policy_of(run: RunConfig, spec: EnvSpec) -> Any:
    """The policy that the run starts from. The trainer makes that of a warm start, once: ValueError before that."""
    if isinstance(run.policy, ImitatorSettings):
        return load_folder(run.run_dir / "start", run, spec)
    return build_policy(run.policy, spec, run.seed)


def weights_of(policy: Any, trained: Mapping[str, np.ndarray]) -> Weights:
    """All parameters of a policy with the trained ones replaced: what ``load`` takes."""
    return {name: np.asarray(value) for name, value in policy.params.items()} | dict(trained)
