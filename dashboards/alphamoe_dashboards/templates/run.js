"use strict";
// Requests, memory, wall time and sanitizer findings.
(() => {
  const { el, panel, note, badge } = AMT;
  // Wall time is told in the order in which a rank lives through it.
  const PHASES = ["start_up", "load", "warm_up", "capture", "prefill", "decode", "collection"];
  const phasePlace = (phase) => (PHASES.includes(phase) ? PHASES.indexOf(phase) : PHASES.length);

  function requests(run) {
    const list = run.facts.requests;
    if (!list.length) return note("No request is known.");
    return AMT.table([
      { title: "request", value: (row) => row.request_id }, { title: "purpose", value: (row) => row.purpose }, { title: "status", value: (row) => row.status, show: (row) => row.status + (row.error ? `: ${row.error}` : "") },
      { title: "executions", value: (row) => row.executions.join(", ") }, { title: "prompt tokens", value: (row) => row.prompt_tokens, show: (row) => AMT.count(row.prompt_tokens), num: true },
      { title: "new tokens", value: (row) => row.completion_tokens, show: (row) => (row.completion_tokens === null ? "–" : AMT.count(row.completion_tokens)), num: true }, { title: "ended by", value: (row) => row.finish_reason },
      { title: "timings", value: (row) => Object.keys(row.timings_s).length, show: (row) => Object.entries(row.timings_s).map(([name, value]) => `${name.replace(/_s$/, "").replaceAll("_", " ")} ${AMT.seconds(value)}`).join(", ") || "not recorded" },
      { title: "prompt", value: (row) => row.prompt_sha256, cls: "name", show: (row) => el("details", {}, el("summary", { class: "mono" }, `sha256 ${row.prompt_sha256.slice(0, 12)}, ${AMT.count(row.prompt_letters)} letters`), el("p", { class: "note" }, "The end of the prompt:"), el("pre", { class: "cmd" }, row.prompt), el("p", { class: "note" }, "The start of the response:"), el("pre", { class: "cmd" }, row.response || "–")) },
    ], list, { limit: 50, id: "request-table" });
  }

  AMT.views.requests = {
    title: "Requests",
    render(main) {
      const run = AMT.run(), rows = AMT.stepRows(run).filter((row) => row.receipts);
      const different = rows.filter((row) => !row.equal).length;
      main.append(panel("", AMT.timed("Requests"), requests(run), AMT.missing("requests")));
      main.append(panel("", AMT.timed("Receipts against witnesses, step by step"), rows.length
        ? [note(`${AMT.count(rows.length)} steps with receipts pass the filters; ${different ? `${AMT.count(different)} do not agree` : "all agree"}.`), AMT.table(AMT.stepColumns(), rows, { limit: 100, tall: true, id: "receipt-table", pick: (row) => AMT.set({ view: "timeline", step: row.step }) })]
        : note("No receipt passes the filters."), AMT.missing("matrix")));
    },
  };

  function memory(run) {
    const rows = [];
    for (const rank of run.facts.ranks) for (const item of rank.memory) {
      const bytes = item.process_bytes ?? item.torch_reserved_bytes ?? item.host_rss_bytes;
      rows.push({ rank: rank.rank, moment: item.label, gib: bytes === null || bytes === undefined ? null : bytes / 2 ** 30, what: item.process_bytes ?? null ? "process on the device" : item.torch_reserved_bytes ?? null ? "torch reserved" : "host", ...item });
    }
    return rows;
  }

  AMT.views.run = {
    title: "Memory and time",
    render(main) {
      const run = AMT.run(), chosen = AMT.state.ranks && new Set(AMT.state.ranks), rows = memory(run).filter((row) => !chosen || chosen.has(row.rank)), grid = el("div", { class: "grid" });
      const ranks = run.facts.ranks.filter((rank) => !chosen || chosen.has(rank.rank));
      main.append(grid);
      const moments = [...new Set(rows.map((row) => row.moment))], phases = [...new Set(ranks.flatMap((rank) => Object.keys(rank.wall_s)))].sort((a, b) => phasePlace(a) - phasePlace(b));
      const chart = (name, ok, draw, empty, ...below) => { const node = el("div", { class: "chart", id: `chart-${name}` }); grid.append(el("section", { class: "panel c6" }, ok ? node : note(empty), ...below)); if (ok) draw(node); };
      chart("memory", rows.length, (node) => AMT.draw(node, "memory", moments.map((moment, n) => { const own = rows.filter((row) => row.moment === moment); return AMT.trace("memory", 0, { x: own.map((row) => `${row.rank}`), y: own.map((row) => row.gib), name: AMT.label(moment.replaceAll("_", " ")), marker: { color: AMT.colour(n), pattern: AMT.pattern(n) } }); })), "No memory snapshot.", note(`Shown: ${[...new Set(rows.map((row) => row.what))].join(", ") || "nothing"}. Snapshots at one moment, not peaks.`), AMT.missing("memory"));
      chart("wall", phases.length, (node) => AMT.draw(node, "wall", phases.map((phase, n) => AMT.trace("wall", 0, { y: ranks.map((rank) => `${rank.rank}`), x: ranks.map((rank) => rank.wall_s[phase] ?? null), name: AMT.label(phase.replaceAll("_", " ")), marker: { color: AMT.colour(n), pattern: AMT.pattern(n) } })), (layout) => { layout.height = Math.max(330, 150 + ranks.length * 18); }), "No wall times were recorded.", run.facts.shared_gpu ? note("shared GPU: these times are inflated and comparable with nothing.") : null);
      const gib = (title, key) => ({ title, value: (row) => row[key], show: (row) => (row[key] === null || row[key] === undefined ? "–" : `${AMT.fixed(row[key] / 2 ** 30, 3)} GiB`), num: true });
      if (rows.length) grid.append(panel("c12", "Snapshots", AMT.table([{ title: "rank", value: (row) => row.rank, num: true }, { title: "moment", value: (row) => row.moment }, gib("process on device", "process_bytes"), gib("device used (all processes)", "device_used_bytes"), gib("torch allocated", "torch_allocated_bytes"), gib("torch reserved", "torch_reserved_bytes"), gib("host resident", "host_rss_bytes")], rows, { limit: 200, tall: true })));
      if (phases.length) grid.append(panel("c12", AMT.timed("Wall seconds by phase"), AMT.table([{ title: "rank", value: (row) => row.rank, num: true }, ...phases.map((phase) => ({ title: phase.replaceAll("_", " "), value: (row) => row.wall_s[phase], show: (row) => AMT.seconds(row.wall_s[phase]), num: true }))], ranks, { limit: 64 })));
    },
  };

  const many = (value) => (value === null || value === undefined ? "–" : AMT.count(value));

  // A report of alphamoe-trace sanitize: replays, what each control came to, and the scope that a result covers.
  function replays(own) {
    const text = (key, title = key) => ({ title, value: (row) => row[key], show: (row) => row[key] ?? "–" }), number = (key, title = key) => ({ title, value: (row) => row[key], show: (row) => many(row[key]), num: true });
    return [
      ...own.statement.filter((sentence) => sentence).map((sentence) => note(`To quote: ${sentence}`)),
      own.scopes.length ? el("details", {}, el("summary", {}, `Scope of each capture (${AMT.count(own.scopes.length)})`), el("ul", {}, own.scopes.map((sentence) => el("li", {}, sentence)))) : null,
      own.replays.length ? AMT.table([text("capture"), text("variant"), text("tool"), { title: "verdict", value: (row) => row.verdict, show: (row) => badge(row.verdict) }, number("hazards"), number("errors"), number("warnings"), text("output"), { title: "wall", value: (row) => row.wall_s, show: (row) => (row.wall_s === null ? "–" : AMT.seconds(row.wall_s)), num: true }, { title: "why", value: (row) => row.reason, cls: "name" }], own.replays, { limit: 200, id: "replay-table" }) : note("Nothing was replayed."),
      own.controls.length ? el("details", {}, el("summary", {}, `Positive controls: ${AMT.count(own.controls.filter((row) => row.caught).length)} of ${AMT.count(own.controls.length)} planted faults caught, ${AMT.count(own.controls.filter((row) => row.sound_clean).length)} sound twins clean`), AMT.table([text("tool"), text("control"), text("mechanism"), { title: "basic", value: (row) => (row.basic ? "yes" : "no") }, { title: "caught", value: (row) => (row.caught ? "yes" : "no") }, { title: "twin clean", value: (row) => (row.sound_clean ? "yes" : "no") }, { title: "why not", value: (row) => row.reason, cls: "name" }], own.controls, { limit: 200, id: "control-table" })) : note("No positive controls were run: nothing that a tool called clean counts."),
      own.allowed.length ? el("div", {}, note("Allowed, and still in the totals:"), el("ul", {}, own.allowed.map((line) => el("li", {}, line)))) : null,
    ];
  }

  AMT.views.sanitizer = {
    title: "Sanitizer",
    render(main) {
      const reports = AMT.run().facts.sanitizer;
      if (!reports.length) main.append(panel("", "Sanitizer replays", AMT.missing("sanitizer")));
      for (const own of reports) {
        const keys = [...new Set(own.findings.flatMap((item) => Object.keys(item)))].slice(0, 10);
        main.append(panel("", null, el("div", { class: "verdict" }, badge(own.verdict), el("b", {}, own.tool || own.name), el("div", { class: "reason" }, own.reason)), own.scope ? note(`Scope: ${own.scope}`) : null, ...(own.kind === "sanitize" ? replays(own) : []),
          keys.length ? AMT.table(keys.map((key) => ({ title: key, value: (row) => row[key] ?? null, cls: "name" })), own.findings, { limit: 100 }) : note("No finding."), own.notes.length ? el("ul", {}, own.notes.map((text) => el("li", {}, text))) : null));
      }
    },
  };
})();
