"use strict";
// What is no chart: the head, tables, bars, videos.

function drawHead(data) {
  const runs = data.runs, finished = runs.filter((run) => run.state === "finished").length;
  document.title = `${data.tasks.join(", ")} · report`;
  at("title").textContent = data.tasks.join(", ");
  at("lede").textContent = `${counted(runs.length, "run")} of ${counted(data.methods.length, "method")} by ${data.objective}`
    + (data.tasks.length > 1 ? `, on ${data.tasks.length} tasks` : "");
  const best = [...data.per_task].sort((a, b) => b.iqm.value - a.iqm.value || b.mean.value - a.mean.value)[0];
  const steps = runs.reduce((sum, run) => sum + (run.env_steps || 0), 0);
  const one = data.tasks.length === 1;
  fill("tiles",
    one && tile(interval(best.iqm), data.methods.length > 1 ? `best: ${brief(best.method)}` : `IQM of ${counted(best.seeds, "seed")}`),
    tile(`${finished} / ${runs.length}`, "runs finished"),
    tile(short(steps), "environment steps in all"),
    data.failures.length ? tile(String(data.failures.length), "not as they should be") : tile(String(data.methods.length), data.methods.length > 1 ? "methods" : "method"),
  );
  const lines = [...data.notes, ...data.cautions];
  if (data.points === 0) lines.push("so many runs that this page has their means alone: report.json has all curves");
  fill("notes", lines.length > 0 && h("details", { class: "cautions", open: lines.join("").length <= 500 },
    h("summary", {}, `Know before believing (${lines.length})`), h("ul", {}, lines.map((text) => h("li", {}, text)))));
}
const tile = (value, text) => h("div", { class: "tile" }, h("b", {}, value), h("span", {}, text));

function table(header, rows) {
  const cell = (value, name) => {
    const inside = value instanceof Node ? value : String(value ?? "–");
    return h("td", { class: name || null }, inside);
  };
  return h("table", {},
    h("thead", {}, h("tr", {}, header.map((name, i) => h("th", { scope: "col", class: Array.isArray(rows[0]?.[i]) ? rows[0][i][1] : null }, name)))),
    h("tbody", {}, rows.map((row) => h("tr", {}, row.map((value) => (Array.isArray(value) ? cell(...value) : cell(value)))))));
}
const named = (data, method) => h("span", { title: method }, swatch(data, method), ` ${brief(method)}${method === data.against ? " (reference)" : ""}`);

// ---------------------------------------------------------------- scores

function range(low, high, entry, color, dots = []) {
  const place = (x) => (high > low ? (100 * (x - low)) / (high - low) : 50);
  const around = entry.low === null ? null
    : h("b", { style: `left:${place(entry.low)}%;width:${Math.max(place(entry.high) - place(entry.low), 0.6)}%;background:${color}` });
  return h("span", { class: "range", role: "img", "aria-label": interval(entry) }, h("i"), around,
    dots.map((x) => h("u", { style: `left:${place(x)}%;background:${color}` })),
    h("em", { style: `left:${place(entry.value)}%;background:${color}` }));
}

