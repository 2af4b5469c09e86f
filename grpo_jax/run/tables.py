"""Tables on the terminal: every command builds and prints them here."""

from collections.abc import Collection, Iterable, Sequence
import sys

import rich.box
import rich.console
import rich.table
import rich.text

from grpo_jax.text import escape

WIDTH = 120  # columns of a pipe, which has no width of its own


def make_table(
    headings: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    title: str = '',
    dense: bool = False,
    wrapped: Collection[str] = (),
) -> rich.table.Table:
    """Table of texts, escaped: the first column begins at the left, the others end at the right.

    dense leaves out the frame. Cells keep to one line, but for those of the columns whose headings are in `wrapped`.
    """
    table = rich.table.Table(
        title=rich.text.Text(escape(title), style='table.title') if title else None,
        title_justify='left',
        box=rich.box.SIMPLE_HEAD if dense else rich.box.HEAVY_HEAD,
        pad_edge=not dense,
        collapse_padding=dense,
    )
    for position, heading in enumerate(headings):
        table.add_column(
            rich.text.Text(heading), justify='right' if position else 'left', no_wrap=heading not in wrapped
        )
    for row in rows:
        table.add_row(*(rich.text.Text(escape(cell)) for cell in row))
    return table


def show(*items: rich.table.Table | str, width: int | None = None) -> None:
    """Prints tables and lines of text, `width` columns wide; without it as wide as the terminal is."""
    console = rich.console.Console(width=width or (None if sys.stdout.isatty() else WIDTH))
    for item in items:
        console.print(escape(item) if isinstance(item, str) else item, markup=False, emoji=False, highlight=False)
