
(() => {
  const parent = document.getElementById("plots");
  if (!parent) return;
  if (!(data.plots ?? []).length) { parent.parentNode.hidden = true; return; }
  const drawn = data.plots.map(plot => {
    const chart = card(parent, plot.title);
    plot.series.forEach((s, i) => entry(chart, `var(--series${i})`, s.label, "", ["", "7 3", "2 3", "9 3 2 3"][i % 4]));
    html("div", "caption", chart.svg.parentNode, `${plot.y} by ${plot.x}`);
    return [plot, chart.svg];
  });
  function draw([plot, root]) {
    const width = root.clientWidth || 320, all = plot.series.flatMap(s => s.points);
    const xs = linearAxis(all.map(p => p[0]), { low: 0 }), ys = linearAxis(all.map(p => p[1]), {});
    const left = 10 + Math.max(...ys.ticks.map(t => t[1].length)) * 6.4, base = HEIGHT - BOTTOM;
    const x = v => left + 4 + (v - xs.low) / (xs.high - xs.low) * (width - left - RIGHT - 8);
    const y = v => TOP + (ys.high - v) / (ys.high - ys.low) * (base - TOP);
    root.setAttribute("height", HEIGHT);
    root.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
    root.replaceChildren();
    for (const [value, text] of ys.ticks) {
      svg("line", { class: "grid", x1: left, x2: width - RIGHT, y1: y(value), y2: y(value) }, root);
      svg("text", { x: left - 6, y: y(value) + 3.8, "text-anchor": "end" }, root, text);
    }
    for (const [value, text] of xs.ticks) svg("text", { x: x(value), y: HEIGHT - 6, "text-anchor": "middle" }, root, text);
    plot.series.forEach((s, i) => {
      const path = s.points.map((p, j) => `${j ? "L" : "M"}${x(p[0]).toFixed(1)},${y(p[1]).toFixed(1)}`).join("");
      const dash = ["none", "7 3", "2 3", "9 3 2 3"][i % 4];
      svg("path", { d: path, style: `stroke: var(--series${i}); stroke-dasharray: ${dash}` }, root);
      for (const p of s.points) {
        const dot = svg("circle", { cx: x(p[0]), cy: y(p[1]), r: 3, style: `fill: var(--series${i})` }, root);
        svg("title", {}, dot, `${s.label}: ${format(p[1])} at ${format(p[0])}`);
      }
    });
  }
  let width = 0;
  new ResizeObserver(() => { if (width !== parent.clientWidth) { width = parent.clientWidth; drawn.forEach(draw); } }).observe(parent);
})();
