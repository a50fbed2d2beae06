"use strict";
// Texts were written by a model. They are inserted by textContent only, never as markup.
const { about, samples } = JSON.parse(document.getElementById("data").textContent);
const PAGE_SIZE = 50;
const field = (id) => document.getElementById(id);
let matching = [], shown = 0;

function element(name, className, text) {
  const node = document.createElement(name);
  if (className) node.className = className;
  if (text !== undefined) node.textContent = text;
  return node;
}

function choices(id, values, all) {
  for (const [value, text] of [["", all], ...values.map((value) => [value, value])]) {
    const option = element("option", "", text);
    option.value = value;
    field(id).append(option);
  }
}

const setOf = (sample) => (sample.eval === undefined ? "training" : `evaluation ${sample.eval}`);
const fateOf = (sample) => sample.fate.split(" ")[0];
const distinct = (values) => [...new Set(values)].sort();

// Function that tests whether a number is within two fields; an empty field sets no limit.
function range(minimumId, maximumId) {
  const low = field(minimumId).value, high = field(maximumId).value;
  return (value) => (low === "" || value >= Number(low)) && (high === "" || value <= Number(high));
}

// Function that tests whether a sample matches the filters.
function sampleFilter() {
  const isStep = range("first", "last"), isReward = range("least", "most");
  const text = field("text").value.toLowerCase();
  const isSelected = (id, value) => field(id).value === "" || field(id).value === value;
  return (sample) => isStep(sample.step) && isReward(sample.reward) &&
    isSelected("set", setOf(sample)) && isSelected("reason", sample.finish_reason) &&
    isSelected("fate", fateOf(sample)) &&
    (!text || sample.prompt.toLowerCase().includes(text) ||
      sample.response.toLowerCase().includes(text));
}

const ORDERS = {
  newest: (a, b) => b.step - a.step,
  oldest: (a, b) => a.step - b.step,
  best: (a, b) => b.reward - a.reward,
  worst: (a, b) => a.reward - b.reward,
};

const number = (value) => String(Math.round(value * 1e4) / 1e4);

function picture(medium) {
  const figure = element("figure", "", ""), caption = `${medium.kind}, ${medium.about}`;
  if ((medium.picture || "").startsWith("data:image/jpeg;base64,")) {
    const image = element("img");
    image.src = medium.picture;
    image.alt = caption;
    figure.append(image);
  }
  figure.append(element("figcaption", "about", caption));
  return figure;
}

// Texts about a sample or a turn: tokens, trained tokens if it differs, versions that sampled them.
function tokenTexts(record) {
  const texts = [`${record.tokens ?? "?"} tokens`];
  if (record.trained !== undefined && record.trained !== record.tokens) {
    texts.push(`${record.trained} trained on`);
  }
  return [...texts, ...(record.versions || [])];
}

function turnSection(turn) {
  const section = element("section", turn.by === "policy" ? "policy" : "environment");
  section.append(element("h3", "", [turn.by, ...tokenTexts(turn)].join(" \u00b7 ")));
  for (const medium of turn.media || []) section.append(picture(medium));
  section.append(element("pre", "", turn.text.replace(/^\n+|\n+$/g, "")));
  for (const call of turn.tool_calls || []) {
    const text = call.error ?? `${call.name} ${JSON.stringify(call.arguments)}`;
    section.append(element("div", call.error ? "call bad" : "call", `call: ${text}`));
  }
  return section;
}

function card(sample) {
  const article = element("article"), title = element("h2");
  title.append(`${setOf(sample)}, ${sample.eval === undefined ? "step" : "version"} ${sample.step} `);
  const style = sample.reward > 0 ? "good" : "bad";
  title.append(element("span", sample.reward ? `reward ${style}` : "reward ", `reward ${number(sample.reward)}`));
  const components = Object.entries(sample.components || {}).map(([name, value]) => `${name} ${number(value)}`);
  const values = [...components, sample.finish_reason, ...tokenTexts(sample), sample.fate, sample.id,
    sample.prompt_id === sample.id ? "" : sample.prompt_id];
  article.append(title, element("div", "about", values.filter(Boolean).join(" \u00b7 ")));
  for (const medium of sample.media || []) article.append(picture(medium));
  const appendText = (name) => {
    if (sample[name]) article.append(element("h3", "", name), element("pre", "", sample[name]));
  };
  appendText("prompt");
  if (sample.turns) article.append(...sample.turns.map(turnSection));
  else appendText("response");
  appendText("answer");
  if (Object.keys(sample.environment || {}).length) {
    article.append(element("h3", "", "outcome of the environment"));
    article.append(element("pre", "", JSON.stringify(sample.environment)));
  }
  return article;
}

function showMore() {
  field("samples").append(...matching.slice(shown, shown + PAGE_SIZE).map(card));
  shown = Math.min(matching.length, shown + PAGE_SIZE);
  field("more").hidden = shown === matching.length;
}

function show() {
  matching = samples.filter(sampleFilter()).sort(ORDERS[field("order").value]);
  const mean = matching.reduce((sum, sample) => sum + sample.reward, 0) / matching.length;
  field("count").textContent = `${matching.length} of ${samples.length} episodes` +
    (matching.length ? `, mean reward ${number(mean)}` : "");
  field("samples").replaceChildren();
  shown = 0;
  showMore();
}

document.title = `Samples of ${about.run}`;
field("about").textContent = `${about.run}${about.left_out ? `, ${about.left_out}` : ""}`;
choices("set", distinct(samples.map(setOf)), "all");
choices("reason", distinct(samples.map((sample) => sample.finish_reason)), "any");
choices("fate", distinct(samples.map(fateOf)), "any");
// A link such as page.html#reason=length&least=0.5 sets filters.
for (const [name, value] of new URLSearchParams(location.hash.slice(1))) {
  if (field("filters").elements[name]) field("filters").elements[name].value = value;
}
field("filters").addEventListener("input", show);
field("filters").addEventListener("submit", (event) => event.preventDefault());
field("more").addEventListener("click", showMore);
show();
