"""The run as frozen, strictly validated models. A run is a YAML file that fills them; `build.py` makes objects of them.

Light on purpose: importing this file must not import torch, jax, ray or mujoco. Invalid combinations cannot be written,
so nothing downstream re-checks them.
"""

import difflib
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

Positive = Annotated[int, Field(gt=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]


class Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=False)


class TabletopConfig(Model):
    """MuJoCo tabletop family: 7-D end-effector delta actions, a primary and a wrist camera."""

    type: Literal["tabletop"] = "tabletop"
    task: Literal["reach", "push", "pick_place"] = "reach"
    num_envs: Positive = 128
    image_size: Annotated[int, Field(ge=16)] = 64  # pixels
    chunk: Positive = 4  # actions executed per decision
    max_steps: Positive = 16  # env steps per episode
    success_radius: Annotated[float, Field(gt=0)] = 0.03  # metres
    renderer: Literal["egl", "osmesa", "ray"] = "egl"
    threads: Positive = 2  # physics threads, and as many render threads

    @model_validator(mode="after")
    def _whole_chunks(self) -> "TabletopConfig":
        if self.max_steps % self.chunk:
            raise ValueError(f"max_steps {self.max_steps} is not a multiple of chunk {self.chunk}.")
        return self


class PointReachConfig(Model):
    """Point reaching in the plane, NumPy only: for tests and notebooks."""

    type: Literal["point_reach"] = "point_reach"
    num_envs: Positive = 64
    max_decisions: Positive = 6
    radius: Annotated[float, Field(gt=0)] = 0.3


class CustomEnvConfig(Model):
    """An env from the user's own code: a callable `package.module:name` that returns a VectorEnv."""

    type: Literal["custom"] = "custom"
    factory: str
    num_envs: Positive = 64
    options: dict[str, Any] = {}


EnvConfig = TabletopConfig | PointReachConfig | CustomEnvConfig


class SmallStemConfig(Model):
    """Octo's own image stem: four strided convolutions, one token a patch."""

    type: Literal["small16"] = "small16"
    features: tuple[int, ...] = (32, 96, 192, 384)
    groups: Positive = 32
    embedding: Positive = 512
    patch_size: Positive = 16  # pixels
    goal_images: bool = True  # the input has room for a goal image, as upstream

    @model_validator(mode="after")
    def _whole_groups(self) -> "SmallStemConfig":
        if any(f % self.groups for f in self.features):
            raise ValueError(f"features {self.features} do not split into {self.groups} groups.")
        return self


class KeypointStemConfig(Model):
    """A shallow CNN read as key points, one token a camera: learns where things are from a few hundred episodes."""

    type: Literal["keypoints"] = "keypoints"
    channels: Positive = 32


StemConfig = Annotated[SmallStemConfig | KeypointStemConfig, Field(discriminator="type")]


class HeadTuning(Model):
    """Reinforcement learning changes the action head only; the trunk runs once a decision, when acting."""

    type: Literal["head"] = "head"


class LoraTuning(Model):
    """The head, and low-rank adapters on the kernels of the last transformer blocks."""

    type: Literal["lora"] = "lora"
    rank: Positive = 8
    alpha: Annotated[float, Field(gt=0)] = 16.0  # the update is scaled by alpha / rank
    blocks: Positive | None = None  # how many, from the last; null: all. The blocks below run once a batch


class FullTuning(Model):
    """Everything but the language encoder."""

    type: Literal["full"] = "full"


TuneConfig = Annotated[HeadTuning | LoraTuning | FullTuning, Field(discriminator="type")]


class OctoSettings(Model):
    """How an Octo acts and what of it is trained: free to differ from the run that made a checkpoint."""

    window: Positive = 1  # frames seen by a decision; the one before is one decision older
    clip_prediction: Annotated[float, Field(gt=0)] | None = None  # bound of the implied clean action; null is upstream
    tuned_steps: Positive = 10  # the last k denoising steps are trained; the first run on a frozen head
    std_floor: Annotated[float, Field(ge=0)] = 0.1  # normalised action units; 0 is upstream's sampler
    ddim_steps: Annotated[int, Field(ge=3)] | None = None  # deterministic acting by DDIM; null: the mean path
    tune: TuneConfig = HeadTuning()
    logp_reduction: Literal["mean", "sum"] = "mean"  # over the action dims of a denoising step
    compute: Literal["float32", "bfloat16"] = "float32"  # of the trunk; head and log-probs are always float32


