"""A torch learner on several ranks of this host: a process each, on its GPU or on the CPU.

The driver cuts every micro-batch into as many parts as there are ranks. What is frozen never comes back from them: the
driver has it.
"""

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch

from vla_rlaif.checkpoint import save_policy
from vla_rlaif.config import LearnerConfig
from vla_rlaif.interfaces import Algorithm
from vla_rlaif.learning import Anchor, Chunks, Rows, Work, divide
from vla_rlaif.rank_group import Arrays, Link, RankGroup
from vla_rlaif.torch_imitation import imitable
from vla_rlaif.torch_learner import TorchLearner, TorchPolicy, check_sizes
from vla_rlaif.torch_parallel import Rank, serve_store
from vla_rlaif.torch_weights import as_arrays, named_tensors
from vla_rlaif.types import Batch, Weights, under

Reload = Callable[[Path], TorchPolicy]


@runtime_checkable
class StoredPolicy(TorchPolicy, Protocol):
    """A policy that can be written to a folder."""

    def metadata(self) -> dict[str, Any]: ...


@dataclass(frozen=True, kw_only=True)
class Start:
    """What a rank needs to begin; plain values, which is all that goes to a new process."""

    folder: Path  # of the start policy
    reload: Reload
    algorithm: Algorithm
    config: LearnerConfig
    num_ranks: int
    port: int  # of the store at which the ranks meet


class TorchRanks:
    """A Learner whose work is done by ``num_ranks`` processes; equal to one TorchLearner up to rounding.

    ``reload`` makes the policy again from a folder that ``save_policy`` wrote, in each process: a module's function or
    a partial of one. Which rank does what is not in the state, so a run may go on with another number of ranks or
    another sharding.
    """

    def __init__(
        self,
        policy: StoredPolicy,
        algorithm: Algorithm,
        config: LearnerConfig,
        anchor: Anchor | None = None,
        *,
        reload: Reload,
        num_ranks: int,
    ):
        check_sizes(config, anchor, num_ranks)
        self.version = 0
        self._policy, self._config, self._anchor, self._num_ranks = policy, config, anchor, num_ranks
        self._anchor_inputs = {} if anchor is None else imitable(policy).imitation_inputs(anchor.obs)
        self._store = serve_store()  # the ranks meet there, so it lives as long as they do
        with tempfile.TemporaryDirectory(prefix="vla_rlaif-ranks-") as folder:
            save_policy(Path(folder) / "start", policy.metadata(), as_arrays(named_tensors(policy.module)))
            start = Start(
                folder=Path(folder) / "start",
                reload=reload,
                algorithm=algorithm,
                config=config,
                num_ranks=num_ranks,
                port=self._store.port,
            )
            self._group = RankGroup(partial(serve, start), num_ranks, timeout_s=config.timeout_s)

    @property
    def pids(self) -> list[int]:
        return self._group.pids

    def close(self) -> None:
        self._group.close()

    def update(self, batch: Batch, seed: int) -> dict[str, float]:
        """See JaxLearner.update."""
        if not len(batch.mask):
            return {"updates": 0.0}
        inputs = self._policy.inputs(batch.obs, batch.trace, batch.executed)
        work = divide(inputs, batch, seed, self._config, self._anchor, self._anchor_inputs)
        answers = self._group.ask("update", self._messages(work))
        self.version += 1
        return answers[0][0]["metrics"]

    def _messages(self, work: Work) -> Iterator[Sequence[tuple[Mapping[str, Any], Arrays]]]:
        """The head, all minibatches, then the demonstrations of all updates."""
        num_updates = sum(len(order) for order in work.orders)
        head = {"do": "update", "orders": work.orders, "num_valid": work.num_valid, "kl_coef": work.kl_coef}
        head["seed"] = work.seed
        head["num_anchors"] = 0 if self._anchor is None else num_updates
        yield [(head, {})] * self._num_ranks
        for minibatch in work.minibatches:
            for rows in minibatch:
                flat = {f"inputs/{k}": v for k, v in rows.inputs.items()}
                flat |= {"advantage": rows.advantage, "mask": rows.mask}
                flat |= {} if rows.logp_acted is None else {"logp_acted": rows.logp_acted}
                flat |= {} if rows.reference is None else {"reference": rows.reference}
                yield [({}, part) for part in self._parts(flat)]
        for _ in range(head["num_anchors"]):
            for chunks in next(work.anchors):
                flat = {f"inputs/{k}": v for k, v in chunks.inputs.items()} | {"action": chunks.action}
                about = {"weight": chunks.weight, "samples": chunks.samples}
                yield [(about, part) for part in self._parts(flat)]

    def _parts(self, arrays: Arrays) -> list[Arrays]:
        """Equal shares of the rows, in order."""
        split = {name: np.split(value, self._num_ranks) for name, value in arrays.items()}
        return [{name: parts[i] for name, parts in split.items()} for i in range(self._num_ranks)]

    @cached_property
    def _frozen(self) -> Weights:
        tensors = named_tensors(self._policy.module)
        return as_arrays({name: value for name, value in tensors.items() if name not in self._policy.trainable})

    def weights(self, *, averaged: bool = False) -> Weights:
        return {**self._frozen, **self.trained(averaged=averaged)}

    def trained(self, *, averaged: bool) -> Weights:
        return self._ask("trained", averaged=averaged)

    def state(self) -> Weights:
        return self._ask("state")

    def restore(self, state: Weights) -> None:
        self._ask("restore", arrays=state)
        self.version = int(state["version"])

    def _ask(self, do: str, *, arrays: Arrays | None = None, **arguments: bool) -> dict[str, np.ndarray]:
        message = {"do": do, **arguments}, arrays or {}
        return self._group.ask(do, iter([[message] * self._num_ranks]))[0][1]


