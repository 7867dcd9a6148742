"""How fast rollouts are against LeRobot's own evaluation: the same policy, task, chunk and machine, in one run.

Both sides act with one tiny SmolVLA: ours as a policy of this system, theirs as the `pretrained_model` folder that it
exports, through ``lerobot.scripts.lerobot_eval.rollout``, which `lerobot-eval` calls for each batch of episodes. No
episode ends early, so each env step and each decision counts. Sides take turns, and medians are reported.

physics and render are the simulator's, of all envs, also where they run in other processes (LeRobot's PushT does not
tell); policy is the forward pass, processors are LeRobot's pre- and postprocessing of each env step. Asynchronous envs
are LeRobot's default with more than one env, and cannot make envs that gymnasium knows by id, such as its own PushT.

    python benchmarks/lerobot_rollout.py --task reach --out lerobot_rollout.json
"""

import contextlib
import io
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import tyro
from lerobot.configs import PreTrainedConfig
from lerobot.configs.parser import load_plugin
from lerobot.envs import make_env, make_env_config, make_env_pre_post_processors
from lerobot.policies import make_policy, make_pre_post_processors
from lerobot.scripts.lerobot_eval import rollout as lerobot_rollout

from vla_rlaif.build import build_env, build_policy
from vla_rlaif.config import RunConfig
from vla_rlaif.env_config import EnvConfig
from vla_rlaif.lerobot_config import SmolVLAConfig
from vla_rlaif.rollout import Split, held_out_starts, rollout

UNREACHABLE = 1e-9  # metres, a success radius
PARTS = ("physics", "render", "policy", "processors")
RENAMED = {"observation.image": "observation.images.top"}  # of LeRobot's PushT: the name that the policy has for it


@dataclass(frozen=True, kw_only=True)
class Options:
    task: Literal["reach", "push", "pick_place", "pusht"] = "reach"
    num_envs: int = 64
    """Of ours and of LeRobot's largest batch."""
    async_envs: int = 8
    """Processes of LeRobot's asynchronous side: one env and about 0.6 GB each."""
    chunk: int = 4
    """Actions executed a decision, by both."""
    max_steps: int = 16
    """Env steps of an episode."""
    image_size: int = 64
    """Pixels, of the tabletop. PushT's are 96."""
    flow_steps: int = 10
    """Denoising steps."""
    cores: int = os.cpu_count() or 1
    repetitions: int = 5
    out: Path | None = None
    """Where to write all samples as JSON."""

    @property
    def env(self) -> EnvConfig:
        sizes = {"num_envs": self.num_envs, "chunk": self.chunk, "max_steps": self.max_steps}
        if self.task != "pusht":
            tabletop = {"task": self.task, "image_size": self.image_size, "success_radius": UNREACHABLE}
            section = {"type": "tabletop", "threads": self.cores, **tabletop}
        else:
            keys = {"cameras": {"top": "render"}, "state": ["agent_pos"], "instructions": ["Push the block."]}
            factory = "vla_rlaif.envs.pusht:make_env"
            section = {"type": "gymnasium", "factory": factory, "image_size": 96, "workers": self.cores, **keys}
        return RunConfig.model_validate({"env": section | sizes, "algorithm": {"group_size": 2}}).env


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One round of episodes of one side, in seconds of wall time."""

    env_steps: int
    decisions: int
    wall: float
    policy: float
    physics: float = float("nan")
    render: float = float("nan")
    processors: float = float("nan")


class Clock:
    """A callable that adds up the time it takes."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self.call, self.seconds = call, 0.0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        try:
            return self.call(*args, **kwargs)
        finally:
            self.seconds += time.perf_counter() - start


def main(options: Options) -> None:
    torch.set_num_threads(1)  # both sides: a second thread only contends with the simulation
    load_plugin("vla_rlaif.envs.tabletop")
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made) / "pretrained_model"
        env: Any = build_env(options.env)
        policy = build_policy(SmolVLAConfig(flow_steps=options.flow_steps), env.spec, 0)
        policy.export(folder)
        sides: dict[str, Iterator[Sample]] = {}
        if options.task != "pusht":
            name, num = f"LeRobot, async {options.async_envs}", options.async_envs
            sides[name] = lerobot_side(options, folder, num, use_async=True)
        default = max(1, int(0.7 * options.cores))  # what `lerobot-eval` takes without --eval.batch_size
        if default == 1:
            sides["LeRobot, by default: sync 1"] = lerobot_side(options, folder, 1, use_async=False)
        sides[f"LeRobot, sync {options.num_envs}"] = lerobot_side(options, folder, options.num_envs, use_async=False)
        sides[f"ours, {options.num_envs}"] = our_side(options, policy, env)
        samples: dict[str, list[Sample]] = {name: [] for name in sides}
        for side in sides.values():
            next(side)  # warm up
        for _ in range(options.repetitions):
            for name, side in sides.items():
                samples[name].append(next(side))
        for side in sides.values():
            side.close()  # pyright: ignore[reportAttributeAccessIssue] (all are generators)
    report = summarise(samples)
    print_report(options, report)
    if options.out is not None:
        machine = {"platform": platform.platform(), "cores": options.cores, "load": os.getloadavg()}
        raw = {name: [asdict(sample) for sample in side] for name, side in samples.items()}
        text = {"options": asdict(options), "machine": machine, "report": report, "samples": raw}
        options.out.write_text(json.dumps(text, indent=1, default=str))


