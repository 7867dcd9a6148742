"""Tabletop tasks for a 7-joint arm: batched physics, two cameras, exact snapshots, a scripted expert."""

from vla_rlaif.envs.tabletop.env import Snapshot, Tabletop

__all__ = ["Snapshot", "Tabletop"]
