"""Which cluster a config starts, and what is loaded for it."""

import subprocess
import sys

import pytest

from vla_rlaif.cluster_config import LocalClusterConfig, RayClusterConfig
from vla_rlaif.dist.start import make_cluster
from vla_rlaif.dist.thread_cluster import ThreadCluster


def test_local_needs_no_ray() -> None:
    code = (
        "import sys; from vla_rlaif.cluster_config import LocalClusterConfig; from vla_rlaif.dist.start import "
        "make_cluster; make_cluster(LocalClusterConfig()).close(); "
        "print(sorted({'ray', 'torch', 'jax'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "[]\n"
    assert isinstance(make_cluster(LocalClusterConfig()), ThreadCluster)


def test_a_missing_ray_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)  # as if it were not installed
    with pytest.raises(ValueError, match=r"needs Ray: pip install .*\[ray\]"):
        make_cluster(RayClusterConfig())
