"""The logging section of a run: where the metrics go besides ``metrics.jsonl`` and TensorBoard, which always get them.

Nothing here is on by default, and nothing sends anything over a network unless it says so.
"""

from typing import Annotated, Literal

from pydantic import Field

from vla_rlaif.config_base import Model


class WandbConfig(Model):
    """Weights & Biases; needs the package wandb."""

    project: str
    entity: str | None = None  # a user or a team; null: the account's default
    group: str | None = None
    tags: tuple[str, ...] = ()
    mode: Literal["online", "offline"] = "online"  # offline writes to the run directory; `wandb sync` uploads it


class TrackioConfig(Model):
    """trackio (Hugging Face): a local database and dashboard; needs the package trackio."""

    project: str
    space: str | None = None  # a Space on the Hub to log to instead, `user/name`


class LoggingConfig(Model):
    wandb: WandbConfig | None = None
    trackio: TrackioConfig | None = None
    prometheus_port: Annotated[int, Field(ge=1, le=65535)] | None = None  # on loopback: the newest step, to be scraped
