// The curves of one run, in small multiples with one scale of steps.
import { Chart } from "./chart.js";
import { CHARTS, otherNames, seriesOf } from "./charts_of_runs.js";
import { figures, h, note, problem } from "./dom.js";
import { minutes, num, percent, plural } from "./format.js";
import { Metrics } from "./metrics.js";

export async function show({ run, about, replace, signal }) {
  const metrics = await new Metrics(run).load(signal);
  const grid = new Grid();
  const head = h("section.card");
  const draw = () => {
    head.replaceChildren(...summary(about, metrics));
    grid.set([{ name: run, columns: metrics.columns }]);
  };
  draw();
  replace(
    about.problems.map((text) => problem(text)),
    head,
    metrics.num ? null : note("No training step is on record yet. Curves appear here by themselves."),
    grid.controls, grid.element);
  return {
    keys: { s: ["Smooth more", () => grid.next()] },
    async news() {
      await metrics.load(signal);
      draw();
    },
    close: () => grid.close(),
  };
}

function summary(about, metrics) {
  const interval = (rate) => (rate ? `${percent(rate[1])} to ${percent(rate[2])}` : null);
  return [figures([
    { name: "Success before", value: about.before ? percent(about.before[0], 1) : null, more: interval(about.before) },
    { name: "Success after", value: about.after ? percent(about.after[0], 1) : null, more: interval(about.after) },
    { name: "In training now", value: percent(metrics.last("rollout/success"), 1), more: "of the newest step" },
    { name: "Steps", value: num(metrics.num), more: about.planned ? `of ${num(about.planned)}` : null },
    { name: "Time", value: minutes(metrics.last("minutes")), more: "of training" },
    { name: "Labels", value: about.labels === null ? null : num(metrics.last("labels/total") ?? about.labels) },
    { name: "Recorded", value: num(about.episodes), more: plural(about.episodes, "episode").replace(/^\S+ /, "") },
  ])];
}

/** Charts that are made when there is something to draw. */
export class Grid {
  constructor() {
    this.charts = new Map();
    this.smooth = h("select", { onchange: () => this.setSmooth(Number(this.smooth.value)) },
      [1, 5, 20].map((width) => h("option", { value: width }, width === 1 ? "as it is" : `mean of ${width} steps`)));
    this.controls = h("div.row", {}, h("label", {}, "Smoothing", this.smooth));
    this.element = h("div.charts");
    this.others = h("details.card", { ontoggle: () => this.drawOthers() }, h("summary", {}, "All other metrics"), (this.otherCharts = h("div.charts")));
    this.others.hidden = true;
    this.runs = [];
  }

  set(runs) {
    this.runs = runs;
    for (const spec of CHARTS) this.update(spec, this.element);
    const names = otherNames(Object.assign({}, ...runs.map((run) => run.columns)));
    this.others.hidden = !names.length;
    this.names = names;
    if (names.length && !this.others.parentElement) this.element.after(this.others);
    if (this.others.open) this.drawOthers();
  }

  update(spec, into) {
    const series = seriesOf(spec, this.runs);
    if (!series) return;
    if (!this.charts.has(spec.title)) {
      const chart = new Chart({ ...spec, lines: spec.lines0 });
      chart.smooth = Number(this.smooth.value);
      this.charts.set(spec.title, chart);
      into.append(h("div.card", {}, chart.element));
    }
    this.charts.get(spec.title).set(series);
  }

  drawOthers() {
    if (!this.others.open) return;
    for (const name of this.names) this.update({ title: name, unit: "", lines: [{ key: name, name: "value" }] }, this.otherCharts);
  }

  setSmooth(width) {
    this.smooth.value = String(width);
    for (const chart of this.charts.values()) chart.setSmooth(width);
  }

  next() {
    this.setSmooth({ 1: 5, 5: 20, 20: 1 }[Number(this.smooth.value)]);
  }

  close() {
    for (const chart of this.charts.values()) chart.close();
  }
}
