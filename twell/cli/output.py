"""Prints rows: a table that fits the terminal, Markdown or JSON."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from numbers import Integral
from typing import TYPE_CHECKING

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    import pandas as pd

NUMBER = r"[-–\d.,e]+( M|%)?( \(.*\))?"


def short(value: object, digits: str = "#.4g") -> str:
    """Return a value with few digits: 100 as 100, not as 1e+02; nothing as a dash."""
    if isinstance(value, str | bool):
        return str(value)
    if value is None or value != value:
        return "–"
    text = f"{value:{digits}}"
    return f"{value:,.0f}" if isinstance(value, Integral) or abs(float(text)) >= 100 else text


def markdown(cells: pd.DataFrame) -> str:
    """Return strings, a column a heading, as a Markdown table."""
    from twell import tables

    left = [place for place, name in enumerate(cells) if not is_numeric(cells[name])]
    return tables.markdown([list(cells), *cells.to_numpy()], left=left)


def is_numeric(column: pd.Series) -> bool:
    return column.str.fullmatch(NUMBER).all() and column.str.contains(r"\d").any()


def show(
    rows: pd.DataFrame, cells: pd.DataFrame, form: bool | None, spare: Sequence[str] = ()
) -> None:
    """Print rows as JSON (form: False), or their cells, strings with a column a heading.

    Cells become Markdown (form: True, or in a pipe) or a table. Where a terminal is too narrow for
    all columns, those in `spare` go first, then the last ones.
    """
    if form is False:
        print(rows.to_json(orient="records", indent=1, force_ascii=False, double_precision=15))
    elif form or not sys.stdout.isatty():
        print(markdown(cells))
    else:
        _print_fitted(cells.replace("`", "", regex=True), spare)


def _print_fitted(cells: pd.DataFrame, spare: Sequence[str]) -> None:
    """Print a table of the columns that fit; what all rows share goes first."""
    console = Console(markup=False, highlight=False, emoji=False)
    widths = {name: max(map(len, [*name.split(), *cells[name]])) + 2 for name in cells}
    shared = {name for name in cells if len(cells) > 1 and cells[name].nunique() == 1}
    columns, absent = list(cells), []
    order = [*spare, *columns[:0:-1]]
    for name in sorted(order, key=lambda name: name not in shared):
        if name in columns and sum(widths[name] for name in columns) - 2 > console.width:
            columns.remove(name)
            absent.append(f"{name} {cells[name].iloc[0]}" if name in shared else name)
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, collapse_padding=True)
    for name in columns:
        justify = "right" if is_numeric(cells[name]) else "left"
        table.add_column(name.replace(" ", "\n"), justify=justify)
    for row in cells[columns].to_numpy():
        table.add_row(*row)
    console.print(table)
    if absent:
        console.print(f"not shown: {', '.join(absent)}", style="dim")
