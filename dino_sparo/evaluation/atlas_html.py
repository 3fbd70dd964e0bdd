"""Slot atlas -> one HTML page that opens from disk: pictures inside it, nothing loaded from elsewhere.

`atlas.py` computes the atlas. The page works without JavaScript (by peakedness, maps shown); with it the slots can be
sorted and every picture switched between the image and the slot's map on it.
"""

import base64
import io
from html import escape
from pathlib import Path
from string import Template

import numpy as np
from jaxtyping import UInt8
from PIL import Image

from dino_sparo.evaluation.atlas import SCORE_WORDS, Atlas, AtlasImage, AtlasSlot, patches_in_words
from dino_sparo.evaluation.attention import RAMP_COLOURS, RAMP_POSITIONS
from dino_sparo.evaluation.names import short_name
from dino_sparo.evaluation.page import RAMP_ENDS
from dino_sparo.runtime.logs import printable

JPEG_QUALITY = 84

STYLE = """
:root { color-scheme: light dark; --paper: #fafafc; --card: #fff; --ink: #16161d; --soft: #5f5f6b; --line: #e4e3ec;
  --accent: #6a3fb5; --chip-light: 90%; --chip-ink: 28%; }
@media (prefers-color-scheme: dark) { :root { --paper: #121217; --card: #1b1b22; --ink: #eeeef4; --soft: #a3a3b2;
  --line: #2d2d38; --accent: #b79bf2; --chip-light: 24%; --chip-ink: 84%; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink); font: 15px/1.5 system-ui, sans-serif; }
header, main, footer { max-width: 1500px; margin: 0 auto; padding: 0 28px; }
h1 { margin: 36px 0 4px; font-size: 30px; line-height: 1.2; letter-spacing: -0.01em; }
p { margin: 0; color: var(--soft); }
details { margin-top: 8px; color: var(--soft); max-width: 80ch; }
summary { cursor: pointer; }
.ramp { margin-top: 10px; display: flex; gap: 10px; align-items: center; font-size: 13px; }
.ramp i { width: 150px; height: 10px; border-radius: 3px; }
nav { display: none; position: sticky; top: 0; z-index: 1; margin-top: 20px; border-bottom: 1px solid var(--line);
  background: var(--paper); }
.js nav { display: block; }
nav div { max-width: 1500px; margin: 0 auto; padding: 10px 28px; display: flex; flex-wrap: wrap; gap: 8px 26px;
  align-items: center; }
fieldset { border: 0; margin: 0; padding: 0; display: flex; align-items: center; }
legend { float: left; margin-right: 10px; color: var(--soft); padding: 0; }
.segments { display: flex; border: 1px solid var(--line); border-radius: 9px; overflow: hidden;
  background: var(--card); }
.segments label { padding: 4px 14px; cursor: pointer; }
.segments label + label { border-left: 1px solid var(--line); }
.segments input { position: absolute; opacity: 0; }
.segments label:has(:checked) { background: var(--accent); color: var(--paper); }
.segments label:has(:focus-visible) { outline: 2px solid var(--accent); outline-offset: -4px; }
.check { display: flex; gap: 7px; align-items: center; cursor: pointer; }
.check input { accent-color: var(--accent); width: 16px; height: 16px; margin: 0; }
output { margin-left: auto; color: var(--soft); font-variant-numeric: tabular-nums; }
main { padding-top: 18px; padding-bottom: 40px; display: grid; gap: 14px; }
section { display: grid; grid-template-columns: 124px 1fr; gap: 18px; padding: 14px 16px; background: var(--card);
  border: 1px solid var(--line); border-radius: 14px; content-visibility: auto; contain-intrinsic-size: auto 175px; }
section[hidden] { display: none; }
h2 { margin: 0 0 6px; font-size: 19px; line-height: 1.2; }
dl { margin: 0; font-size: 13px; color: var(--soft); display: grid; gap: 1px; }
dl div { display: flex; gap: 5px; }
dt { order: 2; } dd { margin: 0; font-variant-numeric: tabular-nums; color: var(--ink); }
.chip { display: inline-block; margin-top: 8px; padding: 1px 10px; border-radius: 99px; font-size: 13px;
  background: hsl(var(--hue) 60% var(--chip-light)); color: hsl(var(--hue) 65% var(--chip-ink)); }
.shots { display: grid; grid-template-columns: repeat(var(--count), minmax(0, 1fr)); gap: 8px; align-items: start; }
.shot { position: relative; display: block; width: 100%; padding: 0; border: 0; border-radius: 8px; overflow: hidden;
  background: none; cursor: pointer; aspect-ratio: var(--aspect); }
.shot:focus-visible { outline: 3px solid var(--accent); outline-offset: 2px; }
.shot img { position: absolute; inset: 0; width: 100%; height: 100%; display: block; transition: opacity 0.18s; }
.shot[aria-pressed="false"] .map { opacity: 0; visibility: hidden; }
.shot[aria-pressed="true"] .photo { visibility: hidden; }
@media (prefers-reduced-motion: reduce) { .shot img { transition: none; } }
@media (max-width: 800px) { section { grid-template-columns: 1fr; gap: 10px; }
  .shots { grid-template-columns: repeat(4, minmax(0, 1fr)); } }
@media print { nav { display: none !important; } section { break-inside: avoid; } }
footer { padding-bottom: 32px; font-size: 13px; }
"""