function drawScores(data, state) {
  const rows = data.per_task.filter((row) => row.task === state.task), dots = new Map();
  if (state.task !== "*") {
    for (const run of data.runs)
      if (run.task === state.task && known(run.last)) dots.set(run.method, [...(dots.get(run.method) || []), run.last]);
    const all = rows.flatMap((row) => [row.last.least, row.last.most, row.iqm.low, row.iqm.high]).filter(known);
    const [low, high] = [Math.min(...all), Math.max(...all)];
    rows.sort((a, b) => b.iqm.value - a.iqm.value || b.mean.value - a.mean.value);
    const made = table(["method", `${number(low)} to ${number(high)}`, "IQM [95 %]", "median", "mean", "best", "seeds"], rows.map((row) => [
      named(data, row.method), range(low, high, row.iqm, look(data, row.method).color, dots.get(row.method)),
      [interval(row.iqm), "number"], [number(row.median.value), "number"], [number(row.mean.value), "number"],
      [number(row.best.most), "number"], [row.seeds, "number"],
    ]));
    fill("score-table", h("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Scores" }, made));
  } else fill("score-table");
  drawAggregate(data);
  drawImprovement(data);
}
function drawAggregate(data) {
  const found = data.aggregate.rows || [];
  if (!found.length) return fill("aggregate");
  const names = { iqm: "IQM", median: "median", mean: "mean", optimality_gap: "optimality gap" };
  const rows = found.map((row) => [named(data, row.method), [row.runs, "number"], ...Object.keys(names).map((key) => [interval(row[key]), "number"])]);
  fill("aggregate", h("h3", {}, `Over ${counted(data.aggregate.tasks.length, "task")}, normalised`),
    h("div", { class: "scroll" }, table(["method", "runs", ...Object.values(names)], rows)));
}
function drawImprovement(data) {
  if (!data.improvement.length) return fill("improvement");
  const rows = data.improvement.map((row) => [
    named(data, row.method), named(data, row.over), range(0, 1, row, variable("accent")), [interval(row), "number"],
  ]);
  fill("improvement", h("h3", {}, "Probability that a run of one is better than one of the other"),
    h("div", { class: "scroll" }, table(["of", "over", "0 to 1; a half is no difference", "probability"], rows)));
}
function drawImportance(data, algo) {
  const rows = data.hyper_parameters.filter((row) => row.algo === algo && row.share !== null).map((row) => [
    h("code", {}, row.key),
    h("span", { class: "share", role: "img", "aria-label": `${Math.round(100 * row.share)} %, by chance ${Math.round(100 * row.by_chance)} %` },
      h("b", { style: `width:${100 * row.share}%` }), h("em", { style: `left:${100 * Math.min(row.by_chance, 1)}%` })),
    [`${Math.round(100 * row.share)} %`, "number"], [number(row.correlation), "number"], row.best, [row.values, "number"],
  ]);
  fill("importance", rows.length > 0 && [h("h3", {}, "What matters"),
    h("div", { class: "scroll" }, table(["key", "share of the ranks' variance", "", "rank correlation", "best value", "values"], rows)),
    h("p", { class: "note" }, "The black mark is what chance alone gives; a key whose bar ends there has told nothing.")]);
}

// ---------------------------------------------------------------- runs

function columns(data) {
  const keys = [...new Set(data.runs.flatMap((run) => Object.keys(run.values)))];
  const several = (name) => new Set(data.runs.map((run) => run[name])).size > 1;
  return [
    { name: "run", of: (run) => called(data, run.name), cell: (run) => runCell(data, run) },
    several("method") && !keys.length && { name: "method", of: (run) => run.method },
    several("task") && { name: "task", of: (run) => run.task },
    ...keys.map((key) => ({ name: key, of: (run) => run.values[key] })),
    { name: "seed", of: (run) => run.seed },
    { name: "last", of: (run) => run.last },
    { name: "best", of: (run) => run.best },
    { name: "state", of: (run) => run.state, cell: (run) => h("span", { class: run.state === "finished" ? "state" : "state bad" }, run.state) },
    { name: "env_steps", of: (run) => run.env_steps },
    { name: "updates", of: (run) => run.updates },
    { name: "seconds", of: (run) => run.time_s },
    { name: "steps/s", of: (run) => (run.time_s > 0 ? run.env_steps / run.time_s : null) },
  ].filter(Boolean);
}
function runCell(data, run) {
  const text = called(data, run.name), live = document.body.dataset.live === "true";
  const inside = run.link && !live ? h("a", { href: run.link, title: run.name }, text) : h("span", { title: run.name }, text);
  return h("span", {}, swatch(data, run.method), " ", inside);
}

