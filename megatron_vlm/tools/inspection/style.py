"""The look of an inspection, behind what all pages share."""

CSS = """
:root { --trained: #ffedb3; --edge: #d9a400; --chip: #eef1f5; }
@media (prefers-color-scheme: dark) {
  :root { --trained: #574615; --chip: #282d35; }
}
svg { display: block; width: 100%; height: auto; }
svg rect { fill: var(--bar); }
svg line { stroke: var(--line); }
svg text { fill: var(--quiet); font-size: 11px; }
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
figcaption {
  font-size: .8rem; line-height: 1.4; margin-top: .3rem; overflow-wrap: anywhere;
  width: 0; min-width: 100%; /* as wide as its pictures, never wider */
}
.legend { display: flex; flex-wrap: wrap; gap: .4rem 1.5rem; margin: 0 0 1rem; }
@media (max-width: 640px) {
  .turn { grid-template-columns: minmax(0, 1fr); gap: .2rem; }
}
"""
