// The list of what there is: runs with their success, datasets, pools. Runs can be chosen for comparing their curves.
import { ask, link } from "./api.js";
import { spark } from "./chart.js";
import { h, note } from "./dom.js";
import { ago, minutes, NOTHING, num, percent } from "./format.js";
import { rowKeys } from "./keys.js";

export async function show({ list, replace, signal }) {
  const chosen = new Set();
  let table = null;
  const compare = h("button", { type: "button", disabled: true, onclick: () => { location.hash = `${link("compare")}?${new URLSearchParams({ runs: [...chosen].join(",") })}`; } }, "Compare curves");
  const draw = (now) => {
    table = tableOf(now, chosen, () => { compare.disabled = chosen.size < 2; });
    const others = now.entries.filter((entry) => entry.kind !== "run");
    replace(
      h("section.card", {}, h("div.row", {}, h("h2.grow", {}, "Runs"), compare), table),
      others.length ? h("section.card", {}, h("h2", {}, "Datasets and pools"), othersOf(others)) : null);
  };
  draw(list);
  let before = JSON.stringify(list.entries);
  return {
    keys: rowKeys(() => table),
    async news() {
      const now = await ask("runs", {}, { signal });
      const text = JSON.stringify(now.entries);
      if (text !== before && !table.contains(document.activeElement)) draw(now);
      before = text;
    },
  };
}

function tableOf(list, chosen, changed) {
  const runs = list.entries.filter((entry) => entry.kind === "run");
  if (!runs.length) return note("There is no run here. `vla-rlaif train` makes one.");
  const head = ["", "Run", "Task", "Reward", "Success", "", "Before", "After", "Steps", "Time", "Labels", "Episodes", "State"];
  const numbers = new Set(["Success", "Before", "After", "Steps", "Time", "Labels", "Episodes"]);
  const minor = new Set(["Task", "Reward", "Before", "After", "Time", "Labels", "Episodes"]);
  return h("div.scroll", {}, h("table", {},
    h("thead", {}, h("tr", {}, head.map((text, place) => h(`th${numbers.has(text) ? ".number" : ""}${minor.has(text) ? ".hide-small" : ""}`, { scope: "col" }, text || h("span.skip", {}, place ? "Success over the steps" : "Choose"))))),
    h("tbody", {}, runs.map((run) => row(run, list.now, chosen, changed)))));
}

function row(run, now, chosen, changed) {
  const box = h("input", { type: "checkbox", checked: chosen.has(run.name), "aria-label": `Choose ${run.title}`, disabled: Boolean(run.problem),
    onchange: () => { chosen[box.checked ? "add" : "delete"](run.name); changed(); } });
  const name = h("td", {}, h("a.open", { href: link("run", run.name) }, run.title));
  if (run.problem) return h("tr", {}, h("td", {}, box), name, h("td.bad", { colspan: 11 }, run.problem));
  return h("tr", {}, h("td", {}, box), name,
    h("td.text.hide-small", { title: run.task }, run.task || NOTHING), h("td.hide-small", {}, run.reward || NOTHING),
    h("td.number", {}, percent(run.success, 1)), h("td", {}, spark(run.spark)),
    rate(run.before), rate(run.after),
    h("td.number", {}, run.planned ? `${num(run.steps)} / ${num(run.planned)}` : num(run.steps)),
    h("td.number.hide-small", {}, minutes(run.minutes)), h("td.number.hide-small", {}, num(run.labels)),
    h("td.number.hide-small", {}, run.episodes ? run.episodes.toLocaleString("en") : NOTHING), h("td", {}, state(run, now)));
}

function rate(value) {
  if (!value) return h("td.number.hide-small", {}, NOTHING);
  return h("td.number.hide-small", { title: `95 % interval ${percent(value[1], 1)} to ${percent(value[2], 1)}` }, percent(value[0], 1));
}

function state(run, now) {
  if (run.problems.length) return h("span.tag.bad", { title: run.problems.join("\n") }, "damaged");
  if (run.finished) return h("span.tag.good", {}, "finished");
  return h("span.tag", {}, run.written === null ? "no step yet" : ago(now - run.written));
}

function othersOf(entries) {
  return h("div.scroll", {}, h("table", {},
    h("thead", {}, h("tr", {}, ["Name", "Kind", "Task"].map((text) => h("th", { scope: "col" }, text)), ["Success", "Episodes"].map((text) => h("th.number", { scope: "col" }, text)))),
    h("tbody", {}, entries.map((entry) => h("tr", {},
      h("td", {}, h("a.open", { href: entry.kind === "pool" ? link("pool", entry.name) : link("run", entry.name) }, entry.title)), h("td", {}, entry.kind),
      entry.problem ? h("td.bad", { colspan: 3 }, entry.problem)
        : [h("td.text", {}, entry.task || NOTHING), h("td.number", {}, percent(entry.success, 1)), h("td.number", {}, num(entry.episodes))])))));
}
