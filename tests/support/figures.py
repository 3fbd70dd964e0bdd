"""For tests of figures: the words that are drawn on them, and whether all can be read."""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import combinations
from pathlib import Path
from typing import NamedTuple
from unittest import mock

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.transforms import Bbox

TOLERANCE = 1.0  # pixels, of a box that letters do not fill


class Words(NamedTuple):
    """Words on a figure.

    Attributes:
        words: what they say.
        box: where they stand, pixels.
        sheet: the figure's box, pixels.
    """

    words: str
    box: Bbox
    sheet: Bbox


@contextmanager
def drawn_words() -> Iterator[list[list[Words]]]:
    """Collect the words of every figure that is saved within the block, measured by the renderer that draws them.

    Files are empty. What the layout moves while it measures counts where it stands in the end.
    """
    figures: list[list[Words]] = []
    draw = Text.draw
    words: dict[int, Words] = {}

    def record(text: Text, renderer: object, *args: object, **options: object) -> None:
        draw(text, renderer, *args, **options)
        if text.get_visible() and text.get_text().strip():
            words[id(text)] = Words(text.get_text(), text.get_window_extent(renderer), text.get_figure(True).bbox)

    def save(figure: Figure, path: Path, **options: object) -> None:
        path.touch()
        words.clear()
        FigureCanvasAgg(figure).draw()
        figures.append(list(words.values()))

    with mock.patch.object(Text, "draw", record), mock.patch.object(Figure, "savefig", save):
        yield figures


def assert_readable(figures: list[list[Words]]) -> None:
    """No words leave their figure, and no two lie over one another."""
    assert figures
    assert all(figures), "a figure without words"
    for words in figures:
        for text, box, sheet in words:
            assert box.x0 >= sheet.x0 - TOLERANCE, f"{text!r} is cut off at the left"
            assert box.y0 >= sheet.y0 - TOLERANCE, f"{text!r} is cut off below"
            assert box.x1 <= sheet.x1 + TOLERANCE, f"{text!r} is cut off at the right"
            assert box.y1 <= sheet.y1 + TOLERANCE, f"{text!r} is cut off above"
        plain = [(each.words, each.box.x0, each.box.x1, each.box.y0, each.box.y1) for each in words]
        for (text, *box), (other, *over) in combinations(plain, 2):
            across = min(box[1], over[1]) - max(box[0], over[0])
            along = min(box[3], over[3]) - max(box[2], over[2])
            # Boxes reach from the highest to the lowest letter of the font, so that lines may touch.
            assert across <= TOLERANCE or along <= 2 * TOLERANCE, f"{text!r} and {other!r} lie over one another"
