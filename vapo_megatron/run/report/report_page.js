"use strict";
const data = JSON.parse(document.getElementById("data").textContent);

function html(name, className, parent, text) {
  const node = document.createElement(name);
  if (className) node.className = className;
  if (text !== undefined) node.textContent = text;
  if (parent) parent.append(node);
  return node;
}
function format(value, digits = 3) {
  if (value === undefined) return "";
  if (value === null) return "not finite";
  const size = Math.abs(value);
  if (size && (size < 1e-3 || size >= 1e7)) return Number(value.toPrecision(digits)).toExponential();
  return value.toLocaleString("en", { maximumSignificantDigits: Math.max(digits, Math.ceil(Math.log10(size + 1))) });
}
function card(parent, title, className = "chart") {
  const figure = html("figure", className, parent);
  html("h3", "", html("figcaption", "", figure), title);
  return figure;
}
