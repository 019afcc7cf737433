"use strict";
// Every symbol: sortable, searchable, with its full name.
(() => {
  const { el, panel, note } = AMT;

  AMT.symbolRows = (run, byShape) => {
    const { cube } = run;
    if (byShape) return shapeRows(run);
    const rows = AMT.groupCube((i) => cube.symbol[i]).map((group) => ({ ...group, name: run.symbols.names[cube.symbol[group.row]], symbol: cube.symbol[group.row], ranks: new Map() }));
    const at = new Map(rows.map((row) => [row.symbol, row]));
    const keep = AMT.filter(cube);
    for (let i = 0; i < cube.rows; i++) if (keep(i)) { const own = at.get(cube.symbol[i]).ranks; own.set(cube.rank[i], (own.get(cube.rank[i]) || 0) + cube.calls[i]); }
    return rows;
  };

  // The same name at another launch shape is another row (kept for real requests; layers are not told apart).
  function shapeRows(run) {
    const { shapes } = run, keep = AMT.filter(shapes), found = new Map();
    for (let i = 0; i < shapes.rows; i++) {
      if (!keep(i)) continue;
      const shape = AMT.shapeText(shapes, i), id = `${shapes.symbol[i]}|${shape}`;
      let row = found.get(id);
      if (!row) found.set(id, (row = { name: run.symbols.names[shapes.symbol[i]], shape, calls: 0, timed: 0, sum: 0, hist: null, ranks: new Map() }));
      row.calls += shapes.calls[i]; row.timed += shapes.timed[i]; row.sum += shapes.sum_ns[i];
      row.ranks.set(shapes.rank[i], (row.ranks.get(shapes.rank[i]) || 0) + shapes.calls[i]);
    }
    return [...found.values()];
  }

  const perRank = (row) => {
    const byCalls = new Map();
    for (const [rank, calls] of row.ranks) { if (!byCalls.has(calls)) byCalls.set(calls, []); byCalls.get(calls).push(rank); }
    return [...byCalls].sort((a, b) => b[0] - a[0]).map(([calls, ranks]) => `${AMT.count(calls)} on ${AMT.fold(ranks)}`).join("; ");
  };

  AMT.views.symbols = {
    title: "Symbols",
    render(main) {
      const run = AMT.run(), byShape = AMT.state.shapes === "1", all = AMT.symbolRows(run, byShape);
      const total = all.reduce((sum, row) => sum + row.sum, 0);
      const search = el("input", { type: "search", id: "search", placeholder: "Search class, base or full name", value: AMT.state.q, "aria-label": "Search symbols" });
      const place = el("div"), told = note();
      const quantile = (q) => (row) => (row.hist && row.timed ? row.hist.quantile(q) : NaN);
      const time = (title, value, hint) => ({ title, value, show: (row) => AMT.time(value(row)), num: true, hint });
      const columns = [
        { title: "class", value: (row) => row.name.kind }, { title: "base", value: (row) => row.name.base, show: (row) => AMT.short(row.name.base, 32), cls: "tight" },
        { title: byShape ? "full name and launch shape" : "full name", value: (row) => row.name.full, show: (row) => el("div", { class: "named" }, AMT.nameCell(row.name.full), AMT.copyButton(row.name.full), row.shape ? el("div", { class: "note" }, row.shape) : null), cls: "name" },
        { title: "calls", value: (row) => row.calls, show: (row) => AMT.count(row.calls), num: true }, time("total", (row) => row.sum), time("mean", (row) => (row.timed ? row.sum / row.timed : NaN)),
        ...(byShape ? [] : [time("p50", quantile(0.5), "within 1 %"), time("p99", quantile(0.99), "within 1 %")]),
        { title: "share", value: (row) => (total ? row.sum / total : NaN), show: (row) => AMT.percent(total ? row.sum / total : NaN), num: true, hint: "of the kernel time that the filters leave, summed over ranks" },
        { title: "calls by rank", value: (row) => row.ranks.size, show: perRank },
      ];
      const fill = () => {
        const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
        const rows = all.filter((row) => words.every((word) => `${row.name.kind} ${row.name.full} ${row.name.base}`.toLowerCase().includes(word)));
        told.textContent = `${AMT.count(rows.length)} of ${AMT.count(all.length)} ${byShape ? "names and shapes" : "symbols"}, ${AMT.count(rows.reduce((sum, row) => sum + row.calls, 0))} calls, ${AMT.time(rows.reduce((sum, row) => sum + row.sum, 0))} of kernel time. A row opens its M buckets.`;
        place.replaceChildren(AMT.table(columns, rows, { sort: 4, limit: 100, id: "symbol-table", pick: (row) => AMT.set({ view: "buckets", subject: `full:${row.name.full}` }) }));
      };
      search.addEventListener("input", () => { AMT.state.q = search.value; AMT.quietly(); fill(); });
      const shapes = el("label", {}, el("input", { type: "checkbox", id: "by-shape", checked: byShape, onchange: (event) => AMT.set({ shapes: event.target.checked ? "1" : "" }) }), " by launch shape");
      const left = run.facts.ranks.reduce((sum, rank) => sum + rank.shapes_left_out, 0);
      main.append(el("div", { class: "tools" }, search, shapes, told), panel("", run.facts.shared_gpu ? AMT.timed("Symbols") : null, place), byShape && left ? note(`${AMT.count(left)} rarer launch shapes were left out of this page.`) : "", ...AMT.missing("buckets"));
      fill();
    },
  };
})();
