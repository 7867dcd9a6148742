// The page where a person says which of two clips is better. All state that matters is on the server: a reload, a
// second tab or a restart of the server goes on where the person stopped.
"use strict";

const HOLD_MS = 1200; // on the last frame, so that the outcome can be seen
const ARM_MS = 250; // after a pair has appeared, before an answer counts: a key held too long is no answer
const ALIVE_MS = 60000;
const KEPT_SHEETS = 24;
const SPEEDS = ["0.25", "0.5", "1", "2", "4"];
const WORDS = { left: "left is better", right: "right is better", tie: "equally good", skip: "skipped" };
const KEYS = { ArrowLeft: "left", ArrowRight: "right", ArrowUp: "tie", "=": "tie", s: "skip", S: "skip" };
const SIDES = ["left", "right"];
const still = matchMedia("(prefers-reduced-motion: reduce)");
const $ = (id) => document.getElementById(id);

let socket = null;
let retryMs = 500;
let name = localStorage.getItem("name") || "";
let state = null; // what the server said last
let question = null; // the pair that is shown
let pending = null; // an answer that the server has not confirmed
let armedAt = 0;
let deadline = null; // of training, milliseconds of this page's clock
let hiddenCameras = new Set(JSON.parse(localStorage.getItem("hidden-cameras") || "[]"));
const sheets = new Map(); // address -> promise of its picture
const player = { frame: 0, frames: 1, playing: false, since: 0, request: 0 };
let views = []; // {canvas, camera, clip, sheet, isThere: it has its sheet or says why not}

// ---- connection

function connect() {
  socket = new WebSocket(new URL("socket", location.href.replace(/^http/, "ws")));
  socket.onopen = () => {
    retryMs = 500;
    show("banner", false);
    if (name) {
      send({ type: "join", name });
      if (pending) send(pending);
    }
  };
  socket.onmessage = (event) => hear(JSON.parse(event.data));
  socket.onclose = (event) => {
    const why = event.code === 1013 ? event.reason : "No connection to the server";
    $("banner").textContent = `${why}. Trying again; what you have answered is stored. If the server was started anew `
      + "with another address, open the one that it printed.";
    show("banner", true);
    setTimeout(connect, retryMs);
    retryMs = Math.min(2 * retryMs, 8000);
  };
}

function send(message) {
  if (socket.readyState === WebSocket.OPEN) socket.send(JSON.stringify(message));
}

function hear(message) {
  if (message.type === "refused") return refused(message.reason);
  state = { ...state, ...message };
  localStorage.setItem("name", name);
  show("welcome", false);
  $("who").textContent = name;
  show("rename", true);
  if ("question" in message) {
    const done = pending;
    pending = null;
    choose(null);
    if (done && !message.notice) say(`Stored: ${WORDS[done.answer]}.`);
    ask(message.question);
    if (message.next) preload(message.next);
  }
  if (message.notice) say(message.notice);
  deadline = message.seconds_left === undefined ? null : performance.now() + 1000 * message.seconds_left;
  figures();
}

function refused(reason) {
  pending = null;
  choose(null);
  if (!state) {
    $("name-problem").textContent = reason;
    show("welcome", true);
    $("name").focus();
  } else {
    say(reason, true);
    buttons();
  }
}

// ---- question and answer

const keyOf = (pair) => pair && `${pair.left.id} ${pair.right.id}`;

