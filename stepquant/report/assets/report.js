"use strict";
(() => {
  const data = JSON.parse(document.getElementById("report-data").textContent);
  const PRINT_WIDTH = 660; // of A4 between its margins, CSS pixels
  const GIB = 2 ** 30, MIB = 2 ** 20;
  const plots = {};

  // Figures. On touch screens a drag scrolls the page instead of zooming.
  const touch = matchMedia("(pointer: coarse)").matches;
  const options = { responsive: true, displaylogo: false, displayModeBar: false };
  const drawings = Object.entries(data.figures).map(([name, figure]) => {
    const place = (plots[name] = document.getElementById("plot-" + name));
    if (touch) figure.layout.dragmode = false;
    place.style.height = figure.layout.height + "px";
    return Plotly.newPlot(place, figure.data, figure.layout, options);
  });

  // Equation 24: M(B, L) = W + (r B + 1) S + B L K, plus the window buffers of running requests.
  const { states, slots, running, kv, strategies } = data.serving; // states: FP32, BF16, this plan
  const state = (name, r, batch) => (r * batch + 1) * slots[name] + batch * running[name];
  const total = (name, g, batch) => g.weights + state(name, g.r, batch) + batch * g.context * kv;
  const fits = (name, g) =>
    Math.max(0, Math.floor((g.memory - g.weights - slots[name]) / (g.r * slots[name] + running[name] + g.context * kv)));

  const input = (name) => document.getElementById("in-" + name);
  const value = (name) => Math.max(0, Number(input(name).value) || 0);
  const shown = (x, digits = 0) =>
    x.toLocaleString("en-US", { minimumFractionDigits: digits, maximumFractionDigits: digits });

  function given() {
    return {
      memory: Math.round(value("memory") * GIB), weights: Math.round(value("weights") * GIB),
      context: Math.floor(value("context")), batch: Math.floor(value("batch")), r: strategies[input("strategy").value],
    };
  }

  function update() {
    const g = given();
    const plain = fits(states[0], g);
    const rows = document.querySelectorAll("#capacity-table tbody tr");
    states.forEach((name, i) => {
      const n = fits(name, g);
      const cells = [
        shown(slots[name] / MIB, 3), shown(state(name, g.r, g.batch) / GIB, 2), shown(total(name, g, g.batch) / GIB, 2),
        shown(n), plain ? shown(n / plain, 2) + "x" : "-",
      ];
      rows[i].querySelectorAll("td").forEach((cell, j) => (cell.textContent = cells[j]));
    });
    const end = Math.max(1, g.batch, ...states.map((name) => fits(name, g))) * 1.1;
    const lines = states.map((name) => [0, end].map((batch) => total(name, g, batch) / GIB));
    lines.push([g.memory / GIB, g.memory / GIB]);
    const top = 1.25 * Math.max(g.memory / GIB, total(states[2], g, g.batch) / GIB);
    const layout = { ...data.figures.capacity.layout };
    layout.xaxis = { ...layout.xaxis, range: [0, end], autorange: false };
    layout.yaxis = { ...layout.yaxis, range: [0, top], autorange: false };
    const traces = data.figures.capacity.data.map((trace, i) => ({ ...trace, x: [0, end], y: lines[i] }));
    return Plotly.react(plots.capacity, traces, layout, options);
  }
  document.getElementById("calculator").addEventListener("input", update);
  document.getElementById("calculator").addEventListener("submit", (event) => event.preventDefault());

  // Print: figures as wide as the paper.
  addEventListener("beforeprint", () => {
    Object.values(plots).forEach((plot) => Plotly.relayout(plot, { width: PRINT_WIDTH, autosize: false }));
  });
  addEventListener("afterprint", () => {
    Object.values(plots).forEach((plot) => Plotly.relayout(plot, { width: null, autosize: true }));
  });

  Promise.all(drawings).then(update).then(() => { document.documentElement.dataset.drawn = "yes"; });
})();
