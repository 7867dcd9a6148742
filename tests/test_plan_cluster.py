"""The plan of a run on several machines: who lies where, and what each needs."""

import subprocess
import sys
from typing import Any

import pytest

from vla_rlaif.cluster_config import RayClusterConfig
from vla_rlaif.config import RunConfig, parse_config
from vla_rlaif.plan import describe
from vla_rlaif.plan_cluster import GB, needs_of, sizes_of

ROLES: dict[str, Any] = {
    "learner": {"workers": 1, "gpus": 2, "cpus": 4},
    "rollout": {"workers": 4, "gpus": 0.5, "cpus": 2},
    "reward": {"cpus": 2},
    "reference": {"gpus": 1},
}
NODES = [{"count": 2, "gpus": 4, "cpus": 16, "gpu_memory_gb": 24}]


def run(roles: dict[str, Any] | None = None, **changes: Any) -> RunConfig:
    cluster = {"type": "ray", "roles": roles or ROLES, "nodes": NODES, **changes}
    return parse_config({"env": {"type": "tabletop"}, "policy": {"type": "octo"}, "cluster": cluster}, source="test")


def test_needs_by_role() -> None:
    config = run()
    assert isinstance(config.cluster, RayClusterConfig)
    sizes, needs = sizes_of(config), needs_of(config, config.cluster)
    # Default Octo: 393,036 float32 parameters, of which the head's 287,756 are trained; the head has a frozen copy.
    assert sizes is not None
    assert (sizes.weights, sizes.trained) == (4 * (393_036 + 287_756), 4 * 287_756)
    learner = needs["learner"]
    assert learner.weights == sizes.weights + sizes.trained  # and the average; the reference lies elsewhere
    assert (learner.gradients, learner.optimizer) == (sizes.trained, 2 * sizes.trained)
    # 128 episodes of 4 decisions, a readout of 64 numbers each, over 2 GPUs.
    assert sizes.activations is not None
    assert learner.activations == sizes.activations // 2 + 128 * 4 * 64 * 4 // 2
    rollout = needs["rollout"]
    assert rollout.weights == sizes.weights + sizes.trained  # those that are staged for the next round
    # 128 / 4 episodes; two cameras, 16 / 4 + 1 frames, 64 * 64 * 3 bytes.
    assert rollout.frames == 32 * 2 * 5 * 12_288
    assert rollout.activations == 32 * sizes.acting
    assert needs["reference"].weights == needs["reward"].weights == sizes.weights
    alone = run({"learner": {"gpus": 1}})
    assert isinstance(alone.cluster, RayClusterConfig)
    assert needs_of(alone, alone.cluster)["learner"].weights == sizes.weights + 2 * sizes.trained


def test_the_table_says_who_lies_where() -> None:
    text = describe(run())
    assert "ray at auto, disaggregated: 5 GPUs and 15 CPUs in all" in text
    assert "4 x 0.5 GPUs, 2 CPUs; " in text and "frames of its envs 4 MB on the host" in text
    assert "1 x 2 GPUs, 4 CPUs; " in text and "optimiser 2 MB" in text
    # The learner has two GPUs of the first node, the rollout workers two more, the reference one of the second.
    assert "1 learner, 4 rollout, 1 reward: 4 of 4 GPUs, 14 of 16 CPUs" in text
    assert "1 reference: 1 of 4 GPUs, 1 of 16 CPUs" in text
    assert "not listed in cluster.nodes" in describe(run(nodes=[]))
    assert "one process (cluster: local)" in describe(RunConfig())


def test_a_run_that_does_not_fit_is_refused_with_both_numbers() -> None:
    with pytest.raises(ValueError, match="asks for 9 GPUs, and the cluster has 8"):
        describe(run({**ROLES, "learner": {"gpus": 6}}))
    shared = {"learner": {"gpus": 1, "share": 0.01}, "rollout": {"gpus": 0.5}}
    tiny = [{"gpus": 1, "gpu_memory_gb": 0.5}]
    with pytest.raises(ValueError, match=r"learner/0 needs 0\.0 GB of a GPU, and gets 0\.01 of the 0\.5 GB on node-0"):
        describe(run(shared, mode="colocated", nodes=tiny))
    assert needs_total(shared) > 0.005 * GB


def needs_total(roles: dict[str, Any]) -> int:
    config = run(roles, mode="colocated", nodes=[])
    assert isinstance(config.cluster, RayClusterConfig)
    return needs_of(config, config.cluster)["learner"].total


def test_keys_and_values_of_a_vision_language_policy() -> None:
    data = {
        "env": {"type": "tabletop", "num_envs": 16, "chunk": 4, "max_steps": 16},
        "policy": {"type": "smolvla"},
        "cluster": {"type": "ray", "roles": {"rollout": {"workers": 2}}},
    }
    config = parse_config(data, source="test")
    assert isinstance(config.cluster, RayClusterConfig)
    sizes, needs = sizes_of(config), needs_of(config, config.cluster)
    assert sizes is not None and sizes.cached > 0
    assert needs["learner"].cached == 16 * 4 * sizes.cached  # of all decisions of a step
    assert needs["rollout"].cached == 8 * sizes.cached
    assert "KV" in describe(config)


def test_planning_loads_neither_ray_nor_a_backend() -> None:
    code = (
        "import sys; from vla_rlaif.plan import describe; from vla_rlaif.config import parse_config; "
        "describe(parse_config({'cluster': {'type': 'ray', 'nodes': [{'cpus': 8}]}}, source='test')); "
        "print(sorted({'torch', 'jax', 'flax', 'mujoco', 'ray'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "[]\n"


def test_policies_that_are_not_estimated_say_so() -> None:
    data = {
        "env": {"type": "point_reach"},
        "policy": {"type": "gaussian"},
        "reward": {"type": "success"},
        "algorithm": {"clip_low": 0.2, "clip_high": 0.2},
        "cluster": {"type": "ray"},
    }
    assert "memory not estimated" in describe(parse_config(data, source="test"))
