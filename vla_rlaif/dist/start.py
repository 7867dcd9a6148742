"""The cluster that a config asks for. Ray is imported only if it does."""

import importlib.util
from pathlib import Path

from vla_rlaif.cluster_config import ClusterConfig, LocalClusterConfig
from vla_rlaif.dist.cluster import Cluster
from vla_rlaif.dist.thread_cluster import ThreadCluster


def make_cluster(config: ClusterConfig, *, logs: Path | None = None) -> Cluster:
    """``logs``: a folder that workers of a Ray cluster print into.

    Raises:
        ValueError: Ray is not installed, there is no cluster, or the roles do not fit on it.
    """
    if isinstance(config, LocalClusterConfig):
        return ThreadCluster()
    if importlib.util.find_spec("ray") is None:
        raise ValueError("cluster.type ray needs Ray: pip install -c constraints.txt -e '.[ray]', or use type: local.")
    from vla_rlaif.dist.ray_cluster import RayCluster

    return RayCluster(config, logs=logs)
