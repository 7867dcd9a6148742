"""Where the workers of a run go and what each of them needs, from the config alone: no Ray, torch, jax or mujoco.

Memory is an estimate, made of the counts behind ``plan_octo.py`` and ``plan_lerobot.py``; other policies have none.
Units: bytes; MB and GB are 2**20 and 2**30.
"""

from collections import Counter
from dataclasses import dataclass

from vla_rlaif.cluster_config import RayClusterConfig, Role
from vla_rlaif.config import RunConfig
from vla_rlaif.dist.placement import Bundle, Node, bundles_of, nodes_of, place
from vla_rlaif.env_config import TabletopConfig
from vla_rlaif.lerobot_config import LeRobotSettings
from vla_rlaif.policy_config import OctoCheckpointConfig, OctoSettings
from vla_rlaif.reward_config import PolicyEncoderConfig, learned_part

GB = 2**30


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Bytes of a policy's parts."""

    weights: int  # all of them, once
    trained: int  # of them
    activations: int | None  # of the gradient of a micro-batch; None: not estimated
    batch: int  # inputs of a step's decisions, as they wait for their minibatch
    acting: int  # working memory of a decision
    cached: int  # keys and values that a decision keeps


@dataclass(frozen=True, kw_only=True)
class Needs:
    """Bytes that one worker needs on each of its GPUs, or on the host if it has none; ``frames`` always on the host."""

    weights: int = 0
    gradients: int = 0
    optimizer: int = 0
    activations: int = 0
    cached: int = 0  # keys and values
    frames: int = 0  # pictures of the episodes that its envs play

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer + self.activations + self.cached


def cluster_rows(config: RunConfig, cluster: RayClusterConfig) -> list[tuple[str, str]]:
    """Rows of a plan.

    Raises:
        ValueError: the roles do not fit on the nodes that the config lists, or into the memory of a GPU.
    """
    bundles, nodes, needs = bundles_of(cluster), nodes_of(cluster.nodes), needs_of(config, cluster)
    gpus, cpus = sum(b.gpus for b in bundles), sum(b.cpus for b in bundles)
    rows = [("placement", f"ray at {cluster.address}, {cluster.mode}: {gpus} GPUs and {cpus:g} CPUs in all")]
    for role, each in cluster.roles.present().items():
        share = f" ({each.share:g} of each)" if each.share < 1 else ""
        labels = "".join(f", {key}={value}" for key, value in each.labels.items())
        where = "" if each.colocate_with is None else f" on those of {each.colocate_with}"
        text = f"{each.workers} x {each.gpus:g} GPUs{share}{where}, {each.cpus:g} CPUs{labels}"
        rows.append((f"role {role}", f"{text}; {_needs_text(needs.get(role), on_gpu=each.gpus > 0)}"))
    if not nodes:
        return [*rows, ("nodes", "not listed in cluster.nodes: only the run itself will know whether it fits")]
    where = place(bundles, nodes, spread=cluster.strategy == "spread")
    for node in nodes:
        here = [bundle for bundle in bundles if where[bundle.name] == node.name]
        for bundle in here:
            check_memory(bundle, node, needs)
        rows.append((node.name, _node_text(node, here)))
    return rows


def needs_of(config: RunConfig, cluster: RayClusterConfig) -> dict[Role, Needs]:
    """By role, as far as they can be told."""
    roles, sizes = cluster.roles, sizes_of(config)
    envs = config.env.num_envs // roles.rollout.workers
    frames = _frames(config, envs)
    if sizes is None:
        return {"rollout": Needs(frames=frames)} if frames else {}
    learner = roles.learner
    ranks = learner.workers * max(1, int(learner.gpus))
    shards = ranks if config.learner.sharding == "fsdp" else 1
    copies = 2 if roles.reference is not None else 3  # weights, their average, and the reference unless others have it
    micro = config.learner.minibatch // config.learner.micro_batches
    found: dict[Role, Needs] = {
        "learner": Needs(
            weights=(sizes.weights + (copies - 1) * sizes.trained) // shards,
            gradients=sizes.trained // shards,
            optimizer=2 * sizes.trained // shards,
            activations=(sizes.activations or 0) // ranks + sizes.batch // ranks,
            cached=sizes.cached * _decisions(config) // ranks,
        ),
        "rollout": Needs(
            weights=sizes.weights + sizes.trained,  # the second: staged, until they are committed
            activations=sizes.acting * (config.loop.act_batch or envs),
            cached=sizes.cached * (config.loop.act_batch or envs),
            frames=frames,
        ),
    }
    if roles.reference is not None:
        found["reference"] = Needs(weights=sizes.weights, activations=sizes.acting * micro, cached=sizes.cached * micro)
    reward = learned_part(config.reward)
    if reward is not None and isinstance(reward.encoder, PolicyEncoderConfig):
        found["reward"] = Needs(weights=sizes.weights, activations=sizes.acting * envs)
    return found


