"""Rows of cells -> a table of Markdown or LaTeX; the first row is the head."""

from collections.abc import Sequence

ESCAPES = str.maketrans({letter: f"\\{letter}" for letter in "&%$#_{}"} | {"<": "$<$", "~": "\\~{}", "^": "\\^{}"})


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
