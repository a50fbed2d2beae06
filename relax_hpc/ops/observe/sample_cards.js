"use strict";
// Cards of samples, for every page that shows samples.
// Texts were written by a model. They are inserted by textContent only, never as markup.
function element(name, className, text) {
  const node = document.createElement(name);
  if (className) node.className = className;
  if (text !== undefined) node.textContent = text;
  return node;
}

const setOf = (sample) => (sample.eval === undefined ? "training" : `evaluation ${sample.eval}`);
const fateOf = (sample) => (sample.fate ?? "").split(" ")[0];

// Block of a text of any language. Its direction follows its first letter, whatever stands around it.
function textBlock(text) {
  const block = element("pre", "", text);
  block.dir = "auto";
  return block;
}

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
  section.append(textBlock(turn.text.replace(/^\n+|\n+$/g, "")));
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
    if (sample[name]) article.append(element("h3", "", name), textBlock(sample[name]));
  };
  appendText("prompt");
  if (sample.turns) article.append(...sample.turns.map(turnSection));
  else appendText("response");
  appendText("answer");
  if (Object.keys(sample.environment || {}).length) {
    article.append(element("h3", "", "outcome of the environment"));
    article.append(textBlock(JSON.stringify(sample.environment)));
  }
  return article;
}
