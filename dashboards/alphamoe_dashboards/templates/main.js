"use strict";
// Tabs, theme, and the one render that every change of state calls.
(() => {
  const { el, badge } = AMT;
  const root = document.documentElement, main = document.getElementById("main");
  const dark = matchMedia("(prefers-color-scheme: dark)");
  let stored = null;
  try { stored = localStorage.getItem("alphamoe-theme"); } catch { /* a page from a file may have no storage */ }
  root.dataset.theme = stored || (dark.matches ? "dark" : "light");
  dark.addEventListener("change", () => { if (!stored) { root.dataset.theme = dark.matches ? "dark" : "light"; AMT.render(); } });

  const toggle = document.getElementById("theme");
  toggle.addEventListener("click", () => {
    root.dataset.theme = stored = root.dataset.theme === "dark" ? "light" : "dark";
    try { localStorage.setItem("alphamoe-theme", stored); } catch { /* kept for this page only */ }
    AMT.render();
  });
  document.getElementById("link").addEventListener("click", () => AMT.copy(location.href));
  document.getElementById("skip").addEventListener("click", (event) => { event.preventDefault(); main.focus(); });

  const pick = document.getElementById("run");
  if (AMT.runs.length > 1) {
    document.getElementById("run-pick").hidden = false;
    AMT.runs.forEach((run, i) => pick.append(el("option", { value: i }, `${i ? "candidate" : "baseline"}: ${run.facts.name}`)));
    pick.addEventListener("change", () => AMT.set({ run: Number(pick.value), step: null }));
  }

  const views = () => Object.entries(AMT.views).filter(([, view]) => !view.hidden || !view.hidden());

  function tabs() {
    const bar = document.getElementById("tabs"), focused = bar.contains(document.activeElement);
    bar.replaceChildren(...views().map(([key, view]) => el("button", {
      type: "button", role: "tab", id: `tab-${key}`, "aria-selected": String(key === AMT.state.view), "aria-controls": "main", tabindex: key === AMT.state.view ? "0" : "-1",
      onclick: () => AMT.set({ view: key }),
    }, view.title)));
    if (focused) document.getElementById(`tab-${AMT.state.view}`).focus();
  }
  document.getElementById("tabs").addEventListener("keydown", (event) => {
    const keys = views().map(([key]) => key), at = keys.indexOf(AMT.state.view);
    const to = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: keys.length - 1 }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    AMT.set({ view: keys[(to + keys.length) % keys.length] });
  });

  AMT.verdictOf = (facts) => judging(facts.verdicts).reduce((worst, own) => (rank(own.verdict) > rank(worst) ? own.verdict : worst), "PASS");

  AMT.render = () => {
    const began = performance.now(), run = AMT.run(), { facts } = run;
    if (!AMT.views[AMT.state.view] || !views().some(([key]) => key === AMT.state.view)) AMT.state.view = "overview";
    document.getElementById("title").textContent = facts.name;
    document.getElementById("title").title = `${facts.name} (run ${facts.run_id})`;
    document.getElementById("title-badge").replaceChildren(badge(AMT.verdictOf(facts)));
    document.getElementById("shared").replaceChildren(facts.shared_gpu ? el("span", { class: "warn", title: "Ranks share a GPU and are time-sliced: presence, attribution and M are proven, times are comparable with nothing." }, "shared GPU: times are inflated") : "", facts.kind === "imported" ? el("span", { class: "note" }, " imported trace") : "");
    toggle.textContent = root.dataset.theme === "dark" ? "Light" : "Dark";
    toggle.setAttribute("aria-pressed", String(root.dataset.theme === "dark"));
    pick.value = AMT.state.run;
    tabs();
    AMT.renderFilters();
    const focus = main.contains(document.activeElement) ? document.activeElement.id : null;
    for (const chart of main.querySelectorAll("[data-chart]")) Plotly.purge(chart);
    const scrolled = root.dataset.view === AMT.state.view ? scrollY : 0;
    main.replaceChildren();
    AMT.views[AMT.state.view].render(main);
    if (focus) document.getElementById(focus)?.focus();
    scrollTo(0, scrolled);
    root.dataset.view = AMT.state.view;
    root.dataset.renderMs = (performance.now() - began).toFixed(1);
    root.dataset.renders = Number(root.dataset.renders || 0) + 1;
  };
  // Gates answer what was asked of them; the witness summary speaks for them where none was run, and never unheard when it fails.
  const judging = (verdicts) => (verdicts.some((own) => own.kind === "gate") ? verdicts.filter((own) => own.kind === "gate" || own.verdict === "FAIL") : verdicts);
  const rank = (verdict) => ["PASS", "INCONCLUSIVE", "CONFIG_ERROR", "FAIL"].indexOf(verdict);

  document.getElementById("foot").textContent = "alphamoe-trace: one file, no network. Quantiles come from log histograms and lie within 1 % of the exact ones; counts, sums, least and greatest are exact.";
  addEventListener("beforeprint", () => { root.dataset.screenTheme = root.dataset.theme; if (root.dataset.theme === "dark") { root.dataset.theme = "light"; AMT.render(); } });
  addEventListener("afterprint", () => { if (root.dataset.screenTheme !== root.dataset.theme) { root.dataset.theme = root.dataset.screenTheme; AMT.render(); } });
  AMT.render();
})();
