"""Which parts of a reward read what only a simulator knows. Light on purpose: it imports no reward model.

Success and truth are measured in every run. In an audited one (``audited: true``) they must not come into the reward,
not by way of labels either.
"""

from vla_rlaif.labeller_config import OracleConfig, PythonLabellerConfig
from vla_rlaif.reward_config import (
    CompositeRewardConfig,
    PreferenceRewardConfig,
    PythonRewardConfig,
    RewardConfig,
    TermRewardConfig,
)


def privileged_terms(reward: RewardConfig) -> list[str]:
    """A line for each key that brings privileged knowledge into the reward, with what it reads. A term of weight 0 is
    measured only."""
    if isinstance(reward, CompositeRewardConfig):
        weighted = [(i, term) for i, term in enumerate(reward.terms) if term.weight]
        return [line for i, term in weighted for line in _of_one(term.reward, f"reward.terms[{i}].reward")]
    return _of_one(reward, "reward")


def _of_one(reward: TermRewardConfig, where: str) -> list[str]:
    if reward.privileged is not None:
        return [f"{where} ({reward.type}) reads {reward.privileged}"]
    if isinstance(reward, PythonRewardConfig) and not reward.blind:
        return [f"{where} (python, {reward.function}) may read the truth; set blind: true to hide it"]
    if not isinstance(reward, PreferenceRewardConfig):
        return []
    if isinstance(reward.labeller, OracleConfig):
        return [f"{where}.labeller (oracle) reads the simulator's return"]
    if isinstance(reward.labeller, PythonLabellerConfig) and not reward.labeller.blind:
        return [f"{where}.labeller (python, {reward.labeller.function}) may read the truth; set blind: true to hide it"]
    return []


def check_audit(reward: RewardConfig) -> None:
    """Raises ValueError that names every privileged part."""
    found = privileged_terms(reward)
    if found:
        raise ValueError(
            f"the run is declared audited, but {'; '.join(found)}. Use labels of people or of a VLM, a reward that "
            "reads frames, or set audited to false."
        )
