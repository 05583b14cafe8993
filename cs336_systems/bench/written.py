"""Reports made of a template and of rows, so that no figure is typed by hand: what a template can ask for and say.

A name that is not there, a file or a row that is missing, a table without lines and a figure that was not measured are
errors, not gaps.
"""

import json
import math
import re
import statistics
import textwrap
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from cs336_systems.bench.ceiling import CEILING
from cs336_systems.bench.model import ModelRow
from cs336_systems.bench.record import Record, Row, read_rows
from cs336_systems.bench.report import (
    STEADY,
    code_notes,
    comparison,
    environments,
    is_steady,
    ladders,
    passes,
    status_cell,
)
from cs336_systems.bench.tuning import TrialRow, ranked
from cs336_systems.bench.workload import DTYPES, MIB, PASSES, WORKING_SCORE_MATRICES, AttentionShape

TEMPLATE = "REPORT.template.md"
WIDTH = 120
KINDS: dict[str, type[Record]] = {"model_size": ModelRow, "registers": TrialRow}  # by a key that only their lines have


class Pair(NamedTuple):
    """Two measurements that differ in one respect: a baseline, and what is compared with it."""

    first: Any  # a Record; which kind, the file says
    second: Any


def read_any(path: Path) -> list[Record]:
    """The rows of a benchmark's file, whichever benchmark wrote it."""
    first = path.read_text(encoding="utf-8").partition("\n")[0]
    kind = next((kind for key, kind in KINDS.items() if f'"{key}":' in first), Row)
    return read_rows(path, kind)


class Rows:
    """What a template asks of the files below `folder`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._read = cache(read_any)

    def rows(self, path: str, **where: object) -> list[Any]:
        """The rows of a file whose fields have these values; `n` stands for both lengths.

        Raises:
            ValueError: there is none, or no such field.
        """
        wanted = {"n_queries" if name == "n" else name: value for name, value in where.items()}
        found = [row for row in self._read(self.folder / path) if all(getattr(row, k) == v for k, v in wanted.items())]
        if not found:
            raise ValueError(f"{path} has no row with {where}")
        return found

    def one(self, path: str, **where: object) -> Any:
        """The only row with these values.

        Raises:
            ValueError: there is none, or more than one.
        """
        found = self.rows(path, **where)
        if len(found) > 1:
            raise ValueError(f"{path} has {len(found)} rows with {where}")
        return found[0]

    def beside(self, path: str, row: Any, **changes: object) -> Any:
        """The row of a file that differs from `row` in these fields alone.

        Raises:
            ValueError: there is none, or the rows have no such field.
        """
        if unknown := changes.keys() - set(row.KEY):
            raise ValueError(
                f"{path} has no rows that differ in {', '.join(unknown)}; allowed are {', '.join(row.KEY)}"
            )
        return self.one(path, **{name: getattr(row, name) for name in row.KEY} | changes)

    def pairs(self, path: str, changes: dict[str, object], **where: object) -> list[Pair]:
        """Each row with these values, and the one beside it that has `changes`."""
        return [Pair(row, self.beside(path, row, **changes)) for row in self.rows(path, **where)]

    def steps(self, path: str, names: Sequence[str], **where: object) -> list[Pair]:
        """The only rows with these values of each implementation and the one named after it."""
        return [Pair(*found) for found in pairwise(self.one(path, implementation=name, **where) for name in names)]

    def table(self, path: str, names: Sequence[str], baseline: str, memory: bool = True, **where: object) -> str:
        """The lines of a comparison without title and notes, in order of size.

        Raises:
            ValueError: one of the names has no row.
        """
        found = [row for row in self._of(path, names, where) if row.implementation in names]
        found.sort(key=lambda row: (row.d, row.n_queries, row.n_keys, PASSES.index(row.pass_)))
        return _lines(comparison(found, "", names, baseline, memory=memory).to_markdown())

    def ladder(self, path: str, names: Sequence[str], baseline: str, **where: object) -> str:
        """The lines of the ladder of the one workload that these rows are of.

        Raises:
            ValueError: one of the names has no row; the rows are of several workloads.
        """
        found = [row for row in self._of(path, names, where) if row.implementation != CEILING]
        tables = ladders(found, "", names, baseline)
        if len(tables) > 1:
            raise ValueError(f"{path} has {len(tables)} workloads with {where}")
        return _lines(tables[0].to_markdown())

    def _of(self, path: str, names: Sequence[str], where: dict[str, object]) -> list[Any]:
        found = self.rows(path, **where)
        if missing := [name for name in names if name not in {row.implementation for row in found}]:
            raise ValueError(f"{path} has no row of {', '.join(missing) or 'nothing'} with {where}")
        if not names:
            raise ValueError(f"a table of {path} names no implementation")
        return found

    def curve(self, path: str) -> dict[str, Any]:
        """A run of `train_lm.py`: its settings, its environment, and a loss for each step.

        Raises:
            ValueError: it is no JSON, or the run has not come to its last step.
        """
        run = json.loads((self.folder / path).read_text(encoding="utf-8"))
        if len(run["losses"]) != run["settings"]["steps"]:
            raise ValueError(f"{path} has {len(run['losses'])} of {run['settings']['steps']} steps")
        return run

    def there(self, path: str) -> bool:
        """Whether there is such a file: a part of the report may be of a benchmark that has not run."""
        return (self.folder / path).is_file()

    def file(self, path: str) -> str:
        """`path`, for a link.

        Raises:
            ValueError: no such file lies below the folder.
        """
        if not self.there(path):
            raise ValueError(f"{self.folder / path} is linked, but is not there")
        return path


def _lines(markdown: str) -> str:
    return "\n".join(line for line in markdown.splitlines() if line.startswith("|"))


def figure(row: Record, field: str) -> float:
    """What was measured of a row.

    Raises:
        ValueError: nothing was.
    """
    value = getattr(row, field)
    if value is None:
        raise ValueError(f"{row.key} has no {field}: it is {row.status}")
    return value


def median(row: Record) -> float:
    """A row's median in milliseconds."""
    return figure(row, "median_ms")


