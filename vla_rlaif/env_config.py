"""The env section of a run."""

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from vla_rlaif.config_base import Model, Positive


class TabletopConfig(Model):
    """MuJoCo tabletop family: 7-D end-effector delta actions, a primary and a wrist camera."""

    type: Literal["tabletop"] = "tabletop"
    task: Literal["reach", "push", "pick_place"] = "reach"
    num_envs: Positive = 128
    image_size: Annotated[int, Field(ge=16)] = 64  # pixels
    chunk: Positive = 4  # actions executed per decision
    max_steps: Positive = 16  # env steps per episode
    success_radius: Annotated[float, Field(gt=0)] = 0.03  # metres
    renderer: Literal["egl", "osmesa", "ray"] = "egl"
    threads: Positive = 2  # physics threads, and as many render threads

    @model_validator(mode="after")
    def _whole_chunks(self) -> "TabletopConfig":
        if self.max_steps % self.chunk:
            raise ValueError(f"max_steps {self.max_steps} is not a multiple of chunk {self.chunk}.")
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


EnvConfig = TabletopConfig | PointReachConfig | CustomEnvConfig