class OctoConfig(OctoSettings):
    """Octo (https://arxiv.org/abs/2405.12213) from scratch, with a learned word table for language.

    The defaults are a tiny one; octo_small_reach.yaml has the sizes of Octo-Small.
    """

    type: Literal["octo"] = "octo"
    token_dim: Positive = 64
    num_layers: Positive = 2
    num_heads: Positive = 2
    mlp_dim: Positive = 128
    stem: StemConfig = KeypointStemConfig()
    image_sizes: dict[str, Annotated[int, Field(ge=16)]] = {}  # pixels by camera, resized to; default: the env's
    language_tokens: Positive = 12
    language_dim: Positive = 32
    proprio: bool = True
    repeat_task_tokens: bool = True
    max_horizon: Positive = 2
    head_dim: Positive = 128
    head_blocks: Positive = 2
    time_dim: Positive = 32
    diffusion_steps: Annotated[int, Field(ge=2)] = 10
    max_action: Annotated[float, Field(gt=0)] = 5.0  # bound of every denoising state, normalised action units
    clip_prediction: Annotated[float, Field(gt=0)] | None = 3.0
    tuned_steps: Positive = 5

    @model_validator(mode="after")
    def _sizes_fit(self) -> "OctoConfig":
        if self.tuned_steps > self.diffusion_steps:
            raise ValueError(f"tuned_steps {self.tuned_steps} exceeds diffusion_steps {self.diffusion_steps}.")
        if self.token_dim % self.num_heads:
            raise ValueError(f"token_dim {self.token_dim} does not split into {self.num_heads} heads.")
        if self.window > self.max_horizon:
            raise ValueError(f"window {self.window} exceeds max_horizon {self.max_horizon}.")
        if isinstance(self.tune, LoraTuning) and (self.tune.blocks or 0) > self.num_layers:
            raise ValueError(f"tune.blocks {self.tune.blocks} exceeds num_layers {self.num_layers}.")
        return self


class OctoCheckpointConfig(OctoSettings):
    """An official Octo folder (config.json, dataset_statistics.json, <step>/default), adapted to the env at load.

    Sizes come from the folder. What the env needs and the folder lacks is an error unless ``allow_new`` names it.
    """

    type: Literal["octo_checkpoint"] = "octo_checkpoint"
    folder: Path
    step: int | None = None  # null: the newest
    dataset: str | None = None  # whose statistics unnormalise actions; null: demonstrations', or the only ones there
    tokenizer: Path | None = None  # folder of T5's tokenizer; null: beside the checkpoint, or the hub
    cameras: dict[str, str] = {"image_primary": "primary", "image_wrist": "wrist"}  # observation key: camera of the env
    image_sizes: dict[str, Annotated[int, Field(ge=16)]] = {}  # pixels by observation key, of keys the folder lacks
    proprio: bool = False  # add proprioception tokens if the folder has none
    new_head: bool = False  # a freshly initialised diffusion head for the env's chunk and action dims
    allow_new: tuple[str, ...] = ()  # patterns of parameters that may start from random values
    skip: tuple[str, ...] = ()  # patterns of the folder's parameters that may be left behind


class GaussianConfig(Model):
    """Linear Gaussian policy on the state, on either backend: the smallest one, for tests and notebooks."""

    type: Literal["gaussian"] = "gaussian"
    backend: Literal["jax", "torch"] = "jax"
    std: Annotated[float, Field(gt=0)] = 0.5

    @property
    def logp_reduction(self) -> Literal["sum"]:
        return "sum"


class CustomPolicyConfig(Model):
    """A policy from the user's own code: `package.module:name`, called with (spec, seed=) and ``options``."""

    type: Literal["custom"] = "custom"
    factory: str
    backend: Literal["jax", "torch"] = "jax"
    logp_reduction: Literal["mean", "sum"] = "sum"  # what its score() does: decides which clip range fits
    options: dict[str, Any] = {}


PolicyConfig = OctoConfig | OctoCheckpointConfig | GaussianConfig | CustomPolicyConfig


class CollectConfig(Model):
    """Demonstrations of the scripted expert under action noise."""

    episodes: Positive = 256
    noise: Annotated[float, Field(ge=0)] = 0.1  # std of the noise on the executed translation, action units
    scatter_steps: Annotated[int, Field(ge=0)] = 2  # random steps before the demonstration starts, at most
    label_noise: Annotated[float, Field(ge=0)] = 0.0  # std of an error in the demonstrator's own actions
    max_steps: Positive = 12  # env steps recorded per demonstration


class ImitateConfig(Model):
    """Supervised warm start on demonstrations."""

    steps: Positive = 1000
    batch: Positive = 128
    lr: Annotated[float, Field(gt=0)] = 1e-3
    samples: Positive = 4  # (time, noise) draws per trunk pass
    micro_batches: Positive = 1  # gradient accumulation inside a batch
    devices: Positive | None = None  # local ones; null: all. They share the rows of a micro-batch
    warmup: Annotated[int, Field(ge=0)] = 0  # steps until lr is reached, linearly; then it falls along a cosine
    weight_decay: Annotated[float, Field(ge=0)] = 1e-4  # AdamW's, of kernels only
    frozen: tuple[str, ...] = ()  # fnmatch patterns of parameter names that stay as they are

    @model_validator(mode="after")
    def _sizes_fit(self) -> "ImitateConfig":
        if self.batch % self.micro_batches:
            raise ValueError(f"batch {self.batch} does not split into {self.micro_batches} micro-batches.")
        if self.warmup >= self.steps:
            raise ValueError(f"warmup {self.warmup} leaves none of the {self.steps} steps; use fewer than steps.")
        return self


