"""How the page looks, in light and in dark."""

STYLE = """
:root {
  color-scheme: light dark;
  --paper: #ffffff; --card: #f7f8fa; --ink: #1b2330; --soft: #5b6675; --rule: #dfe3e8; --grid: #e6e9ee;
  --good: #12805c; --bad: #c0362c; --doubt: #9a6700;
  --c0: #2160d8; --c1: #d5670a; --c2: #7a3fd0; --c3: #0e8a6d; --c4: #b3256e; --c5: #6b7280;
}
@media (prefers-color-scheme: dark) {
  :root {
    --paper: #12161c; --card: #1a2029; --ink: #e6eaf0; --soft: #9aa6b5; --rule: #2d3541; --grid: #29313c;
    --good: #4cc38a; --bad: #f2796f; --doubt: #e0b040;
    --c0: #6ea8ff; --c1: #f6a04d; --c2: #b794f6; --c3: #4fd1b0; --c4: #f387bd; --c5: #a3adba;
  }
}
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 1180px; padding: 32px 24px 64px; background: var(--paper); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", sans-serif; }
h1 { font-size: 28px; margin: 0 0 4px; }
h2 { font-size: 20px; margin: 48px 0 12px; padding-top: 16px; border-top: 1px solid var(--rule); }
p { margin: 8px 0; }
.soft { color: var(--soft); }
.banner { margin: 16px 0; padding: 10px 14px; border-left: 4px solid var(--doubt); background: var(--card); }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: 14px; min-width: 60%; }
th, td { padding: 4px 14px 4px 0; text-align: left; vertical-align: top; border-bottom: 1px solid var(--rule); }
th { color: var(--soft); font-weight: 600; white-space: nowrap; }
td.number, th.number { text-align: right; white-space: nowrap; }
.met { color: var(--good); font-weight: 600; } .not { color: var(--bad); font-weight: 600; }
.noise { color: var(--doubt); font-weight: 600; }
.plots { display: grid; gap: 16px; margin: 20px 0;
  grid-template-columns: repeat(auto-fill, minmax(min(100%, 480px), 1fr)); }
figure { margin: 0; padding: 12px 12px 6px; background: var(--card); border: 1px solid var(--rule);
  border-radius: 8px; }
figure.wide { max-width: 920px; margin: 20px 0; }
figcaption { font-weight: 600; margin: 0 4px 2px; }
.legend { display: flex; flex-wrap: wrap; gap: 2px 16px; margin: 0 4px 4px; color: var(--soft); font-size: 13px; }
.legend i { display: inline-block; width: 14px; height: 3px; border-radius: 2px; margin-right: 6px;
  vertical-align: middle; }
ul.notes { margin: 10px 0; padding-left: 18px; color: var(--soft); font-size: 14px; }
nav { display: flex; flex-wrap: wrap; gap: 4px 16px; margin: 16px 0 0; }
a { color: var(--c0); }
svg { display: block; width: 100%; height: auto; }
svg text { fill: var(--soft); font-size: 12px; } svg .name, svg .value { fill: var(--ink); }
svg .label { font-size: 12.5px; }
svg .grid { stroke: var(--grid); } svg .axis { stroke: var(--soft); }
svg .reference { stroke: var(--soft); stroke-dasharray: 4 3; }
svg .line { fill: none; stroke-width: 2; stroke-linejoin: round; }
svg .whisker { stroke-width: 2.5; stroke-linecap: round; }
svg .dot { stroke: none; fill-opacity: 0.75; }
""" + "\n".join(
    f".legend i.s{n} {{ background: var(--c{n}); }} svg .s{n} {{ stroke: var(--c{n}); }} "
    f"svg .dot.s{n} {{ stroke: none; fill: var(--c{n}); }}"
    for n in range(6)
)
