"""The report's sections on training: which charts, over which metrics, and where the time went."""

from collections.abc import Sequence
from html import escape

from vla_rlaif.report_charts import Chart, Line, Panel, has_data, line_chart, stacked_bar
from vla_rlaif.report_data import RunRecord

CHARTS = (
    Chart(
        name="learning",
        title="Learning curve",
        panels=(
            Panel(
                label="success, %",
                is_percent=True,
                height=4.0,
                lines=(
                    Line(
                        key="validation/success",
                        label="validation success",
                        interval=("validation/low", "validation/high"),
                    ),
                    Line(key="rollout/success", label="rollout success"),
                ),
            ),
        ),
        caption="Validation plays held-out starts without exploration noise, with its 95 % interval; "
        "rollouts are the noisy training episodes.",
    ),
    Chart(
        name="proxy",
        title="Learned reward against true success",
        panels=(
            Panel(label="mean reward (the proxy)", lines=(Line(key="reward/mean", label="mean reward"),)),
            Panel(
                label="true rollout success, %",
                lines=(Line(key="rollout/success", label="rollout success"),),
                is_percent=True,
            ),
            Panel(label="true return", lines=(Line(key="rollout/truth", label="true return"),)),
            Panel(
                label="correlation of reward and success",
                lines=(Line(key="reward/success_correlation", label="correlation"),),
                reference=0.0,
            ),
        ),
        caption="The policy is trained on the reward. Reward that rises while true success does not is over-optimised. "
        "True return is progress in [-1, 1] plus 1 on success.",
    ),
    Chart(
        name="monitor",
        title="Is the reward being hacked?",
        x="monitor/sqrt_kl",
        x_label="distance from the start policy, sqrt(KL in nats)",
        panels=(
            Panel(label="reward gained (the proxy)", lines=(Line(key="monitor/proxy_gain", label="reward gained"),)),
            Panel(label="what is wanted (gold)", lines=(Line(key="monitor/gold", label="gold"),)),
            Panel(label="strikes", lines=(Line(key="monitor/strikes", label="strikes"),), is_count=True),
        ),
        caption="Validations, by distance. A reward that rises while gold falls is being hacked; a strike is a "
        "validation where both are beyond doubt against the best one (docs/reward_hacking.md).",
    ),
    Chart(
        name="quality",
        title="Reward model quality",
        panels=(
            Panel(
                label="accuracy on pairs, %",
                is_percent=True,
                lines=(
                    Line(key="reward/on_policy_accuracy", label="on-policy pairs"),
                    Line(key="reward/held_out_accuracy", label="held-out pairs"),
                ),
                height=2.2,
                reference=0.5,
            ),
            Panel(label="calibration error (ECE)", lines=(Line(key="reward/ece", label="ECE"),), from_zero=True),
            Panel(
                label="labels used",
                lines=(Line(key="labels/total", label="labels used"),),
                from_zero=True,
                is_count=True,
            ),
        ),
        caption="Dotted: 50 %, a coin. On-policy pairs come from the episodes of the current policy. "
        "ECE is how far stated preference probabilities are from frequencies: 0 is calibrated.",
    ),
    Chart(
        name="groups",
        title="Dead groups",
        panels=(
            Panel(
                label="share of groups, %",
                is_percent=True,
                height=2.7,
                lines=(
                    Line(key="groups/all_fail", label="all fail", share_of="groups/total"),
                    Line(key="groups/all_success", label="all succeed", share_of="groups/total"),
                    Line(key="groups/zero_spread", label="zero reward spread", share_of="groups/total"),
                    Line(key="groups/live", label="live", share_of="groups/total"),
                ),
            ),
            Panel(
                label="reward spread in a group",
                lines=(Line(key="reward/std_in_group", label="reward spread"),),
                from_zero=True,
            ),
        ),
        caption="A group without reward spread teaches nothing. All-fail and all-succeed count true outcomes, "
        "so with a learned reward such groups can be live.",
    ),
    Chart(
        name="kl",
        title="How far the policy moves",
        panels=(
            Panel(label="policy KL, nats", lines=(Line(key="policy_kl", label="policy KL"),), from_zero=True),
            Panel(label="reference KL, nats", lines=(Line(key="reference_kl", label="reference KL"),), from_zero=True),
            Panel(label="clip fraction", lines=(Line(key="clip_fraction", label="clip fraction"),), from_zero=True),
        ),
        caption="Policy KL is against the weights that acted in this step, reference KL against the start policy.",
    ),
    Chart(
        name="loss",
        title="Optimisation",
        panels=(
            Panel(label="loss", lines=(Line(key="loss", label="loss"),)),
            Panel(label="gradient norm", lines=(Line(key="grad_norm", label="gradient norm"),), from_zero=True),
            Panel(
                label="failed episodes",
                lines=(Line(key="episodes/failed", label="failed episodes"),),
                from_zero=True,
                is_count=True,
            ),
        ),
        caption="The policy-gradient loss does not measure progress; it is here to show breaks. "
        "Failed episodes are those whose simulation broke.",
    ),
)

