"""The day a GPU is there: one script, one JSON file.

    python benchmarks/octo_gpu.py --out octo_gpu.json              # about 10 minutes
    python benchmarks/octo_gpu.py --tiny                           # on any machine, to see that it works

1. benchmarks/octo.py in float32 and bfloat16.
2. GRPO steps of Octo-Small, the real ``train()``: on the tabletop where EGL works, else on recorded observations.
3. The warm start: imitation steps, timed.
4. What the whole run of configs/octo_small_checkpoint.yaml would take at these times.

Weights are random throughout: but for episodes that end early, times do not depend on what a policy can do.
"""

import json
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np
import octo
import tyro

from vla_rlaif.build import build_env, build_parts
from vla_rlaif.config import RunConfig, load_config, parse_config
from vla_rlaif.jax_imitation import imitate
from vla_rlaif.metrics import MetricsLog, read_metrics
from vla_rlaif.policy_config import OctoConfig
from vla_rlaif.start import start_policy
from vla_rlaif.train import train
from vla_rlaif.warm_start_config import ImitateConfig

WHOLE = octo.CONFIGS / "octo_small_checkpoint.yaml"  # the run that is extrapolated
COMPILING = 2  # steps left out
PHASES = ("rollout", "physics", "render", "policy", "reward", "update")


@dataclass(frozen=True)
class Options:
    tiny: bool = False
    """Tiny sizes and few steps, to try the script."""
    parts: tuple[Literal["octo", "grpo", "imitate"], ...] = ("octo", "grpo", "imitate")
    steps: int = 50
    """Of GRPO."""
    num_envs: int = 64
    recorded: bool = False
    """Recorded observations even where rendering works."""
    compute: Literal["float32", "bfloat16"] = "bfloat16"
    """Of GRPO and imitation."""
    out: Path = Path("octo_gpu.json")


def main(options: Options) -> None:
    result: dict[str, Any] = {"machine": octo.machine(), "options": asdict(options)}
    if "octo" in options.parts:
        result["octo"] = [octo.measure(each) for each in benchmarks(options.tiny)]
    if "grpo" in options.parts:
        result["grpo"] = measure_grpo(grpo_config(options))
    if "imitate" in options.parts:
        result["imitate"] = measure_imitation(options)
    if "grpo" in result and "imitate" in result:
        result["whole_run_minutes"] = whole_run(result["grpo"], result["imitate"], options)
    options.out.write_text(json.dumps(result, indent=1, default=str))
    print(f"written: {options.out}")


def benchmarks(tiny: bool) -> list[octo.Options]:
    if tiny:
        sizes: dict[str, Any] = {"size": "tiny", "batches": (1, 4), "rerun_batches": (4,), "repetitions": 2}
    else:
        sizes = {"size": "small", "batches": (1, 8, 64), "rerun_batches": (1, 8), "update_batches": (64,)}
    return [octo.Options(compute=compute, **sizes) for compute in ("float32", "bfloat16")]


def grpo_config(options: Options) -> RunConfig:
    """Adapters on the last blocks, as the checkpoint's run has them."""
    whole, tune = load_config(WHOLE), {"type": "lora", "rank": 8, "blocks": 4}
    small = load_config(octo.CONFIGS / "octo_small_reach.yaml").policy
    assert isinstance(small, OctoConfig)
    policy = {**(OctoConfig(language_tokens=7) if options.tiny else small).model_dump(), "compute": options.compute}
    pixels, steps, envs = (32, 4, 16) if options.tiny else (256, options.steps, options.num_envs)
    simulated = not options.recorded and can_render()
    size = {"image_size": pixels, "chunk": 4}
    env: dict[str, Any] = {"type": "tabletop", "max_steps": 16, **size}
    if not simulated:
        env = {"type": "custom", "factory": "recorded:Recorded", "options": {"max_decisions": 4, **size}}
    learner = {"minibatch": 16, "micro_batches": 2} if options.tiny else whole.learner.model_dump()
    data = {
        "name": "octo_gpu",
        "env": {**env, "num_envs": envs},
        "policy": {**policy, "tune": {**tune, "blocks": 1} if options.tiny else tune},
        "reward": {"type": "python", "function": "recorded:leftwards"},
        "learner": {**learner, "target_kl": None},
        "loop": {"steps": steps + COMPILING + 1, "validate_every": 10**6, "checkpoint_every": 10**6},
    }
    return parse_config(data, source="octo_gpu")


