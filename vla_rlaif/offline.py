"""The verbs that do one link of the chain on data on disk: imitate, label, reward fit|eval, evaluate, export.

Axes: N episodes of a folder.
"""

import functools
import hashlib
import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from vla_rlaif.build import build_env, build_preference_reward, lerobot_export, load_folder
from vla_rlaif.build_labeller import build_labeller, pair_mix
from vla_rlaif.checkpoint import WholeFolder, save_policy, write_whole
from vla_rlaif.config import RunConfig
from vla_rlaif.evaluate import evaluate
from vla_rlaif.lerobot_config import LeRobotSettings
from vla_rlaif.policy_config import VLASettings
from vla_rlaif.preferences.agreement import Agreement, describe_agreement, measure_agreement, write_agreement
from vla_rlaif.preferences.data import kendall_tau, pair_accuracy
from vla_rlaif.preferences.labelled import Labels, gather_episodes, held_out_rows, join, rows_of_others
from vla_rlaif.preferences.labelling import ask, choose_pairs, make_pair_data, make_records
from vla_rlaif.preferences.store import PreferenceStore
from vla_rlaif.reward_config import PreferenceRewardConfig
from vla_rlaif.rollout import Split, take
from vla_rlaif.rollouts_local import LocalRollouts
from vla_rlaif.token_config import TokenVLAConfig
from vla_rlaif.types import Episodes
from vla_rlaif.warm_start_config import WarmStartConfig
from vla_rlaif.warm_start_data import demonstrations_from

FORMAT = "vla_rlaif reward 1"  # the one key of a reward file's metadata; several would be written in random order
Say = Callable[[str], None]


def imitate(config: RunConfig, data: Path, to: Path, say: Say) -> None:
    from vla_rlaif.start import imitated_policy

    warm = config.warm_start or WarmStartConfig()
    env = build_env(config.env)
    try:
        demos = demonstrations_from(data, env.spec, warm)
        policy = imitated_policy(config.model_copy(update={"warm_start": warm}), demos, env, say)
    finally:
        env.close()
    weights = {k: np.asarray(v) for k, v in policy.params.items()}
    save_policy(to, policy.metadata(), weights, also=lerobot_export(config.policy, policy))
    say(f"{to}: policy written")


def label(config: RunConfig, data: Path, store: Path, num_pairs: int, say: Say, *, again: bool = False) -> None:
    """Label pairs that are not in the store yet, or with ``again`` pairs that only others have labelled. An episode
    that was held out, or trained on, stays so. How far labellers agree is said, and written beside the store."""
    settings = _learned_reward(config)
    if num_pairs < 1:
        raise ValueError(f"--pairs is {num_pairs}; it must be at least 1.")
    ids, episodes = gather_episodes(data)
    labeller = build_labeller(settings.labeller, store.parent)
    with PreferenceStore(store) as kept:
        records = kept.records()
        known = join(records, ids, episodes, store=store, data=data)
        seeds = np.random.SeedSequence((config.seed, kept.last_id)).generate_state(4)
        split_seed, held_seed, train_seed, label_seed = seeds.tolist()
        if again:
            rows = rows_of_others(records, labeller.name, num_pairs, train_seed)
            pairs, is_held = known.pairs[rows], known.held_out[rows]
            if not len(pairs):
                raise ValueError(f"{store} has no pair that others have labelled and {labeller.name} has not.")
        else:
            held_rows = held_out_rows(episodes, known, settings.held_out, split_seed)
            choose = functools.partial(choose_pairs, episodes, mix=pair_mix(settings.pairs), exclude=known.pairs)
            held = choose(round(settings.held_out * num_pairs), np.flatnonzero(held_rows), held_seed)
            train = choose(num_pairs - len(held), np.flatnonzero(~held_rows), train_seed)
            pairs, is_held = np.concatenate([train, held]), np.repeat([False, True], [len(train), len(held)])
            if not len(pairs):
                raise ValueError(f"{store} has every pair of the {len(ids)} episodes in {data} already: collect more.")
        answers = ask(labeller, episodes, pairs, label_seed)
        labels = answers.p_first
        kept.append(make_records(episodes, ids, pairs, answers, is_held, labeller=labeller.name, step=0))
        count = kept.count
        found = measure_agreement(kept.records())
    group = episodes.starts.group[pairs]
    say(
        f"{store}: {len(pairs)} labels (asked for {num_pairs}), of which {int((labels == 0.5).sum())} ties, "
        f"{int(np.isnan(labels).sum())} skips, {int(is_held.sum())} held out, "
        f"{int((group[:, 0] == group[:, 1]).sum())} within a group; {count} in all"
    )
    if answers.num_asked:
        say(f"{answers.num_asked} questions asked, {answers.num_invalid} answers invalid")
    report_agreement(found, store, say)


