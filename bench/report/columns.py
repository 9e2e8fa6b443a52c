"""Tables as lines of text."""

from collections.abc import Sequence

Row = Sequence[str]


def aligned(rows: Sequence[Row]) -> list[str]:
    """Columns as wide as they need to be: the first to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows]
