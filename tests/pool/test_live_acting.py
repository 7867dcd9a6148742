from pathlib import Path

import pytest

from vla_rlaif.config import RunConfig, parse_config
from vla_rlaif.envs.point_reach import PointReach
from vla_rlaif.pool.acting import start_policy_of


def run_of(policy: dict[str, str], out: Path) -> RunConfig:
    sizes = {"clip_low": 0.2, "clip_high": 0.2} if policy["type"] in ("token_vla", "gaussian") else {}
    return parse_config({"out": str(out), "policy": policy, "algorithm": sizes}, source="test")


@pytest.mark.parametrize("policy", ["octo", "smolvla", "lerobot", "token_vla"])
def test_a_replica_acts_with_the_start_policy_of_its_run_and_makes_none_itself(policy, tmp_path):
    """A fresh one would have other frozen weights and other statistics than the one that is trained."""
    config = run_of({"type": policy} | ({"path": "somewhere"} if policy == "lerobot" else {}), tmp_path)
    with pytest.raises(ValueError, match=f"no policy checkpoint at {tmp_path}/start"):
        start_policy_of(config, PointReach(1).spec)


def test_a_policy_that_is_the_same_whoever_makes_it_needs_no_folder(tmp_path):
    assert start_policy_of(run_of({"type": "gaussian"}, tmp_path), PointReach(1).spec).version == 0
