"use strict";
// Two runs: candidate over baseline by bucket and symbol, with the interval; symbols that appeared or vanished.
(() => {
  const { el, panel, note } = AMT;

  function rows() {
    const table = AMT.compare.rows, state = AMT.state, found = [];
    const wanted = state.ranks && state.ranks.length === 1 ? state.ranks[0] : -1;
    const executions = state.executions && new Set(state.executions.map((text) => (text === "unknown" ? null : text))), ms = state.ms && new Set(state.ms);
    for (let i = 0; i < table.rows; i++) {
      if (table.rank[i] !== wanted) continue;
      const execution = AMT.text(table.execution[i]);
      if ((executions && !executions.has(execution)) || (ms && !ms.has(table.M[i]))) continue;
      found.push({ execution, M: table.M[i], full: AMT.text(table.full[i]), calls: [table.calls_a[i], table.calls_b[i]], steps: [table.steps_a[i], table.steps_b[i]], mean: [table.mean_a[i], table.mean_b[i]], ratio: table.ratio[i], low: table.low[i], high: table.high[i] });
    }
    return [found, wanted];
  }

  const told = (row) => (Number.isFinite(row.low) ? (row.low > 1 ? "slower" : row.high < 1 ? "faster" : "no") : "one step");

  // One run with a shared GPU is enough to spoil a ratio, whichever of the two is chosen.
  const shared = () => AMT.runs.some((run) => run.facts.shared_gpu);
  const timed = (title) => (shared() ? `${title} (shared GPU: times are inflated)` : title);

  AMT.views.compare = {
    title: "Compare",
    hidden: () => !AMT.compare,
    render(main) {
      const [a, b] = AMT.runs.map((run) => run.facts), [all, rank] = rows(), names = [...new Set([...AMT.compare.sums, ...all.map((row) => row.full)])];
      const wanted = names.includes(AMT.state.name) ? AMT.state.name : all.some((row) => row.full === names[0]) ? names[0] : names[1];
      const chosen = all.filter((row) => row.full === wanted && row.M >= 0);
      const picker = el("label", {}, "Compare ", el("select", { id: "compare-name", onchange: (event) => AMT.set({ name: event.target.value }) }, names.slice(0, 300).map((name) => el("option", { value: name, selected: name === wanted }, AMT.short(name, 90)))));
      main.append(panel("", null, el("dl", { class: "facts" }, el("dt", {}, "Baseline"), el("dd", {}, a.name, " ", AMT.badge(AMT.verdictOf(a))), el("dt", {}, "Candidate"), el("dd", {}, b.name, " ", AMT.badge(AMT.verdictOf(b)))),
        shared() ? el("p", { class: "warn" }, "shared GPU: ranks of at least one run were time-sliced, so these ratios prove nothing about speed.") : null,
        AMT.compare.differs.length ? [el("h3", {}, "What was not the same"), AMT.table([{ title: "what", value: (row) => row[0] }, { title: "baseline", value: (row) => row[1] || null, cls: "name" }, { title: "candidate", value: (row) => row[2] || null, cls: "name" }], AMT.compare.differs, { fixed: true, id: "differs-table" })] : note("What was asked is equal in both runs.")));
      main.append(el("div", { class: "tools" }, picker, note(`Real requests; ${rank < 0 ? "all ranks together (choose one rank for its own)" : `rank ${rank}`}. Interval: 95 % of the ratio of means, steps being the independent unit.`)));
      const node = el("div", { class: "chart", id: "chart-compare" });
      main.append(el("section", { class: "panel" }, chosen.length ? node : note("No bucket of these kernels is in both runs.")));
      if (chosen.length) {
        AMT.draw(node, "compare", AMT.byExecution(AMT.onM(chosen)).map(([execution, own]) => AMT.trace("compare", 0, {
          x: own.map((row) => AMT.mValue(row.M)), y: own.map((row) => row.ratio), name: AMT.label(AMT.executionName(execution)),
          hovertemplate: "M %{x}: %{y:.3f}<extra></extra>", error_y: { type: "data", symmetric: false, array: own.map((row) => (Number.isFinite(row.high) ? row.high - row.ratio : 0)), arrayminus: own.map((row) => (Number.isFinite(row.low) ? row.ratio - row.low : 0)) },
          marker: { color: AMT.colour(AMT.place(execution)), symbol: AMT.symbolOf(AMT.place(execution)) },
        })), (layout) => { AMT.mAxis(layout, chosen.map((row) => row.M)); layout.yaxis.title.text = "ratio (below 1: candidate faster)"; });
      }
      const pair = (title, pick, show) => [0, 1].map((side) => ({ title: `${title}, ${side ? "candidate" : "baseline"}`, value: (row) => pick(row)[side], show: (row) => show(pick(row)[side]), num: true }));
      main.append(panel("", timed(`Buckets and symbols in both runs (${AMT.count(all.length)})`), AMT.table([
        { title: "execution", value: (row) => row.execution, show: (row) => AMT.executionName(row.execution) }, { title: "M", value: (row) => row.M, show: (row) => (row.M < 0 ? "–" : String(row.M)), num: true }, { title: "symbol", value: (row) => row.full, show: (row) => AMT.nameCell(row.full), cls: "name" },
        ...pair("calls", (row) => row.calls, AMT.count), ...pair("mean", (row) => row.mean, AMT.time),
        { title: "ratio", value: (row) => row.ratio, show: (row) => AMT.fixed(row.ratio, 3), num: true }, { title: "95 % interval", value: (row) => row.low, show: (row) => (Number.isFinite(row.low) ? `${AMT.fixed(row.low, 3)} to ${AMT.fixed(row.high, 3)}` : "–"), num: true }, { title: "told apart", value: told, cls: "tight" },
      ], all, { limit: 60, tall: true, id: "compare-table", cls: "wide wrap" })));
      const list = (title, names) => panel("c6", `${title} (${names.length})`, names.length ? AMT.table([{ title: "full name", value: (name) => name, show: (name) => AMT.nameCell(name), cls: "name" }], names, { limit: 40, tall: true }) : note("none"));
      main.append(el("div", { class: "grid" }, list("Only in the candidate (appeared)", AMT.compare.appeared), list("Only in the baseline (vanished)", AMT.compare.vanished)));
    },
  };
})();
