"""Every metric of a training run: its name in ``metrics.jsonl`` (and in each other sink), its unit and its meaning.

A name is ``section/what_unit``. A ``*`` stands for a part that the run decides, such as a pool's name. What is not
measured in a step is not in its line; what is not a number there is null. tests/test_metric_schema.py holds runs to it.
"""

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

BEGIN, END = "<!-- table -->", "<!-- /table -->"


@dataclass(frozen=True, kw_only=True)
class Metric:
    name: str  # or a pattern
    unit: str  # "1" for a share, a ratio or a correlation; "count" for how many
    meaning: str
    opt_in: str = ""  # why the small runs of the tests do not bring it


def _section(prefix: str, *rows: tuple[str, str, str], opt_in: str = "") -> tuple[Metric, ...]:
    return tuple(Metric(name=prefix + name, unit=unit, meaning=text, opt_in=opt_in) for name, unit, text in rows)


SCHEMA: tuple[Metric, ...] = (
    *_section(
        "",
        ("minutes", "min", "Wall time of the training loop so far, of all its lives together"),
        ("loss", "1", "Mean of the step's optimiser updates, with the KL and anchor terms"),
        ("policy_kl", "nats", "KL of the updated policy from the one that acted, a sub-step (k3 estimator)"),
        ("reference_kl", "nats", "KL from the start policy, a sub-step"),
        ("clip_fraction", "1", "Share of sub-steps whose ratio was clipped"),
        ("ratio_error", "1", "Largest |ratio - 1| of an update, mean of the updates"),
        ("ratio_error_first", "1", "The same before the first update: 0 unless acting and learning differ"),
        ("importance", "1", "Mean weight of decisions that older weights took (loop.staleness)"),
        ("grad_norm", "1", "Norm of the gradient before clipping"),
        ("updates", "count", "Optimiser updates of the step"),
        ("braked", "0 or 1", "The step ended early at learner.target_kl"),
        ("anchor_loss", "1", "Imitation loss on the demonstrations (algorithm.anchor_coef)"),
    ),
    *_section(
        "",
        ("entropy", "nats", "Entropy of the policy, estimated from what it played, a sub-step"),
        ("kl_coef", "1", "Weight of the KL to the start policy in this step (algorithm.kl_target)"),
        ("critic/loss", "reward^2", "Half the squared error of the critic, mean of its updates"),
        ("critic/explained", "1", "Share of the returns' variance that the values before the fit explain; may be < 0"),
        opt_in="algorithm.type ppo: tests/test_algorithms_run.py",
    ),
    *_section(
        "",
        ("pair_accuracy", "1", "Share of the decided pairs whose better trajectory has the larger log-ratio"),
        ("log_ratio_preferred", "nats", "Log-ratio to the start policy of the better trajectories, whole ones"),
        ("log_ratio_rejected", "nats", "The same of the worse ones"),
        ("pairs/trained", "count", "Pairs of the batch"),
        ("pairs/labelled", "count", "Pairs that DPO may draw from"),
        opt_in="algorithm.type dpo or tpo: tests/test_algorithms_run.py",
    ),
    *_section(
        "rollout/",
        ("success", "1", "Share of the training episodes that the simulator calls a success"),
        ("truth", "1", "Mean ground-truth return, in [-1, 2]; for monitoring only"),
        ("env_steps", "count", "Env steps that ran"),
        ("decisions", "count", "Decisions that were taken while an episode was live"),
        ("version", "count", "Of the weights that acted"),
    ),
    *_section(
        "reward/",
        ("mean", "reward", "Mean of what was trained on, over the episodes that have a reward"),
        ("unscorable", "count", "Episodes without a reward (NaN)"),
        ("success_correlation", "1", "Pearson correlation of reward and success; null if either has no spread"),
        ("std_in_group", "reward", "Mean standard deviation within a group"),
        ("on_policy_accuracy", "1", "Share of this step's new pairs that the model before the fit orders as labelled"),
        ("on_policy_accuracy_in_group", "1", "The same, of pairs of one group"),
        ("train_accuracy", "1", "Share of the training pairs ordered as labelled, after the fit"),
        ("held_out_accuracy", "1", "Share of the held-out pairs ordered as labelled"),
        ("ece", "1", "Expected calibration error on the held-out pairs; a lower bound"),
        ("temperature", "1", "What score differences are divided by in probabilities"),
        ("fit_loss", "nats", "Loss of a training pair, mean of the members"),
        ("fit_steps", "count", "Optimiser steps up to the weights that were kept"),
        ("fit_s", "s", "Wall time of the fit"),
        ("version", "count", "Fits of the reward model so far"),
    ),
    *_section(
        "reward/",
        ("progress_error", "1", "Mean absolute error of progress on held-out frames where it is known"),
        ("success_threshold", "1", "Probability of success above which a clip's end counts as one"),
        ("success_recall", "1", "Share of the held-out successes above the threshold"),
        ("false_positives", "1", "Share of the held-out failures and negatives above it"),
        opt_in="reward.heads beyond return",
    ),
    *_section(
        "labels/",
        ("outcomes", "count", "Single episodes whose outcome the labeller was asked for, in this refresh"),
        opt_in="reward.heads beyond return",
    ),
    *_section(
        "term/",
        ("*/mean", "reward", "Mean of one term of a composite reward, as the term gives it"),
        ("*/std", "reward", "Its standard deviation over the step's episodes"),
        ("*/unscorable", "count", "Episodes that the term gives NaN for"),
    ),
    *_section(
        "monitor/",
        ("sqrt_kl", "nats^0.5", "Square root of reference_kl: the distance from the start policy"),
        ("gold", "1", "Mean success on the validation starts (gold truth: return; labels: preferred to the best)"),
        ("proxy", "reward", "Mean reward on the validation starts, by the present reward model"),
        ("proxy_gain", "reward", "The same against the start policy, pair by pair, by the same reward model"),
        ("gold_change", "1", "Gold against the best validation so far, mean of the pairs"),
        ("gold_change_high", "1", "Its upper confidence bound; below -monitor.tolerance gold has fallen"),
        ("proxy_change", "reward", "The reward against the best validation so far, mean of the pairs"),
        ("proxy_change_low", "reward", "Its lower confidence bound; above 0 the reward has risen"),
        ("best_step", "count", "Updates after which gold was best"),
        ("strikes", "count", "Validations in a row in which the reward rose while gold fell, both beyond doubt"),
        ("alarm", "0 or 1", "The strikes have reached monitor.patience: the reward is being hacked"),
        ("rollbacks", "count", "Times that the run went back to its best weights"),
        ("term/*", "reward", "The terms of a composite on the validation starts"),
    ),
    *_section(
        "monitor/",
        ("audit_labels", "count", "Answers of the audit's labeller so far, skips included"),
        ("audit_skips", "count", "Of them, pairs that it would not compare"),
        ("audit_budget_left", "count", "Answers that may still be asked for (monitor.audit.budget)"),
        opt_in="monitor.gold labels: tests/test_audit_labels.py",
    ),
    *_section(
        "groups/",
        ("total", "count", "Groups that were judged"),
        ("live", "count", "Groups with spread in their rewards: those that are learned from"),
        ("zero_spread", "count", "Groups whose rewards are all the same (algorithm.std_floor)"),
        ("too_few_valid", "count", "Groups with too few scorable members (algorithm.min_valid_share)"),
        ("all_fail", "count", "Groups in which no member succeeds"),
        ("all_success", "count", "Groups in which every member succeeds"),
        ("lost", "count", "Groups that were lost with the worker that played them"),
        ("evicted", "count", "Groups whose weights were too old to be trained on"),
        ("refills", "count", "Rounds that were added because too few groups were live"),
    ),
    *_section(
        "episodes/",
        ("ordered", "count", "Episodes that were asked for; each is in one of the next three"),
        ("trained", "count", "Episodes with an advantage: they are in the batch"),
        ("failed", "count", "Episodes whose simulation broke or whose worker was lost"),
        ("evicted", "count", "Episodes that were too old, or of a group without spread"),
        ("judged", "count", "Episodes that came back"),
        ("carried", "count", "Episodes that are played already and wait for their step (loop.overlap)"),
    ),
    *_section(
        "labels/",
        ("total", "count", "Labels of the run so far"),
        ("ties", "count", "Of them, ties"),
        ("skips", "count", "Of them, pairs that the labeller would not compare"),
        ("budget_left", "count", "Labels that may still be asked for (reward.budget)"),
        ("within_group", "count", "New pairs of one group"),
    ),
    *_section(
        "labels/",
        ("asked", "count", "Questions to the judging model; known answers are not asked for again"),
        ("invalid", "count", "Of them, answers that were none"),
        ("inconsistent", "count", "Pairs on which the two orders disagree"),
        ("position_bias", "1", "Mean excess of the first shown in both orders; 0 is none"),
        opt_in="needs a labeller that asks a model (labeller.type vlm): tests/preferences",
    ),
    *_section(
        "validation/",
        ("success", "1", "Success of the averaged weights on the validation starts, deterministic"),
        ("low", "1", "Lower end of its 95 % Wilson interval"),
        ("high", "1", "Upper end of its 95 % Wilson interval"),
    ),
    *_section(
        "time/",
        ("step_s", "s", "Wall time from the last line to this one"),
        ("rollout_s", "s", "Wall time of playing; it contains the next three"),
        ("physics_s", "s", "Of it, the simulator"),
        ("render_s", "s", "Of it, the cameras"),
        ("policy_s", "s", "Of it, the rest: the policy and what is around it"),
        ("reward_s", "s", "Labels, fits and scores"),
        ("reference_s", "s", "The start policy's means, if reference workers compute them"),
        ("update_s", "s", "The learner"),
        ("validate_s", "s", "Validation"),
        ("record_s", "s", "Writing the episodes that are kept for inspection (record.every)"),
        ("sync_s", "s", "Publishing weights, in which nobody acts or learns"),
    ),
    Metric(
        name="idle/*", unit="1", meaning="Share of the wall time in which the pool (rollout, reward, ...) had no work"
    ),
    *_section(
        "sync/",
        ("gather_s", "s", "Collecting the weights on the learner's side"),
        ("transfer_s", "s", "Until every receiver holds all of them, checked"),
        ("commit_s", "s", "In which acting had to wait"),
        ("megabytes", "MB", "Sent to each receiver"),
        ("stale", "count", "Receivers that do not have the newest weights"),
    ),
    Metric(name="jax/compilations", unit="count", meaning="XLA compilations in this step; 0 after the first steps"),
    *_section(
        "env/",
        ("raised", "count", "Env worker processes whose env raised an error, and were replaced"),
        ("hung", "count", "Env worker processes that did not answer in time, and were replaced"),
        ("died", "count", "Env worker processes that died, and were replaced"),
        ("workers_died", "count", "Rollout workers of a cluster that died"),
        ("workers_hung", "count", "Rollout workers of a cluster that hung"),
    ),
    *_section(
        "stored/",
        ("used", "count", "Episodes of the store (loop.stored) that the step took"),
        ("evicted", "count", "Episodes of the store that were too old"),
        ("age", "count", "Updates between the weights that played what was taken and those that are trained"),
    ),
    Metric(
        name="policy/saturated_share",
        unit="1",
        meaning="Octo: share of the acted coordinates at the bound of the denoising states; near 1, nothing is learned",
        opt_in="an Octo policy: tests/policies/test_octo_policy.py",
    ),
)


