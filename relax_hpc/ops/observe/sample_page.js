const { about, samples } = JSON.parse(document.getElementById("data").textContent);
const PAGE_SIZE = 50;
const field = (id) => document.getElementById(id);
let matching = [], shown = 0;

function choices(id, values, all) {
  for (const [value, text] of [["", all], ...values.map((value) => [value, value])]) {
    const option = element("option", "", text);
    option.value = value;
    field(id).append(option);
  }
}

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
