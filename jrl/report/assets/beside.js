"use strict";
// What lies beside the scores: where the seconds go, histograms, what rows tell of learning, videos, configs, origins.

const STAGES = ["env", "act", "collect", "transfer", "wait", "update", "log"];
function drawTime(data, state) {
  const rows = [];
  for (const method of data.methods) {
    const runs = data.runs.filter(
      (run) => run.method === method && (state.task === "*" || run.task === state.task) && run.time_s > 0,
    );
    if (!runs.length) continue;
    const parts = {};
    for (const name of new Set(runs.flatMap((run) => Object.keys(run.seconds))))
      parts[name] = mean(runs.map((run) => run.seconds[name] || 0));
    const total = mean(runs.map((run) => run.time_s)),
      told = Object.values(parts).reduce((a, b) => a + b, 0);
    // where all is one program, there is nothing to tell apart
    if (told > 0.02 * total) rows.push({ method, parts, total, rest: Math.max(0, total - told) });
  }
  at("time").hidden = !rows.length;
  if (!rows.length) return;
  rows.sort((a, b) => b.total - a.total);
  const shown = rows.slice(0, 16),
    most = Math.max(...shown.map((row) => Math.max(row.total, row.total - row.rest)));
  const stages = [...new Set(shown.flatMap((row) => Object.keys(row.parts)))]
    .sort((a, b) => STAGES.indexOf(a) - STAGES.indexOf(b))
    .filter((name) => shown.some((row) => (row.parts[name] || 0) > 0.002 * most));
  const colors = dark() ? DARK : LIGHT,
    color = (name) => (name === "rest" ? variable("bar") : colors[stages.indexOf(name) % colors.length]);
  const key = (name, text) => h("span", {}, h("i", { style: `background:${color(name)}` }), text);
  fill(
    "time-bars",
    h(
      "div",
      { class: "keys" },
      stages.map((name) => key(name, name)),
      key("rest", "the program, and what is not measured"),
    ),
    h(
      "div",
      { class: "bars" },
      shown.map((row) => {
        const part = (name, value) =>
          value > 0 &&
          h("span", {
            style: `width:${(100 * value) / most}%;background:${color(name)}`,
            title: `${name}: ${seconds(value)}`,
          });
        const told = [
          ...stages.map((name) => `${name} ${seconds(row.parts[name] || 0)}`),
          `rest ${seconds(row.rest)}`,
        ].join(", ");
        return h(
          "div",
          { class: "row" },
          h("span", { class: "name", title: row.method }, brief(row.method)),
          h(
            "span",
            { class: "stack", role: "img", "aria-label": told },
            stages.map((name) => part(name, row.parts[name] || 0)),
            part("rest", row.rest),
          ),
          h("span", {}, seconds(row.total)),
        );
      }),
    ),
  );
  fill(
    "time-note",
    "Seconds of training, the mean over a method's runs. Members that are one program share its seconds; a run that is one program has no parts, and no bar." +
      (rows.length > shown.length ? ` The ${shown.length} longest of ${rows.length} methods.` : ""),
  );
}

function figures(id, entries) {
  const box = at(id);
  box.querySelectorAll(".chart").forEach(forget);
  box.replaceChildren(
    ...entries.map(({ name }) =>
      h("figure", {}, h("figcaption", {}, name), h("div", { class: "chart", role: "img", "aria-label": name })),
    ),
  );
  entries.forEach(({ put }, i) => put(box.querySelectorAll(".chart")[i]));
}

function drawHistograms(data, state) {
  const found = data.histograms.filter((one) => state.task === "*" || one.task === state.task);
  at("histograms").hidden = !found.length;
  figures(
    "histogram-charts",
    found.map(({ name, task, edges, methods }) => ({
      name: state.task === "*" ? `${name}, ${task}` : name,
      put: (element) => {
        const shown = Object.entries(methods).filter(([method]) => !state.hidden.has(method));
        const steps = (counts) => [...counts.map((n, i) => [edges[i], n]), [edges.at(-1), 0]];
        drawSmall(
          element,
          shown.map(([method, counts]) =>
            line(steps(counts), look(data, method), {
              step: "end",
              showSymbol: false,
              areaStyle: { color: look(data, method).color, opacity: 0.14 },
            }),
          ),
          "",
          { y: { scale: false } },
        );
      },
    })),
  );
}

