"use strict";
// State, controls and the four views of a sweep.
(() => {
  const data = JSON.parse(document.getElementById("sweep").textContent);
  const $ = (id) => document.getElementById(id);
  const {safe, format, range, shade} = Page, OTHER = "#9aa5b1";
  const SYMBOLS = ["circle", "square", "diamond", "triangle-up", "cross", "x", "star", "pentagon", "hexagon", "triangle-down"];
  const series = (number) => shade(data.colours[number % data.colours.length]);
  const axes = data.axes, metrics = data.metrics, every = [...Array(data.count).keys()];
  function groupsOf(points, keyOf) {
    const found = new Map();
    for (const point of points) {
      const key = keyOf(point);
      if (!found.has(key)) found.set(key, []);
      found.get(key).push(point);
    }
    return found;
  }
  const axisOf = (key) => axes.find((axis) => axis.key === key);
  const metricOf = (key) => metrics.find((metric) => metric.key === key);
  const text = (name, point) => data.texts[name].words[data.texts[name].codes[point]];
  const several = axes.filter((axis) => axis.values.length > 1);
  const numeric = several.filter((axis) => axis.numeric);
  const answered = every.filter((point) => text("status", point) !== "failed");
  // A colour stands for a kind of plan, whatever its number of replicas; the rarest kinds share the last one.
  const kindOf = (point) => text("division", point).replace(/\bdp\d+/, "dp");
  const kinds = [...groupsOf(answered, kindOf)].sort((a, b) => b[1].length - a[1].length).map(([name]) => name);
  const placeOf = (point) => Math.min(kinds.indexOf(kindOf(point)), data.colours.length);
  const shades = () => [...data.colours.map(shade), OTHER];
  const colourOf = (point) => shades()[placeOf(point)];
  const kindsLegend = (place, points) => {
    const seen = new Set(points.map(placeOf));
    Page.legend(place, shades().flatMap((colour, number) => (seen.has(number) ? [[number < data.colours.length ? kinds[number] : "other kinds", colour, "dot"]] : [])));
  };
  const has = (key) => metrics.some((metric) => metric.key === key);
  // A slider moves through the values of a field and between them; of a sampled field, through eighths of its points.
  const EIGHTHS = 8;
  const stepsOf = (axis) => (axis.continuous ? EIGHTHS : axis.values.length);
  const stepAt = (axis, point) => (axis.continuous ? Math.floor((axis.at[point] * EIGHTHS) / axis.values.length) : axis.at[point]);
  const isBetween = (axis) => axis.numeric && !Number.isInteger(Number(state[`:${axis.key}`] || 0));
  const grows = (axis) => axis.values[0] > 0 && axis.values[axis.values.length - 1] / axis.values[0] >= 6;
  const valueOf = (axis, step) => { // between two values: a straight line, of logarithms where the axis has them
    const low = axis.values[Math.floor(step)], high = axis.values[Math.ceil(step)], part = step - Math.floor(step);
    return grows(axis) ? low * (high / low) ** part : low + part * (high - low);
  };
  const stepLabel = (axis, step) => {
    if (axis.continuous) {
      const begin = (of) => Math.ceil((of * axis.values.length) / EIGHTHS);
      return `${label(axis, begin(step))} to ${label(axis, begin(step + 1) - 1)}`;
    }
    return Number.isInteger(step) ? label(axis, step) : `≈ ${Page.digits(valueOf(axis, step))}`;
  };

  // ---- state: what the address says, else what shows most -------------------------------------------------------------------
  const first = (...keys) => keys.find(has) || (metrics[0] || {}).key;
  const words = several.filter((axis) => !axis.numeric);
  const start = {
    metric: first("run_s", "epoch_s", "throughput_samples_per_s"),
    against: first("run_usd", "usd_per_epoch", "usd_per_million_samples", "peak_memory_bytes"),
    x: (numeric[0] || several[0] || axes[0] || {}).key,
    lines: (words[0] || numeric.slice(1).find((axis) => !axis.continuous) || {}).key || "",
    unfit: "no", point: data.picked === null ? "" : String(data.picked),
    theme: "",
  };
  start.mapx = start.x;
  start.mapy = (several.find((axis) => axis.key !== start.x && axis.numeric) || several.find((axis) => axis.key !== start.x) || {}).key || "";
  if (start.lines === start.x) start.lines = "";
  const state = {...start};
  const read = () => {
    const given = new URLSearchParams(location.hash.slice(1));
    Object.assign(state, start);
    for (const key of Object.keys(state)) if (key[0] === ":") delete state[key];
    for (const [key, value] of given) {
      const axis = key[0] === ":" && axisOf(key.slice(1));
      if (axis && value !== "" && (Number.isInteger(Number(value)) || (axis.numeric && !axis.continuous)) && Number(value) >= 0 && Number(value) <= stepsOf(axis) - 1) state[key] = value;
      else if (["metric", "against"].includes(key) && has(value)) state[key] = value;
      else if (["x", "mapx"].includes(key) && axisOf(value)) state[key] = value;
      else if (["mapy", "lines"].includes(key) && (value === "" || (axisOf(value) && !(key === "lines" && axisOf(value).continuous)))) state[key] = value;
      else if (key === "point" && data.numbers[Number(value)] !== undefined && value !== "") state.point = String(Number(value));
      else if (key === "unfit" && ["yes", "no"].includes(value)) state[key] = value;
      else if (key === "theme" && ["light", "dark"].includes(value)) state[key] = value;
    }
  };
  const write = () => {
    const given = new URLSearchParams();
    for (const [key, value] of Object.entries(state)) if (value !== start[key]) given.set(key, value);
    history.replaceState(null, "", given.toString() ? `#${given}` : location.pathname + location.search);
  };

  // ---- which points count ---------------------------------------------------------------------------------------------------
  const valueAt = (key, point) => axisOf(key).values[axisOf(key).at[point]];
  const label = (axis, place) => (axis.numeric ? Page.digits(axis.values[place], 4) : axis.values[place]);
  const fits = (point) => text("status", point) === "ok" || state.unfit === "yes";
  const chosen = (except = []) => answered.filter((point) => fits(point) && several.every((axis) => {
    const fixed = state[`:${axis.key}`];
    return fixed === undefined || except.includes(axis.key) || [Math.floor(fixed), Math.ceil(fixed)].includes(stepAt(axis, point));
  }));
  const better = (metric, a, b) => (metric.better === "min" ? metric.median[a] < metric.median[b] : metric.median[a] > metric.median[b]);
  const best = (points, metric) => points.filter((point) => metric.median[point] !== null)
    .reduce((found, point) => (found === null || better(metric, point, found) ? point : found), null);
  const where = (point) => several.map((axis) => `${axis.name.toLowerCase()} ${label(axis, axis.at[point])}`).join(", ");
  const hover = (point) => [`<b>${safe(text("plan_in_words", point))}</b>`, ...several.map((axis) => safe(`${axis.name}: ${label(axis, axis.at[point])}`)),
    ...metrics.slice(0, 8).map((metric) => `${metric.name}: ${format(metric.kind, metric.median[point])}`)].join("<br>");
  const interval = (metric, point) => (metric.low && metric.low[point] !== null
    ? [metric.median[point] - metric.low[point], metric.high[point] - metric.median[point]] : [0, 0]);

  // ---- between computed points: at each corner the best plan; what grows by factors is interpolated by logarithms -----------
  const corners = () => {
    const open = several.filter(isBetween), metric = metricOf(state.metric);
    if (!open.length) return null;
    return open.reduce((found, axis) => found.flatMap(([steps, weight]) => {
      const at = Number(state[`:${axis.key}`]), part = at - Math.floor(at);
      return [[{...steps, [axis.key]: Math.floor(at)}, weight * (1 - part)], [{...steps, [axis.key]: Math.ceil(at)}, weight * part]];
    }), [[{}, 1]]).map(([steps, weight]) => [best(chosen().filter((point) => open.every((axis) => axis.at[point] === steps[axis.key])), metric), weight]);
  };
  const blend = (values, found) => {
    const known = found.map(([point, weight]) => [values[point], weight]);
    if (known.some(([value]) => value === null || value === undefined)) return null;
    return known.every(([value]) => value > 0) ? Math.exp(known.reduce((sum, [value, weight]) => sum + weight * Math.log(value), 0))
      : known.reduce((sum, [value, weight]) => sum + weight * value, 0);
  };

  const axisUnit = (kind, values) => {
    const largest = Math.max(0, ...values.filter((value) => value !== null).map(Math.abs)), scales = data.scales[kind];
    const [by, unit] = scales.find(([, , from]) => largest >= from) || scales[scales.length - 1];
    return {by, unit};
  };
  // One bar, divided; parts below a thousandth of the whole are left out.
  const drawBar = (name, parts, kind, limit) => {
    const total = parts.reduce((sum, [, value]) => sum + (value || 0), 0), shown = parts.filter(([, value]) => value > total / 1000);
    const {by, unit} = axisUnit(kind, [total, limit || 0]), near = limit && limit < 4 * total;
    const traces = shown.map(([part, value, colour]) => ({type: "bar", orientation: "h", y: [""], x: [value / by], marker: {color: shade(colour)},
      hovertemplate: `${safe(part)}: ${format(kind, value)}<extra></extra>`}));
    Page.legend($(`${name}-legend`), [...shown.map(([part, value, colour]) => [`${part} ${format(kind, value)}`, shade(colour)]),
      ...(limit ? [[`the device has ${format(kind, limit)}`, Page.read("ink"), "dash"]] : [])]);
    return Page.draw($(name), traces, {barmode: "stack", margin: {l: 4, r: 14, t: 2, b: 24},
      shapes: near ? [{type: "line", x0: limit / by, x1: limit / by, y0: -0.55, y1: 0.55, line: {color: Page.read("ink"), width: 2, dash: "dot"}}] : [],
      xaxis: {ticksuffix: ` ${unit}`, nticks: 5, automargin: false, range: [0, (near ? Math.max(limit, total) : total) / by * 1.02]}, yaxis: {showticklabels: false, ticks: "", fixedrange: true}});
  };
  // Lanes of letters, each piece a cell in the colour that the legend has for it.
  const drawTimeline = (lanes, seconds) => {
    const place = $("timeline"), {letters, pieces} = data.timeline, kinds = Object.keys(letters);
    place.hidden = $("timeline-legend").hidden = !lanes.length;
    if (!lanes.length) return null;
    const {by, unit} = axisUnit("time", [seconds]), tones = kinds.map((kind) => shade(letters[kind].colour));
    const cells = lanes.map(([, told]) => [...told.matchAll(/([A-Z.])([0-9]*)/g)].flatMap(([, letter, count]) => Array(Number(count || 1)).fill(kinds.indexOf(letter))));
    const seen = new Set(cells.flat());
    Page.legend($("timeline-legend"), kinds.flatMap((kind, number) => (seen.has(number) ? [[letters[kind].name, tones[number]]] : [])));
    place.style.height = `${40 + 26 * lanes.length}px`;
    return Page.draw(place, [{type: "heatmap", z: cells.map((line) => line.map((kind) => (kind < 0 ? null : kind))), y: lanes.map(([name]) => safe(name)),
      x0: seconds / by / pieces / 2, dx: seconds / by / pieces, zmin: -0.5, zmax: kinds.length - 0.5, showscale: false, ygap: 4, hoverongaps: false,
      colorscale: tones.flatMap((tone, number) => [[number / kinds.length, tone], [(number + 1) / kinds.length, tone]]),
      text: cells.map((line) => line.map((kind) => (kind < 0 ? "" : letters[kinds[kind]].name))), hovertemplate: `%{y}: %{text} at %{x:.3g} ${unit}<extra></extra>`}],
    {margin: {l: 4, r: 14, t: 2, b: 24}, xaxis: {ticksuffix: ` ${unit}`, nticks: 5, showgrid: false, zeroline: false}, yaxis: {type: "category", autorange: "reversed", showgrid: false, ticks: ""}});
  };

  // ---- the views ------------------------------------------------------------------------------------------------------------
  const axisLayout = (axis) => {
    if (!axis.numeric) return {type: "category", label: axis.name, categoryorder: "array", categoryarray: axis.values.map(safe)};
    const wide = grows(axis);
    if (axis.continuous) return {type: wide ? "log" : "linear", label: axis.name, ...(wide ? {dtick: "D2"} : {})};
    const most = window.innerWidth <= 640 ? 6 : 12, step = Math.ceil(axis.values.length / most);
    const shown = axis.values.filter((_, place) => place % step === 0);
    return {type: wide ? "log" : "linear", label: axis.name, tickvals: shown, ticktext: shown.map((value) => Page.digits(value, 4))};
  };

  // What the best of the fewest devices would reach if throughput grew as they do.
  const linearScaling = (points, metric, axis, by) => {
    if (metric.kind !== "rate" || !["cluster.nodes", "cluster.devices"].includes(axis.key) || axis.values.length < 2) return [];
    const least = Math.min(...points.map((point) => axis.at[point]));
    const from = best(points.filter((point) => axis.at[point] === least), metric);
    if (from === null) return [];
    const ends = [axis.values[least], axis.values[Math.max(...points.map((point) => axis.at[point]))]];
    return [{type: "scatter", mode: "lines", x: ends, y: ends.map((end) => (metric.median[from] / by) * (end / ends[0])), hoverinfo: "skip",
      line: {color: Page.read("soft"), width: 1.5, dash: "dot"}}];
  };

  const drawCurve = () => {
    const metric = metricOf(state.metric), axis = axisOf(state.x), lines = state.lines ? axisOf(state.lines) : null;
    $("curve-title").textContent = `${metric.name} by ${axis.name.toLowerCase()}`;
    const points = chosen([state.x, state.lines]);
    const {by, unit} = axisUnit(metric.kind, points.map((point) => metric.median[point]));
    const groups = groupsOf(points, (point) => (lines ? lines.at[point] : 0));
    const order = [...groups.keys()].sort((a, b) => a - b), shown = order.slice(0, 24);
    const thick = (number) => Math.max(2, 5 - (3 * number) / Math.max(1, shown.length - 1)); // equal lines stay visible behind one another
    const traces = shown.map((key, number) => {
      const along = axis.continuous ? groups.get(key)
        : [...groupsOf(groups.get(key), (point) => axis.at[point]).values()].map((group) => best(group, metric)).filter((point) => point !== null);
      along.sort((a, b) => axis.at[a] - axis.at[b]);
      const bars = along.map((point) => interval(metric, point)), colour = series(number);
      return {type: "scatter", mode: axis.continuous ? "markers" : "lines+markers", customdata: along,
        x: along.map((point) => (axis.numeric ? valueAt(state.x, point) : safe(valueAt(state.x, point)))),
        y: along.map((point) => metric.median[point] / by), text: along.map(hover), hovertemplate: "%{text}<extra></extra>",
        error_y: {type: "data", symmetric: false, array: bars.map(([, up]) => up / by), arrayminus: bars.map(([down]) => down / by),
          color: colour, thickness: 1.2, width: 3, visible: !axis.continuous},
        line: {color: colour, width: thick(number)}, marker: {color: colour, size: axis.continuous ? 6 : 6 + thick(number), symbol: SYMBOLS[number % SYMBOLS.length]}};
    });
    traces.push(...marked("curve", traces), ...betweenMark(axis, metric, by));
    const linear = linearScaling(points, metric, axis, by);
    traces.push(...linear);
    $("curve-note").textContent = note(points, order.length > shown.length ? `The first ${shown.length} of ${order.length} lines are drawn. ` : "");
    Page.legend($("curve-legend"), [...(lines ? shown.map((key, number) => [`${lines.name} ${label(lines, key)}`, series(number), "dot"]) : []),
      ...(linear.length ? [["twice the devices, twice the throughput", Page.read("soft"), "dash"]] : [])]);
    const values = points.map((point) => metric.median[point]).filter((value) => value > 0);
    const wide = values.length && Math.max(...values) / Math.min(...values) > 30;
    return Page.draw($("curve"), traces, {xaxis: axisLayout(axis),
      yaxis: {label: `${metric.name} (${unit})`, type: wide ? "log" : "linear", rangemode: "tozero", ...(wide ? {dtick: values.length && Math.max(...values) / Math.min(...values) < 1000 ? "D2" : 1} : {})}});
  };

  // By kind of plan; where there is one kind only, by the figure itself.
  const tint = (points, metric) => {
    if (new Set(points.map(placeOf)).size > 1) return {color: points.map(colourOf)};
    const {by, unit} = axisUnit(metric.kind, points.map((point) => metric.median[point]));
    return {color: points.map((point) => metric.median[point] / by), colorscale: "Viridis", showscale: true,
      colorbar: {title: {text: unit, side: "right"}, thickness: 12, outlinewidth: 0}};
  };

  // The chosen point, ringed, in the trace where it stands.
  const marked = (view, traces) => {
    const point = state.point === "" ? null : Number(state.point);
    for (const trace of traces) {
      const place = trace.customdata.indexOf(point);
      if (place >= 0) return [{type: "scatter", mode: "markers", x: [trace.x[place]], y: [trace.y[place]], customdata: [point], hoverinfo: "skip",
        marker: {size: 17, color: "rgba(0,0,0,0)", line: {color: Page.read("ink"), width: 2.5}}}];
    }
    return [];
  };
  const betweenMark = (axis, metric, by) => {
    const found = corners(), step = state[`:${axis.key}`];
    const value = found === null || step === undefined || found.some(([point]) => point === null) ? null : blend(metric.median, found);
    return value === null ? [] : [{type: "scatter", mode: "markers+text", x: [valueOf(axis, Number(step))], y: [value / by], text: ["interpolated"], textposition: "top center",
      hovertemplate: `interpolated: ${format(metric.kind, value)}<extra></extra>`, customdata: [null], marker: {size: 13, symbol: "circle-open-dot", color: Page.read("accent"), line: {width: 2}}}];
  };
  const note = (points, more = "") => {
    const free = several.filter((axis) => state[`:${axis.key}`] === undefined).map((axis) => axis.key);
    const shared = free.length > 2 ? "; where several share a place, the best is drawn" : "";
    return shared || points.length < data.count ? `${more}${points.length} points${shared}.` : more;
  };

  const drawMap = () => {
    const metric = metricOf(state.metric), across = axisOf(state.mapx), up = state.mapy && state.mapy !== state.mapx ? axisOf(state.mapy) : null;
    const points = chosen([state.mapx, state.mapy]);
    $("map-title").textContent = `Which plan wins where: ${metric.name.toLowerCase()}`;
    let traces, extra;
    if (across.continuous || (up && up.continuous)) {
      kindsLegend($("map-legend"), points);
      traces = [{type: "scatter", mode: "markers", customdata: points, x: points.map((point) => (across.numeric ? valueAt(across.key, point) : safe(valueAt(across.key, point)))),
        y: points.map((point) => (up ? (up.numeric ? valueAt(up.key, point) : safe(valueAt(up.key, point))) : metric.median[point])), text: points.map(hover),
        hovertemplate: "%{text}<extra></extra>", marker: {size: 9, ...tint(points, metric)}}];
      traces.push(...marked("map", traces));
      extra = {xaxis: axisLayout(across), yaxis: up ? axisLayout(up) : {label: metric.name}};
    } else {
      const columns = across.values.map((_, place) => label(across, place)), rows = up ? up.values.map((_, place) => label(up, place)) : [""];
      const cells = groupsOf(points, (point) => `${across.at[point]} ${up ? up.at[point] : 0}`);
      const winner = rows.map((_, row) => columns.map((__, column) => best(cells.get(`${column} ${row}`) || [], metric)));
      const code = winner.map((line) => line.map((point) => (point === null ? null : placeOf(point))));
      kindsLegend($("map-legend"), winner.flat().filter((point) => point !== null));
      const room = columns.length * rows.length <= (window.innerWidth <= 640 ? 30 : 120);
      const tones = shades(), steps = tones.flatMap((tone, number) => [[number / tones.length, tone], [(number + 1) / tones.length, tone]]);
      traces = [{type: "heatmap", z: code, x: columns.map(safe), y: rows.map(safe), zmin: -0.5, zmax: tones.length - 0.5, colorscale: steps, showscale: false, xgap: 2, ygap: 2,
        customdata: winner, text: winner.map((line) => line.map((point) => (point === null ? "" : `${safe(text("division", point)).replace(/ /g, "<br>")}`))),
        hovertext: winner.map((line) => line.map((point) => (point === null ? "no plan" : hover(point)))), hovertemplate: "%{hovertext}<extra></extra>",
        texttemplate: room ? "%{text}" : ""}];
      const place = winner.flatMap((line, row) => line.map((point, column) => [point, column, row])).find(([point]) => String(point) === state.point && point !== null);
      const shapes = place ? [{type: "rect", x0: place[1] - 0.48, x1: place[1] + 0.48, y0: place[2] - 0.48, y1: place[2] + 0.48, line: {color: Page.read("ink"), width: 3}}] : [];
      extra = {shapes, xaxis: {type: "category", label: across.name, showgrid: false}, yaxis: {type: "category", label: up ? up.name : "", showgrid: false}};
    }
    $("map-note").textContent = note(points);
    return Page.draw($("map"), traces, extra);
  };

  const drawFront = () => {
    const metric = metricOf(state.metric), against = metricOf(state.against);
    $("front-title").textContent = `Pareto front: ${metric.name.toLowerCase()} and ${against.name.toLowerCase()}`;
    const points = chosen().filter((point) => metric.median[point] !== null && against.median[point] !== null);
    const across = axisUnit(metric.kind, points.map((point) => metric.median[point])), up = axisUnit(against.kind, points.map((point) => against.median[point]));
    const sorted = [...points].sort((a, b) => (better(metric, a, b) ? -1 : better(metric, b, a) ? 1 : better(against, a, b) ? -1 : 1));
    const front = sorted.reduce((found, point) => (found.length === 0 || better(against, point, found[found.length - 1]) ? [...found, point] : found), []);
    const made = (at, extra) => ({type: "scatter", customdata: at, x: at.map((point) => metric.median[point] / across.by), y: at.map((point) => against.median[point] / up.by),
      text: at.map(hover), hovertemplate: "%{text}<extra></extra>", ...extra});
    const bars = (which, scale) => ({type: "data", symmetric: false, thickness: 1, width: 0, array: front.map((point) => interval(which, point)[1] / scale.by),
      arrayminus: front.map((point) => interval(which, point)[0] / scale.by), color: Page.read("soft")});
    const traces = [made(points, {mode: "markers", marker: {size: 8, opacity: 0.75, color: points.map((point) => colourOf(point))}}),
      made(front, {mode: "lines+markers", line: {color: Page.read("ink"), width: 1.6, dash: "dot"}, error_x: bars(metric, across), error_y: bars(against, up),
        marker: {size: 11, line: {color: Page.read("ink"), width: 1.6}, color: front.map((point) => colourOf(point))}})];
    traces.push(...marked("front", traces));
    kindsLegend($("front-legend"), points);
    $("front-note").textContent = `${front.length} of ${points.length} points are on the front: nothing is better in both.`;
    return Page.draw($("front"), traces, {xaxis: {label: `${metric.name} (${across.unit})`}, yaxis: {label: `${against.name} (${up.unit})`, rangemode: "tozero"}});
  };

  // The card shows the point under the cursor, and without one the chosen point. It does not shrink while the cursor moves.
  let under = null;
  const look = (point) => {
    if (point === under) return;
    under = point;
    const card = $("point-card");
    card.style.minHeight = point === null ? "" : `${card.offsetHeight}px`;
    card.setAttribute("aria-live", point === null ? "polite" : "off");
    window.requestAnimationFrame(() => { if (under === point) drawPoint(); });
  };
  const entry = (name, value, small = "", kind = "") => {
    const term = document.createElement("dt"), told = document.createElement("dd"), more = document.createElement("small");
    term.textContent = name;
    told.textContent = `${value} `;
    told.className = kind;
    more.textContent = small;
    told.append(more);
    $("point-figures").append(term, told);
  };
  const drawPoint = () => {
    const found = under === null ? corners() : null, card = $("point-words");
    $("point-figures").replaceChildren();
    $("command").textContent = "";
    $("command").parentElement.hidden = found !== null;
    card.className = "";
    if (found !== null) return drawBetween(found);
    const point = under !== null ? under : state.point === "" ? null : Number(state.point);
    const cursor = under !== null && String(under) !== state.point ? " under the cursor" : "";
    $("point-title").textContent = point === null ? "No point" : `Point ${data.numbers[point]}${cursor}`;
    if (point === null) {
      card.textContent = "Click a mark, a cell or a row.";
      return null;
    }
    const status = text("status", point);
    card.textContent = status === "failed" ? text("reason", point) : `${text("plan_in_words", point)}.${status !== "ok" ? " It does not fit." : text("reason", point) ? ` It ${text("reason", point)}.` : ""}`;
    card.className = status === "ok" ? "" : "bad";
    axes.forEach((axis) => entry(axis.name, label(axis, axis.at[point]), "", "axis"));
    metrics.filter((metric) => metric.median[point] !== null).forEach((metric) => entry(metric.name, format(metric.kind, metric.median[point]),
      metric.low && metric.low[point] !== null ? range(metric.kind, metric.low[point], metric.high[point]) : ""));
    if (status !== "failed") entry("Plan", text("plan", point));
    const settings = axes.filter((axis) => !axis.key.startsWith("scale.")).map((axis) => `--set '${axis.key}=${axis.settings[axis.at[point]].replace(/'/g, "'\\''")}'`);
    const scaled = axes.some((axis) => axis.key.startsWith("scale.") && axis.values[axis.at[point]] !== 1);
    $("command").textContent = `${[axes.some((axis) => axis.key === "training.global_batch") ? data.command.replace(/ --batch \d+/, "") : data.command, ...settings].join(" ")}${scaled ? "   (scale.* has no other command than sweep)" : ""}`;
    const lanes = data.timeline.at[point].map(([name, told]) => [data.timeline.names[name], told]);
    $("timeline-note").textContent = !lanes.length ? "The page has no timeline of this point." : `One step alone, in ${data.timeline.pieces} pieces; the first rank of each stage.`;
    const parts = (from) => from.map(({name, values, colour}) => [name, values[point], colour]);
    return Promise.all([drawTimeline(lanes, data.timeline.seconds[point]), drawBar("breakdown", parts(data.categories), "time", null),
      drawBar("memory", parts(data.memory), "bytes", data.limit[point])]);
  };
  const drawBetween = (found) => {
    const card = $("point-words"), known = found.every(([point]) => point !== null), points = [...new Set(found.map(([point]) => point))];
    $("point-title").textContent = "Between computed points";
    card.className = "between";
    card.textContent = known ? `Interpolated between points ${points.map((point) => data.numbers[point]).join(", ")}; nothing was computed here.`
      : "At a neighbouring value no plan of this view fits, so nothing is interpolated.";
    several.forEach((axis) => { const step = state[`:${axis.key}`]; entry(axis.name, step === undefined ? "best of all" : stepLabel(axis, Number(step)), "", "axis"); });
    if (known) metrics.forEach((metric) => {
      const value = blend(metric.median, found), ends = metric.low ? [blend(metric.low, found), blend(metric.high, found)] : [null, null];
      entry(metric.name, value === null ? "–" : `≈ ${format(metric.kind, value)}`, ends[0] !== null && ends[1] !== null ? range(metric.kind, ends[0], ends[1]) : "");
    });
    $("timeline-note").textContent = "Only computed points have a timeline.";
    const mean = (values) => found.reduce((sum, [point, weight]) => sum + weight * (values[point] || 0), 0);
    const parts = (from) => (known ? from.map(({name, values, colour}) => [name, mean(values), colour]) : []);
    // the parts of the step sum to the interpolated step, as those of a point do to its own
    const step = metricOf("step_s"), categories = parts(data.categories), sum = categories.reduce((total, [, value]) => total + value, 0);
    const scale = known && step && sum > 0 ? blend(step.median, found) / sum : 1;
    return Promise.all([drawTimeline([], 0), drawBar("breakdown", categories.map(([name, value, colour]) => [name, value * scale, colour]), "time", null),
      drawBar("memory", parts(data.memory), "bytes", null)]);
  };

  const drawTable = () => {
    if (!$("points").open) return;
    const metric = metricOf(state.metric), shown = metrics.slice(0, 7), most = 200;
    const points = chosen().sort((a, b) => (better(metric, a, b) ? -1 : better(metric, b, a) ? 1 : a - b)).slice(0, most);
    const cell = (kind, value, isText) => Object.assign(document.createElement(kind), {textContent: value, className: isText ? "" : "number"});
    const head = document.createElement("thead"), body = document.createElement("tbody"), top = document.createElement("tr");
    top.append(cell("th", "Point", true), ...several.map((axis) => cell("th", axis.name, !axis.numeric)), cell("th", "Plan", true), ...shown.map((entry) => cell("th", entry.name)));
    head.append(top);
    body.append(...points.map((point) => {
      const row = document.createElement("tr");
      row.setAttribute("aria-selected", String(String(point) === state.point));
      row.append(cell("td", data.numbers[point], true), ...several.map((axis) => cell("td", label(axis, axis.at[point]), !axis.numeric)), cell("td", text("division", point), true),
        ...shown.map((entry) => cell("td", format(entry.kind, entry.median[point]))));
      row.addEventListener("click", () => choose(point));
      row.addEventListener("mouseenter", () => look(point));
      row.addEventListener("mouseleave", () => look(null));
      return row;
    }));
    $("table").replaceChildren(head, body);
  };

  // ---- controls -------------------------------------------------------------------------------------------------------------
  const field = (key, name, control) => {
    const place = document.createElement("div"), tag = document.createElement("label"), told = document.createElement("output");
    place.className = "field";
    control.id = `control-${key}`;
    tag.htmlFor = control.id;
    tag.append(document.createTextNode(name), told);
    place.append(tag, control);
    return {place, told};
  };
  const select = (name, key, options) => {
    const control = document.createElement("select");
    control.append(...options.map(([value, said]) => Object.assign(document.createElement("option"), {value, textContent: said})));
    control.addEventListener("change", () => { state[key] = control.value; update(); });
    controls.push(() => { control.value = state[key] === undefined ? "" : state[key]; });
    return field(key.replace(":", ""), name, control).place;
  };
  const controls = [];
  const SNAP = 0.1; // a slider this near a computed value means it
  const filter = (axis) => {
    const key = `:${axis.key}`, last = stepsOf(axis) - 1;
    const set = (value) => {
      const near = Math.abs(value - Math.round(value)) <= SNAP || axis.continuous || value < 0 ? Math.round(value) : value;
      if (near < 0) delete state[key]; else state[key] = String(near);
      const points = chosen();
      if (!points.includes(Number(state.point)) || state.point === "") { const found = best(points, metricOf(state.metric)); state.point = found === null ? "" : String(found); }
      update();
    };
    if (!axis.numeric) {
      const place = select(axis.name, key, [["", "best of all"], ...axis.values.map((value, number) => [String(number), value])]);
      place.querySelector("select").addEventListener("change", (event) => set(event.target.value === "" ? -1 : Number(event.target.value)));
      return place;
    }
    const control = Object.assign(document.createElement("input"), {type: "range", min: -1, max: last, step: axis.continuous ? 1 : 0.05});
    const {place, told} = field(axis.key, axis.name, control);
    control.addEventListener("input", () => set(Number(control.value)));
    control.addEventListener("keydown", (event) => { // keys go from computed point to computed point
      const by = {ArrowRight: 1, ArrowUp: 1, ArrowLeft: -1, ArrowDown: -1, PageUp: 1, PageDown: -1}[event.key];
      if (!by || event.ctrlKey || event.metaKey || event.altKey) return;
      event.preventDefault();
      const at = state[key] === undefined ? -1 : Number(state[key]);
      set(Math.min(last, Math.max(-1, by > 0 ? Math.floor(at) + 1 : Math.ceil(at) - 1)));
    });
    controls.push(() => {
      control.value = state[key] === undefined ? -1 : state[key];
      told.textContent = state[key] === undefined ? "best of all" : stepLabel(axis, Number(state[key]));
      control.setAttribute("aria-valuetext", isBetween(axis) ? `${told.textContent}, interpolated` : told.textContent);
    });
    return place;
  };
  const paragraphs = (lines) => lines.map((line) => Object.assign(document.createElement("p"), {textContent: line}));
  const head = (extra = []) => {
    $("title").textContent = data.title;
    $("answer").textContent = data.answer || data.title;
    $("counts").textContent = data.summary[0] || "";
    $("summary").replaceChildren(...paragraphs([...data.summary, ...data.notes, ...extra]));
  };
  const OPEN = 4; // controls on the first screen
  const build = () => {
    head();
    const swept = several.map((axis) => [axis.key, axis.name]), named = metrics.map((metric) => [metric.key, metric.name]);
    const all = [select("Show", "metric", named), ...several.map(filter),
      ...(several.length ? [select("Lines for", "lines", [["", "nothing"], ...swept.filter(([key]) => !axisOf(key).continuous)]), select("Curve along", "x", swept)] : []),
      select("Against", "against", named), ...(several.length ? [select("Map across", "mapx", swept), select("Map upwards", "mapy", [["", "nothing"], ...swept])] : []),
      select("Plans that do not fit", "unfit", [["no", "left out"], ["yes", "shown"]])];
    $("fields").replaceChildren(...all.slice(0, OPEN));
    $("choices").replaceChildren(...all.slice(OPEN));
    for (const view of ["curve", "map", "front"]) {
      Page.draw($(view), [], {}).then(() => $(view).on("plotly_click", (event) => {
        const given = pointOf(event);
        if (given !== null) choose(given);
      }).on("plotly_hover", (event) => look(pointOf(event))).on("plotly_unhover", () => look(null)));
    }
  };
  const pointOf = (event) => {
    const hit = event.points[0], given = Array.isArray(hit.pointIndex) ? hit.data.customdata[hit.pointIndex[0]][hit.pointIndex[1]] : hit.customdata;
    return given === undefined ? null : given;
  };
  const choose = (point) => { // of a chosen point the sliders stand at computed values
    several.filter(isBetween).forEach((axis) => { state[`:${axis.key}`] = String(axis.at[point]); });
    state.point = String(point);
    update();
  };
  const move = (by) => {
    const points = chosen();
    if (!points.length) return;
    const at = points.indexOf(Number(state.point));
    choose(points[at < 0 || state.point === "" ? 0 : (at + by + points.length) % points.length]);
  };
  const refresh = () => {
    controls.forEach((set) => set());
    return Promise.all([drawCurve(), drawMap(), drawFront(), drawPoint(), drawTable()]).then(() => { document.body.dataset.ready = "true"; });
  };
  const update = () => { write(); return refresh(); };

  if (!metrics.length || !axes.length) {
    head(["No point of this sweep has an answer to draw."]);
    document.querySelector(".grid").hidden = $("points").hidden = true;
    $("summary").parentElement.open = true;
    Page.themes(() => {});
    document.body.dataset.ready = "true";
    return;
  }
  const switched = (name) => { state.theme = name; write(); Page.choose(name); };
  $("link").addEventListener("click", () => {
    const told = (said) => { $("link").textContent = said; window.setTimeout(() => { $("link").textContent = "Copy link"; }, 2500); };
    const copied = navigator.clipboard ? navigator.clipboard.writeText(location.href) : Promise.reject();
    copied.then(() => told("Copied"), () => told("It is in the address bar"));
  });
  $("previous").addEventListener("click", () => move(-1));
  $("next").addEventListener("click", () => move(1));
  $("points").addEventListener("toggle", drawTable);
  window.addEventListener("hashchange", () => { read(); Page.choose(state.theme); write(); });
  let width = window.innerWidth;
  window.addEventListener("resize", () => { if (window.innerWidth !== width) { width = window.innerWidth; update(); } });
  document.addEventListener("keydown", (event) => {
    const at = event.target.tagName; // a slider keeps its arrows, a select all its keys
    if (event.ctrlKey || event.metaKey || event.altKey || at === "SELECT" || (at === "INPUT" && event.key.startsWith("Arrow"))) return;
    const act = {ArrowLeft: () => move(-1), ArrowRight: () => move(1), d: () => $("theme").click(),
      b: () => { const found = best(chosen(), metricOf(state.metric)); if (found !== null) choose(found); }}[event.key];
    if (act) { event.preventDefault(); act(); }
  });
  read();
  if (state.point === "") { const found = best(chosen(), metricOf(state.metric)); if (found !== null) start.point = state.point = String(found); }
  build();
  Page.themes(refresh, switched);
  Page.choose(state.theme);
  write();
})();