/** Whether a run is what was typed: words of its names, and comparisons such as `lr<0.01`. */
function fits(data, run, typed) {
  const all = columns(data);
  return typed.trim().split(/\s+/).filter(Boolean).every((word) => {
    const [, name, sign, limit] = word.match(/^([^<>=]+)(<=|>=|<|>|=)(.+)$/) || [];
    const column = name && all.find((c) => c.name === name || c.name.split(".").at(-1) === name);
    if (!column) return [run.name, run.method, run.task, run.state].some((text) => String(text).toLowerCase().includes(word.toLowerCase()));
    const value = column.of(run), wanted = Number(limit);
    if (sign === "=") return known(value) ? value === wanted : String(value) === limit;
    if (!known(value) || Number.isNaN(wanted)) return false;
    return { "<": value < wanted, ">": value > wanted, "<=": value <= wanted, ">=": value >= wanted }[sign];
  });
}

function drawRuns(data, state, change) {
  const all = columns(data), by = all.find((c) => c.name === state.sort.by) || all[0], way = state.sort.down ? -1 : 1;
  const found = data.runs.filter((run) => fits(data, run, state.filter) && (!state.chosen || state.chosen.has(run.name)));
  const order = (a, b) => {
    const [x, y] = [by.of(a), by.of(b)], lacks = (v) => v === null || v === undefined;
    if (lacks(x) || lacks(y)) return lacks(x) - lacks(y);
    return way * (known(x) && known(y) ? x - y : String(x).localeCompare(String(y), "en", { numeric: true }));
  };
  found.sort(order);
  const numeric = new Map(all.map((c) => [c, data.runs.some((run) => known(c.of(run)))]));
  const sorted = (c) => {
    const down = state.sort.by === c.name ? !state.sort.down : numeric.get(c);
    change({ sort: { by: c.name, down } }, c.name);
  };
  const header = all.map((c) => h("th", {
    scope: "col", class: numeric.get(c) ? "number" : null,
    "aria-sort": c === by ? (state.sort.down ? "descending" : "ascending") : null,
  }, h("button", { type: "button", "data-column": c.name, onclick: () => sorted(c) }, c.name)));
  const show = (c, run) => (c.cell ? c.cell(run) : known(c.of(run)) ? number(c.of(run)) : String(c.of(run) ?? "–"));
  fill("run-table", h("table", {}, h("thead", {}, h("tr", {}, header)), h("tbody", {}, found.map((run) =>
    h("tr", {}, all.map((c) => h("td", { class: numeric.get(c) ? "number" : null }, show(c, run))))))));
  fill("run-note", `${found.length} of ${counted(data.runs.length, "run")}`, state.chosen && " in what was chosen above ",
    state.chosen && h("button", { type: "button", onclick: () => change({ chosen: null }) }, "show all"));
}

// ---------------------------------------------------------------- time, histograms, learning

