// The record of a GPU pool: who had how many GPUs when, and what came of the GPU-hours.
import { ask } from "./api.js";
import { figures, h, note } from "./dom.js";
import { num, percent } from "./format.js";
import { Stack } from "./stack.js";

const HOUR_S = 3600;

export async function show({ run, replace, signal }) {
  const stack = new Stack({ title: "GPUs by role", unit: "GPUs", xLabel: "hours", height: 240 });
  const head = h("section.card");
  const table = h("section.card");
  const load = async () => {
    const pool = await ask("pool", { run }, { signal });
    const roles = [...new Set(pool.series.flatMap((one) => Object.keys(one.roles)))].sort();
    const ends = [...pool.series.map((one) => (one.at - pool.start) / HOUR_S), (pool.now - pool.start) / HOUR_S];
    stack.set(ends, roles.map((role, place) => ({ name: role, color: (place % 8) + 1, values: pool.series.map((one) => one.roles[role] || 0) })));
    const hours = pool.spent.reduce((sum, [, , spent]) => sum + spent, 0);
    head.replaceChildren(figures([{ name: "GPUs", value: num(pool.gpus) }, { name: "Wall time", value: `${num((pool.now - pool.start) / HOUR_S)} h` }, { name: "GPU-hours", value: num(hours) },
      { name: "Active", value: percent(hours ? pool.spent.filter(([, state]) => state === "active").reduce((sum, [, , spent]) => sum + spent, 0) / hours : null, 1), more: "of the GPU-hours" }]));
    table.replaceChildren(h("h2", {}, "GPU-hours"), h("div.scroll", {}, h("table", {},
      h("thead", {}, h("tr", {}, h("th", { scope: "col" }, "Role"), h("th", { scope: "col" }, "State"), h("th.number", { scope: "col" }, "GPU-hours"), h("th.number", { scope: "col" }, "Share"))),
      h("tbody", {}, pool.spent.map(([role, state, spent]) => h("tr", {}, h("td", {}, role || "nobody"), h("td", {}, state), h("td.number", {}, num(spent)), h("td.number", {}, percent(spent / hours, 1))))))));
    if (!pool.series.length) table.append(note("No change of who has what is on record yet."));
  };
  await load();
  replace(head, h("div.card", {}, stack.element), table);
  return { news: load, close: () => stack.close() };
}