def report_agreement(found: Agreement, store: Path, say: Say) -> None:
    """Say it, and keep it as JSON beside the store."""
    for line in describe_agreement(found):
        say(line)
    write_agreement(found, store.with_suffix(".agreement.json"))


def reward(
    action: Literal["fit", "eval"],
    config: RunConfig,
    data: Path,
    store: Path,
    model: Path,
    policy: Path | None,
    say: Say,
) -> None:
    """``fit`` writes the model, ``eval`` reads it and writes its figures beside it as JSON."""
    settings = _learned_reward(config)
    saved = _read_model(model) if action == "eval" else ({}, {})
    if not store.exists():
        raise ValueError(f"no preference store at {store}; `vla-rlaif label` makes one.")
    ids, episodes = gather_episodes(data)
    with PreferenceStore(store) as kept:
        labels = join(kept.records(), ids, episodes, store=store, data=data)
    if np.isnan(labels.p_first).all():
        raise ValueError(f"{store} has no labels ({len(labels.p_first)} skips); `vla-rlaif label` makes some.")
    learned, origin = _build_reward(config, settings, policy, episodes, data)
    if action == "fit":
        _fit(learned, origin, episodes, labels, model, config.seed, say)
    else:
        _restore(learned, origin, *saved, model)
        _eval(learned, episodes, labels, model.with_suffix(".json"), say)


def evaluate_policy(config: RunConfig, folder: Path, to: Path | None, say: Say) -> None:
    env = build_env(config.env)
    try:
        policy = load_folder(folder, config, env.spec)
        rollouts = LocalRollouts(policy, env, act_batch=config.loop.act_batch)
        result = evaluate(rollouts, split=Split.TEST, episodes=config.evaluate.episodes)
    finally:
        env.close()
    say(
        f"success {result.success:.3f}, 95 % interval [{result.low:.3f}, {result.high:.3f}], {result.episodes} episodes"
    )
    if to is not None:
        numbers = {"success": result.success, "ci95": [result.low, result.high], "episodes": result.episodes}
        _write_json(to, {**numbers, "outcomes": result.outcomes.tolist()})


def export(config: RunConfig, folder: Path, to: Path, step: int, say: Say) -> None:
    if not isinstance(config.policy, VLASettings):
        raise ValueError(f"export is for vision-language policies; the config has policy.type {config.policy.type}.")
    env = build_env(config.env)
    env.close()
    policy = load_folder(folder, config, env.spec)
    if isinstance(config.policy, LeRobotSettings):
        with WholeFolder(to) as part:
            policy.export(part, final=to.resolve())
        say(f"{to}: written; LeRobot loads it with --policy.path={to}")
        return
    if isinstance(config.policy, TokenVLAConfig):
        from vla_rlaif.policies.tokens.folder import export_folder as export_transformers

        export_transformers(policy, to)
        say(f"{to}: written; transformers loads it with AutoModelForImageTextToText.from_pretrained")
        return
    from vla_rlaif.policies.octo.adopt import export_folder

    export_folder(policy, to, step=step)
    say(f"{to}: step {step} written; the original Octo code loads it with OctoModel.load_pretrained")


def _learned_reward(config: RunConfig) -> PreferenceRewardConfig:
    if not isinstance(config.reward, PreferenceRewardConfig):
        raise ValueError(
            f"labels are for a reward of type preference; the config has reward.type {config.reward.type}."
        )
    return config.reward


