"use strict";
// What Apache ECharts draws.

const charts = new Map(); // id -> chart

/** Draws into an element; `keep` leaves what was zoomed as it is. */
function draw(id, option, keep = false) {
  const element = typeof id === "string" ? at(id) : id;
  let chart = charts.get(element);
  if (!chart) {
    chart = echarts.init(element, null, { renderer: "svg" });
    charts.set(element, chart);
    new ResizeObserver(() => chart.resize()).observe(element);
  }
  chart.setOption({ ...plain(), ...option }, keep ? { replaceMerge: ["series"] } : { notMerge: true });
  return chart;
}
function forget(element) {
  charts.get(element)?.dispose();
  charts.delete(element);
}

const plain = () => ({
  animation: false,
  backgroundColor: "transparent",
  textStyle: { fontFamily: "system-ui, -apple-system, Segoe UI, Roboto, sans-serif", color: variable("soft") },
});
const narrow = (element) => element.clientWidth < 560;

function axis(more) {
  const ink = variable("soft");
  return {
    type: "value",
    scale: true,
    nameLocation: "middle",
    nameGap: 28,
    nameTextStyle: { color: ink, fontSize: 12 },
    axisLine: { lineStyle: { color: variable("line") } },
    axisTick: { show: false },
    axisLabel: { color: ink, fontSize: 11.5, hideOverlap: true, formatter: short },
    splitLine: { lineStyle: { color: variable("grid") } },
    ...more,
  };
}
function tooltip(more) {
  return {
    confine: true,
    backgroundColor: variable("card"),
    borderColor: variable("line"),
    borderWidth: 1,
    padding: [8, 12],
    textStyle: { color: variable("ink"), fontSize: 12.5 },
    extraCssText: "box-shadow: 0 4px 16px rgb(0 0 0 / 14%)",
    ...more,
  };
}
const tip = (title, ...lines) => h("div", { class: "tip" }, h("b", {}, title), ...lines);

/** A band between two curves. */
function band(xs, low, high, color, opacity = 0.16) {
  const points = xs.map((x, i) => [x, low[i], high[i]]).filter((point) => point.every(known));
  if (!points.length) return null;
  const edge = [
    [points[0][0], Math.min(...points.map((p) => p[1]))],
    [points.at(-1)[0], Math.max(...points.map((p) => p[2]))],
  ];
  return {
    type: "custom",
    silent: true,
    data: edge,
    clip: true,
    z: 1,
    renderItem: (params, api) =>
      params.dataIndex
        ? null
        : {
            type: "polygon",
            silent: true,
            style: { fill: color, opacity },
            shape: {
              points: [
                ...points.map(([x, below]) => api.coord([x, below])),
                ...points.toReversed().map(([x, , above]) => api.coord([x, above])),
              ],
            },
          },
  };
}
const line = (points, { color, dash, width = 2.25 }, more = {}) => ({
  type: "line",
  data: points,
  showSymbol: points.length === 1,
  symbolSize: 5,
  silent: true,
  z: 3,
  lineStyle: { color, width, type: dash },
  itemStyle: { color },
  ...more,
});

// ---------------------------------------------------------------- learning curves

/** The curves of the methods that are switched on: [{method, band, runs}], of one task or over all. */
function shownCurves(data, state) {
  const found =
    state.task === "*"
      ? (data.over_tasks[state.axis] || []).map((c) => ({ method: c.method, band: c.band, runs: [] }))
      : data.curves
          .filter((c) => c.task === state.task)
          .map((c) => ({ method: c.method, band: c.bands[state.axis], runs: c.runs }));
  return found.filter((c) => !state.hidden.has(c.method));
}

