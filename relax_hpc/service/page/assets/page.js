// Texts may come from models and other programs. They are inserted by textContent only, never as markup.
const POLL_MS = 5000, SAMPLES_MS = 60000, STALE_S = 30;
const COLOURS = ["#3b7cc4", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9"];
const field = (id) => document.getElementById(id);
const data = JSON.parse(field("data").textContent);
const plots = new Map();
let answered = Date.now();

// Date and time in the time zone of the browser, as 2026-11-27 19:04:05.
function localTime(seconds) {
  const time = new Date(seconds * 1000), two = (value) => String(value).padStart(2, "0");
  if (isNaN(time)) return "";
  const day = [time.getFullYear(), two(time.getMonth() + 1), two(time.getDate())].join("-");
  return `${day} ${[time.getHours(), time.getMinutes(), time.getSeconds()].map(two).join(":")}`;
}

function setTone(node, tone) {
  node.classList.remove("good", "busy", "bad");
  node.classList.add(tone);
}

// Whether the value of a part of the page differs from the one that is shown. Unchanged parts stay,
// so that a selection or a scrolled list is kept.
const shownValues = new Map();
function isNew(id, value) {
  const text = JSON.stringify(value);
  if (shownValues.get(id) === text) return false;
  shownValues.set(id, text);
  return true;
}

function showFigures(id, figures) {
  field(id).replaceChildren(...figures.map((figure) => {
    const group = element("div"), value = element("dd");
    value.append(element("div", "value", figure.value), element("div", "note", figure.note));
    group.append(element("dt", "", figure.name), value);
    return group;
  }));
}

function showTable(id, table, empty) {
  if (!isNew(id, table)) return;
  if (!table.rows.length) {
    field(id).replaceChildren(element("p", "dim", empty));
    return;
  }
  const node = element("table"), head = element("thead"), titles = element("tr"), body = element("tbody");
  titles.append(...table.columns.map((column) => element("th", "", column)));
  head.append(titles);
  for (const row of table.rows) {
    const line = element("tr");
    row.cells.forEach((text, index) => {
      const cell = element("td"), column = table.columns[index];
      cell.dataset.column = column;
      if (text) cell.append(element("span", column === "state" ? `state ${row.tone}` : "", text));
      line.append(cell);
    });
    body.append(line);
  }
  node.append(head, body);
  field(id).replaceChildren(node);
}

function showWaits(waits) {
  if (!isNew("waits", waits)) return;
  const percent = (share) => `${Math.round(100 * share)} %`;
  field("waits-note").textContent = waits.roles.length
    ? `Time of each role in the last ${waits.steps} steps`
    : "Known after the first steps.";
  const rows = waits.roles.map(({ role, parts }) => {
    const row = element("div", "role"), bar = element("div", "parts");
    for (const part of parts) {
      const piece = element("div", part.waits ? "wait" : "");
      piece.style.width = `${100 * part.share}%`;
      piece.title = `${part.name} ${percent(part.share)}`;
      bar.append(piece);
    }
    const text = parts.map((part) => `${part.name} ${percent(part.share)}`).join(" \u00b7 ");
    row.append(element("div", "", role), bar, element("p", "", text));
    return row;
  });
  if (rows.length) {
    const key = element("p", "key");
    key.append(element("i", "work"), "works", element("i", "wait"), "waits");
    rows.push(key);
  }
  field("waits").replaceChildren(...rows);
}

function showEvents(events) {
  if (!isNew("events", events)) return;
  field("events").replaceChildren(...events.map((event) => {
    const item = element("li"), time = element("time", "", localTime(event.time));
    item.append(time, element("span", "", event.text));
    return item;
  }));
  if (!events.length) field("events").append(element("li", "dim", "None yet."));
}

// uPlot takes one array of x for all series. A curve has null at the steps of other curves only.
function alignCurves(curves) {
  const banded = curves.length === 1 && curves[0].low;
  const series = curves.flatMap((curve) => (banded ? [curve.mean, curve.low, curve.high] : [curve.mean])
    .map((values) => [curve.steps, values]));
  return { banded, columns: series.length ? uPlot.join(series) : [[]] };
}

function compact(value) {
  return value === null || value === undefined ? "\u2013" : String(Number(value.toPrecision(4)));
}

// Range of the y axis: a margin of 5 %, and not below 0 if no value is.
function yRange(_, low, high) {
  if (low === null || low === undefined) return [0, 1];
  const margin = low === high ? Math.abs(high) * 0.1 || 1 : (high - low) * 0.05;
  return [low >= 0 ? Math.max(0, low - margin) : low - margin, high + margin];
}

function plotOptions(chart, banded, width, legend) {
  const style = getComputedStyle(document.documentElement);
  const dim = style.getPropertyValue("--dim"), line = style.getPropertyValue("--line");
  const axis = { font: "12px system-ui, sans-serif", grid: { stroke: line, width: 1 }, stroke: dim, ticks: { show: false } };
  const series = [{}];
  chart.curves.forEach((curve, index) => {
    const stroke = COLOURS[index % COLOURS.length], points = { show: curve.steps.length < 40, size: 5 };
    series.push({ points, scale: "y", spanGaps: true, stroke, width: 1.5 });
    if (banded) series.push({ points: { show: false }, width: 0 }, { points: { show: false }, width: 0 });
  });
  const showLegend = (plot) => legend(plot.cursor.idx, plot.data);
  return {
    axes: [{ ...axis, size: 28, space: 60, values: (_, steps) => steps.map((step) => (Number.isInteger(step) ? step.toLocaleString("en") : "")) },
      { ...axis, size: 52, values: (_, values) => values.map(compact) }],
    bands: banded ? [{ fill: `${COLOURS[0]}30`, series: [3, 2] }] : [],
    cursor: { drag: { x: true, y: false }, points: { size: 7 }, y: false },
    height: 200,
    hooks: { ready: [showLegend], setCursor: [showLegend], setData: [showLegend] },
    legend: { show: false },
    padding: [10, 18, 0, 0],
    scales: { x: { time: false }, y: { range: yRange } },
    series,
    width,
  };
}

// Legend of a chart: values at the cursor, or the newest ones.
function legendWriter(node, chart, banded) {
  return (index, columns) => {
    const steps = columns[0], at = index ?? null;
    const parts = chart.curves.map((curve, number) => {
      const column = columns[banded ? 1 : number + 1] ?? [];
      const value = at === null ? curve.mean.at(-1) : column[at];
      const item = element("span"), mark = element("i");
      mark.style.background = COLOURS[number % COLOURS.length];
      item.append(mark, `${curve.name} ${compact(value)}`);
      if (banded && at !== null) item.append(` (${compact(columns[2][at])} to ${compact(columns[3][at])})`);
      return item;
    });
    const step = at === null ? chart.curves[0].steps.at(-1) : steps[at];
    node.replaceChildren(element("span", "", `step ${step ?? "\u2013"}`), ...parts);
    if (chart.left_out.length) node.append(element("span", "", `not shown: ${chart.left_out.join(", ")}`));
  };
}

function showCharts(charts) {
  const titles = charts.map((chart) => [chart.title, ...chart.curves.map((curve) => curve.name), !!chart.curves[0].low].join("\n"));
  if (titles.join("\n\n") === plots.get("titles")) {
    charts.forEach((chart, index) => plots.get(index).update(chart));
    return;
  }
  drawCharts(charts);
  plots.set("titles", titles.join("\n\n"));
}

function drawCharts(charts) {
  for (const drawn of plots.values()) drawn.plot?.destroy();
  plots.clear();
  const nodes = charts.map((chart) => {
    const node = element("div", "chart"), title = element("h2", "", chart.title);
    title.append(element("small", "", chart.unit));
    const canvas = element("div");
    canvas.role = "img";
    canvas.ariaLabel = `${chart.title}, ${chart.unit}, over steps; the newest values follow`;
    node.append(title, canvas, element("div", "legend"));
    return node;
  });
  // All charts are in the page before one is drawn, so that each has its final width.
  field("charts").replaceChildren(...nodes);
  charts.forEach((chart, index) => {
    const [, canvas, legend] = nodes[index].children;
    const { banded, columns } = alignCurves(chart.curves);
    const writer = { write: legendWriter(legend, chart, banded) };
    const options = plotOptions(chart, banded, canvas.clientWidth, (...values) => writer.write(...values));
    const plot = new uPlot(options, columns, canvas);
    const update = (newer) => {
      writer.write = legendWriter(legend, newer, banded);
      setColumns(plot, alignCurves(newer.curves).columns);
    };
    plots.set(index, { canvas, plot, update });
  });
}

function showState(state) {
  const { run, progress } = state;
  document.title = `${run.name}: ${run.state}`;
  field("name").textContent = run.name;
  field("state").textContent = run.state;
  setTone(field("state"), run.tone);
  field("folder").textContent = `${run.folder} \u00b7 layout ${run.layout}`;
  const share = progress.steps ? Math.min(1, progress.trained / progress.steps) : 0;
  field("bar").style.width = `${100 * share}%`;
  field("steps").textContent = `step ${progress.trained.toLocaleString("en")} of ${progress.steps.toLocaleString("en")} \u00b7 ${Math.floor(100 * share)} %`;
  field("notices").replaceChildren(...state.notices.map((notice) => {
    const item = element("li", notice.tone);
    item.append(element("span", "", notice.text));
    return item;
  }));
  showFigures("figures", state.figures);
  showCharts(state.charts);
  showWaits(state.waits);
  showFigures("queue", state.queue);
  showTable("groups", state.groups, "None yet.");
  showTable("engines", state.engines, "Known while the hub of the run answers.");
  showTable("operations", state.operations, "None.");
  showEvents(state.events);
}

function showSamples(samples) {
  const node = field("samples");
  const ids = samples.map((sample) => `${sample.id} ${sample.time}`).join("\n");
  if (samples.length && ids === node.dataset.ids) return;
  node.dataset.ids = ids;
  node.replaceChildren(...samples.map(card));
  if (!samples.length) node.append(element("p", "dim", "None yet."));
}

async function fetchJson(path) {
  const response = await fetch(path, { cache: "no-store", credentials: "same-origin" });
  // The session has expired: the page is replaced by the form for the token.
  if (response.status === 401) location.reload();
  if (!response.ok) throw new Error(`status ${response.status}`);
  return response.json();
}

async function repeat(path, show, wait_ms) {
  // A tab in the background asks nothing.
  if (document.hidden) {
    document.addEventListener("visibilitychange", () => repeat(path, show, wait_ms), { once: true });
    return;
  }
  try {
    const answer = await fetchJson(path);
    show(answer);
    // When the server took the values. Its clock may differ from the browser's.
    if (answer.state) answered = Date.now() - 1000 * answer.age_s;
  } catch (error) {
    console.warn(`${path}: ${error.message}`);
  }
  setTimeout(repeat, wait_ms, path, show, wait_ms);
}

function showAge() {
  const age_s = Math.round((Date.now() - answered) / 1000);
  field("fresh").textContent = age_s > STALE_S ? `last answer ${age_s} s ago` : "live";
  field("fresh").className = age_s > STALE_S ? "stale" : "";
}

// New values of a plot. A part that a person has enlarged stays enlarged.
function setColumns(plot, columns) {
  const { min, max } = plot.scales.x, steps = plot.data[0];
  const isEnlarged = min > steps[0] || max < steps.at(-1);
  plot.batch(() => {
    plot.setData(columns);
    if (isEnlarged) plot.setScale("x", { min, max });
  });
}

function redraw() {
  for (const drawn of plots.values()) drawn.plot?.setSize({ height: 200, width: drawn.canvas.clientWidth });
}

if (data.live) {
  field("logout").hidden = false;
  repeat("page/state", (answer) => showState(answer.state), POLL_MS);
  repeat("page/samples", (answer) => showSamples(answer.samples), SAMPLES_MS);
  showAge();
  setInterval(showAge, 1000);
} else {
  showState(data.state);
  showSamples(data.samples);
  field("fresh").textContent = `as of ${localTime(data.state.run.time)}`;
}
let resizing = 0;
addEventListener("resize", () => {
  clearTimeout(resizing);
  resizing = setTimeout(redraw, 100);
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
  // The next state of a live run draws its charts again.
  plots.delete("titles");
  if (!data.live) showCharts(data.state.charts);
});
