/* A step over time: one row a rank's device or link. */

const PASSES = { F: ["forward", "#56B4E9"], B: ["backward", "#0072B2"], I: ["backward", "#0072B2"], W: ["weights' gradients", "#009E73"], "": ["once a step", "#CC79A7"] };
const LINKS = ["#E69F00", "#D55E00", "#F0E442", "#666666", "#009E73", "#000000"];

function timelineOf(plan, end) {
  const { tracks, spans, seconds: taken, joined_below: joined } = plan.timeline;
  const several = new Set(tracks.map((track) => track.rank)).size > 1;
  const rows = tracks.map((track) => (several ? `rank ${track.rank} ${track.lane}` : track.lane));
  const lanes = [...new Set(tracks.filter((track) => !track.is_device).map((track) => track.lane))];
  const group = (i) => {
    const track = tracks[spans.track[i]];
    return track.is_device ? PASSES[spans.action[i]] : [`link ${track.lane}`, LINKS[lanes.indexOf(track.lane) % LINKS.length]];
  };
  const found = new Map();
  spans.track.forEach((track, i) => {
    const [name, colour] = group(i);
    if (!found.has(name)) found.set(name, { colour, data: [] });
    found.get(name).data.push([spans.start[i], spans.start[i] + spans.seconds[i], track, i]);
  });
  const text = (i) => {
    const more = spans.tasks[i] > 1 ? ` (${spans.tasks[i]} tasks)` : "";
    return `${wrapped(spans.names[spans.name[i]])}${more}\n${seconds(spans.seconds[i])}, from ${seconds(spans.start[i])}\n${rows[spans.track[i]]}`;
  };
  const band = rows.length > 24 ? 18 : 30, top = 20 + 22 * Math.ceil(found.size / (narrow() ? 2 : 6));
  let made = null;
  const box = chart(`The step on ${rows.length} rows: ${rows.join("; ")}.`, top + 76 + band * rows.length, {
    legend: { top: 0, left: 0, type: "plain", itemGap: 10 },
    grid: { left: 8, right: 18, top, bottom: 64, containLabel: true },
    tooltip: { formatter: (p) => text(p.value[3]) },
    dataZoom: [
      { type: "slider", filterMode: "weakFilter", bottom: 10, height: 22, labelFormatter: (v) => seconds(v), brushSelect: false },
      { type: "inside", filterMode: "weakFilter", zoomOnMouseWheel: "ctrl", moveOnMouseMove: !narrow(), disabled: narrow() },
    ],
    xAxis: { type: "value", min: 0, max: end, axisLabel: { formatter: seconds, hideOverlap: true } },
    yAxis: { type: "category", inverse: true, data: rows, axisLabel: { width: narrow() ? 92 : 190, overflow: rows.length > 8 ? "truncate" : "break", interval: 0 } },
    series: [...found].map(([name, { colour, data }]) => ({
      type: "custom", name, renderItem: span, itemStyle: { color: colour }, encode: { x: [0, 1], y: 2 }, data,
      dimensions: ["start", "end", "track", "span"], progressive: 0,
    })),
  }, (one) => { made = one; });
  const zoom = (scale, shift) => {
    if (!made) return;
    const { start, end: stop } = made.getOption().dataZoom[0];
    const width = Math.min(100, (stop - start) * scale), middle = (start + stop) / 2 + shift * (stop - start);
    const from = Math.max(0, Math.min(100 - width, middle - width / 2));
    made.dispatchAction({ type: "dataZoom", dataZoomIndex: 0, start: from, end: from + width });
  };
  const button = (name, scale, shift) => el("button", { type: "button", onclick: () => zoom(scale, shift) }, name);
  const said = [
    plan.is_drawn_otherwise ? `Drawn, the step takes ${seconds(taken)}; estimated, ${seconds(plan.step)}: what differs is said below.` : `The step takes ${seconds(taken)}.`,
    joined ? `Neighbours shorter than ${seconds(joined)} are drawn as one.` : "",
  ].join(" ");
  return el("div", {}, el("h3", {}, plan.name), el("p", { class: "note" }, said),
    el("div", { class: "controls" }, button("zoom in", 0.5, 0), button("zoom out", 2, 0), button("← earlier", 1, -0.5), button("later →", 1, 0.5), button("whole step", 1e9, 0)),
    box, folded("busy seconds of each row, as a table", busyTable(plan, rows)));
}

function wrapped(text) {
  return text.replace(/(.{1,60})(?:\s|$)|(.{60})/g, "$&\n").trim();
}

function span(params, api) {
  const from = api.coord([api.value(0), api.value(2)]), to = api.coord([api.value(1), api.value(2)]);
  const height = api.size([0, 1])[1] * 0.72;
  const shape = echarts.graphic.clipRectByRect(
    { x: from[0], y: from[1] - height / 2, width: Math.max(to[0] - from[0], 0.5), height }, params.coordSys);
  return shape && { type: "rect", shape, style: { fill: api.visual("color") } };
}

function busyTable(plan, rows) {
  const { spans, seconds: taken } = plan.timeline, busy = rows.map(() => 0);
  spans.track.forEach((track, i) => { busy[track] += spans.seconds[i]; });
  return table("", [["row", false], ["busy", true], ["of the step", true]], rows.map((row, i) => [row, seconds(busy[i]), percent(busy[i] / taken)]));
}
