"""Parameters, memory and computation of an Octo run, from its config (and the folder's config.json).

All of it is an estimate: counts of ``policies/octo/cost.py`` times what the loop does. Loads neither torch, jax nor
mujoco. Units: MB and GB are 2**20 and 2**30 bytes.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vla_rlaif.config import RunConfig
from vla_rlaif.env_config import TabletopConfig
from vla_rlaif.policies.octo.cost import OctoCost
from vla_rlaif.policies.octo.recipe import adopted_spec, scratch_spec
from vla_rlaif.policies.octo.spec import DiffusionSpec, LanguageSpec, ModelSpec
from vla_rlaif.policy_config import OctoCheckpointConfig, OctoConfig, OctoSettings
from vla_rlaif.reward_config import learned_part
from vla_rlaif.tune_config import HeadTuning, LoraTuning

FLOAT = 4  # bytes
CAMERAS = ("primary", "wrist")  # of the tabletop family
STATE_DIM, ACTION_DIM = 8, 7
# Dense tensor-core peaks of NVIDIA's data sheets in TFLOP/s: TF32, which JAX uses for float32, and bfloat16.
GPUS = {"H100 SXM": (494, 989), "A100": (156, 312), "RTX 4090": (82, 165)}
SUSTAINED = 0.2  # share of the peak that is assumed; not measured
PUBLISHED_PIXELS = {"image_primary": 256, "image_wrist": 128}  # of the Octo 1.0 and 1.5 checkpoints
# T5 v1.0: width, size of a head, heads, hidden width, layers; a vocabulary of 32,128.
T5_SIZES = {"t5-small": (512, 64, 8, 2048, 6), "t5-base": (768, 64, 12, 3072, 12), "t5-large": (1024, 64, 16, 4096, 24)}


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes on one GPU that acts and learns."""

    acting: int  # the acting copy of all weights
    frozen: int  # the learner's copy of what is not trained
    trained: int  # weights, running average, reference
    optimizer: int  # gradient and two Adam moments
    activations: int  # of one micro-batch
    batch: int  # prepared inputs of a whole step
    forward: int  # of all episodes at once

    @property
    def total(self) -> int:
        """Acting and learning take turns, so the larger of their working memories counts."""
        kept = self.acting + self.frozen + self.trained + self.optimizer
        return kept + max(self.activations + self.batch, self.forward)


@dataclass(frozen=True, kw_only=True)
class Compute:
    """Floating point operations."""

    decision: int  # pixels to action, for one episode
    update: int  # a decision in all epochs of a step
    acting: int  # of the whole run, evaluation included
    learning: int
    warm_start: int


