// Lets a page grow with its run: every five seconds it asks for the elements that it lacks. Elements
// that are still the same stay, with what their reader has opened; charts get the newer data.
"use strict";
(() => {
  const [main, header] = ["main", "header"].map((name) => document.querySelector(name));
  const { address } = main.dataset;
  let elements = new Map(main.dataset.keys.split(" ").map((key, i) => [key, main.children[i]]));
  let isBusy = false;
  let timer = 0;

  const parse = (html) => Object.assign(document.createElement("template"), { innerHTML: html })
    .content.firstElementChild;
  const chartsOf = (root) => [...root.querySelectorAll("figure.chart:has(.plot)")];
  const dataOf = (figure) => JSON.parse(figure.querySelector("script").textContent);
  const nameOf = (details) => details.querySelector("b").textContent;
  const detailsIn = (roots) => roots.flatMap((root) => [
    ...(root.matches("details") ? [root] : []), ...root.querySelectorAll("details")]);

  // What must be the same for charts to take newer data: their names, curves and kinds of marks.
  const signature = (root) => JSON.stringify([...root.querySelectorAll("figure")].map((figure) => {
    const { curves, marks } = figure.querySelector(".plot") ? dataOf(figure) : { curves: [], marks: [] };
    return [nameOf(figure), curves.map(({ name, colour, dash, dots }) => [name, colour, dash, dots]),
      marks.filter(({ x }) => x.length).map(({ kind }) => kind)];
  }));

  const renew = (old, fresh) => {
    const [figures, newer] = [chartsOf(old), chartsOf(fresh)];
    figures.forEach((figure, i) => {
      const label = newer[i].querySelector(".plot").getAttribute("aria-label");
      figure.querySelector(".plot").setAttribute("aria-label", label);
      const caption = newer[i].querySelector("figcaption");
      if (caption) figure.querySelector("figcaption").textContent = caption.textContent;
      figure.dispatchEvent(new CustomEvent("drawn", { detail: dataOf(newer[i]) }));
    });
  };

  const put = (wanted) => {
    const stays = new Set(wanted);
    [...main.children].forEach((child) => stays.has(child) || child.remove());
    let next = main.firstElementChild;
    for (const child of wanted) {
      if (child === next) next = next.nextElementSibling;
      else main.insertBefore(child, next);
    }
  };

  const update = ({ status, parts }) => {
    if (status) header.querySelector(".status").replaceWith(parse(status));
    const keys = new Set(parts.map(([key]) => key));
    const gone = [...elements].filter(([key]) => !keys.has(key)).map(([, element]) => element);
    const [opened, renewed] = [[], []];
    const wanted = new Map(parts.map(([key, html]) => {
      if (html === null) return [key, elements.get(key)];
      const fresh = parse(html);
      const old = chartsOf(fresh).length
        && gone.find((each) => chartsOf(each).length && signature(each) === signature(fresh));
      if (!old) {
        opened.push(fresh);
        return [key, fresh];
      }
      gone.splice(gone.indexOf(old), 1);
      renewed.push([old, fresh]);
      return [key, old];
    }));
    const before = new Map(detailsIn(gone).map((each) => [nameOf(each), each.open]));
    detailsIn(opened).forEach((each) => { each.open = before.get(nameOf(each)) ?? each.open; });
    elements = wanted;
    put([...wanted.values()]);
    document.dispatchEvent(new Event("grown"));
    renewed.forEach((pair) => renew(...pair));
  };

  const fetched = async () => {
    try {
      const answer = await fetch(`/parts${address}?have=${[...elements.keys()]}`);
      return answer.ok ? await answer.json() : { said: await answer.text() };
    } catch {
      return { said: "The server does not answer." };
    }
  };

  const ask = async () => {
    if (document.hidden || isBusy) return; // a page in the background asks for nothing
    isBusy = true;
    const began = performance.now();
    const got = await fetched();
    const { said = "" } = got;
    Object.assign(header.querySelector(".lost"), { textContent: said, hidden: !said });
    try {
      if (!said) update(got);
    } finally {
      isBusy = false;
      clearTimeout(timer);
      timer = setTimeout(ask, Math.max(5000, 10 * (performance.now() - began)));
    }
  };

  document.addEventListener("visibilitychange", ask);
  timer = setTimeout(ask, 5000);
})();
