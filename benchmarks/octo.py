"""How fast Octo is here: forward (the trunk), sample (the denoising steps of a given readout), act (both, from the
host) and update (a learner's step), by batch; with the operations of each and its share of the measured peak.

    python benchmarks/octo.py all --size small --batches 1 8 32 --out octo.json

Random weights of the published sizes, random pictures, no language encoder (its features are a table, as in a run).
"in one piece" is the trunk without the slices that acting uses on a CPU (policies/octo/slices.py). "re-run" is the
naive way to act: for each denoising step the whole model, every token of the last block, every frame of the window.
"""

import json
import os
import platform
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from clock import Side, Time, matmuls, take_turns
from flax.traverse_util import unflatten_dict

from vla_rlaif.build_algorithm import build_algorithm
from vla_rlaif.config import RunConfig, load_config
from vla_rlaif.env_config import TabletopConfig
from vla_rlaif.jax_learner import JaxLearner
from vla_rlaif.plan_octo import CAMERAS, STATE_DIM, octo_compute, octo_cost
from vla_rlaif.policies.octo import chain, diffusion
from vla_rlaif.policies.octo.construct import from_scratch
from vla_rlaif.policies.octo.cost import OctoCost
from vla_rlaif.policies.octo.model import attention_mask, take_group
from vla_rlaif.policies.octo.network import BLOCKS, OctoNetwork, Params
from vla_rlaif.policies.octo.policy import OctoPolicy
from vla_rlaif.policies.octo.slices import acting_readout, acting_rows
from vla_rlaif.policy_config import OctoConfig
from vla_rlaif.types import Batch, EnvSpec, Observation

CONFIGS = Path(__file__).parents[1] / "configs"
Part = Literal["forward", "sample", "act", "update"]
Tune = Literal["head", "lora", "full"]


@dataclass(frozen=True)
class Options:
    part: Annotated[Literal["forward", "sample", "act", "update", "all"], tyro.conf.Positional] = "all"
    size: Literal["small", "tiny"] = "small"
    batches: tuple[int, ...] = (1, 8, 32)
    update_batches: tuple[int, ...] = (4,)
    """Decisions of a minibatch."""
    rerun_batches: tuple[int, ...] = (1, 8)
    """Of act, to be compared with the naive way. It takes 20 times as long as act."""
    tune: tuple[Tune, ...] = ("head", "lora", "full")
    compute: Literal["float32", "bfloat16"] = "float32"
    window: int = 1
    repetitions: int = 5
    peak_s: float = 0.05
    """Seconds of each matrix multiplication before each side. On a shared machine as long as the sides take: short ones
    find a quiet moment more easily."""
    out: Path | None = None
    """JSON file to write."""


def main(options: Options) -> None:
    result = measure(options)
    if options.out is not None:
        options.out.write_text(json.dumps(result, indent=1, default=str))


def measure(options: Options) -> dict[str, Any]:
    """Everything that the options ask for, printed as it comes."""
    config = run_config(options.size, options.window, options.compute)
    wanted = ("forward", "sample", "act", "update") if options.part == "all" else (options.part,)
    between = matmuls(peak_shapes(config, max(options.batches)), jnp.dtype(options.compute))
    rows: list[dict[str, Any]] = []
    print(f"{machine()}, {options.size}, window {options.window}, {options.compute}")
    for part in wanted:
        for sides in sides_of(part, config, options):
            times = take_turns(sides, between, options.repetitions, between_s=options.peak_s)
            rows += [row(side, times[side.name], peak(between, times)) for side in sides]
            print_rows(rows[-len(sides) :], header=len(rows) == len(sides))
    for name, ratio in ratios(rows).items():
        print(f"{name}: {ratio:.2f}")
    return {"machine": machine(), "options": asdict(options), "rows": rows, "ratios": ratios(rows)}


def run_config(size: Literal["small", "tiny"], window: int, compute: str) -> RunConfig:
    """The committed run of Octo-Small, or the default tiny Octo on the same env; head tuning."""
    config = load_config(CONFIGS / "octo_small_reach.yaml")
    policy, env = config.policy, config.env
    if size == "tiny":
        policy, env = OctoConfig(), TabletopConfig()
    changed = OctoConfig.model_validate({**policy.model_dump(), "window": window, "compute": compute})
    return config.model_copy(update={"policy": changed, "env": env})


