"""Env workers as Ray actors that a worker in another actor has started: as in a run with roles.env."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from env_player import GAUSSIAN, EnvPlayer, make_player
from ray_session import START_S, start

from vla_rlaif.build import build_env
from vla_rlaif.cluster_config import RayClusterConfig
from vla_rlaif.dist.answers import answers
from vla_rlaif.dist.cluster import Handle
from vla_rlaif.env_config import TabletopConfig
from vla_rlaif.policies.gaussian_torch import GaussianTorch
from vla_rlaif.rollout import rollout, train_starts

pytestmark = pytest.mark.filterwarnings(r"ignore:os\.fork\(\) was called:RuntimeWarning")
ENV = TabletopConfig(task="push", num_envs=4, image_size=16, chunk=2, max_steps=6, renderer="ray", threads=1)
STARTS = train_starts(seed=0, step=0, num_groups=3, group_size=2)  # 4 and 2, filled up to 4


@pytest.fixture(scope="module")
def player(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Handle[EnvPlayer]]:
    start()
    from vla_rlaif.dist.ray_cluster import RayCluster

    small = {"cpus": 0.25}
    config = RayClusterConfig.model_validate(
        {
            "type": "ray",
            "roles": {"learner": small, "rollout": small, "reward": small, "env": small | {"workers": 2}},
            "faults": {"start_timeout_s": START_S, "max_restarts": 2},
        }
    )
    cluster = RayCluster(config)
    logs: Path = tmp_path_factory.mktemp("logs")
    make = partial(make_player, cluster=config, lent=cluster.lend("env", 0, 1), env=ENV, folder=logs)
    yield cluster.start("rollout", make, 1).handles[0]
    cluster.close()


def ask(player: Handle[EnvPlayer], work: Any) -> Any:
    return answers([player.ask(work)], START_S, "playing")[0]


def test_env_actors_play_the_episodes_of_a_local_env_also_after_one_has_died(player: Handle[EnvPlayer]) -> None:
    local = build_env(ENV)
    expected = rollout(GaussianTorch(GAUSSIAN, local.spec), local, STARTS, seed=0, act_batch=2)
    local.close()

    def check() -> None:
        found = ask(player, partial(EnvPlayer.play, starts=STARTS))
        for name in ("state", "action", "logp", "mask", "success", "truth", "valid"):
            np.testing.assert_array_equal(getattr(found, name), getattr(expected, name), err_msg=name)
        for camera, image in expected.images.items():
            np.testing.assert_array_equal(found.images[camera], image)

    check()
    ask(player, partial(EnvPlayer.reset, starts=train_starts(seed=0, step=0, num_groups=2, group_size=2)))
    valid, said = ask(player, EnvPlayer.kill_one_and_step)
    assert valid == [True, True, False, False] and "env/1 is lost" in said
    check()  # it is back
