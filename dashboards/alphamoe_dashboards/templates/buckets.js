"use strict";
// M buckets of one subject (a symbol, a class, everything): the table behind the charts.
(() => {
  const { el, panel, note } = AMT;

  function subjects(run) {
    const bases = new Map(), kinds = new Map();
    for (let i = 0; i < run.cube.rows; i++) {
      const own = run.symbols.names[run.cube.symbol[i]];
      bases.set(own.base, (bases.get(own.base) || 0) + run.cube.sum_ns[i]);
      kinds.set(own.kind, (kinds.get(own.kind) || 0) + run.cube.sum_ns[i]);
    }
    const sorted = (map) => [...map].sort((a, b) => b[1] - a[1]).map(([name]) => name);
    return { bases: sorted(bases), kinds: sorted(kinds).sort() };
  }

  AMT.subjectPicker = (run) => {
    const { bases, kinds } = subjects(run), now = AMT.subject();
    const option = (value, text) => el("option", { value, selected: value === now }, text);
    const known = new Set([...kinds.map((kind) => `class:${kind}`), ...bases.map((base) => `base:${base}`), "all"]);
    return el("label", {}, "Kernels ", el("select", { id: "subject", onchange: (event) => AMT.set({ subject: event.target.value }) },
      known.has(now) ? null : option(now, AMT.short(now.slice(now.indexOf(":") + 1), 80)), option("all", "all kernels"),
      el("optgroup", { label: "Classes" }, kinds.map((kind) => option(`class:${kind}`, kind))),
      el("optgroup", { label: "Symbols by GPU time" }, bases.slice(0, 400).map((base) => option(`base:${base}`, AMT.short(base, 80))))));
  };

  // Operations and least bytes of one launch, by base name and M.
  function workOf(run) {
    const known = new Map();
    for (let i = 0; i < run.work.rows; i++) known.set(`${AMT.text(run.work.base[i])}|${run.work.M[i]}`, { flop: run.work.flop[i], bytes: run.work.bytes[i], experts: run.work.experts[i] });
    return known;
  }

  // Buckets with steps, rates and waste. Rates need timed kernels of a symbol whose geometry a receipt gives.
  AMT.bucketRows = (run) => {
    const subject = AMT.subject(), base = subject.startsWith("base:") ? subject.slice(5) : null, work = workOf(run);
    const rows = AMT.buckets(AMT.subjectSymbols(subject));
    const forwards = AMT.forwards(run);
    for (const row of rows) {
      const own = base === null ? null : work.get(`${base}|${row.M}`);
      row.mean = row.timed ? row.sum / row.timed : NaN;
      row.flops = own && row.sum ? (own.flop * row.timed) / (row.sum / 1e9) : NaN;
      row.rate = own && row.sum ? (own.bytes * row.timed) / (row.sum / 1e9) : NaN;
      row.intensity = own ? own.flop / own.bytes : NaN;
      row.experts = own ? own.experts : NaN;
      row.forward = forwards.get(`${row.execution}|${row.M}`) || null;
    }
    return rows;
  };

  // Steps of each bucket with the sums of what was real, dispatched and launched. Ranks do the same steps: they are told
  // by the first rank that the filters leave, never added up.
  AMT.forwards = (run) => {
    const table = run.forwards, keep = AMT.filter(table), found = new Map();
    const first = new Map();
    for (let i = 0; i < table.rows; i++) {
      if (!keep(i)) continue;
      const id = `${AMT.text(table.execution[i])}|${table.M[i]}`;
      if (!first.has(id)) first.set(id, table.rank[i]);
      if (first.get(id) !== table.rank[i]) continue;
      const own = found.get(id) || { execution: AMT.text(table.execution[i]), M: table.M[i], steps: 0, real: 0, dispatch: 0, kernel: 0, realKnown: true, dispatchKnown: true, reals: new Set(), dispatches: new Set() };
      found.set(id, own);
      const steps = table.steps[i];
      own.steps += steps;
      own.kernel += Math.max(table.M[i], 0) * steps;
      if (table.real_tokens[i] < 0) own.realKnown = false; else { own.real += table.real_tokens[i] * steps; own.reals.add(table.real_tokens[i]); }
      if (table.dispatch_M[i] < 0) own.dispatchKnown = false; else { own.dispatch += table.dispatch_M[i] * steps; own.dispatches.add(table.dispatch_M[i]); }
    }
    return found;
  };

  function bucketTable(run, rows) {
    const card = run.facts.card, peak = card && (card.fp8_flop_per_s || card.bf16_flop_per_s);
    const roof = (row) => (card && Number.isFinite(row.flops) ? row.flops / Math.min(peak, row.intensity * card.bytes_per_s) : NaN);
    const time = (title, value, hint) => ({ title, value, show: (row) => AMT.time(value(row)), num: true, hint });
    const columns = [
      { title: "execution", value: (row) => AMT.place(row.execution), show: (row) => AMT.executionName(row.execution) },
      { title: "M", value: (row) => row.M, num: true },
      { title: "steps", value: (row) => row.forward?.steps ?? null, show: (row) => (row.forward ? AMT.count(row.forward.steps) : "–"), num: true, hint: "of one rank" },
      { title: "launches", value: (row) => row.calls, show: (row) => AMT.count(row.calls), num: true, hint: "kernels that ran, all ranks that the filters leave" },
      time("GPU time", (row) => row.sum, "summed over the ranks that the filters leave"),
      time("mean", (row) => row.mean), time("min", (row) => (row.timed ? row.min : NaN)), time("p50", (row) => row.hist.quantile(0.5), "within 1 %"),
      time("p90", (row) => row.hist.quantile(0.9), "within 1 %"), time("p99", (row) => row.hist.quantile(0.99), "within 1 %"), time("max", (row) => (row.timed ? row.max : NaN)),
    ];
    if (rows.some((row) => Number.isFinite(row.flops))) {
      columns.push(
        { title: "TB/s", value: (row) => row.rate, show: (row) => AMT.fixed(row.rate / 1e12, 3), num: true, hint: "least bytes by geometry and uniform routing, over the kernels' time" },
        { title: "TFLOP/s", value: (row) => row.flops, show: (row) => AMT.fixed(row.flops / 1e12, 2), num: true },
        { title: "of roof", value: roof, show: (row) => AMT.percent(roof(row)), num: true, hint: card ? `${card.name}: the lower of bandwidth x intensity and peak FLOP/s` : "the card's peaks are not known here" });
    }
    return AMT.table(columns, rows, { limit: 100, tall: true, id: "bucket-table", pick: (row) => AMT.set({ view: "timeline", executions: [row.execution || "unknown"], ms: [row.M], step: null }) });
  }

  function tokensTable(run) {
    const rows = [...AMT.forwards(run).values()].filter((row) => row.M >= 0).sort((a, b) => AMT.place(a.execution) - AMT.place(b.execution) || a.M - b.M);
    const waste = (row) => (row.realKnown && row.kernel ? 1 - row.real / row.kernel : NaN);
    return [rows, AMT.table([
      { title: "execution", value: (row) => AMT.place(row.execution), show: (row) => AMT.executionName(row.execution) },
      { title: "kernel M", value: (row) => row.M, num: true },
      { title: "dispatch M", value: (row) => Math.max(...row.dispatches), show: (row) => AMT.fold(row.dispatches) || "not known" },
      { title: "real tokens", value: (row) => Math.max(...row.reals), show: (row) => AMT.fold(row.reals) || "not known" },
      { title: "steps", value: (row) => row.steps, show: (row) => AMT.count(row.steps), num: true },
      { title: "waste", value: waste, show: (row) => AMT.percent(waste(row)), num: true, hint: "rows of the kernel that hold no real token" },
    ], rows, { limit: 60, tall: true, id: "tokens-table" })];
  }

  AMT.views.buckets = {
    title: "M buckets",
    render(main) {
      const run = AMT.run(), rows = AMT.bucketRows(run);
      const axis = el("label", {}, "M axis ", el("select", { id: "axis", onchange: (event) => AMT.set({ axis: event.target.value }) },
        el("option", { value: "cat", selected: AMT.state.axis === "cat" }, "one place a value"), el("option", { value: "log", selected: AMT.state.axis === "log" }, "logarithmic")));
      main.append(el("div", { class: "tools" }, AMT.subjectPicker(run), axis, el("span", { class: "note" }, `M: ${run.facts.m_from}; ranks: ${AMT.state.ranks ? AMT.fold(AMT.state.ranks) : "all"}`)));
      const noM = AMT.groupCube(() => "x", { symbols: AMT.subjectSymbols(AMT.subject()), noHistogram: true })[0];
      const inBuckets = rows.reduce((total, row) => total + row.calls, 0);
      if (!rows.length) main.append(panel("", null, note(noM ? `${AMT.count(noM.calls)} launches pass the filters, none with a known M.` : "No kernel passes the filters."), AMT.missing("buckets"), AMT.missing("matrix")));
      else if (noM && noM.calls > inBuckets) main.append(note(`${AMT.count(noM.calls - inBuckets)} more launches have no known M and are in no bucket.`));
      if (AMT.state.axis === "log") {
        const zeros = rows.filter((row) => row.M === 0);
        if (zeros.length) main.append(el("p", { class: "warn", id: "zeros" }, `M = 0 has no place on a logarithmic axis: ${zeros.map((row) => `${AMT.executionName(row.execution)} ${AMT.count(row.calls)} launches, ${AMT.time(row.sum)}`).join("; ")}`));
      }
      const [tokens, tokenTable] = tokensTable(run);
      const grid = el("div", { class: "grid" });
      main.append(grid);
      grid.append(panel("c12", AMT.timed("Buckets: a row opens its steps"), bucketTable(run, rows)));
      AMT.bucketCharts(grid, run, rows, tokens);
      grid.append(panel("c6", "Real tokens, dispatch M and kernel M", tokens.length ? tokenTable : note("No step with a known M passes the filters, so nothing says how many real tokens a bucket held."), tokens.length ? null : AMT.missing("matrix")));
    },
  };
})();
