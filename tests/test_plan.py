"""What is promised before a run is what the run does."""

import subprocess
import sys

import pytest

from vla_rlaif.config import OctoConfig, PreferenceRewardConfig, TabletopConfig, parse_config
from vla_rlaif.plan import ACTION_DIM, NUM_CAMERAS, STATE_DIM, describe, label_schedule, octo_parameters
from vla_rlaif.policies.octo.network import HEAD, REFERENCE, WORDS
from vla_rlaif.policies.octo.policy import OctoPolicy
from vla_rlaif.types import EnvSpec

PARTS = {"stems": "observation_tokenizers_", "transformer": "BlockTransformer_0/", "head": HEAD}
SMALL_STEM = {"type": "small16", "features": (8, 8, 16, 16), "groups": 4, "embedding": 24}


def real_parameters(policy: OctoConfig, env: TabletopConfig) -> dict[str, int]:
    """Of the policy itself, by part; without the word table and the frozen copy of the head."""
    spec = EnvSpec(
        cameras=("primary", "wrist"),
        image_size=env.image_size,
        state_dim=STATE_DIM,
        action_dim=ACTION_DIM,
        chunk=env.chunk,
        max_decisions=1,
        instructions=("move it",),
    )
    assert len(spec.cameras) == NUM_CAMERAS
    counts: dict[str, int] = {"stems": 0, "transformer": 0, "tokens": 0, "head": 0}
    for name, leaf in OctoPolicy(policy, spec).params.items():
        if name != WORDS and not name.startswith(REFERENCE):
            counts[next((part for part, text in PARTS.items() if text in name), "tokens")] += leaf.size
    return counts


@pytest.mark.parametrize(
    ("policy", "env"),
    [
        ({}, {}),
        ({"stem": SMALL_STEM}, {"image_size": 32}),
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
    assert octo_parameters(policy, env) == real_parameters(policy, env)


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
    counts = octo_parameters(OctoConfig(), TabletopConfig())
    assert f"{sum(counts.values()):,}" in text and f"{counts['head']:,} trained" in text
    # Two cameras, 16 / 4 + 1 frames, 64 * 64 * 3 bytes: 32 * 2 * 5 * 12288 bytes.
    assert "frames of a step       4 MB" in text


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
        "print(sorted({'torch', 'jax', 'mujoco', 'ray'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "[]\n"