const STAGES = ["env", "act", "collect", "transfer", "wait", "update", "log"];
function drawTime(data, state) {
  const rows = [];
  for (const method of data.methods) {
    const runs = data.runs.filter((run) => run.method === method && (state.task === "*" || run.task === state.task) && run.time_s > 0);
    if (!runs.length) continue;
    const parts = {};
    for (const name of new Set(runs.flatMap((run) => Object.keys(run.seconds))))
      parts[name] = mean(runs.map((run) => run.seconds[name] || 0));
    const total = mean(runs.map((run) => run.time_s)), told = Object.values(parts).reduce((a, b) => a + b, 0);
    // where all is one program, there is nothing to tell apart
    if (told > 0.02 * total) rows.push({ method, parts, total, rest: Math.max(0, total - told) });
  }
  at("time").hidden = !rows.length;
  if (!rows.length) return;
  rows.sort((a, b) => b.total - a.total);
  const shown = rows.slice(0, 16), most = Math.max(...shown.map((row) => Math.max(row.total, row.total - row.rest)));
  const stages = [...new Set(shown.flatMap((row) => Object.keys(row.parts)))].sort((a, b) => STAGES.indexOf(a) - STAGES.indexOf(b))
    .filter((name) => shown.some((row) => (row.parts[name] || 0) > 0.002 * most));
  const colors = dark() ? DARK : LIGHT, color = (name) => (name === "rest" ? variable("bar") : colors[stages.indexOf(name) % colors.length]);
  const key = (name, text) => h("span", {}, h("i", { style: `background:${color(name)}` }), text);
  fill("time-bars", h("div", { class: "keys" }, stages.map((name) => key(name, name)), key("rest", "the program, and what is not measured")),
    h("div", { class: "bars" }, shown.flatMap((row) => {
      const part = (name, value) => value > 0 && h("span", { style: `width:${(100 * value) / most}%;background:${color(name)}`, title: `${name}: ${seconds(value)}` });
      const told = [...stages.map((name) => `${name} ${seconds(row.parts[name] || 0)}`), `rest ${seconds(row.rest)}`].join(", ");
      return [h("span", { class: "name", title: row.method }, brief(row.method)),
        h("span", { class: "stack", role: "img", "aria-label": told }, stages.map((name) => part(name, row.parts[name] || 0)), part("rest", row.rest)),
        h("span", {}, seconds(row.total))];
    })));
  fill("time-note", "Seconds of training, the mean over a method's runs. Members that are one program share its seconds; a run that is one program has no parts, and no bar."
    + (rows.length > shown.length ? ` The ${shown.length} longest of ${rows.length} methods.` : ""));
}

function figures(id, entries) {
  const box = at(id);
  box.querySelectorAll(".chart").forEach(forget);
  box.replaceChildren(...entries.map(({ name }) => h("figure", {}, h("figcaption", {}, name), h("div", { class: "chart", role: "img", "aria-label": name }))));
  entries.forEach(({ put }, i) => put(box.querySelectorAll(".chart")[i]));
}

function drawHistograms(data, state) {
  const found = data.histograms.filter((one) => state.task === "*" || one.task === state.task);
  at("histograms").hidden = !found.length;
  figures("histogram-charts", found.map(({ name, edges, methods }) => ({
    name,
    put: (element) => {
      const shown = Object.entries(methods).filter(([method]) => !state.hidden.has(method));
      const steps = (counts) => [...counts.map((n, i) => [edges[i], n]), [edges.at(-1), 0]];
      drawSmall(element, shown.map(([method, counts]) => line(steps(counts), look(data, method),
        { step: "end", showSymbol: false, areaStyle: { color: look(data, method).color, opacity: 0.14 } })), "", { y: { scale: false } });
    },
  })));
}

function drawInside(data, state) {
  const own = data.inside.filter((run) => run.task === state.task || state.task === "*");
  const names = [...new Set(own.flatMap((run) => Object.keys(run.metrics)))].filter((name) => name !== data.objective);
  at("inside").hidden = !names.length;
  const methods = data.methods.filter((method) => !state.hidden.has(method));
  figures("inside-charts", names.map((name) => ({
    name: LABELS[name] || name,
    put: (element) => drawSmall(element, methods.flatMap((method) => {
      const runs = own.filter((run) => run.method === method && run.metrics[name]).map((run) => run.metrics[name]);
      const style = { ...look(data, method) }, thin = { lineStyle: { color: style.color, type: style.dash, width: 1.6 } };
      if (runs.length < 2) return runs.map((run) => line(pairs(run.x, smooth(run.y, state.smooth)), style, thin));
      const low = Math.max(...runs.map((run) => run.x[0])), high = Math.min(...runs.map((run) => run.x.at(-1)));
      const grid = Array.from({ length: 40 }, (_, i) => low + ((high - low) * i) / 39);
      const found = grid.map((x) => middle(runs.map((run) => reading(run.x, run.y, x)).filter(known)));
      const [value, below, above] = ["value", "low", "high"].map((part) => smooth(found.map((f) => f[part]), state.smooth));
      return [band(grid, below, above, style.color), line(pairs(grid, value), style, thin)].filter(Boolean);
    })),
  })));
}

