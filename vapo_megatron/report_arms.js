
(() => {
  const keys = document.getElementById("arms");
  if (!keys) return;
  const buttons = [...keys.querySelectorAll("button")], every = data.charts.flatMap(chart => chart.series);
  function update() {
    const picked = buttons.filter(button => button.getAttribute("aria-pressed") === "true").map(button => Number(button.dataset.arm));
    for (const s of every) s.value.parentNode.hidden = s.hidden = picked.length > 0 && !picked.includes(s.arm);
    draw();
  }
  for (const button of buttons) button.addEventListener("click", () => {
    button.setAttribute("aria-pressed", button.getAttribute("aria-pressed") !== "true");
    update();
  });
})();
