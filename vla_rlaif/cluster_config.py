"""The cluster section of a run: which workers there are, what each of them gets, and what happens when one fails."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from vla_rlaif.config_base import Model, Positive

Role = Literal["learner", "rollout", "reward", "reference", "env"]
Seconds = Annotated[float, Field(gt=0)]


class RoleConfig(Model):
    """What each worker of a role gets, on one node."""

    workers: Positive = 1
    gpus: Annotated[float, Field(ge=0)] = 0.0  # below 1 a part of one GPU, else whole ones
    share: Annotated[float, Field(gt=0, le=1)] = 1.0  # of each of its whole GPUs' memory, where others lie there too
    cpus: Annotated[float, Field(gt=0)] = 1.0
    threads: Positive | None = None  # of its arithmetic; null: the whole part of cpus, at least 1
    memory_gb: Annotated[float, Field(gt=0)] | None = None  # host memory that is kept for it; null: not counted
    labels: dict[str, str] = Field(default_factory=dict)  # that its node must have
    colocate_with: Role | None = None  # on the GPUs of that role's workers, as many on each of them

    @property
    def num_threads(self) -> int:
        return self.threads or max(1, int(self.cpus))

    @property
    def gpu_share(self) -> float:
        """Of the memory of each GPU that it sees."""
        return self.gpus if self.gpus < 1 else self.share

    @model_validator(mode="after")
    def _whole_gpus(self) -> "RoleConfig":
        if self.gpus > 1 and self.gpus != int(self.gpus):
            raise ValueError(f"gpus {self.gpus:g}: a worker gets a part of one GPU, or whole ones.")
        if self.gpus < 1 and self.share != 1:
            raise ValueError(f"share {self.share:g} is for whole GPUs, and gpus is {self.gpus:g}: remove it.")
        return self


class RolesConfig(Model):
    learner: RoleConfig = RoleConfig()
    rollout: RoleConfig = RoleConfig()
    reward: RoleConfig = RoleConfig()
    reference: RoleConfig | None = None  # null: the learner computes the reference
    env: RoleConfig | None = (
        None  # null: rollout workers have their envs with them; else each has an equal part of these
    )

    def present(self) -> dict[Role, RoleConfig]:
        """Those that have workers."""
        every: dict[Role, RoleConfig | None] = {
            "learner": self.learner,
            "rollout": self.rollout,
            "reward": self.reward,
            "reference": self.reference,
            "env": self.env,
        }
        return {name: role for name, role in every.items() if role is not None}


class SyncConfig(Model):
    """How weights travel from the learner to those who act."""

    transport: Literal["auto", "shared_memory", "relay", "process_group", "object_store", "disk"] = "auto"
    backend: Literal["auto", "gloo", "nccl"] = "auto"  # of the process group; auto: nccl where all ends have GPUs
    wire: Literal["float32", "bfloat16"] = "float32"  # bfloat16 rounds the weights that act, and halves the bytes
    bucket_mb: Positive = 8  # what is sent at once
    timeout_s: Seconds = 60.0  # for one bucket


class FaultsConfig(Model):
    """How long is waited for what, and how often a worker may come back. Updates have learner.timeout_s."""

    max_restarts: Annotated[int, Field(ge=0)] = 3  # of each worker
    start_timeout_s: Seconds = 600.0  # for a worker to be placed and built
    rollout_timeout_s: Seconds = 600.0  # for the episodes of one round
    reward_timeout_s: Seconds = 300.0  # for the scores of one round
    env_timeout_s: Seconds = 300.0  # for one chunk of all members of an env worker
    reference_timeout_s: Seconds = 300.0  # for the reference of one step
    silent_s: Seconds = 60.0  # a process that does not even answer a ping for so long is ended


class LocalClusterConfig(Model):
    """One process, with env subprocesses and learner ranks. Ray is not imported."""

    type: Literal["local"] = "local"


class NodesConfig(Model):
    """Nodes of one kind, as `plan` is to count with them; a run asks Ray what there is."""

    count: Positive = 1
    gpus: Annotated[int, Field(ge=0)] = 0
    gpu_memory_gb: Annotated[float, Field(gt=0)] = 80.0  # of one GPU
    cpus: Positive = 8
    memory_gb: Annotated[float, Field(gt=0)] | None = None  # of the host; null: not counted
    labels: dict[str, str] = Field(default_factory=dict)


class RayClusterConfig(Model):
    """Workers are Ray actors, on one machine or many. Needs the extra `ray`."""

    type: Literal["ray"] = "ray"
    address: str = "auto"  # auto: of the cluster that this machine belongs to; local: a new one here; or host:port
    roles: RolesConfig = RolesConfig()
    mode: Literal["disaggregated", "colocated", "hybrid"] = "disaggregated"  # which roles share GPUs: none, all, some
    strategy: Literal["spread", "pack"] = "pack"  # over the nodes
    nodes: tuple[NodesConfig, ...] = ()  # for `plan`, which otherwise only lists what is asked for
    sync: SyncConfig = SyncConfig()
    faults: FaultsConfig = FaultsConfig()

    def host_of(self, role: Role) -> Role:
        """Whose GPUs a role uses; itself where it has its own."""
        config = self.roles.present()[role]
        if self.mode == "colocated" and config.gpus:
            return "learner"
        return config.colocate_with or role

    @model_validator(mode="after")
    def _mode_fits(self) -> "RayClusterConfig":
        roles = self.roles.present()
        guests = {name: role.colocate_with for name, role in roles.items() if role.colocate_with is not None}
        if self.mode == "hybrid" and not guests:
            raise ValueError("mode hybrid, but no role has colocate_with: add it, or use disaggregated.")
        if self.mode != "hybrid" and guests:
            names = " and ".join(f"roles.{name}" for name in guests)
            raise ValueError(f"mode {self.mode} says where all roles go; colocate_with of {names} is for hybrid.")
        for name, host in guests.items():
            if host not in roles or host in guests:
                raise ValueError(f"roles.{name} is colocated with {host}, which has no GPUs of its own.")
        env, players = self.roles.env, self.roles.rollout.workers
        if env is not None and (env.workers % players or env.gpus):
            raise ValueError(
                f"roles.env has {env.workers} workers with {env.gpus:g} GPUs; wanted none, and a multiple of the "
                f"{players} rollout workers."
            )
        for name, role in roles.items():
            host = self.host_of(name)
            if host != name:
                self._guest_fits(name, role, host, roles[host])
        return self

    def _guest_fits(self, name: Role, guest: RoleConfig, host_name: Role, host: RoleConfig) -> None:
        where = f"roles.{name} on the GPUs of roles.{host_name}"
        if not guest.gpus or not host.gpus:
            raise ValueError(f"{where}: {guest.gpus:g} and {host.gpus:g} GPUs a worker; both need some.")
        if guest.workers % host.workers:
            raise ValueError(
                f"{where}: {guest.workers} workers do not spread evenly over {host.workers}; use a multiple."
            )
        wrong = {key for key, value in guest.labels.items() if host.labels.get(key, value) != value}
        if wrong:
            raise ValueError(f"{where}: they want different values of the label {sorted(wrong)[0]}.")


ClusterConfig = LocalClusterConfig | RayClusterConfig


def check_players(
    players: int, *, num_envs: int, group: int, is_halved: bool, processes: int, act_batch: int | None
) -> None:
    """Raises ValueError if the members of all envs do not split over the rollout workers; ``processes`` of an env share
    its members, ``is_halved`` is a double buffer."""
    each, left = divmod(num_envs, players)
    if left or each % group:
        raise ValueError(
            f"env.num_envs {num_envs} does not give {players} rollout workers whole groups of {group}; "
            f"use a multiple of {players * group}."
        )
    rows = each // 2 if is_halved else each
    if act_batch is not None and rows % act_batch:
        raise ValueError(
            f"loop.act_batch {act_batch} does not divide the {rows} members that the policy of one rollout worker acts "
            "for at once."
        )
    if processes > each:
        raise ValueError(f"env.workers {processes} share the {each} envs of one rollout worker; use fewer.")


def check_ranks(learner: RoleConfig, *, backend: str, devices: int | None, rows: int) -> None:
    """Raises ValueError if several learner workers cannot share the ``rows`` of a micro-batch as ranks."""
    ranks = learner.workers
    if ranks == 1:
        return
    if backend == "jax":
        raise ValueError(
            f"roles.learner has {ranks} workers, and a JAX learner is one process: give one worker more GPUs."
        )
    if devices is not None:
        raise ValueError(
            f"learner.devices {devices} is for the devices of one learner, and there are {ranks} learner workers, each "
            "with one device; remove it."
        )
    if learner.gpus > 1:
        raise ValueError(
            f"roles.learner: each of its {ranks} workers is one rank and uses one GPU; set gpus to 1, not "
            f"{learner.gpus:g}."
        )
    if rows % ranks:
        raise ValueError(f"micro-batches of {rows} decisions do not split over {ranks} learner workers.")
