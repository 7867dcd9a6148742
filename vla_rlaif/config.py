"""The run as frozen, strictly validated models. A run is a YAML file that fills them; `build.py` makes objects of them.

Light on purpose: importing this file must not import torch, jax, ray or mujoco. Invalid combinations cannot be written,
so nothing downstream re-checks them.
"""

import difflib
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import yaml
from pydantic import Field, ValidationError, model_validator

from vla_rlaif.algorithm_checks import check_algorithm
from vla_rlaif.algorithm_config import AlgorithmConfig, GRPOConfig
from vla_rlaif.audit import check_audit
from vla_rlaif.cluster_config import (
    ClusterConfig,
    LocalClusterConfig,
    RayClusterConfig,
    check_players,
    check_ranks,
)
from vla_rlaif.config_base import Fraction, Model, Positive
from vla_rlaif.env_config import (
    EnvConfig,
    GymnasiumConfig,
    MetaWorldConfig,
    PointReachConfig,
    ProcessEnvConfig,
    TabletopConfig,
)
from vla_rlaif.logging_config import LoggingConfig
from vla_rlaif.monitor_checks import check_monitor
from vla_rlaif.policy_config import ImitatorSettings, OctoConfig, PolicyConfig, SmallStemConfig, VLASettings
from vla_rlaif.record_config import RecordConfig
from vla_rlaif.reward_config import (
    CompositeRewardConfig,
    PixelDistanceConfig,
    PreferenceRewardConfig,
    RewardConfig,
    learned_part,
    parts_of,
)
from vla_rlaif.reward_terms_config import MonitorConfig
from vla_rlaif.token_config import TokenVLAConfig, VLLMConfig
from vla_rlaif.warm_start_config import WarmStartConfig


class LearnerConfig(Model):
    lr: Annotated[float, Field(gt=0)] = 2e-4
    epochs: Positive = 4
    minibatch: Positive = 256  # decisions
    micro_batches: Positive = 1  # gradient accumulation inside a minibatch
    devices: Positive | None = None  # local ones; null: all. They share the rows of a micro-batch
    sharding: Literal["replicated", "fsdp"] = "replicated"  # fsdp: of a torch policy's parameters over the devices
    timeout_s: Positive = 1800  # how long the processes of several devices may take for an update
    warmup_updates: Annotated[int, Field(ge=0)] = 0  # optimiser updates until lr is reached, linearly
    weight_decay: Annotated[float, Field(ge=0)] = 0.0  # AdamW's, of kernels only
    max_grad_norm: Annotated[float, Field(gt=0)] = 1.0
    target_kl: Annotated[float, Field(gt=0)] | None = (
        0.05  # nats per sub-step; the rest of the step's updates is skipped
    )
    importance_cap: Annotated[float, Field(ge=1)] = 2.0  # of the weight of decisions that older weights took
    ema: Annotated[float, Field(ge=0, lt=1)] = 0.9  # running average of the weights, used for evaluation


class LoopConfig(Model):
    steps: Positive = 100
    min_live_share: Fraction = 0.25  # of the groups; below it a step plays more of them
    max_refills: Annotated[int, Field(ge=0, le=3)] = 1  # rounds that a step may add
    validate_every: Positive = 10
    validation_episodes: Positive = 128
    checkpoint_every: Positive = 10
    stored: Path | None = None  # episode store that rollout workers fill; a step takes its groups there first
    staleness: Annotated[int, Field(ge=0, le=4)] = 1  # updates by which groups may be older than what they train
    overlap: bool = False  # play the next steps while the learner updates, up to staleness updates ahead of it
    timeout_s: Annotated[float, Field(gt=0)] = 3600.0  # for a step's rollouts, if overlap, and for writing a checkpoint
    keep_checkpoints: Annotated[int, Field(ge=2)] = 2
    act_batch: Positive | None = None  # rows that the policy sees at a time; null: all of an env (of a rollout worker)


class EvaluateConfig(Model):
    episodes: Positive = 400
    clips: Annotated[int, Field(ge=0)] = 6  # start states shown before and after in the report


