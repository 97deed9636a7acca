"use strict";
// What is no chart: the head, tables of scores, bars.

function drawHead(data) {
  const runs = data.runs,
    finished = runs.filter((run) => run.state === "finished").length;
  document.title = `${data.tasks.join(", ")} · report`;
  at("title").textContent = data.tasks.join(", ");
  at("lede").textContent =
    `${counted(runs.length, "run")} of ${counted(data.methods.length, "method")} by ${data.objective}` +
    (data.tasks.length > 1 ? `, on ${data.tasks.length} tasks` : "");
  const first = data.ranking["*"].find((method) => data.methods.includes(method));
  const best = data.per_task.find((row) => row.method === first);
  const steps = runs.reduce((sum, run) => sum + (run.env_steps || 0), 0);
  const one = data.tasks.length === 1;
  fill(
    "tiles",
    one &&
      tile(
        interval(best.iqm),
        data.methods.length > 1 ? `best: ${brief(best.method)}` : `IQM of ${counted(best.seeds, "seed")}`,
      ),
    tile(`${finished} / ${runs.length}`, "runs finished"),
    tile(short(steps), "environment steps in all"),
    data.failures.length
      ? tile(String(data.failures.length), "unfinished or failed")
      : tile(String(data.methods.length), data.methods.length > 1 ? "methods" : "method"),
  );
  const advice = data.recommendation;
  fill("recommendation", advice.method && [h("b", {}, "Recommended: "), `${advice.method}: ${advice.why}.`]);
  const lines = [...data.notes, ...data.cautions];
  if (data.points === 0) lines.push("so many runs that this page has their means alone: report.json has all curves");
  fill(
    "notes",
    lines.length > 0 &&
      h(
        "details",
        { class: "cautions", open: printing() || lines.join("").length <= 500 },
        h("summary", {}, `Know before believing (${lines.length})`),
        h(
          "ul",
          {},
          lines.map((text) => h("li", {}, text)),
        ),
      ),
  );
}
const tile = (value, text) => h("div", { class: "tile" }, h("b", {}, value), h("span", {}, text));

function table(header, rows) {
  const cell = (value, name) => {
    const inside = value instanceof Node ? value : String(value ?? "–");
    return h("td", { class: name || null }, inside);
  };
  return h(
    "table",
    {},
    h(
      "thead",
      {},
      h(
        "tr",
        {},
        header.map((name, i) =>
          h("th", { scope: "col", class: Array.isArray(rows[0]?.[i]) ? rows[0][i][1] : null }, name),
        ),
      ),
    ),
    h(
      "tbody",
      {},
      rows.map((row) =>
        h(
          "tr",
          {},
          row.map((value) => (Array.isArray(value) ? cell(...value) : cell(value))),
        ),
      ),
    ),
  );
}
const named = (data, method) =>
  h(
    "span",
    { title: method },
    swatch(data, method),
    ` ${brief(method)}${method === data.against ? " (reference)" : ""}`,
  );

// ---------------------------------------------------------------- scores

function range(low, high, entry, color, dots = []) {
  const place = (x) => (high > low ? (100 * (x - low)) / (high - low) : 50);
  const around =
    entry.low === null
      ? null
      : h("b", {
          style: `left:${place(entry.low)}%;width:${Math.max(place(entry.high) - place(entry.low), 0.6)}%;background:${color}`,
        });
  return h(
    "span",
    { class: "range", role: "img", "aria-label": interval(entry) },
    h("i"),
    around,
    dots.map((x) => h("u", { style: `left:${place(x)}%;background:${color}` })),
    h("em", { style: `left:${place(entry.value)}%;background:${color}` }),
  );
}

function drawScores(data, state) {
  const rows = data.per_task.filter((row) => row.task === state.task),
    dots = new Map();
  if (state.task !== "*") {
    for (const run of data.runs)
      if (run.task === state.task && known(run.last)) dots.set(run.method, [...(dots.get(run.method) || []), run.last]);
    const all = rows.flatMap((row) => [row.last.least, row.last.most, row.iqm.low, row.iqm.high]).filter(known);
    const [low, high] = [Math.min(...all), Math.max(...all)];
    const order = data.ranking[state.task];
    rows.sort((a, b) => order.indexOf(a.method) - order.indexOf(b.method));
    const made = table(
      ["method", `${number(low)} to ${number(high)}`, "IQM [95 %]", "median", "mean", "best", "seeds"],
      rows.map((row) => [
        named(data, row.method),
        range(low, high, row.iqm, look(data, row.method).color, dots.get(row.method)),
        [interval(row.iqm), "number"],
        [number(row.median.value), "number"],
        [number(row.mean.value), "number"],
        [number(row.best.most), "number"],
        [row.seeds, "number"],
      ]),
    );
    fill("score-table", h("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Scores" }, made));
  } else fill("score-table");
  drawAggregate(data);
  drawImprovement(data);
}
function drawAggregate(data) {
  const found = data.aggregate.rows || [];
  if (!found.length) return fill("aggregate");
  const names = { iqm: "IQM", median: "median", mean: "mean", optimality_gap: "optimality gap" };
  const rows = found.map((row) => [
    named(data, row.method),
    [row.runs, "number"],
    ...Object.keys(names).map((key) => [interval(row[key]), "number"]),
  ]);
  fill(
    "aggregate",
    h("h3", {}, `Over ${counted(data.aggregate.tasks.length, "task")}, normalised`),
    h("div", { class: "scroll" }, table(["method", "runs", ...Object.values(names)], rows)),
  );
}
function drawImprovement(data) {
  if (!data.improvement.length) return fill("improvement");
  const rows = data.improvement.map((row) => [
    named(data, row.method),
    named(data, row.over),
    range(0, 1, row, variable("accent")),
    [interval(row), "number"],
  ]);
  fill(
    "improvement",
    h("h3", {}, "Probability that a run of one is better than one of the other"),
    h("div", { class: "scroll" }, table(["of", "over", "0 to 1; a half is no difference", "probability"], rows)),
  );
}
function drawImportance(data, algo) {
  const rows = data.hyper_parameters
    .filter((row) => row.algo === algo && row.share !== null)
    .map((row) => [
      h("code", {}, row.key),
      h(
        "span",
        {
          class: "share",
          role: "img",
          "aria-label": `${Math.round(100 * row.share)} %, by chance ${Math.round(100 * row.by_chance)} %`,
        },
        h("b", { style: `width:${100 * row.share}%` }),
        h("em", { style: `left:${100 * Math.min(row.by_chance, 1)}%` }),
      ),
      [`${Math.round(100 * row.share)} %`, "number"],
      [number(row.correlation), "number"],
      row.recommended,
      [row.values, "number"],
    ]);
  fill(
    "importance",
    rows.length > 0 && [
      h("h3", {}, "What matters"),
      h(
        "div",
        { class: "scroll" },
        table(["key", "share of the ranks' variance", "", "rank correlation", "recommended", "values"], rows),
      ),
      h(
        "p",
        { class: "note" },
        "The black mark is what chance alone gives; a key whose bar ends there has told nothing.",
      ),
    ],
  );
}
