"""The job of faults.py, and the machine that it runs on."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

NUM_ENVS, GROUP, DECISIONS, STEPS, TEST_EPISODES = 64, 8, 6, 10, 256
LATE_S = 15.0  # deadlines of the job: for a round, a score or an update
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "RAY_AUTH_MODE": "disabled",
    "RAY_prestart_worker_first_driver": "0",  # or every run would begin with idle workers
    "RAY_raylet_start_wait_time_s": "180",
}


def job(
    seed: int, address: str, *, pause_s: float, reward: Mapping[str, Any] | None = None, ranks: int = 1
) -> dict[str, Any]:
    learned = {
        "type": "preference",
        "budget": 300,
        "initial_labels": 200,
        "initial_episodes": 256,
        "labels_per_refresh": 32,
        "refresh_every": 3,
        "fit_steps": 150,
    }
    return {
        "name": "faults",
        "seed": seed,
        "env": {
            "type": "gymnasium",
            "factory": "fault_env:Reach",
            "options": {"pause_s": pause_s},
            "cameras": {"top": "top"},
            "state": ["position"],
            "success": "success",
            "progress": "progress",
            "instructions": ["reach the goal"],
            "num_envs": NUM_ENVS,
            "workers": 1,
            "image_size": 16,
            "chunk": 1,
            "max_steps": DECISIONS,
            "timeout_s": LATE_S / 3,
        },
        "policy": {"type": "gaussian", "backend": "torch"},
        "reward": reward or learned,
        "algorithm": {"group_size": GROUP, "clip_low": 0.2, "clip_high": 0.2, "kl_coef": 0.01},
        "learner": {"lr": 0.05, "minibatch": 128, "ema": 0.5, "target_kl": None, "timeout_s": int(LATE_S)},
        "loop": {
            "steps": STEPS,
            "validate_every": 5,
            "validation_episodes": 64,
            "checkpoint_every": 2,
            "act_batch": NUM_ENVS // 2,
        },
        "evaluate": {"episodes": TEST_EPISODES, "clips": 2},
        "cluster": {
            "type": "ray",
            "address": address,
            "strategy": "spread",
            "roles": {
                "learner": {"workers": ranks, "cpus": 1},
                "rollout": {"workers": 2, "cpus": 1},
                "reward": {"cpus": 1},
                "reference": {"cpus": 1},
            },
            "sync": {"timeout_s": LATE_S},
            "faults": {
                "rollout_timeout_s": LATE_S,
                "reward_timeout_s": LATE_S,
                "reference_timeout_s": LATE_S,
                "start_timeout_s": 120.0,
                "silent_s": 2 * LATE_S,
            },
        },
    }


class Machine:
    """A Ray cluster that pretends to have as many nodes as a run needs."""

    def __init__(self, folder: Path) -> None:
        os.environ |= ENVIRONMENT
        from ray.cluster_utils import Cluster

        head = {"num_cpus": 8, "object_store_memory": 150 * 2**20, "include_dashboard": False, "temp_dir": str(folder)}
        self._cluster: Any = Cluster(initialize_head=True, head_node_args=head)
        self._node: Any = None

    @property
    def address(self) -> str:
        return self._cluster.address

    def add_node(self) -> None:
        self._node = self._cluster.add_node(num_cpus=8, object_store_memory=100 * 2**20)
        self._cluster.wait_for_nodes()

    def end_node(self) -> None:
        if self._node is not None:
            self._cluster.remove_node(self._node, allow_graceful=False)
            self._node = None

    def close(self) -> None:
        self._cluster.shutdown()