class RunConfig(Model):
    """Everything about one run."""

    name: str = "run"
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0
    out: Path | None = None  # run directory; default runs/<name>-seed<seed>
    env: EnvConfig = Field(default_factory=TabletopConfig, discriminator="type")
    policy: PolicyConfig = Field(default_factory=OctoConfig, discriminator="type")
    warm_start: WarmStartConfig | None = None
    reward: RewardConfig = Field(default_factory=PreferenceRewardConfig, discriminator="type")
    audited: bool = False  # nothing that only a simulator knows may enter the reward; refused if it would
    monitor: MonitorConfig = MonitorConfig()
    algorithm: AlgorithmConfig = GRPOConfig()
    learner: LearnerConfig = LearnerConfig()
    loop: LoopConfig = LoopConfig()
    evaluate: EvaluateConfig = EvaluateConfig()
    logging: LoggingConfig = LoggingConfig()
    record: RecordConfig = RecordConfig()
    cluster: ClusterConfig = Field(default_factory=LocalClusterConfig, discriminator="type")

    @property
    def run_dir(self) -> Path:
        return self.out or Path("runs") / f"{self.name}-seed{self.seed}"

    @model_validator(mode="after")
    def _parts_fit(self) -> "RunConfig":
        group = self.algorithm.group_size
        if self.env.num_envs % group:
            raise ValueError(f"env.num_envs {self.env.num_envs} does not split into groups of {group}.")
        self._act_batch_fits()
        self._overlap_fits()
        check_algorithm(self)
        size, micro = self.learner.minibatch, self.learner.micro_batches
        if size % micro:
            raise ValueError(f"learner.minibatch {size} does not split into {micro} micro-batches.")
        self._learner_fits()
        if isinstance(self.policy, OctoConfig) and isinstance(self.env, TabletopConfig):
            self._octo_sees(self.policy, self.env)
        self._reward_fits(group)
        can_imitate = isinstance(self.policy, ImitatorSettings)
        if not can_imitate and self.warm_start is not None:
            raise ValueError(f"warm_start is for policies that imitate, and {self.policy.type} does not. Remove it.")
        if isinstance(self.env, MetaWorldConfig | GymnasiumConfig) and not self.env.cameras:
            self._does_without_images()
        if isinstance(self.cluster, RayClusterConfig):
            self._workers_fit(self.cluster, group)
        return self

    def _does_without_images(self) -> None:
        if isinstance(self.policy, VLASettings):
            raise ValueError(f"policy {self.policy.type} looks at images, and env.cameras is empty; name a camera.")
        for reward in parts_of(self.reward):
            reads = reward.encoder.type if isinstance(reward, PreferenceRewardConfig) else reward.type
            if reads in ("cnn", "pretrained", "vlm_judge", "robometer", "lerobot"):
                raise ValueError(f"reward {reads} looks at images, and env.cameras is empty; name a camera.")
        if self.evaluate.clips:
            raise ValueError(f"evaluate.clips is {self.evaluate.clips}, and env.cameras is empty; set it to 0.")

    def _workers_fit(self, cluster: RayClusterConfig, group: int) -> None:
        env, learner = self.env, self.learner
        check_players(
            cluster.roles.rollout.workers,
            num_envs=env.num_envs,
            group=group,
            is_halved=isinstance(env, TabletopConfig | ProcessEnvConfig) and env.double_buffer,
            processes=env.workers if isinstance(env, ProcessEnvConfig) else 1,
            act_batch=self.loop.act_batch,
        )
        rows = learner.minibatch // learner.micro_batches
        check_ranks(cluster.roles.learner, backend=self.policy.backend, devices=learner.devices, rows=rows)

    def _overlap_fits(self) -> None:
        if not self.loop.overlap:
            return
        if not self.loop.staleness:
            raise ValueError(
                "loop.overlap plays with weights that are older than those it trains, and loop.staleness is 0: set it "
                "to 1 or more, or remove overlap."
            )
        engine = self.policy.engine if isinstance(self.policy, TokenVLAConfig) else None
        if isinstance(engine, VLLMConfig) and engine.sleep:
            raise ValueError("policy.engine.sleep: the engine cannot sleep and act. Remove it or loop.overlap.")

    def _act_batch_fits(self) -> None:
        rows, asked = self.env.num_envs, self.loop.act_batch
        if isinstance(self.env, TabletopConfig | ProcessEnvConfig) and self.env.double_buffer:
            rows //= 2
        if asked is not None and rows % asked:
            raise ValueError(
                f"loop.act_batch {asked} does not divide the {rows} members that the policy acts for at once."
            )

    def _learner_fits(self) -> None:
        is_torch = self.policy.backend == "torch"
        if self.learner.sharding == "fsdp" and not is_torch:
            raise ValueError(f"learner.sharding fsdp is for torch policies, not {self.policy.type}. Remove the key.")
        if not self.algorithm.anchor_coef:
            return
        if self.warm_start is None:
            raise ValueError(
                "algorithm.anchor_coef needs demonstrations: add warm_start with data or collect, or set it to 0."
            )
        size, micro = self.algorithm.anchor_batch, self.learner.micro_batches
        if size % micro:
            raise ValueError(f"algorithm.anchor_batch {size} does not split into {micro} micro-batches.")

    def _reward_fits(self, group: int) -> None:
        parts, learned = parts_of(self.reward), learned_part(self.reward)
        if any(isinstance(part, PixelDistanceConfig) for part in parts) and not isinstance(self.env, PointReachConfig):
            raise ValueError("reward pixel_distance reads the dots of env point_reach; choose another reward.")
        if learned is not None and "demonstrations" in learned.outcomes and self.warm_start is None:
            raise ValueError(
                "reward.outcomes names demonstrations: add warm_start with data or collect, or use [labeller] alone."
            )
        if learned is not None and learned.initial_episodes % group:
            raise ValueError(
                f"reward.initial_episodes {learned.initial_episodes} does not split into groups of {group}."
            )
        if isinstance(self.reward, CompositeRewardConfig) and self.reward.reference_episodes % group:
            raise ValueError(
                f"reward.reference_episodes {self.reward.reference_episodes} does not split into groups of {group}."
            )
        if self.audited:
            check_audit(self.reward)
        check_monitor(self)

    def _octo_sees(self, policy: OctoConfig, env: TabletopConfig) -> None:
        unit = policy.stem.patch_size if isinstance(policy.stem, SmallStemConfig) else 4
        for pixels in (env.image_size, *policy.image_sizes.values()):
            if pixels % unit:
                raise ValueError(f"image size {pixels} is not a multiple of the {unit} pixels of policy.stem.")
        longest = {"reach": 7, "push": 8, "pick_place": 12}[env.task]
        if policy.language_tokens < longest:
            raise ValueError(f"policy.language_tokens {policy.language_tokens}, but {env.task} says {longest} words.")


