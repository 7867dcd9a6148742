"""What a run will do and need, from the config alone: neither torch, jax nor mujoco is loaded."""

from vla_rlaif.algorithm_checks import cautions, kl_coef
from vla_rlaif.cluster_config import RayClusterConfig
from vla_rlaif.config import RunConfig
from vla_rlaif.env_config import TabletopConfig
from vla_rlaif.lerobot_config import LeRobotSettings
from vla_rlaif.policy_config import OctoSettings
from vla_rlaif.reward_config import PreferenceRewardConfig, learned_part


def describe(config: RunConfig) -> str:
    """A table as text: placement, episodes, labels, and of Octo and LeRobot policies parameters, memory, computation.

    Raises:
        ValueError: the roles do not fit on the nodes that cluster.nodes lists.
    """
    env, group, loop = config.env, config.algorithm.group_size, config.loop
    rows = [
        ("run directory", str(config.run_dir)),
        *_placement(config),
        ("episodes a step", f"{env.num_envs} = {env.num_envs // group} groups of {group}"),
        ("steps", f"{loop.steps}, {loop.steps * env.num_envs} episodes in all"),
        ("validation", f"{loop.validation_episodes} episodes every {loop.validate_every} steps"),
        ("evaluation", f"{config.evaluate.episodes} episodes before and after, start states of their own"),
        ("reward", _labels(config)),
        ("KL to the start policy", f"coefficient {kl_coef(config)}"),
    ]
    if isinstance(config.policy, OctoSettings):
        rows += _octo(config)
    if isinstance(config.policy, LeRobotSettings):
        from vla_rlaif.plan_lerobot import lerobot_rows

        rows += lerobot_rows(config)
    rows += [("caution", text) for text in cautions(config)]
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:{width}}  {text}" for name, text in rows)


def _placement(config: RunConfig) -> list[tuple[str, str]]:
    if not isinstance(config.cluster, RayClusterConfig):
        return [("placement", "one process (cluster: local)")]
    from vla_rlaif.plan_cluster import cluster_rows

    return cluster_rows(config, config.cluster)


def label_schedule(config: PreferenceRewardConfig, steps: int) -> tuple[int, int]:
    """(labels that the run asks for, number of fits)."""
    refreshes = len(range(config.refresh_every, steps, config.refresh_every))
    wanted = config.initial_labels + refreshes * config.labels_per_refresh
    paid = min(refreshes, -(-(config.budget - config.initial_labels) // config.labels_per_refresh))
    return min(wanted, config.budget), 1 + paid


def _labels(config: RunConfig) -> str:
    learned = learned_part(config.reward)
    if learned is None:
        return f"{config.reward.type}, no labels"
    labels, fits = label_schedule(learned, config.loop.steps)
    return f"learned from {labels} labels (budget {learned.budget}), fitted {fits} times"


def _octo(config: RunConfig) -> list[tuple[str, str]]:
    if not isinstance(config.env, TabletopConfig):
        return [("policy", f"not estimated: the images of env {config.env.type} are not known from the config")]
    from vla_rlaif.plan_octo import octo_rows

    return octo_rows(config, config.env)