def ratio(a: Record, b: Record, field: str = "median_ms") -> float:
    """How many times as long as b a took; with `field`, how many times as much of it it has."""
    return figure(a, field) / figure(b, field)


def timed(pairs: Iterable[Pair]) -> list[Pair]:
    """Those pairs of which both were timed.

    Raises:
        ValueError: there is none.
    """
    found = [pair for pair in pairs if pair.first.status == pair.second.status == "ok"]
    if not found:
        raise ValueError("of no pair both rows were timed")
    return found


def ratios(pairs: Iterable[Pair], field: str = "median_ms") -> list[float]:
    """`ratio` of each pair of which both were timed."""
    return [ratio(*pair, field) for pair in timed(pairs)]


def length(row: Any) -> int:
    """The number of queries, or the context length of a model."""
    return row.context_length if isinstance(row, ModelRow) else row.n_queries


def longest(pairs: Iterable[Pair]) -> Pair:
    """The pair with the greatest length of which both were timed."""
    return max(timed(pairs), key=lambda pair: length(pair.first))


def largest(pairs: Iterable[Pair]) -> Pair:
    """The pair with the greatest `ratio` of which both were timed."""
    return max(timed(pairs), key=lambda pair: ratio(*pair))


def gains_from(pairs: Iterable[Pair], field: str = "median_ms") -> int | None:
    """The least length from which on, in each pair, the second has less of `field`, or fits in memory while the first
    does not. None: not even so at the greatest length. Pairs of which neither fits say nothing.
    """

    def needed(row: Record) -> float:
        return math.inf if row.status == "oom" else figure(row, field)

    decided = [(length(a), needed(b) < needed(a)) for a, b in pairs if not a.status == b.status == "oom"]
    last_loss = max((n for n, gain in decided if not gain), default=0)
    return min((n for n, _ in decided if n > last_loss), default=None)


