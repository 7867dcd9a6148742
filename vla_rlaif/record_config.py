"""The record section of a run: which of its groups are kept for looking at."""

from typing import Annotated

from pydantic import Field

from vla_rlaif.config_base import Model, Positive


class RecordConfig(Model):
    """Of every so many steps a few groups, drawn at random, go to ``run_dir/episodes``. The run learns the same with
    any of these values."""

    every: Annotated[int, Field(ge=0)] = 10  # steps; 0: nothing is kept
    groups: Positive = 2  # of each such step; all of them, if it has fewer
    size: Positive = 256  # pixels; larger frames are scaled down to it
