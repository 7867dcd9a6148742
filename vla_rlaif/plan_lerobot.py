"""Parameters, memory and computation of a run with a LeRobot policy, from its config and the names and shapes in its
folder. All of it is an estimate; neither torch, LeRobot nor mujoco is loaded. Units: MB and GB are 2**20 and 2**30
bytes.

A shape is that of a parameter under the name that this system gives it, ``policy.`` and LeRobot's.
"""

import json
import math
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from vla_rlaif.config import RunConfig
from vla_rlaif.env_config import TabletopConfig
from vla_rlaif.lerobot_config import (
    AdapterTuning,
    HybridSampler,
    LeRobotConfig,
    LeRobotSettings,
    NoiseSampler,
    SmolVLAConfig,
    TinyVLM,
)
from vla_rlaif.policies.lerobot.layout import LAYOUTS, POLICY, Groups, matching

Shapes = Mapping[str, tuple[int, ...]]
FLOAT = 4  # bytes
VOCABULARY = 261  # bytes and special tokens of the tokenizer made here
STATE_DIM, ACTION_DIM, CAMERAS = 8, 7, 2  # of the tabletop family
VLM = "model.vlm_with_expert."


@dataclass(frozen=True, kw_only=True)
class Model:
    """What a config names, once its folder has been looked into."""

    kind: str  # of LAYOUTS
    shapes: Shapes
    steps: int  # of denoising
    chunk: int
    language: int  # tokens


@dataclass(frozen=True, kw_only=True)
class Counts:
    total: int  # parameters, with adapters and noise head
    trained: int
    cached: int  # bytes of the prefix that a decision keeps; 0: it keeps none


def lerobot_rows(config: RunConfig) -> list[tuple[str, str]]:
    """Rows of a plan."""
    policy = config.policy
    assert isinstance(policy, SmolVLAConfig | LeRobotConfig)
    model = _model(config, policy)
    return [("policy", model)] if isinstance(model, str) else _rows(config, policy, model)


def lerobot_counts(config: RunConfig) -> Counts | None:
    """None: they are not known from the config."""
    policy = config.policy
    assert isinstance(policy, SmolVLAConfig | LeRobotConfig)
    model = _model(config, policy)
    return None if isinstance(model, str) else _counts(policy, model)


def _model(config: RunConfig, policy: SmolVLAConfig | LeRobotConfig) -> Model | str:
    """Or why it is not known."""
    if isinstance(policy, LeRobotConfig):
        folder = Path(policy.path).expanduser()
        if not folder.is_dir():
            return f"{policy.path} of the hub; download it (`hf download`) to have it planned"
        values, shapes = json.loads((folder / "config.json").read_text()), shapes_in(folder / "model.safetensors")
        kind, steps = values["type"], values.get("num_steps", values.get("num_inference_steps"))
        chunk, language = values.get("chunk_size", values.get("horizon")), values.get("tokenizer_max_length", 0)
    elif isinstance(policy.vlm, TinyVLM) and isinstance(config.env, TabletopConfig):
        kind, steps, chunk, language = "smolvla", policy.flow_steps, config.env.chunk, policy.language_tokens
        shapes = smolvla_shapes(policy, policy.vlm, ACTION_DIM, STATE_DIM)
    else:
        return "smolvla, not estimated: its sizes are not known from the config"
    if kind not in LAYOUTS:
        return f"{policy.path if isinstance(policy, LeRobotConfig) else kind} is a {kind}: not supported"
    return Model(kind=kind, shapes=shapes, steps=policy.denoising_steps or steps or 1, chunk=chunk, language=language)


def _counts(policy: LeRobotSettings, model: Model) -> Counts:
    both = {**model.shapes, **added_shapes(policy, model.kind, model.shapes)}
    groups = Groups.of([*both], LAYOUTS[model.kind])
    keeps = LAYOUTS[model.kind].prefix_blocks and policy.cache_prefix and policy.tune.type != "full"
    tokens = prefix_tokens(model.shapes, CAMERAS, model.language) if keeps else 0
    return Counts(
        total=numbers(both, both),
        trained=numbers(both, groups.trained(policy.tune)),
        cached=tokens * cached_numbers(model.shapes, model.kind) * FLOAT if keeps else 0,
    )


