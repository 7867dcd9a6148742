// What the lists of groups and of episodes share: a filter in words, quick choices, an order, pages. All of it is in the
// address, so a reload or a bookmark finds the same.
import { Problem, ask, link } from "./api.js";
import { h, note, problem, replace } from "./dom.js";
import { plural } from "./format.js";
import { rowKeys } from "./keys.js";

const LIMIT = 100;
export const WORDS = "task:\u2026 success:yes reward:0.5..1 disagreement:0.3.. spread:..0.1 step:10..50 origin:train valid:no decisions:3..";

export class List {
  /** `kind`: groups or episodes; `columns`: [{title, order, number, cell}]; `quick`: [[text, filter]]. */
  constructor({ run, kind, columns, quick, params, signal, start = "-step" }) {
    Object.assign(this, { run, kind, columns, quick, signal });
    this.filter = params.get("filter") || "";
    this.order = params.get("order") || start;
    this.offset = Number(params.get("offset")) || 0;
    this.field = h("input", { type: "search", value: this.filter, placeholder: WORDS, "aria-label": "Filter", title: WORDS, spellcheck: "false", onchange: () => this.set({ filter: this.field.value, offset: 0 }) });
    this.chips = h("div.chips");
    this.body = h("div");
    this.count = h("span.muted.small.number");
    this.element = h("section.card", {}, h("div.filters", {}, this.field, this.count), this.chips, this.body);
  }

  async set(change) {
    Object.assign(this, change);
    this.field.value = this.filter;
    const query = new URLSearchParams();
    if (this.filter) query.set("filter", this.filter);
    if (this.order !== "-step") query.set("order", this.order);
    if (this.offset) query.set("offset", this.offset);
    const text = query.toString();
    history.replaceState(null, "", `${link("run", this.run, this.kind)}${text ? `?${text}` : ""}`);
    await this.load();
  }

  async load() {
    const number = (this.loads = (this.loads || 0) + 1);
    let said;
    try {
      said = await ask(this.kind, { run: this.run, filter: this.filter, order: this.order, offset: this.offset, limit: LIMIT }, { signal: this.signal });
    } catch (error) {
      if (error instanceof Problem && number === this.loads) return replace(this.body, problem(error.message));
      if (!(error instanceof Problem)) throw error;
    }
    if (number === this.loads) this.draw(said);
  }

  draw(said) {
    this.said = said;
    const rows = said[this.kind];
    this.count.textContent = said.total === said.all ? plural(said.all, this.kind.slice(0, -1)) : `${said.total.toLocaleString("en")} of ${plural(said.all, this.kind.slice(0, -1))}`;
    this.drawChips(said.facets);
    if (!said.all) return replace(this.body, note("This run kept no episodes: its config has record.every 0, or it is older than keeping them. The next run keeps two groups every ten steps."));
    if (!rows.length) return replace(this.body, note(`No ${this.kind.slice(0, -1)} passes the filter.`));
    const focused = document.activeElement?.closest?.("tr")?.dataset.id;
    replace(this.body, h("div.scroll", {}, h("table", {}, this.headOf(), h("tbody", {}, rows.map((row) =>
      h("tr", { "data-id": row.id }, this.columns.map((column) => h(`td${classes(column)}`, {}, column.cell(row)))))))), this.pager(said));
    if (focused) this.body.querySelector(`tr[data-id="${CSS.escape(focused)}"] a.open`)?.focus();
  }

  drawChips(facets) {
    const tasks = facets.tasks.length > 1 ? facets.tasks.slice(0, 12).map(({ task, num }) => [`${task} (${num})`, `task:"${task.replaceAll('"', "")}"`]) : [];
    const origins = facets.origins.length > 1 ? facets.origins.map((origin) => [origin, `origin:${origin}`]) : [];
    replace(this.chips, [...this.quick, ...origins, ...tasks].map(([text, words]) => {
      const isOn = words.split(/ (?=\w+:)/).every((word) => this.filter.includes(word));
      return h("button", { type: "button", "aria-pressed": String(isOn), onclick: () => this.set({ offset: 0, filter: isOn ? without(this.filter, words) : with_(this.filter, words) }) }, text);
    }));
  }

  headOf() {
    return h("thead", {}, h("tr", {}, this.columns.map((column) => {
      const name = this.order.replace("-", "");
      const sort = column.order && column.order === name ? (this.order.startsWith("-") ? "descending" : "ascending") : null;
      const title = column.order ? h("button", { type: "button", onclick: () => this.set({ offset: 0, order: this.order === `-${column.order}` ? column.order : `-${column.order}` }) }, column.title) : column.title;
      return h(`th${classes(column)}`, { scope: "col", "aria-sort": sort, title: column.help }, title);
    })));
  }

  pager(said) {
    if (said.total <= LIMIT) return null;
    const last = Math.min(said.offset + LIMIT, said.total);
    return h("div.pager", {},
      h("button", { type: "button", disabled: !said.offset, onclick: () => this.turn(-1) }, "Back"),
      h("span.small.muted.number", {}, `${said.offset + 1}\u2013${last} of ${said.total.toLocaleString("en")}`),
      h("button", { type: "button", disabled: last >= said.total, onclick: () => this.turn(1) }, "On"));
  }

  turn(by) {
    const offset = Math.max(0, this.offset + by * LIMIT);
    if (this.said && offset < this.said.total) return this.set({ offset });
  }

  get keys() {
    return {
      ...rowKeys(() => this.body),
      "/": ["Filter", () => { this.field.focus(); this.field.select(); }],
      "[": ["Page before", () => this.turn(-1)],
      "]": ["Next page", () => this.turn(1)],
    };
  }
}

const classes = (column) => `${column.number ? ".number" : ""}${column.text ? ".text" : ""}${column.minor ? ".hide-small" : ""}`;
const with_ = (filter, words) => `${filter} ${words}`.trim();
const without = (filter, words) => words.split(/ (?=\w+:)/).reduce((text, word) => text.replace(word, ""), filter).replace(/ +/g, " ").trim();
