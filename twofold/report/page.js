"use strict";
// Whatever a model wrote reaches the page as text (textContent), never as markup.

const data = JSON.parse(document.getElementById("data").textContent);
const charts = JSON.parse(document.getElementById("charts").textContent);
const byKey = new Map(data.rollouts.map((one, at) => [`${setOf(one).strategy}\n${setOf(one).step}\n${one.id}`, at]));

function setOf(rollout) { return data.sets[rollout.set]; }

function make(tag, attributes, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children.filter((child) => child !== null));
  return element;
}

// ---- charts ----

const dark = matchMedia("(prefers-color-scheme: dark)");

function colour(name) { return getComputedStyle(document.documentElement).getPropertyValue(name).trim(); }

function theme() {
  const [ink, muted, line] = ["--ink", "--muted", "--line"].map(colour);
  const text = { labelColor: ink, titleColor: muted, titleFontWeight: 400, labelFontSize: 12, titleFontSize: 12 };
  return {
    background: null,
    font: getComputedStyle(document.body).fontFamily,
    view: { stroke: null },
    axis: { ...text, gridColor: line, domainColor: line, tickColor: line, labelLimit: 200, labelPadding: 6, labelFlush: false, labelOverlap: true, titlePadding: 8 },
    legend: { ...text, labelFontSize: 12, columnPadding: 14 },
    title: { color: ink, fontSize: 13, fontWeight: 600, anchor: "start", offset: 12 },
    text: { color: ink, fill: ink },
    rule: { color: muted },
    circle: { color: colour("--accent") },
    range: { category: [0, 1, 2, 3, 4, 5, 6].map((at) => colour(`--c${at}`)) },
  };
}

async function draw() {
  const options = { actions: false, renderer: "svg", config: theme(), tooltip: { theme: dark.matches ? "dark" : "light" } };
  for (const plot of document.querySelectorAll("[data-chart]")) {
    const { view } = await vegaEmbed(plot, structuredClone(charts[plot.dataset.chart]), options);
    view.addEventListener("click", (event, item) => { if (item?.datum?.strategy) see(item.datum); });
  }
  for (const key of document.querySelectorAll("[data-key]")) key.style.setProperty("--key", `var(--c${key.dataset.key % 7})`);
  document.body.dataset.drawn = "yes";
}

dark.addEventListener("change", draw);

// ---- the list ----

const form = document.getElementById("filters");
const list = document.getElementById("list");
let found = [];

const columns = {
  strategy: (one) => [setOf(one).strategy],
  purpose: (one) => [setOf(one).purpose],
  round: (one) => [setOf(one).round ?? ""],
  module: (one) => one.calls.map((call) => call.module),
  status: (one) => [one.status],
  route: (one) => [one.verdict ?? ""],
};

function said(value) { return String(value).replaceAll("_", " "); }

function fillFilters() {
  for (const [name, values] of Object.entries(columns)) {
    const all = [...new Set(data.rollouts.flatMap(values))].filter((value) => value !== "");
    if (name === "round") all.sort((a, b) => a - b);
    form.elements[name].replaceChildren(
      make("option", { value: "" }, "all"), ...all.map((value) => make("option", { value }, said(value))));
    form.elements[name].disabled = all.length === 0;
  }
}

function words(rollout) {
  rollout.words ??= JSON.stringify(
    [rollout.id, rollout.inputs, rollout.labels, rollout.output, rollout.hints, rollout.calls.map((call) => call.answer)],
  ).toLowerCase();
  return rollout.words;
}

function filter() {
  const wanted = Object.keys(columns).filter((name) => form.elements[name].value !== "");
  const text = form.elements.text.value.trim().toLowerCase();
  found = data.rollouts.filter((one) =>
    wanted.every((name) => columns[name](one).some((value) => String(value) === form.elements[name].value))
    && (!text || words(one).includes(text)));
  document.getElementById("count").textContent =
    `${found.length.toLocaleString("en")} of ${data.rollouts.length.toLocaleString("en")} shown here`;
  list.replaceChildren(...found.map(row));
  if (!found.length) list.append(make("p", { class: "none" }, "No rollout here is like that. Clear a filter."));
}

