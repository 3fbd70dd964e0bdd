"""Rows of cells -> a table for the terminal, of Markdown or of LaTeX; the first row is the head."""

from collections.abc import Sequence

ESCAPES = str.maketrans({letter: f"\\{letter}" for letter in "&%$#_{}"} | {"<": "$<$", "~": "\\~{}", "^": "\\^{}"})


def text_table(rows: Sequence[Sequence[str]], num_words: int = 0) -> str:
    """A table for the terminal; the first `num_words` columns are left-aligned."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    line = "  ".join(f"{{:{'<' if column < num_words else '>'}{width}}}" for column, width in enumerate(widths))
    return "\n".join(line.format(*row).rstrip() for row in rows)


def markdown_table(rows: Sequence[Sequence[str]]) -> str:
    """A table of Markdown."""
    head, *body = [f"| {' | '.join(cell.replace('|', '/') for cell in row)} |" for row in rows]
    return "\n".join([head, "|---" * len(rows[0]) + "|", *body]) + "\n"


def latex_table(rows: Sequence[Sequence[str]], num_words: int) -> str:
    """A table of LaTeX with the rules of booktabs; the first `num_words` columns are left-aligned."""
    head, *body = [" & ".join(cell.translate(ESCAPES) for cell in row) + r" \\" for row in rows]
    columns = "l" * num_words + "r" * (len(rows[0]) - num_words)
    rules = [rf"\begin{{tabular}}{{{columns}}}", r"\toprule", head, r"\midrule", *body, r"\bottomrule"]
    return "\n".join([*rules, r"\end{tabular}"]) + "\n"
