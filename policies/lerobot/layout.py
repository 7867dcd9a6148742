"""Names of the parameters of LeRobot's policies, by what may train them. Loads no torch: plans read it too.

Names are LeRobot's under ``policy.``, and those of the noise head, which LeRobot does not have, under ``noise.``.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from vla_rlaif.lerobot_config import AdapterTuning, ExpertTuning, LeRobotTuning

POLICY, NOISE = "policy.", "noise."
ADAPTERS = (".lora_A.", ".lora_B.")


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Of one class of policies. Patterns are fnmatch's, of LeRobot's names."""

    expert: tuple[str, ...]  # parameters that only the denoising steps read
    unused: tuple[str, ...]  # parameters that no action depends on
    blocks: tuple[str, ...] = ()  # modules that are used through ``__call__`` only
    prefix_blocks: str | None = (
        None  # how names of the prefix's blocks begin; of the last only keys and values are read
    )


@dataclass(frozen=True, kw_only=True)
class Groups:
    """Names of parameters, by what may train them."""

    used: frozenset[str]  # every one that an action depends on; adapters and the noise head are apart
    expert: frozenset[str]  # of these, the ones that only the denoising steps read
    adapters: frozenset[str]
    noise: frozenset[str]

    @classmethod
    def of(cls, names: Sequence[str], layout: Layout) -> "Groups":
        adapters = matching(names, [f"*{part}*" for part in ADAPTERS])
        noise = matching(names, [f"{NOISE}*"])
        idle = matching(names, [POLICY + pattern for pattern in layout.unused])
        if layout.prefix_blocks is not None:
            idle |= _after_last_values(names, POLICY + layout.prefix_blocks)
        used = frozenset(names) - adapters - noise - idle
        expert = used & matching(names, [POLICY + pattern for pattern in layout.expert])
        return cls(used=used, expert=expert, adapters=adapters, noise=noise)

    def trained(self, tune: LeRobotTuning) -> frozenset[str]:
        """What reinforcement learning changes."""
        if isinstance(tune, AdapterTuning):
            return self.adapters | self.noise
        return (self.expert if isinstance(tune, ExpertTuning) else self.used) | self.noise


def matching(names: Iterable[str], patterns: Sequence[str]) -> frozenset[str]:
    return frozenset(name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns))


def _after_last_values(names: Iterable[str], blocks: str) -> frozenset[str]:
    """Of the prefix's last block, actions read keys and values only."""
    inside = {name: name.removeprefix(blocks).partition(".") for name in names if name.startswith(blocks)}
    last = max(int(number) for number, _, _ in inside.values())
    read = ("input_layernorm.", "self_attn.k_proj.", "self_attn.v_proj.")
    return frozenset(k for k, (n, _, rest) in inside.items() if int(n) == last and not rest.startswith(read))


_GEMMA_EXPERT = (
    "model.paligemma_with_expert.gemma_expert.*",
    "model.action_*",
    "model.time_mlp_*",
    "model.state_proj.*",
)
_GEMMA = Layout(
    expert=_GEMMA_EXPERT,
    unused=("*.lm_head.*", "*.language_model.norm.*"),
    blocks=("*.layers.[0-9]", "*.layers.[0-9][0-9]"),
    prefix_blocks="model.paligemma_with_expert.paligemma.model.language_model.layers.",
)
LAYOUTS = {
    "smolvla": Layout(
        expert=("model.vlm_with_expert.lm_expert.*", "model.action_*"),
        unused=("*.lm_head.*", "*.vlm.model.text_model.norm.*"),
        blocks=(
            "*.encoder.layers.[0-9]",
            "*.encoder.layers.[0-9][0-9]",
            "*text_model.layers.*.mlp",
            "*expert.layers.*.mlp",
        ),
        prefix_blocks="model.vlm_with_expert.vlm.model.text_model.layers.",
    ),
    "pi0": _GEMMA,
    "pi05": _GEMMA,
    "act": Layout(expert=(), unused=("model.vae_encoder*",)),
    "diffusion": Layout(expert=("diffusion.unet.*",), unused=()),
}
