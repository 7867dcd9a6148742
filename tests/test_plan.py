"""What is promised before a run is what the run does."""

import dataclasses
import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from vla_rlaif.config import LearnerConfig, load_config, parse_config
from vla_rlaif.env_config import TabletopConfig
from vla_rlaif.grpo import GRPO
from vla_rlaif.jax_learner import JaxLearner
from vla_rlaif.plan import describe, label_schedule
from vla_rlaif.plan_octo import (
    ACTION_DIM,
    CAMERAS,
    STATE_DIM,
    activation_bytes,
    octo_compute,
    octo_cost,
    octo_memory,
    t5_parameters,
    t5_sizes,
    trained_parameters,
)
from vla_rlaif.policies.octo import adopt
from vla_rlaif.policies.octo.construct import from_scratch, settings_of
from vla_rlaif.policies.octo.network import HEAD, TABLE, OctoNetwork
from vla_rlaif.policies.octo.official import read_folder
from vla_rlaif.policies.octo.policy import OctoPolicy
from vla_rlaif.policies.octo.statistics import Statistics
from vla_rlaif.policy_config import OctoCheckpointConfig, OctoConfig
from vla_rlaif.reward_config import PreferenceRewardConfig
from vla_rlaif.types import EnvSpec

ROOT = Path(__file__).parents[1]
GOLDEN = Path(__file__).parent / "golden" / "octo"
PARTS = {"stems": "observation_tokenizers_", "transformer": "BlockTransformer_0/", "head": HEAD}
SMALL_STEM = {"type": "small16", "features": (8, 8, 16, 16), "groups": 4, "embedding": 24}


def env_spec(env: TabletopConfig) -> EnvSpec:
    return EnvSpec(
        cameras=CAMERAS,
        image_size=env.image_size,
        state_dim=STATE_DIM,
        action_dim=ACTION_DIM,
        chunk=env.chunk,
        max_decisions=1,
        instructions=("move it",),
    )


def by_part(network: OctoNetwork) -> dict[str, int]:
    counts: dict[str, int] = {"stems": 0, "tokens": 0, "transformer": 0, "head": 0}
    for name, leaf in network.shapes().items():
        counts[next((part for part, text in PARTS.items() if text in name), "tokens")] += math.prod(leaf.shape)
    return counts


@pytest.mark.parametrize(
    ("policy", "env"),
    [
        ({}, {}),
        ({"stem": SMALL_STEM, "image_sizes": {"wrist": 16}}, {"image_size": 32}),
        ({"stem": SMALL_STEM | {"goal_images": False, "patch_size": 32}, "proprio": False, "max_horizon": 3}, {}),
        (
            {"token_dim": 24, "num_layers": 3, "num_heads": 3, "mlp_dim": 40, "head_dim": 20, "head_blocks": 1},
            {"chunk": 2},
        ),
        ({"language_tokens": 9, "language_dim": 5, "time_dim": 6}, {}),
    ],
)
def test_parameter_counts_are_those_of_the_network(policy, env):
    policy, env = OctoConfig.model_validate(policy), TabletopConfig.model_validate(env)
    network = from_scratch(policy, env_spec(env), seed=0).network
    cost = octo_cost(policy, env)
    assert cost.parameters() == by_part(network)
    layout = network.layout
    step = sum(span.num_tokens for span in layout.step)
    assert cost.num_tokens == sum(span.num_tokens for span in layout.prefix) + layout.window * step


def official_folder(tmp_path: Path, manifest: str) -> Path:
    """Only what plan reads of it."""
    model = json.loads((GOLDEN / manifest).read_text())["model_config"]
    (tmp_path / "config.json").write_text(json.dumps({"model": model}))
    return tmp_path