def parts(config: RunConfig) -> tuple[OctoConfig, TabletopConfig]:
    assert isinstance(config.policy, OctoConfig)
    assert isinstance(config.env, TabletopConfig)
    return config.policy, config.env


def make_policy(config: RunConfig) -> OctoPolicy:
    policy, env = parts(config)
    spec = EnvSpec(
        cameras=CAMERAS,
        image_size=env.image_size,
        state_dim=STATE_DIM,
        action_dim=7,
        chunk=env.chunk,
        max_decisions=env.max_steps // env.chunk,
        instructions=("move the gripper to the green disc",),
    )
    return from_scratch(policy, spec, seed=0)


def observations(policy: OctoPolicy, num: int) -> Observation:
    """Random pictures: rows that differ, so that none shares a trunk pass."""
    rng, spec = np.random.default_rng(0), policy.spec
    lead = (num,) if policy.window == 1 else (num, policy.window)
    shape = (*lead, spec.image_size, spec.image_size, 3)
    return Observation(
        images={camera: rng.integers(0, 256, shape, np.uint8) for camera in spec.cameras},
        state=rng.standard_normal((*lead, spec.state_dim)).astype(np.float32),
        instruction=spec.instructions * num,
        frame_ok=None if policy.window == 1 else np.ones(lead, bool),
    )


def peak_shapes(config: RunConfig, batch: int) -> list[tuple[int, int, int]]:
    """Large squares, and what the trunk multiplies at the largest batch. (CPUs are done at 2048, GPUs are not.)"""
    policy, env = parts(config)
    tokens, width, hidden = batch * octo_cost(policy, env).num_tokens, policy.token_dim, policy.mlp_dim
    squares = [1024, 2048] if jax.default_backend() == "cpu" else [4096, 8192]
    return [*((n, n, n) for n in squares), (tokens, width, width), (tokens, width, hidden), (tokens, hidden, width)]


def sides_of(part: Part, config: RunConfig, options: Options) -> Iterator[list[Side]]:
    """Sides that are timed in turns."""
    if part == "update":
        for batch in options.update_batches:
            for tune in options.tune:
                yield [update_side(config, tune, batch)]
        return
    policy = make_policy(config)
    for batch in options.batches:
        if part == "forward":
            yield forward_sides(policy, config, batch)
        elif part == "sample":
            yield [sample_side(policy, config, batch)]
        elif batch in options.rerun_batches:
            yield [act_side(policy, config, batch), rerun_side(policy, config, batch)]
        else:
            yield [act_side(policy, config, batch)]


def forward_sides(policy: OctoPolicy, config: RunConfig, batch: int) -> list[Side]:
    cost, network = octo_cost(*parts(config)), policy.network
    inputs = on_device(policy.imitation_inputs(observations(policy, batch)))
    counted = xla_flops(network.readout, policy.params, inputs)
    sides: list[Side] = []
    ways: dict[str, Callable[..., jax.Array]] = {"forward": acting_readout}
    if acting_rows(network, inputs) < batch:
        ways["forward, in one piece"] = OctoNetwork.readout
    for name, function in ways.items():
        compiled = jax.jit(function, static_argnums=0)
        run = lambda compiled=compiled: compiled(network, policy.params, inputs)  # noqa: E731
        flops = batch * trunk_flops(cost)
        sides.append(Side(name=f"{name}, {batch}", run=run, flops=flops, rows=batch, xla_flops=counted))
    return sides


def sample_side(policy: OctoPolicy, config: RunConfig, batch: int) -> Side:
    network, (octo, _) = policy.network, parts(config)
    cost, steps = octo_cost(*parts(config)), octo.diffusion_steps
    readout = jnp.ones((batch, 1, octo.token_dim))
    seeds, scale = jnp.arange(batch, dtype=jnp.uint32), jnp.float32(1)
    compiled = jax.jit(chain.sample, static_argnums=0)
    example = jnp.ones((batch, network.width)), jnp.zeros(batch, jnp.int32)
    counted = xla_flops(network.predict, policy.params, readout[:, 0], *example)  # XLA counts a loop's body once
    return Side(
        name=f"sample, {batch}",
        run=lambda: compiled(network, policy.params, readout, seeds, scale),
        flops=batch * steps * cost.head_flops(),
        rows=batch,
        xla_flops=steps * counted,
    )


