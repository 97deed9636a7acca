"use strict";
// Draws the options that charts.py made with Apache ECharts; controls, legend, table.

const at = (id) => document.getElementById(id);
const root = document.documentElement;
const choice = {}; // of the controls: task, axis, pairs of hyper-parameters
const hidden = new Set(); // methods that are switched off
let data;

/** Reads the options, with the colours that the page has now in place of `--names`. Only colours are looked up: a run may be named `--ink`. */
function read() {
  const style = getComputedStyle(root);
  const value = (text) => (typeof text === "string" && text.startsWith("--") ? style.getPropertyValue(text).trim() : text);
  data = JSON.parse(at("data").textContent, (key, found) =>
    /color$/i.test(key) ? (Array.isArray(found) ? found.map(value) : value(found)) : found,
  );
}

/** Draws the interval of a curve, whose points are [x, low, high], as one polygon. */
function band(params, api) {
  if (params.dataIndexInside) return null;
  const edge = (side) => Array.from({ length: params.dataInsideLength }, (_, i) => api.coord([api.value(0, i), api.value(side, i)]));
  return {
    type: "polygon",
    shape: { points: [...edge(1), ...edge(2).reverse()] },
    style: { fill: api.visual("color"), opacity: 0.12 },
  };
}

function draw() {
  for (const [id, views] of Object.entries(data.charts)) {
    const element = at(id);
    const fits = (view) => Object.entries(choice).every(([key, value]) => !(key in view) || view[key] === value);
    const view = views.find(fits) || (choice.task === "*" ? views[0] : null);
    element.hidden = !view;
    if (!view) continue;
    const option = view.option;
    (option.baseOption || option).animation = false;
    if (option.toolbox) option.toolbox.show = !root.hasAttribute("data-print");
    for (const series of option.series || []) if (series.type === "custom") series.renderItem = band;
    if (option.legend?.show === false) option.legend.selected = Object.fromEntries([...hidden].map((name) => [name, false]));
    const chart = echarts.getInstanceByDom(element) || echarts.init(element, data.theme, { renderer: "svg" });
    chart.setOption(option, true);
    chart.resize();
  }
  for (const part of document.querySelectorAll("[data-task]")) part.hidden = ![part.dataset.task, "*", undefined].includes(choice.task);
}

/** Draws anew in the colours of the moment; a chart's theme is that of its beginning. */
function redraw() {
  read();
  for (const id of Object.keys(data.charts)) echarts.getInstanceByDom(at(id))?.dispose();
  draw();
}

// ---------------------------------------------------------------- controls and legend

for (const select of document.querySelectorAll("[data-choice]")) {
  choice[select.dataset.choice] = select.value;
  select.addEventListener("change", () => {
    choice[select.dataset.choice] = select.value;
    draw();
  });
}

const methods = [...document.querySelectorAll("#legend [data-name]")];
function press(button, on) {
  button.setAttribute("aria-pressed", String(on));
  hidden[on ? "delete" : "add"](button.dataset.name);
}
for (const button of methods) press(button, button.getAttribute("aria-pressed") === "true");
at("legend").addEventListener("click", (event) => {
  const button = event.target.closest("button");
  if (!button) return;
  if (button.dataset.all) for (const other of methods) press(other, button.dataset.all === "true");
  else if (event.altKey) for (const other of methods) press(other, other === button);
  else press(button, hidden.has(button.dataset.name));
  draw();
});

// ---------------------------------------------------------------- the table of runs

const table = at("run-table"), header = [...table.tHead.rows[0].cells], lines = [...table.tBodies[0].rows];
const text = (line, i) => line.cells[i].textContent.trim();
const number = (shown) => (shown === "" || shown === "-" ? NaN : Number(shown.replaceAll(",", "")));

function sort(i) {
  const down = header[i].ariaSort ? header[i].ariaSort === "ascending" : header[i].className === "number";
  for (const cell of header) cell.removeAttribute("aria-sort");
  header[i].setAttribute("aria-sort", down ? "descending" : "ascending");
  const order = (a, b) => {
    const [x, y] = [text(a, i), text(b, i)];
    if (x === "-" || y === "-") return (x === "-") - (y === "-");
    const [m, n] = [number(x), number(y)];
    return (down ? -1 : 1) * (m - n || x.localeCompare(y, "en", { numeric: true }));
  };
  table.tBodies[0].append(...lines.sort(order));
}
header.forEach((cell, i) => cell.addEventListener("click", () => sort(i)));

/** Whether a line is what was typed: words of the run, and comparisons such as `lr<0.01`. */
function fits(line, word) {
  const [, name, sign, limit] = word.match(/^([^<>=]+)(<=|>=|<|>|=)(.+)$/) || [];
  const i = header.findIndex((cell) => name && (cell.textContent === name || cell.textContent.split(".").at(-1) === name));
  if (i < 0) return `${line.title} ${line.textContent}`.toLowerCase().includes(word.toLowerCase());
  const [value, wanted] = [number(text(line, i)), Number(limit)];
  if (sign === "=") return text(line, i) === limit || value === wanted;
  return { "<": value < wanted, ">": value > wanted, "<=": value <= wanted, ">=": value >= wanted }[sign];
}
const note = at("run-note").textContent.replace(/^\d+/, "");
at("filter").addEventListener("input", () => {
  const words = at("filter").value.trim().split(/\s+/).filter(Boolean);
  for (const line of lines) line.hidden = !words.every((word) => fits(line, word));
  at("run-note").textContent = lines.filter((line) => !line.hidden).length + note;
});

// ---------------------------------------------------------------- colours, width, paper

redraw();
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
const resized = new ResizeObserver((found) => found.forEach(({ target }) => echarts.getInstanceByDom(target)?.resize()));
for (const id of Object.keys(data.charts)) resized.observe(at(id));
// printed in light colours, and as wide as the paper; a chart would be drawn with the next frame, which is too late
function onPaper(print) {
  root.toggleAttribute("data-print", print);
  if (print) for (const part of document.querySelectorAll("details")) part.open = true;
  redraw();
  for (const id of Object.keys(data.charts)) echarts.getInstanceByDom(at(id))?.getZr().flush();
}
addEventListener("beforeprint", () => onPaper(true));
addEventListener("afterprint", () => onPaper(false));
