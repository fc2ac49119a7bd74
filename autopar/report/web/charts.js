/* Charts of Apache ECharts: colours of Okabe and Ito (2008), which people of all kinds of colour vision tell apart. A
   chart is made when it comes into sight. */

const COLOURS = ["#0072B2", "#E69F00", "#009E73", "#D55E00", "#56B4E9", "#CC79A7", "#F0E442", "#666666", "#000000"];
const OF_KIND = {
  forward: "#56B4E9", backward: "#0072B2", recompute: "#999999", optimizer: "#CC79A7", all_gather: "#E69F00",
  reduce_scatter: "#009E73", all_reduce: "#D55E00", all_to_all: "#F0E442", parameters: "#0072B2", gradients: "#56B4E9",
  activations: "#E69F00", gathered: "#009E73", working: "#999999", inputs: "#F0E442", received: "#D55E00", sent: "#000000",
};
const colourOf = (kind, number) => OF_KIND[kind] || COLOURS[number % COLOURS.length];

const watcher = new IntersectionObserver((entries) => {
  for (const entry of entries) if (entry.isIntersecting) { watcher.unobserve(entry.target); entry.target.draw(); }
}, { rootMargin: "300px" });
addEventListener("beforeprint", () => document.querySelectorAll(".chart").forEach((place) => place.draw()));
const sizes = new ResizeObserver((entries) => {
  for (const entry of entries) echarts.getInstanceByDom(entry.target)?.resize();
});

/* A chart in an element of its own: what it says must also stand in a table or in a text beside it. */
function chart(label, height, option, then) {
  const place = el("div", { class: "chart", role: "img", "aria-label": label, style: `height:${height}px` });
  place.draw = () => {
    if (echarts.getInstanceByDom(place)) return;
    const made = echarts.init(place, null, { renderer: "canvas" });
    made.setOption({
      animation: false, color: COLOURS,
      aria: { enabled: true, label: { enabled: false }, decal: { show: false } },
      tooltip: { renderMode: "richText", confine: true, ...option.tooltip },
      ...without(option, ["tooltip"]),
    });
    sizes.observe(place);
    if (then) then(made);
  };
  watcher.observe(place);
  return place;
}

function without(object, names) {
  return Object.fromEntries(Object.entries(object).filter(([name]) => !names.includes(name)));
}

const narrow = () => window.innerWidth < 600;
const cut = (text, most) => (text.length > most ? text.slice(0, most - 1) + "…" : text);

/* Horizontal bars: rows of [name, {series: value}], each series a colour; stacked or beside each other. */
function bars(label, rows, names, text, { stacked = false, lines = [], colour = null } = {}) {
  const most = Math.max(...rows.flatMap(([, values]) => Object.values(values)));
  const height = 70 + (lines.length ? 16 : 0) + rows.length * (stacked ? 46 : 14 + 20 * names.length) + (stacked && narrow() ? 40 : 0);
  return chart(label, height, {
    grid: { left: 8, right: 40, top: names.length > 1 ? (stacked && narrow() ? 74 : 40) : lines.length ? 28 : 12, bottom: 8, containLabel: true },
    legend: names.length > 1 ? { top: 0, left: 0, type: "plain", itemGap: 12 } : undefined,
    tooltip: { trigger: "item", formatter: (p) => `${p.name}\n${p.seriesName}: ${text(p.value)}` },
    xAxis: { type: "value", axisLabel: { formatter: text, hideOverlap: true }, splitNumber: narrow() ? 3 : 5 },
    yAxis: { type: "category", inverse: true, data: rows.map(([name]) => name), axisLabel: { width: narrow() ? 110 : 260, overflow: "break" } },
    series: names.map((name, i) => ({
      type: "bar", name: spoken(name), stack: stacked ? "all" : undefined, barMaxWidth: stacked ? 30 : 16,
      itemStyle: { color: colour ? (p) => colour(p.dataIndex) : stacked ? colourOf(name, i) : COLOURS[i] },
      label: stacked ? undefined : { show: true, position: "right", formatter: (p) => text(p.value) },
      data: rows.map(([, values]) => values[name] ?? (stacked ? 0 : null)),
      markLine: i === 0 && lines.length ? {
        symbol: "none", precision: 15, silent: true, lineStyle: { color: "#000", type: "dashed" },
        data: lines.map(([said, at]) => ({ xAxis: at, label: { formatter: said, position: "start", rotate: 0, align: at > most / 2 ? "right" : "left" } })),
      } : undefined,
    })),
  });
}
