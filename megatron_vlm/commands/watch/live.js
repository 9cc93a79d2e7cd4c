// Lets a page grow with its run: new points go to the charts, and what else has changed is fetched
// and put in place. Elements that are still the same stay, with what their reader has opened.
"use strict";
(() => {
  const [main, header] = ["main", "header"].map((name) => document.querySelector(name));
  const { address } = main.dataset;
  const sources = new WeakMap(); // the markup of an element before scripts have changed it
  let { place } = main.dataset;
  let events = null;
  let isDue = false;
  let early = null; // points that came while the page was fetched

  const chartsOf = (root) => [...root.querySelectorAll("figure.chart:has(.plot)")];
  const titleOf = (figure) => figure.querySelector("b").textContent;
  const dataOf = (figure) => JSON.parse(figure.querySelector("script").textContent);

  // A chart is drawn on if it has the same curves and marks as before.
  const signature = (figure) => {
    const { curves, marks } = dataOf(figure);
    return JSON.stringify([titleOf(figure),
      curves.map(({ name, colour, dash, dots }) => [name, colour, dash, dots]),
      marks.filter(({ x }) => x.length).map(({ kind }) => kind)]);
  };

  const remember = (root) => {
    for (const child of root.children) sources.set(child, child.outerHTML);
    for (const figure of chartsOf(root)) sources.set(figure, signature(figure));
  };

  const keepCharts = (fresh) => {
    const known = new Map(chartsOf(main).map((figure) => [sources.get(figure), figure]));
    return chartsOf(fresh).flatMap((figure) => {
      const old = known.get(signature(figure));
      if (!old) return [];
      known.delete(signature(figure));
      return [[figure, old, dataOf(figure)]];
    });
  };

  // The fresh elements, each replaced by an old one that is the same.
  const merge = (fresh, kept) => {
    const unused = new Set(main.children);
    const replaced = new Map(kept.map(([figure, old]) => [figure, old]));
    return [...fresh.children].map((child) => {
      const charts = chartsOf(child);
      const same = [...unused].find((old) => (charts.length
        ? old.tagName === child.tagName && chartsOf(old).length === charts.length
          && old.querySelectorAll("figure").length === child.querySelectorAll("figure").length
          && chartsOf(old).every((figure, i) => replaced.get(charts[i]) === figure)
        : sources.get(old) === sources.get(child)));
      if (same) {
        unused.delete(same);
        return same;
      }
      charts.forEach((figure) => replaced.has(figure) && figure.replaceWith(replaced.get(figure)));
      return child;
    });
  };

  const putInPlace = (wanted) => {
    const stays = new Set(wanted);
    [...main.children].forEach((child) => stays.has(child) || child.remove());
    let next = main.firstElementChild;
    for (const child of wanted) {
      if (child === next) next = next.nextElementSibling;
      else main.insertBefore(child, next);
    }
  };

  const refresh = async () => {
    isDue = early !== null; // after the one that is on its way
    if (isDue) return;
    early = [];
    try {
      const answer = await fetch(`/parts${address}`);
      if (!answer.ok) return;
      const got = await answer.json();
      const { content } = Object.assign(document.createElement("template"), { innerHTML: got.body });
      const open = new Set([...main.querySelectorAll("details")].filter((each) => each.open)
        .map((each) => each.querySelector("b").textContent));
      const closed = new Set([...main.querySelectorAll("details:not([open]) > summary > b")]
        .map((each) => each.textContent));
      remember(content);
      const kept = keepCharts(content);
      const captions = kept.map(([figure, old]) => [old, figure.querySelector("figcaption"),
        figure.querySelector(".plot").getAttribute("aria-label")]);
      putInPlace(merge(content, kept));
      for (const each of main.querySelectorAll("details")) {
        const name = each.querySelector("b").textContent;
        each.open = open.has(name) || (each.open && !closed.has(name));
      }
      for (const [old, caption, label] of captions) {
        if (caption) old.querySelector("figcaption").textContent = caption.textContent;
        old.querySelector(".plot").setAttribute("aria-label", label);
      }
      document.dispatchEvent(new Event("grown"));
      kept.forEach(([, old, data]) => old.dispatchEvent(new CustomEvent("drawn", { detail: data })));
      if (got.place) place = got.place;
    } catch {
      return; // the server is gone; its events tell when it is back
    } finally {
      const late = early;
      early = null;
      late.forEach(grow);
      if (isDue) refresh();
    }
  };

  const grow = ({ charts, axes }) => {
    if (early) {
      early.push({ charts, axes });
      return;
    }
    document.dispatchEvent(new CustomEvent("axes", { detail: axes }));
    const figures = chartsOf(main);
    for (const { title, curves, is_drawn: isDrawn } of charts) {
      const found = figures.filter((figure) => titleOf(figure) === title);
      found.forEach((figure) => figure.dispatchEvent(new CustomEvent("points", { detail: curves })));
      if (!found.length && isDrawn) refresh();
    }
  };

  const tell = ({ html, acts }) => {
    const { content } = Object.assign(document.createElement("template"), { innerHTML: html });
    header.querySelector(".status").replaceWith(content);
    header.querySelectorAll("[data-act]").forEach((button) => {
      button.hidden = !acts.includes(button.dataset.act);
      button.disabled = false;
    });
  };

  const listen = () => {
    events = new EventSource(`/events${address}?after=${encodeURIComponent(place || "")}`);
    const take = (name, act) => events.addEventListener(name, (event) => {
      if (event.lastEventId) place = event.lastEventId;
      act(JSON.parse(event.data));
    });
    const lost = header.querySelector(".lost");
    take("status", tell);
    take("points", grow);
    take("refresh", refresh);
    take("gone", () => {
      events.close();
      Object.assign(lost, { hidden: false, textContent: "The folder of this run is gone." });
    });
    events.addEventListener("open", () => { lost.hidden = true; });
    events.addEventListener("error", () => { lost.hidden = false; });
  };

  // The token comes after # in the address, which no server sees, and stays with this tab.
  const token = () => {
    const [, given] = /^#token=(.+)$/.exec(location.hash) || [];
    if (given) {
      sessionStorage.setItem("token", decodeURIComponent(given));
      history.replaceState(null, "", location.pathname);
    }
    return sessionStorage.getItem("token");
  };

  const control = () => {
    const said = header.querySelector("output");
    header.querySelectorAll("[data-act]").forEach((button) => {
      button.addEventListener("click", async () => {
        if (!token()) {
          const given = prompt("The token of megatron-vlm watch --control:");
          if (!given) return;
          sessionStorage.setItem("token", given.trim());
        }
        button.disabled = true;
        const { act } = button.dataset;
        try {
          const known = { method: "POST", headers: { Authorization: `Bearer ${token()}` } };
          const answer = await fetch(`/${act}${address}`, known);
          said.textContent = (await answer.json()).said;
          if (answer.status === 403) sessionStorage.removeItem("token");
          button.disabled = answer.ok;
        } catch {
          said.textContent = "The server does not answer.";
          button.disabled = false;
        }
      });
    });
  };

  remember(main);
  token();
  control();
  addEventListener("DOMContentLoaded", listen);
  // A page in the background asks for nothing, and catches up when it is seen again.
  document.addEventListener("visibilitychange", () => {
    if (document.hidden) events.close();
    else if (events.readyState === EventSource.CLOSED) listen();
  });
})();
