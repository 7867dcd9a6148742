// A group: its rollouts side by side from the identical start, playing in step, with rewards and advantages. The same
// for episodes that a reader has chosen.
import { ask, link } from "./api.js";
import { Chart } from "./chart.js";
import { bar, figures, h } from "./dom.js";
import { num, outcome, percent, plural, signed } from "./format.js";
import { Player } from "./player.js";

export async function show({ run, id, kind, replace, signal }) {
  const isGroup = kind === "group";
  const said = isGroup ? await ask("group", { run, id }, { signal }) : await ask("some", { run, ids: id }, { signal });
  const members = said.members;
  const progress = chartOf("Progress", "of the reward model", members, (member) => member.progress, { fixed: [0, 1] });
  const logp = chartOf("Log-probability of the decisions", "nats, summed over sub-steps", members, (member) => member.logp.length && member.logp[0].length ? member.logp.map(sum) : null);
  const player = new Player(run, members, { onframe: (frame) => { progress?.setCursor(frame); logp?.setCursor(frame); } });
  const order = h("select", { "aria-label": "Order", onchange: () => arrange() }, ["member", "reward", "truth"].map((name) => h("option", {}, name)));
  const clips = h("div.clips");
  const cameras = Math.max(...members.map((member) => Object.keys(member.cameras).length));
  clips.style.setProperty("--clip", `${Math.min(520, Math.max(180, 145 * cameras))}px`); // all cameras in one line
  const cards = new Map(members.map((member) => [member, clip(run, member, player, scalesOf(members))]));
  const arrange = () => {
    const key = order.value;
    clips.replaceChildren(...[...members].sort((a, b) => (key === "member" ? 0 : (b[key] ?? -Infinity) - (a[key] ?? -Infinity))).map((member) => cards.get(member)));
  };
  arrange();
  const beside = (word) => (said[word] ? () => { location.hash = link("run", run, "group", said[word]); } : null);
  replace(
    h("section.card", {}, head(members, isGroup), h("div.row", {}, h("label", {}, "Order", order),
      isGroup ? [h("span.grow"), ["before", "next"].map((word) => h("button", { type: "button", disabled: !said[word], onclick: beside(word) }, word === "before" ? "Group before" : "Next group"))] : null)),
    clips, player.transport,
    progress || logp ? h("div.charts", {}, [progress, logp].map((chart) => chart && h("div.card", {}, chart.element))) : null);
  return {
    keys: {
      ...player.keys,
      o: ["Order by member, reward, truth", () => { order.selectedIndex = (order.selectedIndex + 1) % 3; arrange(); }],
      ...(said.before ? { "[": ["Group before", beside("before")] } : {}),
      ...(said.next ? { "]": ["Next group", beside("next")] } : {}),
    },
    close() {
      player.close();
      progress?.close();
      logp?.close();
    },
  };
}

function head(members, isGroup) {
  const first = members[0];
  const known = members.filter((member) => member.success !== null);
  const rewards = members.map((member) => member.reward).filter((reward) => reward !== null);
  const title = h("h1", {}, first.instruction || "No instruction");
  const where = isGroup && first.origin === "train" ? `Step ${first.step}, group ${first.group}, weights version ${first.version}. ` : "";
  const start = isGroup ? identical(members) : "";
  return [title, h("p.muted.small", {}, `${where}${start}`),
    figures([
      { name: "Success", value: known.length ? `${known.filter((member) => member.success).length} of ${known.length}` : null },
      { name: "Mean reward", value: rewards.length ? num(rewards.reduce((total, reward) => total + reward, 0) / rewards.length) : null },
      { name: "Spread", value: isGroup && first.spread !== null ? num(first.spread) : null, more: "of the rewards" },
      { name: "Disagreement", value: isGroup && rewards.length ? percent(mean(members.map((member) => member.disagreement))) : null, more: "of reward and truth" },
      { name: "Decisions", value: `${Math.min(...members.map((member) => member.decisions))}\u2013${Math.max(...members.map((member) => member.decisions))}` },
    ])];
}

/** Whether the recorded states before the first decision are the same numbers. */
function identical(members) {
  const starts = members.map((member) => JSON.stringify(member.state[0] || []));
  if (starts[0] === "[]" || members.length < 2) return members[0].seed >= 0 ? `Start seed ${members[0].seed}.` : "";
  const same = starts.every((start) => start === starts[0]);
  return same ? `All ${members.length} begin in the identical state (seed ${members[0].seed}).` : `Caution: the recorded first states differ (seed ${members[0].seed}).`;
}

function scalesOf(members) {
  const rewards = members.map((member) => member.reward).filter((reward) => reward !== null);
  const [low, high] = [Math.min(0, ...rewards), Math.max(...rewards, 0)];
  return {
    reward: (value) => (high > low ? (value - low) / (high - low) : 0),
    advantage: Math.max(1e-9, ...members.map((member) => Math.abs(member.advantage || 0))),
  };
}

function clip(run, member, player, scales) {
  const state = member.success === null ? "" : member.success ? ".won" : ".lost";
  const rows = [];
  const row = (name, barOf, value) => rows.push(h("dt", {}, name), h("dd", {}, barOf), h("dd.number", {}, value));
  if (member.reward !== null) row("reward", bar(scales.reward(member.reward)), num(member.reward));
  if (member.advantage !== null) row("advantage", bar(member.advantage / scales.advantage, { split: true }), signed(member.advantage));
  if (member.truth !== null) row("truth", bar((member.truth + 1) / 3), num(member.truth));
  return player.follow(h(`figure.clip${state}`, {},
    h("figcaption.head", {}, h("a", { href: link("run", run, "episode", member.id) }, member.id), h("span.muted", {}, outcome(member.success), h("span.hide-small", {}, `, ${plural(member.decisions, "decision")}`))),
    player.cameras(member),
    rows.length ? h("dl.facts", {}, rows) : null,
    member.valid ? null : h("p.small.bad", {}, "the simulation broke")), member);
}

/** One line a member over the frames; null if nobody has such numbers. */
export function chartOf(title, unit, members, numbers, more = {}) {
  const series = members.map((member, place) => [member, numbers(member), place]).filter(([, values]) => values && values.length)
    .map(([member, values, place]) => ({ name: member.id, color: (place % 8) + 1, x: values.map((_, k) => k), y: values }));
  if (!series.length) return null;
  const chart = new Chart({ title, unit, xLabel: "frame", ...more });
  chart.set(series);
  return chart;
}

export const sum = (values) => values.reduce((total, value) => total + (value || 0), 0);

function mean(values) {
  const known = values.filter((value) => value !== null);
  return known.length ? sum(known) / known.length : null;
}

