"""The env section of a run."""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from vla_rlaif.config_base import Fraction, Model, Positive


def _check_halves(num_envs: int, double_buffer: bool) -> None:
    if double_buffer and num_envs % 2:
        raise ValueError(f"double_buffer splits the members into two halves, and num_envs is {num_envs}.")


class RandomizeConfig(Model):
    """Domain randomisation, drawn by the start seed: half-widths of uniform ranges, 0 is off."""

    lighting: Fraction = 0.0  # relative brightness of every light
    texture: Fraction = 0.0  # relative tint of every colour
    camera: Annotated[float, Field(ge=0)] = 0.0  # metres, and radians about each axis
    mass: Annotated[float, Field(ge=0, lt=1)] = 0.0  # relative, of every body
    friction: Annotated[float, Field(ge=0, lt=1)] = 0.0  # relative, of every geom


class TabletopConfig(Model):
    """MuJoCo tabletop family: 7-D end-effector delta actions, a primary and a wrist camera."""

    type: Literal["tabletop"] = "tabletop"
    task: Literal["reach", "push", "pick_place"] = "reach"
    num_envs: Positive = 128
    image_size: Annotated[int, Field(ge=16)] = 64  # pixels
    chunk: Positive = 4  # actions executed per decision
    max_steps: Positive = 16  # env steps per episode
    success_radius: Annotated[float, Field(gt=0)] = 0.03  # metres
    renderer: Literal["egl", "osmesa", "ray", "warp"] = "egl"  # warp: on a GPU, extra `warp`
    threads: Positive = 2  # physics threads, and as many render threads
    randomize: RandomizeConfig = RandomizeConfig()
    double_buffer: bool = False  # two halves: one computes while the policy decides for the other

    @model_validator(mode="after")
    def _whole_chunks(self) -> "TabletopConfig":
        if self.max_steps % self.chunk:
            raise ValueError(f"max_steps {self.max_steps} is not a multiple of chunk {self.chunk}.")
        _check_halves(self.num_envs, self.double_buffer)
        return self


class PointReachConfig(Model):
    """Point reaching in the plane, NumPy only: for tests and notebooks."""

    type: Literal["point_reach"] = "point_reach"
    num_envs: Positive = 64
    max_decisions: Positive = 6
    radius: Annotated[float, Field(gt=0)] = 0.3


class CustomEnvConfig(Model):
    """An env from the user's own code: a callable `package.module:name` that returns a VectorEnv."""

    type: Literal["custom"] = "custom"
    factory: str
    num_envs: Positive = 64
    options: dict[str, Any] = Field(default_factory=dict)


class ProcessEnvConfig(Model):
    """What all envs share that are played in worker processes."""

    num_envs: Positive = 16
    workers: Positive = 2  # processes that share the envs
    image_size: Annotated[int, Field(ge=16)] = 64  # pixels
    chunk: Positive = 4  # actions executed per decision
    max_steps: Positive = 100  # env steps per episode
    renderer: Literal["egl", "osmesa"] = "egl"
    timeout_s: Annotated[float, Field(gt=0)] = 60.0  # for one step, reset or frame; then the worker is replaced
    interpreter: Path | None = None  # Python that has the suite; null: this one
    interpreter_path: tuple[str, ...] = ()  # folders that it imports from besides its own
    double_buffer: bool = False  # two halves: one computes while the policy decides for the other

    @model_validator(mode="after")
    def _fits(self) -> "ProcessEnvConfig":
        if self.max_steps % self.chunk:
            raise ValueError(f"max_steps {self.max_steps} is not a multiple of chunk {self.chunk}.")
        _check_halves(self.num_envs, self.double_buffer)
        if self.interpreter_path and self.interpreter is None:
            raise ValueError("interpreter_path is for another interpreter; this one uses its own import path.")
        return self


