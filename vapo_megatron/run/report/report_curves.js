
// Tells uPlot of the page's curves. A point is [x, y], in a band [x, y, lowest, highest]; y null: not finite.
const charts = [];

function legendLabel({ label, about, color, dash }) {
  const node = html("span"), mark = html("i", dash === undefined ? "" : "dash", node);
  let at = 0;
  const parts = (dash || "1").split(" ").map((length, i) => `${i % 2 ? "transparent" : color} ${at}px ${at += Number(length)}px`);
  mark.style.background = `repeating-linear-gradient(90deg, ${parts})`;
  html("span", "name", node, label);
  node.title = about ?? "";
  return node;
}
// A canvas knows no variables of the page's style.
function paint(color) { return getComputedStyle(document.documentElement).getPropertyValue(color.slice(4, -1)); }

function shadePretraining({ ctx, bbox: { top, height }, scales: { x: { min, max } }, valToPos }) {
  const [from, to] = [Math.max(min, .5), Math.min(max, data.pretraining + .5)].map(step => valToPos(step, "x", true));
  if (to <= from) return;
  ctx.save();
  Object.assign(ctx, { fillStyle: paint("var(--shade)"), strokeStyle: paint("var(--shade-line)"), lineWidth: 1 });
  ctx.fillRect(from, top, to - from, height);
  ctx.setLineDash([3, 3]);
  if (max > data.pretraining + .5) ctx.stroke(new Path2D(`M${to},${top}v${height}`));
  ctx.restore();
}
function markNotFinite({ ctx, bbox: { top, height }, scales: { x: { min, max } }, series, valToPos }) {
  ctx.save();
  Object.assign(ctx, { fillStyle: paint("var(--wrong)"), font: `bold ${14 * uPlot.pxRatio}px sans-serif`, textAlign: "center", textBaseline: "bottom" });
  for (const s of series) if (s.at && s.show) for (const [x, y] of s.at)
    if (y === null && x >= min && x <= max) ctx.fillText("\u00d7", valToPos(x, "x", true), top + height);
  ctx.restore();
}
const resized = new ResizeObserver(entries => {
  for (const { target } of entries) if (target.clientWidth) target.chart.setSize({ width: target.clientWidth, height: target.chart.height });
});
function draw(figure, spec, series, table, bands) {
  const host = html("div", "", figure), sides = { pad: .05, mode: 1 };
  const ticks = { stroke: () => paint("var(--muted)"), ticks: { show: false } }, grid = { stroke: () => paint("var(--grid)"), width: 1 };
  const texts = (u, splits) => splits.map(v => v === null ? "" : format(v, 6));
  const linear = (u, low, high) => !low && !high ? [0, spec.high ?? 1]
    : uPlot.rangeNum(low, high, { min: { ...sides, soft: spec.low, hard: spec.floor }, max: { ...sides, soft: spec.high } });
  const u = host.chart = new uPlot({
    width: host.clientWidth || 320, height: document.getElementById("arms") ? 230 : 176, padding: [8, 20, 0, 0], bands,
    series: [{ label: spec.x ?? "step", value: (u, x) => x === null ? "" : format(x) }, ...series],
    axes: [
      { ...ticks, size: 24, space: 60, grid: { show: false }, values: (u, splits) => texts(u, splits.map(v => spec.x || v % 1 === 0 ? v : null)) },
      { ...ticks, size: (u, values) => 14 + 7 * Math.max(1, ...(values ?? []).map(v => v.length)), grid, values: texts },
    ],
    scales: {
      x: { time: false, range: (u, min, max) => { const room = spec.room ?? (min === max ? .5 : 0); return [min - room, max + room]; } },
      y: spec.log ? { distr: 3, clamp: (u, value, low) => low, range: (u, low, high) => uPlot.rangeLog(low ?? 1, high ?? 1, 10, true) } : { range: linear },
    },
    cursor: {
      y: false, points: { size: 9 }, sync: spec.x ? {} : { key: "steps" }, dataIdx: (u, i, place) => place,
      move: (u, left, top) => [left < 0 ? left : u.valToPos(u.data[0][u.posToIdx(left)], "x"), top],
    },
    legend: { markers: { show: false }, mount: (u, legend) => { legend.classList.add("legend"); figure.firstChild.append(legend); } },
    hooks: {
      drawClear: data.pretraining > 0 && !spec.x ? [shadePretraining] : [], draw: [markNotFinite],
      setSeries: [(u, i, { show }) => { if (show !== undefined) for (const edge of u.series[i].edges ?? []) u.setSeries(edge, { show }, false); }],
    },
  }, table, host);
  Object.assign(u.root, { role: "img", ariaLabel: figure.querySelector("h3").textContent });
  // uPlot itself follows only a mouse.
  const touch = ({ pointerType, offsetX, offsetY }) => { if (pointerType === "touch") u.setCursor({ left: offsetX, top: offsetY }, true, true); };
  u.over.addEventListener("pointermove", touch);
  charts.push(u);
  resized.observe(host);
}

