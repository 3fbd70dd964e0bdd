"""A page that opens from disk: pictures inside it, nothing loaded from elsewhere.

The frame, the look and the switchable images that the slot atlas, the pictures of CLIP and OC-CLIP, and the pages of
errors share. A page works without JavaScript, with all maps shown; with it every image can be switched between itself
and the map on it.
"""

import base64
import io
from html import escape
from string import Template

import numpy as np
from jaxtyping import UInt8
from PIL import Image

from dino_sparo.draw.labels import short_name
from dino_sparo.draw.sheet import RAMP_ENDS
from dino_sparo.evaluation.attention.maps import RAMP_COLOURS, RAMP_POSITIONS

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

# Of pages whose sections hold pictures with captions and numbers below.
FIGURES_STYLE = """
.figures { display: grid; grid-template-columns: repeat(var(--count), minmax(0, 1fr)); gap: 18px; align-items: start; }
figure { margin: 0; }
figcaption { margin-top: 8px; overflow-wrap: break-word; }
figure dl { margin-top: 6px; display: flex; flex-wrap: wrap; gap: 0 14px; }
figure dt { order: 0; }
@media (max-width: 800px) { .figures { grid-template-columns: repeat(2, minmax(0, 1fr)); } }
@media (max-width: 480px) { .figures { grid-template-columns: 1fr; } }
"""

SCRIPT = """
"use strict";
document.documentElement.classList.add("js");
const main = document.querySelector("main");
document.querySelector("#maps")?.addEventListener("change", (event) => {
  for (const shot of document.querySelectorAll(".shot")) shot.setAttribute("aria-pressed", event.target.checked);
});
main.addEventListener("click", (event) => {
  const shot = event.target.closest(".shot");
  if (shot) shot.setAttribute("aria-pressed", shot.getAttribute("aria-pressed") !== "true");
});
"""

RAMP = ", ".join(
    f"rgb({red} {green} {blue}) {max(4, 100 * position):.0f}%"
    for position, (red, green, blue) in zip(RAMP_POSITIONS, RAMP_COLOURS, strict=True)
)
# The colours of the maps, as `Page.legend` shows them on pictures.
LEGEND = Template(
    f'<p class="ramp">$low<i style="background: linear-gradient(90deg, rgb(128 128 128), {RAMP})"></i>$high</p>'
)

NAV = Template("""<nav aria-label="What is shown"><div>
$controls
<label class="check"><input type="checkbox" id="maps" checked>Maps over the images</label>
<output></output>
</div></nav>""")

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
<p>$explanation</p></details>
$legend
</header>
$nav
<main>
$sections
</main>
<footer><p>$hint Drawn by dino_sparo.</p></footer>
<script>$script</script>
</body>
</html>
""")


def html_page(
    title: str,
    about: str,
    explanation: str,
    sections: str,
    hint: str,
    *,
    controls: str = "",
    more_style: str = "",
    more_script: str = "",
    ends: tuple[str, str] | None = RAMP_ENDS,
) -> str:
    """A whole page. All but `about` is HTML already.

    Args:
        title: of the page.
        about: which model and images, plain text.
        explanation: how to read it.
        sections: one per slot.
        hint: what clicking does.
        controls: more of them beside the switch of all maps.
        more_style: CSS after the shared one.
        more_script: JavaScript after the shared one.
        ends: the words beside the colours of the maps; None where the page has no maps, so nothing to switch.
    """
    return PAGE.substitute(
        title=title,
        about=escape(about),
        explanation=explanation,
        legend="" if ends is None else LEGEND.substitute(low=ends[0], high=ends[1]),
        nav="" if ends is None else NAV.substitute(controls=controls),
        sections=sections,
        hint=hint,
        style=STYLE + more_style,
        script=SCRIPT + more_script,
    )


def switchable_image(
    picture: UInt8[np.ndarray, "H W 3"], mapped: UInt8[np.ndarray, "H W 3"], name: str, slot: str, note: str = ""
) -> str:
    """An image that a click switches between itself and a slot's map on it.

    Args:
        picture: (H, W, 3), the image.
        mapped: (H, W, 3), the map on it.
        name: of the image.
        slot: what to call the slot.
        note: what else is shown when the pointer rests on it, HTML.
    """
    shown = escape(short_name(name), quote=True)
    height, width = picture.shape[:2]
    return (
        f'<button type="button" class="shot" aria-pressed="true" style="--aspect: {width}/{height}" '
        f'title="{shown}{note}"><img class="photo" alt="{shown}" src="{data_uri(picture)}">'
        f'<img class="map" alt="Attention of {slot} on {shown}" src="{data_uri(mapped)}"></button>'
    )


def data_uri(picture: UInt8[np.ndarray, "H W 3"]) -> str:
    """A picture as an address that holds it, so that a page needs no other file."""
    buffer = io.BytesIO()
    Image.fromarray(picture).save(buffer, "JPEG", quality=JPEG_QUALITY, optimize=True)
    return "data:image/jpeg;base64," + base64.b64encode(buffer.getvalue()).decode("ascii")
