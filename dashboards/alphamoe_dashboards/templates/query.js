"use strict";
// Cross-filtering: which rows of a table the filters leave, and sums over them.
(() => {
  const lookup = (size, chosen) => {
    const ok = new Uint8Array(size);
    if (chosen === null) ok.fill(1); else for (const at of chosen) if (at >= 0 && at < size) ok[at] = 1;
    return ok;
  };

  // Returns a test row => bool over a table that has some of: rank, execution, layer, M, traffic, symbol.
  function filter(table, options = {}) {
    const state = AMT.state, tests = [];
    const codes = (texts) => texts === null ? null : new Set(texts.map((text) => (text === "" || text === "unknown" ? -1 : AMT.strings.indexOf(text))));
    if (table.rank && state.ranks && !options.anyRank) { const ok = lookup(AMT.run().facts.world_size, state.ranks); tests.push((i) => ok[table.rank[i]]); }
    if (table.execution && state.executions && !options.anyExecution) { const ok = codes(state.executions); tests.push((i) => ok.has(table.execution[i])); }
    if (table.traffic && state.traffic && !options.anyTraffic) { const ok = codes(state.traffic); tests.push((i) => ok.has(table.traffic[i])); }
    if (table.layer && state.layers && !options.anyLayer) { const ok = new Set(state.layers); tests.push((i) => ok.has(table.layer[i])); }
    if (table.M && state.ms && !options.anyM) { const ok = new Set(state.ms); tests.push((i) => ok.has(table.M[i])); }
    if (options.symbols) tests.push((i) => options.symbols[table.symbol[i]]);
    return (i) => { for (const test of tests) if (!test(i)) return false; return true; };
  }

  // A subject is "base:NAME", "full:NAME", "class:NAME" or "all"; returns a lookup by symbol.
  function subjectSymbols(subject) {
    const names = AMT.run().symbols.names;
    const at = subject.indexOf(":");
    const form = at < 0 ? subject : subject.slice(0, at), wanted = subject.slice(at + 1);
    const ok = new Uint8Array(names.length);
    names.forEach((own, i) => { ok[i] = form === "all" || (form === "base" && own.base === wanted) || (form === "full" && own.full === wanted) || (form === "class" && own.kind === wanted); });
    return ok;
  }

  function defaultSubject() {
    const run = AMT.run(), times = new Map();
    for (let i = 0; i < run.cells.rows; i++) {
      const base = AMT.text(run.cells.symbol[i]);
      times.set(base, (times.get(base) || 0) + Math.max(run.cells.witnesses[i], 0) + 1);
    }
    const best = [...times].sort((a, b) => b[1] - a[1])[0];
    if (best) return `base:${best[0]}`;
    const kinds = new Map();
    for (let i = 0; i < run.cube.rows; i++) {
      const kind = run.symbols.names[run.cube.symbol[i]].kind;
      kinds.set(kind, (kinds.get(kind) || 0) + run.cube.sum_ns[i]);
    }
    const top = [...kinds].sort((a, b) => b[1] - a[1])[0];
    return top ? `class:${top[0]}` : "all";
  }
  const subject = () => AMT.state.subject || defaultSubject();

  // Groups rows of the cube by key(row); each group has calls, timed, sum, min, max and a histogram.
  function groupCube(key, options = {}) {
    const run = AMT.run(), cube = run.cube, keep = filter(cube, options), groups = new Map();
    for (let i = 0; i < cube.rows; i++) {
      if (!keep(i)) continue;
      const id = key(i);
      if (id === null) continue;
      let group = groups.get(id);
      if (!group) groups.set(id, (group = { id, row: i, calls: 0, timed: 0, sum: 0, min: Infinity, max: -1, hist: options.noHistogram ? null : new AMT.Histogram() }));
      group.calls += cube.calls[i]; group.timed += cube.timed[i]; group.sum += cube.sum_ns[i];
      if (cube.timed[i]) { group.min = Math.min(group.min, cube.min_ns[i]); group.max = Math.max(group.max, cube.max_ns[i]); }
      if (group.hist) group.hist.addRow(run, i);
    }
    for (const group of groups.values()) if (group.hist && group.timed) { group.hist.least = group.min; group.hist.greatest = group.max; }
    return [...groups.values()];
  }

  const ORDER = ["eager", "prefill_graph_replay", "decode_graph_replay"];
  const place = (execution) => { const at = ORDER.indexOf(execution); return at < 0 ? ORDER.length : at; };
  const executionName = (execution) => execution || "no execution known";

  function buckets(symbols) {
    const cube = AMT.run().cube;
    return groupCube((i) => (cube.M[i] < 0 ? null : `${cube.execution[i]}|${cube.M[i]}`), { symbols }).map((group) => ({
      ...group, execution: AMT.text(cube.execution[group.row]), M: cube.M[group.row],
    })).sort((a, b) => place(a.execution) - place(b.execution) || a.M - b.M);
  }

  function distinct(values) { return [...new Set(values)].filter((v) => v >= 0).sort((a, b) => a - b); }

  Object.assign(AMT, { filter, subject, subjectSymbols, groupCube, buckets, place, executionName, distinct, EXECUTIONS: ORDER });
})();