function ask(next) {
  const isSame = keyOf(next) === keyOf(question) && next && next.reopened === question.reopened;
  question = next;
  show("work", !!next);
  show("rest", !next);
  if (!next) {
    stop();
    const progress = state.progress;
    $("rest-title").textContent = progress && progress.done >= progress.wanted ? "All done. Thank you!" : "Nothing to label now";
    $("rest-text").textContent = state.text;
    $("figures").open = true;
    return buttons();
  }
  if (isSame) return buttons();
  const [left, right] = SIDES.map((side) => next[side].instruction);
  $("task").textContent = left === right ? left : "Two different tasks: which clip does its own task better?";
  show("reopened", next.reopened);
  if (next.reopened) {
    $("reopened").textContent = `You took this answer back. It was: ${WORDS[next.previous]}.`;
  }
  for (const side of SIDES) {
    const own = $(side).querySelector(".own-task");
    own.hidden = left === right;
    own.textContent = next[side].instruction;
    $(side).classList.toggle("before", next.reopened && next.previous === side);
  }
  for (const button of document.querySelectorAll(".answer")) {
    button.classList.toggle("before", next.reopened && next.previous === button.dataset.answer);
  }
  cameraChoice(next);
  layout();
  player.frames = Math.max(next.left.frames, next.right.frames);
  $("scrub").max = player.frames - 1;
  armedAt = performance.now() + ARM_MS;
  if (still.matches) {
    stop();
    seek(player.frames - 1);
  } else {
    seek(0);
    start();
  }
  buttons();
  setTimeout(buttons, ARM_MS + 10);
}

function answer(choice) {
  if (!isReady() || socket.readyState !== WebSocket.OPEN) return;
  pending = { type: "answer", left: question.left.id, right: question.right.id, answer: choice };
  choose(choice);
  send(pending);
  buttons();
}

function undo() {
  if (pending || !state || !state.progress || !state.progress.can_undo) return;
  send({ type: "undo" });
  say("Taken back.");
}

function choose(choice) {
  for (const button of document.querySelectorAll(".answer")) {
    button.classList.toggle("chosen", button.dataset.answer === choice);
  }
}

// Nobody can have judged what has not been on the screen.
const isReady = () => !!question && !pending && performance.now() >= armedAt && views.every((view) => view.isThere);

function buttons() {
  const ready = isReady();
  // aria-disabled and not disabled: a button that is disabled for a moment would lose the focus.
  for (const button of document.querySelectorAll(".answer")) button.setAttribute("aria-disabled", String(!ready));
  for (const button of document.querySelectorAll(".undo")) {
    button.disabled = !state || !state.progress || !state.progress.can_undo;
  }
}

// ---- clips

function sheet(url) {
  if (!sheets.has(url)) {
    const loading = fetch(url).then(async (response) => {
      if (!response.ok) throw new Error((await response.text()).trim());
      return createImageBitmap(await response.blob());
    });
    loading.catch(() => sheets.delete(url)); // asked for again when it is shown again
    sheets.set(url, loading);
    if (sheets.size > KEPT_SHEETS) sheets.delete(sheets.keys().next().value);
  }
  return sheets.get(url);
}

function preload(pair) {
  for (const side of SIDES) for (const camera of pair[side].cameras) sheet(camera.url).catch(() => {});
}

function layout() {
  views = [];
  for (const side of SIDES) {
    const { cameras } = question[side];
    const seen = cameras.filter((camera) => !hiddenCameras.has(camera.name));
    const shown = seen.length ? seen : cameras.slice(0, 1);
    $(side).querySelector(".views").replaceChildren(...shown.map((camera) => view(side, camera, shown.length)));
  }
}

function view(side, camera, count) {
  const box = document.createElement("div");
  const canvas = document.createElement("canvas");
  box.className = "view";
  canvas.width = camera.width;
  canvas.height = camera.height;
  canvas.style.setProperty("--aspect", camera.width / camera.height);
  canvas.classList.toggle("small", camera.width <= 128);
  canvas.setAttribute("role", "img");
  canvas.setAttribute("aria-label", `${side} clip, camera ${camera.name}, ${question[side].frames} frames`);
  box.append(canvas);
  if (count > 1) box.append(camera.name);
  const entry = { canvas, camera, clip: question[side], sheet: null, isThere: false };
  views.push(entry);
  sheet(camera.url).then((picture) => {
    entry.sheet = picture;
    entry.isThere = true;
    draw();
    buttons();
  }, (error) => {
    entry.isThere = true;
    const problem = document.createElement("p");
    problem.className = "problem";
    problem.textContent = `This clip cannot be shown: ${error.message}. Skip the pair.`;
    box.append(problem);
    buttons();
  });
  return box;
}