@pytest.mark.parametrize(
    ("manifest", "without_t5", "head"),
    [("octo_small_15_params.json", 27_042_060, 1_703_564), ("octo_base_15_params.json", 92_830_092, 1_801_868)],
)
def test_counts_of_the_published_models(tmp_path, manifest, without_t5, head):
    """The numbers are those of upstream's parameter trees (golden manifests)."""
    folder, env = official_folder(tmp_path, manifest), TabletopConfig(image_size=256)
    stored = json.loads((GOLDEN / manifest).read_text())["counts"]
    cost = octo_cost(OctoCheckpointConfig(folder=folder), env)
    counts = cost.parameters()
    assert (sum(counts.values()), counts["head"]) == (without_t5, head) == (stored["without_t5"], stored["head"])
    assert counts["transformer"] == stored["transformer"]
    assert counts["stems"] == stored["stem_primary"] + stored["stem_wrist"]
    assert counts["tokens"] == stored["pos_emb"] + stored["projections"]
    assert t5_parameters(*t5_sizes(folder, cost.model)) == stored["t5"]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"new_head": True},
        {"cameras": {"image_primary": "primary"}},
        {"cameras": {"image_primary": "primary", "image_side": "wrist"}, "image_sizes": {"image_side": 32}},
        {"proprio": True},
        {"tune": {"type": "lora", "rank": 3, "blocks": 1}},
        {"tune": {"type": "full"}},
    ],
)
def test_counts_of_an_adapted_folder(tmp_path, monkeypatch, changes):
    """The tiny folder, which was written by upstream, at its own image sizes."""
    monkeypatch.setattr(adopt, "CACHE", tmp_path / "cache")
    stored = json.loads((GOLDEN / "tiny_ckpt" / "config.json").read_text())
    stored["dataset_kwargs"] = {"frame_transform_kwargs": {"resize_size": {"primary": [64, 64], "wrist": [32, 32]}}}
    for file in (GOLDEN / "tiny_ckpt").iterdir():
        (tmp_path / file.name).symlink_to(file)
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").write_text(json.dumps(stored))
    policy = OctoCheckpointConfig(folder=tmp_path, allow_new=("*_side*",), **changes)
    if "image_sizes" not in changes:
        policy = policy.model_copy(update={"allow_new": ()})
    env = TabletopConfig(image_size=64)
    statistics = Statistics.identity(ACTION_DIM, STATE_DIM)
    made = adopt.from_folder(policy, env_spec(env), seed=0, statistics=statistics)
    cost = octo_cost(policy, env)
    assert cost.parameters() == by_part(made.network)
    assert trained_parameters(policy, cost) == sum(made.params[name].size for name in made.trainable)
    official = read_folder(tmp_path)
    assert t5_parameters(*t5_sizes(tmp_path, cost.model)) == sum(
        value.size for name, value in official.params.items() if "hf_model" in name
    )


def test_operations_are_those_that_xla_counts():
    """Octo-Small, which is only traced. XLA also counts what is done element by element, a few percent."""
    policy = load_config(ROOT / "configs" / "octo_small_reach.yaml").policy
    assert isinstance(policy, OctoConfig)
    policy, env = policy.model_copy(update={"window": 2}), TabletopConfig(image_size=256)
    cost, network = octo_cost(policy, env), from_scratch(TINY, env_spec(env), seed=0).network
    cameras = tuple((f"image_{name}", name, cost.pixels[f"image_{name}"]) for name in CAMERAS)
    body = dataclasses.replace(network.body, cameras=cameras, language=(16, 768))
    network = OctoNetwork(cost.model, settings_of(policy), body)
    params = network.shapes() | {TABLE: jax.ShapeDtypeStruct((3, 768), jnp.float32)}

    def counted(function, *args) -> float:
        found = jax.jit(function).lower(params, *args).cost_analysis()
        assert found is not None
        return found["flops"]

    rows = input_shapes(network, 1)
    assert counted(network.readout, rows) == pytest.approx(cost.encode_flops() + cost.block_flops(), rel=0.02)
    tokens = lambda params, rows: network.encode(params, rows).x  # noqa: E731
    assert counted(tokens, rows) == pytest.approx(cost.encode_flops(), rel=0.05)
    head = jax.ShapeDtypeStruct((1, 384), jnp.float32), jax.ShapeDtypeStruct((1, 28), jnp.float32)
    step = jax.ShapeDtypeStruct((1,), jnp.int32)
    assert counted(network.predict, *head, step) == pytest.approx(cost.head_flops(), rel=0.02)


