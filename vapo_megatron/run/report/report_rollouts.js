
(() => {
  const bar = document.getElementById("shading");
  if (!bar || !(data.tokens ?? []).length) return;
  const sections = [...document.querySelectorAll("section.step")];
  const texts = [...document.querySelectorAll("pre[data-response]")];
  const plain = new Map(texts.map(pre => [pre, [...pre.childNodes]]));

  const step = select("Step"), problem = select("Problem");
  for (const section of sections) html("option", "", step, section.dataset.step);
  function select(name) { return html("select", "", html("label", "", bar, name + " ")); }
  function pickStep() {
    for (const section of sections) section.hidden = section.dataset.step !== step.value;
    problem.replaceChildren();
    html("option", "", problem, "all").value = "";
    groups().forEach((group, i) => { html("option", "", problem, group.querySelector(".prompt").textContent).value = i; });
    pickProblem();
  }
  function pickProblem() {
    groups().forEach((group, i) => {
      group.hidden = problem.value !== "" && problem.value !== String(i);
      if (problem.value === String(i)) group.open = true;
    });
  }
  function groups() { return [...sections[step.selectedIndex].querySelectorAll("details.group")]; }
  step.selectedIndex = sections.length - 1;
  step.addEventListener("change", pickStep);
  problem.addEventListener("change", pickProblem);
  pickStep();

  const known = data.tokens.filter(t => t);
  if (!known.length) return;
  // A run without a critic has no values.
  const numbers = ["values", "advantages", "entropy"].filter(name => known.every(t => t[name]));
  const names = { pieces: "text", values: "value", advantages: "advantage", entropy: "entropy" };
  const group = html("span", "", bar), scale = html("span", "scale", bar), readout = html("output", "", bar);
  const buttons = {};
  for (const kind of ["pieces", ...numbers]) {
    buttons[kind] = html("button", "", group, names[kind]);
    buttons[kind].type = "button";
    buttons[kind].addEventListener("click", () => choose(kind));
  }
  // The 99th percentile: one outlier must not make all other tokens pale.
  const spans = {};
  for (const kind of numbers) {
    const sizes = known.flatMap(t => t[kind]).filter(v => v !== null).map(Math.abs).sort((a, b) => a - b);
    spans[kind] = sizes[Math.floor(.99 * (sizes.length - 1))] || 1;
  }
  let kind = numbers[0] ?? "pieces";

  function color(value) {
    if (value === null) return "var(--line)";
    const part = Math.max(-1, Math.min(1, value / spans[kind]));
    return `rgb(var(${part < 0 ? "--low" : "--high"}) / ${(.6 * Math.abs(part)).toFixed(3)})`;
  }
  function place(tokens, i) { return tokens.gap && i >= tokens.gap[0] ? i + tokens.gap[1] : i; }
  // What the environment wrote has no numbers: the policy did not sample it.
  function showTurn(pre, number, reward, first, leftOut, last) {
    html("span", "turn", pre, `turn ${number}, reward ${reward < 0 ? "" : "+"}${format(reward)}`);
    if (!first) return;
    const span = html("span", "observation", pre, first);
    if (leftOut) {
      html("span", "gap", span, `${leftOut.toLocaleString("en")} characters left out; see rollouts/`);
      span.append(last);
    }
  }
  function describe(tokens, i) {
    const found = numbers.map(name => `${names[name]} ${format(tokens[name][i])}${name === "entropy" ? " nat" : ""}`);
    return `token ${place(tokens, i) + 1}: ${found.join(", ")}`;
  }
  function shade(pre) {
    const tokens = data.tokens[pre.dataset.response];
    if (!tokens || kind === "pieces") { pre.replaceChildren(...plain.get(pre)); return; }
    pre.replaceChildren();
    const ends = new Map((tokens.turns ?? []).map((turn, i) => [turn[0], [i + 1, ...turn.slice(1)]]));
    tokens.pieces.forEach((piece, i) => {
      if (tokens.gap && i === tokens.gap[0]) html("span", "gap", pre, `${tokens.gap[1].toLocaleString("en")} tokens are not shown`);
      // A token that only begins a character has no text of its own.
      const span = html("span", "", pre, piece || "\u00b7");
      span.style.background = color(tokens[kind][i]);
      span.title = describe(tokens, i);
      const end = ends.get(place(tokens, i) + 1);
      if (end) showTurn(pre, ...end);
    });
  }
  function choose(wanted) {
    kind = wanted;
    for (const name in buttons) buttons[name].setAttribute("aria-pressed", name === kind);
    scale.replaceChildren();
    if (kind !== "pieces") {
      const end = format(spans[kind]);
      scale.append(kind === "entropy" ? "0" : "-" + end);
      const ramp = html("i", "", scale);
      if (kind === "entropy") ramp.style.background = "linear-gradient(90deg, transparent, rgb(var(--high) / .6))";
      scale.append(end);
    }
    for (const pre of texts) if (pre.parentNode.open) shade(pre);
  }
  for (const pre of texts) {
    pre.parentNode.addEventListener("toggle", () => { if (pre.parentNode.open) shade(pre); });
    const show = event => { if (event.target.title) readout.textContent = event.target.title; };
    pre.addEventListener("pointerover", show);
    pre.addEventListener("pointerdown", show);
  }
  choose(kind);
})();
