// The page: views chosen by the address after #, with metrics that update during a run.
// Text of models and files enters the page as text nodes only; see `el`.
"use strict";
const COLORS = ["#1d4ed8", "#dc2626", "#059669", "#d97706", "#7c3aed", "#0891b2", "#be185d", "#4d7c0f"];
const FIRST = ["rollout/reward", "validation/reward", "validation/accuracy", "validation/loss", "train/loss",
  "train/grad_norm", "policy/entropy", "mismatch/mean_abs", "rollout/completion_tokens", "rollout/truncated_share",
  "time/step_s", "train/tokens_per_s"];
const MOST_CHARTS = 24, MOST_LANES = 60, EVERY_MS = 3000;
const state = { runs: [], differences: {}, records: [], life: [], shown: [] };

function el(tag, props = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(props)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "style") Object.assign(node.style, value);
    else if (value !== false && value != null) node.setAttribute(name, value);
  }
  node.append(...children.flat(Infinity).filter((one) => one != null).map((one) => one instanceof Node ? one : String(one)));
  return node;
}

async function ask(what, query = {}) {
  const answer = await fetch(`api/${what}?${new URLSearchParams(query)}`);
  if (!answer.ok) throw new Error(await answer.text());
  return answer.json();
}

function address() {
  const [view, query] = location.hash.slice(1).split("?");
  return { view: view || "curves", query: Object.fromEntries(new URLSearchParams(query)) };
}

function link(view, query) {
  const given = Object.entries(query).filter(([, value]) => value !== "" && value != null);
  return `#${view}?${new URLSearchParams(given)}`;
}

// A form that keeps its fields in the address, so every state can be linked.
function form(view, query, ...fields) {
  const apply = () => { location.hash = link(view, Object.fromEntries(new FormData(node))); };
  const node = el("form", { onchange: apply, onsubmit: (event) => { event.preventDefault(); apply(); } }, fields,
    el("button", { hidden: "" })); // with it, Enter submits
  for (const field of node.elements) {
    if (!(field.name in query)) continue;
    if (field.type === "checkbox") field.checked = true;
    else field.value = query[field.name];
  }
  return node;
}

function choice(label, name, values, texts = values) {
  const options = values.map((one, i) => el("option", { value: one }, texts[i]));
  return el("label", {}, `${label} `, el("select", { name }, options));
}

function input(label, name, type, props = {}) {
  return el("label", {}, `${label} `, el("input", { name, type, ...props }));
}

function runChoice() {
  return choice("run", "run", state.runs.map((_, i) => i), state.runs.map((one) => one.name));
}

function smooth(values, factor) {
  let mean = null;
  return values.map((one) => one == null ? one : (mean = mean == null ? one : factor * mean + (1 - factor) * one));
}

function points(run, name, axis) {
  const records = state.records[run].filter((one) => name in one);
  const start = state.records[run].length ? state.records[run][0].time : 0;
  const x = { step: (one) => one.step, samples: (one) => one.step * state.runs[run].samples_per_step,
    minutes: (one) => (one.time - start) / 60 }[axis];
  return [records.map(x), records.map((one) => one[name])];
}

function chart(name, query) {
  const factor = Number(query.smooth ?? 0.6);
  const runs = state.shown.filter((i) => state.records[i].some((one) => name in one));
  if (!runs.length) return null;
  const tables = [], series = [{ label: query.x ?? "step" }];
  for (const i of runs) {
    const [x, y] = points(i, name, query.x ?? "step");
    const alone = y.length > 1 ? {} : { points: { show: true } };
    if (factor > 0) {
      tables.push([x, y]);
      series.push({ stroke: `${COLORS[i % COLORS.length]}40`, spanGaps: true, label: `${state.runs[i].name} (as it is)` });
    }
    tables.push([x, smooth(y, factor)]);
    series.push({ stroke: COLORS[i % COLORS.length], width: 2, spanGaps: true, label: state.runs[i].name, ...alone });
  }
  const options = { title: name, width: 380, height: 210, series, scales: { x: { time: false } }, axes: [{}, { size: 60 }] };
  const node = el("div", { "data-metric": name });
  new uPlot(options, uPlot.join(tables), node);
  return node;
}

