// Shows cards a few at a time, and finds those of a kind or with a text.
"use strict";
(() => {
  const make = (name, known) => Object.assign(document.createElement(name), known);

  const build = (paged) => {
    const cards = [...paged.querySelectorAll(":scope > .cards > div")];
    const size = Number(paged.dataset.size);
    const texts = cards.map((card) => card.textContent.toLowerCase());
    const kinds = [...new Set(cards.map((card) => card.dataset.kind).filter(Boolean))];
    let [kind, first] = ["", 0];
    const search = make("input", { type: "search", placeholder: "search", ariaLabel: "search the cards" });
    const count = make("output", {});
    const [back, next] = ["previous", "next"].map((text) => make("button", { textContent: text }));

    const show = () => {
      const wanted = search.value.trim().toLowerCase();
      const found = cards.filter((card, i) => (!kind || card.dataset.kind === kind)
        && (!wanted || texts[i].includes(wanted)));
      first = Math.max(0, Math.min(first, Math.floor((found.length - 1) / size) * size));
      const shown = new Set(found.slice(first, first + size));
      cards.forEach((card) => { card.hidden = !shown.has(card); });
      const last = Math.min(first + size, found.length);
      count.textContent = found.length ? `${first + 1} to ${last} of ${found.length}` : "none";
      back.disabled = first === 0;
      next.disabled = last >= found.length;
    };

    const move = (by) => () => {
      first += by * size;
      show();
      if (bar.getBoundingClientRect().top < 0) bar.scrollIntoView();
    };
    const buttons = (kinds.length > 1 ? ["", ...kinds] : []).map((name) => {
      const number = cards.filter((card) => !name || card.dataset.kind === name).length;
      const button = make("button", { textContent: `${name || "all"} (${number})` });
      button.setAttribute("aria-pressed", String(!name));
      button.addEventListener("click", () => {
        [kind, first] = [name, 0];
        buttons.forEach((each) => each.setAttribute("aria-pressed", String(each === button)));
        show();
      });
      return button;
    });
    search.addEventListener("input", () => { first = 0; show(); });
    back.addEventListener("click", move(-1));
    next.addEventListener("click", move(1));
    const bar = make("div", { className: "pager quiet" });
    bar.append(...buttons, search, back, next, count);
    if (cards.length > 1) paged.prepend(bar);
    show();
  };

  const built = new WeakSet();
  const buildNew = () => document.querySelectorAll(".paged").forEach((each) => {
    if (built.has(each)) return;
    built.add(each);
    build(each);
  });
  buildNew();
  document.addEventListener("grown", buildNew); // by a page that a server lets grow
})();
