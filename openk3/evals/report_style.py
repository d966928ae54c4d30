"""The report page's style sheet: one column on a phone, light and dark from the reader's own setting."""

STYLE = """
:root{--bg:#fbfbfa;--card:#fff;--ink:#1d2328;--soft:#5d6870;--rule:#dfe3e6;--c1:#1f6fb4;--c2:#c4551a;--c3:#3a8a3f;
--good:#23803a;--bad:#b3372b}
@media(prefers-color-scheme:dark){:root{--bg:#14181b;--card:#1c2226;--ink:#e6eaed;--soft:#9aa6ae;--rule:#323b41;
--c1:#6db3ef;--c2:#f0985c;--c3:#7fcb84;--good:#6cc985;--bad:#f0857a}}
*{box-sizing:border-box}
body{margin:0;background:var(--bg);color:var(--ink);font:16px/1.5 system-ui,-apple-system,"Segoe UI",sans-serif}
header,main{max-width:1080px;margin:0 auto;padding:0 16px}
h1{font-size:1.5rem;margin:24px 0 4px}h2{font-size:1.15rem;margin:32px 0 8px}
header p,small,figcaption+svg+small{color:var(--soft)}header p{margin:0}
section>p{color:var(--soft);margin:0 0 12px;max-width:70ch}
.grid{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,340px),1fr));gap:16px;align-items:start}
figure,.wide,.tile,.card{margin:0;background:var(--card);border:1px solid var(--rule);border-radius:8px;padding:12px}
figcaption{font-weight:600;margin-bottom:4px}
small{display:block;font-size:.82rem;line-height:1.4}
svg{display:block;width:100%;height:auto;max-width:620px}
svg text{fill:var(--soft);font:11px system-ui,sans-serif}
svg .grid{stroke:var(--rule);stroke-width:1}
.line{fill:none;stroke-width:2;stroke-linejoin:round}
.level{stroke:var(--soft);stroke-width:1;stroke-dasharray:4 4}
.range{stroke:var(--c1);stroke-width:6;stroke-linecap:round;stroke-opacity:.45}
.cell{fill:var(--c1);stroke:var(--rule);stroke-width:.5}
.line.c1{stroke:var(--c1)}.line.c2{stroke:var(--c2)}.line.c3{stroke:var(--c3)}
.dot.c1{fill:var(--c1)}.dot.c2{fill:var(--c2)}.dot.c3{fill:var(--c3)}
.tiles{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(46%,165px),1fr));gap:12px;margin-top:16px}
.tile{border-left:4px solid var(--good)}.tile.missed{border-left-color:var(--bad)}
.tile b{display:block;font-size:1.35rem;line-height:1.2}.tile span{display:block;font-size:.9rem}
.tile small{color:var(--good)}.tile.missed small{color:var(--bad)}
.cards{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(46%,200px),1fr));gap:12px;margin-top:12px}
.card img{image-rendering:pixelated;height:84px;max-width:48%;object-fit:contain;border:1px solid var(--rule)}
.card .pair{display:flex;gap:6px;margin-bottom:6px}
.card code{display:block;font-size:.75rem;overflow-wrap:anywhere;color:var(--soft)}
.card code.same{color:var(--good)}.card code.other{color:var(--bad)}
.wide{overflow-x:auto}
table{border-collapse:collapse;width:100%;font-size:.88rem}
th,td{text-align:left;padding:4px 8px;border-bottom:1px solid var(--rule);white-space:nowrap}
td:not(:first-child),th:not(:first-child){text-align:right;font-variant-numeric:tabular-nums}
tbody tr:last-child td{border-bottom:0}
pre{background:var(--card);border:1px solid var(--rule);border-radius:8px;padding:12px;overflow:auto;font-size:.8rem;
line-height:1.45;margin:0;max-height:320px}
.grid pre{min-width:0}
.prompt{color:var(--soft)}
main{padding-bottom:48px}
"""