def _rows(config: RunConfig, policy: LeRobotSettings, model: Model) -> list[tuple[str, str]]:
    kind, shapes, steps, chunk = model.kind, model.shapes, model.steps, model.chunk
    counts = _counts(policy, model)
    groups = Groups.of([*shapes, *added_shapes(policy, kind, shapes)], LAYOUTS[kind])
    stochastic = policy.sampler.steps if isinstance(policy.sampler, HybridSampler) else steps
    width = next((s[0] for n, s in shapes.items() if n.endswith("action_out_proj.weight")), ACTION_DIM)
    trace = (stochastic + 1) * chunk * width * FLOAT
    rows = [
        ("policy", f"{kind}, {counts.total / 1e6:.2f} M parameters, {counts.trained / 1e6:.2f} M trained "
         f"({policy.tune.type})"),
        ("weights", f"{_mb((counts.total + 5 * counts.trained) * FLOAT)}: the policy, of what is trained also average, "
         "reference, gradient and two moments"),
        ("denoising", f"{steps} steps, {stochastic} of them stochastic ({policy.sampler.type}); a trace of "
         f"{trace / 1024:.1f} KB a decision"),
    ]  # fmt: skip
    if not LAYOUTS[kind].prefix_blocks:
        return rows
    tokens = prefix_tokens(shapes, CAMERAS, model.language)
    work_prefix = 2 * tokens * numbers(shapes, groups.used - groups.expert)
    work_steps = 2 * steps * chunk * numbers(shapes, groups.expert)
    rows.append(
        ("work a decision", f"{(work_prefix + work_steps) / 1e9:.3g} GFLOP: prefix of {tokens} tokens "
         f"{work_prefix / 1e9:.3g}, denoising {work_steps / 1e9:.3g}")
    )  # fmt: skip
    if counts.cached and isinstance(config.env, TabletopConfig):
        decisions = config.env.num_envs * config.env.max_steps // config.env.chunk
        kept = _mb(decisions * counts.cached)
        rows.append(("prefixes of a step", f"{kept} on the device (cache_prefix: false keeps none)"))
    return rows


def shapes_in(path: Path) -> dict[str, tuple[int, ...]]:
    """From the header of a safetensors file: its length in 8 bytes, then JSON."""
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(length))
    return {POLICY + name: tuple(entry["shape"]) for name, entry in header.items() if name != "__metadata__"}


def numbers(shapes: Shapes, names: Iterable[str]) -> int:
    return sum(math.prod(shapes[name]) for name in names if name in shapes)


def added_shapes(policy: LeRobotSettings, kind: str, shapes: Shapes) -> dict[str, tuple[int, ...]]:
    """Of what this system puts beside LeRobot's parameters: adapters and the noise head."""
    added: dict[str, tuple[int, ...]] = {}
    if isinstance(policy.tune, AdapterTuning):
        for name in matching(shapes, [POLICY + pattern for pattern in LAYOUTS[kind].expert]):
            stem = name.removesuffix(".weight")
            if len(shapes[name]) == 2 and stem.rpartition(".")[2] in policy.tune.targets:
                rows, columns = shapes[name]
                added[f"{stem}.lora_A.default.weight"] = (policy.tune.rank, columns)
                added[f"{stem}.lora_B.default.weight"] = (rows, policy.tune.rank)
    if isinstance(policy.sampler, NoiseSampler):
        width, hidden = shapes[f"{POLICY}model.action_out_proj.weight"][0], policy.sampler.hidden
        added |= {"noise.read.weight": (hidden, 2 * width + 2), "noise.read.bias": (hidden,)}
        added |= {"noise.write.weight": (width, hidden), "noise.write.bias": (width,)}
    return added


def prefix_tokens(shapes: Shapes, cameras: int, language: int) -> int:
    """Image tokens of all cameras, words, and SmolVLA's state."""
    ((patches, _),) = [s for n, s in shapes.items() if n.endswith("position_embedding.weight")]
    merged = [s for n, s in shapes.items() if n.endswith("modality_projection.proj.weight")]
    vision = next(s[0] for n, s in shapes.items() if n.endswith("patch_embedding.bias"))
    each = patches * vision // merged[0][1] if merged else patches
    return cameras * each + language + len(merged)


