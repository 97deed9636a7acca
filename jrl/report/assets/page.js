"use strict";
// The page: what is chosen, what follows from it, and newer numbers of runs that are under way.

const MOST_CURVES = 10; // that are drawn before anybody chose
let data = null;
const state = {
  task: null,
  axis: "env_steps",
  lines: "both",
  smooth: 0,
  hidden: new Set(),
  sort: { by: "last", down: true },
  filter: "",
  chosen: null,
  algo: null,
  heat: { x: null, y: null },
};

/** Takes numbers, for the first time or newer ones; what was chosen stays. */
function take(found) {
  const first = data === null;
  if (found.waiting) {
    at("title").textContent = "Waiting for the first result row";
    at("lede").textContent = found.waiting;
    at("main").hidden = true;
    return;
  }
  at("main").hidden = false;
  data = found;
  data.prefix = common(data.runs.map((run) => run.name));
  if (first) {
    state.axis = data.axes.includes(data.axis) ? data.axis : data.axes[0];
    if (data.methods.length > 5) state.lines = "mean";
    state.task = Object.values(data.over_tasks).some((c) => c.length) ? "*" : data.tasks[0];
    hideMany();
  }
  everything(!first);
}
const scored = (method) =>
  state.task === "*"
    ? data.aggregate.rows.find((row) => row.method === method)
    : data.per_task.find((row) => row.method === method && row.task === state.task);
const score = (method) => scored(method)?.iqm.value ?? -Infinity;
const better = (a, b) => {
  const order = data.ranking[state.task] || [];
  const place = (method) => (order.includes(method) ? order.indexOf(method) : order.length);
  return place(a) - place(b);
};
function best(count) {
  return [...data.methods].sort(better).slice(0, count);
}
function hideMany() {
  const kept = new Set(best(MOST_CURVES));
  state.hidden = new Set(data.methods.filter((method) => !kept.has(method)));
}

// ---------------------------------------------------------------- controls

function choice(label, name, options, chosen, put) {
  return h(
    "fieldset",
    { class: "control" },
    h("span", {}, label),
    h(
      "span",
      { class: "choice", role: "radiogroup", "aria-label": label },
      Object.entries(options).map(([value, text]) =>
        h(
          "label",
          {},
          h("input", { type: "radio", name, value, checked: value === chosen, onchange: () => put(value) }),
          h("span", {}, text),
        ),
      ),
    ),
  );
}
function select(label, options, chosen, put, id) {
  const made = h(
    "select",
    { id, onchange: () => put(options[made.selectedIndex][0]) },
    options.map(([value, text]) => h("option", { value: String(value), selected: value === chosen }, text)),
  );
  return h("label", { class: "control" }, h("span", {}, label), made);
}

function curveControls() {
  const tasks = [
    ...(Object.values(data.over_tasks).some((c) => c.length) ? [["*", "all, normalised"]] : []),
    ...data.tasks.map((task) => [task, task]),
  ];
  const output = h("output", {}, state.smooth ? state.smooth.toFixed(2) : "off");
  const slider = h("input", {
    type: "range",
    min: 0,
    max: 0.98,
    step: 0.02,
    value: state.smooth,
    id: "smoothing",
    "aria-label": "Smoothing",
    oninput: () => {
      state.smooth = Number(slider.value);
      output.textContent = state.smooth ? state.smooth.toFixed(2) : "off";
      drawCurves(data, state, true);
    },
    onchange: () => drawInside(data, state),
  });
  refill("curve-controls", [tasks, data.axes], () => [
    tasks.length > 1 &&
      select(
        "Task",
        tasks,
        state.task,
        (task) => {
          state.task = task;
          state.chosen = null;
          everything();
        },
        "task",
      ),
    choice("Over", "axis", Object.fromEntries(data.axes.map((axis) => [axis, AXES[axis]])), state.axis, (axis) => {
      state.axis = axis;
      drawCurves(data, state);
    }),
    choice("Show", "lines", { mean: "mean", both: "mean and runs", runs: "runs" }, state.lines, (lines) => {
      state.lines = lines;
      drawCurves(data, state, true);
    }),
    h("label", { class: "control" }, h("span", {}, "Smoothing"), slider, output),
  ]);
  at("curve-note").textContent =
    "A thin line is a run; the thick one is the interquartile mean of a method's runs with its 95 % interval, as far as all of them go.";
}

function drawLegend() {
  const entries = data.methods.filter(
    (method) => state.task === "*" || data.curves.some((c) => c.task === state.task && c.method === method),
  );
  entries.sort(better);
  const put = (hidden) => {
    state.hidden = new Set(hidden);
    switched();
  };
  const toggle = (method, event) => {
    if (event.altKey) return put(entries.filter((name) => name !== method));
    const hidden = new Set(state.hidden);
    if (!hidden.delete(method)) hidden.add(method);
    put(hidden);
  };
  const focused = document.activeElement?.dataset?.method;
  const tool = (text, hidden) => h("button", { type: "button", class: "tool", onclick: () => put(hidden()) }, text);
  fill(
    "legend",
    entries.map((method) =>
      h(
        "button",
        {
          type: "button",
          "aria-pressed": String(!state.hidden.has(method)),
          "data-method": method,
          title: `${method}: click for on or off, with Alt for this one alone`,
          onclick: (event) => toggle(method, event),
        },
        swatch(data, method),
        h("span", {}, brief(method)),
        h("small", {}, number(score(method)) === "–" ? "" : number(score(method))),
      ),
    ),
    entries.length > 2 && [tool("all", () => []), tool("none", () => entries)],
    entries.length > MOST_CURVES &&
      tool(`best ${MOST_CURVES}`, () => entries.filter((m) => !best(MOST_CURVES).includes(m))),
  );
  if (focused) [...at("legend").children].find((b) => b.dataset.method === focused)?.focus();
}
function switched() {
  drawLegend();
  drawCurves(data, state, true);
  drawInside(data, state);
  drawHistograms(data, state);
}