def exponent(rows: Iterable[Any], field: str) -> float:
    """The p of the power law c·n^p that fits `field` best: least squares on logarithms.

    Raises:
        ValueError: the rows are of fewer than two lengths, or one has no figure.
    """
    points = [(math.log(length(row)), math.log(figure(row, field))) for row in rows]
    if len(points) < 2:
        raise ValueError(f"no power law goes through {len(points)} points")
    return statistics.linear_regression(*zip(*points, strict=True)).slope


def shape_of(row: Row) -> AttentionShape:
    """The workload of a row."""
    return AttentionShape(row.batch, row.heads, row.n_queries, row.n_keys, row.d, DTYPES[row.dtype], row.causal)


def softmax_bytes(shape: AttentionShape) -> int:
    """Of an entry of S in softmax, which is computed in float32 at least."""
    return torch.promote_types(shape.dtype, torch.float32).itemsize


class Kept(NamedTuple):
    """Tensors that live until the backward."""

    what: str
    entries: str
    bytes: int

    @property
    def mib(self) -> float:
        return self.bytes / MIB


def kept(row: Row) -> list[Kept]:
    """What the graph of `cs336_systems.attention.naive_attention` keeps, counted from its equations.

    Raises:
        ValueError: the row is of another implementation.
    """
    if row.implementation != "naive":
        raise ValueError(f"{row.implementation} keeps something else than naive attention")
    shape = shape_of(row)
    rows, bytes_each, wide = shape.scores // shape.n_keys, shape.dtype.itemsize, softmax_bytes(shape)
    counted = [
        Kept("Q, K, V and the output O", "4·B·n·d", shape.io_bytes),
        Kept("Q / √d", "B·n·d", rows * shape.d * bytes_each),
        Kept("exp(S − m), m being the maxima of the rows of S", "B·n²", wide * shape.scores),
        Kept("P = exp(S − m) / l", "B·n²", bytes_each * shape.scores),
        Kept("l, the sums of the rows of exp(S − m)", "B·n", wide * rows),
        Kept("where l is 0, one byte each", "B·n", rows),
    ]
    if shape.causal:
        counted.append(Kept("the causal mask, one byte an entry", "n²", shape.n_queries * shape.n_keys))
    return counted


def working(row: Row) -> list[Kept]:
    """What the backward of `kept` holds beside it at its worst moment, that of the division in softmax."""
    shape = shape_of(row)
    return [
        Kept("dQ, dK, dV and dO, at most", "4·B·n·d", shape.io_bytes),
        Kept(
            f"{WORKING_SCORE_MATRICES} matrices of the division's backward",
            f"{WORKING_SCORE_MATRICES}·B·n²",
            WORKING_SCORE_MATRICES * softmax_bytes(shape) * shape.scores,
        ),
    ]


def gaps(a: dict[str, Any], b: dict[str, Any]) -> list[float]:
    """How far the losses of two training runs lie apart at each step.

    Raises:
        ValueError: the runs differ in more than the attention.
    """
    if differ := [name for name in a["settings"] if name != "attention" and a["settings"][name] != b["settings"][name]]:
        raise ValueError(f"two training runs have another {', '.join(differ)}")
    return [abs(x["loss"] - y["loss"]) for x, y in zip(a["losses"], b["losses"], strict=True)]


def measured(value: Any) -> Any:
    """`value`, which the template is about to print.

    Raises:
        ValueError: it is None.
    """
    if value is None:
        raise ValueError("a figure is printed that was not measured: it is None")
    return value


def cell(row: Record, field: str = "median_ms", form: str = "{:.3f}", unit: float = 1) -> str:
    """A figure as it stands in a table, ~ before a time that may not repeat, or why there is none."""
    if row.status != "ok":
        return status_cell(row)
    return ("" if field != "median_ms" or is_steady(row) else "~") + form.format(figure(row, field) / unit)


