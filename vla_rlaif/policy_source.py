"""Policies to evaluate, wherever they come from: our folders, official Octo ones, LeRobot's, a policy server."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, TypeAdapter, ValidationError

from vla_rlaif.build import load_folder
from vla_rlaif.checkpoint import load_policy
from vla_rlaif.config import RunConfig
from vla_rlaif.doctor import require
from vla_rlaif.interfaces import Policy, VectorEnv
from vla_rlaif.lerobot_config import LeRobotConfig
from vla_rlaif.policy_config import CustomPolicyConfig, OctoCheckpointConfig, PolicyConfig
from vla_rlaif.rollouts_local import LocalRollouts
from vla_rlaif.serve.settings import ServedSettings

SCHEMES = ("ws://", "wss://")
_policy_config: TypeAdapter[PolicyConfig] = TypeAdapter(Annotated[PolicyConfig, Field(discriminator="type")])


@dataclass(frozen=True, kw_only=True)
class Source:
    """Where a policy is, and how it is read."""

    name: str  # as the user wrote it
    kind: str
    config: RunConfig  # whose policy section reads it


def find_source(name: str, config: RunConfig) -> Source:
    """What lies at ``name``. The config's policy section reads it if it is of that type; else the folder's own
    settings do, where it has some, or the defaults of its kind.

    Raises:
        ValueError: nothing that is known lies there.
    """
    if name.startswith(SCHEMES):
        return Source(name=name, kind="policy server", config=config)
    if "://" in name:
        raise ValueError(f"{name} is not a policy server's address; those begin with {' or '.join(SCHEMES)}.")
    folder, policy = Path(name), config.policy
    if (folder / "dataset_statistics.json").exists():
        octo = policy if isinstance(policy, OctoCheckpointConfig) else OctoCheckpointConfig(folder=folder)
        return Source(name=name, kind="official Octo", config=config.model_copy(update={"policy": octo}))
    if (folder / "policy_preprocessor.json").exists():
        lerobot = policy if isinstance(policy, LeRobotConfig) else LeRobotConfig(path=str(folder))
        return Source(name=name, kind="LeRobot", config=config.model_copy(update={"policy": lerobot}))
    if folder.is_dir() and not (folder / "policy.json").exists():
        inside = [path.parent for path in folder.glob("*/policy.json")]
        hint = f" There are policies in it: {', '.join(map(str, sorted(inside)))}." if inside else ""
        raise ValueError(
            f"no policy checkpoint at {folder}: wanted policy.json (ours), dataset_statistics.json (official Octo) or "
            f"policy_preprocessor.json (LeRobot).{hint}"
        )
    metadata, _ = load_policy(folder)
    own = metadata.get("config", {})
    if own.get("type") != policy.type and not isinstance(policy, CustomPolicyConfig):
        try:
            config = config.model_copy(update={"policy": _policy_config.validate_python(own)})
        except ValidationError as error:
            raise ValueError(
                f"{folder} holds a policy of type {own.get('type')!r}, the config wants {policy.type!r}, and its own "
                f"settings cannot be read: {error.errors()[0]['msg']}. Use the config that made it."
            ) from None
    return Source(name=name, kind="vla_rlaif", config=config)


@contextmanager
def rollouts_of(source: Source, env: VectorEnv, served: ServedSettings) -> Iterator[LocalRollouts]:
    """Rollouts in ``env`` with the policy, for as long as it is needed."""
    if source.kind != "policy server":
        policy: Any = load_folder(Path(source.name), source.config, env.spec)
        yield LocalRollouts(policy, env, act_batch=source.config.loop.act_batch)
        return
    require("serve", f"--policy {source.name}")
    from vla_rlaif.serve.client import ServedPolicy, WithBegin

    remote = ServedPolicy(source.name, env.spec, served)
    try:
        asked: Policy = remote
        yield LocalRollouts(asked, WithBegin(env, remote))
    finally:
        remote.close()