def check_memory(bundle: Bundle, node: Node, needs: dict[Role, Needs]) -> None:
    """Raises ValueError if the GPUs of a bundle are too small for those that lie on them."""
    if node.gpu_memory_gb is None:
        return
    for slot in range(bundle.gpus):
        here = [(seat, needs[seat.role].total) for seat in bundle.seats if slot in seat.slots and seat.role in needs]
        for seat, size in here:
            if size > seat.share * node.gpu_memory_gb * GB:
                raise ValueError(
                    f"{seat.name} needs {size / GB:.1f} GB of a GPU, and gets {seat.share:g} of the "
                    f"{node.gpu_memory_gb:g} GB on {node.name}: give it more, or use more micro_batches, fewer envs, "
                    "or fsdp."
                )


def sizes_of(config: RunConfig) -> Sizes | None:
    policy, env = config.policy, config.env
    if isinstance(policy, OctoSettings) and isinstance(env, TabletopConfig):
        from vla_rlaif.plan_octo import octo_cost, octo_memory

        if isinstance(policy, OctoCheckpointConfig) and not (policy.folder / "config.json").exists():
            return None
        memory = octo_memory(config, env, octo_cost(policy, env))
        return Sizes(
            weights=memory.acting,
            trained=memory.trained // 3,
            activations=memory.activations,
            batch=memory.batch,
            acting=memory.forward // env.num_envs,
            cached=0,
        )
    if isinstance(policy, LeRobotSettings):
        from vla_rlaif.plan_lerobot import FLOAT, lerobot_counts

        counts = lerobot_counts(config)
        if counts is None:
            return None
        return Sizes(
            weights=FLOAT * counts.total,
            trained=FLOAT * counts.trained,
            activations=None,
            batch=0,
            acting=0,
            cached=counts.cached,
        )
    return None


def _decisions(config: RunConfig) -> int:
    """Of a step, if no episode ends early."""
    env = config.env
    return env.num_envs * (env.max_steps // env.chunk) if isinstance(env, TabletopConfig) else env.num_envs


def _frames(config: RunConfig, envs: int) -> int:
    env = config.env
    if not isinstance(env, TabletopConfig):
        return 0
    return envs * (env.max_steps // env.chunk + 1) * 2 * 3 * env.image_size**2  # two cameras


def _needs_text(needs: Needs | None, *, on_gpu: bool) -> str:
    if needs is None:
        return "memory not estimated"
    parts = {
        "weights": needs.weights,
        "gradients": needs.gradients,
        "optimiser": needs.optimizer,
        "activations": needs.activations,
        "KV": needs.cached,
    }
    text = ", ".join(f"{name} {_size(size)}" for name, size in parts.items() if size)
    frames = f"; frames of its envs {_size(needs.frames)} on the host" if needs.frames else ""
    where = "a GPU" if on_gpu else "the host"
    return (f"{_size(needs.total)} of {where} ({text})" if text else "policy not estimated") + frames


def _node_text(node: Node, bundles: list[Bundle]) -> str:
    seats = Counter(seat.role for bundle in bundles for seat in bundle.seats)
    who = ", ".join(f"{num} {role}" for role, num in seats.items()) or "nobody"
    gpus, cpus = sum(b.gpus for b in bundles), sum(b.cpus for b in bundles)
    return f"{who}: {gpus} of {node.gpus} GPUs, {cpus:g} of {node.cpus:g} CPUs"


def _size(size: int) -> str:
    return f"{size / GB:.1f} GB" if size >= GB else f"{size / 2**20:.0f} MB"
