
(() => {
  const parent = document.getElementById("plots");
  if (!parent) return;
  if (!(data.plots ?? []).length) { parent.parentNode.hidden = true; return; }
  const DASHES = ["", "7 3", "2 3", "9 3 2 3"];
  const drawn = data.plots.map(plot => {
    const chart = card(parent, plot.title), root = chart.svg;
    const caption = html("div", "caption", root.parentNode, plot.cells ? `${plot.y}, the hardest above, and their ${plot.x} from left to right; the stronger the colour, the more responses right` : `${plot.y} by ${plot.x}`);
    return plot.cells ? cells(plot, chart, caption) : lines(plot, chart, caption);
  });

  function lines(plot, chart, caption) {
    const root = chart.svg, said = caption.textContent;
    const values = plot.series.map((s, i) => entry(chart, `var(--series${i})`, s.label, "", DASHES[i]));
    const all = plot.series.flatMap(s => s.points), places = [...new Set(all.map(p => p[0]))].sort((a, b) => a - b);
    const xs = linearAxis(places, plot.x === "step" ? {} : { low: 0 }), ys = linearAxis(all.map(p => p[1]), plot);
    let x = null;
    function draw() {
      const { width, left, grid, y } = upright(root, ys);
      x = v => left + 4 + (v - xs.low) / (xs.high - xs.low) * (width - left - RIGHT - 8);
      grid();
      for (const [value, text] of xs.ticks) {
        const half = text.length * 3.2, at = Math.min(width - half, x(value));
        svg("text", { x: at, y: HEIGHT - 6, "text-anchor": "middle" }, root, text);
      }
      plot.series.forEach((s, i) => {
        const path = s.points.map((p, j) => `${j ? "L" : "M"}${x(p[0]).toFixed(1)},${y(p[1]).toFixed(1)}`).join("");
        svg("path", { d: path, style: `stroke: var(--series${i}); stroke-dasharray: ${DASHES[i] || "none"}` }, root);
        if (s.points.length <= 20) for (const p of s.points) svg("circle", { cx: x(p[0]), cy: y(p[1]), r: 2.6, style: `fill: var(--series${i})` }, root);
      });
    }
    function show(place) {
      root.querySelector(".hover")?.remove();
      caption.textContent = place === null ? said : `${plot.x}: ${format(place)}`;
      plot.series.forEach((s, i) => { values[i].textContent = place === null ? "" : format((s.points.find(p => p[0] === place) ?? [])[1]); });
      if (place !== null) svg("line", { class: "cross", x1: x(place), x2: x(place), y1: TOP, y2: HEIGHT - BOTTOM }, svg("g", { class: "hover" }, root));
    }
    const move = event => {
      const at = event.clientX - root.getBoundingClientRect().left;
      show(places.reduce((best, v) => Math.abs(x(v) - at) < Math.abs(x(best) - at) ? v : best, places[0]));
    };
    root.addEventListener("pointermove", move);
    root.addEventListener("pointerdown", move);
    root.addEventListener("pointerleave", () => show(null));
    return draw;
  }

  function cells(plot, chart, caption) {
    const root = chart.svg, said = caption.textContent, most = Math.max(...plot.cells.map(row => row.visits.length));
    root.addEventListener("pointerleave", () => { caption.textContent = said; });
    return () => {
      const wide = clear(root) / most, high = HEIGHT / plot.cells.length;
      plot.cells.forEach((row, i) => row.visits.forEach(([step, right, of], j) => {
        const place = { x: j * wide, y: i * high, width: wide - Math.min(1, wide / 4), height: high - Math.min(1, high / 4) };
        const rect = svg("rect", { ...place, style: `fill: rgb(var(--high) / ${(.08 + .92 * right / of).toFixed(2)})` }, root);
        const tell = () => { caption.textContent = `${row.name}, step ${step}: ${right} of ${of} right`; };
        rect.addEventListener("pointerenter", tell);
        rect.addEventListener("pointerdown", tell);
      }));
    };
  }

  let width = 0;
  new ResizeObserver(() => { if (width !== parent.clientWidth) { width = parent.clientWidth; drawn.forEach(draw => draw()); } }).observe(parent);
})();
