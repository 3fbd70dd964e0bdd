"""Slot atlas -> one HTML page; after `atlas.py`.

The slots can be sorted, and one of each group of slots shown alone.
"""

from html import escape
from pathlib import Path
from string import Template

from dino_sparo.draw.html import html_page, switchable_image
from dino_sparo.evaluation.attention.atlas import SCORE_WORDS, Atlas, AtlasImage, AtlasSlot, patches_in_words
from dino_sparo.runtime.cli import printable
from dino_sparo.runtime.records import write_text

SCRIPT = """
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
arrange();
"""

CONTROLS = """<fieldset><legend>Sort by</legend><span class="segments">
<label><input type="radio" name="sort" value="peakedness" checked>Peakedness</label>
<label><input type="radio" name="sort" value="group">Group</label>
<label><input type="radio" name="sort" value="number">Number</label>
</span></fieldset>
<label class="check"><input type="checkbox" id="distinct">One of each group</label>"""

EXPLANATION = Template("""Each row is one $kind with the images that light it up most, best first. Glowing: where it
looks; grey: where it gives no more than an even share of its attention. The score of an image: $score. &ldquo;Class
token&rdquo; is the share of a $kind&rsquo;s attention that goes there instead of to patches. ${Kind}s whose maps look
alike on all images share a letter. $patches""")


def write_html(atlas: Atlas, path: Path) -> None:
    """Write the atlas as one self-contained page.

    Args:
        atlas: what to show.
        path: the .html file to write.
    """
    explanation = EXPLANATION.substitute(
        kind=atlas.kind, Kind=atlas.kind.capitalize(), score=SCORE_WORDS, patches=escape(patches_in_words(atlas))
    )
    page = html_page(
        f"What lights up each {atlas.kind}",
        f"{atlas.model} · {atlas.num_images:,} images of {printable(atlas.source)}",
        explanation,
        "\n".join(_section(atlas.kind, slot) for slot in atlas.slots),
        "Click an image to switch its map on and off.",
        controls=CONTROLS,
        more_script=SCRIPT,
    )
    write_text(page, path)


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
    """One image with its map."""
    note = f" · score {image.score:.2f} · {image.patches:.0f} patches"
    return switchable_image(image.picture, image.map_picture, image.name, slot_name, note)
