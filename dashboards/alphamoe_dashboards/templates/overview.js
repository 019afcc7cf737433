"use strict";
// The first screen: verdicts, what was asked, and the M-bucket matrix.
(() => {
  const { el, badge, panel, note } = AMT;
  const MARKS = { equal: "=", fewer: "<", more: ">", none: "∅", unknown: "?" };
  const MEANS = {
    equal: "as many kernels as were submitted", fewer: "some kernels are missing", more: "more kernels than were submitted",
    none: "none ran: absence is proven", unknown: "not known: nothing proves what is missing, or no receipt says what should run",
  };

  function verdictRow(own) {
    const cells = own.cells.filter((cell) => cell.verdict !== "PASS" || own.kind === "gate");
    const details = [];
    if (own.cells.length) {
      const rows = cells.length ? cells : own.cells;
      details.push(el("details", {}, el("summary", {}, `${AMT.count(own.cells.length)} questions, ${AMT.count(own.cells.filter((cell) => cell.verdict === "PASS").length)} PASS`),
        AMT.table([
          { title: "verdict", value: (row) => row.verdict, show: (row) => badge(row.verdict) },
          { title: "rank", value: (row) => row.rank, num: true },
          { title: "execution", value: (row) => row.execution },
          { title: "question", value: (row) => row.what },
          { title: "reason", value: (row) => row.reason, cls: "name" },
        ], rows, { limit: 50 })));
    }
    return el("div", { class: "verdict" }, badge(own.verdict), el("b", {}, own.name), el("div", { class: "reason" }, own.reason, own.file ? el("span", { class: "note" }, `  (${own.file})`) : null, details));
  }

  // One row an (execution, M, symbol), its layers summed by rank: equal only where every layer is equal.
  function matrix(run) {
    const cells = run.cells, keep = AMT.filter(cells), rows = new Map(), others = new Map();
    for (let i = 0; i < cells.rows; i++) {
      if (!keep(i)) continue;
      const id = `${cells.execution[i]}|${cells.M[i]}|${cells.symbol[i]}`, place = `${cells.execution[i]}|${cells.M[i]}|${cells.rank[i]}`;
      if (!rows.has(id)) rows.set(id, { execution: AMT.text(cells.execution[i]), code: cells.execution[i], M: cells.M[i], symbol: AMT.text(cells.symbol[i]), ranks: new Map() });
      others.set(place, (others.get(place) ?? true) && !!cells.proven[i]);
      const ranks = rows.get(id).ranks;
      if (!ranks.has(cells.rank[i])) ranks.set(cells.rank[i], { receipts: -1, submissions: -1, witnesses: 0, bad: 0, equal: true, more: false, proven: true });
      const cell = ranks.get(cells.rank[i]);
      if (cells.submissions[i] >= 0) cell.submissions = Math.max(cell.submissions, 0) + cells.submissions[i];
      cell.receipts = Math.max(cell.receipts, cells.steps[i]);
      cell.witnesses += cells.witnesses[i];
      cell.bad += cells.shape_bad[i];
      cell.equal = cell.equal && cells.submissions[i] === cells.witnesses[i];
      cell.more = cell.more || (cells.submissions[i] >= 0 && cells.witnesses[i] > cells.submissions[i]);
      cell.proven = cell.proven && !!cells.proven[i];
    }
    const forbidden = new Set(AMT.witness().forbidden || []);
    for (const row of rows.values()) {
      row.forbidden = forbidden.has(row.symbol);
      for (const cell of row.ranks.values()) cell.state = stateOf(cell);
      // A rank that did this bucket with another kernel submitted none of this one.
      for (let rank = 0; rank < run.facts.world_size; rank++) {
        const proven = others.get(`${row.code}|${row.M}|${rank}`);
        if (!row.ranks.has(rank) && proven !== undefined) row.ranks.set(rank, { receipts: 0, submissions: 0, witnesses: 0, bad: 0, state: row.forbidden ? "absent" : proven ? "none" : "unknown", elsewhere: true });
      }
    }
    return [...rows.values()].sort((a, b) => AMT.place(a.execution) - AMT.place(b.execution) || a.M - b.M || (a.symbol < b.symbol ? -1 : 1)).sort((a, b) => a.forbidden - b.forbidden);
  }

  function stateOf(cell) {
    if (cell.submissions < 0) return "unknown";
    if (cell.more) return "more";
    if (cell.equal && cell.submissions) return "equal";
    if (cell.witnesses) return "fewer";
    return cell.proven && cell.submissions ? "none" : "unknown";
  }

  function matrixTable(run) {
    const rows = matrix(run);
    const ranks = AMT.state.ranks || Array.from({ length: run.facts.world_size }, (_, i) => i);
    if (!rows.length) return note("No M bucket: no receipt and no MoE kernel of a real request passes the filters.");
    const small = ranks.length > 16, several = new Set(rows.map((row) => row.symbol)).size > 1 || rows.some((row) => row.forbidden);
    const cellOf = (row, rank) => {
      const cell = row.ranks.get(rank) || { state: "unknown", witnesses: 0, submissions: -1, receipts: -1 };
      const submitted = cell.submissions < 0 ? "?" : AMT.count(cell.submissions);
      if (cell.state === "absent") return el("td", { class: "absent" }, "–");
      const wrong = row.forbidden && cell.witnesses ? "forbidden, and it ran" : cell.elsewhere ? "this rank ran another kernel in this bucket" : MEANS[cell.state];
      const text = small ? (row.forbidden && cell.witnesses ? "✗" : MARKS[cell.state]) : `${AMT.count(cell.witnesses)} ${MARKS[cell.state]} ${submitted}`;
      const told = `rank ${rank}, ${row.execution} M ${row.M}: ${AMT.count(cell.witnesses)} kernels witnessed, ${submitted} submitted in ${cell.receipts < 0 ? "?" : AMT.count(cell.receipts)} receipts: ${wrong}${cell.bad ? `; ${AMT.count(cell.bad)} with a launch shape that contradicts M` : ""}`;
      return el("td", { class: cell.bad || (row.forbidden && cell.witnesses) ? "none" : cell.state, "data-state": cell.state }, el("button", {
        type: "button", title: told, "aria-label": told,
        onclick: () => AMT.set({ view: "timeline", executions: [row.execution || "unknown"], ms: [row.M], step: null }),
      }, row.forbidden && cell.witnesses && !small ? "✗ " : "", text, cell.bad ? " ⚠" : ""));
    };
    const total = (row) => { let steps = 0; for (const cell of row.ranks.values()) steps = Math.max(steps, cell.receipts); return steps; };
    return el("div", { class: "scroll" }, el("table", { class: "matrix", id: "matrix" },
      el("thead", {}, el("tr", {}, el("th", {}, "execution"), el("th", { class: "num" }, "M"), several ? el("th", {}, "symbol") : null, el("th", { class: "num", title: "receipts of a rank: forwards of real requests" }, "steps"), ranks.map((rank) => el("th", { scope: "col" }, small ? `${rank}` : `rank ${rank}`)))),
      el("tbody", {}, rows.map((row) => el("tr", {}, el("th", { scope: "row" }, AMT.executionName(row.execution)), el("td", { class: "num", style: "padding:2px 9px" }, String(row.M)), several ? el("td", { class: "mono", style: "padding:2px 9px", title: row.symbol }, AMT.short(row.symbol, 30), row.forbidden ? el("span", { class: "badge FAIL" }, "forbidden") : null) : null, el("td", { class: "num", style: "padding:2px 9px" }, total(row) < 0 ? "?" : AMT.count(total(row))), ranks.map((rank) => cellOf(row, rank)))))));
  }

  // What was asked for and has no row: an empty place must not look like a question that nobody asked.
  function unseen(run) {
    if (run.facts.kind === "imported" || !run.cells.rows) return null;
    const there = new Set([...run.cells.execution].map((code) => AMT.text(code)));
    const gone = run.facts.executions.filter((name) => !there.has(name));
    return gone.length ? el("p", { class: "warn", id: "unseen" }, `asked for, but no receipt and no MoE kernel of it: ${gone.join(", ")}`) : null;
  }

  function numbers(run) {
    const { facts } = run, sum = (name) => facts.ranks.reduce((total, rank) => total + (rank[name] || 0), 0);
    const kernels = sum("kernels"), attributed = sum("attributed");
    const apart = facts.ranks.reduce((total, rank) => total + ["before window", "after window", "sentinel"].reduce((own, reason) => own + (rank.reasons[reason] || 0), 0), 0);
    const silent = facts.ranks.filter((rank) => !rank.kernels).length;
    const one = (value, text) => el("div", {}, el("b", {}, value), el("span", {}, text));
    return el("div", { class: "numbers" },
      one(`${facts.world_size - silent} of ${facts.world_size}`, "ranks with kernels"),
      one(AMT.count(kernels), "kernels recorded, all ranks"),
      one(kernels > apart ? AMT.percent(attributed / (kernels - apart)) : "–", "of the kernels in the window attributed to a step"),
      one(AMT.count(sum("receipts")), "receipts, all ranks"),
      one(AMT.count(run.symbols.rows), "symbols"),
      one(AMT.count(facts.sample.kernels), facts.sample.everything ? "kernels held one by one (all)" : `kernels held one by one: ${facts.sample.steps} sampled steps; all others as counts and histograms`));
  }

  function ranksTable(run) {
    const reasons = (rank) => Object.entries(rank.reasons).map(([reason, count]) => `${AMT.count(count)} ${reason}`).join(", ") || "–";
    return AMT.table([
      { title: "rank", value: (row) => row.rank, num: true },
      { title: "ended", value: (row) => row.ended },
      { title: "kernels", value: (row) => row.kernels, show: (row) => AMT.count(row.kernels), num: true },
      { title: "receipts", value: (row) => row.receipts, show: (row) => AMT.count(row.receipts), num: true },
      { title: "dropped", value: (row) => row.dropped, show: (row) => (row.dropped === null ? "not known" : AMT.count(row.dropped)), num: true },
      { title: "untimed", value: (row) => row.untimed, show: (row) => AMT.count(row.untimed), num: true, hint: "they ran, and stay out of every time" },
      { title: "end before start", value: (row) => row.invalid, show: (row) => AMT.count(row.invalid), num: true },
      { title: "window", value: (row) => row.window.join("; "), show: (row) => (row.window.length ? `not proven: ${row.window.join("; ")}` : "proven complete"), cls: "name" },
      { title: "not attributed, or outside", value: reasons, show: reasons, cls: "name" },
      { title: "GPU", value: (row) => row.gpu_name, show: (row) => (row.gpu_name || "not known") + (row.shared_gpu ? " (shared)" : "") },
    ], run.facts.ranks, { limit: 64, id: "ranks-table" });
  }

  AMT.views.overview = {
    title: "Overview",
    render(main) {
      const run = AMT.run(), { facts } = run;
      const verdicts = panel("c12", null, facts.verdicts.map(verdictRow), AMT.missing("verdicts"));
      verdicts.id = "verdicts";
      const rows = matrix(run), broad = new Set(rows.map((row) => row.symbol)).size > 1 || facts.world_size > 5;
      const asked = panel(broad ? "c12" : "c5", "What was asked", el("dl", { class: "facts", id: "asked" }, facts.asked.map(([name, value]) => [el("dt", {}, name), el("dd", { class: name === "Command" ? "mono" : null }, value)])));
      const keys = AMT.states.map((state) => el("span", { class: "key", style: `background:var(--${state})`, title: MEANS[state] }, `${MARKS[state]} ${state}`));
      const cells = panel(broad ? "c12" : "c7", `M buckets: witnesses ${MARKS.equal} receipts' submissions, by rank`, matrixTable(run), unseen(run),
        el("p", { class: "note" }, "GPU records (left) against what the receipts submitted (right), real requests only. ", keys, el("span", { class: "key" }, "⚠ launch shape contradicts M, ✗ forbidden and ran")), note(`M: ${facts.m_from}. A cell opens the steps of its bucket.`), AMT.missing("matrix"));
      main.append(el("div", { class: "grid" }, verdicts, cells, asked, panel("c12", null, numbers(run)), panel("c12", "Ranks", ranksTable(run), AMT.missing("ranks"))));
      const witness = AMT.witness();
      const list = (title, items) => items.length && panel("c12", title, el("ul", {}, items.slice(0, 60).map((text) => el("li", {}, text)), items.length > 60 ? el("li", {}, `and ${items.length - 60} more`) : null));
      main.append(el("div", { class: "grid" }, ...[
        list("Problems of the bundle", facts.problems), list("Code behind the symbols", witness.identities || []), list("Notes", witness.notes || []),
        witness.checks.length && panel("c12", "Integrity checks", AMT.table([
          { title: "verdict", value: (row) => row.verdict, show: (row) => badge(row.verdict) }, { title: "check", value: (row) => row.name },
          { title: "compared", value: (row) => row.compared, show: (row) => AMT.count(row.compared), num: true }, { title: "reason", value: (row) => row.reason, cls: "name" },
        ], witness.checks)),
      ].filter(Boolean)));
    },
  };
  AMT.witness = () => AMT.run().facts.verdicts.find((own) => own.kind === "witness");
  Object.assign(AMT, { matrix, MARKS });
})();