def octo_rows(config: RunConfig, env: TabletopConfig) -> list[tuple[str, str]]:
    policy = config.policy
    assert isinstance(policy, OctoConfig | OctoCheckpointConfig)
    if isinstance(policy, OctoCheckpointConfig) and not (policy.folder / "config.json").exists():
        return [("policy", f"not estimated: there is no {policy.folder / 'config.json'} yet")]
    cost = octo_cost(policy, env)
    counts, memory, compute = cost.parameters(), octo_memory(config, env, cost), octo_compute(config, env, cost)
    parts = ", ".join(f"{name} {count:,}" for name, count in counts.items())
    frames = env.num_envs * (env.max_steps // env.chunk + 1) * len(CAMERAS) * 3 * env.image_size**2
    rows = [
        ("parameters", f"{sum(counts.values()):,} ({parts})"),
        ("trained", f"{trained_parameters(policy, cost):,} ({policy.tune.type})"),
        *_language_rows(policy),
        ("GPU memory, weights", f"{mb(memory.acting)} acting, {mb(memory.frozen + memory.trained)} learning"),
        ("GPU memory, optimiser", f"{mb(memory.optimizer)} (gradient and two moments)"),
        ("GPU memory, activations", f"{mb(memory.activations)} for {_micro_rows(config)} decisions at once"),
        ("GPU memory, batch", f"{mb(memory.batch)} (inputs of the decisions of a step)"),
        ("GPU memory, acting", f"{mb(memory.forward)} for {env.num_envs} episodes at once"),
        ("GPU memory, in all", f"{mb(memory.total)} on one GPU, {policy.compute}; within a factor of 2"),
    ]
    if _imitates(config):
        rows.append(("GPU memory, warm start", f"{mb(warm_start_memory(config, cost))}; more micro_batches take less"))
    return [
        *rows,
        ("host memory, frames", f"{mb(frames)} (the pictures of a step)"),
        ("computation", f"{compute.decision / 1e9:.2f} GFLOP a decision, {compute.update / 1e9:.2f} to learn from it"),
        ("computation, the run", _run_text(compute)),
        ("time of that on a GPU", _time_text(compute, policy)),
    ]


def octo_cost(policy: OctoConfig | OctoCheckpointConfig, env: TabletopConfig) -> OctoCost:
    """Raises ValueError if the folder's config.json is not one that can be read."""
    if isinstance(policy, OctoConfig):
        return OctoCost(
            model=scratch_spec(policy, cameras=CAMERAS, chunk=env.chunk, action_dim=ACTION_DIM),
            window=policy.window,
            pixels={f"image_{c}": policy.image_sizes.get(c, env.image_size) for c in CAMERAS},
            state_dim=STATE_DIM,
            language=(policy.language_tokens, policy.language_dim),
        )
    folder = json.loads((policy.folder / "config.json").read_text())
    model = ModelSpec.from_official(folder["model"])
    known = PUBLISHED_PIXELS | _folder_pixels(folder)
    kwargs = (folder.get("text_processor") or {}).get("kwargs", {})
    words = kwargs.get("tokenizer_kwargs", {}).get("max_length", 16)
    return OctoCost(
        model=adopted_spec(policy, model, tuple(policy.cameras), chunk=env.chunk, action_dim=ACTION_DIM),
        window=policy.window,
        pixels={key: known.get(key, policy.image_sizes.get(key, env.image_size)) for key in policy.cameras},
        state_dim=STATE_DIM,
        language=(words, t5_sizes(policy.folder, model)[1]),
    )


def t5_sizes(folder: Path, model: ModelSpec) -> tuple[int, int, int, int, int, int]:
    """Vocabulary, width, size of a head, heads, hidden width, layers of the folder's language encoder."""
    name = next((part.encoder for _, part in model.task_tokenizers if isinstance(part, LanguageSpec)), None)
    own = folder / str(name) / "config.json"
    if own.exists():
        t5 = json.loads(own.read_text())
        names = ("vocab_size", "d_model", "d_kv", "num_heads", "d_ff", "num_layers")
        vocabulary, width, head, heads, hidden, layers = (int(t5[key]) for key in names)
        return vocabulary, width, head, heads, hidden, layers
    if name not in T5_SIZES:
        raise ValueError(f"language encoder {name!r} has unknown sizes; known are {', '.join(T5_SIZES)}, or add {own}.")
    return 32_128, *T5_SIZES[name]


def t5_parameters(vocabulary: int, width: int, head: int, heads: int, hidden: int, layers: int) -> int:
    """Of the encoder: no biases, one table of relative positions."""
    layer = 4 * width * head * heads + 2 * width * hidden + 2 * width
    return vocabulary * width + layers * layer + width + 32 * heads


def trained_parameters(policy: OctoSettings, cost: OctoCost) -> int:
    counts = cost.parameters()
    if isinstance(policy.tune, HeadTuning):
        return counts["head"]
    if isinstance(policy.tune, LoraTuning):
        return counts["head"] + cost.adapter_parameters(policy.tune.rank, _tuned_blocks(policy, cost))
    return sum(counts.values())


def octo_memory(config: RunConfig, env: TabletopConfig, cost: OctoCost) -> Memory:
    policy = config.policy
    assert isinstance(policy, OctoSettings)
    counts, trained = cost.parameters(), trained_parameters(policy, cost)
    adapters = trained - counts["head"] if isinstance(policy.tune, LoraTuning) else 0
    everything = sum(counts.values()) + counts["head"] + adapters  # the head has a frozen copy
    decisions = env.num_envs * (env.max_steps // env.chunk)
    return Memory(
        acting=FLOAT * everything,
        frozen=FLOAT * (everything - trained),
        trained=FLOAT * 3 * trained,
        optimizer=FLOAT * 3 * trained,
        activations=activation_bytes(policy, cost, _micro_rows(config)),
        batch=decisions * _input_bytes(policy, cost),
        forward=env.num_envs * _forward_bytes(policy, cost),
    )


def activation_bytes(policy: OctoSettings, cost: OctoCost, rows: int) -> int:
    """What the gradient of a micro-batch keeps, and the kernels with their adapters added in."""
    size, first = _dtype_bytes(policy), cost.model.transformer.num_layers - _tuned_blocks(policy, cost)
    numbers, weights = cost.block_kept(first)
    merged = FLOAT * _tuned_blocks(policy, cost) * cost.block_parameters() if isinstance(policy.tune, LoraTuning) else 0
    tokens = cost.encode_kept() if policy.tune.type == "full" else 0
    # The softmax is float32 in any compute dtype; its result is kept in both.
    kept = size * (numbers + tokens) + (FLOAT + size) * weights // 2 + FLOAT * policy.tuned_steps * cost.head_kept()
    return rows * kept + merged


def octo_compute(config: RunConfig, env: TabletopConfig, cost: OctoCost) -> Compute:
    """Every episode is taken to last to its end; the first decision of a group, which is shared, counts for each."""
    policy, loop = config.policy, config.loop
    assert isinstance(policy, OctoSettings)
    head = cost.model.head
    assert isinstance(head, DiffusionSpec)
    per_episode, trunk = env.max_steps // env.chunk, cost.encode_flops() + cost.block_flops()
    decision = trunk + cost.pooling_flops() + head.diffusion_steps * cost.head_flops()
    first = cost.model.transformer.num_layers - _tuned_blocks(policy, cost)
    tokens = cost.encode_flops() if policy.tune.type == "full" else 0
    forward = tokens + cost.block_flops(first) + cost.pooling_flops() + policy.tuned_steps * cost.head_flops()
    frozen = trunk - cost.block_flops(first) if isinstance(policy.tune, LoraTuning) else 0
    # Log-probabilities of the actor, means of the reference, then a forward and a backward pass an epoch.
    update = frozen + (2 + 3 * config.learner.epochs) * forward
    learned = loop.steps * env.num_envs * per_episode
    judged = -(-loop.steps // loop.validate_every) * loop.validation_episodes + 2 * config.evaluate.episodes
    reward = learned_part(config.reward)
    looked = 0 if reward is None else loop.steps * env.num_envs + reward.initial_episodes
    warm = 0
    if _imitates(config):
        assert config.warm_start is not None
        imitate = config.warm_start.imitate
        warm = 3 * imitate.steps * imitate.batch * (trunk + imitate.samples * cost.head_flops())
    return Compute(
        decision=decision,
        update=update,
        acting=(learned + judged * per_episode) * decision + looked * trunk,
        learning=learned * update,
        warm_start=warm,
    )


def warm_start_memory(config: RunConfig, cost: OctoCost) -> int:
    """Imitation trains the whole network: weights, average, gradient, two moments, and a micro-batch's activations."""
    assert config.warm_start is not None
    assert isinstance(config.policy, OctoSettings)
    imitate, size = config.warm_start.imitate, _dtype_bytes(config.policy)
    numbers, weights = cost.block_kept()
    kept = size * (numbers + cost.encode_kept()) + (FLOAT + size) * weights // 2
    rows = imitate.batch // imitate.micro_batches
    return FLOAT * 6 * sum(cost.parameters().values()) + rows * (kept + FLOAT * imitate.samples * cost.head_kept())


def mb(size: int) -> str:
    return f"{size / 2**20:,.0f} MB"


def minutes(seconds: float) -> str:
    """Two digits: more would promise too much."""
    if seconds < 60:
        return "under 1 min"
    return f"{seconds / 60:.0f} min" if seconds < 100 * 60 else f"{seconds / 3600:.1f} h"


def _imitates(config: RunConfig) -> bool:
    return config.warm_start is not None and config.warm_start.checkpoint is None


def _micro_rows(config: RunConfig) -> int:
    return config.learner.minibatch // config.learner.micro_batches


def _tuned_blocks(policy: OctoSettings, cost: OctoCost) -> int:
    num = cost.model.transformer.num_layers
    if isinstance(policy.tune, LoraTuning):
        return policy.tune.blocks or num
    return 0 if isinstance(policy.tune, HeadTuning) else num


def _dtype_bytes(policy: OctoSettings) -> int:
    return 2 if policy.compute == "bfloat16" else FLOAT


def _input_bytes(policy: OctoSettings, cost: OctoCost) -> int:
    """Of one decision, as it waits for its minibatch: a readout, the tokens above the frozen blocks, or the images."""
    width, size = cost.model.token_embedding_size, _dtype_bytes(policy)
    if isinstance(policy.tune, HeadTuning):
        return FLOAT * width
    if isinstance(policy.tune, LoraTuning):
        return size * cost.num_tokens * width
    return 3 * policy.window * sum(pixels**2 for pixels in cost.pixels.values())


def _forward_bytes(policy: OctoSettings, cost: OctoCost) -> int:
    """Of one episode: the attention weights twice, the residual, and the hidden layer, of one block."""
    model, length, size = cost.model, cost.num_tokens, _dtype_bytes(policy)
    weights = model.transformer.num_attention_heads * length**2
    return (FLOAT + size) * weights + size * length * (4 * model.token_embedding_size + 2 * model.transformer.mlp_dim)


def _folder_pixels(folder: Mapping[str, Any]) -> dict[str, int]:
    """Image sizes that the folder's training script kept, if it did: they are not part of the model's section."""
    sizes = folder.get("dataset_kwargs", {}).get("frame_transform_kwargs", {}).get("resize_size", {})
    return {f"image_{name}": int(size[0]) for name, size in sizes.items()}


def _language_rows(policy: OctoConfig | OctoCheckpointConfig) -> list[tuple[str, str]]:
    if isinstance(policy, OctoConfig):
        return []
    model = ModelSpec.from_official(json.loads((policy.folder / "config.json").read_text())["model"])
    count = t5_parameters(*t5_sizes(policy.folder, model))
    return [("language encoder", f"{count:,} parameters, on the host, read once for the sentences of the env")]


def _run_text(compute: Compute) -> str:
    parts = {"acting": compute.acting, "updates": compute.learning, "warm start": compute.warm_start}
    shown = ", ".join(f"{name} {value / 1e15:.3g}" for name, value in parts.items() if value)
    return f"{sum(parts.values()) / 1e15:.3g} PFLOP ({shown}), if no episode ends early"


def _time_text(compute: Compute, policy: OctoSettings) -> str:
    total, column = compute.acting + compute.learning + compute.warm_start, int(policy.compute == "bfloat16")
    times = [f"{name} {minutes(total / (SUSTAINED * peaks[column] * 1e12))}" for name, peaks in GPUS.items()]
    kind = "bfloat16" if column else "TF32"
    return f"{', '.join(times)} at {SUSTAINED:.0%} of the {kind} peak (assumed, not measured); simulation comes on top"
