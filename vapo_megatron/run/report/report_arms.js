
(() => {
  const keys = document.getElementById("arms");
  if (!keys) return;
  const buttons = [...keys.querySelectorAll("button")];
  const arm = button => Number(button.dataset.arm), isPicked = button => button.getAttribute("aria-pressed") === "true";
  function update() {
    const picked = buttons.filter(isPicked).map(arm);
    for (const u of charts) {
      const rows = u.root.closest("figure").querySelectorAll(".legend tr");
      u.series.forEach((s, i) => {
        if (!i) return;
        const show = !picked.length || picked.includes(s.arm);
        rows[i].hidden = !show;
        if (s.show !== show) u.setSeries(i, { show }, false);
      });
    }
    // Too many names would fill the charts; the buttons show them.
    document.getElementById("charts").classList.toggle("crowded", (picked.length || buttons.length) > 6);
  }
  function lift(only) {
    for (const u of charts) {
      const isThere = u.series.some(s => s.arm === only && s.show);
      for (const s of u.series) s.alpha = isThere && s.arm !== only ? .08 : 1;
      u.redraw(false);
    }
  }
  for (const button of buttons) {
    button.addEventListener("click", () => { button.setAttribute("aria-pressed", !isPicked(button)); update(); lift(arm(button)); });
    button.addEventListener("pointerenter", () => lift(arm(button)));
    button.addEventListener("pointerleave", () => lift(null));
  }
  update();
})();
