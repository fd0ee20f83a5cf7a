
(() => {
  const parent = document.getElementById("plots");
  if (!parent) return;
  if (!(data.plots ?? []).length) { parent.parentNode.hidden = true; return; }
  const DASHES = ["", "7 3", "2 3", "9 3 2 3"];
  for (const plot of data.plots) {
    if (plot.cells) cells(plot);
    else {
      const series = plot.series.map((s, i) => ({ ...s, color: `var(--series${i})`, dash: DASHES[i] }));
      html("div", "caption", lineChart(parent, { ...plot, series }), `${plot.y} by ${plot.x}`);
    }
  }
  function cells(plot) {
    const figure = card(parent, plot.title), grid = html("div", "cells", figure);
    const said = `${plot.y}, hardest at the top; their ${plot.x} from left to right. Stronger colour: more correct responses`;
    const caption = html("div", "caption", figure, said);
    grid.style.setProperty("--rows", plot.cells.length);
    grid.style.setProperty("--most", Math.max(...plot.cells.map(row => row.visits.length)));
    for (const { name, visits } of plot.cells) {
      const row = html("div", "", grid);
      for (const [step, right, of] of visits) {
        const cell = html("i", "", row);
        cell.title = `${name}, step ${step}: ${right} of ${of} correct`;
        cell.style.background = `rgb(var(--high) / ${(.08 + .92 * right / of).toFixed(2)})`;
      }
    }
    const tell = event => { if (event.target.title) caption.textContent = event.target.title; };
    grid.addEventListener("pointerover", tell);
    grid.addEventListener("pointerdown", tell);
    grid.addEventListener("pointerleave", () => { caption.textContent = said; });
  }
})();
