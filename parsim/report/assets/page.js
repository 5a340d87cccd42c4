"use strict";
// What the report and the explorer share: how quantities are written, how figures look in light and dark, their legends, the switch.
const Page = (() => {
  const root = document.documentElement, system = window.matchMedia("(prefers-color-scheme: dark)");

  // Plotly reads some HTML in its texts: names of the user are escaped before they get there.
  const safe = (text) => String(text).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");

  // ---- quantities, as parsim/units.py writes them ---------------------------------------------------------------------------
  const whole = (value) => Math.round(value).toLocaleString("en-US");
  const digits = (value, count = 3) => (Math.abs(value) >= 999.5 && Math.abs(value) < 1e6 ? whole(value) : String(Number(value.toPrecision(count))));
  const stepped = (value, steps) => {
    const [size, unit] = steps.find(([scale]) => Math.abs(value) >= scale) || steps[steps.length - 1];
    return `${digits(value / size)} ${unit}`;
  };
  const FORMATS = {
    time: (value) => {
      if (value >= 172800) return `${digits(value / 86400)} days`;
      if (value >= 3600) return `${Math.floor(value / 3600)} h ${String(Math.floor((value % 3600) / 60)).padStart(2, "0")} min`;
      return value === 0 ? "0 s" : stepped(value, [[60, "min"], [1, "s"], [1e-3, "ms"], [1e-6, "us"], [1e-9, "ns"]]);
    },
    bytes: (value) => {
      const [size, unit] = [[2 ** 30, "GiB"], [2 ** 20, "MiB"], [2 ** 10, "KiB"], [1, "B"]].find(([scale]) => value >= scale) || [1, "B"];
      return `${value / size >= 100 || size === 1 ? Math.round(value / size) : digits(value / size)} ${unit}`;
    },
    rate: (value) => stepped(value, [[1e9, "G samples/s"], [1e6, "M samples/s"], [1e3, "k samples/s"], [1, "samples/s"]]),
    usd: (value) => {
      if (value >= 1e6) return `${value >= 1e9 ? whole(value / 1e6) : Number((value / 1e6).toPrecision(4))} million USD`;
      return `${value >= 1000 ? whole(value) : value >= 1 || value === 0 ? value.toFixed(2) : digits(value)} USD`;
    },
    energy: (value) => (value >= 1e3 ? `${(value / 1e3).toLocaleString("en-US", {minimumFractionDigits: 1, maximumFractionDigits: 1})} MWh` : `${digits(value)} kWh`),
    share: (value) => `${(100 * value).toFixed(1)}%`,
  };
  const range = (kind, low, high) => { // one unit is written once: 713–969 ms
    const [from, to] = [FORMATS[kind](low), FORMATS[kind](high)], unit = from.replace(/^[0-9.,]+/, "");
    return to.replace(/^[0-9.,]+/, "") === unit ? `${from.slice(0, from.length - unit.length)}–${to}` : `${from} to ${to}`;
  };
  const format = (kind, value) => (value === null || value === undefined ? "–" : FORMATS[kind](value));

  // ---- light and dark -------------------------------------------------------------------------------------------------------
  const probe = document.createElement("i");
  const read = (name) => { probe.style.color = `var(--${name})`; return getComputedStyle(probe).color; };
  const isDark = () => (root.dataset.theme || (system.matches ? "dark" : "light")) === "dark";
  const VARIABLES = {"#1b2530": "ink", "#4a5560": "soft", "#e8ebee": "line", "#d5dae0": "line", "#dfe3e8": "line", "#ffffff": "card"};
  const ON_DARK = {"#332288": "#9384f5", "#882255": "#d4669f", "#661100": "#cf7a55", "#117733": "#43b06d", "#8c510a": "#c98f4e", "#0072b2": "#2f97d8",
    "#4477aa": "#6d9fd0", "#aa4499": "#c96fba", "#a6761d": "#c4933a", "#b2182b": "#e0606c", "#5b8c2a": "#7fb24a", "#8c6bb1": "#a98ace"};
  const shade = (colour) => {
    const known = String(colour).toLowerCase();
    return known in VARIABLES ? read(VARIABLES[known]) : (isDark() && ON_DARK[known]) || colour;
  };
  const redraws = [];
  const label = () => { const button = document.getElementById("theme"); if (button) button.textContent = isDark() ? "Light" : "Dark"; };
  const choose = (name) => {
    if (name) root.dataset.theme = name; else delete root.dataset.theme;
    label();
    redraws.forEach((redraw) => redraw());
  };
  const themes = (redraw, chosen = choose) => { // redraw: after every change; chosen: what the switch calls
    document.body.append(probe);
    redraws.push(redraw);
    label();
    document.getElementById("theme").addEventListener("click", () => chosen(isDark() ? "light" : "dark"));
    system.addEventListener("change", () => { if (!root.dataset.theme) choose(""); });
    let before = null;
    window.addEventListener("beforeprint", () => { before = root.dataset.theme || ""; choose("light"); });
    window.addEventListener("afterprint", () => { if (before !== null) { choose(before); before = null; } });
  };

  // ---- figures --------------------------------------------------------------------------------------------------------------
  const size = () => (window.innerWidth >= 1900 ? 15 : window.innerWidth <= 640 ? 11 : 12);
  const CONFIG = {responsive: true, displaylogo: false, displayModeBar: false};
  const draw = (place, data, extra) => {
    const ink = read("ink"), soft = read("soft"), line = read("line");
    const axis = {gridcolor: line, zerolinecolor: line, linecolor: line, tickcolor: line, automargin: true, separatethousands: true, tickfont: {color: soft}, title: {font: {color: soft}, standoff: 8}};
    const layout = {paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", margin: {l: 10, r: 14, t: 10, b: 10}, hovermode: "closest", dragmode: false, ...extra,
      showlegend: false, font: {color: ink, size: size(), family: "inherit"}, hoverlabel: {bgcolor: read("card"), bordercolor: line, font: {color: ink, size: size()}, align: "left"}};
    for (const name of new Set(["xaxis", "yaxis", ...Object.keys(layout).filter((key) => /^[xy]axis\d*$/.test(key))])) {
      const given = layout[name] || {};
      layout[name] = {...axis, ...given, gridcolor: line, title: {...axis.title, ...given.title, text: given.label || (given.title || {}).text || ""}};
      layout[name].tickfont = {...axis.tickfont, ...given.tickfont};
      delete layout[name].label;
    }
    place.dataset.drawn = "true";
    return Plotly.react(place, data, layout, CONFIG);
  };

  // Entries: [name, colour, mark ("", "dot", "diamond", "dash")]; onPress(name, isShown) makes buttons of them.
  const legend = (place, entries, onPress) => {
    place.replaceChildren(...entries.map(([name, colour, mark]) => {
      const entry = document.createElement(onPress ? "button" : "span"), swatch = document.createElement("i");
      swatch.className = mark || "";
      if (mark === "dash") swatch.style.borderColor = colour; else swatch.style.background = colour;
      entry.append(swatch, document.createTextNode(name));
      if (onPress) {
        Object.assign(entry, {type: "button"}).setAttribute("aria-pressed", "true");
        entry.dataset.trace = name;
        entry.addEventListener("click", () => {
          const shown = entry.getAttribute("aria-pressed") !== "true";
          entry.setAttribute("aria-pressed", String(shown));
          onPress(name, shown);
        });
      }
      return entry;
    }));
  };

  return {safe, digits, format, range, read, shade, isDark, choose, themes, draw, legend};
})();
