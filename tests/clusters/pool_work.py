"""Workers for the tests of the pools."""

import threading
from dataclasses import dataclass, field

import numpy as np
from synthetic import StateEncoder

from vla_rlaif.dist.cluster import WorkerContext
from vla_rlaif.dist.workers import RewardWorker, RolloutWorker
from vla_rlaif.envs.point_reach import PointReach
from vla_rlaif.policies.gaussian_torch import GaussianTorch
from vla_rlaif.policy_config import GaussianConfig
from vla_rlaif.reward_models.preference import PreferenceConfig, PreferenceReward
from vla_rlaif.reward_models.preference_fit import FitConfig
from vla_rlaif.reward_models.python import PythonReward
from vla_rlaif.types import Transition


@dataclass(frozen=True)
class Gate:
    reached: threading.Event = field(default_factory=threading.Event)
    opened: threading.Event = field(default_factory=threading.Event)


def learned() -> PreferenceReward:
    return PreferenceReward(StateEncoder(), PreferenceConfig(hidden=(16,)), FitConfig(num_steps=20, batch_size=16))


def make_learned(context: WorkerContext) -> RewardWorker:
    return RewardWorker(learned())


def headed() -> PreferenceReward:
    config = PreferenceConfig(hidden=(16,), heads=("return", "progress", "success"), false_positive_rate=0.5)
    return PreferenceReward(StateEncoder(), config, FitConfig(num_steps=20, batch_size=16))


def make_headed(context: WorkerContext) -> RewardWorker:
    return RewardWorker(headed())


def make_python(context: WorkerContext, function: str) -> RewardWorker:
    return RewardWorker(PythonReward(f"rewards_for_tests:{function}"))


class GatedReach(PointReach):
    """Says when it steps, and waits until the test lets go."""

    def __init__(self, num_envs: int, gate: Gate) -> None:
        super().__init__(num_envs)
        self._gate = gate

    def step(self, action: np.ndarray) -> Transition:
        self._gate.reached.set()
        self._gate.opened.wait(20)
        return super().step(action)


def make_player(context: WorkerContext, num_envs: int, gate: Gate | None = None) -> RolloutWorker:
    """The first worker waits at the gate in its first life."""
    is_held = gate is not None and (context.index, context.incarnation) == (0, 0)
    env = GatedReach(num_envs, gate) if is_held and gate is not None else PointReach(num_envs)
    return RolloutWorker(context.name, GaussianTorch(GaussianConfig(backend="torch"), env.spec), env, act_batch=8)
