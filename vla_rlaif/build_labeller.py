"""The labeller of a config, and how its pairs are chosen. Imports happen inside the functions: see build.py."""

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol, runtime_checkable

from vla_rlaif.audit_labels import Auditor
from vla_rlaif.config import RunConfig
from vla_rlaif.interfaces import Labeller
from vla_rlaif.labeller_config import (
    HumanConfig,
    JudgeSettings,
    LabellerConfig,
    OpenAIConfig,
    OracleConfig,
    PythonLabellerConfig,
    VLMConfig,
    VLMLabellerConfig,
)
from vla_rlaif.preferences.asking import Asker
from vla_rlaif.preferences.questions import VisionLanguageModel
from vla_rlaif.preferences.rubric import Rater
from vla_rlaif.preferences.sampling import Strategy
from vla_rlaif.reward_config import (
    PairsConfig,
    PreferenceRewardConfig,
    RobometerRewardConfig,
    VLMJudgeRewardConfig,
    parts_of,
)
from vla_rlaif.types import EnvSpec

AUDIT = "audit"  # folder of a run that the audit's labeller keeps its answers in


@runtime_checkable
class ProbedLabeller(Protocol):
    """A labeller whose model has to prove itself first."""

    def probe(self, spec: EnvSpec) -> None:
        """Raises ValueError, with what to change."""
        ...


def build_labeller(config: LabellerConfig, folder: Path) -> Labeller:
    """``folder`` is where the answers of a vision-language model are kept, unless the config says.

    A model is only contacted when it is first asked; ``check_judge`` does it now.
    """
    if isinstance(config, PythonLabellerConfig):
        from vla_rlaif.preferences.python_labeller import PythonLabeller

        return PythonLabeller(config.function, blind=config.blind)
    if isinstance(config, VLMLabellerConfig):
        from vla_rlaif.preferences.judge import VLMJudge
        from vla_rlaif.preferences.rubric import RubricLabeller

        if config.mode == "rubric":
            return RubricLabeller(build_rater(config, folder), tie_margin=config.tie_margin)
        return VLMJudge(
            build_asker(config, folder),
            num_frames=config.frames,
            cameras=config.cameras,
            prompt=config.prompt,
            ties=config.ties,
            tie_margin=config.tie_margin,
        )
    if isinstance(config, HumanConfig):
        from vla_rlaif.label_page.human import HumanLabeller
        from vla_rlaif.label_page.settings import PageSettings

        page = PageSettings(
            host=config.host,
            port=config.port,
            names=config.names,
            repeat=config.repeat,
            lease_s=config.lease_s,
            fps=config.fps,
            cameras=config.cameras,
        )
        return HumanLabeller(
            folder / "human.sqlite",
            page,
            deadline_s=config.deadline_s,
            skip_at_deadline=config.at_deadline == "skip",
            say=functools.partial(print, flush=True),
        )
    assert isinstance(config, OracleConfig)
    from vla_rlaif.preferences.oracle import OracleLabeller

    return OracleLabeller(
        beta=config.beta,
        mistake=config.mistake,
        equal_threshold=config.equal_threshold,
        skip_threshold=config.skip_threshold,
        noise=config.noise,
        gamma=config.gamma,
        success_ties=config.successes_tie,
    )


def build_auditor(config: RunConfig, run_dir: Path) -> Auditor | None:
    audit = config.monitor.audit
    if audit is None or config.monitor.action == "off":
        return None
    from vla_rlaif.preferences.store import PreferenceStore

    folder = run_dir / AUDIT
    folder.mkdir(exist_ok=True)
    return Auditor(
        build_labeller(audit.labeller, folder),
        PreferenceStore(folder / "preferences.sqlite"),
        num_pairs=audit.pairs,
        budget=audit.budget,
        seed=config.seed,
    )


def build_rater(config: JudgeSettings, folder: Path) -> Rater:
    return Rater(build_asker(config, folder), num_frames=config.frames, cameras=config.cameras, prompt=config.prompt)


def check_judge(config: RunConfig, spec: EnvSpec, folder: Path) -> None:
    """Prove that the model that a run will ask can be trusted, before minutes of warm start and not after."""
    for reward in parts_of(config.reward):
        if isinstance(reward, VLMJudgeRewardConfig):
            build_rater(reward, folder).probe(spec)
        if isinstance(reward, RobometerRewardConfig):
            from vla_rlaif.reward_models.robometer import RobometerReward

            RobometerReward(reward).probe(spec)
        if isinstance(reward, PreferenceRewardConfig):
            _probe(reward.labeller, spec, folder)
    if config.monitor.audit is not None and config.monitor.action != "off":
        _probe(config.monitor.audit.labeller, spec, folder / AUDIT)


def _probe(config: LabellerConfig, spec: EnvSpec, folder: Path) -> None:
    labeller = build_labeller(config, folder)
    if isinstance(labeller, ProbedLabeller):
        labeller.probe(spec)


def build_asker(config: JudgeSettings, folder: Path) -> Asker:
    cache = folder / "judge.sqlite" if config.cache is None else config.cache
    return Asker(build_model(config.backend), cache=cache, invalid_budget=config.invalid_budget)


def build_model(config: VLMConfig) -> VisionLanguageModel:
    if isinstance(config, OpenAIConfig):
        from vla_rlaif.preferences.judge_openai import OpenAIModel

        return OpenAIModel(config)
    from vla_rlaif.preferences.judge_transformers import TransformersModel

    return TransformersModel(config)


def pair_mix(config: PairsConfig) -> Mapping[Strategy, float]:
    """Those that can run out of pairs come first; roundings go to the uniform ones."""
    return {
        "within_group": config.within_group,
        "disagreement": config.disagreement,
        "entropy": config.entropy,
        "uniform": config.uniform,
    }
