/* Elements and tables. Texts of a plan become text nodes, never markup. */

function el(tag, attributes, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (value !== null && value !== undefined && value !== false) made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== ""));
  return made;
}

/* columns: [name, whether it is a number]. */
function table(caption, columns, rows) {
  const cell = (tag, text, number) => el(tag, { class: number ? "number" : null, scope: tag === "th" ? "col" : null }, String(text));
  return el("div", { class: "scroll" },
    el("table", {},
      caption ? el("caption", {}, caption) : null,
      el("thead", {}, el("tr", {}, columns.map(([name, number]) => cell("th", name, number)))),
      el("tbody", {}, rows.map((row) => el("tr", {}, row.map((text, i) => cell("td", text, columns[i][1])))))));
}

function folded(title, ...content) {
  return el("details", {}, el("summary", {}, title), ...content);
}

function pair(items) {
  return el("div", { class: items.length > 1 ? "pair two" : "pair" }, items);
}