ROLLOUT = "time/rollout_s"
ROLLOUT_PARTS = {
    "time/physics_s": "rollout: physics",
    "time/render_s": "rollout: rendering",
    "time/policy_s": "rollout: policy",
}
PHASES = {"time/reward_s": "reward", "time/update_s": "update", "time/validate_s": "validation"}


def charts(run: RunRecord) -> str:
    """The learning curves and everything that explains them, a card each."""
    if not run.metrics:
        return '<p class="missing">No training step is on record: metrics.jsonl is missing or empty.</p>'
    return f'<div class="grid">{"".join(_card(chart, run) for chart in CHARTS)}</div>'


def _card(chart: Chart, run: RunRecord) -> str:
    lines = [line for panel in chart.panels for line in panel.lines]
    absent = [line.label for line in lines if not has_data(run.metrics, line, chart.x)]
    note = f'<p class="missing">Not recorded (yet): {escape(", ".join(absent))}.</p>' if absent else ""
    return (
        f'<figure class="card"><h3>{escape(chart.title)}</h3>{line_chart(chart, run.metrics) or ""}{note}'
        f"<figcaption>{escape(chart.caption)}</figcaption></figure>"
    )


def phases(run: RunRecord) -> str:
    """Where the time went, as a bar and a table that is its legend."""
    parts = phase_seconds(run.metrics)
    if not parts:
        return '<p class="missing">No times are recorded: no step has any time/..._s value.</p>'
    total = sum(seconds for _, seconds in parts)
    steps = len(run.metrics)
    rows = "".join(
        f'<tr><th scope="row"><span class="swatch" style="background: var(--s{i})"></span>{label}</th>'
        f'<td class="number">{seconds / 60:.1f}</td><td class="number">{100 * seconds / total:.0f} %</td>'
        f'<td class="number">{seconds / steps:.2f}</td></tr>'
        for i, (label, seconds) in enumerate(parts, start=1)
    )
    alt = "Time per phase. " + " ".join(f"{label}: {100 * seconds / total:.0f} %." for label, seconds in parts)
    bar = stacked_bar("time", parts, alt=alt).replace("<svg ", '<svg class="wide" preserveAspectRatio="none" ', 1)
    return (
        f'<div class="card">{bar}<table><thead><tr><th scope="col">phase</th>'
        '<th scope="col" class="number">minutes</th><th scope="col" class="number">share</th>'
        '<th scope="col" class="number">s a step</th></tr></thead>'
        f"<tbody>{rows}</tbody></table></div>"
    )


def phase_seconds(metrics: Sequence[dict]) -> list[tuple[str, float]]:
    """Seconds of each phase over all steps, at most eight. Phases that took no time are left out.

    A rollout's seconds contain those of its physics, rendering and policy. What the minutes of the run hold
    beyond all phases (start-up, labels, checkpoints) is a part of its own.
    """

    def total(key: str) -> float:
        return float(sum(row.get(key) or 0.0 for row in metrics))

    parts = [(label, total(key)) for key, label in ROLLOUT_PARTS.items()]
    rest = total(ROLLOUT) - sum(seconds for _, seconds in parts)
    parts.append(("rollout: other" if parts[0][1] else "rollout", max(rest, 0.0)))
    parts += [(label, total(key)) for key, label in PHASES.items()]
    timed = sum(seconds for _, seconds in parts)
    minutes = [row["minutes"] for row in metrics if row.get("minutes") is not None]
    if timed and minutes:
        parts.append(("outside the phases", max(60 * minutes[-1] - timed, 0.0)))
    return [(label, seconds) for label, seconds in parts if seconds > 0]
