// The labels of a run: who said what of which pair, how far labellers agree, and the pairs whose clips were kept.
import { ask, link } from "./api.js";
import { bar, figures, h, note, replace as fill } from "./dom.js";
import { Chart } from "./chart.js";
import { NOTHING, num, percent } from "./format.js";
import { rowKeys } from "./keys.js";
import { Player } from "./player.js";

const ONLY = [["all", "all"], ["kept", "with clips"], ["held_out", "held out"], ["ties", "ties"], ["skips", "skips"]];
const LIMIT = 200;

export async function show({ run, params, replace, signal }) {
  let [only, offset, player] = [params.get("only") || "all", 0, null];
  const head = h("section.card");
  const body = h("section.card");
  const stage = h("section.card");
  const chart = new Chart({ title: "Labels", unit: "of each step", fixed: [0, null], height: 120 });
  const load = async () => {
    const said = await ask("preferences", { run, offset, only }, { signal });
    if (!said.all) return fill(head, note("This run has no labels: its reward is not learned from preferences."));
    fill(head, summary(said), chart.element, labellers(said));
    chart.set([{ name: "labels", color: 1, x: said.by_step.map(([step]) => step), y: said.by_step.map(([, count]) => count) }]);
    fill(body, choices(said), table(said), pager(said));
    body.hidden = false;
  };
  const choose = (name) => {
    [only, offset] = [name, 0];
    return load();
  };
  const choices = (said) => h("div.row", {}, h("h2.grow", {}, "Pairs"), h("div.chips", {}, ONLY.map(([name, text]) =>
    h("button", { type: "button", "aria-pressed": String(name === only), onclick: () => choose(name) }, name === "kept" ? `${text} (${said.kept})` : text))));
  const table = (said) => (said.pairs.length ? h("div.scroll", {}, h("table", {},
    h("thead", {}, h("tr", {}, ["Label", "Step", "Episodes", "First is better", "", "Rewards", "Labeller", ""].map((text) => h(/Label$|Step|Episodes|Rewards/.test(text) ? "th.number" : "th", { scope: "col" }, text)))),
    h("tbody", {}, said.pairs.map((pair) => row(pair))))) : note("There is no such pair."));
  const row = (pair) => h("tr", {},
    h("td.number", {}, pair.has[0] && pair.has[1] ? h("a.open", { href: "#", onclick: (event) => { event.preventDefault(); play(pair); } }, `${pair.id} \u25b8`) : h("span.muted", {}, String(pair.id))),
    h("td.number", {}, pair.step < 0 ? "start" : num(pair.step)),
    h("td.number", {}, [pair.first, pair.second].map((name, place) => [place ? " / " : null, pair.has[place] ? h("a", { href: link("run", run, "episode", name) }, name) : h("span.muted", { title: "not kept" }, name)])),
    h("td", {}, h("span.p-bar", {}, bar(pair.p_first))), h("td.number", {}, pair.p_first === null ? "skip" : pair.p_first === 0.5 ? "tie" : percent(pair.p_first)),
    h("td.number", {}, pair.rewards.every((reward) => reward === null) ? NOTHING : pair.rewards.map((reward) => num(reward)).join(" / ")),
    h("td", {}, pair.labeller), h("td", {}, pair.held_out ? h("span.tag", {}, "held out") : null, pair.corrects ? h("span.tag", {}, `corrects ${pair.corrects}`) : null));
  const pager = (said) => (said.total <= LIMIT ? null : h("div.pager", {},
    h("button", { type: "button", disabled: !offset, onclick: () => { offset = Math.max(0, offset - LIMIT); load(); } }, "Newer"),
    h("span.small.muted.number", {}, `${offset + 1}\u2013${Math.min(offset + LIMIT, said.total)} of ${said.total}`),
    h("button", { type: "button", disabled: offset + LIMIT >= said.total, onclick: () => { offset += LIMIT; load(); } }, "Older")));
  const play = async (pair) => {
    player?.close();
    const { members } = await ask("some", { run, ids: `${pair.first},${pair.second}` }, { signal });
    player = new Player(run, members);
    const verdict = (place) => (pair.p_first === null || pair.p_first === 0.5 ? "" : (pair.p_first > 0.5) === (place === 0) ? "labelled better" : "");
    stage.hidden = false;
    fill(stage, h("div.row", {}, h("h2.grow", {}, `Label ${pair.id}: ${pair.instruction}`), h("button", { type: "button", onclick: () => { player.close(); stage.hidden = true; } }, "Close")),
      h("div.clips", {}, members.map((member, place) => player.follow(h(`figure.clip${verdict(place) ? ".won" : ""}`, {},
        h("figcaption.head", {}, h("span", {}, place ? "Second" : "First", " ", h("a", { href: link("run", run, "episode", member.id) }, member.id)), h("b", {}, verdict(place))),
        player.cameras(member), h("p.small.muted", {}, `reward ${num(member.reward)}, truth ${num(member.truth)}`)), member))), player.transport);
    stage.scrollIntoView({ block: "nearest" });
  };
  body.hidden = stage.hidden = true;
  await load();
  replace(head, stage, body);
  const toggled = (key, what) => [what, () => player?.keys[key][1]()];
  return {
    keys: { ...rowKeys(() => body), " ": toggled(" ", "Play or pause the pair"), ",": toggled(",", "Frame back"), ".": toggled(".", "Frame on") },
    news: () => (offset ? null : load()),
    close() {
      player?.close();
      chart.close();
    },
  };
}

function summary(said) {
  const both = said.labellers.reduce((total, one) => total + one.num_both_orders, 0);
  return figures([
    { name: "Labels in force", value: num(said.all) },
    { name: "Labellers", value: num(said.labellers.length) },
    { name: "With clips", value: num(said.kept), more: "both episodes kept" },
    { name: "Krippendorff's alpha", value: said.alpha === null ? null : num(said.alpha), more: "of all labellers" },
    { name: "Asked both ways", value: both ? num(both) : null },
  ]);
}

function labellers(said) {
  const head = ["Labeller", "Labels", "Ties", "Skips", "Both orders", "Inconsistent", "Position bias"];
  const rows = said.labellers.map((one) => [one.labeller, num(one.num), percent(one.tie_rate, 1), percent(one.skip_rate, 1), num(one.num_both_orders), percent(one.inconsistent_rate, 1), num(one.position_bias)]);
  const pairs = said.agreement.map((two) => h("p.small", {}, `${two.labellers[0]} and ${two.labellers[1]}: ${num(two.num)} pairs in common${two.num ? `, ${percent(two.raw)} equal, kappa ${num(two.kappa)}` : ""}`));
  return [h("div.scroll", {}, h("table", {}, h("thead", {}, h("tr", {}, head.map((text, place) => h(place ? "th.number" : "th", { scope: "col" }, text)))),
    h("tbody", {}, rows.map((cells) => h("tr", {}, cells.map((cell, place) => h(place ? "td.number" : "td", {}, cell))))))), pairs];
}
