"""Tables and numbers of reports for people."""

from collections.abc import Iterator, Sequence

# Rows of a table at most, and how many of its end are among them.
MOST_ROWS = 24
LAST_ROWS = 4


def abbreviated(count: int) -> list[int]:
    """Indices to show of ``count``: all, or the first ones and the last few."""
    if count <= MOST_ROWS:
        return list(range(count))
    return [*range(MOST_ROWS - LAST_ROWS), *range(count - LAST_ROWS, count)]


def gib(size: float) -> str:
    """Three digits where there are that many.

    >>> [gib(size) for size in (0.0, 0.00012, 0.0456, 23.04, 1234.5)]
    ['-', '<0.001', '0.0456', '23.0', '1234']
    """
    if size == 0:
        return "-"
    if size < 0.001:
        return "<0.001"
    return f"{size:#.3g}" if size < 100 else f"{size:.0f}"


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Lines with columns flush right."""
    widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]
    for row in (header, *rows):
        yield "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
