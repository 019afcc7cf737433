"use strict";
// The state of the page lives in the URL fragment, so that a view can be linked. Null means "all".
(() => {
  const NUMBERS = { rank: "ranks", layer: "layers", m: "ms" };
  const TEXTS = { exec: "executions", traffic: "traffic" };
  const SINGLE = { view: "overview", subject: "", axis: "cat", name: "", q: "", shapes: "" };

  function parse(fragment) {
    const given = new URLSearchParams(fragment.replace(/^#/, ""));
    const state = { run: 0, step: null, ranks: null, layers: null, ms: null, executions: null, traffic: ["witness"] };
    for (const [key, name] of Object.entries(NUMBERS)) {
      if (given.has(key)) state[name] = given.get(key).split(",").filter((v) => v !== "").map(Number).filter(Number.isFinite);
    }
    for (const [key, name] of Object.entries(TEXTS)) if (given.has(key)) state[name] = given.getAll(key).filter((v) => v !== "");
    if (given.has("traffic") && given.get("traffic") === "*") state.traffic = null;
    for (const [key, value] of Object.entries(SINGLE)) state[key] = given.get(key) ?? value;
    const run = Number(given.get("run") ?? 0);
    state.run = AMT.runs[run] ? run : 0;
    if (given.has("step") && Number.isFinite(Number(given.get("step")))) state.step = Number(given.get("step"));
    return state;
  }

  function write(state) {
    const out = new URLSearchParams();
    for (const [key, value] of Object.entries(SINGLE)) if (state[key] !== value) out.set(key, state[key]);
    for (const [key, name] of Object.entries(NUMBERS)) if (state[name]) out.set(key, state[name].join(","));
    if (state.executions) for (const value of state.executions.length ? state.executions : [""]) out.append("exec", value);
    if (!state.traffic) out.set("traffic", "*");
    else if (state.traffic.join() !== "witness") for (const value of state.traffic.length ? state.traffic : [""]) out.append("traffic", value);
    if (state.run) out.set("run", state.run);
    if (state.step !== null) out.set("step", state.step);
    return `#${out}`;
  }

  AMT.state = parse(location.hash);
  AMT.run = () => AMT.runs[AMT.state.run];
  AMT.set = (changes) => {
    const viewed = AMT.state.view;
    Object.assign(AMT.state, changes);
    const fragment = write(AMT.state);
    // A new view is a step of the browser's history, a filter is not.
    if (fragment !== location.hash) history[viewed === AMT.state.view ? "replaceState" : "pushState"](null, "", fragment);
    AMT.render();
  };
  // Keeps the link right without drawing again (while a search is typed).
  AMT.quietly = () => history.replaceState(null, "", write(AMT.state));
  addEventListener("popstate", () => { AMT.state = parse(location.hash); AMT.render(); });
  addEventListener("hashchange", () => {
    if (location.hash === "#main" || write(AMT.state) === location.hash) return;
    AMT.state = parse(location.hash); AMT.render();
  });
})();