SCRIPT = """
"use strict";
document.documentElement.classList.add("js");
const main = document.querySelector("main");
const sections = [...main.querySelectorAll("section")];
const keys = { peakedness: ["rank"], group: ["group", "rank"], number: ["number"] };
function arrange() {
  const chosen = keys[document.querySelector("input[name=sort]:checked").value];
  const distinct = document.querySelector("#distinct").checked;
  const seen = new Set();
  const byRank = [...sections].sort((a, b) => a.dataset.rank - b.dataset.rank);
  for (const section of byRank) {
    section.hidden = distinct && seen.has(section.dataset.group);
    seen.add(section.dataset.group);
  }
  const compare = (a, b) => chosen.map((key) => a.dataset[key] - b.dataset[key]).find((step) => step) || 0;
  main.append(...[...sections].sort(compare));
  const shown = sections.filter((section) => !section.hidden).length;
  document.querySelector("output").value = shown + " of " + sections.length + " shown";
}
for (const input of document.querySelectorAll("input[name=sort], #distinct")) input.addEventListener("change", arrange);
document.querySelector("#maps").addEventListener("change", (event) => {
  for (const shot of document.querySelectorAll(".shot")) shot.setAttribute("aria-pressed", event.target.checked);
});
main.addEventListener("click", (event) => {
  const shot = event.target.closest(".shot");
  if (shot) shot.setAttribute("aria-pressed", shot.getAttribute("aria-pressed") !== "true");
});
arrange();
"""

# The colours of the maps, as `Page.legend` shows them on pictures.
LEGEND = (
    f'<p class="ramp">{RAMP_ENDS[0]}<i style="background: linear-gradient(90deg, rgb(128 128 128), '
    + ", ".join(
        f"rgb({red} {green} {blue}) {max(4, 100 * position):.0f}%"
        for position, (red, green, blue) in zip(RAMP_POSITIONS, RAMP_COLOURS, strict=True)
    )
    + f')"></i>{RAMP_ENDS[1]}</p>'
)

