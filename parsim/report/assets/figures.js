"use strict";
// How numbers are written and figures are drawn. Nothing here knows the state of the page.
const Figures = (() => {
  const PALETTE = ["#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#8C6BB1", "#A6761D", "#5B8C2A", "#B2182B"];
  const OTHER = "#9AA5B1";
  const PARTS = {"computation": "#0072B2", "exposed communication": "#D55E00", "pipeline bubble": "#E69F00", "loading": "#009E73",
    "host": "#CC79A7", "idle": "#9AA5B1"};
  const SYMBOLS = ["circle", "square", "diamond", "triangle-up", "cross", "x", "star", "pentagon", "hexagon", "triangle-down"];

  // Plotly reads some HTML in its texts: names of the user are escaped before they get there.
  const safe = (text) => String(text).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
  const digits = (value, count = 3) => {
    if (value === 0) return "0";
    const size = Math.abs(value);
    if (size >= 1e5 || size < 1e-4) return value.toExponential(count - 1).replace("e+", "e");
    return size >= 1000 ? Math.round(value).toLocaleString("en-US") : String(Number(value.toPrecision(count)));
  };
  const stepped = (value, steps, count) => {
    const found = steps.find(([scale]) => Math.abs(value) >= scale) || steps[steps.length - 1];
    return `${digits(value / found[0], count)} ${found[1]}`;
  };
  const FORMATS = {
    time: (value) => stepped(value, [[172800, "days", 86400], [3600, "h"], [60, "min"], [1, "s"], [1e-3, "ms"], [1e-6, "µs"]].map(
      ([scale, unit, by]) => [by || scale, unit])),
    bytes: (value) => stepped(value, [[2 ** 30, "GiB"], [2 ** 20, "MiB"], [2 ** 10, "KiB"], [1, "B"]]),
    rate: (value) => `${stepped(value, [[1e9, "G"], [1e6, "M"], [1e3, "k"], [1, ""]])}samples/s`.replace(/ samples/, " samples")
      .replace(/([GMk])samples/, "$1 samples"),
    usd: (value) => `$${digits(value)}`,
    energy: (value) => stepped(value, [[1e3, "MWh"], [1, "kWh"], [1e-3, "Wh"], [1e-6, "mWh"]]),
    share: (value) => `${digits(100 * value)}%`,
  };
  const format = (kind, value) => (value === null || value === undefined ? "–" : FORMATS[kind](value));
  const SCALES = {
    time: [[86400, "days", 172800], [3600, "hours", 7200], [60, "minutes", 120], [1, "s", 1], [1e-3, "ms", 1e-3], [1e-6, "µs", 0]],
    bytes: [[2 ** 30, "GiB", 2 ** 30], [2 ** 20, "MiB", 0]],
    rate: [[1e6, "million samples/s", 1e6], [1e3, "thousand samples/s", 1e4], [1, "samples/s", 0]],
    usd: [[1, "USD", 0]],
    energy: [[1e3, "MWh", 2e3], [1, "kWh", 1], [1e-3, "Wh", 0]],
    share: [[0.01, "%", 0]],
  };
  const axisUnit = (kind, values) => {
    const largest = Math.max(0, ...values.filter((value) => value !== null).map(Math.abs));
    const found = SCALES[kind].find(([, , from]) => largest >= from) || SCALES[kind][SCALES[kind].length - 1];
    return {by: found[0], unit: found[1]};
  };

  const theme = () => {
    const style = getComputedStyle(document.documentElement);
    const read = (name) => style.getPropertyValue(name).trim();
    return {ink: read("--ink"), soft: read("--soft"), line: read("--line"), card: read("--card"), accent: read("--accent")};
  };
  const layout = (extra) => {
    const {ink, soft, line, card} = theme();
    const size = window.innerWidth >= 1900 ? 15 : window.innerWidth <= 640 ? 11 : 12;
    const axis = {gridcolor: line, zerolinecolor: line, linecolor: line, tickcolor: line, automargin: true, tickfont: {color: soft},
      title: {font: {color: soft}, standoff: 8}};
    const merged = {paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", font: {color: ink, size, family: "inherit"},
      margin: {l: 10, r: 14, t: 10, b: 10}, showlegend: false, hovermode: "closest", dragmode: false,
      hoverlabel: {bgcolor: card, bordercolor: line, font: {color: ink, size}, align: "left"}, ...extra};
    for (const name of ["xaxis", "yaxis"]) {
      merged[name] = {...axis, ...merged[name], title: {...axis.title, text: (merged[name] || {}).label || ""}};
      delete merged[name].label;
    }
    return merged;
  };
  const CONFIG = {responsive: true, displaylogo: false, displayModeBar: false};
  const draw = (place, data, extra) => {
    place.dataset.drawn = "true";
    return Plotly.react(place, data, layout(extra), CONFIG);
  };

  const legend = (place, entries, dotted = "") => {
    const entry = (name, style) => {
      const told = document.createElement("span"), swatch = document.createElement("i");
      Object.assign(swatch.style, style);
      told.append(swatch, document.createTextNode(name));
      return told;
    };
    const line = dotted ? [entry(dotted, {height: "0", borderTop: `2px dotted ${theme().soft}`})] : [];
    place.replaceChildren(...entries.map(([name, colour]) => entry(name, {background: colour})), ...line);
  };

  // One bar, divided; parts below a thousandth of the whole are left out.
  const bar = (place, legendPlace, parts, kind, limit) => {
    const whole = parts.reduce((sum, [, value]) => sum + (value || 0), 0);
    const shown = parts.filter(([, value]) => value > whole / 1000);
    const colours = shown.map(([name], number) => PARTS[name] || PALETTE[number % PALETTE.length]);
    const {by, unit} = axisUnit(kind, [whole, limit || 0]);
    const data = shown.map(([name, value], number) => ({type: "bar", orientation: "h", y: [""], x: [value / by], name: safe(name),
      marker: {color: colours[number]}, hovertemplate: `${safe(name)}: ${format(kind, value)}<extra></extra>`}));
    const near = limit && limit < 4 * whole;
    const shapes = near ? [{type: "line", x0: limit / by, x1: limit / by, y0: -0.55, y1: 0.55,
      line: {color: theme().ink, width: 2, dash: "dot"}}] : [];
    legend(legendPlace, [...shown.map(([name, value], number) => [`${name} ${format(kind, value)}`, colours[number]]),
      ...(limit ? [[`the device has ${format(kind, limit)}`, theme().ink]] : [])]);
    return draw(place, data, {barmode: "stack", margin: {l: 4, r: 14, t: 2, b: 24}, shapes, xaxis: {ticksuffix: ` ${unit}`, nticks: 5, automargin: false,
      range: [0, (near ? Math.max(limit, whole) : whole) / by * 1.02]}, yaxis: {showticklabels: false, ticks: "", fixedrange: true}});
  };

  // Lanes of letters, each piece a cell. What runs is told by colour, legend and hover.
  const LANES = {F: "#0072B2", B: "#56B4E9", I: "#56B4E9", W: "#8C6BB1", R: "#A6761D", O: "#009E73", K: "#CC79A7", M: "#CC79A7", C: "#D55E00", S: "#E69F00", L: "#5B8C2A"};
  const timeline = (place, legendPlace, lanes, {letters, pieces}, seconds) => {
    place.hidden = legendPlace.hidden = !lanes.length;
    if (!lanes.length) return null;
    const kinds = Object.keys(letters), {by, unit} = axisUnit("time", [seconds]);
    const cells = lanes.map(([, text]) => [...text.matchAll(/([A-Z.])([0-9]*)/g)].flatMap(([, letter, count]) => Array(Number(count || 1)).fill(kinds.indexOf(letter))));
    const names = lanes.map(([name]) => safe(name)), steps = kinds.flatMap((kind, number) => [[number / kinds.length, LANES[kind]], [(number + 1) / kinds.length, LANES[kind]]]);
    const seen = new Set(cells.flat());
    legend(legendPlace, kinds.flatMap((kind, number) => (seen.has(number) ? [[letters[kind], LANES[kind]]] : [])));
    place.style.height = `${40 + 26 * lanes.length}px`;
    return draw(place, [{type: "heatmap", z: cells.map((line) => line.map((kind) => (kind < 0 ? null : kind))), y: names, x0: seconds / by / pieces / 2, dx: seconds / by / pieces,
      zmin: 0, zmax: kinds.length, colorscale: steps, showscale: false, ygap: 4, hoverongaps: false,
      text: cells.map((line) => line.map((kind) => (kind < 0 ? "" : letters[kinds[kind]]))), hovertemplate: `%{y}: %{text} at %{x:.3g} ${unit}<extra></extra>`}],
    {margin: {l: 4, r: 14, t: 2, b: 24}, xaxis: {ticksuffix: ` ${unit}`, nticks: 5, showgrid: false, zeroline: false}, yaxis: {type: "category", autorange: "reversed", showgrid: false, ticks: ""}});
  };

  return {PALETTE, OTHER, SYMBOLS, safe, format, axisUnit, theme, draw, legend, bar, timeline, digits};
})();
