"""Looks at pairs -> one HTML page that opens from disk: pictures inside it, nothing loaded.

It looks like CLIP's pictures of slots; `sheet.py` shows the same as a picture. The page works without JavaScript; with
it the maps can be switched off and on.
"""

from html import escape
from pathlib import Path

import numpy as np
from jaxtyping import UInt8

from dino_sparo.draw.html import FIGURES_STYLE, data_uri, html_page
from dino_sparo.draw.labels import short_name
from dino_sparo.draw.tiles import TILE_STYLE, tile_figure
from dino_sparo.oc_clip.pictures.explain import GraphLook
from dino_sparo.oc_clip.pictures.sheet import MAPS_PER_LINE, TITLE, Gallery
from dino_sparo.oc_clip.pictures.tiles import tiles_of, without_map
from dino_sparo.runtime.records import write_text

OWN_STYLE = """
section { grid-template-columns: 1fr; content-visibility: visible; }
.figures { gap: 12px; }
.plain { display: block; width: 100%; border-radius: 8px; }
table { border-collapse: collapse; font-size: 14px; font-variant-numeric: tabular-nums; }
th, td { padding: 2px 18px 2px 0; text-align: right; }
th:first-child, td:first-child { text-align: left; }
th { color: var(--soft); font-weight: 400; }
"""

SCORES_EXPLANATION = (
    "The cosine is that of an entity's embedding and its slot, which is the mean of the patches' values, weighted with "
    "the entity's map (divided by its sum: an entity with small shares has a slot too). The score of a relation is f, "
    "the cosine of the relation's embedding and what the slots of subject and object make of it; &ldquo;turned "
    "round&rdquo; is f with subject and object exchanged. All three lie between &minus;1 and 1."
)


def write_page(gallery: Gallery, path: Path) -> None:
    """Write the gallery as one self-contained page.

    Args:
        gallery: what to show.
        path: the .html file to write.
    """
    reading = gallery.looks[0].reading
    pairs = enumerate(zip(gallery.looks, gallery.pictures, strict=True), 1)
    page = html_page(
        TITLE,
        f"{gallery.model} · {gallery.source}",
        f"{escape(reading.explanation)} {SCORES_EXPLANATION} {escape(gallery.weights)}",
        "\n".join(_section(number, look, picture, gallery.default_tokens) for number, (look, picture) in pairs),
        "Click an image to switch its map on and off.",
        more_style=FIGURES_STYLE + TILE_STYLE + OWN_STYLE,
        ends=reading.ends,
    )
    write_text(page, path)


def _section(number: int, look: GraphLook, picture: UInt8[np.ndarray, "H W 3"], default_tokens: bool) -> str:
    """One pair."""
    name = escape(short_name(look.pair.name), quote=True)
    figures = [
        f'<figure><figcaption>image</figcaption><img class="plain" alt="{name}" src="{data_uri(picture)}"></figure>',
        *(tile_figure(picture, tile, look.pair.name) for tile in tiles_of(look, default_tokens)),
    ]
    score = "; ".join(filter(None, [f"score {look.score:.2f}", without_map(look)]))
    return (
        f'<section id="pair-{number}" aria-labelledby="h{number}">\n'
        f'<div><h2 id="h{number}">{escape(look.pair.caption)}</h2>'
        f"<p>{score}</p>{_relations(look)}</div>\n"
        f'<div class="figures" style="--count: {min(len(figures), MAPS_PER_LINE + 1)}">\n'
        + "\n".join(figures)
        + "\n</div></section>"
    )


def _relations(look: GraphLook) -> str:
    """The relations and their scores, a table; nothing where there are none."""
    rows = [
        f"<tr><td>{escape(sentence)}</td><td>{score:.2f}</td><td>{turned:.2f}</td></tr>"
        for sentence, score, turned in zip(look.sentences, look.relation_scores, look.turned_scores, strict=True)
    ]
    heads = "<tr><th>relation</th><th>score</th><th>turned round</th></tr>"
    return f"<table>{heads}{''.join(rows)}</table>" if rows else ""
