// Draws every heat map of a page: a pixel for each cell, one colour above the mean, one below. The
// slider chooses the time; pointer and arrow keys choose a cell, which is then told in words.
"use strict";
(() => {
  const redraw = [];

  // The parts of a colour of the style sheet, which is #rrggbb.
  const colour = (name) => {
    const text = getComputedStyle(document.documentElement).getPropertyValue(name).trim();
    return [1, 3, 5].map((place) => parseInt(text.slice(place, place + 2), 16));
  };

  const build = (figure) => {
    const map = JSON.parse(figure.querySelector("script").textContent);
    const cells = Uint8Array.from(atob(map.cells), (sign) => sign.charCodeAt(0));
    const [slider, canvas, said] = ["input", "canvas", "p"].map((name) => figure.querySelector(name));
    const [output, frame] = ["output", ".cells b"].map((name) => figure.querySelector(name));
    const [wide, high] = [map.columns, map.rows.length];
    let chosen = null; // [row, column]
    canvas.width = wide;
    canvas.height = high;
    canvas.style.height = `${high * Math.max(4, Math.min(18, 480 / high))}px`;

    const value = (row, column) => cells[(slider.value * high + row) * wide + column] / map.unit;
    const words = (row, column) => {
      const most = value(row, column) >= 255 / map.unit ? " or more" : "";
      return `${map.row} ${map.rows[row]}, ${map.column} ${column}: `
        + `${value(row, column).toFixed(2)} times the mean${most}`;
    };

    const draw = () => {
      const [less, more] = [colour("--c0"), colour("--c1")];
      const image = new ImageData(wide, high);
      for (let row = 0; row < high; row += 1) {
        for (let column = 0; column < wide; column += 1) {
          const ratio = value(row, column);
          const strength = ratio > 1 ? Math.min(1, Math.log2(ratio) / 2) : 1 - ratio;
          const at = 4 * (row * wide + column);
          image.data.set([...(ratio > 1 ? more : less), Math.round(255 * strength)], at);
        }
      }
      canvas.getContext("2d").putImageData(image, 0, 0);
      output.textContent = map.steps[slider.value].toLocaleString("en");
      slider.setAttribute("aria-valuetext", `step ${output.textContent}`);
      tell();
    };

    const tell = () => {
      frame.style.display = chosen ? "block" : "none";
      said.textContent = chosen ? words(...chosen) : "Point at a cell, or use the arrow keys.";
      canvas.title = chosen ? said.textContent : "";
      if (!chosen) return;
      const [row, column] = chosen;
      Object.assign(frame.style, {
        left: `${100 * column / wide}%`, width: `${100 / wide}%`,
        top: `${100 * row / high}%`, height: `${100 / high}%`,
      });
    };

    const choose = (row, column) => {
      const within = (number, end) => Math.max(0, Math.min(end - 1, number));
      chosen = [within(row, high), within(column, wide)];
      tell();
    };

    canvas.addEventListener("pointermove", (event) => {
      const box = canvas.getBoundingClientRect();
      choose(Math.floor((event.clientY - box.top) / box.height * high),
        Math.floor((event.clientX - box.left) / box.width * wide));
    });
    canvas.addEventListener("keydown", (event) => {
      const move = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };
      if (!(event.key in move)) return;
      event.preventDefault();
      const [row, column] = chosen || [0, 0];
      const [down, right] = chosen ? move[event.key] : [0, 0];
      choose(row + down, column + right);
    });
    slider.addEventListener("input", draw);
    draw();
    redraw.push(draw);
  };

  const built = new WeakSet();
  const buildNew = () => document.querySelectorAll("figure.heat").forEach((each) => {
    if (built.has(each)) return;
    built.add(each);
    build(each);
  });
  buildNew();
  document.addEventListener("grown", buildNew); // by a page that a server lets grow
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
    redraw.forEach((draw) => draw());
  });
})();
