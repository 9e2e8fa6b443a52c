"""Format tables as lines of text."""

from collections.abc import Sequence

Row = Sequence[str]


def aligned(rows: Sequence[Row]) -> list[str]:
    """Format rows with columns of minimal width, the first aligned left and the others right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows]
