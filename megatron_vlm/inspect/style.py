"""The look of the page: one column, light or dark as the reader's system is, two widths."""

CSS = """
:root {
  color-scheme: light dark;
  --paper: #f7f6f3; --card: #ffffff; --ink: #24272c; --quiet: #6a6f78; --line: #e4e1da;
  --trained: #ffedb3; --edge: #d9a400; --bar: #6b8cae; --alarm: #b3402a; --chip: #eef1f5;
}
@media (prefers-color-scheme: dark) {
  :root {
    --paper: #15171b; --card: #1d2026; --ink: #dfe2e7; --quiet: #969ca6; --line: #31353d;
    --trained: #574615; --edge: #d9a400; --bar: #7b9cc0; --alarm: #ee8a72; --chip: #282d35;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0 auto; padding: 2.5rem 1.5rem 4rem; max-width: 66rem; background: var(--paper);
  color: var(--ink); font: 16px/1.55 system-ui, "Segoe UI", Roboto, "Noto Sans", sans-serif;
}
h1 { font-size: 1.6rem; font-weight: 650; margin: 0 0 .25rem; }
h2 { font-size: 1.15rem; font-weight: 650; margin: 2.75rem 0 .9rem; }
p { margin: .3rem 0; }
nav { margin: .6rem 0 1.5rem; }
nav a { color: inherit; margin-right: 1rem; text-underline-offset: .2em; }
.quiet, figcaption, caption, th { color: var(--quiet); }
.quiet, nav { font-size: .875rem; overflow-wrap: anywhere; }
.alarm { color: var(--alarm); overflow-wrap: anywhere; }
.card {
  background: var(--card); border: 1px solid var(--line); border-radius: 8px;
  padding: 1rem 1.25rem; margin: 0 0 1.25rem;
}
.tiles { display: grid; gap: .75rem; grid-template-columns: repeat(auto-fit, minmax(8rem, 1fr)); }
.tiles .card { margin: 0; padding: .7rem 1rem; }
.tiles b { display: block; font-size: 1.35rem; font-weight: 600; line-height: 1.3; }
.charts {
  display: grid; gap: 1.25rem; margin: 0 0 1.25rem;
  grid-template-columns: repeat(auto-fit, minmax(17rem, 1fr));
}
.charts .card { margin: 0; padding: .8rem 1rem .5rem; }
svg { display: block; width: 100%; height: auto; }
svg rect { fill: var(--bar); }
svg line { stroke: var(--line); }
svg text { fill: var(--quiet); font-size: 11px; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: .9rem; }
caption { caption-side: bottom; text-align: left; font-size: .85rem; padding-top: .6rem; }
th { font-weight: 500; font-size: .85rem; vertical-align: bottom; }
th, td {
  text-align: right; padding: .35rem 0 .35rem 1rem; border-bottom: 1px solid var(--line);
  font-variant-numeric: tabular-nums;
}
th:first-child, td:first-child {
  text-align: left; padding-left: 0; min-width: 7rem; overflow-wrap: anywhere;
}
tr:last-child td { border-bottom: 0; }
ol.alarm { margin: 0; padding-left: 1.6rem; font-size: .9rem; }
.sample h3 { font-size: 1rem; font-weight: 600; margin: 0; overflow-wrap: anywhere; }
.turn {
  display: grid; grid-template-columns: 6rem minmax(0, 1fr); gap: 1rem;
  border-top: 1px solid var(--line); margin-top: .8rem; padding-top: .8rem;
}
.role { color: var(--quiet); font-size: .875rem; line-height: 1.7; overflow-wrap: anywhere; }
.said { white-space: pre-wrap; overflow-wrap: anywhere; unicode-bidi: isolate; }
mark {
  background: var(--trained); color: inherit; border-bottom: 1px solid var(--edge);
  -webkit-box-decoration-break: clone; box-decoration-break: clone; padding: .1em 0;
}
.special { color: var(--quiet); font: .75rem ui-monospace, "DejaVu Sans Mono", monospace; }
mark .special { color: inherit; opacity: .7; }
.newline::before { content: "\\21b5"; opacity: .6; }
.chip {
  display: inline-block; max-width: 100%; white-space: normal; line-height: 1.5;
  background: var(--chip); border-radius: 4px; padding: .1em .4em; font-size: .8rem;
  color: var(--quiet);
}
.gallery { display: flex; flex-wrap: wrap; gap: .9rem 1.1rem; margin-top: .8rem; }
figure { margin: 0; max-width: 100%; width: fit-content; min-width: 10rem; }
figure div { display: flex; gap: 3px; }
figure span { position: relative; display: block; line-height: 0; }
/* Each cell is what one token sees. */
figure span:hover::after {
  content: ""; position: absolute; inset: 0; background-size: var(--cell);
  background-image: linear-gradient(90deg, #fffc 1px, #0006 1px 2px, #0000 2px),
    linear-gradient(#fffc 1px, #0006 1px 2px, #0000 2px);
}
img { max-width: 100%; height: auto; border-radius: 3px; }
figcaption {
  font-size: .8rem; line-height: 1.4; margin-top: .3rem; overflow-wrap: anywhere;
  width: 0; min-width: 100%; /* as wide as its pictures, never wider */
}
.legend { display: flex; flex-wrap: wrap; gap: .4rem 1.5rem; margin: 0 0 1rem; }
@media (max-width: 640px) {
  body { padding: 1.5rem .9rem 3rem; }
  .card { padding: .8rem .9rem; }
  .turn { grid-template-columns: minmax(0, 1fr); gap: .2rem; }
  table { font-size: .82rem; }
  th { font-size: .78rem; }
  th, td { padding-left: .45rem; }
  th:first-child, td:first-child { min-width: 4.5rem; }
}
"""
