/* A tensor's pieces, and which of them each rank of the mesh holds. */

const RAMP = ["#00224e", "#35456c", "#666970", "#948e77", "#c8b866", "#fee838"]; /* cividis */

/* Number of the piece of each cut dim that the rank at a coordinate holds. */
const piecesAt = (cutting, coordinate) => cutting.cuts.map((one) => total(one.strides.map((stride, axis) => stride * coordinate[axis])));

function coordinates(mesh) {
  return mesh.reduce((found, [, size]) => found.flatMap((at) => Array.from({ length: size }, (_, i) => [...at, i])), [[]]);
}

/* Elements `0–127` of a dim, or the number of the piece where the shape is not known. */
function rangeText(one, piece) {
  const range = one.ranges[piece];
  if (!range) return `piece ${piece} of ${one.parts}`;
  return range[1] === 0 ? "nothing" : range[1] === 1 ? String(range[0]) : `${range[0]}–${range[0] + range[1] - 1}`;
}

function shardsPanel(name, cutting, mesh, isOfStage) {
  const shape = cutting.shape ? cutting.shape.join(" × ") || "a single number" : "shape not known without the model";
  const pieces = cutting.cuts.reduce((product, one) => product * one.parts, 1);
  const ranks = mesh.reduce((product, [, size]) => product * size, 1);
  const whole = pieces === 1;
  const said = mesh.map(([axis], i) => `${axis}: ${cutting.axes[i]}`).join("; ");
  const each = whole ? "Every rank holds the whole of it." : `${pieces} pieces, each on ${ranks / pieces} of ${ranks} ranks.`;
  return [
    el("h3", { id: "shards-title" }, name),
    el("p", {}, shape),
    el("p", { class: "note" }, `${said}. ${each}`),
    whole ? null : tensorChart(cutting, pieces),
    meshChart(cutting, mesh, pieces, isOfStage),
    folded("as a table", shardTable(cutting, mesh, ranks)),
  ].filter(Boolean);
}

const colourOfPiece = (pieces) => (pieces <= 8
  ? { type: "piecewise", show: false, dimension: 2, pieces: Array.from({ length: pieces }, (_, i) => ({ value: i, color: COLOURS[i] })) }
  : { type: "continuous", show: false, dimension: 2, min: 0, max: pieces - 1, inRange: { color: RAMP } });

const inkOn = (piece, pieces) => (pieces <= 8 ? ([1, 4, 5, 6].includes(piece) ? "#000" : "#fff") : piece / pieces > 0.55 ? "#000" : "#fff");

function heat(label, height, columns, rows, data, pieces, text, names) {
  const small = columns.length > 12 || rows.length > 20;
  return chart(label, height, {
    grid: { left: 8, right: 12, top: 34, bottom: 8, containLabel: true },
    tooltip: { formatter: (p) => text(p.data.value) },
    xAxis: { type: "category", position: "top", name: names[0], nameLocation: "middle", nameGap: 20, data: columns, axisLabel: { interval: columns.length > 10 ? "auto" : 0, hideOverlap: true }, axisTick: { show: false } },
    yAxis: { type: "category", inverse: true, name: names[1], nameLocation: "start", data: rows, axisTick: { show: false }, axisLabel: { hideOverlap: true } },
    visualMap: colourOfPiece(pieces),
    series: [{
      type: "heatmap", itemStyle: { borderColor: "#fff", borderWidth: small ? 0.5 : 1.5 },
      data: data.map((value) => ({ value, label: { show: !small, color: inkOn(value[2], pieces), formatter: () => String(value[2]) } })),
    }],
  });
}

/* The tensor: its first cut dim downwards, the second to the right; a third is beside the second. */
function tensorChart(cutting, pieces) {
  const [down, ...others] = cutting.cuts;
  const width = others.reduce((product, one) => product * one.parts, 1);
  const split = (number) => others.reduceRight(([rest, found], one) => [Math.floor(rest / one.parts), [rest % one.parts, ...found]], [number, []])[1];
  const across = Array.from({ length: width }, (_, n) => split(n).map((piece, i) => rangeText(others[i], piece)).join("; ") || "all");
  const rows = Array.from({ length: down.parts }, (_, piece) => rangeText(down, piece));
  const data = rows.flatMap((_, y) => across.map((__, x) => [x, y, y * width + x]));
  const dims = others.length ? `dim ${others.map((one) => one.dim).join(", ")}` : "the other dims";
  const text = ([x, y, n]) => `piece ${n}\ndim ${down.dim}: ${rows[y]}\n${dims}: ${across[x]}`;
  return heat(`The tensor in ${pieces} pieces.`, 70 + Math.min(260, Math.max(60, rows.length * 24)), across, rows, data, pieces, text,
    [`pieces: ${dims}`, `dim ${down.dim}`]);
}

/* The mesh: the last axis to the right, the others downwards; the number of a rank's piece in each place. */
function meshChart(cutting, mesh, pieces, isOfStage) {
  const own = numberOf(cutting);
  const wrap = mesh.length === 1 ? Math.min(16, mesh[0][1]) : mesh[mesh.length - 1][1];
  const all = coordinates(mesh);
  const columns = Array.from({ length: wrap }, (_, i) => String(i));
  const rows = Array.from({ length: Math.ceil(all.length / wrap) }, (_, y) => (mesh.length === 1 ? `${y * wrap}–` : all[y * wrap].slice(0, -1).join(", ")));
  const data = all.map((at, rank) => [rank % wrap, Math.floor(rank / wrap), own(at), rank]);
  const text = ([, , n, rank]) => {
    const at = mesh.map(([axis], i) => `${axis} ${all[rank][i]}`).join(", ");
    const held = piecesAt(cutting, all[rank]).map((piece, i) => `dim ${cutting.cuts[i].dim}: ${rangeText(cutting.cuts[i], piece)}`);
    return [`rank ${rank}${isOfStage ? " of the stage" : ""} (${at})`, pieces === 1 ? "the whole" : `piece ${n}`, ...held].join("\n");
  };
  const others = mesh.slice(0, -1).map(([axis]) => axis).join(", ");
  const names = [`ranks: ${mesh[mesh.length - 1][0]}`, mesh.length > 1 ? others : "from rank"];
  return heat(`The mesh, with the number of the piece that each rank holds.`, 70 + Math.min(420, Math.max(60, rows.length * 22)), columns, rows, data, pieces, text, names);
}

function numberOf(cutting) {
  return (coordinate) => piecesAt(cutting, coordinate).reduce((number, piece, i) => number * cutting.cuts[i].parts + piece, 0);
}

const MOST_ROWS = 64;

function shardTable(cutting, mesh, ranks) {
  const all = coordinates(mesh).slice(0, MOST_ROWS), own = numberOf(cutting);
  const rows = all.map((at, rank) => [
    rank, at.join(", "), own(at), piecesAt(cutting, at).map((piece, i) => `dim ${cutting.cuts[i].dim}: ${rangeText(cutting.cuts[i], piece)}`).join("; ") || "the whole",
  ]);
  const more = ranks > MOST_ROWS ? `the first ${MOST_ROWS} of ${ranks} ranks` : "";
  return table(more, [["rank", true], [mesh.map(([axis]) => axis).join(", "), false], ["piece", true], ["elements", false]], rows);
}