def our_side(options: Options, policy: Any, env: Any) -> Iterator[Sample]:
    starts = held_out_starts(Split.TEST, options.num_envs)
    act = policy.act = Clock(policy.act)
    try:
        while True:
            before, thought, start = env.seconds, act.seconds, time.perf_counter()
            played = rollout(policy, env, starts, seed=0)
            yield Sample(
                env_steps=int(played.executed.sum()),
                decisions=int(played.mask.sum()),
                wall=time.perf_counter() - start,
                policy=act.seconds - thought,
                **{part: env.seconds[part] - before[part] for part in ("physics", "render")},
            )
    finally:
        env.close()


def lerobot_side(options: Options, folder: Path, num_envs: int, *, use_async: bool) -> Iterator[Sample]:
    is_pusht = options.task == "pusht"
    if is_pusht:
        config = make_env_config("pusht", episode_length=options.max_steps)
    else:
        sizes = {"image_size": options.image_size, "max_steps": options.max_steps, "success_radius": UNREACHABLE}
        config = make_env_config("vla_rlaif_tabletop", task=options.task, **sizes)
    envs: Any = make_env(config, n_envs=num_envs, use_async_envs=use_async)[config.type][0]
    settings = PreTrainedConfig.from_pretrained(folder)
    settings.pretrained_path = folder
    renamed = RENAMED if is_pusht else {}
    policy: Any = make_policy(settings, env_cfg=config, rename_map=renamed).eval()
    overrides = {"rename_observations_processor": {"rename_map": renamed}}
    pair = make_pre_post_processors(settings, pretrained_path=str(folder), preprocessor_overrides=overrides)
    processors: list[Any] = [Clock(p) for p in pair]
    select = policy.select_action = Clock(policy.select_action)
    around = make_env_pre_post_processors(env_cfg=config, policy_cfg=settings)
    try:
        while True:
            before = {} if is_pusht else simulator_seconds(envs)
            thought, processed, start = select.seconds, sum(p.seconds for p in processors), time.perf_counter()
            with torch.no_grad(), contextlib.redirect_stderr(io.StringIO()):  # a progress bar
                played = lerobot_rollout(envs, policy, *around, *processors, seeds=list(range(num_envs)))
            wall, env_steps = time.perf_counter() - start, played["reward"].numel()
            yield Sample(
                env_steps=env_steps,
                decisions=env_steps // options.chunk,
                wall=wall,
                policy=select.seconds - thought,
                processors=sum(p.seconds for p in processors) - processed,
                **({} if is_pusht else {k: v - before[k] for k, v in simulator_seconds(envs).items()}),
            )
    finally:
        envs.close()


def simulator_seconds(envs: Any) -> dict[str, float]:
    each = envs.call("seconds")
    return {part: sum(one[part] for one in each) for part in ("physics", "render")}


def summarise(samples: dict[str, list[Sample]]) -> dict[str, dict[str, float]]:
    """Medians over the repetitions: rates per second, and milliseconds a decision."""
    report, ours = {}, list(samples.values())[-1]
    for name, side in samples.items():
        report[name] = {
            "env_steps_per_s": statistics.median(s.env_steps / s.wall for s in side),
            "decisions_per_s": statistics.median(s.decisions / s.wall for s in side),
            # The ratio of neighbours in time, then the median: the load at that moment cancels.
            "ours_over_this": statistics.median(
                (a.decisions / a.wall) / (b.decisions / b.wall) for a, b in zip(ours, side, strict=True)
            ),
            "wall_ms": statistics.median(1e3 * s.wall / s.decisions for s in side),
        }
        for part in PARTS:
            report[name][f"{part}_ms"] = statistics.median(1e3 * vars(s)[part] / s.decisions for s in side)
    return report


def print_report(options: Options, report: dict[str, dict[str, float]]) -> None:
    print(f"{options.task}, chunk {options.chunk}, {options.max_steps} env steps an episode, tiny SmolVLA")
    columns = "".join(f"{part:>11}" for part in ("wall", *PARTS))
    print(f"{'':30}{'steps/s':>9}{'dec/s':>8}{'ours/this':>11}   ms a decision:{columns}")
    for name, row in report.items():
        rates = f"{row['env_steps_per_s']:9.1f}{row['decisions_per_s']:8.1f}{row['ours_over_this']:11.2f}{'':17}"
        print(f"{name:30}{rates}" + "".join(f"{row[f'{p}_ms']:11.2f}" for p in ("wall", *PARTS)).replace("nan", "  -"))


if __name__ == "__main__":
    main(tyro.cli(Options))
