// Draws every chart of a page with uPlot. Each figure holds its data as JSON; all charts of the
// page share one cursor and one zoom.
"use strict";
(() => {
  const style = getComputedStyle(document.documentElement);
  const css = (name) => style.getPropertyValue(name).trim();
  const charts = [];
  const hidden = new Set(); // runs

  const number = (value, percent) => {
    if (value == null) return "";
    const size = Math.abs(value);
    if (percent) return `${(100 * value).toFixed(size < 0.01 ? 2 : 1)}%`;
    if (size >= 1000) return Math.round(value).toLocaleString("en");
    return size && size < 1e-4 ? value.toExponential(3) : String(+value.toPrecision(4));
  };

  // Short text for an axis, without the noise of binary fractions: 0.25, 5k, 20M, 1e-5.
  const tick = (value, percent) => {
    if (value == null) return "";
    if (percent) return `${+(100 * value).toPrecision(6)}%`;
    const size = Math.abs(value);
    for (const [unit, sign] of [[1e9, "G"], [1e6, "M"], [1e3, "k"]]) {
      if (size >= unit * (sign === "k" ? 10 : 1)) return `${+(value / unit).toPrecision(6)}${sign}`;
    }
    if (size && size < 1e-4) return (+value.toPrecision(6)).toExponential();
    return String(+value.toPrecision(6));
  };

  // A logarithmic axis begins and ends at one digit: from 0.053 to 6.1 it is 0.05 to 7.
  const oneDigit = (value, round) => {
    const power = 10 ** Math.floor(Math.log10(value));
    return +(round(+(value / power).toPrecision(6)) * power).toPrecision(1);
  };

  // Of the nine lines of a decade, those that stay apart: 1, 2 and 5, over many decades 1 alone.
  const logLines = (_, splits) => {
    const wide = splits.at(-1) / splits[0] > 1000;
    const kept = wide ? ["1"] : ["1", "2", "5"];
    return splits.map((value) => (kept.includes(value.toExponential(0)[0]) ? value : null));
  };

  // A value between two gaps has no line; these are the indexes that need a dot.
  const lonely = (values) => {
    const known = [...values.keys()].filter((i) => values[i] !== undefined);
    return known.filter((i, at) => values[i] !== null
      && values[known[at - 1]] == null && values[known[at + 1]] == null);
  };

  const series = (curve, values, percent) => {
    const colour = () => css(`--${curve.colour}`) + (curve.faint ? "66" : "");
    const alone = lonely(values);
    return {
      label: curve.name,
      show: !hidden.has(curve.run),
      stroke: colour,
      width: curve.faint ? 1 : 1.75,
      dash: curve.dash ? [6, 3] : undefined,
      points: {
        show: curve.dots, size: curve.dots ? 8 : 5, width: 0, fill: colour, stroke: colour,
        filter: () => (curve.dots ? null : alone),
      },
      // Sparse points answer from afar, so they name their step.
      value: (plot, value, _, i) => number(value, percent)
        + (curve.dots && value != null ? ` at ${plot.data[0][i].toLocaleString("en")}` : ""),
    };
  };

  const drawMarks = (chart) => (plot) => {
    const { ctx, bbox } = plot;
    const pixel = devicePixelRatio;
    ctx.save();
    for (const { kind, x, run } of chart.marks) {
      if (hidden.has(run)) continue;
      ctx.strokeStyle = css(kind === "tall" ? "--quiet" : "--alarm");
      ctx.lineWidth = (kind === "tall" ? 1 : 2) * pixel;
      ctx.setLineDash(kind === "tall" ? [3 * pixel, 3 * pixel] : []);
      const bottom = bbox.top + bbox.height;
      for (const step of x) {
        const place = plot.valToPos(step, "x", true);
        if (place < bbox.left || place > bbox.left + bbox.width) continue;
        ctx.beginPath();
        ctx.moveTo(place, kind === "tall" ? bbox.top : bottom - 9 * pixel);
        ctx.lineTo(place, bottom);
        ctx.stroke();
      }
    }
    ctx.restore();
  };

  const options = (chart, data, width, keys) => {
    const axis = (values, more) => ({
      stroke: () => css("--quiet"), font: "11.5px system-ui, sans-serif",
      grid: { stroke: () => css("--line"), width: 1 }, ticks: { show: false },
      values: (_, splits) => splits.map(values), ...more,
    });
    const logRange = (_, low, high) => (low == null ? [1, 10]
      : [oneDigit(low, Math.floor), Math.max(oneDigit(high, Math.ceil), 2 * oneDigit(low, Math.floor))]);
    // Around 0 alone uPlot takes 0 to 100, which are 10000%.
    const zero = chart.curves.every((curve) => curve.y.every((value) => !value));
    const linear = zero ? { range: [0, 1] } : {};
    return {
      width,
      height: chart.height + 34,
      scales: { x: { time: false }, y: chart.log ? { distr: 3, range: logRange } : linear },
      axes: [
        axis((value) => (value % 1 ? "" : tick(value)), { grid: { show: false }, size: 24 }),
        axis((value) => tick(value, chart.percent), {
          size: 52, gap: 6, ...(chart.log && { filter: logLines }),
          grid: { stroke: () => css("--line"), width: 1, ...(chart.log && { filter: logLines }) },
        }),
      ],
      series: [
        { label: "step", value: (_, value) => (value == null ? "" : Math.round(value).toLocaleString("en")) },
        ...chart.curves.map((curve, i) => series(curve, data[i + 1], chart.percent)),
      ],
      cursor: { sync: { key: "page", scales: ["x", null] }, points: { size: 7 }, drag: { dist: 4 } },
      legend: {
        mount: (_, legend) => keys.prepend(legend),
        markers: { width: 2, stroke: "currentColor", fill: "none" },
      },
      hooks: { draw: [drawMarks(chart)] },
    };
  };

  const build = (figure) => {
    const chart = JSON.parse(figure.querySelector("script").textContent);
    const keys = figure.querySelector(".keys");
    const plot = figure.querySelector(".plot");
    // The first table makes all charts reach over the same steps.
    const data = uPlot.join([[chart.span], ...chart.curves.map(({ x, y }) => [x, y])]);
    const own = { chart };
    const draw = () => {
      const zoom = own.plot && own.plot.scales.x;
      if (own.plot) own.plot.destroy();
      own.plot = new uPlot(options(chart, data, plot.clientWidth, keys), data, plot);
      chart.curves.forEach((curve, i) => {
        const row = keys.querySelectorAll(".u-series")[i + 1].classList;
        row.add(curve.colour);
        row.toggle("faint", curve.faint);
        row.toggle("unlisted", !curve.legend);
      });
      if (zoom) own.plot.setScale("x", { min: zoom.min, max: zoom.max });
    };
    if (chart.positive) {
      const button = document.createElement("button");
      const name = () => { button.textContent = chart.log ? "log" : "linear"; };
      button.title = "switch between a logarithmic and a linear scale";
      button.addEventListener("click", () => { chart.log = !chart.log; name(); draw(); });
      name();
      figure.append(button);
    }
    draw();
    charts.push(Object.assign(own, { draw }));
    new ResizeObserver(() => {
      if (plot.clientWidth !== own.plot.width) {
        own.plot.setSize({ width: plot.clientWidth, height: own.plot.height });
      }
    }).observe(plot);
  };

  const toggle = (button, run) => () => {
    if (!hidden.delete(run)) hidden.add(run);
    button.setAttribute("aria-pressed", String(!hidden.has(run)));
    for (const { chart, plot } of charts) {
      chart.curves.forEach((curve, i) => {
        if (curve.run === run) plot.setSeries(i + 1, { show: !hidden.has(run) });
      });
      plot.redraw();
    }
  };

  document.querySelectorAll("figure.chart:has(.plot)").forEach(build);
  document.querySelectorAll(".runs button").forEach((button, run) => {
    button.addEventListener("click", toggle(button, run));
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
    charts.forEach(({ draw }) => draw());
  });
})();
