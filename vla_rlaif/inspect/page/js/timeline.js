// Where the time of a run went: the phases of its steps, idle pools, weight syncs.
import { Chart } from "./chart.js";
import { figures, h, note } from "./dom.js";
import { minutes, percent } from "./format.js";
import { Metrics } from "./metrics.js";
import { Stack } from "./stack.js";

const BARS = 90; // more steps than that share bars
const INSIDE = { physics: "rollout: physics", render: "rollout: rendering", policy: "rollout: policy" };
const PHASES = { reward: "reward", reference: "reference", update: "update", validate: "validation", sync: "weight sync", record: "recording" };

export async function show({ run, replace, signal }) {
  const metrics = await new Metrics(run).load(signal);
  const stack = new Stack({ title: "Phases of a step", unit: "seconds a step", xLabel: "step", help: "With steps played ahead (loop.overlap), rollouts and updates run at the same time." });
  const idle = new Chart({ title: "Idle pools", unit: "share of the wall time", percent: true, fixed: [0, 1] });
  const sync = new Chart({ title: "Weight sync", unit: "seconds", fixed: [0, null] });
  const step = new Chart({ title: "Wall time of a step", unit: "seconds", fixed: [0, null] });
  const head = h("section.card");
  const others = h("div.charts");
  const draw = () => {
    const layers = phases(metrics.columns);
    const [x, binned] = binnedBy(metrics.columns.step || [], layers);
    stack.set(x, binned);
    head.replaceChildren(...summary(metrics, layers));
    fillWith(idle, others, lines(metrics, /^idle\//));
    fillWith(sync, others, lines(metrics, /^sync\/.*_s$/));
    fillWith(step, others, lines(metrics, /^time\/step_s$/));
  };
  if (metrics.num) draw();
  replace(metrics.num ? [head, h("div.card", {}, stack.element), others] : note("No step is on record yet."));
  return {
    async news() {
      await metrics.load(signal);
      draw();
    },
    close: () => [stack, idle, sync, step].forEach((chart) => chart.close()),
  };
}

/** Seconds of each phase by step; what physics, rendering and the policy leave of a rollout is its rest. */
function phases(columns) {
  const of = (name) => columns[`time/${name}_s`];
  const found = [];
  const inside = Object.keys(INSIDE).filter(of);
  for (const name of inside) found.push({ name: INSIDE[name], values: of(name) });
  if (of("rollout")) {
    const rest = of("rollout").map((seconds, k) => Math.max(0, (seconds || 0) - inside.reduce((sum, name) => sum + (of(name)[k] || 0), 0)));
    found.push({ name: inside.length ? "rollout: rest" : "rollout", values: rest });
  }
  for (const [name, title] of Object.entries(PHASES)) if (of(name)) found.push({ name: title, values: of(name) });
  return found.filter((layer) => layer.values.some((value) => value)).map((layer, place) => ({ ...layer, color: (place % 8) + 1 }));
}

/** Means of neighbouring steps, so that there are at most BARS. */
function binnedBy(steps, layers) {
  const size = Math.max(1, Math.ceil(steps.length / BARS));
  const starts = steps.map((_, k) => k).filter((k) => k % size === 0);
  const x = [...starts.map((k) => steps[k]), (steps.at(-1) ?? 0) + 1];
  const mean = (values, first) => {
    const part = values.slice(first, first + size);
    return part.reduce((sum, value) => sum + (value || 0), 0) / part.length;
  };
  return [x, layers.map((layer) => ({ ...layer, values: starts.map((first) => mean(layer.values, first)) }))];
}

function lines(metrics, pattern) {
  return Object.keys(metrics.columns).filter((name) => pattern.test(name)).sort()
    .map((name, place) => ({ name: name.replace(/^\w+\//, "").replace(/_s$/, ""), color: (place % 8) + 1, x: metrics.columns.step, y: metrics.columns[name] }));
}

function fillWith(chart, into, series) {
  if (!series.length) return;
  if (!chart.element.parentElement) into.append(h("div.card", {}, chart.element));
  chart.set(series);
}

function summary(metrics, layers) {
  const total = (values) => values.reduce((sum, value) => sum + (value || 0), 0);
  const all = layers.reduce((sum, layer) => sum + total(layer.values), 0);
  return [figures([
    { name: "Training", value: minutes(metrics.last("minutes")), more: "wall time" },
    ...layers.map((layer) => ({ name: layer.name, value: minutes(total(layer.values) / 60), more: percent(all ? total(layer.values) / all : 0) })),
  ])];
}
