/* What a rank holds over time, by kind, and what makes the peak. */

function memoryOf(plan) {
  const place = el("div", {});
  const sums = plan.held.map((curve) => Math.max(...curve.at.map((_, i) => total(Object.values(curve.kinds).map((one) => one[i])))));
  const fullest = sums.indexOf(Math.max(...sums));
  const show = (number) => place.replaceChildren(memoryChart(plan, plan.held[number], sums[number]));
  show(fullest);
  const choice = plan.held.length > 1 ? el("div", { class: "controls" }, el("label", {}, "pipeline rank ",
    el("select", { onchange: (event) => show(Number(event.target.value)) },
      plan.held.map((curve, i) => el("option", { value: i, selected: i === fullest }, `${curve.rank}: ${nbytes(sums[i])}${i === fullest ? ", the fullest" : ""}`))))) : null;
  return el("div", {}, el("h3", {}, plan.name), choice, place, plan.peaks.map((peak) => (plan.peaks.length > 1 ? folded(`what makes the peak of ${peak.title}`, peakTable(peak)) : peakTable(peak))));
}

function memoryChart(plan, curve, most) {
  const kinds = Object.keys(curve.kinds), at = [];
  const least = curve.end * 1e-9; /* a stack needs moments that differ */
  curve.at.forEach((value, i) => at.push(i ? Math.max(value, at[i - 1] + least) : value));
  const close = plan.limit && plan.limit < 2.5 * most;
  const points = (values) => [...values.map((value, i) => [at[i], value]), [Math.max(curve.end, at[at.length - 1] + least), values[values.length - 1]]];
  const what = curve.what[curve.peak], top = 30 + 22 * Math.ceil(kinds.length / (narrow() ? 3 : plans.length > 1 ? 5 : 9));
  const lines = [{ xAxis: at[curve.peak], label: { formatter: `peak ${nbytes(most)}`, position: "end", rotate: 0 } }];
  if (close) lines.push({ yAxis: plan.limit, label: { formatter: `limit ${nbytes(plan.limit)}`, position: "insideStartTop" } });
  const box = chart(`Bytes held over time; the peak, ${nbytes(most)}, is at ${what}.`, narrow() ? 380 : 360, {
    grid: { left: 8, right: 18, top, bottom: 34, containLabel: true },
    legend: { top: 0, left: 0, type: "plain", itemGap: 12, icon: "rect", itemWidth: 18 },
    tooltip: { trigger: "axis", formatter: (ps) => {
      const i = Math.min(ps[0].dataIndex, curve.what.length - 1);
      const own = ps.map((p) => [p.seriesName, p.value[1]]).filter(([, value]) => value > 0).reverse();
      return [wrapped(curve.what[i]), `${nbytes(total(own.map(([, value]) => value)))} at ${seconds(at[i])}`, ...own.map(([kind, value]) => `${kind}: ${nbytes(value)}`)].join("\n");
    } },
    xAxis: { type: "value", min: 0, max: curve.end, name: curve.axis, nameLocation: "middle", nameGap: 24, axisLabel: { formatter: seconds, hideOverlap: true } },
    yAxis: { type: "value", max: close ? plan.limit * 1.06 : undefined, axisLabel: { formatter: nbytes, showMaxLabel: false } },
    series: kinds.map((kind, i) => ({
      type: "line", name: spoken(kind), stack: "held", step: "end", symbol: "none", lineStyle: { width: 0.5, color: "#333" },
      itemStyle: { color: colourOf(kind, i) }, areaStyle: { color: colourOf(kind, i), opacity: 0.9 }, data: points(curve.kinds[kind]),
      markLine: i === 0 ? { symbol: "none", precision: 15, lineStyle: { color: "#000", type: "dashed" }, data: lines, silent: true } : undefined,
    })),
  });
  const rows = kinds.map((kind) => [spoken(kind), nbytes(curve.kinds[kind][curve.peak]), percent(curve.kinds[kind][curve.peak] / most)]);
  return el("div", {}, el("p", {}, `The peak, ${nbytes(most)}, is at ${what}.`), box,
    folded("at the peak by kind, as a table", table("", [["kind", false], ["bytes", true], ["share", true]], rows)));
}

function peakTable(peak) {
  const rows = peak.items.map((item) => [item.what, spoken(item.kind), item.count, nbytes(item.amount), percent(item.amount / peak.total)]);
  const title = `What makes the peak${peak.title ? ` of ${peak.title}` : ""} (${peak.when})`;
  return table(title, [["what", false], ["kind", false], ["count", true], ["bytes", true], ["share", true]], rows);
}
