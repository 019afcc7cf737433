"use strict";
// Draws the shells of the Python figures with the data that the filters leave, in the theme of the page.
(() => {
  const SYMBOLS = ["circle", "square", "diamond", "cross", "triangle-up", "x", "triangle-down", "star", "pentagon", "hexagon"];
  const PATTERNS = ["", "/", "x", ".", "-", "+", "|"];
  AMT.symbolOf = (n) => SYMBOLS[n % SYMBOLS.length];
  AMT.pattern = (n) => ({ shape: PATTERNS[n % PATTERNS.length], size: 6, solidity: 0.35 });
  AMT.theme = () => document.documentElement.dataset.theme;
  AMT.colour = (n) => AMT.palette[AMT.theme()][n % AMT.palette[AMT.theme()].length];
  // Plotly reads some tags in labels as markup.
  AMT.escape = (text) => String(text).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;").replace(/\$/g, "&#36;");
  AMT.short = (text, limit = 48) => (text.length <= limit ? text : `${text.slice(0, Math.floor((limit * 2) / 3))}…${text.slice(text.length - (limit - Math.floor((limit * 2) / 3) - 1))}`);
  AMT.label = (text, limit) => AMT.escape(AMT.short(text, limit));
  AMT.webgl = (() => { try { return !!document.createElement("canvas").getContext("webgl"); } catch { return false; } })();

  function themed(layout) {
    const css = getComputedStyle(document.documentElement), pick = (name) => css.getPropertyValue(name).trim();
    const axis = { color: pick("--text"), gridcolor: pick("--line"), linecolor: pick("--soft") };
    return {
      ...layout, paper_bgcolor: pick("--panel"), plot_bgcolor: pick("--panel"), font: { ...layout.font, color: pick("--text") },
      xaxis: { ...layout.xaxis, ...axis }, yaxis: { ...layout.yaxis, ...axis },
      hoverlabel: { ...layout.hoverlabel, bgcolor: pick("--bg"), bordercolor: pick("--line"), font: { color: pick("--text") } },
    };
  }

  // A copy of the style of the shell's nth trace.
  AMT.trace = (name, n, more) => {
    const proto = structuredClone(AMT.shells[name].traces[n]);
    for (const key of ["marker", "line"]) if (proto[key] && more[key]) more[key] = { ...proto[key], ...more[key] };
    return { ...proto, ...more };
  };

  AMT.draw = (node, name, traces, change = (layout) => layout) => {
    const layout = structuredClone(AMT.shells[name].layout);
    const shared = name === "compare" ? AMT.runs.some((run) => run.facts.shared_gpu) : AMT.run().facts.shared_gpu;
    if (shared && ["gpu_time", "duration", "roofline", "skew", "step_skew", "timeline", "compare", "wall"].includes(name)) {
      layout.title.text += " (shared GPU: times are inflated)";
    }
    layout.uirevision = AMT.state.view;
    const config = { displaylogo: false, responsive: true, modeBarButtonsToRemove: ["lasso2d", "select2d"], toImageButtonOptions: { filename: `alphamoe-${name}` } };
    node.dataset.chart = name;
    return Plotly.react(node, traces, themed(change(layout) || layout), config);
  };

  AMT.chart = (name, cls = "c6") => AMT.el("div", { class: `panel chart ${cls}`, id: `chart-${name}` });

  // M on a categorical axis (0 has its place), or on a log axis, which has none: such buckets are told in text.
  AMT.mAxis = (layout, values) => {
    if (AMT.state.axis === "log") { layout.xaxis.type = "log"; delete layout.xaxis.categoryorder; layout.xaxis.title.text = "M (log)"; return layout; }
    layout.xaxis.type = "category"; layout.xaxis.categoryorder = "array";
    layout.xaxis.categoryarray = AMT.distinct(values).map(String);
    return layout;
  };
  AMT.mValue = (m) => (AMT.state.axis === "log" ? m : String(m));
  AMT.onM = (rows) => (AMT.state.axis === "log" ? rows.filter((row) => row.M > 0) : rows);
})();
