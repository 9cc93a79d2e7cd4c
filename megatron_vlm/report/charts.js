// Draws every chart of a page with uPlot. Each figure holds its data as JSON; all charts of the
// page share one cursor, one zoom and the controls: the x axis, the smoothing, the runs shown.
// On a page that a server lets grow, events bring newer data, and charts that are new.
"use strict";
(() => {
  const style = getComputedStyle(document.documentElement);
  const css = (name) => style.getPropertyValue(name).trim();
  const charts = [];
  const hidden = new Set(); // runs
  const built = new WeakSet();
  const shared = { window: 1, most: 2, runs: [] };
  let controls = null;
  let over = "steps";
  let smoothed = 1; // steps in a mean
  let isChosen = false; // by the reader

  const number = (value, percent) => {
    if (value == null) return "-";
    const size = Math.abs(value);
    if (percent) return `${(100 * value).toFixed(size && size < 0.01 ? 2 : 1)}%`;
    if (size >= 1000) return Math.round(value).toLocaleString("en");
    return size && size < 1e-4 ? exponential(+value.toPrecision(4)) : String(+value.toPrecision(4));
  };

  // 6.852e-07, as Python writes it in the texts of the page.
  const exponential = (value) => value.toExponential().replace(/e([+-])(\d)$/, "e$10$2");

  // Short text for an axis, without the noise of binary fractions: 0.25, 5k, 20M, 1e-05.
  const tick = (value, percent) => {
    if (value == null) return "";
    if (percent) return `${+(100 * value).toPrecision(6)}%`;
    const size = Math.abs(value);
    for (const [unit, sign] of [[1e9, "G"], [1e6, "M"], [1e3, "k"]]) {
      if (size >= unit * (sign === "k" ? 10 : 1)) return `${+(value / unit).toPrecision(6)}${sign}`;
    }
    if (size && size < 1e-4) return exponential(+value.toPrecision(6));
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

  // The width of an axis, which its longest text needs.
  const font = "11.5px system-ui, sans-serif";
  const pen = document.createElement("canvas").getContext("2d");
  pen.font = font;
  const roomFor = (_, texts) => Math.max(52, ...(texts || []).map((text) => 10 + pen.measureText(text).width));

  // The x axis. Time has one unit on the whole page, so that its ticks are round.
  let [unit, unitName] = [1, "s"];
  const chooseUnit = () => {
    const longest = Math.max(0, ...shared.runs.map((run) => (run.seconds || [0]).at(-1)));
    [unit, unitName] = longest > 7200 ? [3600, "h"] : longest > 120 ? [60, "min"] : [1, "s"];
  };

  // The value of an axis at a step, on the line between the steps that are known.
  const interpolate = (steps, values, step) => {
    let [low, high] = [0, steps.length - 1];
    if (step >= steps[high]) return values[high];
    if (step <= steps[0]) return values[0] * Math.max(0, step) / Math.max(1, steps[0]);
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (steps[middle] <= step) low = middle; else high = middle;
    }
    const share = (step - steps[low]) / (steps[high] - steps[low]);
    return values[low] + share * (values[high] - values[low]);
  };

  const place = (run, step, axis = over) => {
    const { steps, tokens, seconds } = shared.runs[run] || {};
    if (axis === "steps" || !steps) return step;
    return axis === "tokens" ? Math.round(interpolate(steps, tokens, step))
      : interpolate(steps, seconds, step) / unit;
  };

  const placeText = (value) => {
    if (value == null) return "";
    if (over === "time") return `${+value.toPrecision(4)} ${unitName}`;
    return `${over === "tokens" ? "tokens" : "step"} ${Math.round(value).toLocaleString("en")}`;
  };

  // The means of the last steps up to each point, which never look ahead. As Python's `smooth`.
  const means = ({ x, y, columns }) => {
    const known = [...x.keys()].filter((i) => y[i] !== null);
    const [steps, values, counts] = columns
      || [known.map((i) => x[i]), known.map((i) => y[i]), known.map(() => 1)];
    const total = counts.reduce((sum, count) => sum + count, 0);
    const width = Math.max(1, Math.round(smoothed * steps.length / total));
    const out = [[], []];
    for (let end = width - 1; end < steps.length; end += 1) {
      let [sum, weight] = [0, 0];
      for (let i = end - width + 1; i <= end; i += 1) {
        sum += values[i] * counts[i];
        weight += counts[i];
      }
      out[0].push(steps[end]);
      out[1].push(sum / weight);
    }
    return out;
  };

  // What is drawn: each curve and, over one that is smoothed, its means.
  const linesOf = (chart) => chart.curves.flatMap((curve) => {
    const raw = { curve, x: curve.x, y: curve.y, faint: false };
    if (!curve.smooth || smoothed < 2) return [raw];
    const [x, y] = means(curve);
    return x.length ? [{ ...raw, faint: true }, { curve, x, y, faint: false }] : [raw];
  });

  // uPlot wants rising x, and one value for each.
  const table = ({ curve, x, y }) => {
    const rows = [[], []];
    x.forEach((step, i) => {
      const at = place(curve.run, step);
      if (rows[0].length && at <= rows[0].at(-1)) rows[1][rows[1].length - 1] = y[i];
      else { rows[0].push(at); rows[1].push(y[i]); }
    });
    return rows;
  };

  const spanOf = (chart) => {
    if (over === "steps") return chart.span;
    const ends = chart.curves.map(({ run, x }) => [place(run, x[0]), place(run, x.at(-1))]);
    const low = Math.min(...ends.map(([first]) => first));
    const high = Math.max(...ends.map(([, last]) => last));
    return high > low ? [low, high] : [low - 1, low + 1];
  };

  // A value between two gaps has no line; these are the indexes that need a dot.
  const lonely = (values) => {
    const known = [...values.keys()].filter((i) => values[i] !== undefined);
    return known.filter((i, at) => values[i] !== null
      && values[known[at - 1]] == null && values[known[at + 1]] == null);
  };

  const series = ({ curve, faint }, values) => {
    const colour = () => css(`--${curve.colour}`) + (faint ? "66" : "");
    const alone = lonely(values);
    return {
      label: curve.name,
      show: !hidden.has(curve.run),
      stroke: colour,
      width: faint ? 1 : 1.75,
      dash: curve.dash ? [6, 3] : undefined,
      points: {
        show: curve.dots, size: curve.dots ? 8 : 5, width: 0, fill: colour, stroke: colour,
        filter: () => (curve.dots ? null : alone),
      },
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
        const at = plot.valToPos(place(run, step), "x", true);
        if (at < bbox.left || at > bbox.left + bbox.width) continue;
        ctx.beginPath();
        ctx.moveTo(at, kind === "tall" ? bbox.top : bottom - 9 * pixel);
        ctx.lineTo(at, bottom);
        ctx.stroke();
      }
    }
    ctx.restore();
  };

  const lastKnown = (values) => {
    for (let i = values.length - 1; i >= 0; i -= 1) if (values[i] != null) return i;
    return null;
  };

  // The legend has the values under the cursor and, without one, the last values.
  const tell = (own) => {
    const { plot, chart, lines, rows, where } = own;
    if (!plot || !rows) return;
    const inside = plot.cursor.idx != null && plot.cursor.left >= 0;
    const index = (at) => {
      const values = plot.data[at + 1];
      if (!inside) return lastKnown(values);
      const i = plot.cursor.idxs ? plot.cursor.idxs[at + 1] : plot.cursor.idx;
      return i != null && values[i] != null ? i : null;
    };
    chart.curves.forEach((curve, i) => {
      const [raw, mean] = lines.map((line, at) => [line, at])
        .filter(([line]) => line.curve === curve).map(([, at]) => at);
      const value = (at) => (index(at) == null ? null : plot.data[at + 1][index(at)]);
      const main = mean === undefined ? raw : mean;
      let text = number(value(main), chart.percent);
      if (mean !== undefined && value(raw) != null) text += ` (raw ${number(value(raw), chart.percent)})`;
      // Sparse points answer from afar, so they name their place.
      if (curve.dots && index(raw) != null) text += ` at ${placeText(plot.data[0][index(raw)])}`;
      rows[i].textContent = text;
      rows[i].parentElement.classList.toggle("off", hidden.has(curve.run));
    });
    const ends = chart.curves.map(({ run, x }) => place(run, x.at(-1)));
    where.textContent = inside ? placeText(plot.data[0][plot.cursor.idx])
      : placeText(Math.max(...ends));
  };

  const options = (own, data, width) => {
    const { chart, lines } = own;
    const axis = (values, more) => ({
      stroke: () => css("--quiet"), font,
      grid: { stroke: () => css("--line"), width: 1 }, ticks: { show: false },
      values: (_, splits) => splits.map(values), ...more,
    });
    const logRange = (_, low, high) => (low == null ? [1, 10]
      : [oneDigit(low, Math.floor), Math.max(oneDigit(high, Math.ceil), 2 * oneDigit(low, Math.floor))]);
    // Around 0 alone uPlot takes 0 to 100, which are 10000%.
    const zero = chart.curves.every((curve) => curve.y.every((value) => !value));
    const most = Math.max(...chart.curves.flatMap((curve) => curve.y.map((value) => value || 0)));
    // A share has no room above 100%.
    const share = (_, low, high) => {
      if (low == null) return [0, 1];
      const [from, to] = uPlot.rangeNum(low, high > low ? high : low + 0.01, 0.1, true);
      return [Math.max(from, Math.min(0, low)), Math.min(to, Math.max(1, most))];
    };
    const linear = zero ? { range: [0, 1] } : chart.percent ? { range: share } : {};
    const xTick = (value) => {
      if (over === "time") return `${tick(value)} ${unitName}`;
      return value % 1 ? "" : tick(value);
    };
    return {
      width,
      height: chart.height + 38,
      scales: { x: { time: false }, y: chart.log ? { distr: 3, range: logRange } : linear },
      axes: [
        axis(xTick, { grid: { show: false }, size: 28, gap: 9 }),
        axis((value) => tick(value, chart.percent), {
          size: roomFor, gap: 6, ...(chart.log && { filter: logLines }),
          grid: { stroke: () => css("--line"), width: 1, ...(chart.log && { filter: logLines }) },
        }),
      ],
      series: [{}, ...lines.map((line, i) => series(line, data[i + 1]))],
      cursor: { sync: { key: "page", scales: ["x", null] }, points: { size: 7 }, drag: { dist: 4 } },
      legend: { show: false },
      hooks: { draw: [drawMarks(chart)], setCursor: [() => tell(own)] },
    };
  };

  // A line for each point that the page has; metrics.jsonl has all of them.
  const csv = (chart) => {
    const cell = (value) => (/[",\n]/.test(value) ? `"${value.replaceAll('"', '""')}"` : value);
    const lines = ["run,curve,step,tokens,seconds,value"];
    for (const { run, name, x, y } of chart.curves) {
      x.forEach((step, i) => {
        const known = shared.runs[run];
        const more = known && known.steps
          ? [place(run, step, "tokens"), +(unit * place(run, step, "time")).toFixed(3)] : ["", ""];
        lines.push([cell(known ? known.name : ""), cell(name), step, ...more, y[i] ?? ""].join(","));
      });
    }
    return `${lines.join("\n")}\n`;
  };

  const download = (name, text) => {
    const link = document.createElement("a");
    link.href = URL.createObjectURL(new Blob([text], { type: "text/csv" }));
    link.download = name;
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 1000);
  };

  const button = (text, title, act) => {
    const made = document.createElement("button");
    Object.assign(made, { textContent: text, title });
    made.addEventListener("click", () => act(made));
    return made;
  };

  const legend = (own, keys) => {
    const entry = (before, kind) => {
      const span = document.createElement("span");
      const value = document.createElement("output");
      if (kind) span.append(Object.assign(document.createElement("i"), { className: kind }));
      span.append(before, value);
      return [span, value];
    };
    const [spot, where] = entry("", "");
    const entries = own.chart.curves.map((curve) => entry(curve.name,
      `line ${curve.colour}${curve.dash ? " dash" : ""}${curve.dots ? " dots" : ""}`));
    keys.prepend(spot, ...entries.map(([span]) => span));
    Object.assign(own, { where, rows: entries.map(([, value]) => value) });
  };

  // The part of the x axis that the reader has chosen, if that is not all of it.
  const zoomOf = ({ plot }) => {
    if (!plot) return null;
    const { min, max } = plot.scales.x;
    return min > plot.data[0][0] || max < plot.data[0].at(-1) ? { min, max } : null;
  };

  const build = (figure) => {
    built.add(figure);
    const chart = JSON.parse(figure.querySelector("script").textContent);
    const plot = figure.querySelector(".plot");
    const own = { chart, isSeen: true, isStale: false };
    legend(own, figure.querySelector(".keys"));
    const draw = (keepZoom = true) => {
      const zoom = keepZoom && zoomOf(own);
      own.isStale = false;
      if (own.plot) own.plot.destroy();
      own.lines = linesOf(chart);
      // The first table makes charts reach over the same steps.
      const data = uPlot.join([[spanOf(chart)], ...own.lines.map(table)]);
      own.plot = new uPlot(options(own, data, plot.clientWidth), data, plot);
      if (zoom) own.plot.setScale("x", { min: zoom.min, max: zoom.max });
      tell(own);
    };
    const bar = document.createElement("div");
    bar.className = "buttons";
    if (chart.positive) {
      const name = () => (chart.log ? "log" : "linear");
      bar.append(button(name(), "switch between a logarithmic and a linear scale", (made) => {
        chart.log = !chart.log;
        own.hasChosenLog = true;
        made.textContent = name();
        draw();
      }));
    }
    const title = figure.querySelector("b").textContent;
    bar.append(button("CSV", "download the points of this chart",
      () => download(`${title.toLowerCase().replaceAll(/\W+/g, "-")}.csv`, csv(chart))));
    figure.append(bar);
    draw();
    charts.push(Object.assign(own, { figure, draw }));
    // What cannot be seen is drawn when it is.
    const drawSoon = () => { if (own.isSeen) draw(); else own.isStale = true; };
    new IntersectionObserver(([{ isIntersecting }]) => {
      own.isSeen = isIntersecting;
      if (isIntersecting && own.isStale) draw();
    }).observe(figure);
    figure.addEventListener("drawn", ({ detail }) => {
      const isLog = own.hasChosenLog ? chart.log && detail.positive : detail.log;
      detail.curves.forEach((fresh, i) => {
        Object.assign(chart.curves[i], { columns: undefined }, fresh);
      });
      Object.assign(chart, { ...detail, curves: chart.curves, log: isLog });
      drawSoon();
    });
    // A finger that moves over a chart reads it; up and down still scrolls the page.
    plot.addEventListener("touchmove", (event) => {
      const box = own.plot.over.getBoundingClientRect();
      const { clientX, clientY } = event.touches[0];
      own.plot.setCursor({ left: clientX - box.left, top: clientY - box.top });
    }, { passive: true });
    new ResizeObserver(() => {
      if (plot.clientWidth !== own.plot.width) {
        own.plot.setSize({ width: plot.clientWidth, height: own.plot.height });
      }
    }).observe(plot);
  };

  const toggle = (pressed, run) => () => {
    if (!hidden.delete(run)) hidden.add(run);
    pressed.setAttribute("aria-pressed", String(!hidden.has(run)));
    for (const own of charts) {
      own.lines.forEach(({ curve }, i) => {
        if (curve.run === run) own.plot.setSeries(i + 1, { show: !hidden.has(run) });
      });
      own.plot.redraw();
      tell(own);
    }
  };

  const control = () => {
    const [select, slider, output] = ["select", "input", "output"].map((name) => controls.querySelector(name));
    const say = () => {
      output.textContent = smoothed < 2 ? "off" : `mean of the last ${smoothed.toLocaleString("en")} steps`;
    };
    // The slider is logarithmic: 0 is off, 100 a quarter of the longest run.
    slider.value = Math.round(100 * Math.log(smoothed) / Math.log(shared.most));
    select.value = over;
    slider.addEventListener("input", () => {
      isChosen = true;
      smoothed = Math.round(shared.most ** (slider.value / 100));
      say();
      charts.forEach(({ draw }) => draw());
    });
    select.addEventListener("change", () => {
      over = select.value;
      charts.forEach(({ draw }) => draw(false));
    });
    say();
    document.querySelectorAll(".runs button").forEach((pressed, run) => {
      pressed.addEventListener("click", toggle(pressed, run));
    });
  };

  // Takes over the controls and charts that the page has and that are new.
  const adopt = () => {
    const found = document.querySelector(".controls");
    if (found && found !== controls) {
      controls = found;
      Object.assign(shared, JSON.parse(controls.querySelector("script").textContent));
      if (!isChosen) smoothed = shared.window;
      chooseUnit();
      control();
    }
    charts.splice(0, charts.length, ...charts.filter(({ figure }) => figure.isConnected));
    [...document.querySelectorAll("figure.chart:has(.plot)")].filter((each) => !built.has(each))
      .forEach(build);
  };

  adopt();
  document.addEventListener("grown", adopt);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
    charts.forEach(({ draw }) => draw());
  });
})();
