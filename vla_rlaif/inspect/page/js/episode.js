// One episode: its cameras, and under the same cursor its actions, log-probabilities, progress and state.
import { ask, link } from "./api.js";
import { Chart } from "./chart.js";
import { facts, h } from "./dom.js";
import { num, origin, outcome, percent, signed } from "./format.js";
import { chartOf, sum } from "./group.js";
import { Player } from "./player.js";

const MOST_DIMS = 8; // lines in a chart

export async function show({ run, id, replace, signal }) {
  const episode = await ask("episode", { run, id }, { signal });
  const charts = chartsOf(episode);
  const player = new Player(run, [episode], { onframe: (frame) => charts.forEach((chart) => chart.setCursor(frame)) });
  for (const chart of charts) chart.spec.onpick = (frame) => { player.pause(); player.seek(frame); };
  const clip = h("figure.clip", {}, player.cameras(episode));
  clip.classList.toggle("won", episode.success === 1);
  clip.classList.toggle("lost", episode.success === 0);
  replace(h("div.two", {},
    h("div", {}, clip, player.transport, about(run, episode)),
    h("div", {}, charts.length ? charts.map((chart) => h("div.card", {}, chart.element)) : h("p.note", {}, "Only the clip of this episode was kept."), executed(episode))));
  return {
    keys: { ...player.keys, g: ["Its group", () => { location.hash = link("run", run, "group", id); }] },
    close() {
      player.close();
      charts.forEach((chart) => chart.close());
    },
  };
}

function about(run, episode) {
  return h("section.card", {}, h("h2", {}, episode.instruction || "No instruction"), facts([
    ["Outcome", h(`span.tag${episode.success === null ? "" : episode.success ? ".good" : ".bad"}`, {}, outcome(episode.success))],
    ["Reward", episode.reward === null ? null : num(episode.reward, 4)],
    ["Advantage", episode.advantage === null ? null : signed(episode.advantage, 3)],
    ["Ground-truth return", episode.truth === null ? null : num(episode.truth, 4)],
    ["Disagreement", episode.disagreement === null ? null : `${percent(episode.disagreement)} of its group`],
    ["Simulation", episode.valid ? null : h("span.bad", {}, "broke")],
    ["Group", h("a", { href: link("run", run, "group", episode.id) }, episode.origin === "train" || episode.origin === "data" ? `${episode.group}, member ${episode.member}` : origin(episode.origin))],
    ["Step", episode.origin === "train" ? num(episode.step) : null],
    ["Weights version", episode.version < 0 ? null : num(episode.version)],
    ["Start seed", episode.seed < 0 ? null : String(episode.seed)],
    ["Decisions", num(episode.decisions)],
    ["Env steps", sum(episode.executed) ? num(sum(episode.executed)) : null],
    ["Log-probability", episode.logp.length && episode.logp[0].length ? `${num(sum(episode.logp.map(sum)), 4)} nats` : null],
  ]));
}

function chartsOf(episode) {
  const found = [
    chartOf("Progress", "as the reward model sees it", [episode], (one) => one.progress, { fixed: [0, 1] }),
    dims("Actions", "env units, first of each chunk", episode.action.map((chunk) => chunk[0] || [])),
    chartOf("Log-probability", "nats, summed over sub-steps", [episode], (one) => (one.logp.length && one.logp[0].length ? one.logp.map(sum) : null), { help: "Of each decision, under the weights that acted." }),
    dims("State", "env units", episode.state),
  ];
  return found.filter((chart) => chart);
}

/** A line for each dimension. */
function dims(title, unit, rows) {
  const num = rows.length ? rows[0].length : 0;
  if (!num) return null;
  const chart = new Chart({ title, unit, xLabel: "frame", help: num > MOST_DIMS ? `The first ${MOST_DIMS} of ${num} dimensions.` : null });
  chart.set(Array.from({ length: Math.min(num, MOST_DIMS) }, (_, dim) => ({ name: `dim ${dim}`, color: (dim % 8) + 1, x: rows.map((__, k) => k), y: rows.map((row) => row[dim]) })));
  return chart;
}

/** The numbers themselves, for whoever wants to read them off. */
function executed(episode) {
  if (!episode.action.length || !episode.action[0].length) return null;
  const dims = episode.action[0][0].length;
  return h("details.card", {}, h("summary", {}, "Decisions as numbers"), h("div.scroll", {}, h("table.mono", {},
    h("thead", {}, h("tr", {}, ["Decision", "Env steps", "log p", ...Array.from({ length: dims }, (_, dim) => `action ${dim}`)].map((text) => h("th.number", { scope: "col" }, text)))),
    h("tbody", {}, episode.action.map((chunk, decision) => h("tr", {},
      [decision, episode.executed[decision], episode.logp[decision]?.length ? sum(episode.logp[decision]) : null, ...chunk[0]].map((value) => h("td.number", {}, num(value)))))))));
}
