"use strict";
// What all parts of the page share: elements, numbers, colours, curves.

const AXES = { env_steps: "steps", updates: "updates", time_s: "seconds" };
const LABELS = {
  env_steps: "environment steps",
  updates: "updates",
  time_s: "seconds of training",
  "evaluation/return": "return of evaluations",
  "episode/return": "return of an episode",
  "episode/length": "length of an episode",
  "perf/steps_per_s": "steps per second",
};

/** An element with attributes and children; texts are never read as HTML. */
function h(tag, attributes = {}, ...children) {
  const svg = tag === "svg" || tag === "line";
  const made = svg ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (name === "style") made.style.cssText = value;
    else made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return made;
}
const at = (id) => document.getElementById(id);
const fill = (id, ...children) => at(id).replaceChildren(...children.flat().filter(Boolean));

/** Fills what a user may be in the middle of using: only where it would become another. */
function refill(id, signature, make) {
  const found = JSON.stringify(signature);
  if (at(id).dataset.signature === found) return;
  at(id).dataset.signature = found;
  fill(id, ...make());
}

const known = (x) => typeof x === "number" && Number.isFinite(x);

function number(x) {
  if (!known(x)) return "–";
  if (Math.abs(x) >= 1e4) return Math.round(x).toLocaleString("en");
  return String(Number(x.toPrecision(4))).replace("-", "−");
}
function short(x) {
  if (!known(x)) return "–";
  for (const [size, unit] of [
    [1e9, "G"],
    [1e6, "M"],
    [1e3, "k"],
  ])
    if (Math.abs(x) >= size) return Number((x / size).toPrecision(4)) + unit;
  return String(Number(x.toPrecision(4)));
}
/** Numbers as short as they may be so that no two that follow each other look the same. */
function toldApart(numbers) {
  for (let digits = 2; ; digits++) {
    const rounded = numbers.map((x) => Number(x.toPrecision(digits)));
    const names = rounded.map(digits < 5 ? short : String); // which has four digits
    if (digits > 14 || names.every((name, i) => !i || name !== names[i - 1])) return names;
  }
}
function seconds(x) {
  if (!known(x)) return "–";
  if (x < 120) return `${Number(x.toPrecision(3))} s`;
  return x < 7200 ? `${Number((x / 60).toPrecision(3))} min` : `${Number((x / 3600).toPrecision(3))} h`;
}
const counted = (n, what) => `${number(n)} ${what}${n === 1 ? "" : "s"}`;
const interval = (e) => (e.low === null ? number(e.value) : `${number(e.value)} [${number(e.low)}, ${number(e.high)}]`);
const mean = (values) => values.reduce((sum, x) => sum + x, 0) / values.length;

/** Interquartile mean and quartiles of numbers, as numpy's linear quantiles and jrl's weights of the middle half. */
function middle(values) {
  const sorted = [...values].sort((a, b) => a - b),
    n = sorted.length;
  const quantile = (q) => {
    const place = q * (n - 1),
      low = Math.floor(place);
    return sorted[low] + (place - low) * (sorted[Math.min(low + 1, n - 1)] - sorted[low]);
  };
  let sum = 0,
    weight = 0;
  sorted.forEach((x, i) => {
    const kept = Math.min((i + 1) / n, 0.75) - Math.max(i / n, 0.25);
    if (kept > 0) {
      sum += kept * x;
      weight += kept;
    }
  });
  return { value: sum / weight, low: quantile(0.25), high: quantile(0.75) };
}

// The colours of Okabe and Ito that can be read on white, and lighter ones of the same order for the dark.
const LIGHT = ["#0072b2", "#d55e00", "#009e73", "#b5508f", "#c98a00", "#3a9fd6", "#6b7280"];
const DARK = ["#5cb3f0", "#f58b4c", "#35c79b", "#e39ac7", "#efb73e", "#9ad4f7", "#a6aeb7"];
const DASHES = ["solid", "dashed", "dotted"];
// low to high; what is best stands out from the ground
const RAMP = ["#dfe9c8", "#a3d6b7", "#52b3bd", "#2a7db0", "#23418e", "#1a1b59"];

const printing = () => "print" in document.documentElement.dataset;
const dark = () => matchMedia("(prefers-color-scheme: dark)").matches && !printing();
const ramp = () => (dark() ? ["#27364f", "#2a5796", "#2b85b6", "#54b5bf", "#a6d8b8", "#f2f7cb"] : RAMP);
const variable = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

function look(data, method) {
  const i = Math.max(data.methods.indexOf(method), 0),
    colors = dark() ? DARK : LIGHT;
  const round = Math.floor(i / colors.length); // methods stand in the order of their rank
  return {
    color: colors[i % colors.length],
    dash: DASHES[round % DASHES.length],
    width: i === 0 ? 3.25 : round === 0 ? 2.25 : 1.25,
  };
}
function swatch(data, method) {
  const { color, dash } = look(data, method);
  const dashes = { solid: null, dashed: "6 3", dotted: "2 3" }[dash];
  const line = h("line", { x1: 1, y1: 6, x2: 21, y2: 6, stroke: color, "stroke-width": 3, "stroke-dasharray": dashes });
  return h("svg", { class: "swatch", width: 22, height: 12, "aria-hidden": "true" }, line);
}

/** What all names of runs begin with, up to a directory. */
function common(names) {
  if (names.length < 2) return names[0] ? names[0].slice(0, names[0].lastIndexOf("/") + 1) : "";
  let prefix = names[0];
  for (const name of names) while (!name.startsWith(prefix)) prefix = prefix.slice(0, -1);
  return prefix.slice(0, prefix.lastIndexOf("/") + 1);
}
/** A method's name without what stands before all keys. */
const brief = (method) => method.replace(/\balgo\.(?=\w+=)/g, "");
const called = (data, name) => name.slice(data.prefix.length) || name;

/** The exponential moving average that does not lean to its first value. */
function smooth(values, weight) {
  if (!weight) return values;
  let last = 0,
    total = 0;
  return values.map((x) => {
    if (!known(x)) return x;
    last = weight * last + (1 - weight) * x;
    total = weight * total + 1 - weight;
    return last / total;
  });
}
/** y at x of a curve whose x ascend; null outside. */
function reading(xs, ys, x) {
  let low = 0,
    high = xs.length - 1;
  if (high < 0 || x < xs[0] || x > xs[high]) return null;
  while (high - low > 1) {
    const half = (low + high) >> 1;
    if (xs[half] <= x) low = half;
    else high = half;
  }
  const part = xs[high] === xs[low] ? 0 : (x - xs[low]) / (xs[high] - xs[low]);
  return ys[low] + part * (ys[high] - ys[low]);
}
const pairs = (xs, ys) => xs.map((x, i) => [x, ys[i]]).filter(([x, y]) => known(x) && known(y));

/** What a config's values are: numbers, those over decades by their logarithm, and all else in categories. */
function scale(values) {
  if (values.every(known)) {
    const low = Math.min(...values),
      high = Math.max(...values);
    return low > 0 && high / low >= 30 ? { type: "log", low, high } : { type: "value", low, high };
  }
  return { type: "category", data: [...new Set(values.map(String))].sort() };
}
