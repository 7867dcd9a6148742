"""What teaches the heads "progress" and "success" of a reward. Imports happen inside the functions: see build.py."""

from functools import partial
from pathlib import Path

from vla_rlaif.config import RunConfig
from vla_rlaif.dataset import Demonstrations, load_demonstrations
from vla_rlaif.preferences.clip_book import ClipBook
from vla_rlaif.preferences.clips import Encode
from vla_rlaif.preferences.data import ClipFrames
from vla_rlaif.reward_config import PreferenceRewardConfig, learned_part
from vla_rlaif.types import EnvSpec


def build_clip_book(config: RunConfig, encode: Encode, spec: EnvSpec, run_dir: Path) -> ClipBook | None:
    """None where the reward has no such head. ``encode`` is the reward's ``features``."""
    settings = learned_part(config.reward)
    if settings is None or not settings.outcomes:
        return None
    from vla_rlaif.preferences.outcome_store import OutcomeStore, outcome_path

    asks = "labeller" in settings.outcomes
    demonstrated = partial(clips_of_run, settings, encode, spec, run_dir)
    return ClipBook(
        instructions=spec.instructions,
        encode=encode,
        demonstrated=demonstrated if "demonstrations" in settings.outcomes else None,
        labelled_share=settings.outcome_share,
        store=OutcomeStore(outcome_path(run_dir / "preferences.sqlite")) if asks else None,
    )


def clips_of_run(settings: PreferenceRewardConfig, encode: Encode, spec: EnvSpec, run_dir: Path) -> ClipFrames:
    """Of the demonstrations that start.py has put into the run directory."""
    return _clips(load_demonstrations(run_dir / "demonstrations"), settings, encode, spec)


def clips_of_folder(
    folder: Path, config: RunConfig, settings: PreferenceRewardConfig, encode: Encode, spec: EnvSpec
) -> ClipFrames:
    """Of demonstrations on disk, read as the config's warm start reads its data.

    Raises:
        ValueError: there are none, or they do not fit the env.
    """
    from vla_rlaif.warm_start_config import WarmStartConfig
    from vla_rlaif.warm_start_data import demonstrations_from

    demos = demonstrations_from(folder, spec, config.warm_start or WarmStartConfig())
    return _clips(demos, settings, encode, spec)


def _clips(demos: Demonstrations, settings: PreferenceRewardConfig, encode: Encode, spec: EnvSpec) -> ClipFrames:
    from vla_rlaif.preferences.demonstrated import demonstrated_clips

    return demonstrated_clips(
        demos,
        chunk=spec.chunk,
        held_out=settings.held_out,
        instructions=spec.instructions,
        encode=encode,
        seed=0,
    )
