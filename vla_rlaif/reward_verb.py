"""The verb `reward fit|eval`: a reward model of labelled episodes on disk, and the card that says what it is worth.

Axes: N episodes of a folder.
"""

import hashlib
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from jaxtyping import Float, UInt8
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from vla_rlaif.build import build_env, load_folder
from vla_rlaif.build_clips import clips_of_folder
from vla_rlaif.build_reward import build_preference_reward
from vla_rlaif.checkpoint import write_whole
from vla_rlaif.config import RunConfig
from vla_rlaif.offline import learned_settings
from vla_rlaif.preferences.clips import join_clips, make_clips
from vla_rlaif.preferences.data import ClipFrames, pair_accuracy
from vla_rlaif.preferences.labelled import Labels, gather_episodes, join
from vla_rlaif.preferences.labelling import make_pair_data
from vla_rlaif.preferences.outcome_store import OutcomeStore, outcome_path
from vla_rlaif.preferences.store import PreferenceStore
from vla_rlaif.reward_card import failed_gates, make_card, write_card_json
from vla_rlaif.reward_card_data import Card
from vla_rlaif.reward_card_page import write_card_page
from vla_rlaif.reward_config import PreferenceRewardConfig
from vla_rlaif.reward_judged import judge
from vla_rlaif.rollout import take
from vla_rlaif.types import EnvSpec, Episodes

FORMAT = "vla_rlaif reward 2"  # the one key of a reward file's metadata; several would be written in random order
NUM_SHOWN = 24  # frames of a clip in the card, at most
Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Files:
    """What the verb reads and writes."""

    data: Path
    store: Path
    model: Path
    policy: Path | None = None  # for encoder `policy`
    demos: Path | None = None  # demonstrations, for reward.outcomes


@dataclass(frozen=True, kw_only=True)
class Labelled:
    """What the folder and the stores hold together."""

    ids: list[str]
    episodes: Episodes
    labels: Labels
    outcome: Float[np.ndarray, " N"]  # probability of success, as somebody said; NaN: nobody did


def reward(action: Literal["fit", "eval"], config: RunConfig, files: Files, say: Say) -> None:
    """``fit`` writes the model, ``eval`` reads it and writes its figures as JSON; both write its card beside it."""
    settings = learned_settings(config)
    saved = _read_model(files.model) if action == "eval" else ({}, {})
    known = _read_labels(files)
    learned, origin, spec = _build_reward(config, settings, files, known.episodes)
    clips = _clips(action, config, settings, files, known, spec, learned)
    if action == "fit":
        _fit(learned, origin, known, clips, files.model, config.seed, say)
    else:
        _restore(learned, origin, *saved, files.model)
    judged = judge(
        learned,
        settings,
        known.episodes,
        known.ids,
        pairs=known.labels.pairs,
        p_first=known.labels.p_first,
        held_out=known.labels.held_out,
        clips=clips,
    )
    card = make_card(judged, {**origin, "version": str(learned.version)})
    if action == "eval":
        _say_figures(card, judged.score, known.labels, files.model.with_suffix(".json"), say)
    write_card_json(card, files.model.with_suffix(".card.json"))
    write_card_page(card, files.model.with_suffix(".card.html"), _shown(card, known))
    for sentence in failed_gates(card):
        say(f"warning: {sentence}")
    say(f"{files.model.with_suffix('.card.html')}: reward card written")


def _read_labels(files: Files) -> Labelled:
    store = files.store
    if not store.exists():
        raise ValueError(f"no preference store at {store}; `vla-rlaif label` makes one.")
    ids, episodes = gather_episodes(files.data)
    with PreferenceStore(store) as kept:
        labels = join(kept.records(), ids, episodes, store=store, data=files.data)
    if np.isnan(labels.p_first).all():
        raise ValueError(f"{store} has no labels ({len(labels.p_first)} skips); `vla-rlaif label` makes some.")
    outcome = np.full(len(ids), np.nan)
    if outcome_path(store).exists():
        with OutcomeStore(outcome_path(store)) as kept:
            said = {name: one.p_success for name, one in kept.newest().items()}
        outcome = np.array([np.nan if (p := said.get(name)) is None else p for name in ids], np.float64)
    return Labelled(ids=ids, episodes=episodes, labels=labels, outcome=outcome)


def _clips(
    action: str,
    config: RunConfig,
    settings: PreferenceRewardConfig,
    files: Files,
    known: Labelled,
    spec: EnvSpec,
    learned: Any,
) -> ClipFrames | None:
    """Of the sources that reward.outcomes names. Only a fit needs all of them."""
    parts: list[ClipFrames] = []
    if "demonstrations" in settings.outcomes:
        if files.demos is not None:
            parts.append(clips_of_folder(files.demos, config, settings, learned.features, spec))
        elif action == "fit":
            raise ValueError("reward.outcomes names demonstrations: pass their folder as --demos.")
    if "labeller" in settings.outcomes:
        if not np.isnan(known.outcome).all():
            held = np.zeros(len(known.ids), bool)
            held[known.labels.pairs[known.labels.held_out]] = True
            parts.append(make_clips(known.episodes, known.outcome, held, spec.instructions, learned.features, 0))
        elif action == "fit":
            raise ValueError(
                f"reward.outcomes names the labeller, and {outcome_path(files.store)} has no outcome of these "
                "episodes: `vla-rlaif label --outcomes N` asks for some."
            )
    return join_clips(parts) if parts else None