class WarmStartConfig(Model):
    """Where the start policy comes from: demonstrations made here, or a checkpoint on disk."""

    checkpoint: Path | None = None
    collect: CollectConfig = CollectConfig()
    imitate: ImitateConfig = ImitateConfig()


class PolicyEncoderConfig(Model):
    """Frozen features of the start policy."""

    type: Literal["policy"] = "policy"


class CnnEncoderConfig(Model):
    """A small CNN trained with the reward heads."""

    type: Literal["cnn"] = "cnn"


class PretrainedEncoderConfig(Model):
    """EfficientNet-Lite0 from a pip package (extra `encoders`)."""

    type: Literal["pretrained"] = "pretrained"


EncoderConfig = PolicyEncoderConfig | CnnEncoderConfig | PretrainedEncoderConfig


class OracleConfig(Model):
    """Simulator ground truth with B-Pref's teacher errors (https://arxiv.org/abs/2111.03026)."""

    type: Literal["oracle"] = "oracle"
    beta: float | None = None  # None: perfectly rational; otherwise Boltzmann
    mistake: Fraction = 0.0  # probability of a flipped label
    equal_threshold: Annotated[float, Field(ge=0)] = 0.02  # closer than this is a tie
    skip_threshold: float | None = None  # both below this: skipped
    successes_tie: bool = True  # two successes are equally good


class PreferenceRewardConfig(Model):
    """Bradley-Terry ensemble learned from preferences, refreshed during the run within a label budget."""

    type: Literal["preference"] = "preference"
    encoder: EncoderConfig = Field(default_factory=PolicyEncoderConfig, discriminator="type")
    labeller: OracleConfig = OracleConfig()
    budget: Positive = 1500  # labels in the whole run
    initial_labels: Positive = 400
    initial_episodes: Positive = 512
    labels_per_refresh: Positive = 40
    refresh_every: Positive = 4  # steps
    within_group: Fraction = 0.5  # share of the pairs that share their start state
    members: Positive = 3
    hidden: tuple[int, ...] = (128, 128)
    fit_steps: Positive = 200
    lr: Annotated[float, Field(gt=0)] = 1e-3
    weight_decay: Annotated[float, Field(ge=0)] = 1e-2
    input_noise: Annotated[float, Field(ge=0)] = 0.1
    held_out: Annotated[float, Field(gt=0, lt=0.5)] = 0.15
    recent_share: Fraction = 0.5  # of each fit minibatch that comes from the newest pairs
    frames: Literal["last", "all"] = "last"
    combine: Literal["mean", "min", "pessimistic"] = "mean"

    @model_validator(mode="after")
    def _within_budget(self) -> "PreferenceRewardConfig":
        if self.initial_labels > self.budget:
            raise ValueError(f"initial_labels {self.initial_labels} exceeds the label budget {self.budget}.")
        return self


class PythonRewardConfig(Model):
    """The user's own reward: `package.module:function`, f(episodes) -> [N] floats."""

    type: Literal["python"] = "python"
    function: str


class SuccessRewardConfig(Model):
    """Simulator success: a baseline, not a learned reward."""

    type: Literal["success"] = "success"


class PixelDistanceConfig(Model):
    """Reads the distance of two dots from the last frame of point_reach: for tests."""

    type: Literal["pixel_distance"] = "pixel_distance"


RewardConfig = PreferenceRewardConfig | PythonRewardConfig | SuccessRewardConfig | PixelDistanceConfig


class GRPOConfig(Model):
    """Group-relative policy optimisation (https://arxiv.org/abs/2402.03300)."""

    type: Literal["grpo"] = "grpo"
    group_size: Annotated[int, Field(ge=2)] = 8
    clip_low: Annotated[float, Field(gt=0)] = 0.02
    clip_high: Annotated[float, Field(gt=0)] = 0.02
    kl_coef: Annotated[float, Field(ge=0)] | None = None  # None: 0.02 for a learned reward, 0 for simulator success
    scale_by_std: bool = True  # False is Dr. GRPO
    std_floor: Annotated[float, Field(ge=0)] = 0.01  # reward units; groups below it are dead
    normalizer: Literal["constant", "decisions"] = "constant"
    min_valid_share: Fraction = 0.5  # a group with fewer scorable members is dropped


