"""Figure -> a page that opens from disk: pictures inside it, nothing loaded from elsewhere.

A page works without JavaScript, with all maps shown; with it every image can be switched between itself and the map on
it.
"""

import base64
import io
from collections.abc import Sequence
from html import escape
from pathlib import Path
from string import Template

from PIL import Image

from dino_sparo.draw.figure import Band, Figure, Section, Tile, Word, runs_of_words
from dino_sparo.draw.labels import short_name
from dino_sparo.draw.pixels import RAMP_COLOURS, RAMP_POSITIONS, Picture
from dino_sparo.runtime.records import write_text

JPEG_QUALITY = 84
# From this strength of a word's colour on, dark letters can be read better than light ones, on dark paper too.
STRONG = 0.55

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
section { padding: 14px 16px; background: var(--card); border: 1px solid var(--line); border-radius: 14px;
  content-visibility: auto; contain-intrinsic-size: auto 200px; }
section:has(> .side) { display: grid; grid-template-columns: 124px minmax(0, 1fr); gap: 18px; }
section:has(> .plain) { display: grid; grid-template-columns: minmax(160px, 280px) minmax(0, 1fr); gap: 26px; }
.plain { display: block; width: 100%; border-radius: 8px; }
section[hidden] { display: none; }
h2 { margin: 0 0 6px; font-size: 19px; line-height: 1.2; }
main > h2 { margin: 22px 0 0; }
h3 { margin: 0 0 4px; font-size: 17px; line-height: 1.5; display: flex; gap: 16px; }
h3 b { flex: none; font-variant-numeric: tabular-nums; }
mark { padding: 2px; margin: 0 -2px; border-radius: 5px; color: inherit;
  background: rgb(var(--mark) / var(--level)); }
