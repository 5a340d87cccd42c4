"use strict";
// Draws the figures of a report where they are seen, and again when the colours change.
(() => {
  const texts = JSON.parse(document.getElementById("figures").textContent).map((figure) => JSON.stringify(figure));
  const coloured = (text) => JSON.parse(text.replace(/"(#[0-9a-fA-F]{6})"/g, (_, colour) => `"${Page.shade(colour)}"`));
  const mark = ({type, marker, mode}) => (type === "bar" ? "" : marker.symbol === "line-ew" ? "dash" : mode === "lines" ? "" : marker.symbol === "diamond" ? "diamond" : "dot");
  const swatch = ({type, marker}) => {
    if (type === "bar" && (marker.pattern || {}).shape === "/") return `repeating-linear-gradient(135deg, ${marker.pattern.fgcolor} 0 2px, ${marker.color} 2px 5px)`;
    return type === "bar" || !marker.line || !marker.line.color ? marker.color : marker.line.color;
  };
  const show = (place) => {
    const figure = coloured(texts[Number(place.dataset.figure)]), hidden = new Set([...place.parentElement.querySelectorAll("[aria-pressed=false]")].map((button) => button.dataset.trace));
    figure.data.forEach((trace) => { if (hidden.has(trace.name)) trace.visible = false; });
    const narrow = window.innerWidth <= 640;
    const done = Page.draw(place, figure.data, {...figure.layout, dragmode: narrow ? false : "zoom"});
    const entries = [...new Map(figure.data.map((trace) => [trace.name, [trace.name, swatch(trace), mark(trace)]])).values()];
    const legend = place.parentElement.querySelector(".legend");
    Page.legend(legend, entries.length > 1 ? entries : [], (name, shown) => {
      Plotly.restyle(place, {visible: shown}, place.data.flatMap((trace, number) => (trace.name === name ? [number] : [])));
    });
    legend.querySelectorAll("button").forEach((button) => { if (hidden.has(button.dataset.trace)) button.setAttribute("aria-pressed", "false"); });
    return done;
  };
  let busy = false;
  const next = () => {
    const place = [...document.querySelectorAll(".plot:not([data-drawn])")].find((div) => div.offsetParent !== null);
    busy = Boolean(place);
    if (place) show(place).then(() => window.setTimeout(next, 0)); else document.body.dataset.ready = "true";
  };
  const again = () => { document.querySelectorAll(".plot").forEach((place) => { delete place.dataset.drawn; }); if (!busy) next(); };
  Page.themes(again);
  document.querySelectorAll("details").forEach((details) => details.addEventListener("toggle", () => { if (!busy) next(); }));
  let width = window.innerWidth;
  window.addEventListener("resize", () => { if (window.innerWidth !== width) { width = window.innerWidth; again(); } });
  next();
})();