function drawInside(data, state) {
  const task = state.task === "*" ? data.tasks[0] : state.task; // losses of several tasks have no common scale
  const own = data.inside.filter((run) => run.task === task);
  at("inside-title").textContent = state.task === "*" ? `Inside learning, ${task}` : "Inside learning";
  const names = [...new Set(own.flatMap((run) => Object.keys(run.metrics)))].filter((name) => name !== data.objective);
  at("inside").hidden = !names.length;
  const methods = data.methods.filter((method) => !state.hidden.has(method));
  figures(
    "inside-charts",
    names.map((name) => ({
      name: LABELS[name] || name,
      put: (element) =>
        drawSmall(
          element,
          methods.flatMap((method) => {
            const runs = own
              .filter((run) => run.method === method && run.metrics[name])
              .map((run) => run.metrics[name]);
            const style = { ...look(data, method) },
              thin = { lineStyle: { color: style.color, type: style.dash, width: 1.6 } };
            if (runs.length < 2) return runs.map((run) => line(pairs(run.x, smooth(run.y, state.smooth)), style, thin));
            const low = Math.max(...runs.map((run) => run.x[0])),
              high = Math.min(...runs.map((run) => run.x.at(-1)));
            const grid = Array.from({ length: 40 }, (_, i) => low + ((high - low) * i) / 39);
            const found = grid.map((x) => middle(runs.map((run) => reading(run.x, run.y, x)).filter(known)));
            const [value, below, above] = ["value", "low", "high"].map((part) =>
              smooth(
                found.map((f) => f[part]),
                state.smooth,
              ),
            );
            return [band(grid, below, above, style.color), line(pairs(grid, value), style, thin)].filter(Boolean);
          }),
        ),
    })),
  );
}

// ---------------------------------------------------------------- videos, configs, failures, provenance

const MOST_CARDS = 12;
function drawVideos(data) {
  const found = data.runs
    .filter((run) => run.videos.length)
    .sort((a, b) => (b.last ?? -Infinity) - (a.last ?? -Infinity));
  at("videos").hidden = !found.length;
  refill("video-cards", [data.runs.map((run) => run.videos), dark()], () => [
    ...found.slice(0, MOST_CARDS).map((run) => {
      const film = (video) =>
        video.link.endsWith(".gif")
          ? h("img", { src: video.link, alt: `an episode of ${called(data, run.name)}`, loading: "lazy" })
          : h("video", {
              src: video.link,
              controls: true,
              loop: true,
              muted: true,
              playsinline: true,
              preload: "metadata",
            });
      const box = h("div", {}, film(run.videos.at(-1)));
      const pick = h(
        "select",
        {
          "aria-label": `After how many steps, of ${called(data, run.name)}`,
          onchange: () => box.replaceChildren(film(run.videos[pick.selectedIndex])),
        },
        run.videos.map((video, i) =>
          h(
            "option",
            { selected: i === run.videos.length - 1 },
            known(Number(video.name)) ? `${short(Number(video.name))} steps` : video.name,
          ),
        ),
      );
      return h(
        "figure",
        {},
        box,
        h(
          "figcaption",
          {},
          h("span", { title: run.name }, swatch(data, run.method), ` ${called(data, run.name)}`),
          pick,
        ),
      );
    }),
    found.length > MOST_CARDS &&
      h("p", { class: "note" }, `The ${MOST_CARDS} best of ${found.length} runs with videos.`),
  ]);
}

function drawDifferences(data) {
  const keys = Object.keys(data.differences),
    methods = data.methods;
  at("differences").hidden = !keys.length;
  const value = (key, method) => (data.differences[key][method] || ["–"]).join(" / ");
  fill(
    "difference-table",
    methods.length <= 6
      ? table(
          ["key", ...methods.map(brief)],
          keys.map((key) => [h("code", {}, key), ...methods.map((method) => value(key, method))]),
        )
      : table(
          ["method", ...keys],
          methods.map((method) => [named(data, method), ...keys.map((key) => value(key, method))]),
        ),
  );
}
function drawFailures(data) {
  at("failures").hidden = !data.failures.length;
  fill(
    "failure-table",
    table(
      ["run", "method", "task", "steps", "why"],
      data.failures.map((row) => [
        called(data, row.name),
        brief(row.method),
        row.task,
        [number(row.env_steps), "number"],
        [row.why, "long"],
      ]),
    ),
  );
}
function drawOrigins(data) {
  at("provenance").hidden = !data.provenance.length;
  fill(
    "origins",
    data.provenance.map((origin) => {
      const git = origin.git || {},
        cpu = origin.cpu,
        versions = Object.entries(origin.versions || {}).filter(([, version]) => version);
      const facts = [
        ["commit", git.commit && `${git.commit}${git.dirty ? ", with changes that are in no commit" : ""}`],
        ["versions", versions.map((pair) => pair.join(" ")).join(", ")],
        ["machine", origin.platform],
        ["CPU", cpu && `${cpu.model}, ${cpu.usable} of ${cpu.count} cores`],
        ["memory", origin.memory_gib && `${origin.memory_gib} GiB`],
        ["devices", (origin.devices || []).join(", ")],
      ].filter(([, value]) => value);
      const commands = Object.entries(origin.commands).map(
        ([command, own]) => `${command}${own.length > 1 ? `  # ${own.length} runs` : ""}`,
      );
      return h(
        "div",
        { class: "origin" },
        h("strong", {}, counted(origin.runs.length, "run")),
        h(
          "dl",
          {},
          facts.flatMap(([name, value]) => [h("dt", {}, name), h("dd", {}, value)]),
        ),
        commands.length > 0 &&
          h(
            "details",
            { open: commands.length <= 2 },
            h("summary", {}, counted(commands.length, "command")),
            h("pre", { tabindex: 0 }, commands.join("\n")),
          ),
      );
    }),
  );
}
