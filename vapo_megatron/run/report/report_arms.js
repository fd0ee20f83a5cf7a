
(() => {
  const keys = document.getElementById("arms");
  if (!keys) return;
  const buttons = [...keys.querySelectorAll("button")], every = data.charts.flatMap(chart => chart.series);
  const arm = button => Number(button.dataset.arm), isPicked = button => button.getAttribute("aria-pressed") === "true";
  function update() {
    const picked = buttons.filter(isPicked).map(arm);
    for (const s of every) s.value.parentNode.hidden = s.hidden = picked.length > 0 && !picked.includes(s.arm);
    // Where names would fill the charts, these buttons alone tell them.
    document.getElementById("charts").classList.toggle("crowded", (picked.length || buttons.length) > 6);
    draw();
    lift(lifted);
  }
  let lifted = null;
  function lift(only) {
    lifted = only;
    const layers = [...document.querySelectorAll("g[data-arm]")], isThere = layers.some(layer => Number(layer.dataset.arm) === only);
    for (const layer of layers) layer.classList.toggle("pale", isThere && Number(layer.dataset.arm) !== only);
  }
  for (const button of buttons) {
    button.addEventListener("click", () => { button.setAttribute("aria-pressed", !isPicked(button)); update(); });
    button.addEventListener("pointerenter", () => lift(arm(button)));
    button.addEventListener("pointerleave", () => lift(null));
  }
  update();
})();