def act_side(policy: OctoPolicy, config: RunConfig, batch: int) -> Side:
    obs, seeds = observations(policy, batch), np.arange(batch, dtype=np.uint32)
    flops = batch * octo_compute(config, parts(config)[1], octo_cost(*parts(config))).decision
    return Side(name=f"act, {batch}", run=lambda: policy.act(obs, seeds).action, flops=flops, rows=batch)


def rerun_side(policy: OctoPolicy, config: RunConfig, batch: int) -> Side:
    """The whole model for each denoising step."""
    cost, network, window = octo_cost(*parts(config)), policy.network, policy.window
    obs, steps = observations(policy, batch), network.head_spec.diffusion_steps
    step = jax.jit(lambda params, inputs, x, s, z: rerun_step(network, params, inputs, x, s, z))
    noise = np.random.default_rng(0).standard_normal((steps + 1, batch, window, network.width)).astype(np.float32)

    def run() -> jax.Array:
        x = jnp.asarray(noise[steps])
        for s in range(steps - 1, -1, -1):
            inputs = on_device(policy.imitation_inputs(obs))
            x = step(policy.params, inputs, x, np.full((batch, window), s, np.int32), noise[s])
        return x

    head = window * cost.head_flops()
    flops = batch * steps * (cost.encode_flops() + cost.block_flops(every_row=True) + head)
    return Side(name=f"re-run, {batch}", run=run, flops=flops, rows=batch)


def rerun_step(
    network: OctoNetwork, params: Params, inputs: Mapping[str, jax.Array], x: jax.Array, s: jax.Array, z: jax.Array
) -> jax.Array:
    tokens = network.encode(params, inputs)
    mask = attention_mask(network.model, tokens.layout, tokens.key_ok)
    weights = {k.removeprefix(BLOCKS): v for k, v in params.items() if k.startswith(BLOCKS)}
    out = network.blocks.apply({"params": unflatten_dict(weights, sep="/")}, tokens.x, mask)
    assert isinstance(out, jax.Array)
    readout = take_group(out.astype(jnp.float32), tokens.layout, network.head_spec.readout_key)
    mean = network.schedule.mean(x, network.predict(params, readout.mean(2), x, s), s)
    sample = mean + jnp.asarray(network.stds)[s][..., None] * z
    return diffusion.next_state(sample, network.live, network.head_spec.max_action)


def update_side(config: RunConfig, tune: Tune, batch: int) -> Side:
    """One minibatch, once: log-probabilities of the actor, means of the reference, gradient, optimiser."""
    tuned = OctoConfig.model_validate({**config.policy.model_dump(), "tune": {"type": tune}})
    settings = {"minibatch": batch, "micro_batches": 1, "epochs": 1, "target_kl": None}
    learner = config.learner.model_copy(update=settings)
    config = config.model_copy(update={"policy": tuned, "learner": learner})
    policy: Any = make_policy(config)
    made = JaxLearner(policy, build_algorithm(config, policy.spec), learner)
    decisions = recorded(policy, batch)
    cost = octo_cost(*parts(config))
    return Side(
        name=f"update {tune}, {batch}",
        run=lambda: made.update(decisions, seed=0),
        flops=batch * octo_compute(config, parts(config)[1], cost).update,
        rows=batch,
        xla_flops=update_flops(policy, decisions),
    )


def recorded(policy: OctoPolicy, num: int) -> Batch:
    """Decisions as a rollout leaves them, on random pictures, with random advantages."""
    obs = observations(policy, num)
    trace = policy.act(obs, np.arange(num, dtype=np.uint32)).trace
    return Batch(
        obs=obs,
        trace=trace,
        executed=np.full(num, policy.spec.chunk),
        advantage=np.random.default_rng(1).standard_normal(num).astype(np.float32),
        mask=np.ones(num, bool),
        num_valid=float(num),
    )