// ---------------------------------------------------------------- videos, configs, failures, provenance

const MOST_CARDS = 12;
function drawVideos(data) {
  const found = data.runs.filter((run) => run.videos.length).sort((a, b) => (b.last ?? -Infinity) - (a.last ?? -Infinity));
  at("videos").hidden = !found.length;
  fill("video-cards", found.slice(0, MOST_CARDS).map((run) => {
    const film = (video) => (video.link.endsWith(".gif")
      ? h("img", { src: video.link, alt: `an episode of ${called(data, run.name)}`, loading: "lazy" })
      : h("video", { src: video.link, controls: true, loop: true, muted: true, playsinline: true, preload: "metadata" }));
    const box = h("div", {}, film(run.videos.at(-1)));
    const pick = h("select", { "aria-label": `After how many steps, of ${called(data, run.name)}`, onchange: () => box.replaceChildren(film(run.videos[pick.selectedIndex])) },
      run.videos.map((video, i) => h("option", { selected: i === run.videos.length - 1 }, known(Number(video.name)) ? `${short(Number(video.name))} steps` : video.name)));
    return h("figure", {}, box, h("figcaption", {}, h("span", { title: run.name }, swatch(data, run.method), ` ${called(data, run.name)}`), pick));
  }), found.length > MOST_CARDS && h("p", { class: "note" }, `The ${MOST_CARDS} best of ${found.length} runs with videos.`));
}

function drawDifferences(data) {
  const keys = Object.keys(data.differences), methods = data.methods;
  at("differences").hidden = !keys.length;
  const value = (key, method) => (data.differences[key][method] || ["–"]).join(" / ");
  fill("difference-table", methods.length <= 6
    ? table(["key", ...methods.map(brief)], keys.map((key) => [h("code", {}, key), ...methods.map((method) => value(key, method))]))
    : table(["method", ...keys], methods.map((method) => [named(data, method), ...keys.map((key) => value(key, method))])));
}
function drawFailures(data) {
  at("failures").hidden = !data.failures.length;
  fill("failure-table", table(["run", "method", "task", "steps", "why"], data.failures.map((row) =>
    [called(data, row.name), brief(row.method), row.task, [number(row.env_steps), "number"], [row.why, "long"]])));
}
function drawOrigins(data) {
  at("provenance").hidden = !data.provenance.length;
  fill("origins", data.provenance.map((origin) => {
    const git = origin.git || {}, cpu = origin.cpu, versions = Object.entries(origin.versions || {}).filter(([, version]) => version);
    const facts = [
      ["commit", git.commit && `${git.commit}${git.dirty ? ", with changes that are in no commit" : ""}`],
      ["versions", versions.map((pair) => pair.join(" ")).join(", ")],
      ["machine", origin.platform],
      ["CPU", cpu && `${cpu.model}, ${cpu.usable} of ${cpu.count} cores`],
      ["memory", origin.memory_gib && `${origin.memory_gib} GiB`],
      ["devices", (origin.devices || []).join(", ")],
    ].filter(([, value]) => value);
    const commands = Object.entries(origin.commands).map(([command, own]) => `${command}${own.length > 1 ? `  # ${own.length} runs` : ""}`);
    return h("div", { class: "origin" }, h("strong", {}, counted(origin.runs.length, "run")),
      h("dl", {}, facts.flatMap(([name, value]) => [h("dt", {}, name), h("dd", {}, value)])),
      commands.length > 0 && h("details", { open: commands.length <= 2 }, h("summary", {}, counted(commands.length, "command")), h("pre", { tabindex: 0 }, commands.join("\n"))));
  }));
}