PAGE = Template("""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy"
  content="default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'unsafe-inline'">
<title>$title</title>
<link rel="icon" href="data:,">
<style>$style</style>
</head>
<body>
<header>
<h1>$title</h1>
<p>$about</p>
<details><summary>How to read this page</summary>
<p>Each row is one $kind with the images that light it up most, best first. Glowing: where it looks; grey: where it
gives no more than an even share of its attention. The score of an image: $score. &ldquo;Class token&rdquo; is the share
of a $kind&rsquo;s attention that goes there instead of to patches. ${Kind}s whose maps look alike on all images share a
letter.</p></details>
<p>$patches</p>
$legend
</header>
<nav aria-label="Sort and filter"><div>
<fieldset><legend>Sort by</legend><span class="segments">
<label><input type="radio" name="sort" value="peakedness" checked>Peakedness</label>
<label><input type="radio" name="sort" value="group">Group</label>
<label><input type="radio" name="sort" value="number">Number</label>
</span></fieldset>
<label class="check"><input type="checkbox" id="distinct">One of each group</label>
<label class="check"><input type="checkbox" id="maps" checked>Maps over the images</label>
<output></output>
</div></nav>
<main>
$sections
</main>
<footer><p>Click an image to switch its map on and off. Drawn by dino_sparo.</p></footer>
<script>$script</script>
</body>
</html>
""")


def write_html(atlas: Atlas, path: Path) -> None:
    """Write the atlas as one self-contained page.

    Args:
        atlas: what to show.
        path: the .html file to write.
    """
    page = PAGE.substitute(
        title=f"What lights up each {atlas.kind}",
        about=escape(f"{atlas.model} · {atlas.num_images:,} images of {printable(atlas.source)}"),
        kind=atlas.kind,
        Kind=atlas.kind.capitalize(),
        score=SCORE_WORDS,
        patches=escape(patches_in_words(atlas)),
        legend=LEGEND,
        style=STYLE,
        script=SCRIPT,
        sections="\n".join(_section(atlas.kind, slot) for slot in atlas.slots),
    )
    path.write_text(page, encoding="utf-8")


def _section(kind: str, slot: AtlasSlot) -> str:
    """One slot's row."""
    # Hues by the golden angle: neighbouring groups get colours far apart.
    chip = f'<span class="chip" style="--hue: {slot.group * 137.5 % 360:.0f}">group {slot.letter}</span>'
    shots = "\n".join(_shot(f"{kind} {slot.number}", image) for image in slot.images)
    return (
        f'<section id="{kind}-{slot.number}" data-number="{slot.number}" data-rank="{slot.rank}" '
        f'data-group="{slot.group}" aria-labelledby="h{slot.number}">\n'
        f'<div><h2 id="h{slot.number}">{kind.capitalize()} {slot.number}</h2><dl>'
        f"<div><dt>patches</dt><dd>{slot.patches:.0f}</dd></div>"
        f"<div><dt>class token</dt><dd>{100 * slot.class_token_share:.0f}%</dd></div></dl>"
        f"{chip if slot.letter else ''}</div>\n"
        f'<div class="shots" style="--count: {max(4, len(slot.images))}">\n{shots}\n</div></section>'
    )


def _shot(slot_name: str, image: AtlasImage) -> str:
    """One image that can be switched between itself and the map."""
    name = escape(short_name(image.name), quote=True)
    height, width = image.picture.shape[:2]
    return (
        f'<button type="button" class="shot" aria-pressed="true" style="--aspect: {width}/{height}" '
        f'title="{name} · score {image.score:.2f} · {image.patches:.0f} patches">'
        f'<img class="photo" alt="{name}" src="{data_uri(image.picture)}">'
        f'<img class="map" alt="Attention of {slot_name} on {name}" src="{data_uri(image.map_picture)}"></button>'
    )


def data_uri(picture: UInt8[np.ndarray, "H W 3"]) -> str:
    """A picture as an address that holds it, so that a page needs no other file."""
    buffer = io.BytesIO()
    Image.fromarray(picture).save(buffer, "JPEG", quality=JPEG_QUALITY, optimize=True)
    return "data:image/jpeg;base64," + base64.b64encode(buffer.getvalue()).decode("ascii")