TINY = OctoConfig(num_layers=2, token_dim=32, mlp_dim=64, language_tokens=8, image_sizes={"wrist": 16})


@pytest.mark.parametrize("tune", [{"type": "lora", "blocks": 1}, {"type": "full"}])
def test_activations_are_what_xla_reserves(tune):
    """Of the learner's own gradient, compiled. Within a factor of 2; most of it must be activations."""
    rows, env = 64, TabletopConfig(image_size=32)
    policy = TINY.model_copy(update={"tune": OctoConfig.model_validate({"tune": tune}).tune})
    made: Any = from_scratch(policy, env_spec(env), seed=0)
    learner = JaxLearner(made, GRPO(group_size=8, kl_coef=0.1), LearnerConfig(minibatch=rows))
    reserved = learner_step(learner, made, rows).memory_analysis()
    assert reserved is not None
    cost = octo_cost(policy, env)
    activations, gradients = activation_bytes(policy, cost, rows), 4 * trained_parameters(policy, cost)
    assert activations > 2 * gradients
    assert 0.5 < reserved.temp_size_in_bytes / (activations + gradients) < 2


def learner_step(learner: JaxLearner, policy: OctoPolicy, rows: int) -> Any:
    """The compiled gradient of one micro-batch."""
    network = policy.network
    num_tuned, numbers = len(network.tuned), network.width
    shape = lambda *axes, dtype=jnp.float32: jax.ShapeDtypeStruct((rows, *axes), dtype)  # noqa: E731
    trace = {"start": shape(numbers), "chain": shape(num_tuned, numbers), "executed": shape(dtype=jnp.int32)}
    inputs = jax.eval_shape(network.prepare, policy.params, trace | input_shapes(network, rows))
    targets = {"advantage": shape(), "mask": shape(dtype=jnp.bool), "logp_old": shape(num_tuned)}
    targets["num_valid"] = jax.ShapeDtypeStruct((), jnp.float32)
    micro = inputs, targets, shape(num_tuned, numbers)
    gradient: Any = learner._add
    program = gradient.lower(learner._trained, learner._trained, learner._frozen, *micro)
    return program.compile({"xla_llvm_disable_expensive_passes": True, "xla_backend_optimization_level": 0})


def input_shapes(network: OctoNetwork, rows: int) -> dict[str, jax.ShapeDtypeStruct]:
    """Of what the trunk reads."""
    window, body = network.settings.window, network.body
    lead = (rows,) if window == 1 else (rows, window)
    shapes = {f"image/{c}": jax.ShapeDtypeStruct((*lead, s, s, 3), jnp.uint8) for _, c, s in body.cameras}
    frames = {"frame_ok": jax.ShapeDtypeStruct(lead, jnp.bool)} if window > 1 else {}
    state = {"state": jax.ShapeDtypeStruct((*lead, body.state_dim), jnp.float32)}
    return shapes | frames | state | {"ids": jax.ShapeDtypeStruct((rows, body.language[0]), jnp.int32)}


def test_memory_by_role():
    """Only the head is trained: weights, average, reference; gradient and two moments. A frozen copy acts beside it."""
    config = parse_config({"env": {"type": "tabletop"}, "policy": {"type": "octo"}}, source="test")
    assert isinstance(config.env, TabletopConfig) and isinstance(config.policy, OctoConfig)
    cost = octo_cost(config.policy, config.env)
    counts, memory = cost.parameters(), octo_memory(config, config.env, cost)
    total, head = sum(counts.values()), counts["head"]
    assert memory.acting == 4 * (total + head)
    assert memory.frozen == 4 * total
    assert memory.trained == memory.optimizer == 12 * head
    # 128 episodes of 4 decisions, a readout of 64 numbers each.
    assert memory.batch == 128 * 4 * 64 * 4