def load_config(path: Path) -> RunConfig:
    """Read a YAML run. Raises ValueError with the key and the nearest known name on any mistake."""
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
        raise ValueError(f"{path} holds a {type(data).__name__}; a run is a mapping of sections (env, policy, ...).")
    return parse_config(data, source=str(path))


def parse_config(data: dict[str, Any], *, source: str) -> RunConfig:
    try:
        return RunConfig.model_validate(data)
    except ValidationError as error:
        raise ValueError(explain(error, source)) from None


def explain(error: ValidationError, source: str) -> str:
    """One line per mistake, with a suggestion for unknown keys."""
    lines = []
    for item in error.errors():
        # Discriminated unions put the tag (the `type`) into the location; it is not a key of the file.
        where = ".".join(str(p) for p in item["loc"]) or "together"
        if item["type"] == "extra_forbidden":
            near = difflib.get_close_matches(str(item["loc"][-1]), _known_keys(item["loc"][:-1]), n=1, cutoff=0.5)
            hint = (
                f"; did you mean {near[0]}?" if near else f"; known here: {', '.join(_known_keys(item['loc'][:-1]))}."
            )
            lines.append(f"{where}: unknown key{hint}")
        elif item["type"] == "union_tag_not_found":
            types = {m.model_fields["type"].default for m in _options(item["loc"])}
            lines.append(f"{where}: has no type; add type: one of {', '.join(sorted(types))}.")
        else:
            message = item["msg"].removeprefix("Value error, ")
            got = "" if item["type"] == "value_error" else f" (got {item['input']!r})"
            lines.append(f"{where}: {message}{got}")
    return f"{source}: " + "; ".join(lines)


def _known_keys(location: tuple[str | int, ...]) -> list[str]:
    """Field names of the models at a location of a validation error; the tag of a union is a part of the location."""
    return sorted({name for m in _options(location) for name in m.model_fields})


def _options(location: tuple[str | int, ...]) -> list[type[Model]]:
    """The models that may stand at a location."""
    models: list[type[Model]] = [RunConfig]
    for part in location:
        tagged = [m for m in models if "type" in m.model_fields and m.model_fields["type"].default == part]
        fields = [m.model_fields[str(part)] for m in models if part in m.model_fields]
        models = tagged or [nested for field in fields for nested in models_of(field.annotation)] or models
    return models


def models_of(annotation: Any) -> list[type[Model]]:
    """The models that a field of this type may hold."""
    found = [annotation] if isinstance(annotation, type) and issubclass(annotation, Model) else []
    return found + [model for argument in get_args(annotation) for model in models_of(argument)]


def validate_again(config: RunConfig) -> RunConfig:
    """Check a config that was changed by flags, with the same messages as a file."""
    return parse_config(config.model_dump(), source="command line")
