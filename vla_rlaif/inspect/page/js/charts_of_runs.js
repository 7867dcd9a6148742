// Which metrics are drawn together, and how. `over` is a metric in place of the step; `right` puts a line on an axis of
// its own; `family` draws a line for each metric of a pattern.

const share = (key, name) => ({ key, name, of: "groups/total" });

export const CHARTS = [
  { title: "Success", unit: "share of episodes", percent: true, fixed: [0, 1], help: "Of the training episodes; dots: validation, with 95 % intervals.",
    lines: [{ key: "rollout/success", name: "training" }, { key: "validation/success", name: "validation", dots: true, band: ["validation/low", "validation/high"] }] },
  { title: "Reward", unit: "of the reward model", lines: [{ key: "reward/mean", name: "mean reward" }] },
  { title: "Reward against success", unit: "correlation", fixed: [null, 1], lines0: [0], help: "Falls when the reward is being fooled.",
    lines: [{ key: "reward/success_correlation", name: "correlation" }] },
  { title: "Proxy and gold", unit: "at validations", fixed: [0, 1], over: "monitor/sqrt_kl", xLabel: "sqrt(KL) from the start policy", whole: false,
    help: "A reward (the proxy) that rises while what is wanted (gold) falls is being hacked.",
    lines: [{ key: "monitor/gold", name: "gold" }, { key: "monitor/proxy_gain", name: "reward gained (right)", right: true }] },
  { title: "Strikes of the monitor", unit: "count", fixed: [0, null], help: "Validations in a row in which the reward rose while gold fell, both beyond doubt.",
    lines: [{ key: "monitor/strikes", name: "strikes" }, { key: "monitor/alarm", name: "alarm" }, { key: "monitor/rollbacks", name: "rollbacks" }] },
  { title: "Terms of the reward", unit: "change, in standard deviations", lines0: [0], help: "Means of the training episodes against the first step, in that step's deviations.",
    family: /^term\/(.+)\/mean$/, lines: [] },
  { title: "Terms at validations", unit: "change, in standard deviations", lines0: [0], help: "The same on the validation starts, against the first validation.",
    family: /^monitor\/term\/(.+)$/, lines: [] },
  { title: "Groups", unit: "share of the groups", percent: true, fixed: [0, 1], help: "Only live groups teach: those with spread in their rewards.",
    lines: [share("groups/live", "live"), share("groups/all_success", "all succeed"), share("groups/all_fail", "all fail"), share("groups/zero_spread", "no spread")] },
  { title: "Reward spread in a group", unit: "standard deviation", fixed: [0, null], lines: [{ key: "reward/std_in_group", name: "spread" }] },
  { title: "KL from the start policy", unit: "nats per sub-step", fixed: [0, null], lines: [{ key: "reference_kl", name: "KL" }] },
  { title: "KL of one step", unit: "nats per sub-step", fixed: [0, null], help: "From the weights that acted.", lines: [{ key: "policy_kl", name: "KL" }] },
  { title: "Clipped ratios", unit: "share", percent: true, fixed: [0, null], lines: [{ key: "clip_fraction", name: "clipped" }] },
  { title: "Reward model", unit: "share of pairs in the right order", percent: true, fixed: [null, 1], lines0: [0.5],
    lines: [{ key: "reward/on_policy_accuracy", name: "new pairs" }, { key: "reward/on_policy_accuracy_in_group", name: "new, in a group" }, { key: "reward/held_out_accuracy", name: "held out" }] },
  { title: "Calibration", unit: "expected error", fixed: [0, null], lines: [{ key: "reward/ece", name: "ECE" }] },
  { title: "Labels", unit: "pairs", fixed: [0, null], lines: [{ key: "labels/total", name: "labels used" }] },
  { title: "Loss", unit: "", lines: [{ key: "loss", name: "loss" }] },
  { title: "Gradient", unit: "norm before clipping", fixed: [0, null], lines: [{ key: "grad_norm", name: "norm" }] },
  { title: "Episodes", unit: "in a step", fixed: [0, null],
    lines: [{ key: "episodes/trained", name: "trained on" }, { key: "episodes/evicted", name: "evicted" }, { key: "episodes/failed", name: "failed" }] },
];

/** Names that no chart draws; those of times have a view of their own. */
export function otherNames(columns) {
  const drawn = new Set(["step", "minutes", "groups/total", ...CHARTS.flatMap((chart) => chart.lines.flatMap((line) => [line.key, ...(line.band || [])]))]);
  return Object.keys(columns).filter((name) => !drawn.has(name) && !/^(time|idle|sync)\//.test(name)).sort();
}

/** The series of a chart; null if the run has none of it. `runs`: [{name, columns, color}]; with several, each chart has a line a run. */
export function seriesOf(chart, runs) {
  const several = runs.length > 1;
  if (chart.family) return several ? null : termsOf(chart.family, runs[0].columns);
  const found = [];
  runs.forEach((run, number) => {
    const lines = several ? chart.lines.slice(0, 1) : chart.lines;
    lines.forEach((line, place) => {
      const values = run.columns[line.key];
      if (!values || values.every((value) => value === null)) return;
      const total = line.of ? run.columns[line.of] : null;
      const one = {
        name: several ? run.name : line.name,
        color: ((several ? number : place) % 8) + 1,
        x: run.columns.step,
        right: line.right && !several,
        y: total ? values.map((value, k) => (value === null || !total[k] ? null : value / total[k])) : values,
        dots: line.dots,
        band: line.band && line.band.every((key) => run.columns[key]) ? line.band.map((key) => run.columns[key]) : null,
      };
      found.push(chart.over ? along(one, run.columns[chart.over] || []) : one);
    });
  });
  return found.some((one) => one.x.length) ? found : null;
}

/** A series over another metric than the step: the places that have both. */
function along(one, over) {
  const places = one.y.map((_, k) => k).filter((k) => isKnown(one.y[k]) && isKnown(over[k]));
  return { ...one, x: places.map((k) => over[k]), y: places.map((k) => one.y[k]) };
}

/** Terms have units of their own. What each has changed since its first value, in the deviations of its first step, can be compared. */
function termsOf(pattern, columns) {
  const found = [];
  for (const key of Object.keys(columns).sort()) {
    const name = pattern.exec(key)?.[1];
    const deviation = (columns[`term/${name}/std`] || []).find((value) => value > 0);
    const first = columns[key].find(isKnown);
    if (!name || !deviation || first === undefined) continue;
    found.push({ name, color: (found.length % 8) + 1, x: columns.step, y: columns[key].map((value) => (isKnown(value) ? (value - first) / deviation : null)) });
  }
  return found.length ? found : null;
}

const isKnown = (value) => value !== null && value !== undefined;