function drawCurves(data, state, keep) {
  const series = [],
    read = [],
    element = at("curve-chart");
  const shown = shownCurves(data, state);
  for (const { method, band: around, runs } of shown) {
    const style = look(data, method);
    const lines = runs.map((run) => ({ x: run[state.axis] || [], y: smooth(run.y, state.smooth) }));
    const alone = !around;
    if (state.lines !== "mean" || alone)
      for (const run of lines)
        series.push(
          line(pairs(run.x, run.y), style, alone ? {} : { z: 2, lineStyle: { ...style, width: 1, opacity: 0.4 } }),
        );
    if (around && state.lines !== "runs") {
      const [value, low, high] = ["value", "low", "high"].map((name) => smooth(around[name], state.smooth));
      const drawn = band(around.x, low, high, style.color, shown.length > 4 ? 0.08 : 0.16);
      if (drawn) series.push(drawn);
      series.push(line(pairs(around.x, value), style));
      read.push({ method, x: around.x, value, low, high });
    } else if (alone) {
      for (const run of lines) read.push({ method, x: run.x, value: run.y });
    }
  }
  const label = state.axis === "time_s" ? (x) => seconds(x) : short;
  draw(
    element,
    {
      grid: { left: 8, right: 22, top: 34, bottom: 28, containLabel: true },
      xAxis: axis({
        name: LABELS[state.axis],
        scale: false,
        max: "dataMax",
        axisLabel: {
          color: variable("soft"),
          fontSize: 11.5,
          hideOverlap: true,
          alignMaxLabel: "right",
          formatter: label,
        },
      }),
      yAxis: axis({
        name: state.task === "*" ? "normalised score" : LABELS[data.objective] || data.objective,
        nameLocation: "end",
        nameGap: 12,
        nameTextStyle: { color: variable("soft"), fontSize: 12, align: "left" },
      }),
      toolbox: {
        show: !narrow(element) && !printing(),
        right: 4,
        top: 0,
        itemSize: 13,
        iconStyle: { borderColor: variable("soft") },
        feature: {
          dataZoom: { filterMode: "none", title: { zoom: "Zoom by a box", back: "Zoom back" } },
          restore: { title: "All" },
          saveAsImage: { type: "svg", name: "curves", title: "Save as SVG" },
        },
      },
      tooltip: tooltip({
        trigger: "axis",
        axisPointer: { type: "line", snap: false, lineStyle: { color: variable("soft") } },
        formatter: (params) => curveTip(data, state, read, params[0].axisValue, label),
      }),
      series: series.length ? series : [{ type: "line", data: [] }],
    },
    keep,
  );
}
function curveTip(data, state, read, x, label) {
  const values = read
    .map((c) => ({ ...c, y: reading(c.x, c.value, x) }))
    .filter((c) => known(c.y))
    .sort((a, b) => b.y - a.y);
  const rows = values.slice(0, 10).map((c) => {
    const around = c.low ? [reading(c.x, c.low, x), reading(c.x, c.high, x)] : [];
    const text = number(c.y) + (known(around[0]) ? ` [${number(around[0])}, ${number(around[1])}]` : "");
    return h("div", {}, swatch(data, c.method), h("span", {}, brief(c.method)), h("span", {}, text));
  });
  const rest = values.length - rows.length;
  return tip(
    `${label(x)}${state.axis === "time_s" ? "" : " " + AXES[state.axis]}`,
    ...rows,
    rest > 0 && h("small", {}, `and ${rest} below`),
  );
}

function drawProfiles(data) {
  const found = Object.entries(data.profiles.methods || {}).filter(([, p]) => p.value);
  at("profile-chart").hidden = !found.length;
  if (!found.length) return;
  const at_ = data.profiles.thresholds;
  draw("profile-chart", {
    grid: { left: 8, right: 16, top: 30, bottom: 28, containLabel: true },
    xAxis: axis({ name: "normalised score", scale: false }),
    yAxis: axis({
      name: "share of runs above it",
      min: 0,
      max: 1,
      nameLocation: "end",
      nameGap: 12,
      nameTextStyle: { align: "left", color: variable("soft") },
    }),
    tooltip: tooltip({ show: false }),
    series: found
      .flatMap(([method, p]) => [
        band(at_, p.low, p.high, look(data, method).color),
        line(pairs(at_, p.value), look(data, method), { step: "end" }),
      ])
      .filter(Boolean),
  });
}

// ---------------------------------------------------------------- hyper-parameters

