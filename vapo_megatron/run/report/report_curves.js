"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const charts = [];
const everyPoint = [...data.charts, ...data.more].flatMap(c => c.series).concat(data.phases).flatMap(s => s.points);
const steps = [...new Set(everyPoint.map(p => p[0]))].sort((a, b) => a - b);
const first = steps[0], last = steps[steps.length - 1];
const HEIGHT = document.getElementById("arms") ? 230 : 176, TOP = 8, BOTTOM = 22, RIGHT = 10;

function svg(name, attributes, parent, text) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const key in attributes) node.setAttribute(key, attributes[key]);
  if (text !== undefined) node.textContent = text;
  if (parent) parent.append(node);
  return node;
}
function html(name, className, parent, text) {
  const node = document.createElement(name);
  if (className) node.className = className;
  if (text !== undefined) node.textContent = text;
  if (parent) parent.append(node);
  return node;
}
function format(value) {
  if (value === undefined) return "";
  if (value === null) return "not finite";
  const size = Math.abs(value);
  if (size === 0) return "0";
  if (size < 1e-3 || size >= 1e7) return value.toExponential(2);
  if (size >= 1000) return Math.round(value).toLocaleString("en");
  return String(Number(value.toPrecision(3)));
}
function niceStep(span, count, factors = [1, 2, 2.5, 5, 10]) {
  const rough = span / count, power = 10 ** Math.floor(Math.log10(rough));
  return power * factors.find(m => m * power >= rough * .999);
}
function linearAxis(values, spec) {
  let low = Math.min(...values, spec.low ?? Infinity), high = Math.max(...values, spec.high ?? -Infinity);
  if (spec.floor !== undefined) low = Math.max(low, Math.min(spec.floor, high));
  if (high - low < 1e-12) { const room = Math.abs(high) * .1 || 1; high += room; if (spec.low !== low) low -= room; }
  const step = niceStep(high - low, 4), ticks = [];
  const from = Math.floor(low / step + 1e-6), to = Math.ceil(high / step - 1e-6);
  for (let i = from; i <= to; i++) ticks.push(i * step);
  let digits = 0;
  while (digits < 8 && Math.abs(step * 10 ** digits / Math.max(1, Math.round(step * 10 ** digits)) - 1) > 1e-3) digits++;
  const fixed = { minimumFractionDigits: digits, maximumFractionDigits: digits };
  const label = v => v && (Math.abs(v) >= 1e7 || step < 1e-4) ? v.toExponential(1) : (v + 0).toLocaleString("en", fixed);
  return { ticks: ticks.map(v => [v, label(v)]), low: from * step, high: to * step, of: v => v };
}
function logAxis(values) {
  const positive = values.filter(v => v > 0);
  if (!positive.length) return null;
  const from = Math.floor(Math.log10(Math.min(...positive)) + 1e-9);
  const to = Math.max(from + 1, Math.ceil(Math.log10(Math.max(...positive)) - 1e-9));
  const every = Math.ceil((to - from) / 4), ticks = [];
  for (let i = from; i <= to; i += every) ticks.push([i, i >= -2 && i <= 3 ? String(Number((10 ** i).toPrecision(1))) : "1e" + i]);
  return { ticks, low: from, high: to, of: v => Math.log10(Math.max(v, 10 ** from)) };
}
function clear(root) {
  const width = root.clientWidth || 320;
  root.setAttribute("height", HEIGHT);
  root.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
  root.replaceChildren();
  return width;
}
function upright(root, axis) {
  const width = clear(root), base = HEIGHT - BOTTOM;
  const left = 10 + Math.max(...axis.ticks.map(t => t[1].length)) * 6.4;
  const at = value => TOP + (axis.high - value) / (axis.high - axis.low) * (base - TOP);
  function grid() {
    for (const [value, text] of axis.ticks) {
      svg("line", { class: value === axis.low ? "axis" : "grid", x1: left, x2: width - RIGHT, y1: at(value), y2: at(value) }, root);
      svg("text", { x: left - 6, y: at(value) + 3.8, "text-anchor": "end" }, root, text);
    }
  }
  return { width, left, base, grid, y: v => at(axis.of(v)) };
}
function frame(chart, axis) {
  const root = chart.svg, { width, left, base, grid, y } = upright(root, axis);
  const x0 = chart.bars ? first - .5 : first === last ? first - .5 : first, x1 = chart.bars || first === last ? last + .5 : last;
  const x = s => left + 4 + (s - x0) / (x1 - x0) * (width - left - RIGHT - 4);
  if (data.pretraining > 0 && first <= data.pretraining) {
    const start = Math.max(x0, .5), end = Math.min(data.pretraining + .5, x1);
    svg("rect", { class: "shade", x: x(start), y: TOP, width: x(end) - x(start), height: base - TOP }, root);
    if (end < x1) svg("line", { class: "end", x1: x(end), x2: x(end), y1: TOP, y2: base }, root);
  }
  grid();
  const room = Math.max(2, Math.floor((width - left) / 60)), every = Math.max(1, niceStep(Math.max(1, last - first), room, [1, 2, 5, 10]));
  for (let s = Math.ceil(first / every) * every; s <= last; s += every)
    svg("text", { x: x(s), y: HEIGHT - 6, "text-anchor": "middle" }, root, s);
  return { root, x, y, base, width, left, x0, x1 };
}
function card(parent, title, wide) {
  const figure = html("figure", wide ? "chart wide" : "chart", parent);
  const caption = html("figcaption", "", figure);
  html("h3", "", caption, title);
  const legend = html("div", "legend", caption);
  const root = svg("svg", { role: "img", "aria-label": title }, figure);
  return { svg: root, legend };
}
function entry(chart, color, label, about, dash) {
  const item = html("span", "", chart.legend);
  if (about) item.title = about;
  if (dash === undefined) html("i", "", item).style.background = color;
  else svg("path", { d: "M1,5h20", style: `stroke: ${color}; stroke-dasharray: ${dash || "none"}` }, svg("svg", { class: "dash", width: 22, height: 10 }, item));
  if (label) html("span", "name", item, label + " ");
  return html("b", "", item);
}
function listen(chart) {
  charts.push(chart);
  const move = event => {
    const at = event.clientX - chart.svg.getBoundingClientRect().left;
    const wanted = chart.view.x0 + (at - chart.view.x(chart.view.x0)) / (chart.view.x(chart.view.x1) - chart.view.x(chart.view.x0)) * (chart.view.x1 - chart.view.x0);
    show(steps.reduce((best, s) => Math.abs(s - wanted) < Math.abs(best - wanted) ? s : best, first));
  };
  chart.svg.addEventListener("pointermove", move);
  chart.svg.addEventListener("pointerdown", move);
  chart.svg.addEventListener("pointerleave", () => show(null));
}
function cross(chart, step) {
  const { root, x, base, width } = chart.view;
  root.querySelector(".hover")?.remove();
  if (step === null) return null;
  const layer = svg("g", { class: "hover" }, root);
  svg("line", { class: "cross", x1: x(step), x2: x(step), y1: TOP, y2: base }, layer);
  const half = 7 + String("step " + step).length * 3.1, at = Math.min(width - half, Math.max(half, x(step)));
  svg("rect", { x: at - half, y: base + 4, width: 2 * half, height: 17, rx: 4, style: "fill: var(--text)" }, layer);
  svg("text", { x: at, y: HEIGHT - 6, "text-anchor": "middle", style: "fill: var(--card); font-weight: 600" }, layer, "step " + step);
  return layer;
}