function see(where) {
  if (![...form.elements.strategy.options].some((option) => option.value === where.strategy)) return;
  form.reset();
  for (const name of ["strategy", "purpose", "round", "status"]) {
    const select = form.elements[name];
    if (where[name] !== undefined && [...select.options].some((option) => option.value === String(where[name]))) select.value = where[name];
  }
  filter();
  document.getElementById("rollouts").scrollIntoView();
  list.firstElementChild?.focus({ preventScroll: true });
}

function place(rollout, withStep = true) {
  const { strategy, step, purpose, round } = setOf(rollout);
  return [strategy, withStep ? step : "", purpose, round === null ? "" : `round ${round}`].filter(Boolean).join(" ");
}

function number(value, digits = 3) { return value === null || value === undefined ? "–" : value.toFixed(digits); }

function signed(value) { return (value < 0 ? "−" : "+") + Math.abs(value).toFixed(2); }

/** The part of a call, or of the whole rollout, in its first group; null when it is in none. */
function membership(rollout, part) {
  const group = data.groups[part.groups[0]];
  return group ? group.members.find((member) => member.id === rollout.id && member.index === (part.index ?? -1)) : null;
}

function row(rollout, at) {
  const module = form.elements.module.value;
  const calls = module ? rollout.calls.filter((call) => call.module === module) : rollout.calls;
  const own = [...calls].reverse().map((call) => membership(rollout, call)).find(Boolean) ?? membership(rollout, rollout);
  const answer = (module ? calls[0] : calls.at(-1))?.answer ?? "";
  const asked = Object.values(rollout.inputs).map(shown).join(" · ");
  const spoken = [`reward ${number(rollout.reward, 2)}`, place(rollout, false), `input ${asked}`, `answer ${answer}`, said(rollout.status)];
  if (own) spoken.push(`advantage ${signed(own.advantage)}`);
  const element = make("div", { class: "row", role: "option", tabindex: at ? -1 : 0, "data-at": at, "aria-label": spoken.join(", ") },
    make("span", { class: `reward ${rollout.reward > 0 ? "high" : "low"}` }, number(rollout.reward, 2)),
    make("span", { class: "where" }, place(rollout, false)),
    make("span", { class: "asked" }, asked),
    make("span", { class: "answer" }, answer),
    make("span", { class: `status ${rollout.status === "ok" ? "" : "failed"}` }, said(rollout.status)),
    make("span", { class: "advantage" }, own ? signed(own.advantage) : ""));
  element.title = own ? `advantage ${signed(own.advantage)}` : "";
  return element;
}

list.addEventListener("click", (event) => {
  const element = event.target.closest(".row");
  if (element) open(Number(element.dataset.at));
});

list.addEventListener("keydown", (event) => {
  const at = Number(event.target.dataset.at);
  const next = { ArrowDown: at + 1, ArrowUp: at - 1, Home: 0, End: found.length - 1, PageDown: at + 10, PageUp: at - 10 }[event.key];
  if (event.key === "Enter" || event.key === " ") open(at);
  else if (next === undefined) return;
  else focusRow(Math.max(0, Math.min(found.length - 1, next)));
  event.preventDefault();
});

function focusRow(at) {
  list.querySelector("[tabindex='0']")?.setAttribute("tabindex", -1);
  const element = list.children[at];
  element?.setAttribute("tabindex", 0);
  element?.focus();
}

// ---- one rollout ----

const dialog = document.getElementById("rollout");
let current = 0;

function shown(value) { return typeof value === "string" ? value : JSON.stringify(value); }

function fields(values) {
  return make("dl", {}, ...Object.entries(values).flatMap(([name, value]) => [make("dt", {}, name), make("dd", {}, shown(value))]));
}