function curves(query) {
  const names = [...new Set(state.records.flat().flatMap(Object.keys))]
    .filter((one) => one.includes("/")).sort();
  const parts = (query.metrics ?? "").split(" ").filter(Boolean);
  const found = parts.length ? names.filter((one) => parts.some((part) => one.includes(part)))
    : FIRST.filter((one) => names.includes(one));
  return el("div", {},
    form("curves", query, choice("x axis", "x", ["step", "samples", "minutes"]),
      choice("smoothing", "smooth", ["0.6", "0", "0.9", "0.97"]),
      input("metrics", "metrics", "search", { placeholder: "part of a name …", list: "names" }),
      el("datalist", { id: "names" }, names.map((one) => el("option", { value: one })))),
    el("div", { class: "charts" }, found.slice(0, MOST_CHARTS).map((one) => chart(one, query))),
    found.length > MOST_CHARTS ? el("p", { class: "note" }, `${found.length - MOST_CHARTS} more; name a part of them.`) : null);
}

function lanes(query) {
  const run = Number(query.run ?? 0);
  const records = state.records[run].filter((one) => one.step > 0).slice(-MOST_LANES);
  if (!records.length) return el("p", { class: "note" }, "No step is finished yet.");
  const names = [...new Set(records.flatMap((one) => Object.keys(one.phases)))];
  const color = (name) => COLORS[names.indexOf(name) % COLORS.length];
  const most = Math.max(...records.map((one) => Object.values(one.phases).reduce((a, b) => a + b, 0)));
  const bars = (one) => Object.entries(one.phases).map(([name, seconds]) => el("div",
    { title: `step ${one.step}: ${name} ${seconds.toFixed(3)} s`, style: { width: `${90 * seconds / most}%`, background: color(name) } }));
  return el("div", {}, form("phases", query, runChoice()),
    el("p", {}, names.map((one) => [el("i", { class: "swatch", style: { background: color(one) } }), one]),
      el("span", { class: "note" }, ` the longest of these steps took ${most.toFixed(2)} s`)),
    records.map((one) => el("div", { class: "lane" }, el("span", {}, one.step), bars(one))));
}

function configuration() {
  const rows = Object.entries(state.differences).map(([key, values]) => el("tr", {}, el("td", {}, key),
    values.map((one) => el("td", {}, one === null ? "" : JSON.stringify(one)))));
  if (!rows.length) return el("p", { class: "note" }, "No keys differ.");
  return el("table", {}, el("tr", {}, ["key", ...state.runs.map((one) => one.name)].map((one) => el("th", {}, one))), rows);
}

async function logTail(query) {
  const lines = await ask("log", { run: query.run ?? 0 });
  return el("div", {}, form("log", query, runChoice()), el("pre", {}, lines.join("\n")));
}

const VIEWS = { curves, phases: lanes, rollouts, group, config: configuration, log: logTail };
let turn = 0;

async function draw() {
  const { view, query } = address(), mine = ++turn;
  for (const one of document.querySelectorAll("nav a")) one.className = one.hash === `#${view}` ? "here" : "";
  let node;
  try {
    node = await (VIEWS[view] ?? curves)(query);
  } catch (error) {
    node = el("p", { class: "failed" }, error.message);
  }
  if (mine === turn) document.querySelector("main").replaceChildren(node);
}

function legend() {
  const toggle = (i) => () => {
    state.shown = state.shown.includes(i) ? state.shown.filter((one) => one !== i) : [...state.shown, i].sort();
    draw();
  };
  document.getElementById("runs").replaceChildren(...state.runs.map((one, i) => el("label", {},
    el("input", { type: "checkbox", checked: state.shown.includes(i) && "", onchange: toggle(i) }),
    el("b", { style: { color: COLORS[i % COLORS.length] } }, one.name), ` ${one.state}`,
    one.alarms.map((text) => el("div", { class: "alarm" }, `Alarm at ${text}`)))));
}

async function poll() {
  const about = await ask("runs");
  if (!state.runs.length) Object.assign(state, { shown: [...about.runs.keys()], records: about.runs.map(() => []) });
  Object.assign(state, about);
  let isNew = false;
  for (const run of state.runs.keys()) {
    const found = await ask("metrics", { run, from: state.records[run].length, life: state.life[run] ?? "" });
    isNew ||= found.records.length > 0 || found.from < state.records[run].length;
    state.records[run] = [...state.records[run].slice(0, found.from), ...found.records];
    state.life[run] = found.life;
  }
  legend();
  const busy = document.activeElement?.closest("form") || address().view === "group";
  if (!turn || (isNew && !busy)) await draw();
}

async function live() {
  const failed = (error) => el("span", { class: "failed" }, `no answer: ${error.message}`);
  await poll().catch((error) => document.getElementById("runs").replaceChildren(failed(error)));
  setTimeout(live, EVERY_MS);
}

addEventListener("hashchange", draw);
live();
