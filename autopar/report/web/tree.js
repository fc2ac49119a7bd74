/* The model as a tree of native disclosures, each built when it is opened: arrow keys move and open, as in a tree. */

function modelSection(plan) {
  const panel = el("aside", { class: "shards", "aria-live": "polite", "aria-labelledby": "shards-title" });
  let pressed = null;
  const select = (part, path, button) => {
    if (pressed) pressed.setAttribute("aria-pressed", "false");
    pressed = button;
    button.setAttribute("aria-pressed", "true");
    if (narrow() && document.readyState === "complete") setTimeout(() => panel.scrollIntoView({ block: "nearest" }));
    panel.replaceChildren(...shardsPanel(path, plan.cuts[part.cut], plan.mesh, plan.pipeline > 1));
  };
  const priced = plan.timeline !== null;
  const whole = { seconds: plan.tree.computed + plan.tree.communicated, nbytes: plan.tree.nbytes };
  const list = el("ul", {}, item(plan.tree, { select, priced, whole, staged: plan.stages.length > 0 }, [], true));
  const tree = el("div", { class: "tree", onkeydown: keys }, priced ? head() : null, list);
  const controls = el("div", { class: "controls" },
    el("button", { type: "button", onclick: () => setAll(list, true) }, "open all"),
    el("button", { type: "button", onclick: () => setAll(list, false) }, "close all"),
    el("span", { class: "note" }, "Press a placement to see which rank holds what. Keys: arrows, Enter."));
  panel.append(el("p", { class: "note" }, "Choose a tensor."));
  const first = tree.querySelector("button[data-kind=parameter]") || tree.querySelector("button[data-cut]");
  if (first) first.click();
  return [controls, el("div", { class: "model" }, tree, panel)];
}

function head() {
  return el("div", { class: "row head" }, el("span", {}, "part"), el("span", { class: "amount" }, "seconds"), el("span", { class: "amount" }, "bytes"));
}

/* above: names of the parts that it is in, the model's first. Of stages the first is open. */
function item(part, of, above, isFirst) {
  const row = rowOf(part, of, above), depth = above.length;
  if (!part.parts.length) return el("li", {}, row);
  const below = el("ul", {});
  const details = el("details", {}, el("summary", {}, row), below);
  details.build = () => {
    if (!below.childElementCount) below.append(...part.parts.map((one, i) => item(one, of, [...above, part.name], i === 0)));
  };
  details.addEventListener("toggle", () => details.open && details.build());
  const isShut = of.staged && depth === 1 && !isFirst;
  if (isShut) return el("li", {}, details);
  if (depth < 2 || (depth < 4 && (part.count > 1 || part.parts.length < 5))) { details.build(); details.open = true; }
  return el("li", {}, details);
}

function rowOf(part, of, above) {
  const called = part.kind === "module" && part.count > 1 ? `${part.name} ×${part.count}` : part.name;
  const button = part.cut === null ? null : el("button", {
    type: "button", "aria-pressed": "false", "data-cut": part.cut, "data-kind": part.kind, title: "draw its shards",
    onclick: (event) => { event.preventDefault(); of.select(part, [...above.slice(1), part.name].join(" › "), event.currentTarget); },
  }, part.layout);
  const counted = part.kind !== "module" && part.count > 1 ? ` ×${part.count}` : "";
  const what = el("span", { class: "what" },
    part.kind === "module" ? el("b", {}, called) : [el("span", { class: "kind" }, part.kind), `${part.name}${counted} `], " ",
    button, " ", el("span", { class: "how" }, part.how.replace(/^, /, "")));
  const taken = part.computed + part.communicated;
  const amounts = !of.priced ? [] : [amount(taken, of.whole.seconds, seconds), amount(part.nbytes, of.whole.nbytes, nbytes)];
  return el("span", { class: "row" }, what, ...amounts);
}

function amount(value, whole, text) {
  if (!value) return el("span", { class: "amount" });
  return el("span", { class: "amount", title: whole ? `${percent(value / whole)} of all` : "" }, text(value),
    el("i", { style: `width:${whole ? Math.min(100, (100 * value) / whole).toFixed(1) : 0}%` }));
}

function setAll(list, open) {
  const all = [...list.querySelectorAll(":scope details")];
  for (const details of all) {
    if (open) { details.build(); details.open = true; setAll(details.querySelector("ul"), true); } else details.open = false;
  }
}

function keys(event) {
  const moves = { ArrowDown: 1, ArrowUp: -1 };
  const at = document.activeElement;
  const details = at.closest("summary") && at.closest("summary").parentElement;
  if (event.key in moves) {
    const all = [...event.currentTarget.querySelectorAll("summary, button")].filter((one) => one.offsetParent !== null);
    const next = all[all.indexOf(at) + moves[event.key]];
    if (next) next.focus();
  } else if (event.key === "ArrowRight" && details) details.open = true;
  else if (event.key === "ArrowLeft" && at.tagName === "SUMMARY" && !details.open) {
    const above = details.parentElement.closest("details");
    if (above) above.querySelector("summary").focus();
  } else if (event.key === "ArrowLeft" && details) details.open = false;
  else return;
  event.preventDefault();
}