function drawParallel(runs, keys, choose) {
  const element = at("parallel-chart"),
    upright = narrow(element),
    scores = runs.map((run) => run.last);
  const ends = keys.map((key) => key.split(".").at(-1));
  const lastPart = (key) => {
    const end = key.split(".").at(-1);
    return ends.filter((other) => other === end).length > 1 ? key : end;
  };
  const dimensions = keys.map((key, dim) => {
    const found = scale(runs.map((run) => run.values[key]));
    const limits = found.type === "category" ? { data: found.data } : { min: found.low, max: found.high };
    return { dim, name: lastPart(key), type: found.type, ...limits };
  });
  dimensions.push({
    dim: keys.length,
    name: "score",
    type: "value",
    min: Math.min(...scores),
    max: Math.max(...scores),
  });
  // the names at both ends reach inwards: in the middle of their axis they would be cut off
  if (!upright) {
    dimensions[0].nameTextStyle = { align: "left", padding: [0, 0, 0, -8] };
    dimensions.at(-1).nameTextStyle = { align: "right", padding: [0, -8, 0, 0] };
  }
  if (upright) element.style.height = `${90 + 74 * dimensions.length}px`;
  const value = (run, key) =>
    dimensions[keys.indexOf(key)].type === "category" ? String(run.values[key]) : run.values[key];
  const order = [...runs.keys()].sort((a, b) => scores[a] - scores[b]); // the best are drawn last
  const halo = { textBorderColor: variable("card"), textBorderWidth: 4 };
  const chart = draw(element, {
    parallel: {
      left: upright ? 34 : 44,
      right: upright ? 26 : 66,
      top: upright ? 46 : 40,
      bottom: upright ? 36 : 26,
      layout: upright ? "vertical" : "horizontal",
      parallelAxisDefault: {
        nameLocation: upright ? "start" : "end",
        nameGap: 14,
        nameTextStyle: {
          color: variable("ink"),
          fontSize: 12,
          fontWeight: 600,
          ...halo,
          ...(upright ? { align: "left", verticalAlign: "bottom", padding: [0, 0, 7, -20] } : {}),
        },
        axisLine: { lineStyle: { color: variable("soft") } },
        axisTick: { show: false },
        axisLabel: {
          color: variable("ink"),
          fontSize: 11,
          ...halo,
          formatter: (x) => (known(x) ? short(x) : String(x)),
          hideOverlap: true,
        },
        areaSelectStyle: { color: variable("accent"), borderColor: variable("accent"), opacity: 0.18, width: 18 },
      },
    },
    parallelAxis: dimensions,
    visualMap: {
      show: false,
      dimension: keys.length,
      min: Math.min(...scores),
      max: Math.max(...scores),
      inRange: { color: ramp() },
    },
    series: [
      {
        type: "parallel",
        progressive: 0,
        inactiveOpacity: 0.04,
        activeOpacity: 0.9,
        lineStyle: { width: runs.length > 100 ? 1 : 1.6, opacity: runs.length > 100 ? 0.55 : 0.75 },
        data: [...runs.keys()]
          .sort((a, b) => scores[a] - scores[b])
          .map((i) => [...keys.map((key) => value(runs[i], key)), scores[i]]),
      },
    ],
  });
  chart.off("axisareaselected");
  chart.on("axisareaselected", () => {
    const active = chart.getModel().getSeries()[0].getRawIndicesByActiveState("active");
    choose(active.length === runs.length || !active.length ? null : new Set(active.map((i) => runs[order[i]].name)));
  });
}

const CELLS = 12;
/** Where a value lies on an axis of cells: its own, or of many numbers one of twelve ranges. */
function cells(values) {
  const found = scale(values),
    distinct = [...new Set(values.map(String))];
  if (found.type === "category") return { names: found.data, of: (x) => found.data.indexOf(String(x)) };
  if (distinct.length <= 16) {
    const sorted = distinct.map(Number).sort((a, b) => a - b);
    return { names: sorted.map(short), of: (x) => sorted.indexOf(x) };
  }
  const to = found.type === "log" ? Math.log : (x) => x,
    from = found.type === "log" ? Math.exp : (x) => x;
  const low = to(found.low),
    width = (to(found.high) - low) / CELLS;
  const names = toldApart(Array.from({ length: CELLS }, (_, i) => from(low + i * width))).map((name) => `${name} –`);
  return { names, of: (x) => Math.min(CELLS - 1, Math.floor((to(x) - low) / width)) };
}

