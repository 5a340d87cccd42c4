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
