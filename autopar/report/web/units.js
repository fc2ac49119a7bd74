"use strict";
/* Numbers as people read them, the same way as report/units.py. */

function three(value) {
  return value >= 100 ? value.toFixed(0) : value >= 10 ? value.toFixed(1) : value.toFixed(2);
}

function scaled(value, units, least) {
  if (value < 0) return "−" + scaled(-value, units, least);
  for (const [scale, unit] of units) if (value >= scale) return `${three(value / scale)} ${unit}`;
  return least(value);
}

const seconds = (value) =>
  scaled(value, [[1, "s"], [1e-3, "ms"], [1e-6, "µs"]], (v) => (v === 0 ? "0" : `${three(v / 1e-9)} ns`));
const nbytes = (value) =>
  scaled(value, [[1e12, "TB"], [1e9, "GB"], [1e6, "MB"], [1e3, "kB"]], (v) => `${v.toFixed(0)} B`);
const percent = (share) => (share < 0.1 ? `${Number((share * 100).toPrecision(2))}%` : `${(share * 100).toFixed(0)}%`);
const spoken = (kind) => kind.replaceAll("_", "-");
const total = (values) => values.reduce((sum, value) => sum + value, 0);
