// The settings of a run and what it was made with.
import { facts, h, note } from "./dom.js";
import { num } from "./format.js";

export async function show({ about, replace }) {
  const versions = about.versions ? Object.entries(about.versions).map(([name, version]) => `${name} ${version}`).join(", ") : null;
  replace(
    h("section.card", {}, h("h2", {}, "Run"), facts([
      ["Folder", h("span.mono", {}, about.path)], ["Task", about.task], ["Policy", about.policy], ["Reward", about.reward], ["Seed", about.seed === null ? null : num(about.seed)],
      ["Group size", about.group_size], ["Best step", about.best_step], ["Code", code(about.git)], ["Versions", versions],
      ["Recorded", about.record_every ? `every ${about.record_every} steps` : null],
      ["Report", "report.html in the run's folder, if it has finished"],
    ])),
    h("section.card", {}, h("h2", {}, "Config"), about.config ? h("pre", { tabindex: 0 }, about.config) : note("config.yaml is missing: the settings of this run are not known.")));
  return {};
}

/** The commit, and whether the code had changes that are in none. */
function code(git) {
  if (!git) return null;
  const state = git.dirty === null ? null : git.dirty ? h("span.tag.bad", {}, "uncommitted changes") : h("span.tag.good", {}, "unchanged");
  return h("span", {}, h("span.mono", { title: git.commit }, git.commit.slice(0, 10)), " ", state);
}
