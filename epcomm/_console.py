"""Tables and progress bars for the command line, and arguments that are checked before hours of work.

rich where it is installed, plain text where it is not.
"""

import argparse
import importlib.util
import math
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TextIO

from epcomm._bootstrap import launcher
from epcomm.errors import InvalidArgumentError

_PICTURES = (".png", ".svg", ".pdf")
# Piped output has no width of its own; rich would assume 80 columns and fold tables that a log can show whole.
_PIPED_WIDTH = 132


def seconds(text: str) -> float:
    """An argument: a deadline in seconds."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 < number <= 1e6:
        raise argparse.ArgumentTypeError(f"{text!r}: expected seconds, more than 0 and at most 1000000")
    return number


def output_file(text: str) -> str:
    """An argument: a file that can be written."""
    if not _writes():
        return text
    folder = os.path.dirname(text) or "."
    if not os.path.isdir(folder):
        raise argparse.ArgumentTypeError(f"{text!r}: there is no folder {folder!r}")
    if os.path.isdir(text) or not os.access(text if os.path.exists(text) else folder, os.W_OK):
        raise argparse.ArgumentTypeError(f"{text!r}: it cannot be written")
    return text


def picture_file(text: str) -> str:
    """An argument: a picture that can be drawn and written."""
    if not text.lower().endswith(_PICTURES):
        raise argparse.ArgumentTypeError(f"{text!r}: expected a name that ends in {', '.join(_PICTURES)}")
    if _writes() and importlib.util.find_spec("matplotlib") is None:
        raise argparse.ArgumentTypeError("matplotlib draws it and is not installed")
    return output_file(text)


def _writes() -> bool:
    """Of a launcher's ranks only the first one does; the others' hosts need not have the folder."""
    try:
        found = launcher.find()
    except InvalidArgumentError:  # told where the ranks meet
        return False
    return found is None or found.rank == 0


def print_table(
    title: str,
    columns: Sequence[str],
    rows: Sequence[Sequence[Any]],
    *,
    right: Sequence[int] = (),
    caption: str | None = None,
    file: TextIO | None = None,
) -> None:
    """Print one table.

    Parameters
    ----------
    title, columns, rows
        Heading, column names and cells; a cell is shown by ``str``.
    right
        Positions of the columns to align to the right.
    caption
        A sentence below the table.
    file
        Where to print; standard output by default.
    """
    out = sys.stdout if file is None else file
    cells = [[str(cell) for cell in row] for row in rows]
    try:
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text
    except ImportError:
        out.write(plain_table(title, columns, cells, right, caption) + "\n")
        return
    console = Console(file=out, width=None if out.isatty() else _PIPED_WIDTH)
    table = Table(title=title, title_justify="left", caption=caption, caption_justify="left")
    for position, column in enumerate(columns):
        table.add_column(column, justify="right" if position in right else "left", overflow="fold")
    for row in cells:
        table.add_row(*(Text(cell) for cell in row))
    console.print(table)


def plain_table(
    title: str, columns: Sequence[str], cells: Sequence[Sequence[str]], right: Sequence[int], caption: str | None
) -> str:
    """The same table in aligned plain text, a line for each row."""
    columns, *cells = [[cell.replace("\n", ", ") for cell in row] for row in [columns, *cells]]
    widths = [max(len(row[i]) for row in [columns, *cells]) for i in range(len(columns))]

    def line(row: Sequence[str]) -> str:
        padded = [cell.rjust(width) if i in right else cell.ljust(width)
                  for i, (cell, width) in enumerate(zip(row, widths, strict=True))]
        return "  ".join(padded).rstrip()

    lines = ["", title, line(columns), line(["-" * width for width in widths]), *map(line, cells)]
    return "\n".join(lines + ([caption] if caption else []))


@contextmanager
def progress(title: str, total: int, silent: bool = False) -> Iterator[Callable[[int], None]]:
    """A progress bar on standard error; yields ``show(done)``.

    Without rich, or where standard error is not a terminal, it is one line at the start and one at the end.
    ``silent`` shows nothing: of several ranks only one speaks.
    """
    if silent:
        yield lambda done: None
        return
    try:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        has_rich = True
    except ImportError:
        has_rich = False
    if not has_rich or not sys.stderr.isatty():
        seen = [0]

        def count(done: int) -> None:
            seen[0] = done

        print(f"{title}: 0/{total}", file=sys.stderr, flush=True)
        yield count
        print(f"{title}: {seen[0]}/{total}", file=sys.stderr, flush=True)
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(title, total=total)
        yield lambda done: bar.update(task, completed=done)


def human_bytes(count: float) -> str:
    """``1536`` as ``1.5 KiB``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"
