// The list of groups: who succeeded, how far rewards spread, whether they order as the truth does.
import { link } from "./api.js";
import { bar, h } from "./dom.js";
import { NOTHING, num, origin, percent } from "./format.js";
import { List } from "./list.js";

const COLUMNS = [
  { title: "Step", order: "step", cell: (row) => h("a.open", { href: null, "data-id": row.id }, row.origin === "train" ? `step ${row.step}` : origin(row.origin)) },
  { title: "Group", number: true, minor: true, cell: (row) => num(row.group) },
  { title: "Task", text: true, cell: (row) => h("span", { title: row.instruction }, row.instruction) },
  { title: "Success", order: "success", number: true, cell: (row) => (row.success === null ? NOTHING : `${Math.round(row.success * row.size)} of ${row.size}`) },
  { title: "", minor: true, cell: (row) => h("span.p-bar", {}, bar(row.success)) },
  { title: "Mean reward", order: "reward", number: true, minor: true, cell: (row) => num(row.reward) },
  { title: "Spread", order: "spread", number: true, help: "Standard deviation of the rewards in the group", cell: (row) => num(row.spread) },
  { title: "Disagreement", order: "disagreement", number: true, help: "Share of the pairs of the group that reward and truth order differently", cell: (row) => percent(row.disagreement) },
  { title: "Taught", cell: (row) => (row.reward === null ? NOTHING : h(`span.tag.${row.live ? "good" : "bad"}`, {}, row.live ? "live" : "no advantage")) },
];

const QUICK = [["reward and truth disagree", "disagreement:0.3.."], ["no spread", "spread:..0.01"], ["wide spread", "spread:0.2.."]];

export async function show({ run, params, replace, signal }) {
  const columns = COLUMNS.map((column) => ({ ...column, cell: (row) => linked(column.cell(row), run) }));
  const list = new List({ run, kind: "groups", columns, quick: QUICK, params, signal });
  await list.load();
  replace(list.element);
  return { keys: list.keys, news: () => list.load() };
}

/** The link to a row's group is made here, where the run is known. */
function linked(cell, run) {
  if (cell instanceof HTMLAnchorElement) cell.href = link("run", run, "group", cell.dataset.id);
  return cell;
}
