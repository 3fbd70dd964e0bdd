"""Looks of chosen slots at chosen pairs -> one HTML page that opens from disk: pictures inside it, nothing loaded.

It looks like the slot atlas; `sheet.py` shows the same as a picture. The page works without JavaScript; with it the
maps can be switched off and on.
"""

from html import escape
from pathlib import Path
from string import Template

import numpy as np
from jaxtyping import UInt8

from dino_sparo.clip.pictures.concepts import PairLook
from dino_sparo.clip.pictures.sheet import MARK, TITLE, Gallery, mark_level
from dino_sparo.draw.html import FIGURES_STYLE, html_page, switchable_image
from dino_sparo.evaluation.attention.maps import effective_patches, overlay
from dino_sparo.runtime.records import write_text

OWN_STYLE = f"""
section {{ grid-template-columns: 110px 1fr; content-visibility: visible; }}
figcaption {{ font-size: 16px; line-height: 1.75; }}
figcaption mark {{ padding: 2px; margin: 0 -2px; border-radius: 5px; color: inherit;
  background: rgb({MARK[0]} {MARK[1]} {MARK[2]} / var(--level)); }}
figcaption mark.strong {{ color: #16161d; }}
"""
# The level of a mark from which on dark letters on it can be read better than light ones, on dark paper too.
STRONG = 0.55

EXPLANATION = Template("""Each row is one slot with the same pairs of an image and a caption. On the image: glowing
where the slot looks, grey where it gives no more than an even share of its attention. In the caption: the stronger a
word is marked, the more of the slot's attention it gets; what the caption's start and end get stands below. The
cosine is that of the slot read out of the image and the same slot read out of the caption. &ldquo;Patches&rdquo;: the
slot's attention is as wide as if it lay evenly on so many of an image's $patches patches; exp(entropy), the geometric
mean over the pairs. $rule""")


def write_page(gallery: Gallery, path: Path) -> None:
    """Write the gallery as one self-contained page.

    Args:
        gallery: what to show.
        path: the .html file to write.
    """
    page = html_page(
        TITLE,
        f"{gallery.model} · {gallery.source}",
        EXPLANATION.substitute(patches=gallery.looks[0].maps[0].size, rule=escape(gallery.rule)),
        "\n".join(_section(gallery, slot) for slot in gallery.slots),
        "Click an image to switch its map on and off; rest on a word to see its share.",
        more_style=FIGURES_STYLE + OWN_STYLE,
    )
    write_text(page, path)


def _section(gallery: Gallery, slot: int) -> str:
    """One slot's row."""
    cosine = float(np.mean([look.cosines[slot] for look in gallery.looks]))
    patches = float(np.exp(np.mean([np.log(effective_patches(look.maps[slot])) for look in gallery.looks])))
    pairs = zip(gallery.looks, gallery.pictures, strict=True)
    figures = "\n".join(_figure(look, picture, slot) for look, picture in pairs)
    return (
        f'<section id="slot-{slot}" aria-labelledby="h{slot}">\n<div><h2 id="h{slot}">Slot {slot}</h2><dl>'
        f"<div><dt>mean cosine</dt><dd>{cosine:.2f}</dd></div>"
        f"<div><dt>patches</dt><dd>{patches:.1f}</dd></div></dl></div>\n"
        f'<div class="figures" style="--count: {len(gallery.looks)}">\n{figures}\n</div></section>'
    )


def _figure(look: PairLook, picture: UInt8[np.ndarray, "H W 3"], slot: int) -> str:
    """One pair as a slot sees it: an image that can be switched between itself and the map, and the caption."""
    image = switchable_image(picture, overlay(picture, look.maps[slot]), look.name, f"slot {slot}")
    return (
        f"<figure>{image}\n"
        f"<figcaption>{_caption(look, slot)}</figcaption>\n"
        f"<dl><div><dt>cosine</dt><dd>{look.cosines[slot]:.2f}</dd></div>"
        f"<div><dt>start</dt><dd>{100 * look.text.start[slot]:.0f}%</dd></div>"
        f"<div><dt>end</dt><dd>{100 * look.text.end[slot]:.0f}%</dd></div></dl></figure>"
    )


def _caption(look: PairLook, slot: int) -> str:
    """A caption's words, marked."""
    parts = []
    for word, share in zip(look.words, look.text.words[slot].tolist(), strict=True):
        level = mark_level(share)
        strong = ' class="strong"' if level > STRONG else ""
        mark = f'<mark{strong} style="--level: {level:.2f}" title="{100 * share:.0f}%">{escape(word.text)}</mark>'
        parts.append((" " if word.has_space else "") + mark)
    return "".join(parts)
