"""What the torch learner costs: rows a second against a loop written by hand, bytes kept and sent, ranks, compiling.

    python benchmarks/torch_learner.py --out torch_learner.json

The policy is a Gaussian on a residual tower; the loop by hand does the same sums on the same rows without the learner.
Best of the repetitions, taken in turns. Bytes are of activations that autograd keeps for the backward pass.
"""

import json
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import tyro

from vla_rlaif.checkpoint import load_policy
from vla_rlaif.config import LearnerConfig
from vla_rlaif.grpo import GRPO
from vla_rlaif.learning import divide
from vla_rlaif.torch_learner import TorchLearner
from vla_rlaif.torch_ranks import TorchRanks
from vla_rlaif.torch_training import adamw, clipped_step
from vla_rlaif.torch_weights import load_strictly
from vla_rlaif.types import Batch, Observation, Targets, Weights

ALGORITHM = GRPO(group_size=8, kl_coef=0.02)
STATE, DIMS, STD = 32, 28, 0.3


@dataclass(frozen=True)
class Options:
    width: int = 512
    layers: int = 6
    rows: int = 1024
    minibatch: int = 256
    repetitions: int = 5
    ranks: int = 2  # 0: leave them out
    out: Path | None = None  # JSON file to write


class Residual(torch.nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.norm, self.up = torch.nn.LayerNorm(width), torch.nn.Linear(width, 2 * width)
        self.down = torch.nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.nn.functional.silu(self.up(self.norm(x))))


