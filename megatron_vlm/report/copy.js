// Copies words on a press of their button, and tells the box of a pipeline under the pointer.
"use strict";
(() => {
  // A page from disk may lack navigator.clipboard, but may copy what is selected.
  const copy = async (code) => {
    try {
      await navigator.clipboard.writeText(code.textContent);
    } catch {
      getSelection().selectAllChildren(code);
      document.execCommand("copy");
      getSelection().removeAllRanges();
    }
  };

  const build = (copied) => {
    const button = copied.querySelector("button");
    button.hidden = false;
    button.addEventListener("click", async () => {
      await copy(copied.querySelector("code"));
      button.textContent = "copied";
      setTimeout(() => { button.textContent = "copy"; }, 1500);
    });
  };
  const buildNew = () => document.querySelectorAll(".copied:has(button[hidden])").forEach(build);
  buildNew();
  document.addEventListener("grown", buildNew); // by a page that a server lets grow

  document.querySelectorAll("svg.timeline").forEach((timeline) => {
    const told = timeline.parentElement.querySelector(".told");
    const empty = "Point at a box to read its times.";
    told.textContent = empty;
    const tell = (event) => {
      const title = event.target.closest("g")?.querySelector("title");
      told.textContent = title ? title.textContent : empty;
    };
    ["pointerover", "pointerdown"].forEach((name) => timeline.addEventListener(name, tell));
    timeline.addEventListener("pointerleave", () => { told.textContent = empty; });
  });
})();
