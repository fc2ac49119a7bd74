/* The page: sections in order, each with what is known of one plan or of two. */

const page = JSON.parse(document.getElementById("data").textContent);
const plans = page.plans;

function section(id, title, note, ...content) {
  const shown = content.flat().filter(Boolean);
  if (!shown.length) return null;
  return el("section", { id, "aria-labelledby": `${id}-title` }, el("h2", { id: `${id}-title` }, title), note ? el("p", { class: "note" }, note) : null, shown);
}

function heading() {
  const names = plans.map((plan) => plan.name).join(" beside ");
  document.getElementById("header").append(el("h1", {}, plans[0].model), el("p", { class: "note" }, names));
}

function card(name, value, more) {
  return el("div", { class: "card" }, el("span", {}, name), el("b", {}, value), more ? el("span", {}, more) : null);
}

function cards(plan) {
  const peak = total(Object.values(plan.nbytes)), gap = plan.facts.find(([name]) => name === "gap");
  const made = [];
  if (plan.step) made.push(card("step", seconds(plan.step), plan.hidden ? `${seconds(plan.step + plan.hidden)} if nothing ran beside compute` : ""));
  if (plan.bound) made.push(card("proved bound", seconds(plan.bound), gap ? `gap ${gap[1]}: it takes ${seconds(plan.bounded)}, ${plan.bounded_as}` : ""));
  if (peak) made.push(card("memory at the peak", nbytes(peak), plan.limit ? `${percent(peak / plan.limit)} of ${nbytes(plan.limit)} a device` : "a device"));
  return made.length ? el("div", { class: "cards" }, made) : null;
}

function overview() {
  const named = [...new Set(plans.flatMap((plan) => plan.facts.map(([name]) => name)))];
  const rows = named.map((name) => [name, ...plans.map((plan) => (plan.facts.find(([own]) => own === name) || ["", ""])[1])]);
  const columns = [["", false], ...plans.map((plan) => [plan.name, false])];
  return section("overview", "Overview", "",
    pair(plans.map((plan) => el("div", {}, plans.length > 1 ? el("h3", {}, plan.name) : null, cards(plan), plan.missing.map((text) => el("p", { class: "missing" }, `Not shown: ${text}.`))))),
    table("", columns, rows), plans.map((plan) => folded(`${plan.name} in words`, table("", [["", false], ["", false]], plan.lines))));
}

function byKind(plan, values, text) {
  const all = total(Object.values(values));
  return Object.entries(values).filter(([, value]) => value).map(([kind, value]) => [spoken(kind), text(value), percent(value / all)]);
}

function step() {
  const priced = plans.filter((plan) => Object.keys(plan.seconds).length);
  if (!priced.length) return null;
  const kinds = [...new Set(priced.flatMap((plan) => Object.keys(plan.seconds).filter((kind) => plan.seconds[kind] > 0)))];
  const tables = priced.map((plan) => folded(`${plan.name}, as a table`, table("", [["kind", false], ["seconds", true], ["share", true]], [
    ...byKind(plan, plan.seconds, seconds), ...(plan.hidden ? [["beside compute", `−${seconds(plan.hidden)}`, ""]] : []), ["step", seconds(plan.step), ""]])));
  const hidden = priced.filter((plan) => plan.hidden).map((plan) => `${seconds(plan.hidden)} of ${plan.name}`).join(", ");
  return section("step", "Where the step's time goes", hidden ? `Everything in turn; ${hidden} runs beside compute, so that the step is shorter by it.` : "",
    bars("Seconds of a step by kind.", priced.map((plan) => [plan.name, plan.seconds]), kinds, seconds, { stacked: true }), pair(tables));
}

function baselines() {
  const shown = plans.filter((plan) => plan.step && (plan.bound || Object.keys(plan.baselines).length));
  return section("baselines", "Bound, plan and baselines", "Named baselines, if they were asked for, are priced in the same cost model. The bound is proved: counted as it is, no plan of the space searched takes less.",
    shown.length ? pair(shown.map((plan) => {
      const known = Object.entries(plan.baselines).filter(([, value]) => typeof value === "number").sort((a, b) => a[1] - b[1]);
      const own = [["this plan", { step: plan.step }]];
      if (plan.bound && plan.bounded > plan.step * 1.0001) own.push([`this plan, ${plan.bounded_as}`, { step: plan.bounded }]);
      const rows = [...own, ...known.map(([name, value]) => [name, { step: value }])];
      const not = Object.entries(plan.baselines).filter(([, value]) => typeof value !== "number");
      const lines = plan.bound ? [[`bound ${seconds(plan.bound)}`, plan.bound]] : [];
      return el("div", {}, el("h3", {}, plan.name), bars("Seconds of a step of this plan and of named baselines.", rows, ["step"], seconds, { lines, colour: (i) => (i === 0 ? "#0072B2" : i < own.length ? "#56B4E9" : "#999999") }),
        folded("as a table", table("", [["name", false], ["step", true], ["of this plan", true]], rows.map(([name, { step: value }]) => [name, seconds(value), `${(value / plan.step).toFixed(2)}×`]))),
        not.length ? table("Baselines without a time", [["name", false], ["why not", false]], not) : null);
    })) : null);
}

function stages() {
  return section("stages", "Stages", "", plans.filter((plan) => plan.stages.length).map((plan) => table(plan.name,
    [["stage", true], ["blocks", false], ["ranks", false], ["a micro-batch", true], ["once a step", true], ["memory of its rank", true]], plan.stages)));
}