function draw() {
  const frame = Math.floor(player.frame);
  for (const { canvas, camera, clip, sheet: picture } of views) {
    if (!picture) continue;
    const index = Math.min(frame, clip.frames - 1);
    const x = (index % clip.columns) * camera.width;
    const y = Math.floor(index / clip.columns) * camera.height;
    canvas.getContext("2d").drawImage(picture, x, y, camera.width, camera.height, 0, 0, camera.width, camera.height);
  }
  for (const side of SIDES) {
    const text = frame >= question[side].frames - 1 ? "ended" : "";
    const outcome = $(side).querySelector(".outcome");
    if (outcome.textContent !== text) outcome.textContent = text;
  }
  $("scrub").value = frame;
  $("scrub").setAttribute("aria-valuetext", `frame ${frame + 1} of ${player.frames}`);
  $("frame").textContent = `${frame + 1} / ${player.frames}`;
}

function cameraChoice(pair) {
  const names = pair.left.cameras.map((camera) => camera.name);
  show("cameras", names.length > 1);
  for (const label of $("cameras").querySelectorAll("label")) label.remove();
  for (const camera of names) {
    const label = document.createElement("label");
    const box = document.createElement("input");
    label.className = "check";
    box.type = "checkbox";
    box.checked = !hiddenCameras.has(camera);
    box.onchange = () => {
      hiddenCameras[box.checked ? "delete" : "add"](camera);
      localStorage.setItem("hidden-cameras", JSON.stringify([...hiddenCameras]));
      layout();
      draw();
    };
    label.append(box, camera);
    $("cameras").append(label);
  }
}

// ---- player

function seek(frame) {
  player.frame = Math.min(Math.max(frame, 0), player.frames - 1);
  if (question) draw();
}

function start() {
  if (player.frame >= player.frames - 1) player.frame = 0;
  player.since = performance.now();
  $("play").textContent = "Pause";
  cancelAnimationFrame(player.request);
  player.request = requestAnimationFrame(tick);
  player.playing = true;
}

function stop() {
  cancelAnimationFrame(player.request);
  player.playing = false;
  $("play").textContent = "Play";
}

function tick(now) {
  const elapsed = Math.max(0, now - player.since);
  player.since = now;
  if (views.every((view) => view.isThere)) {
    const last = player.frames - 1;
    const before = Math.floor(player.frame);
    const rate = (state.fps * Number($("speed").value)) / 1000;
    player.frame += elapsed * rate;
    if (player.frame >= last + HOLD_MS * rate) {
      if ($("loop").checked) player.frame = 0;
      else {
        player.frame = last;
        stop();
      }
    }
    if (Math.floor(player.frame) !== before) drawClamped();
  }
  if (player.playing) player.request = requestAnimationFrame(tick);
}

function drawClamped() {
  const { frame } = player;
  player.frame = Math.min(frame, player.frames - 1); // the time on the last frame counts, the number does not
  draw();
  player.frame = frame;
}

function step(by) {
  stop();
  seek(Math.floor(Math.min(player.frame, player.frames - 1)) + by);
}

function faster(by) {
  const index = SPEEDS.indexOf($("speed").value) + by;
  $("speed").value = SPEEDS[Math.min(Math.max(index, 0), SPEEDS.length - 1)];
}

const toggle = () => (player.playing ? stop() : start());

// ---- figures