def serve(start: Start, index: int, link: Link) -> None:
    """A rank: builds its learner, then does what it is told until the driver leaves."""
    torch.set_num_threads(max(1, torch.get_num_threads() // start.num_ranks))
    rank = Rank.join(
        index,
        start.num_ranks,
        sharding=start.config.sharding,
        port=start.port,
        timeout_s=start.config.timeout_s,
        meet_s=start.config.timeout_s,
    )
    learner = TorchLearner(start.reload(start.folder), start.algorithm, start.config, rank=rank)
    link.send({"ready": True})
    while True:
        head, arrays = link.receive()
        match head["do"]:
            case "update":
                link.send({"metrics": learner.learn(_received(head, link, start.config))})
            case "trained":
                link.send({}, learner.trained(averaged=head["averaged"]))
            case "state":
                link.send({}, learner.state())
            case "restore":
                learner.restore(arrays)
                link.send({})


def _received(head: Mapping[str, Any], link: Link, config: LearnerConfig) -> Work:
    """This rank's part of the work; minibatches are read as they are needed."""
    num = config.micro_batches
    minibatches = ([_rows(link) for _ in range(num)] for _ in head["orders"][0])

    def anchors() -> Iterator[list[Chunks]]:
        # The driver sends those of every update. They are read when the first of them is needed, and all at once: after
        # a brake the rest would be in the way of the next message.
        yield from [[_chunks(link) for _ in range(num)] for _ in range(head["num_anchors"])]

    return Work(
        minibatches=minibatches,
        orders=head["orders"],
        num_valid=head["num_valid"],
        kl_coef=head["kl_coef"],
        anchors=anchors(),
        seed=head["seed"],
    )


def _rows(link: Link) -> Rows:
    _, arrays = link.receive()
    return Rows(
        inputs=_inputs(arrays),
        advantage=arrays["advantage"],
        mask=arrays["mask"],
        logp_acted=arrays.get("logp_acted"),
        reference=arrays.get("reference"),
    )


def _chunks(link: Link) -> Chunks:
    head, arrays = link.receive()
    return Chunks(inputs=_inputs(arrays), action=arrays["action"], weight=head["weight"], samples=head["samples"])


def _inputs(arrays: Arrays) -> dict[str, np.ndarray]:
    return under("inputs/", arrays)
