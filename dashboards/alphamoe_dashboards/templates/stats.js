"use strict";
// Quantiles of merged log histograms, and how numbers are written.
(() => {
  const BINS = 4096;

  class Histogram {
    constructor() { this.counts = new Float64Array(BINS); this.total = 0; this.low = BINS; this.high = -1; }

    add(bin, count) {
      this.counts[bin] += count; this.total += count;
      if (bin < this.low) this.low = bin;
      if (bin > this.high) this.high = bin;
    }

    // Of a cube row: gaps to the entry before, then a count; a count of 0 only bridges a gap above 255.
    addRow(run, row) {
      const cube = run.cube, hist = run.hist;
      let bin = 0;
      for (let i = cube.first[row], end = i + cube.hist_entries[row]; i < end; i++) {
        bin += hist.gap[i];
        if (hist.count[i]) this.add(bin, hist.count[i]);
      }
    }

    // Never outside what was observed, where least and greatest are known.
    quantile(q) { return Math.min(Math.max(this.raw(q), this.least ?? 0), this.greatest ?? Infinity); }

    raw(q) {
      if (!this.total) return NaN;
      const rank = Math.floor(q * (this.total - 1));
      let seen = 0;
      for (let bin = this.low; bin <= this.high; bin++) {
        seen += this.counts[bin];
        if (seen > rank) return AMT.binValue(bin);
      }
      return AMT.binValue(this.high);
    }
  }

  AMT.Histogram = Histogram;
  AMT.binValue = (bin) => (bin <= 0 ? 0 : (2 * AMT.histogram.growth ** (bin - 1)) / (AMT.histogram.growth + 1));

  const whole = new Intl.NumberFormat("en-US", { maximumFractionDigits: 0 });
  AMT.count = (value) => (Number.isFinite(value) ? whole.format(value) : "–");
  AMT.fixed = (value, digits = 2) => (Number.isFinite(value) ? value.toLocaleString("en-US", { minimumFractionDigits: digits, maximumFractionDigits: digits }) : "–");
  AMT.time = (ns) => {
    if (!Number.isFinite(ns) || ns < 0) return "–";
    if (ns < 1e3) return `${AMT.fixed(ns, 0)} ns`;
    if (ns < 1e6) return `${AMT.fixed(ns / 1e3)} µs`;
    return ns < 1e9 ? `${AMT.fixed(ns / 1e6)} ms` : `${AMT.fixed(ns / 1e9)} s`;
  };
  AMT.percent = (share, digits = 1) => (Number.isFinite(share) ? `${AMT.fixed(share * 100, digits)} %` : "–");
  AMT.seconds = (value) => (Number.isFinite(value) ? `${AMT.fixed(value, value < 10 ? 3 : 1)} s` : "–");
  // Consecutive values that were all observed are folded: 0-3, 7.
  AMT.fold = (values) => {
    const runs = [];
    for (const value of [...values].sort((a, b) => a - b)) {
      const last = runs[runs.length - 1];
      if (last && value === last[1] + 1) last[1] = value; else runs.push([value, value]);
    }
    return runs.map(([a, b]) => (b > a + 1 ? `${a}-${b}` : b > a ? `${a}, ${b}` : `${a}`)).join(", ");
  };
})();