def can_render() -> bool:
    """In a process of its own: a broken driver may abort instead of raising."""
    code = "from vla_rlaif.envs.tabletop.render import check; check('egl')"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=120, check=False).returncode == 0


def measure_grpo(config: RunConfig) -> dict[str, Any]:
    """Medians over the steps, in seconds."""
    with tempfile.TemporaryDirectory() as name:
        folder, begun = Path(name), time.perf_counter()
        env = build_env(config.env)
        try:
            policy = start_policy(config, env, folder, print)
            with MetricsLog(folder) as log:
                # One step short of the end: the last step of a run validates.
                parts = build_parts(config, env, policy, folder)
                train(config, parts, log, folder, resume=False, say=print, until=config.loop.steps - 1)
        finally:
            env.close()
        lines, wall = read_metrics(folder / "metrics.jsonl"), time.perf_counter() - begun
    timed = lines[COMPILING:]
    median = {phase: statistics.median(line[f"time/{phase}_s"] for line in timed) for phase in PHASES}
    step = median["rollout"] + median["reward"] + median["update"]
    result = {
        "env": config.env.type,
        "num_envs": config.env.num_envs,
        "steps": len(timed),
        "step_s": step,
        **{f"{phase}_s": value for phase, value in median.items()},
        "decisions": statistics.median(line["rollout/decisions"] for line in timed),
        "compiled_after_the_first_steps": sum(line["jax/compilations"] for line in timed),
        "wall_s": wall,
        "device_memory_gb": device_memory_gb(),
    }
    for key, value in result.items():
        print(f"grpo {key:34} {value}")
    return result


def measure_imitation(options: Options) -> dict[str, float]:
    """Seconds of an imitation step, between the 50th and the last."""
    whole = load_config(WHOLE)
    assert whole.warm_start is not None
    config = grpo_config(options)
    policy: Any = octo.make_policy(octo.run_config("tiny" if options.tiny else "small", 1, options.compute))
    assert isinstance(config.policy, OctoConfig)
    batch = {"batch": 16, "micro_batches": 2} if options.tiny else {"batch": whole.warm_start.imitate.batch}
    settings = whole.warm_start.imitate.model_dump() | {"steps": 150, "warmup": 0} | batch
    rows = 2 * settings["batch"]
    obs = octo.observations(policy, rows)
    action = np.random.default_rng(0).uniform(-1, 1, (rows, policy.spec.chunk, policy.spec.action_dim))
    at: list[tuple[int, float]] = []
    on_step = lambda step, loss: at.append((step, time.perf_counter()))  # noqa: E731
    imitate(policy, obs, action.astype(np.float32), ImitateConfig.model_validate(settings), seed=0, on_step=on_step)
    (first, begun), (last, ended) = at[0], at[-1]
    result = {"batch": settings["batch"], "step_s": (ended - begun) / (last - first)}
    print(f"imitation: {result['step_s']:.4g} s a step of {result['batch']} rows")
    return result


def whole_run(grpo: dict[str, Any], imitation: dict[str, float], options: Options) -> float:
    """Minutes of the checkpoint's run: warm start, steps, and episodes of validation and evaluation."""
    config = load_config(WHOLE)
    assert config.warm_start is not None
    loop = config.loop
    episodes = 2 * config.evaluate.episodes + loop.validation_episodes * -(-loop.steps // loop.validate_every)
    seconds = {
        "warm start": config.warm_start.imitate.steps * imitation["step_s"],
        "steps": loop.steps * grpo["step_s"],
        "validation and evaluation": episodes * grpo["rollout_s"] / grpo["num_envs"],
    }
    minutes = sum(seconds.values()) / 60
    parts = ", ".join(f"{name} {value / 60:.1f}" for name, value in seconds.items())
    note = " (of tiny sizes: it means nothing)" if options.tiny else ""
    print(f"{WHOLE.stem}: about {minutes:.1f} minutes ({parts}){note}, without collecting, labelling and reward fits")
    return minutes


def device_memory_gb() -> float | None:
    """The most that was in use, where the device tells."""
    stats = jax.local_devices()[0].memory_stats()
    return stats["peak_bytes_in_use"] / 2**30 if stats and "peak_bytes_in_use" in stats else None


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    main(tyro.cli(Options))