function timeline() {
  const shown = plans.filter((plan) => plan.timeline);
  const end = Math.max(...shown.map((plan) => plan.timeline.seconds));
  const staged = shown.some((plan) => plan.pipeline > 1) ? " 2B7 is the backward pass of stage 2 for micro-batch 7, F a forward pass; I and W are parts of a backward pass." : "";
  const differs = shown.some((plan) => plan.is_drawn_otherwise)
    ? "Why drawn and estimated seconds differ: of one stage, reductions that become ready together begin in another order, and the loss's sum is waited for; of several stages, or two micro-batches at once, every collective is drawn alone, outside of its bucket." : "";
  return section("timeline", "The step over time", "One rank stands for all of its stage. Ctrl and the wheel zoom, as do the buttons; a touch or the pointer says what runs." + staged,
    shown.map((plan) => timelineOf(plan, end)), differs ? el("p", { class: "note" }, differs) : null);
}

function memory() {
  const shown = plans.filter((plan) => plan.held.length);
  if (shown.length) return section("memory", "Memory over time", "Of moments that are too close to draw, the fullest is drawn.", pair(shown.map(memoryOf)));
  const priced = plans.filter((plan) => Object.keys(plan.nbytes).length);
  const kinds = [...new Set(priced.flatMap((plan) => Object.keys(plan.nbytes).filter((kind) => plan.nbytes[kind] > 0)))];
  return section("memory", "Memory at the peak", "", priced.length ? [
    bars("Bytes at the peak by kind.", priced.map((plan) => [plan.name, plan.nbytes]), kinds, nbytes, { stacked: true }),
    pair(priced.map((plan) => folded(`${plan.name}, as a table`, table("", [["kind", false], ["bytes", true], ["share", true]], byKind(plan, plan.nbytes, nbytes)))))] : null);
}

function sent() {
  const shown = plans.filter((plan) => plan.sent !== null);
  if (!shown.length) return null;
  const key = (one) => `${spoken(one.kind)} over ${one.over.join(", ")}`;
  const names = [...new Set(shown.flatMap((plan) => plan.sent.map(key)))].sort();
  const rows = names.map((name) => [name, Object.fromEntries(shown.map((plan) => [plan.name, Math.max(0, ...plan.sent.filter((one) => key(one) === name).map((one) => one.nbytes))]))]);
  const ranks = shown.some((plan) => plan.pipeline > 1);
  const columns = [["pipeline rank", true], ["collective", false], ["calls", true], ["bytes", true], ["a call", true]];
  const tables = shown.map((plan) => folded(`${plan.name}, as a table`, table("", columns, plan.sent.map((one) => [one.rank, key(one), one.calls, nbytes(one.nbytes), nbytes(one.nbytes / one.calls)]))));
  return section("sent", "Bytes by collective", `Payload of a step on each rank${ranks ? ", of the pipeline rank that sends most of it" : ""}.`,
    names.length ? [bars("Bytes sent in a step by collective.", rows, shown.map((plan) => plan.name), nbytes), pair(tables)] : el("p", {}, "Nothing is sent."));
}

function model() {
  const place = el("div", {}), made = new Map();
  const show = (i) => { if (!made.has(i)) made.set(i, modelSection(plans[i])); place.replaceChildren(...made.get(i)); };
  show(0);
  const choice = plans.length > 1 ? el("fieldset", { class: "controls" }, el("legend", {}, "plan"), plans.map((plan, i) => el("label", {},
    el("input", { type: "radio", name: "plan", checked: i === 0, onchange: () => show(i) }), plan.name))) : null;
  return section("model", plans[0].timeline ? "The model" : "Tensors", plans[0].timeline
    ? "Modules and calls in order, numbered parts that are alike as one; seconds are of a step, everything in turn, bytes what a rank holds at the peak, both of all alike parts together, and of stages each on its own rank. Views are left out."
    : "Names are those of the plan's graph, a star for every number.", choice, place);
}

function difference() {
  const found = page.difference;
  if (plans.length < 2) return null;
  if (!found) return section("difference", "What they decide differently", "", el("p", {}, "Not known without the model of both."));
  const costs = (title, values, text) => table(title, [["kind", false], ...plans.map((plan) => [plan.name, true])], Object.entries(values).filter(([, [a, b]]) => a || b).map(([kind, [a, b]]) => [spoken(kind), text(a), text(b)]));
  const columns = [["of", false], ["kind", false], ["count", true], ...plans.map((plan) => [plan.name, false])];
  return section("difference", "What they decide differently", "",
    Object.keys(found.facts).length ? table("what they are for", [["", false], ...plans.map((plan) => [plan.name, false])], Object.entries(found.facts).map(([name, both]) => [name, ...both])) : null,
    found.changes.length ? table("decisions", columns, found.changes.map((one) => [one.what, one.kind, one.count, one.left, one.right])) : el("p", {}, "They decide the same."),
    pair([costs("seconds of a step", found.seconds, seconds), costs("bytes at the peak", found.nbytes, nbytes)]));
}

heading();
const sections = [overview(), step(), baselines(), stages(), timeline(), memory(), sent(), model(), difference()].filter(Boolean);
document.getElementById("main").append(...sections);
document.getElementById("sections").append(el("ul", {}, sections.map((one) => el("li", {}, el("a", { href: `#${one.id}` }, one.querySelector("h2").textContent)))));