function figures() {
  const { progress, people } = state;
  show("figures", !!progress);
  show("meter", !!progress);
  if (!progress) {
    document.title = "Which clip is better?";
    return buttons();
  }
  const left = Math.max(0, progress.wanted - progress.done);
  document.title = left ? `(${left}) Which clip is better?` : "Done: which clip is better?";
  $("bar").max = progress.wanted;
  $("bar").value = progress.done;
  countdown();
  const { with_self: self, with_others: others } = progress;
  const rows = [
    ["Your answers", `${progress.mine.labels}, of which ${progress.mine.ties} ties and ${progress.mine.skips} skips`],
    ["You with yourself", self.count ? `${self.same} of ${self.count} repeated pairs the same` : "no repeated pair yet"],
    ["You with others", !others.count ? "no common pair yet" : `${others.same} of ${others.count} the same`
      + (others.kappa === null ? "" : `, Cohen's kappa ${others.kappa.toFixed(2)}`)],
    ["Everybody", progress.alpha === null ? "too few common pairs" : `Krippendorff's alpha ${progress.alpha.toFixed(2)}`],
  ];
  $("agreement").replaceChildren(...rows.map(([term, text]) => {
    const row = document.createElement("div");
    row.append(cell("dt", term), cell("dd", text));
    return row;
  }));
  $("people").tBodies[0].replaceChildren(...people.map((person) => {
    const row = document.createElement("tr");
    row.append(cell("td", person.name), cell("td", person.labels, "number"), cell("td", person.ties, "number"),
      cell("td", person.skips, "number"), cell("td", person.here ? "here" : "away"));
    return row;
  }));
  buttons();
}

function cell(tag, text, kind) {
  const made = document.createElement(tag);
  made.textContent = text;
  if (kind) made.className = kind;
  return made;
}

function countdown() {
  if (!state || !state.progress) return;
  let text = `${state.progress.done} of ${state.progress.wanted} pairs`;
  if (deadline !== null) {
    const minutes = Math.max(0, Math.round((deadline - performance.now()) / 60000));
    const time = minutes < 120 ? `${minutes} min` : `${Math.round(minutes / 60)} h`;
    text += `; training waits ${time} more`;
  }
  $("count").textContent = text;
}

function say(text, isBad = false) {
  $("notice").textContent = text;
  $("notice").classList.toggle("bad", isBad);
}

function show(id, isShown) {
  $(id).hidden = !isShown;
}

// ---- hands

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || !state || $("welcome").hidden === false) return;
  const { target, key } = event;
  const isField = target.matches("select, input:not([type])");
  if (isField || (target.type === "range" && key.startsWith("Arrow"))) return;
  const act = {
    u: undo, U: undo, l: () => ($("loop").checked = !$("loop").checked), ",": () => step(-1), ".": () => step(1),
    "<": () => faster(-1), ">": () => faster(1),
  }[key];
  if (KEYS[key]) {
    event.preventDefault();
    if (!event.repeat) answer(KEYS[key]);
  } else if (key === " " && !target.matches("button, summary, input")) {
    event.preventDefault();
    toggle();
  } else if (act && (!event.repeat || key === "," || key === ".")) {
    event.preventDefault();
    act();
  }
});
for (const button of document.querySelectorAll(".answer")) button.onclick = () => answer(button.dataset.answer);
for (const button of document.querySelectorAll(".undo")) button.onclick = undo;
$("play").onclick = toggle;
$("scrub").oninput = () => {
  stop();
  seek(Number($("scrub").value));
};
// After the mouse has used it, arrow keys answer again; whoever came with the tab key keeps them for scrubbing.
for (const id of ["scrub", "speed", "loop"]) $(id).addEventListener("pointerup", () => setTimeout(() => $(id).blur(), 0));
$("speed").onchange = () => $("speed").matches(":focus-visible") || $("speed").blur();
$("rename").onclick = () => {
  localStorage.removeItem("name");
  location.reload();
};
$("welcome").onsubmit = (event) => {
  event.preventDefault();
  name = $("name").value.trim();
  $("name-problem").textContent = name ? "" : "A name is needed.";
  if (name) send({ type: "join", name });
};
document.addEventListener("visibilitychange", () => document.hidden || send({ type: "alive" }));
setInterval(() => document.hidden || !state || send({ type: "alive" }), ALIVE_MS);
setInterval(countdown, 10000);
if (!name) {
  show("welcome", true);
  $("name").focus();
}
connect();