def cached_numbers(shapes: Shapes, kind: str) -> int:
    """Keys and values of one prefix token, all layers."""
    blocks = POLICY + (LAYOUTS[kind].prefix_blocks or "")
    ends = (".self_attn.k_proj.weight", ".self_attn.v_proj.weight")
    return sum(shape[0] for name, shape in shapes.items() if name.startswith(blocks) and name.endswith(ends))


def smolvla_shapes(config: SmolVLAConfig, vlm: TinyVLM, action_dim: int, state_dim: int) -> dict[str, tuple[int, ...]]:
    """Of a SmolVLA made from scratch; tied parameters once."""
    width, hidden, heads = vlm.vision_dim, vlm.hidden_dim, vlm.num_heads
    head, key = hidden // heads, vlm.num_kv_heads * (hidden // heads)
    expert = int(hidden * config.expert_width)
    expert_mlp = 256 * -(-4 * int(2 * expert / 3) // 256)  # LeRobot rounds it up to a multiple of 256
    actions, states = config.max_action_dim or action_dim, config.max_state_dim or state_dim
    vision, text = f"{VLM}vlm.model.vision_model.", f"{VLM}vlm.model.text_model."
    shapes: dict[str, tuple[int, ...]] = {
        f"{vision}embeddings.patch_embedding.weight": (width, 3, vlm.patch_size, vlm.patch_size),
        f"{vision}embeddings.patch_embedding.bias": (width,),
        f"{vision}embeddings.position_embedding.weight": ((vlm.image_size // vlm.patch_size) ** 2, width),
        **_both(f"{vision}post_layernorm", width),
        f"{VLM}vlm.model.connector.modality_projection.proj.weight": (hidden, width * vlm.merged_patches**2),
        f"{text}embed_tokens.weight": (VOCABULARY, hidden),
        f"{text}norm.weight": (hidden,),
        f"{VLM}lm_expert.norm.weight": (expert,),
        **_linear("model.state_proj", hidden, states),
        **_linear("model.action_in_proj", expert, actions),
        **_linear("model.action_out_proj", actions, expert),
        **_linear("model.action_time_mlp_in", expert, 2 * expert),
        **_linear("model.action_time_mlp_out", expert, expert),
    }
    for i in range(vlm.vision_layers):
        block = f"{vision}encoder.layers.{i}."
        for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
            shapes |= _linear(f"{block}self_attn.{name}", width, width)
        shapes |= _linear(f"{block}mlp.fc1", vlm.vision_mlp_dim, width) | _linear(
            f"{block}mlp.fc2", width, vlm.vision_mlp_dim
        )
        shapes |= _both(f"{block}layer_norm1", width) | _both(f"{block}layer_norm2", width)
    for i in range(vlm.num_layers):
        shapes |= _block(f"{text}layers.{i}.", hidden, hidden, key, heads * head, vlm.mlp_dim)
        reads = expert if i % config.self_attention_every == 0 else key  # between them the prefix's keys and values
        shapes |= _block(f"{VLM}lm_expert.layers.{i}.", expert, reads, key, heads * head, expert_mlp)
    return {POLICY + name: shape for name, shape in shapes.items()}


def _block(block: str, dim: int, reads: int, key: int, query: int, mlp: int) -> dict[str, tuple[int, ...]]:
    return {
        f"{block}self_attn.q_proj.weight": (query, dim),
        f"{block}self_attn.k_proj.weight": (key, reads),
        f"{block}self_attn.v_proj.weight": (key, reads),
        f"{block}self_attn.o_proj.weight": (dim, query),
        f"{block}mlp.gate_proj.weight": (mlp, dim),
        f"{block}mlp.up_proj.weight": (mlp, dim),
        f"{block}mlp.down_proj.weight": (dim, mlp),
        f"{block}input_layernorm.weight": (dim,),
        f"{block}post_attention_layernorm.weight": (dim,),
    }


def _linear(name: str, rows: int, columns: int) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": (rows, columns), f"{name}.bias": (rows,)}


def _both(name: str, dim: int) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": (dim,), f"{name}.bias": (dim,)}


def _mb(num: int) -> str:
    return f"{num / 2**30:.1f} GB" if num >= 2**30 else f"{num / 2**20:.1f} MB"
