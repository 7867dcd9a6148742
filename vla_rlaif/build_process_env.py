"""Config to envs in worker processes: the part of `build.py` that knows the suites."""

from collections.abc import Mapping
from typing import Any

from vla_rlaif.env_config import (
    GymnasiumConfig,
    LiberoConfig,
    MetaWorldConfig,
    ProcessEnvConfig,
    RandomizeConfig,
)
from vla_rlaif.interfaces import VectorEnv


def build_process_env(config: ProcessEnvConfig, *, max_steps: int | None) -> VectorEnv:
    """``max_steps`` lengthens the episodes, for demonstrations."""
    from vla_rlaif.envs.processes import ProcessVectorEnv
    from vla_rlaif.envs.worker_process import WorkerSpec

    steps = max_steps or config.max_steps
    factory, options = _suite(config, steps)
    worker = WorkerSpec(
        factory=f"vla_rlaif.envs.{factory}",
        options=options,
        interpreter=config.interpreter,
        extra_path=config.interpreter_path,
        renderer=config.renderer,
        max_steps=steps,
    )
    return ProcessVectorEnv(
        worker, num_envs=config.num_envs, num_workers=config.workers, chunk=config.chunk, timeout_s=config.timeout_s
    )


def strengths(look: RandomizeConfig) -> dict[str, float]:
    """As envs/randomization.py takes them."""
    return {
        "lighting": look.lighting,
        "texture": look.texture,
        "camera": look.camera,
        "mass": look.mass,
        "friction": look.friction,
    }


def _suite(config: ProcessEnvConfig, max_steps: int) -> tuple[str, Mapping[str, Any]]:
    """The class of the single env, and its keyword arguments as JSON."""
    if isinstance(config, MetaWorldConfig):
        return "metaworld:MetaWorldTask", _metaworld(config, max_steps)
    if isinstance(config, LiberoConfig):
        return "libero:LiberoTask", _libero(config)
    assert isinstance(config, GymnasiumConfig)
    return "gymnasium_env:GymnasiumTask", _gymnasium(config)


def _metaworld(config: MetaWorldConfig, max_steps: int) -> Mapping[str, Any]:
    from vla_rlaif.envs.metaworld_tasks import MAX_STEPS, chosen

    if max_steps > MAX_STEPS:
        raise ValueError(f"episodes of {max_steps} env steps are too long: Meta-World's last {MAX_STEPS}.")
    return {
        "tasks": chosen(config.tasks),
        "observation": config.observation,
        "cameras": config.cameras,
        "image_size": config.image_size,
        "renderer": config.renderer,
        "fast_render": config.fast_render,
        "randomize": strengths(config.randomize),
    }


def _libero(config: LiberoConfig) -> Mapping[str, Any]:
    return {
        "suite": config.suite,
        "tasks": config.tasks,
        "cameras": config.cameras,
        "image_size": config.image_size,
        "turned": config.turned,
        "settle_steps": config.settle_steps,
        "renderer": config.renderer,
        "fast_render": config.fast_render,
    }


def _gymnasium(config: GymnasiumConfig) -> Mapping[str, Any]:
    return {
        "id": config.id,
        "factory": config.factory,
        "module": config.module,
        "options": config.options,
        "cameras": config.cameras,
        "state": config.state,
        "success": config.success,
        "progress": config.progress,
        "instructions": config.instructions,
        "instruction_key": config.instruction_key,
        "image_size": config.image_size,
        "seed_bits": config.seed_bits,
        "fps": config.fps,
    }
