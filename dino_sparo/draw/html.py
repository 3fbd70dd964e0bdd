"""Figure -> a page in one file, with its pictures inside.

Without JavaScript, a page shows all maps. With JavaScript, a click switches an image's map on and off. `page.html` is
the template; its parts between comments such as <!-- maps --> stand only on pages that have maps.
"""

import base64
import io
import re
from collections.abc import Sequence
from html import escape
from pathlib import Path
from string import Template

from PIL import Image

from dino_sparo.draw.figure import Band, Figure, Section, Tile, Word, merge_words, short_name
from dino_sparo.draw.pixels import RAMP_COLOURS, RAMP_POSITIONS, Picture
from dino_sparo.runtime.files import write_text

JPEG_QUALITY = 84
# At this strength of a word's colour or more, dark letters are more legible than light ones, also on dark paper.
STRONG = 0.55

PAGE = (Path(__file__).parent / "page.html").read_text(encoding="utf-8")
RAMP = ", ".join(
    f"rgb({red} {green} {blue}) {max(4, 100 * position):.0f}%"
    for position, (red, green, blue) in zip(RAMP_POSITIONS, RAMP_COLOURS, strict=True)
)


def save_page(figure: Figure, path: Path) -> None:
    """Write a figure as a page; an older page stays until the new one is complete."""
    template, (low, high) = PAGE, figure.ends or ("", "")
    parts = {"maps": figure.ends, "keys": any(section.keys for section in figure.sections), "legend": figure.legend}
    for part, is_shown in parts.items():
        template = re.sub(f"<!-- {part} -->(.*?)<!-- /{part} -->", r"\1" if is_shown else "", template, flags=re.DOTALL)
    bands = [band for section in figure.sections for band in section.bands]
    page = Template(template).substitute(
        title=escape(figure.title),
        about=escape(figure.about),
        explanation=escape(figure.explanation),
        low=escape(low),
        high=escape(high),
        ramp=RAMP,
        words=_marked(figure.legend),
        count=max([4, *(min(len(band.tiles), figure.layout.per_line) for band in bands)]),
        gap=max(figure.layout.gap, 8),
        sections="\n".join(_section(number, section) for number, section in enumerate(figure.sections)),
    )
    write_text(page, path)


def _section(number: int, section: Section) -> str:
    """A section with its name or its picture at the left; a section without bands is a heading."""
    if not section.bands:
        return f"<h2>{escape(section.name)}</h2>"
    keys = "".join(f' data-{key}="{value}"' for key, value in section.keys.items())
    side = "" if section.picture is None else _plain_image(section.picture)
    if section.name:
        facts = "".join(f'<div class="facts">{escape(fact)}</div>' for fact in section.facts)
        chip = ""
        if section.group is not None:
            # Hues by the golden angle: neighbouring groups get colours far apart.
            hue = section.group[0] * 137.5 % 360
            chip = f'<span class="chip" style="--hue: {hue:.0f}">group {section.group[1]}</span>'
        side = f'<div class="side"><h2 id="h{number}">{escape(section.name)}</h2>{facts}{chip}</div>'
    about = f'<p class="about">{escape(section.about)}</p>\n' if section.about else ""
    bands = "\n".join(_band(band, section.name) for band in section.bands)
    label = f' aria-labelledby="h{number}"' if section.name else ""
    return f"<section{keys}{label}>\n{side}\n<div>{about}{bands}</div></section>"


def _band(band: Band, section: str) -> str:
    """Words, with tiles below them."""
    label = f"<b>{escape(band.label)}</b>" if band.label else ""
    heading = f"<h3>{label}<span>{_marked(band.heading)}</span></h3>" if band.heading else ""
    lines = "".join(f"<p>{escape(line)}</p>" for line in band.lines)
    figures = "\n".join(_figure(tile, section) for tile in band.tiles)
    shots = f'<div class="figures">\n{figures}\n</div>' if band.tiles else ""
    return f'<div class="band {band.kind}">{heading}{lines}{shots}</div>'


def _figure(tile: Tile, section: str) -> str:
    """An image that a click switches between itself and its map, and the words around it."""
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
    """An image, and over it the image with its map."""
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
    for word in merge_words(words):
        text = escape(word.text)
        if word.level > 0 or word.note:
            strong = ' class="strong"' if word.level > STRONG else ""
            note = f' title="{escape(word.note)}"' if word.note else ""
            colour = " ".join(map(str, word.colour))
            text = f'<mark{strong} style="--mark: {colour}; --level: {word.level:.2f}"{note}>{text}</mark>'
        parts.append(" " * (word.has_space and bool(parts)) + text)
    return "".join(parts)


def data_uri(picture: Picture) -> str:
    """A picture as a data URI, so that a page needs no other file."""
    buffer = io.BytesIO()
    Image.fromarray(picture).save(buffer, "JPEG", quality=JPEG_QUALITY, optimize=True)
    return "data:image/jpeg;base64," + base64.b64encode(buffer.getvalue()).decode("ascii")