def update_flops(policy: OctoPolicy, batch: Batch) -> float:
    """What XLA counts in the learner's programs: prepare, score and means of the batch, the gradient of score."""
    trained = {k: v for k, v in policy.params.items() if k in policy.trainable}
    frozen = {k: v for k, v in policy.params.items() if k not in policy.trainable}
    inputs = on_device(policy.inputs(batch.obs, batch.trace, batch.executed))
    prepared = jax.eval_shape(policy.prepare, frozen, inputs)
    total = lambda t, f, x: policy.score({**f, **t}, x, None)[0].sum()  # noqa: E731
    programs: list[tuple[Callable[..., Any], tuple[Any, ...]]] = [
        (policy.prepare, (frozen, inputs)),
        (total, (trained, frozen, prepared)),
        (total, (trained, frozen, prepared)),
        (jax.grad(total), (trained, frozen, prepared)),
    ]
    return sum(xla_flops(function, *arguments) for function, arguments in programs)


def trunk_flops(cost: OctoCost) -> int:
    return cost.encode_flops() + cost.block_flops()


def xla_flops(function: Callable[..., Any], *arguments: Any) -> float:
    """Of the traced program, before it is compiled."""
    found = jax.jit(function).lower(*arguments).cost_analysis()
    return 0.0 if found is None else float(found.get("flops", 0.0))


def on_device(inputs: Mapping[str, Any]) -> dict[str, jax.Array]:
    return {name: jnp.asarray(value) for name, value in inputs.items()}


def peak(between: list[Side], times: Mapping[str, Time]) -> tuple[float, float]:
    """Operations a second, and a processor second, of the best matrix multiplication."""
    best = max(side.flops / times[side.name].best for side in between)
    return best, max(side.flops / times[side.name].cpu for side in between)


def row(side: Side, took: Time, peaks: tuple[float, float]) -> dict[str, Any]:
    on_cpu = jax.default_backend() == "cpu"
    return {
        "name": side.name,
        "best_s": took.best,
        "median_s": took.median,
        "cpu_s": took.cpu if on_cpu else None,
        "rows_per_s": side.rows / took.best,
        "gflop": side.flops / 1e9,
        "xla_gflop": None if side.xla_flops is None else side.xla_flops / 1e9,
        "gflop_per_s": side.flops / took.best / 1e9,
        "peak_gflop_per_s": peaks[0] / 1e9,
        "share_of_peak": side.flops / took.best / peaks[0],
        "share_of_peak_per_cpu_s": side.flops / took.cpu / peaks[1] if on_cpu else None,
    }


def print_rows(rows: list[dict[str, Any]], *, header: bool) -> None:
    columns = {"best_s": "best s", "median_s": "median s", "cpu_s": "cpu s", "gflop": "GFLOP", "xla_gflop": "XLA's"}
    columns |= {"gflop_per_s": "GFLOP/s", "peak_gflop_per_s": "peak", "share_of_peak": "share"}
    columns |= {"share_of_peak_per_cpu_s": "cpu share", "rows_per_s": "rows/s"}
    if header:
        print(f"{'':28}" + "".join(f"{title:>10}" for title in columns.values()))
    for each in rows:
        cells = ["-" if each[key] is None else f"{each[key]:.4g}" for key in columns]
        print(f"{each['name']:28}" + "".join(f"{cell:>10}" for cell in cells), flush=True)


def ratios(rows: list[dict[str, Any]]) -> dict[str, float]:
    """How much longer the naive ways take."""
    best = {each["name"]: each["best_s"] for each in rows}
    pairs = {"re-run": "act", "forward, in one piece": "forward"}
    return {
        f"{slow} / {pairs[kind]}, batch {num}": best[slow] / best[f"{pairs[kind]}, {num}"]
        for slow in best
        for kind, num in [slow.rsplit(", ", 1)]
        if kind in pairs and f"{pairs[kind]}, {num}" in best
    }


def machine() -> str:
    device = jax.devices()[0]
    kind = platform.processor() or platform.machine() if device.platform == "cpu" else device.device_kind
    return f"{kind}, {jax.local_device_count()} x {device.platform}, {os.cpu_count()} cores, jax {jax.__version__}"


if __name__ == "__main__":
    main(tyro.cli(Options))
