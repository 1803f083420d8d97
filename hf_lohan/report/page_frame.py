"""The frame of the page: its style, light and dark, on a screen and on paper."""

from string import Template

PAGE = Template("""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>$title</title>
<style>
:root {
  --text: #1d2430; --muted: #5d6775; --grid: #dde1e7; --card: #ffffff; --page: #f4f5f7; --warn: #8a5a00;
  --warn-back: #fff6e2;
  --font: system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", "DejaVu Sans", sans-serif;
  color-scheme: light dark;
}
@media (prefers-color-scheme: dark) {
  :root {
    --text: #e6e9ee; --muted: #a2abb8; --grid: #363d49; --card: #1c2129; --page: #13171d; --warn: #f0c46c;
    --warn-back: #33290f;
  }
}
* { box-sizing: border-box; }
body { margin: 0; padding: 2rem 1rem; background: var(--page); color: var(--text); font: 15px/1.5 var(--font); }
main { max-width: 1080px; margin: 0 auto; }
h1 { font-size: 1.7rem; line-height: 1.2; margin: 0; }
h2 { font-size: 1.05rem; margin: 0 0 .25rem; }
.subtitle { color: var(--muted); margin: .3rem 0 1.2rem; }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(155px, 1fr)); gap: .75rem; margin-bottom: 1rem; }
.card, section { background: var(--card); border: 1px solid var(--grid); border-radius: 8px; }
.card { padding: .7rem .9rem; }
.label, .beside { color: var(--muted); font-size: .82rem; }
.figure { font-size: 1.3rem; font-weight: 600; line-height: 1.3; }
.warnings { background: var(--warn-back); color: var(--warn); border-radius: 8px; margin: 0 0 1rem; }
.warnings { padding: .7rem 1rem .7rem 2rem; }
.warnings:empty { display: none; }
section { padding: 1rem 1.2rem; margin-bottom: 1rem; break-inside: avoid; }
section p { margin: 0 0 .7rem; color: var(--muted); max-width: 78ch; }
.pair { display: grid; grid-template-columns: repeat(2, minmax(0, 1fr)); gap: 1rem; }
svg { display: block; width: 100%; height: auto; }
table { border-collapse: collapse; width: 100%; font-size: .88rem; }
th, td { text-align: left; padding: .28rem .5rem .28rem 0; border-top: 1px solid var(--grid); vertical-align: top; }
tr:first-child > * { border-top: 0; }
th { color: var(--muted); font-weight: 500; }
td { overflow-wrap: anywhere; }
.figures th:not(:first-child), .figures td:not(:first-child) { text-align: right; font-variant-numeric: tabular-nums; }
.facts td:first-child { color: var(--muted); white-space: nowrap; }
footer { color: var(--muted); font-size: .8rem; }
@media screen and (max-width: 760px) { .pair { grid-template-columns: 1fr; } }
@media print {
  :root { --text: #000; --muted: #444; --grid: #ccc; --card: #fff; --page: #fff; --warn: #5c3c00; --warn-back: #fff; }
  html { font-size: 11px; }
  body { padding: 0; font-size: 11px; -webkit-print-color-adjust: exact; print-color-adjust: exact; }
  .warnings { border: 1px solid var(--warn); }
  .cards { grid-template-columns: repeat(6, 1fr); gap: .4rem; }
  .card { padding: .4rem .5rem; }
  section { padding: .6rem .8rem; margin-bottom: .6rem; }
  .pair { gap: .6rem; break-inside: avoid; }
}
</style>
</head>
<body>
<main>
<h1>$heading</h1>
<p class="subtitle">$subtitle</p>
<div class="cards">$cards</div>
<ul class="warnings">$warnings</ul>
$sections
<footer>Figures are medians or means over the steps after the first few, which are watched and planned. Written by
lohan report.</footer>
</main>
</body>
</html>
""")
