"""What of a policy reinforcement learning changes."""

from typing import Annotated, Literal

from pydantic import Field

from vla_rlaif.config_base import Model, Positive


class HeadTuning(Model):
    """The action head only. The rest runs once a decision or once a batch, without gradients."""

    type: Literal["head"] = "head"


class LoraTuning(Model):
    """Low-rank adapters on the kernels of the last transformer blocks; beside them Octo's action head, but no language
    model's."""

    type: Literal["lora"] = "lora"
    rank: Positive = 8
    alpha: Annotated[float, Field(gt=0)] = 16.0  # the update is scaled by alpha / rank
    blocks: Positive | None = None  # how many, from the last; null: all. The blocks below run once a batch


class FullTuning(Model):
    """Everything (but Octo's language encoder)."""

    type: Literal["full"] = "full"


TuneConfig = Annotated[HeadTuning | LoraTuning | FullTuning, Field(discriminator="type")]
