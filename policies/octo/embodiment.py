"""Where a model and an environment meet."""

from dataclasses import dataclass

from vla_rlaif.policies.octo.spec import DiffusionSpec


@dataclass(frozen=True, kw_only=True)
class Embodiment:
    """How an environment meets a model: which camera feeds which input, and how much of a prediction is executed."""

    cameras: tuple[tuple[str, str, int], ...]  # (observation key, camera of the env, pixels that the model wants)
    state_dim: int  # P
    action_dim: int  # of the env; what the head predicts beyond it is noise, as upstream
    chunk: int  # env steps executed of each prediction
    language: tuple[int, int]  # tokens of a sentence and their width

    def fits(self, head: DiffusionSpec) -> None:
        for name, have, want in (
            ("action_horizon", head.action_horizon, self.chunk),
            ("action_dim", head.action_dim, self.action_dim),
        ):
            if have < want:
                raise ValueError(
                    f"the action head has {name} {have}, the env needs {want}. Lower env.chunk, or start a new head "
                    f"(policy.new_head: true) and imitate demonstrations with it."
                )
