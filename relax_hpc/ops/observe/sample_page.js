"use strict";
// Texts are a model's: they reach the page through textContent alone, never as markup.
const { about, samples } = JSON.parse(document.getElementById("data").textContent);
const PIECE = 50;
const field = (id) => document.getElementById(id);
let found = [], shown = 0;

function element(name, className, text) {
  const made = document.createElement(name);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text;
  return made;
}

function choices(id, values, all) {
  for (const [value, text] of [["", all], ...values.map((one) => [one, one])]) {
    const option = element("option", "", text);
    option.value = value;
    field(id).append(option);
  }
}

const setOf = (sample) => (sample.eval === undefined ? "training" : `evaluation ${sample.eval}`);
const distinct = (values) => [...new Set(values)].sort();

function span(first, last) {
  const [low, high] = [field(first).value, field(last).value];
  return (value) => (low === "" || value >= Number(low)) && (high === "" || value <= Number(high));
}

function fits() {
  const step = span("first", "last"), reward = span("least", "most"), text = field("text").value.toLowerCase();
  const chosen = (id, value) => field(id).value === "" || field(id).value === value;
  return (one) => step(one.step) && reward(one.reward) && chosen("set", setOf(one)) &&
    chosen("reason", one.finish_reason) && chosen("fate", one.fate.split(" ")[0]) &&
    (!text || one.prompt.toLowerCase().includes(text) || one.response.toLowerCase().includes(text));
}

const ORDERS = {
  newest: (a, b) => b.step - a.step,
  oldest: (a, b) => a.step - b.step,
  best: (a, b) => b.reward - a.reward,
  worst: (a, b) => a.reward - b.reward,
};

const number = (value) => String(Math.round(value * 1e4) / 1e4);

function picture(medium) {
  const made = element("figure", "", ""), words = `${medium.kind}, ${medium.about}`;
  if ((medium.picture || "").startsWith("data:image/jpeg;base64,")) {
    const image = element("img");
    image.src = medium.picture;
    image.alt = words;
    made.append(image);
  }
  made.append(element("figcaption", "about", words));
  return made;
}

// What is known of a sample or of a turn: its tokens, how many are trained on where not all are, and who sampled them.
function known(part) {
  const some = part.trained !== undefined && part.trained !== part.tokens;
  return [`${part.tokens ?? "?"} tokens`, ...(some ? [`${part.trained} trained on`] : []), ...(part.versions || [])];
}

function turn(one) {
  const policy = one.by === "policy", made = element("section", policy ? "policy" : "environment");
  made.append(element("h3", "", [one.by, ...known(one)].join(" \u00b7 ")));
  for (const medium of one.media || []) made.append(picture(medium));
  made.append(element("pre", "", one.text.replace(/^\n+|\n+$/g, "")));
  for (const call of one.tool_calls || []) {
    const words = call.error ?? `${call.name} ${JSON.stringify(call.arguments)}`;
    made.append(element("div", call.error ? "call bad" : "call", `call: ${words}`));
  }
  return made;
}

function card(sample) {
  const made = element("article"), title = element("h2");
  title.append(`${setOf(sample)}, ${sample.eval === undefined ? "step" : "version"} ${sample.step} `);
  const tone = sample.reward > 0 ? "good" : sample.reward < 0 ? "bad" : "";
  title.append(element("span", `reward ${tone}`, `reward ${number(sample.reward)}`));
  const parts = Object.entries(sample.components || {}).map(([name, value]) => `${name} ${number(value)}`);
  const told = [...parts, sample.finish_reason, ...known(sample), sample.fate, sample.id,
    sample.prompt_id === sample.id ? "" : sample.prompt_id];
  made.append(title, element("div", "about", told.filter(Boolean).join(" \u00b7 ")));
  for (const medium of sample.media || []) made.append(picture(medium));
  const texts = (names) => names.filter((name) => sample[name]).flatMap((name) =>
    [element("h3", "", name), element("pre", "", sample[name])]);
  made.append(...texts(["prompt"]), ...(sample.turns ? sample.turns.map(turn) : texts(["response"])), ...texts(["answer"]));
  if (Object.keys(sample.environment || {}).length) {
    made.append(element("h3", "", "last words of the environment"), element("pre", "", JSON.stringify(sample.environment)));
  }
  return made;
}

function more() {
  field("samples").append(...found.slice(shown, shown + PIECE).map(card));
  shown = Math.min(found.length, shown + PIECE);
  field("more").hidden = shown === found.length;
}

function show() {
  found = samples.filter(fits()).sort(ORDERS[field("order").value]);
  const mean = found.reduce((sum, one) => sum + one.reward, 0) / found.length;
  field("count").textContent = `${found.length} of ${samples.length} episodes` +
    (found.length ? `, mean reward ${number(mean)}` : "");
  field("samples").replaceChildren();
  shown = 0;
  more();
}

document.title = `Samples of ${about.run}`;
field("about").textContent = `${about.run}${about.left_out ? `, ${about.left_out}` : ""}`;
choices("set", distinct(samples.map(setOf)), "all");
choices("reason", distinct(samples.map((one) => one.finish_reason)), "any");
choices("fate", distinct(samples.map((one) => one.fate.split(" ")[0])), "any");
// page.html#reason=length&least=0.5 begins so.
for (const [name, value] of new URLSearchParams(location.hash.slice(1))) {
  if (field("filters").elements[name]) field("filters").elements[name].value = value;
}
field("filters").addEventListener("input", show);
field("filters").addEventListener("submit", (event) => event.preventDefault());
field("more").addEventListener("click", more);
show();