mark.strong { color: #16161d; }
.true b { color: #1a7f37; } .false b { color: #c0322b; }
@media (prefers-color-scheme: dark) { .true b { color: #4cc267; } .false b { color: #ff7b72; } }
.about { font-size: 13px; margin-bottom: 10px; }
.band + .band { margin-top: 20px; padding-top: 16px; border-top: 1px solid var(--line); }
.band p { font-variant-numeric: tabular-nums; }
p + .figures, h3 + .figures { margin-top: 12px; }
.figures { display: grid; grid-template-columns: repeat(var(--count), minmax(0, 1fr)); gap: var(--gap);
  align-items: start; }
figure { margin: 0; }
figcaption { margin-bottom: 6px; font-weight: 600; overflow-wrap: break-word; min-height: 3em; display: flex;
  align-items: flex-end; }
.soft figcaption { color: var(--soft); font-weight: 400; }
.framed .shot { border: 3px solid var(--frame); }
.caption { margin-top: 8px; font-size: 16px; line-height: 1.75; color: inherit; overflow-wrap: break-word; }
.notes { display: flex; flex-wrap: wrap; justify-content: space-between; gap: 0 6px; margin-top: 6px; }
.notes, .facts { font-size: 13px; font-variant-numeric: tabular-nums; color: var(--soft); }
.chip { display: inline-block; margin-top: 8px; padding: 1px 10px; border-radius: 99px; font-size: 13px;
  background: hsl(var(--hue) 60% var(--chip-light)); color: hsl(var(--hue) 65% var(--chip-ink)); }
.shot { position: relative; display: block; width: 100%; padding: 0; border: 0; border-radius: 8px; overflow: hidden;
  background: none; cursor: pointer; aspect-ratio: var(--aspect); }
.shot:focus-visible { outline: 3px solid var(--accent); outline-offset: 2px; }
.shot img { position: absolute; inset: 0; width: 100%; height: 100%; display: block; transition: opacity 0.18s; }
.shot[aria-pressed="false"] .map { opacity: 0; visibility: hidden; }
.shot[aria-pressed="true"] .photo { visibility: hidden; }
@media (prefers-reduced-motion: reduce) { .shot img { transition: none; } }
@media (max-width: 800px) { section:has(> .side), section:has(> .plain) { grid-template-columns: 1fr; gap: 10px; }
  .figures { grid-template-columns: repeat(4, minmax(0, 1fr)); } }
@media (max-width: 480px) { .figures { grid-template-columns: repeat(2, minmax(0, 1fr)); } }
@media print { nav { display: none !important; } section { break-inside: avoid; content-visibility: visible; } }
footer { padding-bottom: 32px; font-size: 13px; }
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
LEGEND = Template(
    f'<p class="ramp">$low<i style="background: linear-gradient(90deg, rgb(128 128 128), {RAMP})"></i>$high $words</p>'
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
<main style="--count: $count; --gap: ${gap}px">
$sections
</main>
<footer><p>$hint Drawn by dino_sparo.</p></footer>
<script>$script</script>
</body>
</html>
""")


def save_page(figure: Figure, path: Path, controls: str = "", script: str = "") -> None:
    """Write a figure as one self-contained page.

    Args:
        figure: the description.
        path: of the page; until all of it is written, an older page stays.
        controls: HTML beside the switch of all maps.
        script: JavaScript after the shared one.
    """
    legend, nav, hint = "", "", ""
    if figure.ends is not None:
        low, high = map(escape, figure.ends)
        legend = LEGEND.substitute(low=low, high=high, words=_marked(figure.legend))
        nav = NAV.substitute(controls=controls)
        hint = "Click an image to switch its map on and off." + " Rest on a word to see its share." * bool(
            figure.legend
        )
    bands = [band for section in figure.sections for band in section.bands]
    page = PAGE.substitute(
        title=escape(figure.title),
        about=escape(figure.about),
        explanation=escape(figure.explanation),
        legend=legend,
        nav=nav,
        count=max(4, *(min(len(band.tiles), figure.layout.per_line) for band in bands)),
        gap=max(figure.layout.gap, 8),
        sections="\n".join(_section(number, section) for number, section in enumerate(figure.sections)),
        hint=hint,
        style=STYLE,
        script=SCRIPT + script,
    )
    write_text(page, path)


def _section(number: int, section: Section) -> str:
    """A section with its name or its picture at the left; without bands its name is a heading."""
    if not section.bands:
        return f"<h2>{escape(section.name)}</h2>"
    keys = "".join(f' data-{key}="{value}"' for key, value in section.keys.items())
    side = "" if section.picture is None else _plain_image(section.picture)
    if section.name:
        facts = "".join(f'<div class="facts">{escape(fact)}</div>' for fact in section.facts)
        side = f'<div class="side"><h2 id="h{number}">{escape(section.name)}</h2>{facts}{_chip(section)}</div>'
    about = f'<p class="about">{escape(section.about)}</p>\n' if section.about else ""
    bands = "\n".join(_band(band, section.name) for band in section.bands)
    label = f' aria-labelledby="h{number}"' if section.name else ""
    return f"<section{keys}{label}>\n{side}\n<div>{about}{bands}</div></section>"


def _chip(section: Section) -> str:
    if section.group is None:
        return ""
    group, letter = section.group
    # Hues by the golden angle: neighbouring groups get colours far apart.
    return f'<span class="chip" style="--hue: {group * 137.5 % 360:.0f}">group {letter}</span>'


def _band(band: Band, section: str) -> str:
    """Words, and the tiles below them."""
    label = f"<b>{escape(band.label)}</b>" if band.label else ""
    heading = f"<h3>{label}<span>{_marked(band.heading)}</span></h3>" if band.heading else ""
    lines = "".join(f"<p>{escape(line)}</p>" for line in band.lines)
    figures = "\n".join(_figure(tile, section) for tile in band.tiles)
    shots = f'<div class="figures">\n{figures}\n</div>' if band.tiles else ""
    return f'<div class="band {band.kind}">{heading}{lines}{shots}</div>'


def _figure(tile: Tile, section: str) -> str:
    """A tile: an image that a click switches between itself and the map, and the words around it."""
    title = " ".join(filter(None, (tile.title, tile.numbers)))
    above = f"<figcaption>{escape(title)}</figcaption>" if title else ""
    caption = f'<p class="caption">{_marked(tile.caption)}</p>' if tile.caption else ""
    notes = "".join(f"<span>{escape(note)}</span>" for note in tile.notes if note)
    kinds = " ".join(kind for kind, holds in (("soft", tile.is_soft), ("framed", tile.frame)) if holds)
    frame = f' style="--frame: {tile.frame}"' if tile.frame else ""
    image = _plain_image(tile) if tile.paint is None else _switchable_image(tile, tile.title or section)
    below = f'<div class="notes">{notes}</div>' if notes else ""
    return f'<figure class="{kinds}"{frame}>{above}{image}\n{caption}{below}</figure>'


def _plain_image(tile: Tile) -> str:
    return f'<img class="plain" alt="{escape(short_name(tile.name))}" src="{data_uri(tile.picture)}">'


def _switchable_image(tile: Tile, title: str) -> str:
    """An image and the map on it, one over the other."""
    assert tile.paint is not None
    shown = escape(short_name(tile.name))
    height, width = tile.picture.shape[:2]
    return (
        f'<button type="button" class="shot" aria-pressed="true" style="--aspect: {width}/{height}" '
        f'title="{shown}{escape(tile.tooltip)}"><img class="photo" alt="{shown}" src="{data_uri(tile.picture)}">'
        f'<img class="map" alt="Map of {escape(title)} on {shown}" '
        f'src="{data_uri(tile.paint(tile.picture))}"></button>'
    )


def _marked(words: Sequence[Word]) -> str:
    """Words with their colours behind them."""
    parts: list[str] = []
    for run in runs_of_words(words):
        text = escape("".join(" " * (word.has_space and i > 0) + word.text for i, word in enumerate(run)))
        first = run[0]
        if first.level > 0 or first.note:
            strong = ' class="strong"' if first.level > STRONG else ""
            note = f' title="{escape(first.note)}"' if first.note else ""
            colour = " ".join(map(str, first.colour))
            text = f'<mark{strong} style="--mark: {colour}; --level: {first.level:.2f}"{note}>{text}</mark>'
        parts.append(" " * (first.has_space and bool(parts)) + text)
    return "".join(parts)


def data_uri(picture: Picture) -> str:
    """A picture as an address that holds it, so that a page needs no other file."""
    buffer = io.BytesIO()
    Image.fromarray(picture).save(buffer, "JPEG", quality=JPEG_QUALITY, optimize=True)
    return "data:image/jpeg;base64," + base64.b64encode(buffer.getvalue()).decode("ascii")
