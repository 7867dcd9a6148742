// What is looked at is the part of the address behind "#": #/ the list, #/run/NAME/VIEW/ID, #/compare?runs=A,B.
// A view is shown anew when that changes; while a run goes on it is told every few seconds whether there is news.
import { Away, Problem, ask, link } from "./api.js";
import { h, problem, replace } from "./dom.js";
import { ago } from "./format.js";
import { listenToKeys, setKeys } from "./keys.js";
import * as card from "./card.js";
import * as compare from "./compare.js";
import * as curves from "./curves.js";
import * as episode from "./episode.js";
import * as episodes from "./episodes.js";
import * as group from "./group.js";
import * as groups from "./groups.js";
import * as pool from "./pool.js";
import * as preferences from "./preferences.js";
import * as runs from "./runs.js";
import * as settings from "./settings.js";
import * as timeline from "./timeline.js";

const NEWS_MS = 2000;
const VIEWS = { curves, groups, episodes, preferences, card, timeline, settings, group, episode, some: group };
const TABS = [["curves", "Curves"], ["groups", "Groups"], ["episodes", "Episodes"], ["preferences", "Preferences"],
  ["card", "Reward card"], ["timeline", "Timeline"], ["settings", "Settings"]];
const OF_DATASET = ["episodes", "groups"];
const UP = { group: "groups", episode: "episodes", some: "episodes" };
const main = document.getElementById("main");
let shown = null; // {view, run, stop: AbortController}
let known = null; // the stamp of what is shown

