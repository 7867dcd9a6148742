// The reward model's card (reward_card.json): what it can be trusted with, its calibration, its worst mistakes. Other
// parts that a card may hold are shown as they are.
import { ask, link } from "./api.js";
import { Chart } from "./chart.js";
import { bar, facts, figures, h, note } from "./dom.js";
import { NOTHING, num, percent } from "./format.js";

const SHOWN = new Set(["format", "accuracy", "tau", "tau_against", "ece", "reliability", "success_failure_gap", "threshold", "recall", "false_positives",
  "within_group_std", "gates", "mistakes", "num_episodes", "num_ties"]);

export async function show({ run, replace, signal }) {
  const { card } = await ask("card", { run }, { signal });
  if (!card) {
    replace(h("section.card", {}, note("This run has no reward card: it is written at the end of a run whose reward is learned from labels, and by `vla-rlaif reward eval`.")));
    return {};
  }
  const chart = card.reliability?.length ? reliability(card) : null;
  const others = Object.entries(card).filter(([name]) => !SHOWN.has(name));
  const flat = others.filter(([, value]) => !isNested(value));
  replace(
    h("section.card", {}, summary(card)),
    h("div.two", {}, card.gates?.length ? h("section.card", {}, h("h2", {}, "Gates"), gates(card.gates)) : null, chart ? h("div.card", {}, chart.element) : null),
    card.mistakes?.length ? h("section.card", {}, h("h2", {}, "Worst mistakes"), mistakes(run, card.mistakes)) : null,
    flat.length ? h("section.card", {}, h("h2", {}, "More"), facts(flat.map(([name, value]) => [words(name), text(value)]))) : null,
    others.filter(([, value]) => isNested(value) && Object.keys(value).length).map(([name, value]) => h("section.card", {}, h("h2", {}, words(name)), nested(value))));
  return { close: () => chart?.close() };
}

const known = (value) => (value === null || value === undefined ? null : num(value));

function summary(card) {
  const of = (rate) => (rate && rate.num ? { value: percent(rate.rate, 1), more: `${percent(rate.low)} to ${percent(rate.high)}, of ${num(rate.num)}` } : { value: null });
  return figures([
    { name: "Pairs in the right order", ...of(card.accuracy) },
    { name: "Kendall's tau", value: known(card.tau), more: card.tau_against ? `against ${card.tau_against}` : null },
    { name: "Calibration error", value: known(card.ece), more: "ECE" },
    { name: "Success minus failure", value: known(card.success_failure_gap), more: "standard deviations" },
    { name: "Recall", ...of(card.recall) },
    { name: "False positives", ...of(card.false_positives) },
    { name: "Spread in a group", value: known(card.within_group_std), more: "of all spread" },
    { name: "Episodes", value: known(card.num_episodes) },
  ]);
}

/** How often pairs of a stated confidence are right. The dotted line is right as often as it says. */
function reliability(card) {
  const bins = card.reliability.filter((bin) => bin.num);
  const chart = new Chart({ title: "Reliability", unit: "share of right pairs", percent: true, xLabel: "stated confidence", whole: false, height: 240, fixed: [null, 1],
    help: "Of held-out pairs. Dotted: right as often as it says." });
  const x = bins.map((bin) => bin.confidence);
  chart.set([{ name: "right", color: 1, x, y: bins.map((bin) => bin.accuracy), dots: true }, { name: "ideal", color: 8, x, y: x, dashed: true }]);
  return chart;
}

function gates(list) {
  const state = (gate) => (gate.passed === null ? h("span.tag", {}, "not measured") : gate.passed ? h("span.tag.good", {}, "passed") : h("span.tag.bad", {}, "failed"));
  return h("table", {}, h("thead", {}, h("tr", {}, h("th", { scope: "col" }, "What"), h("th.number", { scope: "col" }, "Found"), h("th", { scope: "col" }, "Wanted"), h("th", { scope: "col" }, ""))),
    h("tbody", {}, list.map((gate) => h("tr", {}, h("td", {}, words(gate.name)), h("td.number", {}, num(gate.value)), h("td", {}, gate.wanted, gate.note ? `. ${gate.note}` : null), h("td", {}, state(gate))))));
}

function mistakes(run, list) {
  const head = ["Episodes", "Labelled: first is better", "", "Model says", ""];
  return h("div.scroll", {}, h("table", {}, h("thead", {}, h("tr", {}, head.map((title) => h("th", { scope: "col" }, title)))),
    h("tbody", {}, list.map((pair) => h("tr", {},
      h("td", {}, h("a", { href: link("run", run, "some", `${pair.first},${pair.second}`), title: "Both, if they were kept" }, `${pair.first} / ${pair.second}`)),
      [pair.label, pair.p_first].map((share) => [h("td.number", {}, percent(share)), h("td", {}, h("span.p-bar", {}, bar(share)))]))))));
}

const isNested = (value) => value !== null && typeof value === "object" && !(Array.isArray(value) && value.every((one) => typeof one !== "object"));
const isRate = (value) => value !== null && typeof value === "object" && "rate" in value && "num" in value;
const words = (name) => name.replaceAll("_", " ").replace(/^./, (letter) => letter.toUpperCase());

function text(value) {
  if (isRate(value)) return value.num ? `${percent(value.rate, 1)} (${percent(value.low)} to ${percent(value.high)}, of ${num(value.num)})` : NOTHING;
  if (Array.isArray(value)) return value.map(text).join(", ");
  if (typeof value === "number") return num(value, 4);
  return value === null || value === undefined ? NOTHING : String(value);
}

function nested(value) {
  if (Array.isArray(value)) return value.every((one) => one && typeof one === "object" && !Array.isArray(one)) ? rows(value) : h("p", {}, text(value.flat(3)));
  const entries = Object.entries(value);
  return [facts(entries.filter(([, one]) => !isNested(one) || isRate(one)).map(([name, one]) => [words(name), text(one)])),
    entries.filter(([, one]) => isNested(one) && !isRate(one)).map(([name, one]) => [h("h3", {}, words(name)), nested(one)])];
}

/** Objects of about the same keys as a table. */
function rows(list) {
  const names = [...new Set(list.flatMap((one) => Object.keys(one)))];
  const cellOf = (name) => (list.some((one) => typeof one[name] === "string") ? "" : ".number");
  return h("div.scroll", {}, h("table", {}, h("thead", {}, h("tr", {}, names.map((name) => h(`th${cellOf(name)}`, { scope: "col" }, words(name))))),
    h("tbody", {}, list.map((one) => h("tr", {}, names.map((name) => h(`td${cellOf(name)}`, {}, isNested(one[name]) && !isRate(one[name]) ? text(Object.values(one[name]).flat(3)) : text(one[name]))))))));
}
