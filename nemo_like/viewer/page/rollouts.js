// Rollouts: a filtered list, and the trajectories of one prompt at one step, token by token.
"use strict";
const SHOWN = ["step", "group", "index", "reward", "num_tokens", "turns", "end", "weight_version"];

async function rollouts(query) {
  const run = query.run ?? 0;
  const found = await ask("trajectories", { ...query, run });
  const range = (label, name) => [input(label, `${name}_min`, "number", { step: "any", placeholder: "min" }),
    el("input", { name: `${name}_max`, type: "number", step: "any", placeholder: "max" })];
  const sorts = ["-step", "step", "-reward", "reward", "-num_tokens", "num_tokens"];
  const fields = form("rollouts", query, runChoice(), choice("phase", "phase", ["", ...found.words.phase]),
    range("step", "step"), range("reward", "reward"), range("tokens", "num_tokens"),
    choice("end", "end", ["", ...found.words.end]), input("failed", "failed", "checkbox", { value: 1 }),
    input("text", "text", "search"), choice("sort", "sort", sorts), el("input", { name: "like", type: "hidden" }));
  const cell = (value) => typeof value === "number" && !Number.isInteger(value) ? value.toFixed(3) : value ?? "failed";
  const rows = found.rows.map((one) => el("tr", { class: "link", onclick: () => { location.hash = linkTo(run, one); } },
    SHOWN.map((name) => el("td", { class: name === "end" ? "" : "number" }, name === "step" ? el("a", { href: linkTo(run, one) }, one.step) : cell(one[name])))));
  const mean = found.reward === null ? "" : `, mean reward ${found.reward.toFixed(3)}`;
  const begin = Number(query.offset ?? 0), next = begin + rows.length;
  return el("div", {}, fields, found.prompt ? el("p", {}, `Prompt: ${found.prompt}`) : null,
    el("p", { class: "note", id: "found" }, `${found.total} trajectories${found.complete ? "" : " so far: narrow the search to see all"}${mean} `,
      begin ? el("a", { href: link("rollouts", { ...query, offset: "" }) }, " first ") : null,
      next < found.total ? el("a", { href: link("rollouts", { ...query, offset: next }) }, " next ") : null),
    el("table", {}, el("tr", {}, SHOWN.map((name) => el("th", {}, name))), rows));
}

function linkTo(run, one, more = {}) {
  return link("group", { run, phase: one.phase, step: one.step, group: one.group, index: one.index, ...more });
}

// Background colour and tooltip of a token.
function shade(row, i, by, newest) {
  if (by === "none") return "";
  if (row.versions[i] < 0) return "#e5e7eb";
  if (by === "mask") return row.mask[i] ? "#bbf7d0" : "#fde68a";
  if (by === "version") return `hsl(${(row.versions[i] * 47) % 360} 80% 85%)`;
  return `hsl(0 85% ${Math.max(55, 100 + 9 * (row.logprobs[i] ?? -5))}%)`;
}

function about(row, i) {
  const given = row.versions[i] < 0 ? "given" : `logprob ${row.logprobs[i]?.toFixed(4)}, weights ${row.versions[i]}`;
  return `${JSON.stringify(row.texts[i])} id ${row.ids[i]}, ${given}${row.mask[i] ? ", trains" : ", does not train"}`;
}

function tokens(row, by) {
  return el("div", { class: "tokens" }, row.texts.map((text, i) =>
    el("span", { title: about(row, i), style: { background: shade(row, i, by) } }, text)));
}

function said(message) {
  const calls = message.tool_calls ? JSON.stringify(message.tool_calls) : "";
  const content = typeof message.content === "string" ? message.content : JSON.stringify(message.content ?? "");
  return el("div", { class: `message ${message.role === "assistant" ? "assistant" : ""}` }, el("b", {}, message.role), `\n${content}${calls}`);
}

function trajectory(one, query) {
  const parts = one.metrics.map(([name, value]) => `${name} ${value}`).join(", ");
  return el("div", { class: `trajectory ${String(one.index) === query.index ? "here" : ""}` },
    el("a", { href: linkTo(query.run, one, { color: query.color }) }, `index ${one.index}`),
    ` reward ${one.reward ?? "failed"}, ${one.num_tokens} tokens, ${one.turns} turns, ${one.end}`,
    el("div", { class: "note" }, parts), one.error ? el("div", { class: "failed" }, one.error) : null,
    one.rows.map((row) => tokens(row, query.color ?? "logprob")),
    one.messages.length > 1 ? el("details", { open: query.alone && "" }, el("summary", {}, `${one.messages.length} messages`), one.messages.map(said)) : null);
}

async function group(query) {
  const which = { run: query.run, phase: query.phase, step: query.step, group: query.group, index: query.index ?? 0 };
  const { shown: found, left_out } = await ask("group", query.alone ? { ...which, alone: 1 } : which);
  if (!found.length) return el("p", { class: "note" }, "These are not kept, or not any longer: logging.trajectories_gib limits what is kept.");
  found.sort((a, b) => (String(b.index) === query.index) - (String(a.index) === query.index) || a.index - b.index);
  const kept = Object.keys(which).map((name) => el("input", { type: "hidden", name, value: query[name] ?? "" }));
  const one = found[0];
  return el("div", {},
    form("group", { color: "logprob", ...query }, kept, choice("colour", "color", ["logprob", "mask", "version", "none"]),
      input("alone", "alone", "checkbox", { value: 1 }),
      el("a", { href: link("rollouts", { run: query.run, phase: query.phase, like: [query.phase, query.step, query.group, one.index].join("/"), sort: "step" }) }, "this prompt at all steps"),
      el("a", { href: link("rollouts", { run: query.run, phase: query.phase, step_min: query.step, step_max: query.step }) }, `all of step ${query.step}`),
      el("span", { class: "note" }, `group ${one.group} of step ${one.step}, weights ${one.weight_version}: ${one.prompt}${left_out ? ` (${left_out} others of the group are not shown)` : ""}`)),
    el("div", { class: "siblings" }, found.map((each) => trajectory(each, query))));
}
