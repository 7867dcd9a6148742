"""What fits together with a run's monitor."""

from typing import TYPE_CHECKING

from vla_rlaif.labeller_config import HumanConfig
from vla_rlaif.reward_config import learned_part

if TYPE_CHECKING:
    from vla_rlaif.config import RunConfig


def check_monitor(config: "RunConfig") -> None:
    """Raises ValueError, with what to change."""
    audit, loop = config.monitor.audit, config.loop
    if audit is not None and audit.pairs > loop.validation_episodes:
        raise ValueError(
            f"monitor.audit.pairs {audit.pairs} compares as many validation episodes, and loop.validation_episodes is "
            f"{loop.validation_episodes}: raise it, or lower pairs."
        )
    labellers = [part.labeller for part in (learned_part(config.reward), audit) if part is not None]
    ports = [labeller.port for labeller in labellers if isinstance(labeller, HumanConfig) and labeller.port]
    if len(set(ports)) < len(ports):
        raise ValueError(
            f"reward.labeller and monitor.audit.labeller both open a page at port {ports[0]}: give one another."
        )
    if config.monitor.action == "rollback" and (loop.overlap or loop.stored is not None):
        raise ValueError(
            "monitor.action rollback gives up what was played with the weights that it leaves, and loop.overlap and "
            "loop.stored train on older episodes: set monitor.action to stop, or remove them."
        )