// ---------------------------------------------------------------- the sweep

/** The runs that the pictures of hyper-parameters show, and the keys that differ between them. */
function swept() {
  const task = state.task === "*" ? data.tasks[0] : state.task;
  const equal = data.equal_steps.scores || {}; // where some were stopped early: scores after as many steps
  const runs = data.runs
    .map((run) => (run.name in equal ? { ...run, last: equal[run.name] } : run))
    .filter((run) => run.algo === state.algo && run.task === task && known(run.last));
  const differs = (key) => new Set(runs.map((run) => String(run.values[key]))).size > 1;
  const keys = data.keys[state.algo].filter((key) => differs(key) && runs.every((run) => key in run.values));
  return { runs, keys };
}
function drawSweep() {
  const algos = Object.keys(data.keys);
  at("sweep").hidden = !algos.length;
  if (!algos.length) return;
  if (!algos.includes(state.algo)) state.algo = algos[0];
  const { runs, keys } = swept();
  const chosen = (algo) => {
    state.algo = algo;
    drawSweep();
  };
  const named = algos.map((algo) => [algo, algo]);
  refill("sweep-controls", algos, () => [algos.length > 1 && select("Algorithm", named, state.algo, chosen)]);
  const few = runs.length < 2 || !keys.length;
  for (const id of ["parallel-chart", "parallel-note", "heat-chart", "heat-controls", "heat-title"])
    at(id).hidden = few;
  drawImportance(data, state.algo);
  fill("sweep-note", data.equal_steps.note);
  if (few) return;
  drawParallel(runs, keys.slice(0, 8), (names) => change({ chosen: names }));
  if (!keys.includes(state.heat.x)) state.heat = { x: keys[0], y: keys[1] || null };
  if (state.heat.y && !keys.includes(state.heat.y)) state.heat.y = null;
  const pick = (part) => (key) => {
    state.heat[part] = key;
    drawHeat(state, swept().runs);
  };
  const names = keys.map((key) => [key, key]);
  at("heat-title").textContent = keys.length > 1 ? "Two at a time" : "Score by value";
  refill("heat-controls", [state.algo, keys], () =>
    keys.length > 1
      ? [
          select("Across", names, state.heat.x, pick("x"), "heat-x"),
          select("Up", [...names, [null, "the score"]], state.heat.y, pick("y"), "heat-y"),
        ]
      : [],
  );
  drawHeat(state, runs);
}

// ---------------------------------------------------------------- runs

function change(more, focus) {
  Object.assign(state, more);
  drawRuns(data, state, change);
  if (focus) refocus(focus);
}
function refocus(column) {
  [...at("run-table").querySelectorAll("button")].find((b) => b.dataset.column === column)?.focus();
}
function runControls() {
  if (at("filter")) return;
  const box = h("input", {
    type: "search",
    id: "filter",
    placeholder: "members/07, finished, lr<0.01, last>400",
    "aria-describedby": "run-note",
    autocomplete: "off",
    oninput: () => change({ filter: box.value }),
  });
  fill("run-controls", h("label", { class: "control" }, h("span", {}, "Filter"), box));
  at("run-controls").addEventListener("submit", (event) => event.preventDefault());
}

// ---------------------------------------------------------------- all of it

function everything(keep = false) {
  const focused = document.activeElement?.dataset?.column;
  drawHead(data);
  curveControls();
  drawLegend();
  drawCurves(data, state, keep);
  drawProfiles(data);
  drawScores(data, state);
  drawSweep();
  runControls();
  drawRuns(data, state, change);
  drawInside(data, state);
  drawTime(data, state);
  drawHistograms(data, state);
  drawVideos(data);
  drawDifferences(data);
  drawFailures(data);
  drawOrigins(data);
  if (focused) refocus(focused);
  fill(
    "nav",
    [...document.querySelectorAll("main > section")]
      .filter((section) => !section.hidden)
      .map((section) => h("a", { href: `#${section.id}` }, section.dataset.title)),
  );
}

async function follow() {
  let tag = null;
  const told = at("live");
  told.hidden = false;
  told.textContent = "live";
  for (;;) {
    try {
      const answer = await fetch("data.json", { headers: tag ? { "If-None-Match": tag } : {}, cache: "no-store" });
      if (answer.status === 200) {
        tag = answer.headers.get("ETag");
        take(await answer.json());
        told.textContent = `live, as of ${new Date().toLocaleTimeString()}`;
      } else if (answer.status !== 304) throw new Error(String(answer.status));
      told.classList.remove("lost");
    } catch (error) {
      told.classList.add("lost");
      told.textContent = "nobody answers any more; these are the latest numbers";
    }
    await new Promise((done) => setTimeout(done, 2000));
  }
}

take(JSON.parse(at("data").textContent));
if (document.body.dataset.live === "true") follow();
const again = () => data && everything(true);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", again);
// printed in light colours, and as wide as the paper; a chart would be drawn with the next frame, which is too late
function onPaper(print) {
  document.documentElement.toggleAttribute("data-print", print);
  again();
  for (const chart of charts.values()) {
    chart.resize();
    chart.getZr().flush();
  }
}
addEventListener("beforeprint", () => onPaper(true));
addEventListener("afterprint", () => onPaper(false));
