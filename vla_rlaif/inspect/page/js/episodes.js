// The list of episodes. Some can be chosen for comparing.
import { link } from "./api.js";
import { h } from "./dom.js";
import { NOTHING, num, origin, outcome, percent, signed } from "./format.js";
import { List } from "./list.js";

const MOST = 16;
const QUICK = [["failures", "success:no"], ["successes", "success:yes"], ["reward and truth disagree", "disagreement:0.3.."], ["broken simulation", "valid:no"]];

export async function show({ run, about, params, replace, signal }) {
  const chosen = new Set();
  const compare = h("button", { type: "button", disabled: true, onclick: () => { location.hash = link("run", run, "some", [...chosen].join(",")); } }, "Compare");
  const changed = () => {
    compare.disabled = chosen.size < 2 || chosen.size > MOST;
    compare.textContent = chosen.size ? `Compare ${chosen.size}` : "Compare";
  };
  const choose = (row) => {
    const box = h("input", { type: "checkbox", checked: chosen.has(row.id), "aria-label": `Choose ${row.id}`, onchange: () => { chosen[box.checked ? "add" : "delete"](row.id); changed(); } });
    return box;
  };
  const isRun = about.kind === "run";
  const columns = [
    { title: h("span.skip", {}, "Choose"), cell: choose },
    { title: "Episode", cell: (row) => h("a.open", { href: link("run", run, "episode", row.id) }, row.id) },
    { title: isRun ? "Step" : "Shard", order: "step", number: true, minor: true, cell: (row) => (row.step < 0 ? NOTHING : num(row.step)) },
    { title: "Task", text: true, cell: (row) => h("span", { title: row.instruction }, row.instruction) },
    { title: "Outcome", order: "success", cell: (row) => [h(`span.tag${row.success === null ? "" : row.success ? ".good" : ".bad"}`, {}, outcome(row.success)), row.valid ? null : h("span.tag.bad", {}, "broken")] },
    { title: "Reward", order: "reward", number: true, cell: (row) => num(row.reward) },
    { title: "Advantage", order: "advantage", number: true, minor: true, cell: (row) => signed(row.advantage) },
    { title: "Truth", order: "truth", number: true, help: "Ground-truth return, in [-1, 2]; only for monitoring", cell: (row) => num(row.truth) },
    { title: "Disagreement", order: "disagreement", number: true, help: "Share of its group that reward and truth put on opposite sides of it", cell: (row) => percent(row.disagreement) },
    { title: "Decisions", order: "decisions", number: true, minor: true, cell: (row) => num(row.decisions) },
    { title: "Group", cell: (row) => h("a", { href: link("run", run, "group", row.id) }, row.origin === "train" || row.origin === "data" ? `${row.group}, member ${row.member}` : origin(row.origin)) },
  ];
  const list = new List({ run, kind: "episodes", columns, quick: QUICK, params, signal, start: isRun ? "-step" : "step" });
  await list.load();
  list.element.querySelector(".filters").append(compare);
  replace(list.element);
  return { keys: { ...list.keys, c: ["Compare the chosen ones", () => compare.click()] }, news: () => (isRun ? list.load() : null) };
}