function lineChart(parent, spec) {
  const figure = card(parent, spec.title + (spec.unit ? ` (${spec.unit})` : ""));
  const used = {}, edges = [], bands = [], tables = [[spec.x ? [] : data.steps]];
  const column = (s, which) => tables.push([s.points.map(p => p[0]), s.points.map(p => p[which])]);
  const curves = spec.series.map(s => {
    used[s.role] = (used[s.role] ?? -1) + 1;
    s.color ??= `var(--${s.role}${used[s.role] % 2})`;
    const at = new Map(s.points), last = s.points.at(-1), stroke = () => paint(s.color);
    const sparse = !spec.x && s.points.length * 2 < last[0] - s.points[0][0], dash = s.dash ?? (sparse ? "2 4" : "");
    const large = sparse || at.size < 3;
    const curve = {
      at, stroke, arm: s.arm, label: legendLabel(s), width: 1.8, dash: dash ? dash.split(" ").map(Number) : [],
      value: (u, y, i, place) => place !== null ? format(at.get(u.data[0][place])) : spec.x ? "" : format(last[1]),
      // Of many curves the dots would hide each other.
      points: { size: large ? 7 : 5, fill: stroke, width: 0, show: (u, i, from, to) =>
        large || Math.min(to - from, at.size) <= 60 && u.series.filter(s => s.at && s.show).length <= 6 },
    };
    if (s.points.some(p => p.length > 2)) {
      for (const which of [2, 3]) { edges.push({ arm: s.arm, class: "edge", width: 0, points: { show: false } }); column(s, which); }
      curve.edges = [edges.length - 1, edges.length];
      bands.push({ series: [...curve.edges].reverse(), fill: () => paint(s.color) + "22" });
    }
    return curve;
  });
  for (const s of spec.series) column(s, 1);
  if (spec.series.some(s => s.points.some(p => p[1] !== null && p[1] < spec.floor)))
    html("div", "legend", figure.firstChild, `below ${spec.floor} cut off`);
  // 2: beside a value that is not finite the curve is broken as far as its next points.
  draw(figure, spec, [...edges, ...curves], uPlot.join(tables, tables.map(() => [0, 2])), bands);
  return figure;
}
function stackedChart(parent, spec) {
  const table = [spec.steps];
  const series = spec.series.map((s, i) => {
    const name = `--${s.label.replace(/ /g, "-")}`, color = `var(${name})`;
    // A phase that the style sheet does not know yet.
    if (!paint(color)) document.documentElement.style.setProperty(name, `hsl(${(i * 137) % 360} 40% 55%)`);
    table.push(s.seconds.map((seconds, j) => seconds + (i && table[i][j])));
    return {
      label: legendLabel({ ...s, color }), fill: () => paint(color), width: 0, points: { show: false }, paths: uPlot.paths.bars({ size: [.8, 46] }),
      value: (u, y, i, place) => place === null ? s.share : s.seconds[place] ? format(s.seconds[place]) + " s" : "-",
    };
  });
  const bands = series.slice(1).map((s, i) => ({ series: [i + 2, i + 1] }));
  draw(card(parent, spec.title, "chart wide"), { ...spec, low: 0 }, series, table, bands);
}

const about = document.getElementById("curves-about"), more = document.getElementById("more");
for (const spec of data.charts) lineChart(document.getElementById("charts"), spec);
if (data.phases) stackedChart(document.getElementById("charts"), data.phases);
for (const spec of data.more) lineChart(document.getElementById("more-charts"), spec);
more.hidden = !data.more.length;
about.append(!data.steps.length ? "No step has finished yet."
  : "By step; a figure beside a name is the last one, or that of the step under the pointer. Drag to zoom in, double-click to zoom out; click a name to hide its curve.");
if (data.pretraining > 0 && data.steps[0] <= data.pretraining) {
  html("span", "key", about);
  about.append(` value pretraining, steps 1 to ${data.pretraining}: the critic alone trains.`);
}
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => charts.forEach(u => u.redraw()));
