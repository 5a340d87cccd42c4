"""The style and the script of report.html: nothing in them is fetched, nothing depends on the data."""

from __future__ import annotations

PAGE_STYLE = """
:root { --ink: #1f2933; --soft: #52606d; --line: #e1e5ea; --accent: #0072B2; --bad: #b34700; }
* { box-sizing: border-box; }
html { scroll-behavior: smooth; -webkit-text-size-adjust: 100%; }
body { margin: 0; background: #f4f6f8; color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }
main { max-width: 1240px; margin: 0 auto; padding: 24px 20px 60px; }
header, section { background: white; border: 1px solid var(--line); border-radius: 10px; padding: 22px 26px; margin: 0 0 18px; }
h1 { font-size: 27px; line-height: 1.2; margin: 0 0 8px; letter-spacing: -0.01em; }
h2 { font-size: 20px; line-height: 1.3; margin: 0 0 10px; letter-spacing: -0.005em; }
h3 { font-size: 16px; margin: 18px 0 6px; }
h4 { font-size: 14px; margin: 20px 0 4px; color: var(--ink); }
p { margin: 6px 0; max-width: 78ch; overflow-wrap: anywhere; }
.summary p { font-size: 17px; }
.facts { display: grid; grid-template-columns: repeat(auto-fit, minmax(230px, 1fr)); gap: 8px 24px; margin: 16px 0 0;
  padding: 14px 0 0; border-top: 1px solid var(--line); }
.facts dt { font-size: 12px; color: var(--soft); }
.facts dd { margin: 0; overflow-wrap: anywhere; }
nav { display: flex; flex-wrap: wrap; gap: 6px 18px; margin-top: 14px; padding-top: 12px; border-top: 1px solid var(--line); }
a { color: var(--accent); text-decoration: none; }
a:hover, a:focus-visible { text-decoration: underline; }
.table { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: 13.5px; font-variant-numeric: tabular-nums; }
th { text-align: left; font-weight: 600; color: var(--soft); font-size: 12.5px; border-bottom: 2px solid var(--line);
  padding: 6px 14px 6px 0; white-space: nowrap; vertical-align: bottom; }
td { padding: 7px 14px 7px 0; border-bottom: 1px solid var(--line); vertical-align: top; white-space: nowrap; }
td.wraps { white-space: normal; min-width: 170px; overflow-wrap: anywhere; }
th.number, td.number { text-align: right; }
tr.chosen td { background: #eaf4fb; font-weight: 600; }
tr.chosen td.wraps { font-weight: 400; }
.no { color: var(--bad); }
.notes { margin: 6px 0 0; padding-left: 18px; color: var(--soft); font-size: 12.5px; }
details { border-top: 1px solid var(--line); margin-top: 18px; padding-top: 4px; }
summary { cursor: pointer; padding: 10px 0; font-size: 15px; }
summary span { color: var(--soft); margin-left: 6px; }
details.inner { margin-top: 8px; }
details.inner summary { font-size: 14px; font-weight: 600; }
.legend { display: flex; flex-wrap: wrap; gap: 2px 16px; margin: 2px 0 4px; }
.legend button { display: inline-flex; align-items: center; gap: 6px; border: 0; background: none; padding: 3px 0; margin: 0;
  font: inherit; font-size: 13px; color: var(--ink); cursor: pointer; }
.legend button[aria-pressed=false] { opacity: 0.4; text-decoration: line-through; }
.legend i { width: 13px; height: 13px; flex: none; border-radius: 2px; }
.legend i.dot { border-radius: 50%; width: 11px; height: 11px; }
.legend i.diamond { transform: rotate(45deg); width: 11px; height: 11px; border-radius: 1px; }
.legend i.dash { width: 18px; height: 0; border-top: 2px dotted; border-radius: 0; }
figure { margin: 4px 0 10px; }
.plot { width: 100%; }
figcaption { color: var(--soft); font-size: 12.5px; }
.absent { color: var(--soft); font-style: italic; }
.pair { display: grid; grid-template-columns: repeat(2, minmax(0, 1fr)); gap: 0 28px; }
@media (max-width: 900px) { .pair { grid-template-columns: minmax(0, 1fr); } }
@media (max-width: 640px) {
  main { padding: 0 0 40px; }
  header, section { border-radius: 0; border-left: 0; border-right: 0; padding: 18px 14px; margin-bottom: 10px; }
  h1 { font-size: 23px; }
  .summary p { font-size: 16px; }
  nav { flex-direction: column; }
  summary span { display: block; margin-left: 16px; }
  thead { position: absolute; width: 1px; height: 1px; overflow: hidden; clip-path: inset(50%); }
  table, tbody { display: block; width: 100%; }
  tr { display: grid; grid-template-columns: repeat(3, minmax(0, 1fr)); gap: 4px 12px; border: 1px solid var(--line);
    border-radius: 8px; padding: 9px 12px; margin: 8px 0; }
  tr.chosen { background: #eaf4fb; border-color: #b5d8ee; }
  tr.chosen td { background: none; }
  td, td.number, td.wraps { display: block; padding: 0; border: 0; text-align: left; white-space: normal; min-width: 0; }
  td::before { content: attr(data-label); display: block; color: var(--soft); font-weight: 400; font-size: 11.5px; }
  td.long { grid-column: span 2; }
  td.wraps, td.head { grid-column: 1 / -1; }
  td.head { font-weight: 600; font-size: 15px; }
  td.head::before { display: none; }
}
@media (min-width: 1900px) {
  body { font-size: 17px; }
  main { max-width: 1760px; }
  table { font-size: 15.5px; }
  th, .notes, figcaption { font-size: 14.5px; }
  .legend button { font-size: 14.5px; }
}
@media print {
  body { background: white; }
  main { padding: 0; }
  header, section { border: 0; padding: 0 0 14px; }
  figure, tr, h2, h3, h4 { break-inside: avoid; }
  h2, h3, h4 { break-after: avoid; }
  .table { overflow: visible; }
  table { font-size: 9.5px; }
  th, td { font-size: 9.5px; padding: 3px 6px 3px 0; white-space: normal; }
  td.wraps { min-width: 0; }
}
"""

