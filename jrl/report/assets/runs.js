"use strict";
// The table of runs: what it shows, how it is filtered and sorted.

const ENDED = ["finished", "stopped by the scheduler"]; // as they should

function columns(data) {
  const keys = [...new Set(data.runs.flatMap((run) => Object.keys(run.values)))];
  const several = (name) => new Set(data.runs.map((run) => run[name])).size > 1;
  return [
    { name: "run", of: (run) => called(data, run.name), cell: (run) => runCell(data, run) },
    several("method") && !keys.length && { name: "method", of: (run) => run.method },
    several("task") && { name: "task", of: (run) => run.task },
    ...keys.map((key) => ({ name: key, of: (run) => run.values[key] })),
    { name: "seed", of: (run) => run.seed },
    data.runs.some((run) => run.source) && { name: "copied from", of: (run) => run.source },
    { name: "last", of: (run) => run.last },
    { name: "best", of: (run) => run.best },
    {
      name: "state",
      of: (run) => run.state,
      cell: (run) => h("span", { class: ENDED.includes(run.state) ? "state" : "state bad" }, run.state),
    },
    { name: "env_steps", of: (run) => run.env_steps },
    { name: "updates", of: (run) => run.updates },
    { name: "seconds", of: (run) => run.time_s },
    { name: "steps/s", of: (run) => (run.time_s > 0 ? run.env_steps / run.time_s : null) },
  ].filter(Boolean);
}
function runCell(data, run) {
  const text = called(data, run.name),
    live = document.body.dataset.live === "true";
  const inside =
    run.link && !live ? h("a", { href: run.link, title: run.name }, text) : h("span", { title: run.name }, text);
  return h("span", {}, swatch(data, run.method), " ", inside);
}

/** Whether a run is what was typed: words of its names, and comparisons such as `lr<0.01`. */
function fits(data, run, typed) {
  const all = columns(data);
  return typed
    .trim()
    .split(/\s+/)
    .filter(Boolean)
    .every((word) => {
      const [, name, sign, limit] = word.match(/^([^<>=]+)(<=|>=|<|>|=)(.+)$/) || [];
      const column = name && all.find((c) => c.name === name || c.name.split(".").at(-1) === name);
      if (!column)
        return [run.name, run.method, run.task, run.state].some((text) =>
          String(text).toLowerCase().includes(word.toLowerCase()),
        );
      const value = column.of(run),
        wanted = Number(limit);
      if (sign === "=") return known(value) ? value === wanted : String(value) === limit;
      if (!known(value) || Number.isNaN(wanted)) return false;
      return { "<": value < wanted, ">": value > wanted, "<=": value <= wanted, ">=": value >= wanted }[sign];
    });
}

function drawRuns(data, state, change) {
  const all = columns(data),
    by = all.find((c) => c.name === state.sort.by) || all[0],
    way = state.sort.down ? -1 : 1;
  const found = data.runs.filter(
    (run) => fits(data, run, state.filter) && (!state.chosen || state.chosen.has(run.name)),
  );
  const order = (a, b) => {
    const [x, y] = [by.of(a), by.of(b)],
      lacks = (v) => v === null || v === undefined;
    if (lacks(x) || lacks(y)) return lacks(x) - lacks(y);
    return way * (known(x) && known(y) ? x - y : String(x).localeCompare(String(y), "en", { numeric: true }));
  };
  found.sort(order);
  const numeric = new Map(all.map((c) => [c, data.runs.some((run) => known(c.of(run)))]));
  const sorted = (c) => {
    const down = state.sort.by === c.name ? !state.sort.down : numeric.get(c);
    change({ sort: { by: c.name, down } }, c.name);
  };
  const header = all.map((c) =>
    h(
      "th",
      {
        scope: "col",
        class: numeric.get(c) ? "number" : null,
        "aria-sort": c === by ? (state.sort.down ? "descending" : "ascending") : null,
      },
      h("button", { type: "button", "data-column": c.name, onclick: () => sorted(c) }, c.name),
    ),
  );
  const show = (c, run) => (c.cell ? c.cell(run) : known(c.of(run)) ? number(c.of(run)) : String(c.of(run) ?? "–"));
  fill(
    "run-table",
    h(
      "table",
      {},
      h("thead", {}, h("tr", {}, header)),
      h(
        "tbody",
        {},
        found.map((run) =>
          h(
            "tr",
            {},
            all.map((c) => h("td", { class: numeric.get(c) ? "number" : null }, show(c, run))),
          ),
        ),
      ),
    ),
  );
  fill(
    "run-note",
    `${found.length} of ${counted(data.runs.length, "run")}`,
    state.chosen && " in what was chosen above ",
    state.chosen && h("button", { type: "button", onclick: () => change({ chosen: null }) }, "show all"),
  );
}
