"use strict";
// Elements and tables. Names from traces are data: they reach the page through textContent only.
(() => {
  function el(tag, attributes = {}, ...children) {
    const node = document.createElement(tag);
    for (const [key, value] of Object.entries(attributes)) {
      if (value === null || value === undefined || value === false) continue;
      if (key === "class") node.className = value;
      else if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
      else node.setAttribute(key, value === true ? "" : value);
    }
    for (const child of children.flat(Infinity)) if (child !== null && child !== undefined && child !== false) node.append(child);
    return node;
  }

  const badge = (verdict) => el("span", { class: `badge ${verdict}` }, `${{ PASS: "✓", FAIL: "✗", INCONCLUSIVE: "?", CONFIG_ERROR: "!" }[verdict] || ""} ${verdict}`);

  function say(text) {
    const said = document.getElementById("said");
    said.textContent = text;
    said.classList.add("show");
    setTimeout(() => said.classList.remove("show"), 1500);
  }

  async function copy(text) {
    try {
      await navigator.clipboard.writeText(text);
    } catch {
      // A page opened from a file has no clipboard API everywhere.
      const area = el("textarea");
      area.value = text;
      document.body.append(area);
      area.select();
      document.execCommand("copy");
      area.remove();
    }
    say("Copied");
  }

  // columns: {title, value(row) for sorting, show(row) for the cell (text or node), num, hint, cls}
  function table(columns, rows, options = {}) {
    let { sort = null, descending = true } = options;
    let limit = options.limit || 200;
    const body = el("tbody");
    const more = el("button", { type: "button", onclick: () => { limit *= 5; fill(); } });
    const heads = columns.map((column, i) => {
      const head = el("th", { class: column.num ? "num" : null, scope: "col", title: column.hint });
      if (options.fixed) head.append(column.title);
      else head.append(el("button", { type: "button", onclick: () => { descending = sort === i ? !descending : !!column.num; sort = i; fill(); } }, column.title));
      return head;
    });
    const root = el("div", {}, el("div", { class: `scroll${options.tall ? " tall" : ""}`, tabindex: options.tall ? "0" : null },
      el("table", { class: options.cls || "wide", id: options.id }, el("thead", {}, el("tr", {}, heads)), body)), more);

    function fill() {
      let shown = rows;
      if (sort !== null) {
        const value = columns[sort].value;
        const key = rows.map((row, i) => [value(row), i]);
        const missing = (v) => v === null || v === undefined || Number.isNaN(v);
        key.sort(([a, i], [b, j]) => {
          if (missing(a) || missing(b)) return missing(a) - missing(b) || i - j;
          const order = a < b ? -1 : a > b ? 1 : 0;
          return (descending ? -order : order) || i - j;
        });
        shown = key.map(([, i]) => rows[i]);
        heads.forEach((head, i) => { if (i === sort) head.setAttribute("aria-sort", descending ? "descending" : "ascending"); else head.removeAttribute("aria-sort"); });
      }
      body.replaceChildren(...shown.slice(0, limit).map((row) => {
        const pick = options.pick ? () => options.pick(row) : null;
        return el("tr", {
          class: [pick && "pickable", options.chosen && options.chosen(row) && "chosen"].filter(Boolean).join(" ") || null,
          tabindex: pick ? "0" : null, onclick: pick,
          onkeydown: pick && ((event) => { if (event.key === "Enter" && event.target === event.currentTarget) pick(); }),
        }, columns.map((column) => el("td", { class: [column.num && "num", column.cls].filter(Boolean).join(" ") || null }, column.show ? column.show(row) : String(column.value(row) ?? "–"))));
      }));
      more.hidden = shown.length <= limit;
      more.textContent = `Show more (${AMT.count(shown.length - limit)} not shown)`;
    }
    fill();
    return root;
  }

  const panel = (cls, title, ...children) => el("section", { class: `panel ${cls}` }, title ? el("h3", {}, title) : null, ...children);
  // Times of ranks that share a GPU are comparable with nothing: it is said beside each of them.
  const timed = (title) => (AMT.run().facts.shared_gpu ? `${title} (shared GPU: times are inflated)` : title);
  const note = (...children) => el("p", { class: "note" }, ...children);

  function missing(view) {
    return AMT.run().facts.missing.filter(([own]) => own === view).map(([, text, command]) =>
      el("div", { class: "missing" }, el("p", {}, command ? `${text} To get it:` : text), command ? el("pre", { class: "cmd" }, command) : null));
  }

  function name(text) {
    const cut = el("span", { class: "cut mono", title: text.length > 2000 ? `${text.slice(0, 2000)}…` : text });
    cut.textContent = text;
    return cut;
  }

  const copyButton = (text) => el("button", { type: "button", title: "Copy the full name", "aria-label": "Copy the full name", onclick: (event) => { event.stopPropagation(); copy(text); } }, "Copy");

  Object.assign(AMT, { el, badge, timed, say, copy, table, panel, note, missing, nameCell: name, copyButton });
})();