def _build_reward(
    config: RunConfig, settings: PreferenceRewardConfig, files: Files, episodes: Episodes
) -> tuple[Any, dict[str, str], EnvSpec]:
    """An unfitted reward, and what must be the same when its weights are read back."""
    needs_policy = settings.encoder.type == "policy"
    if needs_policy and files.policy is None:
        raise ValueError("reward.encoder policy reads the features of a policy: pass its folder as --policy.")
    env = build_env(config.env)
    spec = env.spec
    env.close()
    found = {name: images.shape[2] for name, images in episodes.images.items()}, episodes.state.shape[2]
    wanted = dict.fromkeys(spec.cameras, spec.image_size), spec.state_dim
    if found != wanted:
        raise ValueError(
            f"the episodes in {files.data} have images of {found[0]} pixels and {found[1]} state dims, the config's "
            f"env {wanted[0]} and {wanted[1]}. Use the config that collected them."
        )
    loaded = load_folder(files.policy, config, spec) if needs_policy and files.policy is not None else None
    origin = {
        "reward.encoder": json.dumps(settings.encoder.model_dump(mode="json")),
        "reward.frames": settings.frames,
        "reward.first_frame": str(settings.first_frame),
        "reward.heads": str(settings.heads),
        "reward.members": str(settings.members),
        "reward.hidden": str(settings.hidden),
        "--policy (SHA-256)": _digest(files.policy) if loaded is not None and files.policy is not None else "none",
    }
    return build_preference_reward(settings, loaded, spec), origin, spec


def _digest(policy: Path) -> str:
    parts = [(policy / name).read_bytes() for name in ("policy.json", "params.safetensors")]
    return hashlib.sha256(b"".join(parts)).hexdigest()


def _fit(
    learned: Any,
    origin: Mapping[str, str],
    known: Labelled,
    clips: ClipFrames | None,
    model: Path,
    seed: int,
    say: Say,
) -> None:
    rows, index = np.unique(known.labels.pairs, return_inverse=True)
    features = learned.features(take(known.episodes, rows))
    _, pair_data = make_pair_data(features, index.reshape(-1, 2), known.labels.p_first, known.labels.held_out)
    report = learned.fit(pair_data, seed, clips)
    write_whole(model, save(dict(learned.state()), metadata={FORMAT: json.dumps(origin)}))
    for name, value in vars(report).items():
        if not math.isnan(value):
            say(f"{name:18} {value:.4g}")
    say(f"{model}: reward model written")


def _read_model(model: Path) -> tuple[dict[str, str], dict[str, np.ndarray]]:
    if not model.is_file():
        raise ValueError(f"no reward model at {model}; `vla-rlaif reward fit` writes one.")
    try:
        with safe_open(model, "numpy") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise ValueError(f"reward model {model} is damaged: {error}. Fit it again.") from None
    if FORMAT not in metadata:
        raise ValueError(f"{model} is not a reward model of this version; `vla-rlaif reward fit` writes one.")
    return json.loads(metadata[FORMAT]), tensors


def _restore(
    learned: Any, origin: Mapping[str, str], fitted: Mapping[str, str], state: Mapping[str, np.ndarray], model: Path
) -> None:
    differ = [f"{k} {fitted.get(k)}, not {v}" for k, v in origin.items() if fitted.get(k) != v]
    if differ:
        raise ValueError(f"{model} was fitted with {'; '.join(differ)}. Evaluate with the settings of the fit.")
    learned.restore(state)


def _say_figures(card: Card, score: Float[np.ndarray, " N"], labels: Labels, to: Path, say: Say) -> None:
    usable = labels.held_out & ~np.isnan(labels.p_first)
    figures = {
        "held_out_accuracy": pair_accuracy(score, labels.pairs[usable], labels.p_first[usable]),
        "ece": card.ece,  # on the pairs that the temperature was chosen on: a lower bound
        "kendall_tau": card.tau,
        "success_failure_gap": card.success_failure_gap,  # in standard deviations of all episodes
        "num_pairs": int((~np.isnan(labels.p_first)).sum()),
        "num_held_out_pairs": int(usable.sum()),
        "num_episodes": card.num_episodes,
    }
    for name, value in figures.items():
        say(f"{name:20} {value:.4g}")
    plain = {k: None if isinstance(v, float) and math.isnan(v) else v for k, v in figures.items()}
    write_whole(to, json.dumps(plain, indent=1).encode())
    say(f"{to}: figures written")


def _shown(card: Card, known: Labelled) -> dict[str, UInt8[np.ndarray, "F height width 3"]]:
    """Frames of the first camera of the episodes that the card's mistakes name."""
    row = {name: index for index, name in enumerate(known.ids)}
    camera = next(iter(known.episodes.images.values()), None)
    if camera is None:
        return {}
    shown = {}
    for name in {name for mistake in card.mistakes for name in (mistake.first, mistake.second)}:
        last = int(known.episodes.num_decisions[row[name]])
        frames = np.unique(np.linspace(0, last, min(last + 1, NUM_SHOWN)).round().astype(int))
        shown[name] = camera[row[name], frames]
    return shown