def described(name: str, schema: Sequence[Metric] = SCHEMA) -> Metric | None:
    """The entry of a metric's name; an exact one before a pattern."""
    exact = (metric for metric in schema if metric.name == name)
    matching = (metric for metric in schema if fnmatchcase(name, metric.name))
    return next(exact, None) or next(matching, None)


def undescribed(names: Iterable[str], schema: Sequence[Metric] = SCHEMA) -> list[str]:
    """Names that the schema lacks; ``step``, the key of every line, is none."""
    return sorted(name for name in set(names) - {"step"} if described(name, schema) is None)


def markdown_table(schema: Sequence[Metric] = SCHEMA) -> str:
    """The schema as a table of Markdown, in its order: what docs/metrics.md shows."""
    cells = ((f"`{m.name}`", m.unit, m.meaning.replace("|", "\\|")) for m in schema)
    rows = [f"| {' | '.join(row)} |" for row in cells]
    return "\n".join(["| metric | unit | meaning |", "| --- | --- | --- |", *rows])


def main(page: Path) -> None:
    """Write the table anew into a page, between its lines ``<!-- table -->`` and ``<!-- /table -->``."""
    text = page.read_text()
    before, begin, rest = text.partition(f"{BEGIN}\n")
    _, end, after = rest.partition(f"\n{END}\n")
    if not (begin and end):
        raise ValueError(f"{page} has no lines {BEGIN} and {END}; the table goes between them.")
    page.write_text(f"{before}{begin}{markdown_table()}{end}{after}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
