"use strict";
// The filter bar: one multiple choice a dimension, by keyboard or mouse.
(() => {
  const { el } = AMT;

  function choices(run) {
    const set = (table, name) => AMT.distinct(table[name] || []);
    const executions = [...new Set([...run.cube.execution, ...run.cells.execution])].map((code) => AMT.text(code) || "unknown");
    executions.sort((a, b) => AMT.place(a) - AMT.place(b));
    const traffic = [...new Set(run.cube.traffic)].map((code) => AMT.text(code)).filter(Boolean).sort();
    return [
      { key: "ranks", title: "Ranks", values: Array.from({ length: run.facts.world_size }, (_, i) => i) },
      { key: "executions", title: "Execution", values: executions },
      { key: "ms", title: "M", values: [...new Set([...set(run.cube, "M"), ...set(run.cells, "M")])].sort((a, b) => a - b) },
      { key: "layers", title: "Layers", values: set(run.cube, "layer") },
      { key: "traffic", title: "Traffic", values: traffic, hint: "witness: steps of real requests inside the recording window" },
    ];
  }

  function told(item, chosen) {
    if (chosen === null) return `${item.title}: all (${item.values.length})`;
    const text = typeof item.values[0] === "number" ? AMT.fold(chosen) : chosen.join(", ");
    return `${item.title}: ${text || "none"}`;
  }

  function pick(item, open) {
    const chosen = AMT.state[item.key];
    const summary = el("summary", { title: item.hint }, told(item, chosen));
    const set = (values) => {
      const all = values !== null && values.length === item.values.length;
      AMT.set({ [item.key]: all ? null : values, step: item.key === "ms" || item.key === "executions" ? null : AMT.state.step });
    };
    const boxes = item.values.map((value) => el("label", {}, el("input", {
      type: "checkbox", checked: chosen === null || chosen.includes(value), "data-value": value,
      onchange: (event) => {
        const now = new Set(AMT.state[item.key] === null ? item.values : AMT.state[item.key]);
        if (event.target.checked) now.add(value); else now.delete(value);
        set(item.values.filter((own) => now.has(own)));
      },
    }), ` ${value}`));
    const only = (text, values) => el("button", { type: "button", onclick: () => set(values) }, text);
    return el("details", { class: `pick${chosen && !(item.key === "traffic" && chosen.join() === "witness") ? " on" : ""}`, "data-filter": item.key, open: item.key === open },
      summary, el("div", {}, el("div", { class: "tools" }, only("All", null), only("None", [])), boxes));
  }

  let built = null;
  AMT.renderFilters = () => {
    const run = AMT.run(), bar = document.getElementById("filters");
    const focused = document.activeElement?.dataset?.value, inside = document.activeElement?.closest?.("[data-filter]")?.dataset.filter;
    // Which one is open is asked of the page itself: the event that tells it may come after the next key.
    const open = openPick()?.dataset.filter;
    if (!built || built.run !== run) built = { run, items: choices(run) };
    const active = ["ranks", "executions", "ms", "layers"].some((key) => AMT.state[key]) || (AMT.state.traffic || []).join() !== "witness";
    bar.replaceChildren(...built.items.filter((item) => item.values.length).map((item) => pick(item, open)),
      active ? el("button", { type: "button", id: "reset", onclick: () => AMT.set({ ranks: null, executions: null, ms: null, layers: null, traffic: ["witness"] }) }, "Reset filters") : "");
    if (inside) (bar.querySelector(`[data-filter="${inside}"] [data-value="${CSS.escape(focused ?? "")}"]`) || bar.querySelector(`[data-filter="${inside}"] summary`))?.focus();
  };
  const openPick = () => document.querySelector("details.pick[open]");
  const close = () => { const open = openPick(); if (open) open.open = false; return open; };
  document.addEventListener("keydown", (event) => { if (event.key === "Escape") close()?.querySelector("summary").focus(); });
  document.addEventListener("click", (event) => {
    const open = openPick();
    if (open && event.target.isConnected && !open.contains(event.target)) close();
  });
})();
