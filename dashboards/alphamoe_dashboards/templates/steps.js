"use strict";
// The timeline view: the steps of the chosen buckets, and the kernels of one of them.
(() => {
  const { el, panel, note } = AMT;

  // One row a step over the ranks that the filters leave; receipts and witnesses are compared rank by rank.
  AMT.stepRows = (run) => {
    const { steps, slices } = run, keep = AMT.filter(steps), found = new Map(), sampled = new Set();
    for (let s = 0; s < slices.rows; s++) sampled.add(slices.step[s]);
    for (let i = 0; i < steps.rows; i++) {
      if (!keep(i)) continue;
      // Imported ranks number their steps each for itself: such steps are never joined.
      const step = steps.step[i], own = run.facts.kind === "imported" ? `${step}|${steps.rank[i]}` : step;
      let row = found.get(own);
      if (!row) found.set(own, (row = { step, rank: run.facts.kind === "imported" ? steps.rank[i] : null, execution: AMT.text(steps.execution[i]), mode: AMT.text(steps.forward_mode[i]), traffic: AMT.text(steps.traffic[i]), M: steps.M[i], dispatch: steps.dispatch_M[i], real: steps.real_tokens[i], requests: AMT.text(steps.requests[i]), ranks: 0, receipts: 0, submissions: 0, witnesses: 0, kernels: 0, busy: 0, span: 0, equal: true, sampled: sampled.has(step) }));
      row.ranks++; row.receipts += steps.receipts[i]; row.submissions += steps.submissions[i]; row.witnesses += steps.witnesses[i];
      row.kernels += steps.kernels[i]; row.busy = Math.max(row.busy, steps.busy_ns[i]);
      if (steps.start[i] >= 0) row.span = Math.max(row.span, steps.end[i] - steps.start[i]);
      row.equal = row.equal && steps.receipts[i] > 0 && steps.submissions[i] === steps.witnesses[i];
    }
    return [...found.values()].sort((a, b) => a.step - b.step);
  };

  const known = (value) => (value < 0 ? "–" : AMT.count(value));
  AMT.stepColumns = () => [
    { title: "step", value: (row) => row.step, num: true }, { title: "execution", value: (row) => row.execution, show: (row) => AMT.executionName(row.execution) }, { title: "mode", value: (row) => row.mode },
    { title: "M", value: (row) => row.M, show: (row) => known(row.M), num: true }, { title: "real tokens", value: (row) => row.real, show: (row) => known(row.real), num: true },
    { title: "ranks", value: (row) => row.ranks, show: (row) => (row.rank === null ? String(row.ranks) : `rank ${row.rank}`), num: true }, { title: "kernels", value: (row) => row.kernels, show: (row) => AMT.count(row.kernels), num: true, hint: "over the ranks that the filters leave" },
    { title: "seen / submitted", value: (row) => row.witnesses, show: (row) => (row.receipts ? `${AMT.count(row.witnesses)} ${row.equal ? "=" : "≠"} ${AMT.count(row.submissions)}` : "no receipt"), num: true },
    { title: "busy", value: (row) => row.busy, show: (row) => AMT.time(row.busy), num: true, hint: "summed kernel time of the slowest rank" }, { title: "span", value: (row) => row.span, show: (row) => AMT.time(row.span), num: true, hint: "first to last kernel of the slowest rank" },
    { title: "kernels here", value: (row) => row.sampled, show: (row) => (row.sampled ? "yes" : "sums only") }, { title: "request", value: (row) => row.requests, show: (row) => row.requests || "–", cls: "name" },
  ];

  function chooseStep(run, rows) {
    if (AMT.state.step !== null) return AMT.state.step;
    const sampled = rows.filter((row) => row.sampled && row.kernels);
    if (sampled.length) return sampled[Math.floor(sampled.length / 2)].step;
    return run.slices.rows ? run.slices.step[0] : null;
  }

  function kernelTable(run, lanes) {
    const { kernels } = run, rows = lanes.flatMap((lane) => lane.rows.map((i) => ({ rank: lane.rank, i })));
    const name = (row) => run.symbols.names[kernels.symbol[row.i]];
    return AMT.table([
      { title: "rank", value: (row) => row.rank, num: true }, { title: "start", value: (row) => kernels.start[row.i], show: (row) => AMT.time(kernels.start[row.i]), num: true, hint: "from the rank's first event of this step" },
      { title: "duration", value: (row) => kernels.duration[row.i], show: (row) => AMT.time(kernels.duration[row.i]), num: true }, { title: "layer", value: (row) => kernels.layer[row.i], show: (row) => known(kernels.layer[row.i]), num: true },
      { title: "kernel M", value: (row) => kernels.kernel_M[row.i], show: (row) => known(kernels.kernel_M[row.i]), num: true }, { title: "stream", value: (row) => kernels.stream[row.i], num: true },
      { title: "class", value: (row) => name(row).kind }, { title: "symbol", value: (row) => name(row).full, show: (row) => AMT.nameCell(name(row).full), cls: "name" },
    ], rows, { limit: 60, tall: true, id: "kernel-table" });
  }

  AMT.views.timeline = {
    title: "Timeline",
    render(main) {
      const run = AMT.run(), rows = AMT.stepRows(run), step = chooseStep(run, rows);
      AMT.state.step = step;
      const { sample } = run.facts;
      main.append(...AMT.missing("timeline"));
      if (!run.slices.rows) { main.append(panel("", null, note("No kernel was recorded."), AMT.missing("buckets"))); return; }
      const lanes = AMT.lanes(run, step), shown = lanes.reduce((total, lane) => total + lane.rows.length, 0), untimed = lanes.reduce((total, lane) => total + lane.untimed, 0);
      const own = rows.find((row) => row.step === step);
      const title = step < 0 ? "Kernels outside any step" : `Step ${step}${own ? `: ${AMT.executionName(own.execution)}, ${own.mode || "mode not known"}, M ${known(own.M)}` : ""}`;
      const node = el("div", { class: "chart", id: "chart-timeline", "data-height": Math.max(320, 150 + Math.min(lanes.length, 64) * (lanes.length > 16 ? 14 : 46)) }), told = note();
      const chosen = [...new Set(run.slices.step)].sort((a, b) => a - b), at = chosen.indexOf(step);
      const move = (text, to, label) => el("button", { type: "button", disabled: !(to in chosen), "aria-label": label, onclick: () => AMT.set({ step: chosen[to] }) }, text);
      main.append(panel("", title, el("div", { class: "tools" }, move("‹ step", at - 1, "Previous step"), move("step ›", at + 1, "Next step"),
        run.facts.kind === "imported" && run.facts.world_size > 1 && step >= 0 ? el("span", { class: "warn" }, "each rank of an import numbers its steps for itself") : null,
        note(sample.everything ? "Every kernel of the run is in this page." : `${AMT.count(sample.steps)} sampled steps are here kernel by kernel (${AMT.count(sample.kernels)} of ${AMT.count(sample.of)} kernels); other steps as sums.`)), shown ? node : null, told));
      if (shown) AMT.drawTimeline(node, run, lanes, told);
      else told.textContent = chosen.includes(step) ? (untimed ? `${AMT.count(untimed)} kernels ran here untimed: they have no place in time.` : "No kernel of this step passes the filters.") : "This step is not among the sampled ones: its sums are in the table below. Pick a step with “kernels here”.";
      if (shown && untimed) main.append(note(`${AMT.count(untimed)} more kernels ran untimed and are not drawn.`));
      main.append(panel("", AMT.timed(`Steps (${AMT.count(rows.length)})`), rows.length ? AMT.table(AMT.stepColumns(), rows, { limit: 100, tall: true, id: "step-table", pick: (row) => AMT.set(row.rank === null ? { step: row.step } : { step: row.step, ranks: [row.rank] }), chosen: (row) => row.step === step }) : note("No step passes the filters.")));
      if (shown) main.append(panel("", AMT.timed(`Kernels ${step < 0 ? "outside any step" : "of this step"} (${AMT.count(shown)})`), kernelTable(run, lanes)));
    },
  };
})();