function lineChart(parent, spec) {
  const unit = spec.unit ? ` (${spec.unit})` : "";
  const chart = card(parent, spec.title + unit);
  const used = {};
  for (const s of spec.series) {
    used[s.role] = (used[s.role] ?? -1) + 1;
    s.color ??= `var(--${s.role}${used[s.role] % 2})`;
    s.at = new Map(s.points);
    s.value = entry(chart, s.color, s.label, s.about, s.dash);
  }
  if (spec.series.some(s => s.points.some(p => p[1] !== null && p[1] < spec.floor)))
    html("span", "", chart.legend, `below ${spec.floor} cut off`);
  chart.draw = () => {
    const shown = spec.series.filter(s => !s.hidden);
    const finite = shown.flatMap(s => s.points.flatMap(p => p.slice(1))).filter(v => v !== null);
    const axis = (spec.log && logAxis(finite)) || linearAxis(finite.length ? finite : [0], spec);
    const view = chart.view = frame(chart, axis);
    // Of many curves the dots would hide each other.
    const crowded = shown.length > 6;
    const layers = new Map(shown.map(s => [s, svg("g", s.arm === undefined ? {} : { "data-arm": s.arm }, view.root)]));
    const bottom = v => Math.min(view.y(v), view.base).toFixed(1);
    for (const s of shown) {
      const band = s.points.filter(p => p[2] !== undefined && p[2] !== null);
      const edge = (points, i) => points.map(p => `${view.x(p[0]).toFixed(1)},${bottom(p[i])}`);
      if (band.length) svg("polygon", { class: "band", points: [...edge(band, 2), ...edge(band.reverse(), 3)].join(" "), style: `fill: ${s.color}` }, layers.get(s));
    }
    for (const s of [...shown].reverse()) {
      const layer = layers.get(s);
      let path = "", pen = "M";
      for (const [step, value] of s.points) {
        if (value === null) {
          pen = "M";
          const a = view.x(step), b = view.base;
          const mark = svg("path", { class: "lost", d: `M${a - 3},${b - 7}l6,6m0,-6l-6,6` }, layer);
          svg("title", {}, mark, `step ${step}: not finite`);
          continue;
        }
        path += `${pen}${view.x(step).toFixed(1)},${bottom(value)}`;
        pen = "L";
      }
      const sparse = s.points.length * 2 < s.points[s.points.length - 1][0] - s.points[0][0];
      const dash = s.dash === undefined ? "" : `; stroke-dasharray: ${s.dash || "none"}`;
      svg("path", { class: sparse ? "sparse" : "", d: path, style: `stroke: ${s.color}${dash}` }, layer);
      const radius = sparse || s.points.length < 3 ? 3.6 : s.points.length <= 60 && !crowded ? 1.9 : 0;
      if (radius) for (const [step, value] of s.points) if (value !== null)
        svg("circle", { cx: view.x(step), cy: Math.min(view.y(value), view.base), r: radius, style: `fill: ${s.color}` }, layer);
    }
  };
  chart.show = step => {
    const layer = cross(chart, step);
    for (const s of spec.series.filter(s => !s.hidden)) {
      const value = step === null ? s.points[s.points.length - 1][1] : s.at.get(step);
      s.value.textContent = format(value);
      if (layer && value !== null && value !== undefined)
        svg("circle", { cx: chart.view.x(step), cy: Math.min(chart.view.y(value), chart.view.base), r: 4, style: `fill: ${s.color}; stroke: var(--card); stroke-width: 1.5` }, layer);
    }
  };
  listen(chart);
}