function facts(...parts) {
  const kept = parts.filter(Boolean);
  return make("p", { class: "facts" }, kept.join(" · "));
}

/** `focus` is the button of the bar that has the focus then, or the one to close if it cannot. */
function open(at, focus = ".close") {
  current = at;
  const rollout = found[at];
  dialog.replaceChildren(bar(at), body(rollout));
  if (!dialog.open) dialog.showModal();
  dialog.scrollTop = 0;
  (dialog.querySelector(`.bar ${focus}:enabled`) ?? dialog.querySelector(".close")).focus({ preventScroll: true });
}

function bar(at) {
  const step = (name, label, spoken, to) => {
    const button = make("button", { type: "button", class: name, "aria-label": spoken }, label);
    button.disabled = to < 0 || to >= found.length;
    button.addEventListener("click", () => open(to, `.${name}`));
    return button;
  };
  const before = step("before", "←", "Rollout before", at - 1);
  const next = step("next", "→", "Next rollout", at + 1);
  const close = make("button", { type: "button", class: "close" }, "Close");
  close.addEventListener("click", () => dialog.close());
  return make("div", { class: "bar" }, make("p", {}, `${at + 1} of ${found.length}`), before, next, close);
}

function body(rollout) {
  const title = make("h2", { id: "rollout-title" }, rollout.id);
  return make("div", { class: "body" },
    title,
    facts(place(rollout), `reward ${number(rollout.reward)}`, said(rollout.status), rollout.source === "student" ? "" : rollout.source),
    input(rollout),
    route(rollout),
    ...rollout.calls.map((call) => callCard(rollout, call)),
    result(rollout));
}

function input(rollout) {
  return make("div", { class: "card input" },
    make("h3", {}, "Input"), facts(`example ${rollout.example}`, rollout.prompt === rollout.example ? "" : `prompt ${rollout.prompt}`),
    fields(rollout.inputs),
    ...(Object.keys(rollout.labels).length ? [make("h4", {}, "What the metric knows, and the program does not"), fields(rollout.labels)] : []),
    ...(rollout.hints.length ? [make("h4", {}, "Hints in the prompt, the oldest first"), hints(rollout.hints)] : []),
    attempts(rollout.attempts));
}

function hints(all) {
  return make("ol", { class: "chain" }, ...all.map((hint) => make("li", {}, hint.text, facts(`written for ${hint.parent}`, `placed in ${hint.place}`))));
}

function attempts(all) {
  if (!all.length) return null;
  return make("details", {}, make("summary", {}, `What the teacher tried (${all.length})`),
    make("ol", { class: "chain" }, ...all.map((one) => make("li", {}, one.text || "no hint",
      facts(`round ${one.round}`, `for ${one.prompt}`, `try ${one.number}`, said(one.end), one.reason, one.teacher)))));
}

function route(rollout) {
  if (!rollout.score) return null;
  return make("div", { class: "card route" }, make("h3", {}, "Score and route"),
    facts(`EPS ${number(rollout.score.value)}`, `accuracy ${number(rollout.score.mean)} over ${rollout.score.n} rollouts`,
      `verdict: ${said(rollout.verdict)}`, rollout.action ? `then: ${rollout.action}` : ""));
}

function callCard(rollout, call) {
  const module = form.elements.module.value;
  const beginning = data.beginnings[call.beginning];
  return make("div", { class: `card call${module && module !== call.module ? " off" : ""}`, "data-module": call.module },
    make("h3", {}, call.module, call.index ? ` (call ${call.index + 1})` : ""),
    facts(`${call.tokens_in} tokens in, ${call.tokens_out} out`, call.images ? `${call.images} images` : "",
      call.finish === "length" ? "cut off at max_tokens" : "", call.parsed ? "" : "could not be read",
      call.logprob === null ? "" : `mean log-probability ${number(call.logprob, 2)}`, `T ${call.temperature}`, `policy ${call.policy.slice(0, 12)}`),
    make("h4", {}, "Prompt"),
    beginning ? make("details", {}, make("summary", {}, "How all prompts of this module begin here"), make("pre", {}, beginning)) : null,
    make("pre", { class: "prompt" }, call.prompt),
    make("h4", {}, "Answer"),
    answer(call),
    ...call.groups.map((at) => groupTable(rollout, data.groups[at], call.index)));
}

