"use strict";
// State, controls and the four views of a sweep.
(() => {
  const data = JSON.parse(document.getElementById("sweep").textContent);
  const $ = (id) => document.getElementById(id);
  const {safe, format, PALETTE, OTHER, SYMBOLS} = Figures;
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
  const placeOf = (point) => Math.min(kinds.indexOf(kindOf(point)), PALETTE.length);
  const colourOf = (point) => PALETTE[placeOf(point)] || OTHER;
  const kindsLegend = (place, points) => {
    const seen = new Set(points.map(placeOf));
    Figures.legend(place, [...PALETTE, OTHER].flatMap((colour, number) => (seen.has(number) ? [[number < PALETTE.length ? kinds[number] : "other kinds", colour]] : [])));
  };
  const has = (key) => metrics.some((metric) => metric.key === key);
  // A slider has a step per value; of a sampled field, one per eighth of its points.
  const EIGHTHS = 8;
  const stepsOf = (axis) => (axis.continuous ? EIGHTHS : axis.values.length);
  const stepAt = (axis, point) => (axis.continuous ? Math.floor((axis.at[point] * EIGHTHS) / axis.values.length) : axis.at[point]);
  const stepLabel = (axis, step) => {
    if (!axis.continuous) return label(axis, step);
    const begin = (of) => Math.ceil((of * axis.values.length) / EIGHTHS);
    return `${label(axis, begin(step))} to ${label(axis, begin(step + 1) - 1)}`;
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
    theme: window.matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light",
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
      if (axis && value !== "" && Number.isInteger(Number(value)) && Number(value) >= 0 && Number(value) < stepsOf(axis)) state[key] = value;
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
  const label = (axis, place) => (axis.numeric ? Figures.digits(axis.values[place], 4) : axis.values[place]);
  const fits = (point) => text("status", point) === "ok" || state.unfit === "yes";
  const chosen = (except = []) => answered.filter((point) => fits(point) && several.every((axis) => {
    const fixed = state[`:${axis.key}`];
    return fixed === undefined || except.includes(axis.key) || stepAt(axis, point) === Number(fixed);
  }));
  const better = (metric, a, b) => (metric.better === "min" ? metric.median[a] < metric.median[b] : metric.median[a] > metric.median[b]);
  const best = (points, metric) => points.filter((point) => metric.median[point] !== null)
    .reduce((found, point) => (found === null || better(metric, point, found) ? point : found), null);
  const where = (point) => several.map((axis) => `${axis.key} = ${label(axis, axis.at[point])}`).join(", ");
  const hover = (point) => [`<b>${safe(text("plan_in_words", point))}</b>`, ...several.map((axis) => safe(`${axis.key} = ${label(axis, axis.at[point])}`)),
    ...metrics.slice(0, 8).map((metric) => `${metric.name}: ${format(metric.kind, metric.median[point])}`)].join("<br>");
  const interval = (metric, point) => (metric.low && metric.low[point] !== null
    ? [metric.median[point] - metric.low[point], metric.high[point] - metric.median[point]] : [0, 0]);

  // ---- the views ------------------------------------------------------------------------------------------------------------
  const axisLayout = (axis) => {
    const low = axis.values[0], high = axis.values[axis.values.length - 1];
    if (!axis.numeric) return {type: "category", label: axis.key, categoryorder: "array", categoryarray: axis.values.map(safe)};
    const wide = low > 0 && high / low >= 6;
    if (axis.continuous) return {type: wide ? "log" : "linear", label: axis.key, ...(wide ? {dtick: "D2"} : {})};
    const most = window.innerWidth <= 640 ? 6 : 12, step = Math.ceil(axis.values.length / most);
    const shown = axis.values.filter((_, place) => place % step === 0);
    return {type: wide ? "log" : "linear", label: axis.key, tickvals: shown, ticktext: shown.map((value) => Figures.digits(value, 4))};
  };

  // What the best of the fewest devices would reach if throughput grew as they do.
  const linearScaling = (points, metric, axis, by) => {
    if (metric.kind !== "rate" || !["cluster.nodes", "cluster.devices"].includes(axis.key) || axis.values.length < 2) return [];
    const least = Math.min(...points.map((point) => axis.at[point]));
    const from = best(points.filter((point) => axis.at[point] === least), metric);
    if (from === null) return [];
    const ends = [axis.values[least], axis.values[Math.max(...points.map((point) => axis.at[point]))]];
    return [{type: "scatter", mode: "lines", x: ends, y: ends.map((end) => (metric.median[from] / by) * (end / ends[0])), hoverinfo: "skip",
      line: {color: Figures.theme().soft, width: 1.5, dash: "dot"}}];
  };

  const drawCurve = () => {
    const metric = metricOf(state.metric), axis = axisOf(state.x), lines = state.lines ? axisOf(state.lines) : null;
    $("curve-title").textContent = `${metric.name} by ${axis.key}`;
    const points = chosen([state.x, state.lines]);
    const {by, unit} = Figures.axisUnit(metric.kind, points.map((point) => metric.median[point]));
    const series = groupsOf(points, (point) => (lines ? lines.at[point] : 0));
    const order = [...series.keys()].sort((a, b) => a - b), shown = order.slice(0, 24);
    const thick = (number) => Math.max(2, 5 - (3 * number) / Math.max(1, shown.length - 1)); // equal lines stay visible behind one another
    const traces = shown.map((key, number) => {
      const along = axis.continuous ? series.get(key)
        : [...groupsOf(series.get(key), (point) => axis.at[point]).values()].map((group) => best(group, metric)).filter((point) => point !== null);
      along.sort((a, b) => axis.at[a] - axis.at[b]);
      const bars = along.map((point) => interval(metric, point)), colour = PALETTE[number % PALETTE.length];
      return {type: "scatter", mode: axis.continuous ? "markers" : "lines+markers", customdata: along,
        x: along.map((point) => (axis.numeric ? valueAt(state.x, point) : safe(valueAt(state.x, point)))),
        y: along.map((point) => metric.median[point] / by), text: along.map(hover), hovertemplate: "%{text}<extra></extra>",
        error_y: {type: "data", symmetric: false, array: bars.map(([, up]) => up / by), arrayminus: bars.map(([down]) => down / by),
          color: colour, thickness: 1.2, width: 3, visible: !axis.continuous},
        line: {color: colour, width: thick(number)}, marker: {color: colour, size: axis.continuous ? 6 : 6 + thick(number), symbol: SYMBOLS[number % SYMBOLS.length]}};
    });
    traces.push(...marked("curve", traces));
    const linear = linearScaling(points, metric, axis, by);
    traces.push(...linear);
    $("curve-note").textContent = note(points, order.length > shown.length ? `The first ${shown.length} of ${order.length} lines are drawn. ` : "");
    Figures.legend($("curve-legend"), lines ? shown.map((key, number) => [`${lines.key} = ${label(lines, key)}`, PALETTE[number % PALETTE.length]]) : [], linear.length ? "twice the devices, twice the throughput" : "");
    const values = points.map((point) => metric.median[point]).filter((value) => value > 0);
    const wide = values.length && Math.max(...values) / Math.min(...values) > 30;
    return Figures.draw($("curve"), traces, {xaxis: axisLayout(axis),
      yaxis: {label: `${metric.name} (${unit})`, type: wide ? "log" : "linear", rangemode: "tozero", ...(wide ? {dtick: values.length && Math.max(...values) / Math.min(...values) < 1000 ? "D2" : 1} : {})}});
  };

  // By kind of plan; where there is one kind only, by the figure itself.
  const shade = (points, metric) => {
    if (new Set(points.map(placeOf)).size > 1) return {color: points.map(colourOf)};
    const {by, unit} = Figures.axisUnit(metric.kind, points.map((point) => metric.median[point]));
    return {color: points.map((point) => metric.median[point] / by), colorscale: "Viridis", showscale: true,
      colorbar: {title: {text: unit, side: "right"}, thickness: 12, outlinewidth: 0}};
  };

  // The chosen point, ringed, in the trace where it stands.
  const marked = (view, traces) => {
    const point = state.point === "" ? null : Number(state.point);
    for (const trace of traces) {
      const place = trace.customdata.indexOf(point);
      if (place >= 0) return [{type: "scatter", mode: "markers", x: [trace.x[place]], y: [trace.y[place]], customdata: [point], hoverinfo: "skip",
        marker: {size: 17, color: "rgba(0,0,0,0)", line: {color: Figures.theme().ink, width: 2.5}}}];
    }
    return [];
  };
  const note = (points, more = "") => {
    const free = several.filter((axis) => state[`:${axis.key}`] === undefined).map((axis) => axis.key);
    return `${more}${points.length} points${free.length > 2 ? "; where several share a place, the best is drawn" : ""}.`;
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
        hovertemplate: "%{text}<extra></extra>", marker: {size: 9, ...shade(points, metric)}}];
      traces.push(...marked("map", traces));
      extra = {xaxis: axisLayout(across), yaxis: up ? axisLayout(up) : {label: metric.name}};
    } else {
      const columns = across.values.map((_, place) => label(across, place)), rows = up ? up.values.map((_, place) => label(up, place)) : [""];
      const cells = groupsOf(points, (point) => `${across.at[point]} ${up ? up.at[point] : 0}`);
      const winner = rows.map((_, row) => columns.map((__, column) => best(cells.get(`${column} ${row}`) || [], metric)));
      const code = winner.map((line) => line.map((point) => (point === null ? null : placeOf(point))));
      kindsLegend($("map-legend"), winner.flat().filter((point) => point !== null));
      const room = columns.length * rows.length <= (window.innerWidth <= 640 ? 30 : 120);
      const shades = [...PALETTE, OTHER], steps = shades.flatMap((shade, number) => [[number / shades.length, shade], [(number + 1) / shades.length, shade]]);
      traces = [{type: "heatmap", z: code, x: columns.map(safe), y: rows.map(safe), zmin: -0.5, zmax: PALETTE.length + 0.5, colorscale: steps, showscale: false, xgap: 2, ygap: 2,
        customdata: winner, text: winner.map((line) => line.map((point) => (point === null ? "" : `${safe(text("division", point)).replace(/ /g, "<br>")}`))),
        hovertext: winner.map((line) => line.map((point) => (point === null ? "no plan" : hover(point)))), hovertemplate: "%{hovertext}<extra></extra>",
        texttemplate: room ? "%{text}" : "", textfont: {color: "#ffffff"}}];
      const place = winner.flatMap((line, row) => line.map((point, column) => [point, column, row])).find(([point]) => String(point) === state.point && point !== null);
      const shapes = place ? [{type: "rect", x0: place[1] - 0.48, x1: place[1] + 0.48, y0: place[2] - 0.48, y1: place[2] + 0.48, line: {color: Figures.theme().ink, width: 3}}] : [];
      extra = {shapes, xaxis: {type: "category", label: across.key, showgrid: false}, yaxis: {type: "category", label: up ? up.key : "", showgrid: false}};
    }
    $("map-note").textContent = note(points);
    return Figures.draw($("map"), traces, extra);
  };

  const drawFront = () => {
    const metric = metricOf(state.metric), against = metricOf(state.against);
    $("front-title").textContent = `Pareto front: ${metric.name.toLowerCase()} and ${against.name.toLowerCase()}`;
    const points = chosen().filter((point) => metric.median[point] !== null && against.median[point] !== null);
    const across = Figures.axisUnit(metric.kind, points.map((point) => metric.median[point])), up = Figures.axisUnit(against.kind, points.map((point) => against.median[point]));
    const sorted = [...points].sort((a, b) => (better(metric, a, b) ? -1 : better(metric, b, a) ? 1 : better(against, a, b) ? -1 : 1));
    const front = sorted.reduce((found, point) => (found.length === 0 || better(against, point, found[found.length - 1]) ? [...found, point] : found), []);
    const made = (at, extra) => ({type: "scatter", customdata: at, x: at.map((point) => metric.median[point] / across.by), y: at.map((point) => against.median[point] / up.by),
      text: at.map(hover), hovertemplate: "%{text}<extra></extra>", ...extra});
    const bars = (which, scale) => ({type: "data", symmetric: false, thickness: 1, width: 0, array: front.map((point) => interval(which, point)[1] / scale.by),
      arrayminus: front.map((point) => interval(which, point)[0] / scale.by), color: Figures.theme().soft});
    const traces = [made(points, {mode: "markers", marker: {size: 8, opacity: 0.75, color: points.map((point) => colourOf(point))}}),
      made(front, {mode: "lines+markers", line: {color: Figures.theme().ink, width: 1.6, dash: "dot"}, error_x: bars(metric, across), error_y: bars(against, up),
        marker: {size: 11, line: {color: Figures.theme().ink, width: 1.6}, color: front.map((point) => colourOf(point))}})];
    traces.push(...marked("front", traces));
    kindsLegend($("front-legend"), points);
    $("front-note").textContent = `${front.length} of ${points.length} points are on the front: nothing is better in both.`;
    return Figures.draw($("front"), traces, {xaxis: {label: `${metric.name} (${across.unit})`}, yaxis: {label: `${against.name} (${up.unit})`, rangemode: "tozero"}});
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
  const drawPoint = () => {
    const point = under !== null ? under : state.point === "" ? null : Number(state.point);
    const cursor = under !== null && String(under) !== state.point ? " under the cursor" : "";
    $("point-title").textContent = point === null ? "No point" : `Point ${data.numbers[point]}${cursor}`;
    $("point-figures").replaceChildren();
    $("command").textContent = "";
    if (point === null) {
      $("point-words").textContent = "Click a mark, a cell or a row.";
      return null;
    }
    const status = text("status", point);
    $("point-words").textContent = status === "failed" ? text("reason", point) : `${text("plan_in_words", point)}.${status !== "ok" ? " It does not fit." : text("reason", point) ? ` It ${text("reason", point)}.` : ""}`;
    $("point-words").className = status === "ok" ? "" : "bad";
    const entry = (name, value, small = "", kind = "") => {
      const term = document.createElement("dt"), told = document.createElement("dd"), more = document.createElement("small");
      term.textContent = name;
      told.textContent = `${value} `;
      told.className = kind;
      more.textContent = small;
      told.append(more);
      $("point-figures").append(term, told);
    };
    axes.forEach((axis) => entry(axis.key, label(axis, axis.at[point]), "", "axis"));
    metrics.forEach((metric) => entry(metric.name, format(metric.kind, metric.median[point]), metric.low && metric.low[point] !== null
      ? `${format(metric.kind, metric.low[point])} to ${format(metric.kind, metric.high[point])}` : ""));
    if (status !== "failed") entry("Plan", text("plan", point));
    const settings = axes.filter((axis) => !axis.key.startsWith("scale.")).map((axis) => `--set '${axis.key}=${axis.settings[axis.at[point]].replace(/'/g, "'\\''")}'`);
    const scaled = axes.some((axis) => axis.key.startsWith("scale.") && axis.values[axis.at[point]] !== 1);
    $("command").textContent = `${[axes.some((axis) => axis.key === "training.global_batch") ? data.command.replace(/ --batch \d+/, "") : data.command, ...settings].join(" ")}${scaled ? "   (scale.* has no other command than sweep)" : ""}`;
    const lanes = data.timeline.at[point];
    $("timeline-note").textContent = !lanes.length ? "The page has no timeline of this point." : `One step alone, in ${data.timeline.pieces} pieces; the first rank of each stage.`;
    const parts = (from) => from.map(({name, values}) => [name, values[point]]);
    return Promise.all([Figures.timeline($("timeline"), $("timeline-legend"), lanes.map(([name, text]) => [data.timeline.names[name], text]), data.timeline, data.timeline.seconds[point]),
      Figures.bar($("breakdown"), $("breakdown-legend"), parts(data.categories), "time", null),
      Figures.bar($("memory"), $("memory-legend"), parts(data.memory), "bytes", data.limit[point])]);
  };

  const drawTable = () => {
    if (!$("table-card").querySelector("details").open) return;
    const metric = metricOf(state.metric), shown = metrics.slice(0, 7), most = 200;
    const points = chosen().sort((a, b) => (better(metric, a, b) ? -1 : better(metric, b, a) ? 1 : a - b)).slice(0, most);
    const cell = (kind, value, isText) => Object.assign(document.createElement(kind), {textContent: value, className: isText ? "text" : ""});
    const head = document.createElement("thead"), body = document.createElement("tbody"), top = document.createElement("tr");
    top.append(cell("th", "Point", true), ...several.map((axis) => cell("th", axis.key, !axis.numeric)), cell("th", "Plan", true), ...shown.map((entry) => cell("th", entry.name)));
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
  const field = (name, control, shown) => {
    const place = document.createElement("div"), tag = document.createElement("label"), told = document.createElement("output");
    place.className = "field";
    control.id = `control-${name}`;
    tag.htmlFor = control.id;
    tag.append(document.createTextNode(name), told);
    told.textContent = shown || "";
    place.append(tag, control);
    return {place, told};
  };
  const select = (name, key, options) => {
    const control = document.createElement("select");
    control.append(...options.map(([value, said]) => Object.assign(document.createElement("option"), {value, textContent: said})));
    control.addEventListener("change", () => { state[key] = control.value; update(); });
    controls.push(() => { control.value = state[key] === undefined ? "" : state[key]; });
    return field(name, control).place;
  };
  const controls = [];
  const filter = (axis) => {
    const key = `:${axis.key}`;
    const set = (value) => { if (value === "" || Number(value) < 0) delete state[key]; else state[key] = String(value); update(); };
    if (!axis.numeric) {
      const place = select(axis.key, key, [["", "all"], ...axis.values.map((value, number) => [String(number), value])]);
      place.querySelector("select").addEventListener("change", (event) => set(event.target.value));
      return place;
    }
    const control = Object.assign(document.createElement("input"), {type: "range", min: -1, max: stepsOf(axis) - 1, step: 1});
    const {place, told} = field(axis.key, control);
    control.addEventListener("input", () => set(control.value));
    controls.push(() => {
      control.value = state[key] === undefined ? -1 : state[key];
      told.textContent = state[key] === undefined ? "all" : stepLabel(axis, Number(state[key]));
      control.setAttribute("aria-valuetext", told.textContent);
    });
    return place;
  };
  const build = () => {
    $("title").textContent = data.title;
    $("summary").replaceChildren(...[...data.summary, ...data.notes].map((line) => Object.assign(document.createElement("p"), {textContent: line})));
    $("fields").hidden = !several.length;
    $("fields").replaceChildren(...several.map(filter));
    const swept = several.map((axis) => [axis.key, axis.key]);
    $("choices").replaceChildren(
      select("Show", "metric", metrics.map((metric) => [metric.key, metric.name])),
      select("Against", "against", metrics.map((metric) => [metric.key, metric.name])),
      ...(several.length ? [select("Curve along", "x", swept), select("Lines for", "lines", [["", "nothing"], ...swept.filter(([key]) => !axisOf(key).continuous)]), select("Map across", "mapx", swept),
        select("Map upwards", "mapy", [["", "nothing"], ...swept])] : []),
      select("Plans that do not fit", "unfit", [["no", "left out"], ["yes", "shown"]]));
    for (const view of ["curve", "map", "front"]) {
      Figures.draw($(view), [], {}).then(() => $(view).on("plotly_click", (event) => {
        const given = pointOf(event);
        if (given !== null) choose(given);
      }).on("plotly_hover", (event) => look(pointOf(event))).on("plotly_unhover", () => look(null)));
    }
  };
  const pointOf = (event) => {
    const hit = event.points[0], given = Array.isArray(hit.pointIndex) ? hit.data.customdata[hit.pointIndex[0]][hit.pointIndex[1]] : hit.customdata;
    return given === undefined ? null : given;
  };
  const choose = (point) => { state.point = String(point); update(); };
  const move = (by) => {
    const points = chosen();
    if (!points.length) return;
    const at = points.indexOf(Number(state.point));
    choose(points[at < 0 || state.point === "" ? 0 : (at + by + points.length) % points.length]);
  };
  const update = () => {
    document.documentElement.dataset.theme = state.theme;
    $("theme").textContent = state.theme === "dark" ? "Light" : "Dark";
    controls.forEach((refresh) => refresh());
    write();
    return Promise.all([drawCurve(), drawMap(), drawFront(), drawPoint(), drawTable()]).then(() => { document.body.dataset.ready = "true"; });
  };

  if (!metrics.length || !axes.length) {
    $("title").textContent = data.title;
    $("summary").replaceChildren(...[...data.summary, ...data.notes, "No point of this sweep has an answer to draw."].map((line) => Object.assign(document.createElement("p"), {textContent: line})));
    document.querySelector(".grid").hidden = $("controls").hidden = $("table-card").hidden = true;
    document.body.dataset.ready = "true";
    return;
  }
  $("theme").addEventListener("click", () => { state.theme = state.theme === "dark" ? "light" : "dark"; update(); });
  $("link").addEventListener("click", () => {
    const told = (said) => { $("link").textContent = said; window.setTimeout(() => { $("link").textContent = "Copy link"; }, 2500); };
    const copied = navigator.clipboard ? navigator.clipboard.writeText(location.href) : Promise.reject();
    copied.then(() => told("Copied"), () => told("It is in the address bar"));
  });
  $("previous").addEventListener("click", () => move(-1));
  $("next").addEventListener("click", () => move(1));
  $("table-card").querySelector("details").addEventListener("toggle", drawTable);
  window.addEventListener("hashchange", () => { read(); update(); });
  let width = window.innerWidth;
  window.addEventListener("resize", () => { if (window.innerWidth !== width) { width = window.innerWidth; update(); } });
  let before = null;
  window.addEventListener("beforeprint", () => { before = state.theme; state.theme = "light"; update(); });
  window.addEventListener("afterprint", () => { if (before) { state.theme = before; before = null; update(); } });
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
  update();
})();