def _formatted(form: str, unit: float = 1) -> Callable[[float | None], str]:
    return lambda value: form.format(measured(value) / unit)


def _gain(pair: Pair, field: str = "median_ms") -> str:
    return f"{ratio(*pair, field):.2f}x" if pair.first.status == pair.second.status == "ok" else "-"


def _span(values: Sequence[float], form: str = "{:.2f}") -> str:
    least, most = form.format(min(values)), form.format(max(values))
    return least if least == most else f"{least} to {most}"


FILTERS: dict[str, Any] = {
    "ms": lambda row: f"{median(row):.3f} ms",
    "gib": _formatted("{:.1f} GiB", 1024),
    "mib": _formatted("{:,.1f} MiB"),
    "times": _formatted("{:.2f}"),
    "percent": _formatted("{:.1f} %", 0.01),
    "whole": _formatted("{:,.0f}"),
    "loss": _formatted("{:.4f}"),
    "cell": cell,
    "gain": _gain,
    "span": _span,
}
NAMES: dict[str, Any] = {
    "CEILING": CEILING,
    "STEADY": STEADY,
    "WORKING_SCORE_MATRICES": WORKING_SCORE_MATRICES,
    "Pair": Pair,
    "code_notes": code_notes,
    "environments": environments,
    "exponent": exponent,
    "gains_from": gains_from,
    "gaps": gaps,
    "kept": kept,
    "largest": largest,
    "longest": longest,
    "passes": passes,
    "ranked": ranked,
    "ratio": ratio,
    "ratios": ratios,
    "working": working,
}


def render(folder: Path, names: Mapping[str, Any]) -> str:
    """The report that the template in `folder` and the files below it make.

    Args:
        names: what the template knows by name besides.
    """
    rows = Rows(folder)
    environment = Environment(
        loader=FileSystemLoader(folder),
        undefined=StrictUndefined,
        finalize=measured,
        keep_trailing_newline=True,
        trim_blocks=True,
    )
    environment.filters |= FILTERS
    asked = (
        *(rows.rows, rows.one, rows.beside, rows.pairs, rows.steps, rows.table, rows.ladder),
        *(rows.curve, rows.there, rows.file),
    )
    return wrapped(
        environment.get_template(TEMPLATE).render(NAMES | dict(names) | {each.__name__: each for each in asked})
    )


def wrapped(markdown: str) -> str:
    """Paragraphs and list items in lines of at most WIDTH characters; tables, headings, pictures and code as they are.

    A figure is not as long as what it is asked for by, so the template's own lines say nothing.
    """
    blocks: list[list[str]] = []
    inside = False  # a paragraph or a list item
    for line in markdown.splitlines():
        is_text = bool(line.strip()) and not line.startswith(("|", "#", "![", "    "))
        if inside and is_text and not line.startswith("- "):
            blocks[-1].append(line)
        else:
            blocks.append([line])
        inside = is_text
    return "".join(_filled(" ".join(block)) if block[0].strip() else "\n" for block in blocks)


def _filled(text: str) -> str:
    if text.startswith(("|", "#", "![", "    ")):
        return f"{text.rstrip()}\n"
    # A line that began with one of these would begin a list; and "d = 64" stays together.
    glued = re.sub(r"(?<=\S) ([-+*]) ", "\0\\1 ", " ".join(text.split())).replace(" = ", "\0=\0")
    indent = "  " if text.startswith("- ") else ""
    lines = textwrap.fill(glued, WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
    return lines.replace("\0", " ") + "\n"


def place_in_template(error: Exception) -> str:
    """ ", line 7 of REPORT.template.md" where that is where the error came up."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename.endswith(TEMPLATE)]
    return f", line {lines[-1]} of {TEMPLATE}" if lines else ""
