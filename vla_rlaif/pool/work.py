"""What the replicas of a pool work on: one training run, its rollouts, and its policy behind a server.

The kind of a role is how it is preempted: `checkpoint` trains, `at_chunk` collects, `false` serves.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from vla_rlaif.config import RunConfig
from vla_rlaif.pool.config import PoolConfig, Role, Share
from vla_rlaif.pool.replica import Claim, Duty
from vla_rlaif.serve.settings import ServeSettings

Kind = Literal["serve", "train", "rollout"]


@dataclass(frozen=True, kw_only=True)
class Work:
    """Goes to every replica. Paths are on a file system that all nodes share."""

    run: RunConfig
    state_dir: Path  # of the pool
    serve: ServeSettings
    tokens: tuple[str, ...] = ()  # of the robots
    fake_gpus: bool = False  # GPUs are numbers only: training shows the CPU as a device for each replica

    @property
    def audit(self) -> Path:
        return self.state_dir / "audit.jsonl"

    @property
    def endpoints(self) -> Path:
        return self.state_dir / "endpoints"


@dataclass(frozen=True, kw_only=True)
class Division:
    """A training run over some GPUs: the global batch is the same over any number."""

    devices: int
    micro_batches: int  # of a minibatch, one after the other


def kind_of(role: Role) -> Kind:
    if role.checkpoints:
        return "train"
    return "rollout" if role.preemptible == "at_chunk" else "serve"


def check_work(config: PoolConfig, work: Work) -> None:
    """Raises ValueError where the pool and the run do not fit."""
    for kind in ("serve", "train", "rollout"):
        names = [name for name, role in config.roles.items() if kind_of(role) == kind]
        if len(names) > 1:
            raise ValueError(
                f"roles {' and '.join(names)} both {kind} (preemptible); a live pool has one role of each."
            )
        if kind == "rollout" and names and work.run.loop.stored is None:
            raise ValueError(f"role {names[0]} collects groups, and the run has no place for them: set loop.stored.")
    if work.serve.port:
        raise ValueError(f"port {work.serve.port} cannot be had by every server of a node; leave it 0, robots read it.")
    for name, role in config.roles.items():
        if kind_of(role) == "train":
            _check_sizes(config, name, role, work)


def divide(work: Work, role: Role, num_gpus: int) -> Division | None:
    """How the run runs on so many GPUs; None: they cannot share its minibatch evenly."""
    if not role.allows(num_gpus):
        return None
    run = work.run
    devices = num_gpus // role.gpus_per_replica if work.fake_gpus else num_gpus
    micro_batches = run.learner.micro_batches if role.global_batch is None else role.accumulation(num_gpus)
    if run.learner.minibatch % (devices * micro_batches):
        return None
    return Division(devices=devices, micro_batches=micro_batches)


def _check_sizes(config: PoolConfig, name: str, role: Role, work: Work) -> None:
    """Every size that the calendar gives the training role must be one that the run can be divided over."""
    node_size = config.pool.gpus_per_node
    sizes = {n for shares in config.shares.values() if name in shares for n in _sizes(shares[name])}
    for num_gpus in sorted(sizes - {0}):
        if num_gpus > node_size and not work.fake_gpus:
            raise ValueError(
                f"{name} gets {num_gpus} GPUs, and a run is one process on one node, which has {node_size}: "
                f"give {name} at most {node_size}."
            )
        if divide(work, role, num_gpus) is None:
            raise ValueError(
                f"{name} on {num_gpus} GPUs cannot share learner.minibatch {work.run.learner.minibatch} evenly; "
                "use a multiple of the GPUs times their micro-batches."
            )


def _sizes(share: Share) -> tuple[int, int, int]:
    return share.min, share.target, share.most


def duty_of(kind: Kind, claim: Claim, work: Work, address: str) -> Duty:
    """``address``: of the node, for robots."""
    if kind == "serve":
        from vla_rlaif.pool.serve_duty import ServeDuty

        return ServeDuty(claim.replica, work, address)
    if kind == "rollout":
        from vla_rlaif.pool.rollout_duty import RolloutDuty

        return RolloutDuty(claim.replica, work)
    from vla_rlaif.pool.train_duty import TrainDuty

    return TrainDuty(claim.replica, work)
