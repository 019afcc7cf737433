"use strict";
// Unpacks the page's data: one string table, typed columns as base64 of little-endian arrays.
const AMT = { views: {} };
(() => {
  const KINDS = { u8: Uint8Array, u16: Uint16Array, u32: Uint32Array, i8: Int8Array, i16: Int16Array, i32: Int32Array, f64: Float64Array };

  function column([kind, text]) {
    const raw = atob(text);
    const bytes = new Uint8Array(raw.length);
    for (let i = 0; i < raw.length; i++) bytes[i] = raw.charCodeAt(i);
    return new KINDS[kind](bytes.buffer);
  }

  function table(packed) {
    const result = { rows: packed.rows };
    for (const name of Object.keys(packed.columns)) result[name] = column(packed.columns[name]);
    return result;
  }

  const page = JSON.parse(document.getElementById("data").textContent);
  AMT.strings = page.strings;
  AMT.text = (index) => (index < 0 ? null : AMT.strings[index]);
  AMT.palette = page.palette;
  AMT.shells = page.shells;
  AMT.histogram = page.histogram;
  AMT.states = page.states;
  AMT.runs = page.runs.map((run) => {
    const own = { facts: run.facts };
    for (const name of Object.keys(run.tables)) own[name] = table(run.tables[name]);
    own.symbols.names = Array.from({ length: own.symbols.rows }, (_, i) => ({
      full: AMT.text(own.symbols.full[i]), base: AMT.text(own.symbols.base[i]), kind: AMT.text(own.symbols.class[i]) || "other",
    }));
    own.cube.first = new Uint32Array(own.cube.rows);
    for (let i = 0, at = 0; i < own.cube.rows; i++) { own.cube.first[i] = at; at += own.cube.hist_entries[i]; }
    return own;
  });
  AMT.compare = page.compare && { ...page.compare, rows: table(page.compare.rows) };
})();