function parse() {
  const [path, query] = location.hash.replace(/^#\/?/, "").split("?");
  const parts = path.split("/").filter((part) => part).map(decodeURIComponent);
  return { parts, params: new URLSearchParams(query || "") };
}

async function go() {
  const { parts, params } = parse();
  if (shown) {
    shown.stop.abort();
    shown.view?.close?.();
  }
  const stop = new AbortController();
  const here = { stop, run: null, view: null, name: "" };
  shown = here;
  known = null;
  document.getElementById("keys").close();
  setKeys({});
  try {
    const [module, context] = await choose(parts, params, here);
    if (here !== shown) return;
    setKeys(common(here, parts));
    here.view = await module.show({ ...context, signal: stop.signal, params, replace: (...all) => here === shown && replace(main, ...all) });
    if (here !== shown) return here.view?.close?.();
    setKeys({ ...(here.view?.keys || {}), ...common(here, parts) });
    say(false);
    scrollTo(0, 0);
  } catch (error) {
    if (here !== shown || stop.signal.aborted) return;
    fail(error);
  }
}

async function choose(parts, params, here) {
  if (!parts.length) {
    const list = await ask("runs", {}, here.stop);
    if (list.entries.length === 1 && list.entries[0].name === "." && !list.entries[0].problem) {
      history.replaceState(null, "", link("run", "."));
      return choose(["run", "."], params, here);
    }
    heading([[list.root]], null);
    return [runs, { list }];
  }
  if (parts[0] === "compare") {
    heading([["All", link()], ["Compare"]], null);
    return [compare, {}];
  }
  if (parts[0] === "pool") {
    heading([["All", link()], [parts[1]]], null);
    return [pool, { run: parts[1] }];
  }
  const run = parts[1];
  const about = await ask("run", { run }, { signal: here.stop.signal });
  here.run = run;
  known = about.stamp;
  const first = about.kind === "run" ? "curves" : "episodes";
  here.name = VIEWS[parts[2]] ? parts[2] : first;
  const title = run === "." ? about.path.split("/").filter((part) => part).pop() : run;
  const path = [...(run === "." ? [] : [["All", link()]]), [title, parts[3] ? link("run", run) : null]];
  if (parts[3]) path.push([here.name === "some" ? "compare" : `${here.name} ${parts[3]}`]);
  heading(path, { run, about, name: UP[here.name] || here.name });
  live(about);
  return [VIEWS[here.name], { run, about, id: parts[3], kind: here.name }];
}

function heading(path, tabs) {
  const items = path.flatMap(([text, where], place) => [
    place ? h("span.sep", { "aria-hidden": "true" }, "/") : null,
    place === path.length - 1 ? h("span.here", { "aria-current": "page" }, text) : where ? h("a", { href: where }, text) : h("span", {}, text)]);
  replace(document.getElementById("where"), items);
  document.title = path.map(([text]) => text).reverse().join(" \u2013 ");
  const bar = document.getElementById("tabs");
  bar.hidden = !tabs;
  if (!tabs) {
    replace(document.getElementById("live"));
    return;
  }
  const names = tabs.about.kind === "run" ? TABS : TABS.filter(([name]) => OF_DATASET.includes(name));
  replace(bar, names.map(([name, title]) => h("a", { href: link("run", tabs.run, name), "aria-current": name === tabs.name ? "page" : null }, title,
    name === "episodes" ? h("span.count", {}, tabs.about.episodes.toLocaleString("en")) : null)));
  const current = bar.querySelector("[aria-current]");
  if (current) bar.scrollLeft = current.offsetLeft - (bar.clientWidth - current.offsetWidth) / 2;
}

function live(about) {
  const isGoing = about.kind === "run" && !about.finished && about.written !== null && about.now - about.written < 300;
  const text = about.kind !== "run" ? "" : about.finished ? "finished"
    : about.written === null ? "no step yet" : `${isGoing ? "running" : "not finished"}, last step ${ago(about.now - about.written)}`;
  const element = document.getElementById("live");
  element.classList.toggle("going", isGoing);
  replace(element, text ? [h("i.dot"), h("span", {}, text)] : []);
}

/** Keys that every view has. */
function common(here, parts) {
  const keys = { Escape: ["Up", () => { location.hash = parts[3] ? link("run", here.run, UP[here.name] || here.name) : link(); }] };
  if (here.run === null) return keys;
  document.querySelectorAll("#tabs a").forEach((tab, place) => { keys[place + 1] = [tab.firstChild.textContent, () => tab.click()]; });
  return keys;
}

/** What a click or a key has asked for in a view that was left by then is no fault. */
addEventListener("unhandledrejection", (event) => {
  const { reason } = event;
  if (reason instanceof DOMException && reason.name === "AbortError") event.preventDefault();
  if (reason instanceof Away || reason instanceof Problem) {
    event.preventDefault();
    say(reason);
  }
});

/** Asks for news of what is shown, and tells it. */
async function follow() {
  const here = shown;
  try {
    if (here && !document.hidden) {
      if (here.run === null) await here.view?.news?.();
      else {
        const stamp = await ask("stamp", { run: here.run }, { signal: here.stop.signal });
        if (stamp.written !== undefined) live({ kind: "run", ...stamp });
        if (known !== stamp.stamp && here === shown && here.view) {
          known = stamp.stamp;
          await here.view.news?.(stamp);
        }
      }
      say(false);
    }
  } catch (error) {
    if (here === shown && !here?.stop.signal.aborted) say(error);
  }
  setTimeout(follow, NEWS_MS);
}

/** A banner while the server is away, or says that something is wrong. */
function say(error) {
  const banner = document.getElementById("banner");
  banner.hidden = !error;
  if (error) banner.textContent = error instanceof Away ? `${error.message} Trying again; if \`vla-rlaif inspect\` has ended, start it anew.` : error.message;
}

function fail(error) {
  if (error instanceof Away) return say(error);
  heading([["All", link()], ["Problem"]], null);
  replace(main, problem(error.message), h("p", {}, h("a", { href: link() }, "To the list")));
  if (error.name !== "Error" || !error.message) throw error;
}

listenToKeys();
addEventListener("hashchange", () => { go(); main.focus({ preventScroll: true }); });
go();
setTimeout(follow, NEWS_MS);