class LearnerConfig(Model):
    lr: Annotated[float, Field(gt=0)] = 2e-4
    epochs: Positive = 4
    minibatch: Positive = 256  # decisions
    micro_batches: Positive = 1  # gradient accumulation inside a minibatch
    devices: Positive | None = None  # local ones, for a jax policy; null: all. They share the rows of a micro-batch
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
    staleness: Annotated[int, Field(ge=0, le=4)] = 1  # updates by which stored groups may be older than the weights
    keep_checkpoints: Annotated[int, Field(ge=2)] = 2


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
    algorithm: GRPOConfig = GRPOConfig()
    learner: LearnerConfig = LearnerConfig()
    loop: LoopConfig = LoopConfig()
    evaluate: EvaluateConfig = EvaluateConfig()

    @property
    def run_dir(self) -> Path:
        return self.out or Path("runs") / f"{self.name}-seed{self.seed}"

    @model_validator(mode="after")
    def _parts_fit(self) -> "RunConfig":
        group, clip = self.algorithm.group_size, max(self.algorithm.clip_low, self.algorithm.clip_high)
        if self.env.num_envs % group:
            raise ValueError(f"env.num_envs {self.env.num_envs} does not split into groups of {group}.")
        # A mean over dims moves ratios by hundredths, a sum by tenths: with the other's clip range, either nothing or
        # everything is clipped (grpo.md, "The reduction and the clip are one validated pair").
        if self.policy.logp_reduction == "mean" and clip > 0.1:
            raise ValueError(f"clip {clip} never binds on averaged log-probs; use at most 0.1 or logp_reduction: sum.")
        if self.policy.logp_reduction == "sum" and min(self.algorithm.clip_low, self.algorithm.clip_high) < 0.05:
            raise ValueError(
                f"clip {clip} clips nearly every summed log-prob; use 0.05 or more, or logp_reduction: mean."
            )
        size, micro = self.learner.minibatch, self.learner.micro_batches
        if size % micro:
            raise ValueError(f"learner.minibatch {size} does not split into {micro} micro-batches.")
        if isinstance(self.policy, OctoConfig) and isinstance(self.env, TabletopConfig):
            self._octo_sees(self.policy, self.env)
        if isinstance(self.reward, PixelDistanceConfig) and not isinstance(self.env, PointReachConfig):
            raise ValueError("reward pixel_distance reads the dots of env point_reach; choose another reward.")
        if not isinstance(self.policy, OctoSettings) and self.warm_start is not None:
            raise ValueError(f"warm_start trains an octo policy, not {self.policy.type}. Remove the section.")
        if isinstance(self.reward, PreferenceRewardConfig):
            self._labels_fit(self.reward, group)
        return self

    def _labels_fit(self, reward: PreferenceRewardConfig, group: int) -> None:
        if reward.initial_episodes % group:
            raise ValueError(
                f"reward.initial_episodes {reward.initial_episodes} does not split into groups of {group}."
            )

    def _octo_sees(self, policy: OctoConfig, env: TabletopConfig) -> None:
        unit = policy.stem.patch_size if isinstance(policy.stem, SmallStemConfig) else 4
        for pixels in (env.image_size, *policy.image_sizes.values()):
            if pixels % unit:
                raise ValueError(f"image size {pixels} is not a multiple of the {unit} pixels of policy.stem.")
        longest = {"reach": 7, "push": 8, "pick_place": 12}[env.task]
        if policy.language_tokens < longest:
            raise ValueError(f"policy.language_tokens {policy.language_tokens}, but {env.task} says {longest} words.")


def kl_coef(config: RunConfig) -> float:
    """The KL weight in force: on by default with a learned reward, off with simulator success."""
    if config.algorithm.kl_coef is not None:
        return config.algorithm.kl_coef
    return 0.0 if config.reward.type == "success" else 0.02


def cautions(config: RunConfig) -> list[str]:
    """What is allowed and probably not meant."""
    found = []
    if config.algorithm.group_size < 4:
        found.append(f"groups of {config.algorithm.group_size}: the advantage is mostly noise; use 4 or more.")
    if config.reward.type in ("preference", "python") and kl_coef(config) == 0:
        found.append("no KL to the start policy with a reward that is not success: watch for reward hacking.")
    return found


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
        models = tagged or [nested for field in fields for nested in _models(field.annotation)] or models
    return models


def _models(annotation: Any) -> list[type[Model]]:
    found = [annotation] if isinstance(annotation, type) and issubclass(annotation, Model) else []
    return found + [model for argument in get_args(annotation) for model in _models(argument)]


def validate_again(config: RunConfig) -> RunConfig:
    """Check a config that was changed by flags, with the same messages as a file."""
    return parse_config(config.model_dump(), source="command line")