PAGE_SCRIPT = """
(function () {
  "use strict";
  const figures = JSON.parse(document.getElementById("figures").textContent);
  const config = {responsive: true, displaylogo: false, modeBarButtonsToRemove: ["select2d", "lasso2d", "autoScale2d"]};
  let busy = false;
  function next() {
    const place = [...document.querySelectorAll(".plot:not([data-drawn])")].find((div) => div.offsetParent !== null);
    if (!place) { busy = false; document.body.dataset.ready = "true"; return; }
    busy = true;
    place.dataset.drawn = "true";
    const figure = figures[Number(place.dataset.figure)];
    const narrow = window.matchMedia("(max-width: 640px)").matches;
    if (narrow) { figure.layout.font.size = 11; figure.layout.dragmode = false; }
    else if (window.matchMedia("(min-width: 1900px)").matches) figure.layout.font.size = 15;
    Plotly.newPlot(place, figure.data, figure.layout, narrow ? {...config, displayModeBar: false} : config)
      .then(() => window.setTimeout(next, 0));
  }
  document.querySelectorAll(".legend button").forEach((button) => button.addEventListener("click", () => {
    const plot = button.closest("figure").querySelector(".plot");
    const shown = button.getAttribute("aria-pressed") !== "true";
    const numbers = plot.data.flatMap((trace, number) => trace.name === button.dataset.trace ? [number] : []);
    Plotly.restyle(plot, {visible: shown}, numbers);
    button.setAttribute("aria-pressed", String(shown));
  }));
  document.querySelectorAll("details").forEach((details) => details.addEventListener("toggle", () => { if (!busy) next(); }));
  next();
})();
"""
