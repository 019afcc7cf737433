"use strict";
// Charts of the M buckets.
(() => {
  const { el, note } = AMT;
  const MAX_POINTS = 6000;
  const LOG_TICKS = [-3, -2, -1, 0, 1, 2, 3, 4, 5, 6].flatMap((power) => [1, 2, 5].map((digit) => Number(`${digit}e${power}`)));
  // Executions meet at one M: their labels point away from each other.
  const PLACES = ["top left", "bottom right", "top right", "bottom left"];

  function bars(node, name, rows, value, digits) {
    const groups = byExecution(AMT.onM(rows));
    AMT.draw(node, name, groups.map(([execution, own]) => AMT.trace(name, 0, {
      x: own.map((row) => AMT.mValue(row.M)), y: own.map(value), name: AMT.label(AMT.executionName(execution)),
      hovertemplate: `M %{x}: %{y:,.${digits}f}<extra>${AMT.label(AMT.executionName(execution))}</extra>`,
      marker: { color: AMT.colour(AMT.place(execution)), pattern: AMT.pattern(AMT.place(execution)) },
    })), (layout) => AMT.mAxis(layout, rows.map((row) => row.M)));
    clicks(node, groups);
  }

  function byExecution(rows) {
    const groups = new Map();
    for (const row of rows) { if (!groups.has(row.execution)) groups.set(row.execution, []); groups.get(row.execution).push(row); }
    return [...groups];
  }

  // A click on a bucket shows the steps that fell into it.
  function clicks(node, groups) {
    node.removeAllListeners?.("plotly_click");
    node.on("plotly_click", (event) => {
      const point = event.points[0], execution = groups[point.curveNumber % groups.length]?.[0];
      const m = Number(point.x);
      if (Number.isFinite(m)) AMT.set({ view: "timeline", executions: [execution || "unknown"], ms: [m], step: null });
    });
  }

  // Exact durations of the sampled steps' kernels of the subject.
  function points(run, symbols) {
    const { kernels, slices } = run, keep = AMT.filter(kernels, { symbols }), found = [];
    const ranks = AMT.state.ranks && new Set(AMT.state.ranks);
    for (let s = 0; s < slices.rows; s++) {
      if (ranks && !ranks.has(slices.rank[s])) continue;
      for (let i = slices.first[s], end = i + slices.count[s]; i < end; i++) {
        if (kernels.duration[i] >= 0 && kernels.M[i] >= 0 && keep(i)) found.push({ execution: AMT.text(kernels.execution[i]), M: kernels.M[i], ns: kernels.duration[i] });
      }
    }
    return found;
  }

  function duration(node, run, rows) {
    const all = AMT.onM(points(run, AMT.subjectSymbols(AMT.subject())));
    const every = Math.max(Math.ceil(all.length / MAX_POINTS), 1), drawn = all.filter((_, i) => i % every === 0);
    const boxes = byExecution(AMT.onM(rows.filter((row) => row.timed)));
    const us = (ns) => ns / 1e3;
    const traces = boxes.map(([execution, own]) => AMT.trace("duration", 0, {
      x: own.map((row) => AMT.mValue(row.M)), name: AMT.label(AMT.executionName(execution)), offsetgroup: String(AMT.place(execution)),
      lowerfence: own.map((row) => us(row.hist.quantile(0.02))), q1: own.map((row) => us(row.hist.quantile(0.25))), median: own.map((row) => us(row.hist.quantile(0.5))),
      q3: own.map((row) => us(row.hist.quantile(0.75))), upperfence: own.map((row) => us(row.hist.quantile(0.98))), line: { color: AMT.colour(AMT.place(execution)) },
    }));
    for (const [execution, own] of byExecution(drawn)) {
      traces.push(AMT.trace("duration", 1, {
        x: own.map((row) => AMT.mValue(row.M)), y: own.map((row) => us(row.ns)), name: AMT.label(AMT.executionName(execution)), offsetgroup: String(AMT.place(execution)),
        hovertemplate: `M %{x}: %{y:.3f} µs<extra>${AMT.label(AMT.executionName(execution))}</extra>`,
        marker: { symbol: AMT.symbolOf(AMT.place(execution)), color: AMT.colour(AMT.place(execution)) },
      }));
    }
    // Buckets far apart need a log axis to be seen; a log axis has no place for 0, so then it stays linear.
    const least = Math.min(...rows.filter((row) => row.timed).map((row) => row.min)), most = Math.max(...rows.filter((row) => row.timed).map((row) => row.max));
    const log = least > 0 && most / least > 10;
    AMT.draw(node, "duration", traces, (layout) => {
      AMT.mAxis(layout, rows.map((row) => row.M));
      layout.yaxis.title.text = `duration (µs${log ? ", log" : ""})`;
      if (log) Object.assign(layout.yaxis, { type: "log", rangemode: "normal", dtick: 1 }, most / least > 200 ? {} : { tickmode: "array", tickvals: LOG_TICKS });
    });
    return [all.length, drawn.length];
  }

  function roofline(node, run, rows) {
    const { card } = run.facts, known = rows.filter((row) => Number.isFinite(row.flops));
    const traces = [];
    if (card) {
      const peak = card.fp8_flop_per_s || card.bf16_flop_per_s, ridge = peak / card.bytes_per_s;
      const low = Math.min(0.5, ...known.map((row) => row.intensity / 2));
      traces.push(AMT.trace("roofline", 0, { x: [low, ridge, ridge * 10], y: [(low * card.bytes_per_s) / 1e12, peak / 1e12, peak / 1e12], name: `${AMT.escape(card.name)}: ${AMT.fixed(card.bytes_per_s / 1e12)} TB/s, ${AMT.count(peak / 1e12)} TFLOP/s ${card.fp8_flop_per_s ? "FP8" : "BF16"}` }));
    }
    for (const [execution, own] of byExecution(known)) {
      traces.push(AMT.trace("roofline", 1, {
        x: own.map((row) => row.intensity), y: own.map((row) => row.flops / 1e12), text: own.map((row) => `M ${row.M}`), textposition: PLACES[AMT.place(execution) % 4], name: AMT.label(AMT.executionName(execution)),
        customdata: own.map((row) => [row.rate / 1e12, row.experts]), hovertemplate: "%{text}: %{y:.3f} TFLOP/s, %{customdata[0]:.3f} TB/s<br>%{customdata[1]:.1f} experts touched on average (uniform routing)<extra></extra>",
        marker: { symbol: AMT.symbolOf(AMT.place(execution)), color: AMT.colour(AMT.place(execution)) },
      }));
    }
    AMT.draw(node, "roofline", traces, (layout) => { layout.yaxis.rangemode = "normal"; });
  }

  AMT.bucketCharts = (grid, run, rows, tokens) => {
    const place = (name, cls, draw, ...below) => { const box = AMT.el("section", { class: `panel ${cls}` }), node = el("div", { class: "chart", id: `chart-${name}` }); box.append(node, ...below); grid.append(box); draw(node); return box; };
    place("launches", "c6", (node) => bars(node, "launches", rows, (row) => row.calls, 0));
    place("gpu_time", "c6", (node) => bars(node, "gpu_time", rows, (row) => row.sum / 1e6, 3));
    const told = note();
    place("duration", rows.some((row) => Number.isFinite(row.flops)) ? "c7" : "c12", (node) => {
      const [all, drawn] = duration(node, run, rows);
      told.textContent = `Boxes: 2, 25, 50, 75 and 98 % of every timed kernel. Points: exact durations${run.facts.sample.everything ? "" : " of the sampled steps"}${drawn < all ? `, every ${Math.round(all / drawn)}th of ${AMT.count(all)}` : ""}.`;
    }, told);
    if (rows.some((row) => Number.isFinite(row.flops))) {
      place("roofline", "c5", (node) => roofline(node, run, rows), note(`Operations and least bytes follow from the geometry in the receipts; touched experts from uniform routing (the routing plan is not recorded). ${run.facts.card ? "" : "The card's peaks are not known here."}`));
    }
    if (tokens.length) place("tokens", "c6", (node) => AMT.draw(node, "tokens", ["real", "dispatch", "kernel"].map((key, n) => AMT.trace("tokens", n, {
      x: tokens.map((row) => `${AMT.label(AMT.executionName(row.execution).replace("_graph_replay", ""))} ${row.M}`),
      y: tokens.map((row) => (key === "real" && !row.realKnown) || (key === "dispatch" && !row.dispatchKnown) ? null : row[key] / row.steps),
      name: ["real tokens", "dispatch M", "kernel M"][n], marker: { color: AMT.colour([2, 5, 0][n]) },
    })), (layout) => { layout.yaxis.title.text = "rows a step (mean)"; if (tokens.some((row) => row.M > 100)) { layout.yaxis.type = "log"; layout.yaxis.rangemode = "normal"; layout.yaxis.dtick = 1; layout.yaxis.title.text += ", log"; } }));
  };
  AMT.byExecution = byExecution;
})();
