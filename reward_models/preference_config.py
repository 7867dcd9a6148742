"""What a preference reward reads, which heads it has, and how its members are combined."""

from dataclasses import dataclass
from typing import Literal

from vla_rlaif.reward_models.frame_heads import Head
from vla_rlaif.reward_models.networks import CnnConfig

Combination = Literal["mean", "min", "pessimistic"]
Score = Literal["return", "progress", "success", "mix"]


@dataclass(frozen=True, kw_only=True)
class PreferenceConfig:
    """What the reward reads and how its members are combined. The defaults are those of the feasibility run."""

    num_members: int = 3
    hidden: tuple[int, ...] = (128, 128)
    frames: Literal["last", "all"] = "last"  # "all" sums the heads over the live frames
    combination: Combination = "mean"
    variance_weight: float = 1.0  # lambda of "pessimistic": mean - lambda * variance
    num_reference: int = 256  # the oldest labelled episodes: members are standardised on them, so they never move
    std_floor: float = 1e-2  # added to the std of every feature, in feature units
    cnn: CnnConfig | None = None  # trains a CNN with the heads; needs encoders.PixelEncoder
    heads: tuple[Head, ...] = ("return",)
    score: Score = "return"  # which head an episode's score is; "mix": the mean of all, each standardised
    first_frame: bool = False  # every frame is read beside its change since the episode's first one
    false_positive_rate: float = 0.05  # at which the threshold of "success" is set, on held-out clips

    def __post_init__(self) -> None:
        if self.heads[:1] != ("return",) or len(set(self.heads)) != len(self.heads):
            raise ValueError(
                f"The heads of a preference reward are return and then others, each once; got {self.heads}."
            )
        if self.score != "mix" and self.score not in self.heads:
            raise ValueError(f"The score is {self.score!r}, but the heads are {self.heads}: add it to them.")
        if not 0 < self.false_positive_rate < 1:
            raise ValueError(f"false_positive_rate is a share in (0, 1), got {self.false_positive_rate}.")
        if self.num_members < 1 or self.num_reference < 2:
            raise ValueError(
                "A preference reward needs num_members >= 1 and num_reference >= 2, "
                f"got {self.num_members} and {self.num_reference}."
            )