def _build_reward(
    config: RunConfig, settings: PreferenceRewardConfig, policy: Path | None, episodes: Episodes, data: Path
) -> tuple[Any, dict[str, str]]:
    """An unfitted reward, and what must be the same when its weights are read back."""
    needs_policy = settings.encoder.type == "policy"
    if needs_policy and policy is None:
        raise ValueError("reward.encoder policy reads the features of a policy: pass its folder as --policy.")
    env = build_env(config.env)
    spec = env.spec
    env.close()
    found = {name: images.shape[2] for name, images in episodes.images.items()}, episodes.state.shape[2]
    wanted = dict.fromkeys(spec.cameras, spec.image_size), spec.state_dim
    if found != wanted:
        raise ValueError(
            f"the episodes in {data} have images of {found[0]} pixels and {found[1]} state dims, the config's env "
            f"{wanted[0]} and {wanted[1]}. Use the config that collected them."
        )
    loaded = load_folder(policy, config, spec) if needs_policy and policy is not None else None
    origin = {
        "reward.encoder": settings.encoder.type,
        "reward.frames": settings.frames,
        "reward.members": str(settings.members),
        "reward.hidden": str(settings.hidden),
        "--policy (SHA-256)": _digest(policy) if needs_policy and policy is not None else "none",
    }
    return build_preference_reward(settings, loaded, spec), origin


def _digest(policy: Path) -> str:
    parts = [(policy / name).read_bytes() for name in ("policy.json", "params.safetensors")]
    return hashlib.sha256(b"".join(parts)).hexdigest()


def _fit(
    learned: Any, origin: Mapping[str, str], episodes: Episodes, labels: Labels, model: Path, seed: int, say: Say
) -> None:
    rows, index = np.unique(labels.pairs, return_inverse=True)
    features = learned.features(take(episodes, rows))
    _, pair_data = make_pair_data(features, index.reshape(-1, 2), labels.p_first, labels.held_out)
    report = learned.fit(pair_data, seed)
    write_whole(model, save(dict(learned.state()), metadata={FORMAT: json.dumps(origin)}))
    for name, value in vars(report).items():
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


def _eval(learned: Any, episodes: Episodes, labels: Labels, to: Path, say: Say) -> None:
    from vla_rlaif.reward_models.bradley_terry import expected_calibration_error

    features = learned.features(episodes)
    score, logits = learned.score_features(features), learned.member_logits(features).mean(axis=0)
    usable = labels.held_out & ~np.isnan(labels.p_first)
    pairs, target = labels.pairs[usable], labels.p_first[usable]
    ece = float("nan")
    if len(pairs):
        p_first = 1 / (1 + np.exp(-np.clip(logits[pairs[:, 0]] - logits[pairs[:, 1]], -50, 50)))
        ece = expected_calibration_error(p_first, target)
    valid = episodes.valid
    won, lost = score[valid & episodes.success], score[valid & ~episodes.success]
    gap = float(won.mean() - lost.mean()) if len(won) and len(lost) else float("nan")
    figures = {
        "held_out_accuracy": pair_accuracy(score, pairs, target),
        "ece": ece,  # on the pairs that the temperature was chosen on: a lower bound
        "kendall_tau": kendall_tau(score, np.where(valid, episodes.truth, np.nan)),
        "success_failure_gap": gap,  # in standard deviations of the reference episodes
        "num_pairs": int((~np.isnan(labels.p_first)).sum()),
        "num_held_out_pairs": len(pairs),
        "num_episodes": int(valid.sum()),
    }
    for name, value in figures.items():
        say(f"{name:20} {value:.4g}")
    _write_json(to, figures)
    say(f"{to}: figures written")


def _write_json(path: Path, values: Mapping[str, object]) -> None:
    """NaN, which JSON lacks, becomes null."""
    plain = {k: None if isinstance(v, float) and math.isnan(v) else v for k, v in values.items()}
    write_whole(path, json.dumps(plain, indent=1).encode())