def test_computation_is_what_the_loop_does():
    data = {
        "env": {"type": "tabletop", "num_envs": 16, "max_steps": 8},
        "policy": {"type": "octo"},
        "reward": {"type": "success"},
        "learner": {"epochs": 2},
        "loop": {"steps": 3, "validate_every": 2, "validation_episodes": 8},
        "evaluate": {"episodes": 10},
    }
    config = parse_config(data, source="test")
    assert isinstance(config.env, TabletopConfig) and isinstance(config.policy, OctoConfig)
    cost = octo_cost(config.policy, config.env)
    compute = octo_compute(config, config.env, cost)
    # Two decisions an episode: 3 steps of 16 episodes, 2 validations of 8 (after steps 2 and 3), 2 evaluations of 10.
    assert compute.acting == (48 + 16 + 20) * 2 * compute.decision
    assert compute.decision == cost.encode_flops() + cost.block_flops() + 10 * cost.head_flops()
    # Only the head learns, on 5 denoising steps: actor, reference, and forward and twice that backward in 2 epochs.
    assert compute.learning == 48 * 2 * (2 + 6) * 5 * cost.head_flops()
    assert compute.warm_start == 0


@pytest.mark.parametrize(
    ("reward", "steps", "expected"),
    [
        # Refreshes before steps 4, 8, 12, 16: 100 + 4 * 40.
        ({"budget": 1000}, 20, (260, 5)),
        # 100, then 40, 40 and the last 20; nothing is left for the fourth refresh.
        ({"budget": 200}, 20, (200, 4)),
        ({"budget": 100}, 20, (100, 1)),
        # Step 4 is the fifth: a run of four never refreshes.
        ({"budget": 1000}, 4, (100, 1)),
        ({"budget": 1000}, 5, (140, 2)),
    ],
)
def test_label_schedule(reward, steps, expected):
    config = PreferenceRewardConfig(initial_labels=100, labels_per_refresh=40, refresh_every=4, **reward)
    assert label_schedule(config, steps) == expected


def test_the_table_has_the_numbers_of_the_config():
    config = parse_config({"loop": {"steps": 10}, "env": {"type": "tabletop", "num_envs": 32}}, source="test")
    text = describe(config)
    assert "32 = 4 groups of 8" in text
    assert "10, 320 episodes in all" in text
    counts = octo_cost(OctoConfig(), TabletopConfig()).parameters()
    assert f"{sum(counts.values()):,}" in text and f"{counts['head']:,} (head)" in text
    # Two cameras, 16 / 4 + 1 frames, 64 * 64 * 3 bytes: 32 * 2 * 5 * 12288 bytes.
    assert "4 MB (the pictures of a step)" in text


def test_a_published_folder_is_planned(tmp_path):
    config = load_config(ROOT / "configs" / "octo_small_checkpoint.yaml")
    folder = official_folder(tmp_path, "octo_small_15_params.json")
    text = describe(config.model_copy(update={"policy": config.policy.model_copy(update={"folder": folder})}))
    assert "27,042,060 (stems" in text and "109,628,544 parameters, on the host" in text


@pytest.mark.parametrize("path", sorted(ROOT.glob("configs/octo_*.yaml")), ids=lambda path: path.stem)
def test_committed_octo_configs_are_planned(path):
    text = describe(load_config(path))
    assert "computation, the run" in text or "there is no octo-small-1.5/config.json yet" in text


def test_a_reward_without_labels_says_so():
    data = {
        "reward": {"type": "success"},
        "env": {"type": "point_reach"},
        "policy": {"type": "gaussian"},
        "algorithm": {"clip_low": 0.2, "clip_high": 0.2},
    }
    text = describe(parse_config(data, source="test"))
    assert "success, no labels" in text and "parameters" not in text


def test_planning_loads_no_backend():
    code = (
        "import sys; from vla_rlaif.plan import describe; from vla_rlaif.config import RunConfig; "
        "describe(RunConfig()); "
        "print(sorted({'torch', 'jax', 'flax', 'mujoco', 'ray'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "[]\n"