function stackedChart(parent, phases) {
  const chart = card(parent, "Seconds per phase", true);
  chart.bars = true;
  const all = phases.map(p => p.points.reduce((sum, q) => sum + (q[1] ?? 0), 0));
  const total = all.reduce((a, b) => a + b, 0) || 1;
  phases.forEach((p, i) => {
    p.at = new Map(p.points);
    p.color = `var(--${p.label.replace(/ /g, "-")})`;
    p.value = entry(chart, p.color, p.label, p.about);
    p.share = `${(100 * all[i] / total).toFixed(all[i] / total < .1 ? 1 : 0)} %`;
  });
  chart.draw = () => {
    const bins = Math.min(steps.length, 160), per = Math.ceil(steps.length / bins), stacks = [];
    for (let i = 0; i < steps.length; i += per) {
      const group = steps.slice(i, i + per);
      stacks.push([group, phases.map(p => group.reduce((sum, s) => sum + (p.at.get(s) ?? 0), 0) / group.length)]);
    }
    const axis = linearAxis(stacks.map(s => s[1].reduce((a, b) => a + b, 0)), { low: 0 });
    const view = chart.view = frame(chart, axis);
    for (const [group, seconds] of stacks) {
      const a = view.x(group[0] - .5), b = view.x(group[group.length - 1] + .5), gap = Math.min(2, (b - a) * .2);
      const wide = Math.min(b - a - gap, 46), from = (a + b - wide) / 2;
      let below = 0;
      phases.forEach((p, i) => {
        if (!seconds[i]) return;
        const top = view.y(below + seconds[i]);
        svg("rect", { x: from, y: top, width: wide, height: view.y(below) - top, style: `fill: ${p.color}` }, view.root);
        below += seconds[i];
      });
    }
  };
  chart.show = step => {
    cross(chart, step);
    for (const p of phases) p.value.textContent = step === null ? p.share : p.at.has(step) ? format(p.at.get(step)) + " s" : "-";
  };
  listen(chart);
}

let pending = null;
function show(step) {
  if (pending === null) requestAnimationFrame(() => {
    const wanted = pending.step;
    pending = null;
    for (const chart of charts) if (chart.view) chart.show(wanted);
  });
  pending = { step };
}
function draw() {
  for (const chart of charts) if (chart.svg.clientWidth) { chart.draw(); chart.show(null); }
}

if (steps.length) {
  const parent = document.getElementById("charts"), more = document.getElementById("more");
  for (const spec of data.charts) lineChart(parent, spec);
  if (data.phases.length) stackedChart(parent, data.phases);
  for (const spec of data.more) lineChart(document.getElementById("more-charts"), spec);
  more.hidden = !data.more.length;
  more.addEventListener("toggle", draw);
  const about = document.getElementById("curves-about");
  about.append("By step; a figure beside a name is the last one, or that of the step under the pointer. ");
  if (data.pretraining > 0 && first <= data.pretraining) {
    html("span", "key", about);
    about.append(` value pretraining, steps 1 to ${data.pretraining}: the critic alone trains.`);
  }
  let width = 0;
  new ResizeObserver(() => { if (width !== parent.clientWidth) { width = parent.clientWidth; draw(); } }).observe(parent);
} else {
  document.getElementById("curves-about").textContent = "No step has finished yet.";
  document.getElementById("more").hidden = true;
}
