"use strict";
// One step on all ranks: a lane a rank, lines by class. Zoomed out, each lane is cut into slots that show the class which
// was busiest there; zoomed in, every kernel is drawn. Never more than MAX_MARKS marks at once.
(() => {
  const { el } = AMT;
  AMT.MAX_MARKS = AMT.webgl ? 3000 : 1500;

  // Kernels of a step that the filters leave, a lane a rank: times in ns from the rank's first event of the step.
  AMT.lanes = (run, step) => {
    const { slices, kernels } = run, keep = AMT.filter(kernels), ranks = AMT.state.ranks && new Set(AMT.state.ranks), lanes = [];
    for (let s = 0; s < slices.rows; s++) {
      if (slices.step[s] !== step || (ranks && !ranks.has(slices.rank[s]))) continue;
      const rows = [];
      let untimed = 0;
      for (let i = slices.first[s], end = i + slices.count[s]; i < end; i++) {
        if (!keep(i)) continue;
        if (kernels.duration[i] < 0) untimed++; else rows.push(i);
      }
      rows.sort((a, b) => kernels.start[a] - kernels.start[b]);
      lanes.push({ rank: slices.rank[s], rows, untimed, slice: s });
    }
    return lanes;
  };

  const kindOf = (run, i) => run.symbols.names[run.kernels.symbol[i]].kind;

  // Marks of a window: [{rank, kind, start, end, rows}]; rows is 1 for an exact kernel.
  AMT.marks = (run, lanes, from, to) => {
    const { kernels } = run, inside = lanes.map((lane) => lane.rows.filter((i) => kernels.start[i] <= to && kernels.start[i] + kernels.duration[i] >= from));
    const total = inside.reduce((sum, rows) => sum + rows.length, 0), marks = [];
    if (total <= AMT.MAX_MARKS) {
      inside.forEach((rows, l) => rows.forEach((i) => marks.push({ rank: lanes[l].rank, kind: kindOf(run, i), start: kernels.start[i], end: kernels.start[i] + kernels.duration[i], rows: 1, i })));
      return { marks, exact: true, total };
    }
    const slots = Math.max(Math.floor(AMT.MAX_MARKS / lanes.length), 8), width = (to - from) / slots;
    inside.forEach((rows, l) => {
      const busy = Array.from({ length: slots }, () => new Map()), count = new Uint32Array(slots);
      for (const i of rows) {
        const begin = Math.max(kernels.start[i], from), end = Math.min(kernels.start[i] + kernels.duration[i], to);
        const first = Math.min(Math.floor((begin - from) / width), slots - 1), last = Math.min(Math.floor((end - from) / width), slots - 1);
        count[first]++;
        for (let slot = first; slot <= last; slot++) {
          const part = Math.min(end, from + (slot + 1) * width) - Math.max(begin, from + slot * width), kind = kindOf(run, i);
          busy[slot].set(kind, (busy[slot].get(kind) || 0) + Math.max(part, 1e-9));
        }
      }
      let open = null;
      for (let slot = 0; slot < slots; slot++) {
        const top = [...busy[slot]].sort((a, b) => b[1] - a[1])[0];
        if (open && (!top || top[0] !== open.kind)) open = null;
        if (!top) continue;
        if (open) { open.end = from + (slot + 1) * width; open.rows += count[slot]; } else { open = { rank: lanes[l].rank, kind: top[0], start: from + slot * width, end: from + (slot + 1) * width, rows: count[slot] }; marks.push(open); }
      }
    });
    return { marks, exact: false, total };
  };

  AMT.extent = (run, lanes) => {
    let end = 0;
    for (const lane of lanes) for (const i of lane.rows) end = Math.max(end, run.kernels.start[i] + run.kernels.duration[i]);
    for (const lane of lanes) {
      const first = run.slices.range_first[lane.slice], last = first + run.slices.range_count[lane.slice];
      for (let r = first; r < last && AMT.state.step >= 0; r++) end = Math.max(end, run.ranges.end[r]);
    }
    return Math.max(end, 1);
  };

  // Ranges of the host around the step: thin lines above each rank's lane, one row a depth.
  function rangeTrace(run, lanes, from, to, room) {
    const { ranges, slices } = run, found = [];
    for (const lane of lanes) {
      for (let r = slices.range_first[lane.slice], last = r + slices.range_count[lane.slice]; r < last; r++) {
        if (ranges.start[r] > to || ranges.end[r] < from) continue;
        found.push({ rank: lane.rank, r, length: ranges.end[r] - ranges.start[r] });
      }
    }
    const drawn = found.sort((a, b) => b.length - a.length).slice(0, room), x = [], y = [], text = [];
    for (const { rank, r } of drawn) {
      const name = AMT.text(ranges.name[r]), told = `${AMT.label(name)}${ranges.payload[r] < 0 ? "" : ` ${ranges.payload[r]}`}: ${AMT.time(ranges.end[r] - ranges.start[r])}`;
      const at = laneAt(lanes, rank) - 0.22 - 0.07 * Math.min(ranges.depth[r], 3);
      x.push(ranges.start[r] / 1e3, ranges.end[r] / 1e3, null); y.push(at, at, null); text.push(told, told, null);
    }
    return { x, y, text, mode: "lines", type: AMT.webgl ? "scattergl" : "scatter", name: "ranges (host)", line: { width: 2, color: AMT.colour(7) }, hovertemplate: "rank range %{text}<extra></extra>" };
  }
  const laneAt = (lanes, rank) => lanes.findIndex((lane) => lane.rank === rank);

  AMT.drawTimeline = (node, run, lanes, told) => {
    const whole = AMT.extent(run, lanes), pad = whole * 0.01;
    const kinds = [...new Set(run.symbols.names.map((own) => own.kind))].sort();
    let drawing = false;

    function show(from, to) {
      const { marks, exact, total } = AMT.marks(run, lanes, from, to), byKind = new Map();
      for (const mark of marks) { if (!byKind.has(mark.kind)) byKind.set(mark.kind, []); byKind.get(mark.kind).push(mark); }
      const thick = Math.max(4, Math.min(22, Math.floor((node.dataset.height - 90) / Math.max(lanes.length, 1) * 0.45)));
      const traces = [...byKind].sort(([a], [b]) => (a < b ? -1 : 1)).map(([kind, own]) => {
        const x = [], y = [], text = [];
        for (const mark of own) {
          const at = laneAt(lanes, mark.rank);
          const what = mark.rows === 1 && mark.i !== undefined ? `${AMT.label(run.symbols.names[run.kernels.symbol[mark.i]].full, 90)}<br>layer ${run.kernels.layer[mark.i] < 0 ? "–" : run.kernels.layer[mark.i]}, stream ${run.kernels.stream[mark.i]}, ${AMT.time(mark.end - mark.start)}` : `${AMT.count(mark.rows)} kernels begin here, most of the time ${AMT.label(kind)}`;
          x.push(mark.start / 1e3, mark.end / 1e3, null); y.push(at, at, null); text.push(what, what, null);
        }
        return AMT.trace("timeline", 0, { type: AMT.webgl ? "scattergl" : "scatter", x, y, text, name: AMT.label(kind), line: { color: AMT.colour(kinds.indexOf(kind)), width: thick }, hovertemplate: `%{text}<br>from %{x:.3f} µs<extra>${AMT.label(kind)}</extra>` });
      });
      if (AMT.state.step >= 0 && run.ranges.rows) traces.push(rangeTrace(run, lanes, from, to, Math.max(AMT.MAX_MARKS - marks.length, 200)));
      node.dataset.marks = marks.length;
      node.dataset.exact = exact;
      told.textContent = exact
        ? `${AMT.count(marks.length)} kernels in view, each drawn exactly.`
        : `${AMT.count(total)} kernels in view, drawn as ${AMT.count(marks.length)} slots by their busiest class; zoom in (drag) for every kernel.`;
      drawing = true;
      const done = AMT.draw(node, "timeline", traces, (layout) => {
        layout.height = Number(node.dataset.height);
        layout.xaxis.range = [from / 1e3, to / 1e3]; layout.xaxis.title.text = `time ${AMT.state.step < 0 ? "" : "in the step "}(µs), from each rank's own first event`;
        layout.yaxis = { ...layout.yaxis, type: "linear", tickvals: lanes.map((_, l) => l), ticktext: lanes.map((lane) => `rank ${lane.rank}`), range: [lanes.length - 0.4, -0.65], fixedrange: true, title: { text: "" } };
        delete layout.yaxis.autorange; delete layout.yaxis.categoryorder; delete layout.yaxis.rangemode;
        layout.legend = { ...layout.legend, y: -0.28, yanchor: "top", x: 0, xanchor: "left" }; layout.margin.b = 90; layout.dragmode = "zoom"; layout.uirevision = `${from}-${to}`;
      });
      Promise.resolve(done).finally(() => { drawing = false; });
    }

    show(-pad, whole + pad);
    node.removeAllListeners?.("plotly_relayout");
    node.on("plotly_relayout", (event) => {
      if (drawing) return;
      if (event["xaxis.autorange"]) show(-pad, whole + pad);
      else if (event["xaxis.range"]) show(event["xaxis.range"][0] * 1e3, event["xaxis.range"][1] * 1e3);
      else if ("xaxis.range[0]" in event) show(event["xaxis.range[0]"] * 1e3, event["xaxis.range[1]"] * 1e3);
    });
    AMT.zoomTimeline = (from, to) => show(from, to);
  };
})();
