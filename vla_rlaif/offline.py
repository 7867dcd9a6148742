"""The verbs that do one link of the chain on data on disk: imitate, label, export.

Axes: N episodes of a folder.
"""

import functools
from collections.abc import Callable
from pathlib import Path

import numpy as np
from jaxtyping import Int

from vla_rlaif.build import build_env, lerobot_export, load_folder
from vla_rlaif.build_labeller import build_labeller, pair_mix
from vla_rlaif.checkpoint import WholeFolder, save_policy
from vla_rlaif.config import RunConfig
from vla_rlaif.interfaces import Labeller
from vla_rlaif.lerobot_config import LeRobotSettings
from vla_rlaif.policy_config import VLASettings
from vla_rlaif.preferences.agreement import Agreement, describe_agreement, measure_agreement, write_agreement
from vla_rlaif.preferences.clip_book import answers_of, outcome_records, says_outcomes
from vla_rlaif.preferences.labelled import gather_episodes, held_out_rows, join, rows_of_others
from vla_rlaif.preferences.labelling import ask, choose_pairs, make_records
from vla_rlaif.preferences.outcome_store import OutcomeStore, outcome_path
from vla_rlaif.preferences.store import PreferenceStore
from vla_rlaif.reward_config import PreferenceRewardConfig
from vla_rlaif.token_config import TokenVLAConfig
from vla_rlaif.types import Episodes
from vla_rlaif.warm_start_config import WarmStartConfig
from vla_rlaif.warm_start_data import demonstrations_from

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


def label(
    config: RunConfig,
    data: Path,
    store: Path,
    num_pairs: int,
    say: Say,
    *,
    again: bool = False,
    num_outcomes: int = 0,
) -> None:
    """Label pairs that are not in the store yet, or with ``again`` pairs that only others have labelled. An episode
    that was held out, or trained on, stays so. How far labellers agree is said, and written beside the store. Of
    ``num_outcomes`` compared episodes the labeller says then whether they have succeeded."""
    settings = learned_settings(config)
    if num_pairs < 1:
        raise ValueError(f"--pairs is {num_pairs}; it must be at least 1.")
    if num_outcomes < 0:
        raise ValueError(f"--outcomes is {num_outcomes}; it must be 0 or more.")
    ids, episodes = gather_episodes(data)
    labeller = build_labeller(settings.labeller, store.parent)
    if num_outcomes:
        says_outcomes(labeller)  # or pairs would be paid for before it is refused
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
    if num_outcomes:
        compared = np.unique(np.concatenate([known.pairs, pairs]))
        _ask_outcomes(labeller, ids, episodes, compared, store, num_outcomes, label_seed, say)


def _ask_outcomes(
    labeller: Labeller,
    ids: list[str],
    episodes: Episodes,
    compared: Int[np.ndarray, " R"],
    store: Path,
    num: int,
    seed: int,
    say: Say,
) -> None:
    """Of compared episodes, which have their side already, at most ``num`` that nobody was asked about yet."""
    with OutcomeStore(outcome_path(store)) as kept:
        known = kept.newest()
        rows = np.array([row for row in compared if ids[int(row)] not in known], np.int64)
        rows = np.sort(np.random.default_rng(seed).permutation(rows)[:num])
        p = answers_of(labeller, episodes, rows, seed)
        kept.append(outcome_records(episodes, ids, rows, p, labeller=labeller.name, step=0))
    say(
        f"{outcome_path(store)}: {len(rows)} outcomes (asked for {num}), {int((p > 0.5).sum())} successes, "
        f"{int(np.isnan(p).sum())} that could not be said; {len(known) + len(rows)} in all"
    )


def report_agreement(found: Agreement, store: Path, say: Say) -> None:
    """Say it, and keep it as JSON beside the store."""
    for line in describe_agreement(found):
        say(line)
    write_agreement(found, store.with_suffix(".agreement.json"))


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


def learned_settings(config: RunConfig) -> PreferenceRewardConfig:
    """Of the learned reward, for verbs that are about it."""
    if not isinstance(config.reward, PreferenceRewardConfig):
        raise ValueError(
            f"labels are for a reward of type preference; the config has reward.type {config.reward.type}."
        )
    return config.reward