class MetaWorldConfig(ProcessEnvConfig):
    """Meta-World: a Sawyer arm and 50 tasks, 4-D actions. Needs the extra `suites`."""

    type: Literal["metaworld"] = "metaworld"
    tasks: tuple[str, ...] = ("reach-v3",)  # of the suite, or MT10 or MT50 for all of theirs
    observation: Literal["proprio", "full"] = "proprio"  # the state: hand and gripper, or all that the suite tells
    # topview, corner, corner2, corner3, behindGripper, gripperPOV, lerobot; with observation full none is needed
    cameras: tuple[str, ...] = ("corner2",)
    fast_render: bool = True  # no shadows, no multisampling
    randomize: RandomizeConfig = RandomizeConfig()
    max_steps: Annotated[int, Field(gt=0, le=500)] = 200  # the suite ends at 500

    @model_validator(mode="after")
    def _one_corner2(self) -> "MetaWorldConfig":
        if not self.tasks:
            raise ValueError("tasks is empty: name at least one.")
        if not self.cameras and self.observation == "proprio":
            raise ValueError("without cameras the task is not seen: name one, or set observation: full.")
        if {"corner2", "lerobot"} <= set(self.cameras):
            raise ValueError("camera lerobot is corner2, moved to where LeRobot has it; name one of the two.")
        return self


class LiberoConfig(ProcessEnvConfig):
    """LIBERO: a Panda arm, four suites of ten tasks, 7-D actions. `make env-libero` builds an interpreter for it."""

    type: Literal["libero"] = "libero"
    suite: Literal["libero_spatial", "libero_object", "libero_goal", "libero_10"] = "libero_spatial"
    tasks: tuple[Annotated[int, Field(ge=0, le=9)], ...] = (0,)  # of the suite
    cameras: tuple[str, ...] = ("agentview", "robot0_eye_in_hand")
    turned: bool = True  # the suite's upside-down images after half a turn, as checkpoints were trained; else upright
    settle_steps: Annotated[int, Field(ge=0)] = 10  # env steps before an episode begins
    fast_render: bool = True  # no shadows, no multisampling
    image_size: Annotated[int, Field(ge=16)] = 128
    max_steps: Positive = 220
    chunk: Positive = 10
    timeout_s: Annotated[float, Field(gt=0)] = 300.0  # building a scene takes up to a minute on a busy machine


class GymnasiumConfig(ProcessEnvConfig):
    """Any gymnasium env with bounded continuous actions, by a mapping of its keys."""

    type: Literal["gymnasium"] = "gymnasium"
    id: str | None = None  # of gymnasium's registry
    factory: str | None = None  # or a callable `package.module:name` that returns the env
    module: str | None = None  # imported first: the package that registers the id
    options: dict[str, Any] = Field(default_factory=dict)  # of gymnasium.make, or of the factory
    # Our name: key of the observation ("pixels/top" where it is nested), or "render". May be empty: {}
    cameras: dict[str, str]
    state: tuple[str, ...]  # keys of the observation, joined in this order; "observation" if it is no dict
    success: str = "is_success"  # key of info, or "terminated"
    progress: str | None = None  # key of info, or "reward": within [-1, 1]. For oracle labels
    instructions: tuple[str, ...]  # every sentence that the env can say
    instruction_key: str | None = None  # key of info that says it; needed with several instructions
    seed_bits: Literal[32, 52] = 52  # 32 for suites that use NumPy's old generators
    fps: Positive | None = None  # env steps a second of the robot's time; null: what the env's render_fps says

    @model_validator(mode="after")
    def _names_one_env(self) -> "GymnasiumConfig":
        if (self.id is None) == (self.factory is None):
            raise ValueError(f"name an id or a factory, one of them (got id {self.id!r}, factory {self.factory!r}).")
        if not (self.state and self.instructions):
            raise ValueError("state and instructions must not be empty.")
        if len(self.instructions) > 1 and self.instruction_key is None:
            raise ValueError(
                f"{len(self.instructions)} instructions need instruction_key, the key of info that says it."
            )
        return self


EnvConfig = TabletopConfig | PointReachConfig | MetaWorldConfig | LiberoConfig | GymnasiumConfig | CustomEnvConfig
