"use strict";
// Ranks against each other: skew by layer and step, symbols of some ranks only, launch shapes that differ at one M.
// The page's own numbers compare durations only. Starts were compared when the page was built (facts.rank_skew), where
// the ranks of one machine share the host's clock; its notes say where they do not.
(() => {
  const { el, panel, note } = AMT;

  function layers(run) {
    const { cube } = run;
    return AMT.groupCube((i) => (cube.layer[i] < 0 ? null : `${cube.rank[i]}|${cube.layer[i]}`), { symbols: AMT.subjectSymbols(AMT.subject()), noHistogram: true })
      .filter((group) => group.timed).map((group) => ({ rank: cube.rank[group.row], layer: cube.layer[group.row], mean: group.sum / group.timed, calls: group.calls }));
  }

  function drawLayers(node, rows) {
    const ranks = AMT.distinct(rows.map((row) => row.rank));
    AMT.draw(node, "skew", ranks.map((rank) => {
      const own = rows.filter((row) => row.rank === rank).sort((a, b) => a.layer - b.layer);
      return AMT.trace("skew", 0, { x: own.map((row) => row.layer), y: own.map((row) => row.mean / 1e3), name: `rank ${rank}`, showlegend: ranks.length <= 16, line: { color: AMT.colour(rank) }, marker: { color: AMT.colour(rank), symbol: AMT.symbolOf(rank) } });
    }), (layout) => { layout.yaxis.title.text = "mean duration (µs)"; if (new Set(rows.map((row) => row.layer)).size <= 12) layout.xaxis.dtick = 1; });
  }

  // Busy time of each step on each rank; needs steps with the same number on several ranks (receipts give them).
  AMT.stepSkew = (run) => {
    const { steps } = run, keep = AMT.filter(steps), found = new Map();
    for (let i = 0; i < steps.rows; i++) {
      // Imported ranks number their steps each for itself: receipts alone say that two ranks did the same step.
      if (!keep(i) || steps.kernels[i] <= 0 || steps.receipts[i] <= 0) continue;
      const own = found.get(steps.step[i]) || { step: steps.step[i], execution: AMT.text(steps.execution[i]), M: steps.M[i], ranks: new Map() };
      own.ranks.set(steps.rank[i], steps.busy_ns[i]);
      found.set(steps.step[i], own);
    }
    const rows = [];
    for (const row of found.values()) {
      if (row.ranks.size < 2) continue;
      const values = [...row.ranks.values()], mean = values.reduce((a, b) => a + b, 0) / values.length;
      const slowest = Math.max(...values);
      rows.push({ ...row, mean, slowest, fastest: Math.min(...values), skew: mean ? slowest / mean - 1 : NaN, rank: [...row.ranks].find(([, ns]) => ns === slowest)[0] });
    }
    return rows.sort((a, b) => a.step - b.step);
  };

  function drawSteps(node, rows) {
    AMT.draw(node, "step_skew", AMT.byExecution(rows).map(([execution, own]) => AMT.trace("step_skew", 0, {
      x: own.map((row) => row.step), y: own.map((row) => row.skew * 100), name: AMT.label(AMT.executionName(execution)),
      text: own.map((row) => `step ${row.step}, M ${row.M}: slowest rank ${row.rank}, ${AMT.time(row.slowest)}; fastest ${AMT.time(row.fastest)}`),
      hovertemplate: "%{text}<br>%{y:.1f} % above the mean<extra></extra>", marker: { color: AMT.colour(AMT.place(execution)), symbol: AMT.symbolOf(AMT.place(execution)) },
    })));
    node.removeAllListeners?.("plotly_click");
    node.on("plotly_click", (event) => AMT.set({ view: "timeline", step: event.points[0].x }));
  }

  function uneven(run) {
    const { cube } = run;
    const groups = AMT.groupCube((i) => `${cube.symbol[i]}|${cube.rank[i]}`, { noHistogram: true, anyRank: true }), found = new Map();
    for (const group of groups) {
      const symbol = cube.symbol[group.row];
      if (!found.has(symbol)) found.set(symbol, new Map());
      found.get(symbol).set(cube.rank[group.row], group.calls);
    }
    const rows = [];
    for (const [symbol, ranks] of found) {
      const missing = seen(run).filter((rank) => !ranks.has(rank));
      const counts = [...ranks.values()];
      const different = Math.min(...counts) !== Math.max(...counts);
      if (missing.length || different) rows.push({ name: run.symbols.names[symbol], ranks: [...ranks.keys()], missing, low: Math.min(...counts), high: Math.max(...counts) });
    }
    return rows.sort((a, b) => b.missing.length - a.missing.length || b.high - a.high);
  }

  // Of a rank without any kernel nothing says what did not run there.
  const seen = (run) => run.facts.ranks.filter((rank) => rank.kernels).map((rank) => rank.rank);

  // Launch shapes of one symbol at one M that are not the same set on every rank that ran it.
  function divergence(run) {
    const { shapes } = run, keep = AMT.filter(shapes, { anyRank: true }), found = new Map();
    for (let i = 0; i < shapes.rows; i++) {
      if (!keep(i) || shapes.M[i] < 0) continue;
      const id = `${shapes.symbol[i]}|${shapes.execution[i]}|${shapes.M[i]}`;
      if (!found.has(id)) found.set(id, { row: i, ranks: new Map() });
      const ranks = found.get(id).ranks;
      if (!ranks.has(shapes.rank[i])) ranks.set(shapes.rank[i], []);
      ranks.get(shapes.rank[i]).push(AMT.shapeText(shapes, i));
    }
    const rows = [];
    for (const { row, ranks } of found.values()) {
      const sets = new Map();
      for (const [rank, own] of ranks) { const key = own.sort().join("; "); if (!sets.has(key)) sets.set(key, []); sets.get(key).push(rank); }
      if (sets.size > 1) rows.push({ name: run.symbols.names[shapes.symbol[row]], execution: AMT.text(shapes.execution[row]), M: shapes.M[row], sets: [...sets].map(([shape, on]) => `ranks ${AMT.fold(on)}: ${AMT.short(shape, 400)}`) });
    }
    return rows;
  }
  AMT.shapeText = (s, i) => `grid ${s.grid_x[i]}×${s.grid_y[i]}×${s.grid_z[i]}, block ${s.block_x[i]}×${s.block_y[i]}×${s.block_z[i]}, cluster ${s.cluster_x[i]}×${s.cluster_y[i]}×${s.cluster_z[i]}, ${AMT.count(s.dynamic_smem_bytes[i])} B dynamic shared memory`;

  // How far apart the ranks were at the same moment, and the all-reduce kernels: computed over all kernels of the run.
  function moments(run, grid) {
    const found = run.facts.rank_skew;
    if (!found) return;
    const most = (row) => Object.entries(row.last).reduce((a, b) => (b[1] > a[1] ? b : a)), notes = found.notes.map((text) => note(`${text[0].toUpperCase()}${text.slice(1)}.`));
    const clocks = found.clock_error_ns === null ? null : note(`An all-reduce ends on all ranks at about one moment. By that the clocks are off by ${found.clock_error_ns ? `${AMT.time(found.clock_error_ns)} at least` : "nothing that they show"}.`);
    grid.append(panel("c12", AMT.timed("Ranks at the same moment: from the first to the last"), found.spreads.length ? AMT.table([
      { title: "execution", value: (row) => row.execution }, { title: "moment", value: (row) => row.moment }, { title: "compared", value: (row) => row.compared, show: (row) => AMT.count(row.compared), num: true },
      { title: "median", value: (row) => row.median_ns, show: (row) => AMT.time(row.median_ns), num: true }, { title: "worst", value: (row) => row.worst_ns, show: (row) => AMT.time(row.worst_ns), num: true },
      { title: "in step", value: (row) => row.worst_step, num: true }, { title: "last then", value: (row) => row.worst_rank, num: true },
      { title: "most often last", value: (row) => Number(most(row)[0]), show: (row) => `${most(row)[0]} (${AMT.count(most(row)[1])} of ${AMT.count(row.compared)})`, num: true },
    ], found.spreads, { id: "moments-table", pick: (row) => AMT.set({ view: "timeline", step: row.worst_step }) }) : null, clocks, ...notes));
    if (!found.all_reduces.length) return;
    grid.append(panel("c12", AMT.timed("All-reduce kernels: their time holds the wait for the last rank"), AMT.table([
      { title: "rank", value: (row) => row.rank, num: true }, { title: "symbol", value: (row) => row.symbol, show: (row) => AMT.nameCell(row.symbol), cls: "name" }, { title: "kernels", value: (row) => row.kernels, show: (row) => AMT.count(row.kernels), num: true },
      { title: "total", value: (row) => row.total_ns, show: (row) => AMT.time(row.total_ns), num: true }, { title: "median", value: (row) => row.median_ns, show: (row) => AMT.time(row.median_ns), num: true },
    ], found.all_reduces, { limit: 64, tall: true, id: "all-reduce-table" })));
  }

  AMT.views.ranks = {
    title: "Ranks",
    render(main) {
      const run = AMT.run(), rows = layers(run), skew = AMT.stepSkew(run), few = uneven(run), shapes = divergence(run);
      main.append(el("div", { class: "tools" }, AMT.subjectPicker(run), note("The charts compare durations; starts are compared in the table of moments, of real requests whatever the filters.")));
      const grid = el("div", { class: "grid" }), known = seen(run), silent = run.facts.ranks.map((rank) => rank.rank).filter((rank) => !known.includes(rank));
      const nothing = "Fewer than two ranks have kernels: there is nothing to compare.", keep = AMT.filter(run.shapes, { anyRank: true });
      const shapesKnown = run.shapes.M.some((m, i) => m >= 0 && keep(i));
      main.append(grid);
      if (run.facts.world_size < 2) grid.append(panel("c12", null, note("One rank: there is no skew to show. More ranks: alphamoe-trace --ranks 4 --prompt gsm8k:17")));
      const chart = (name, draw, empty, ok) => { const node = el("div", { class: "chart", id: `chart-${name}` }); grid.append(el("section", { class: "panel c6" }, ok ? node : note(empty))); if (ok) draw(node); };
      chart("skew", (node) => drawLayers(node, rows), "No kernel of this choice is attributed to a layer.", rows.length);
      chart("step_skew", (node) => drawSteps(node, skew), "No step ran on several ranks under one number, so steps cannot be compared.", skew.length);
      grid.append(panel("c12", `Symbols that did not run equally often on every rank (${few.length})`, few.length ? AMT.table([
        { title: "class", value: (row) => row.name.kind }, { title: "symbol", value: (row) => row.name.full, show: (row) => AMT.nameCell(row.name.full), cls: "name" },
        { title: "not seen on ranks", value: (row) => row.missing.length, show: (row) => AMT.fold(row.missing) || "none" }, { title: "ran on ranks", value: (row) => row.ranks.length, show: (row) => AMT.fold(row.ranks) },
        { title: "fewest calls", value: (row) => row.low, show: (row) => AMT.count(row.low), num: true }, { title: "most calls", value: (row) => row.high, show: (row) => AMT.count(row.high), num: true },
      ], few, { limit: 40, tall: true, id: "uneven-table" }) : note(known.length < 2 ? nothing : `Every symbol that passes the filters ran equally often on ranks ${AMT.fold(known)}.`),
        silent.length ? note(`Rank ${AMT.fold(silent)}: no kernel was recorded, so nothing is known of it.`) : null));
      grid.append(panel("c12", `Launch shapes that differ between ranks at the same M (${shapes.length})`, shapes.length ? AMT.table([
        { title: "symbol", value: (row) => row.name.base, show: (row) => AMT.nameCell(row.name.full), cls: "name" }, { title: "execution", value: (row) => row.execution }, { title: "M", value: (row) => row.M, num: true },
        { title: "shapes", value: (row) => row.sets.length, show: (row) => el("ul", {}, row.sets.map((text) => el("li", {}, text))), cls: "name" },
      ], shapes, { limit: 40, tall: true, id: "shapes-table" }) : note(known.length < 2 ? nothing : shapesKnown ? `Same symbol, same M, same launch shape: on ranks ${AMT.fold(known)}.` : "No kernel that passes the filters has a known M, so no launch shape was compared.")));
      moments(run, grid);
      if (skew.length) {
        grid.append(panel("c12", AMT.timed("Steps by skew"), AMT.table([
          { title: "step", value: (row) => row.step, num: true }, { title: "execution", value: (row) => row.execution }, { title: "M", value: (row) => row.M, num: true },
          { title: "above mean", value: (row) => row.skew, show: (row) => AMT.percent(row.skew), num: true }, { title: "slowest rank", value: (row) => row.rank, num: true },
          { title: "slowest", value: (row) => row.slowest, show: (row) => AMT.time(row.slowest), num: true }, { title: "fastest", value: (row) => row.fastest, show: (row) => AMT.time(row.fastest), num: true },
        ], skew, { sort: 3, limit: 20, tall: true, pick: (row) => AMT.set({ view: "timeline", step: row.step }) })));
      }
    },
  };
})();