class Tower:
    """A Gaussian policy; S = 1."""

    def __init__(self, width: int, layers: int, *, compiled: bool = False):
        torch.manual_seed(0)
        blocks = [Residual(width) for _ in range(layers)]
        head = torch.nn.Linear(width, DIMS)
        self.width, self.layers, self.blocks = width, layers, blocks
        self.module = torch.nn.Sequential(torch.nn.Linear(STATE, width), *blocks, head).eval()
        self._forward = torch.compile(self.module) if compiled else self.module

    @property
    def trainable(self) -> frozenset[str]:
        return frozenset(name for name, _ in self.module.named_parameters())

    def metadata(self) -> dict[str, Any]:
        return {"width": self.width, "layers": self.layers}

    def load(self, weights: Weights, version: int) -> None:
        load_strictly(self.module, weights)

    def inputs(self, obs: Observation, trace: Mapping[str, np.ndarray], executed: np.ndarray) -> dict[str, np.ndarray]:
        return {"state": obs.state, "sample": trace["sample"]}

    def prepare(self, inputs: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        return inputs

    def means(self, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return self._forward(inputs["state"])[:, None]

    def score(
        self, inputs: Mapping[str, torch.Tensor], reference: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        means = self.means(inputs)
        logp = -0.5 * torch.square((inputs["sample"] - means) / STD).mean(-1)
        return logp, None if reference is None else 0.5 * torch.square((means - reference) / STD).mean(-1)


def reload(folder: Path) -> Tower:
    metadata, weights = load_policy(folder)
    policy = Tower(**metadata)
    policy.load(weights, 0)
    return policy


def make_batch(rows: int) -> Batch:
    rng = np.random.default_rng(0)
    draw = lambda *shape: rng.normal(size=shape).astype(np.float32)  # noqa: E731
    return Batch(
        obs=Observation(images={}, state=draw(rows, STATE), instruction=("",) * rows),
        trace={"sample": draw(rows, 1, DIMS)},
        executed=np.ones(rows, np.int64),
        advantage=draw(rows),
        mask=np.ones(rows, bool),
        num_valid=float(rows),
    )


def by_hand(policy: Tower, config: LearnerConfig) -> Callable[[Batch], None]:
    """GRPO in a plain loop: same minibatches, same loss, same optimiser; no average, no metrics, no checks."""
    parameters = dict(policy.module.named_parameters())
    optimizer = adamw(parameters, lr=config.lr, weight_decay=0.0)

    def update(batch: Batch) -> None:
        work = divide(policy.inputs(batch.obs, batch.trace, batch.executed), batch, 0, config, None, {})
        minibatches = []
        with torch.no_grad():
            for (rows,) in work.minibatches:
                x = {k: torch.tensor(v) for k, v in rows.inputs.items()}
                advantage, mask = torch.tensor(rows.advantage), torch.tensor(rows.mask)
                logp_old, means = policy.score(x, None)[0], policy.means(x)
                targets = Targets(logp_old=logp_old, advantage=advantage, mask=mask, num_valid=work.num_valid)
                minibatches.append((x, targets, means))
        for i in (i for order in work.orders for i in order):
            x, targets, means = minibatches[i]
            optimizer.zero_grad()
            logp, kl = policy.score(x, means)
            ALGORITHM.loss(logp, targets, kl)[0].backward()
            clipped_step(optimizer, parameters, lr=config.lr, max_grad_norm=1.0)

    return update


def in_turns(sides: Mapping[str, Callable[[], object]], repetitions: int) -> dict[str, float]:
    """Best seconds of each; the first call of each does not count."""
    best = dict.fromkeys(sides, float("inf"))
    for run in sides.values():
        run()
    for _ in range(repetitions):
        for name, run in sides.items():
            begun = time.perf_counter()
            run()
            best[name] = min(best[name], time.perf_counter() - begun)
    return best


@contextmanager
def kept() -> Iterator[list[int]]:
    """[bytes now, most bytes] of what autograd keeps inside, by storage; parameters do not count."""
    count, seen = [0, 0], dict[int, int]()

    def release(storage: int, size: int) -> None:
        seen[storage] -= 1
        if not seen[storage]:
            count[0] -= size

    def pack(value: torch.Tensor) -> Callable[[], torch.Tensor]:
        base = value if value._base is None else value._base
        if isinstance(base, torch.nn.Parameter):  # a weight, or its transpose
            return lambda: value
        held = value.detach()  # with its history, the graph would keep itself alive
        unpack = lambda: held  # noqa: E731
        storage, size = value.untyped_storage().data_ptr(), value.untyped_storage().nbytes()
        seen[storage] = seen.get(storage, 0) + 1
        count[0] += size if seen[storage] == 1 else 0
        count[1] = max(count)
        weakref.finalize(unpack, release, storage, size)
        return unpack

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda unpack: unpack()):
        yield count


def main(options: Options) -> None:
    batch, size = make_batch(options.rows), (options.width, options.layers)
    config = LearnerConfig(lr=1e-4, epochs=2, minibatch=options.minibatch, target_kl=None)
    trained_rows, result = config.epochs * options.rows, dict[str, Any]()
    result["parameters"] = sum(v.numel() for v in Tower(*size).module.parameters())
    result["threads"] = torch.get_num_threads()

    learner, plain = TorchLearner(Tower(*size), ALGORITHM, config), by_hand(Tower(*size), config)
    still = config.model_copy(update={"lr": 1e-30})
    compiled = TorchLearner(Tower(*size, compiled=True), ALGORITHM, still)
    result["ratio_error_compiled"] = compiled.update(batch, 0)["ratio_error"]
    seconds = in_turns(
        {
            "by_hand": lambda: plain(batch),
            "learner": lambda: learner.update(batch, 0),
            "compiled": lambda: compiled.update(batch, 0),
        },
        options.repetitions,
    )
    result |= {f"rows_per_s_{name}": trained_rows / value for name, value in seconds.items()}

    for micro in (1, 2, 4, 8):
        each = TorchLearner(Tower(*size), ALGORITHM, config.model_copy(update={"micro_batches": micro}))
        with kept() as count:
            each.update(batch, 0)
        result[f"kept_mb_{micro}_micro_batches"] = count[1] / 2**20

    result |= optimisers(Tower(*size), options.repetitions)
    for sharding in ("replicated", "fsdp") if options.ranks else ():
        one = config.model_copy(update={"sharding": sharding})
        begun = time.perf_counter()
        ranks = TorchRanks(Tower(*size), ALGORITHM, one, reload=reload, num_ranks=options.ranks)
        result[f"start_s_{sharding}"] = time.perf_counter() - begun
        sides = {
            "update": lambda ranks=ranks: ranks.update(batch, 0),
            "weights": lambda ranks=ranks: ranks.weights(),
            "state": lambda ranks=ranks: ranks.state(),
        }
        seconds = in_turns(sides, options.repetitions)
        result[f"rows_per_s_{sharding}_on_{options.ranks}"] = trained_rows / seconds["update"]
        megabytes = {name: sum(v.nbytes for v in sides[name]().values()) / 2**20 for name in ("weights", "state")}
        result |= {f"{name}_mb_per_s_{sharding}": megabytes[name] / seconds[name] for name in megabytes}
        ranks.close()
    for name, value in result.items():
        print(f"{name:32} {value:.4g}")
    if options.out is not None:
        options.out.write_text(json.dumps(result, indent=1))


def optimisers(policy: Tower, repetitions: int) -> dict[str, float]:
    """Milliseconds of an AdamW step, by kind."""
    values = list(policy.module.parameters())
    for value in values:
        value.grad = torch.randn_like(value)
    kinds = {
        "fused": torch.optim.AdamW(values, lr=1e-4, fused=True),
        "foreach": torch.optim.AdamW(values, lr=1e-4, foreach=True),
        "single": torch.optim.AdamW(values, lr=1e-4, foreach=False),
    }
    seconds = in_turns({name: optimizer.step for name, optimizer in kinds.items()}, repetitions)
    return {f"adamw_ms_{name}": 1000 * value for name, value in seconds.items()}


if __name__ == "__main__":
    main(tyro.cli(Options))