function answer(call) {
  if (!call.pieces.length) return make("pre", { class: "answer" }, call.answer);
  return make("pre", { class: "answer" }, ...call.pieces.map((piece, at) => {
    const logprob = call.logprobs[at];
    const rare = logprob !== null && logprob < Math.log(0.1);
    const token = make("span", { class: `token${at % 2 ? " odd" : ""}${rare ? " rare" : ""}` }, piece);
    if (logprob !== null) token.title = `probability ${Math.exp(logprob).toFixed(3)}`;
    return token;
  }));
}

function groupTable(rollout, group, index) {
  const rows = group.members.map((member) => {
    const self = member.id === rollout.id && member.index === index;
    return make("tr", self ? { class: "self" } : {}, make("td", {}, number(member.reward, 2)), make("td", { class: "advantage" }, signed(member.advantage)),
      make("td", {}, number(member.weight, 2)), make("td", { class: "text" }, member.filled ? "stands in" : "", self ? "this rollout" : other(rollout, member)));
  });
  const head = ["reward", "advantage", "weight", ""].map((name) => make("th", { scope: "col" }, name));
  return make("div", { class: "group" },
    make("h4", {}, `Group of ${group.members.length}: mean ${number(group.mean)}, deviation ${number(group.std)}${group.all_equal ? "; all equal, so left out of the update" : ""}`),
    make("table", { class: "members" }, make("thead", {}, make("tr", {}, ...head)), make("tbody", {}, ...rows)));
}

/** A button that opens another member's rollout, when the page has it. */
function other(rollout, member) {
  const { strategy, step } = setOf(rollout);
  const at = byKey.get(`${strategy}\n${step}\n${member.id}`);
  if (at === undefined) return "";
  const button = make("button", { type: "button" }, "open");
  button.addEventListener("click", () => {
    if (!found.includes(data.rollouts[at])) found = data.rollouts;
    open(found.indexOf(data.rollouts[at]));
  });
  return button;
}

function result(rollout) {
  const channels = Object.entries(rollout.channels).map(([name, value]) => `${name} ${number(value)}`);
  return make("div", { class: "card result" }, make("h3", {}, "Output and reward"),
    make("p", { class: "facts" }, make("b", {}, `reward ${number(rollout.reward)}`), ` · ${[said(rollout.status), ...channels].join(" · ")}`),
    Object.keys(rollout.output).length ? fields(rollout.output) : null,
    rollout.error ? make("pre", { class: "error" }, rollout.error) : null,
    ...rollout.groups.map((at) => groupTable(rollout, data.groups[at], -1)));
}

dialog.addEventListener("keydown", (event) => {
  if (event.altKey || event.ctrlKey || event.metaKey) return; // the browser's own, such as back
  const to = { ArrowLeft: current - 1, ArrowRight: current + 1 }[event.key];
  if (to !== undefined && found[to]) open(to);
});

dialog.addEventListener("click", (event) => { if (event.target === dialog) dialog.close(); });

dialog.addEventListener("close", () => {
  if (found.length !== list.querySelectorAll(".row").length) filter();
  focusRow(Math.min(current, found.length - 1));
});

// ---- begin ----

form.addEventListener("input", filter);
form.addEventListener("submit", (event) => event.preventDefault());
form.addEventListener("reset", () => setTimeout(filter));
for (const button of document.querySelectorAll("button.see")) button.addEventListener("click", () => see(button.dataset));
fillFilters();
filter();
draw();
