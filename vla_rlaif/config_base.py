"""What every section of a run's config is made of. Importing a config imports no torch, jax, ray or mujoco."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Positive = Annotated[int, Field(gt=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]


class Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=False)