function drawHeat(state, runs) {
  const [x, y] = [state.heat.x, state.heat.y];
  const own = runs.filter((run) => x in run.values && (!y || y in run.values));
  if (!y) return drawScatter(own, x);
  const across = cells(own.map((run) => run.values[x])),
    up = cells(own.map((run) => run.values[y]));
  const found = new Map();
  for (const run of own) {
    const place = `${across.of(run.values[x])},${up.of(run.values[y])}`;
    found.set(place, [...(found.get(place) || []), run.last]);
  }
  const means = [...found].map(([place, values]) => [...place.split(",").map(Number), mean(values), values.length]);
  const scores = means.map((cell) => cell[2]),
    low = Math.min(...scores),
    high = Math.max(...scores),
    colors = ramp();
  const few = across.names.length <= 12 && up.names.length <= 14 && !narrow(at("heat-chart"));
  const ink = (score) => ((high > low && (score - low) / (high - low) > 0.5) !== dark() ? "#ffffff" : "#14181c");
  draw("heat-chart", {
    grid: { left: 12, right: 12, top: 34, bottom: 76, containLabel: true },
    xAxis: axis({
      type: "category",
      data: across.names,
      name: x,
      splitLine: { show: false },
      axisLabel: { color: variable("soft"), fontSize: 11.5, hideOverlap: true },
    }),
    yAxis: axis({
      type: "category",
      data: up.names,
      name: y,
      nameLocation: "end",
      nameGap: 12,
      nameTextStyle: { align: "left", color: variable("soft") },
      splitLine: { show: false },
      axisLabel: { color: variable("soft"), fontSize: 11.5 },
    }),
    visualMap: {
      type: "continuous",
      min: low,
      max: high > low ? high : low + 1,
      dimension: 2,
      orient: "horizontal",
      left: "center",
      bottom: 0,
      itemHeight: 150,
      itemWidth: 10,
      precision: 3,
      inRange: { color: colors },
      textStyle: { color: variable("soft") },
      text: [short(high), short(low)],
    },
    tooltip: tooltip({
      formatter: ({ value: [i, j, score, count] }) =>
        tip(
          number(score),
          h("span", {}, `mean of ${counted(count, "run")}`),
          h("br"),
          h("span", {}, `${x} ${across.names[i]}`),
          h("br"),
          h("span", {}, `${y} ${up.names[j]}`),
        ),
    }),
    series: [
      {
        type: "heatmap",
        data: means.map((cell) => ({ value: cell, label: { color: ink(cell[2]), fontSize: 11 } })),
        label: { show: few, formatter: ({ value }) => short(Number(value[2].toPrecision(3))) },
        itemStyle: { borderColor: variable("card"), borderWidth: 2, borderRadius: 3 },
      },
    ],
  });
}
function drawScatter(runs, x) {
  const found = scale(runs.map((run) => run.values[x])),
    by = new Map();
  const place = (run) => (found.type === "category" ? String(run.values[x]) : run.values[x]);
  for (const run of runs) by.set(place(run), [...(by.get(place(run)) || []), run.last]);
  const middles = [...by].map(([at_, values]) => [at_, middle(values).value]);
  if (found.type !== "category") middles.sort((a, b) => a[0] - b[0]);
  const color = variable("accent");
  draw("heat-chart", {
    grid: { left: 8, right: 20, top: 30, bottom: 34, containLabel: true },
    xAxis: axis({
      type: found.type,
      data: found.data,
      min: found.low,
      max: found.high,
      name: x,
      splitLine: { show: false },
      axisLabel: {
        color: variable("soft"),
        fontSize: 11.5,
        hideOverlap: true,
        alignMaxLabel: found.type === "category" ? null : "right",
        formatter: found.type === "category" ? null : short,
      },
    }),
    yAxis: axis({ name: "score", nameLocation: "end", nameGap: 12 }),
    tooltip: tooltip({
      formatter: ({ value }) =>
        tip(`${x} ${number(value[0]) === "–" ? value[0] : number(value[0])}`, h("span", {}, number(value[1]))),
    }),
    series: [
      {
        type: "scatter",
        data: runs.map((run) => [place(run), run.last]),
        symbolSize: 6,
        itemStyle: { color, opacity: 0.45 },
      },
      line(middles, { color, dash: "solid" }, { showSymbol: found.type === "category" }),
    ],
  });
}

// ---------------------------------------------------------------- small ones

function drawSmall(element, series, x, more = {}) {
  draw(element, {
    grid: { left: 2, right: 10, top: 10, bottom: 4, containLabel: true },
    xAxis: axis({
      name: "",
      scale: false,
      max: "dataMax",
      splitNumber: 3,
      axisLabel: { color: variable("soft"), fontSize: 10.5, hideOverlap: true, alignMaxLabel: "right", formatter: short },
      ...more.x,
    }),
    yAxis: axis({
      splitNumber: 3,
      axisLabel: { color: variable("soft"), fontSize: 10.5, formatter: short },
      ...more.y,
    }),
    series,
  });
}
