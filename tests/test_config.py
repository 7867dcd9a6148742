import ast
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from vla_rlaif.algorithm_checks import cautions, kl_coef
from vla_rlaif.config import RunConfig, load_config, models_of, parse_config
from vla_rlaif.config_base import Model

FOLDER = Path(__file__).parents[1] / "configs"
CONFIGS = sorted(set(FOLDER.glob("*.yaml")) - set(FOLDER.glob("pool_*.yaml")))  # a pool is no run: tests/pool

BLIND = {"type": "metaworld", "observation": "full", "cameras": []}
STATE_ONLY = {
    "policy": {"type": "mlp"},
    "algorithm": {"clip_low": 0.2, "clip_high": 0.2},
    "reward": {"type": "preference", "encoder": {"type": "cnn"}},
}


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: p.stem)
def test_committed_configs_are_valid(path):
    assert load_config(path).name == path.stem


def test_resolved_config_reads_back_equal(tmp_path):
    config = parse_config({"env": {"type": "tabletop", "task": "push"}, "seed": 3}, source="test")
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(config.model_dump(mode="json")))
    assert load_config(path) == config


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"algorithm": {"group_sise": 8}}, r"algorithm\.grpo\.group_sise: unknown key; did you mean group_size\?"),
        ({"env": {"type": "tabletop", "tsak": "reach"}}, r"tsak: unknown key; did you mean task\?"),
        ({"reward": {"type": "preference", "encoder": {"type": "policy", "x": 1}}}, r"encoder.*x: unknown key"),
        ({"larner": {}}, r"larner: unknown key; did you mean learner\?"),
        ({"env": {"type": "tabletop", "num_envs": "many"}}, r"num_envs: .*integer.*'many'"),
        ({"env": {"type": "tabletpo"}}, r"'tabletop'"),
        ({"policy": {"token_dim": 32}}, r"policy: has no type; add type: one of custom, gaussian, lerobot, mlp, octo"),
        ({"env": {"type": "tabletop", "num_envs": 100}}, "100 does not split into groups of 8"),
        ({"algorithm": {"group_size": 1}}, r"group_size: .*greater than or equal to 2"),
        ({"algorithm": {"clip_low": 0.2, "clip_high": 0.2}}, "never binds on averaged log-probs"),
        ({"policy": {"type": "octo", "logp_reduction": "sum"}}, "clips nearly every summed log-prob"),
        ({"policy": {"type": "octo", "tuned_steps": 11}}, "tuned_steps 11 exceeds diffusion_steps 10"),
        ({"policy": {"type": "octo", "num_heads": 3}}, "token_dim 64 does not split into 3 heads"),
        ({"policy": {"type": "octo", "language_tokens": 4}}, "but reach says 7 words"),
        ({"env": {"type": "tabletop", "max_steps": 10}}, "10 is not a multiple of chunk 4"),
        ({"env": {"type": "tabletop", "num_envs": 9, "double_buffer": True}}, "two halves, and num_envs is 9"),
        ({"loop": {"act_batch": 24}}, "act_batch 24 does not divide the 128 members"),
        ({"env": {"type": "tabletop", "double_buffer": True}, "loop": {"act_batch": 128}}, "does not divide the 64"),
        (
            {"env": {"type": "tabletop", "image_size": 40}, "policy": {"type": "octo", "stem": {"type": "small16"}}},
            "not a multiple of the 16 pixels of policy.stem",
        ),
        ({"reward": {"type": "preference", "budget": 10}}, "exceeds the label budget 10"),
        ({"reward": {"type": "pixel_distance"}}, "reads the dots of env point_reach"),
        ({"policy": {"type": "gaussian"}}, "clips nearly every"),
        ({"env": {"type": "metaworld", "cameras": []}}, "the task is not seen: name one, or set observation: full"),
        ({"env": BLIND}, "policy octo looks at images, and env.cameras is empty"),
        ({"env": BLIND, **STATE_ONLY}, "reward cnn looks at images, and env.cameras is empty"),
        ({"env": BLIND, **STATE_ONLY, "reward": {"type": "success"}}, "evaluate.clips is 6, and env.cameras is empty"),
        (
            {"policy": {"type": "gaussian"}, "algorithm": {"clip_low": 0.2, "clip_high": 0.2}, "warm_start": {}},
            "gaussian does not. Remove",
        ),
        ({"learner": {"sharding": "fsdp"}}, "fsdp is for torch policies, not octo"),
        ({"algorithm": {"anchor_coef": 0.1}}, r"anchor_coef needs demonstrations: add warm_start"),
        (
            {
                "algorithm": {"anchor_coef": 0.1, "anchor_batch": 6},
                "learner": {"micro_batches": 4},
                "warm_start": {},
            },
            r"anchor_batch 6 does not split into 4 micro-batches",
        ),
    ],
)
def test_mistakes_are_named(data, message):
    with pytest.raises(ValueError, match=message):
        parse_config(data, source="test")


def test_files_that_are_not_runs(tmp_path):
    with pytest.raises(ValueError, match="no config"):
        load_config(tmp_path / "missing.yaml")
    broken = tmp_path / "broken.yaml"
    broken.write_text("env: [")
    with pytest.raises(ValueError, match="not valid YAML"):
        load_config(broken)
    broken.write_text("- a list")
    with pytest.raises(ValueError, match="holds a list"):
        load_config(broken)


def test_kl_is_on_by_default_with_a_learned_reward_only():
    assert kl_coef(RunConfig()) == 0.02
    assert kl_coef(parse_config({"reward": {"type": "success"}}, source="test")) == 0.0
    assert kl_coef(parse_config({"algorithm": {"kl_coef": 0.5}}, source="test")) == 0.5


@pytest.mark.parametrize("module", ["vla_rlaif.config", "vla_rlaif.cli", "vla_rlaif.plan", "vla_rlaif.doctor"])
def test_light_modules_load_no_heavy_library(module):
    code = f"import sys, {module}; print(sorted({{'torch', 'jax', 'ray', 'mujoco', 'matplotlib'}} & set(sys.modules)))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert out.stdout.strip() == "[]"


def sections(model: type[Model]) -> set[type[Model]]:
    """A model and those that its fields may hold."""
    return {model}.union(*(sections(m) for f in model.model_fields.values() for m in models_of(f.annotation)))


def test_every_key_is_read():
    """No key without an effect: each field of each model is read somewhere outside the modules that declare them."""
    package = Path(__file__).parents[1]
    sources = [p for d in ("vla_rlaif", "envs", "policies", "reward_models") for p in (package / d).rglob("*.py")]
    trees = [ast.parse(p.read_text()) for p in sources if not p.name.endswith("config.py")]
    read = {node.attr for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    models = sections(RunConfig)
    unread = {f"{m.__name__}.{name}" for m in models for name in m.model_fields if name not in read}
    assert len(models) > 20
    assert unread == set()


def test_cautions():
    assert cautions(RunConfig()) == []
    doubtful = parse_config({"algorithm": {"group_size": 2, "kl_coef": 0.0}}, source="test")
    assert len(cautions(doubtful)) == 2
