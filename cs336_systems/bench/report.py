"""Rows -> tables, for the console (rich) and for Markdown, with the method and the environment under them."""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import compress
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.markup import escape
from rich.table import Table as RichTable

from cs336_systems.bench.record import AnyRecord, Environment, Record, Row, replace_content
from cs336_systems.bench.source import SOURCE_METHOD, present_source
from cs336_systems.bench.workload import PASSES

ESCAPED_PIPE = r"\|"
STEADY = 5  # percent; on an H200 rows whose passes spread by less repeated within 3, as a test holds
LONGEST_ROW_S = 600  # a row that is compiled and timed takes less

# What tells one line of a table from another: those in _ALWAYS are always columns, the others where they vary; what
# does not vary is said under the table.
_ALWAYS = ("d", "length", "pass")
_LINE_KEYS: dict[str, Callable[[Row], object]] = {
    "dtype": lambda row: row.dtype,
    "causal": lambda row: "yes" if row.causal else "no",
    "batch": lambda row: row.batch,
    "heads": lambda row: row.heads,
    "d": lambda row: row.d,
    "length": lambda row: row.n_queries if row.n_queries == row.n_keys else f"{row.n_queries} x {row.n_keys}",
    "pass": lambda row: row.pass_,
    "float32 matmul precision": lambda row: row.float32_precision,
    "variant": lambda row: row.variant or "-",
}
_NOT_ON_CONSOLE = (" TFLOP/s", " predicted MiB")
_PRECISIONS = {
    "highest": "highest (no TF32)",
    "high": "high (TF32 allowed)",
    "medium": "medium (TF32 or bfloat16 allowed)",
}


@dataclass(frozen=True)
class Table:
    """Cells as they are printed, and the notes that stand under them."""

    title: str
    headers: Sequence[str]
    lines: Sequence[Sequence[str]]
    notes: Sequence[str]

    def to_markdown(self) -> str:
        """The table in GitHub's Markdown: numbers to the right, notes as a list below."""
        head = [_markdown_line(self.headers), _markdown_line(["---:"] * len(self.headers))]
        body = [_markdown_line(line) for line in self.lines]
        notes = [f"- {_one_line(note)}" for note in self.notes]
        return "\n".join([f"# {_one_line(self.title)}", "", *head, *body, "", *notes, ""])

    def print(self, console: Console) -> None:
        """The same table on the console, less the columns that follow from others and would make it too wide."""
        shown = [not header.endswith(_NOT_ON_CONSOLE) for header in self.headers]
        table = RichTable(title=escape(self.title), show_edge=False)
        for header in compress(self.headers, shown):
            table.add_column(escape(header).replace(" ", "\n"), justify="right", vertical="bottom")
        for line in self.lines:
            table.add_row(*map(escape, compress(line, shown)))
        table.width = Console(width=10_000).measure(table).maximum  # a line that runs over is better than cut numbers
        console.print(table, crop=False)
        for note in self.notes:
            say(console, f"- {note}")


def say(console: Console, line: str) -> None:
    """One line of plain text, however long, whatever brackets it has."""
    console.print(line, markup=False, highlight=False, soft_wrap=True)


def write_tables(path: Path, tables: Iterable[Table]) -> None:
    """The tables one under another in a Markdown file.

    Raises:
        OSError: it cannot be written; the file stays as it is.
    """
    replace_content(path, "\n".join(table.to_markdown() for table in tables).encode())


def comparison(
    rows: Iterable[Row],
    title: str,
    names: Sequence[str],
    baseline: str,
    method: Sequence[str] = (),
    memory: bool = True,
) -> Table:
    """One line per workload and pass, implementations side by side.

    Args:
        names: the implementations, in the order of their columns.
        baseline: the one of them over which the others' speed-up is given.
        method: notes on how it was measured; the constants of the grid, the number of passes, the spread, what
            rows have to say and the environment stand there by themselves.
        memory: whether there are columns of what is kept for the backward.
    """
    rows = list(rows)
    varying = [name for name, value in _LINE_KEYS.items() if name in _ALWAYS or len({value(row) for row in rows}) > 1]
    lines: dict[tuple[object, ...], dict[str, Row]] = {}
    for row in rows:
        lines.setdefault(tuple(_LINE_KEYS[name](row) for name in varying), {})[row.implementation] = row

    headers = [*varying, *(f"{name} ms" for name in names), *(f"{name} TFLOP/s" for name in names)]
    headers += [f"{name} speed-up" for name in names if name != baseline]
    if memory:
        headers += [f"{name} {what}" for name in names for what in ("MiB before backward", "predicted MiB")]
    cells = []
    for key, by_name in lines.items():
        found = [by_name.get(name) for name in names]
        line = [*map(str, key), *map(time_cell, found), *(_tflops(row) for row in found)]
        line += [_speed_up(by_name.get(name), by_name.get(baseline)) for name in names if name != baseline]
        if memory:
            line += [cell for row in found for cell in _memory(row)]
        cells.append(line)
    return Table(title, headers, cells, _notes(rows, varying, method))


def _notes(rows: Sequence[Row], varying: Collection[str], method: Sequence[str], what: str = "lines") -> list[str]:
    notes = [_constants(rows, varying), passes(rows), *method, spread(rows), _apart(rows, what)]
    return [note for note in (*notes, *messages(rows, _place), *environments(rows), *code_notes(rows)) if note]


def comparisons(
    rows: Iterable[Row],
    title: str,
    names: Sequence[str],
    baseline: str,
    method: Sequence[str] = (),
    memory: bool = True,
) -> list[Table]:
    """One `comparison` for each dtype, mask, batch and variant among the rows, named in its title; its lines in order
    of size.

    Args:
        names: as in `comparison`; columns that a table has no row for are left out, names that are missing come last.
    """
    settings: dict[tuple[object, ...], list[Row]] = {}
    for row in sorted(rows, key=lambda row: (row.d, row.n_queries, row.n_keys, PASSES.index(row.pass_))):
        settings.setdefault((row.dtype, row.causal, row.batch, row.variant), []).append(row)
    tables = []
    for (dtype, causal, batch, variant), found in settings.items():
        setting = f"{title}: {dtype}, {'causal' if causal else 'not causal'}, batch {batch}"
        setting += f", {variant}" if variant else ""
        tables.append(comparison(found, setting, _measured(names, found), baseline, method, memory))
    return tables


def ladders(
    rows: Iterable[Row], title: str, names: Sequence[str], baseline: str, method: Sequence[str] = ()
) -> list[Table]:
    """One table for each workload among the rows: one line per implementation, its passes and variants side by side.

    Args:
        names: the implementations from the first rung to the last.
        baseline: the implementation over whose times the speed-ups are given.
    """
    workloads: dict[tuple[object, ...], list[Row]] = {}
    for row in rows:
        workload = (row.batch, row.heads, row.n_queries, row.d, row.dtype, row.causal, row.float32_precision)
        workloads.setdefault(workload, []).append(row)
    tables = []
    for (batch, heads, n, d, dtype, causal, _), found in workloads.items():
        timings = sorted(
            {(row.variant, row.pass_) for row in found}, key=lambda timing: (timing[0] or "", PASSES.index(timing[1]))
        )
        counted = [timing for timing in timings if timing[0] == timings[0][0]][-1]  # the last pass of the first variant
        by_timing = {(row.implementation, row.variant, row.pass_): row for row in found}
        headers = ["implementation", *(" ".join(filter(None, (pass_, variant, "ms"))) for variant, pass_ in timings)]
        headers += ["TFLOP/s", "speed-up", "MiB before backward"]
        cells = []
        for name in _measured(names, found):
            of_name = [by_timing.get((name, variant, pass_)) for variant, pass_ in timings]
            last, slowest = (by_timing.get((each, *counted)) for each in (name, baseline))
            cells.append([name, *map(time_cell, of_name), _tflops(last), _speed_up(last, slowest), _memory(last)[0]])
        setting = f"{title}: {batch} x {heads} heads x {n} x {d}, {dtype}, {'causal' if causal else 'not causal'}"
        of_which = headers[1 + timings.index(counted)].removesuffix(" ms")
        notes = [f"TFLOP/s, and the speed-up over {baseline}, are those of {of_which}."]
        tables.append(Table(setting, headers, cells, notes + _notes(found, _LINE_KEYS.keys() - {"pass"}, method)))
    return tables


def rounds(
    rows: Iterable[Row],
    title: str,
    names: Sequence[str],
    compared: Sequence[tuple[str, str]],
    method: Sequence[str] = (),
) -> Table:
    """One line per workload and pass that were measured several times in turns; each round is a variant of its own.

    A variant is "round 1", or "round 1, CUDA graph" where a pass is timed in more ways than one; rows of others are
    left out.

    Args:
        names: the implementations, in the order of their columns: the median over the rounds.
        compared: (name, baseline): for each a column of how many times as long the first takes, within one round; the
            median over the rounds, and the least and the greatest.
    """
    rows = [row for row in rows if (row.variant or "").startswith("round ")]
    numbers: set[str] = set()
    lines: dict[tuple[str, ...], dict[str, dict[object, Row]]] = {}
    for row in rows:
        workload = f"{row.batch} x {row.heads} x {_LINE_KEYS['length'](row)} x {row.d}"
        number, *how = str(row.variant).split(", ")
        numbers.add(number)
        key = (workload, row.dtype, "yes" if row.causal else "no", ", ".join([row.pass_, *how]))
        lines.setdefault(key, {}).setdefault(row.implementation, {})[row.variant] = row
    headers = ["workload", "dtype", "causal", "pass", *(f"{name} ms" for name in names)]
    headers += [f"{name} / {baseline}" for name, baseline in compared]
    cells = []
    for key, found in lines.items():
        of_name = [list(found.get(name, {}).values()) for name in names]
        ratios = [_ratios(found.get(name, {}), found.get(baseline, {})) for name, baseline in compared]
        cells.append([*key, *map(_median_cell, of_name), *map(_span_cell, ratios)])
    notes = [
        f"A workload is batch x heads x length x head dim. Each time is the median of at most {len(numbers)} rounds; "
        "in a round every implementation is timed once, one right after the other. Ratios are those within a round: "
        "their median, and in brackets the least and the greatest."
    ]
    return Table(title, headers, cells, notes + _notes(rows, _LINE_KEYS, method, what="rounds of a line"))


def _ratios(rows: Mapping[object, Row], baselines: Mapping[object, Row]) -> list[float]:
    """How many times as long as the baseline of its round each row took, where both were timed."""
    pairs = [(row, baselines[variant]) for variant, row in rows.items() if variant in baselines]
    return [row.median_ms / other.median_ms for row, other in pairs if row.median_ms and other.median_ms]


def _median_cell(rows: Sequence[Row]) -> str:
    """The median time of a workload's rounds, or why there is none."""
    times = [row.median_ms for row in rows if row.median_ms is not None]
    if not times:
        return status_cell(rows[0] if rows else None)
    return ("" if all(map(is_steady, rows)) else "~") + f"{median(times):.3f}"


def _span_cell(ratios: Sequence[float]) -> str:
    if not ratios:
        return "-"
    span = f" ({min(ratios):.3f} to {max(ratios):.3f})" if len(ratios) > 1 else ""
    return f"{median(ratios):.3f}{span}"


def _measured(names: Sequence[str], rows: Iterable[Row]) -> list[str]:
    """Those of the names that there are rows of, and then the others that there are rows of."""
    measured = {row.implementation: None for row in rows}
    return [name for name in dict.fromkeys((*names, *measured)) if name in measured]


def time_cell(row: Record | None) -> str:
    """A row's time, ~ before one that may not repeat, or why there is none."""
    if row is None or row.status != "ok":
        return status_cell(row)
    return ("" if is_steady(row) else "~") + _fixed(row.median_ms, 3)


def status_cell(row: Record | None) -> str:
    """What stands in a table where a row has no figure."""
    return "-" if row is None else {"oom": "OOM"}.get(row.status, row.status)


def _memory(row: Row | None) -> tuple[str, str]:
    return ("-", "-") if row is None else (_fixed(row.memory_mib, 1), _fixed(row.predicted_memory_mib, 1))


def _tflops(row: Row | None) -> str:
    return "-" if row is None or row.tflops is None else f"{row.tflops:.3g}"


def _fixed(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _speed_up(row: Row | None, baseline: Row | None) -> str:
    if not (row and baseline and row.median_ms and baseline.median_ms):
        return "-"
    times = baseline.median_ms / row.median_ms
    return f"{times:.2f}x" if times >= 0.1 else f"{times:.2g}x"


def _constants(rows: Sequence[Row], varying: Collection[str]) -> str:
    constants = [name for name in ("dtype", "causal", "batch", "heads") if name not in varying]
    return ", ".join(f"{name} {_LINE_KEYS[name](row)}" for row in rows[:1] for name in constants)


def passes(rows: Sequence[Record]) -> str:
    """How many passes the times come of; a sweep that went on with other numbers has rows of each."""
    timed = [row for row in rows if row.median_ms is not None]
    counts = Counter((row.iterations, row.warmup) for row in timed if row.warmup is not None or row.iterations is None)
    texts = [
        f"{iterations} timed passes after {warmup} of warm-up" if iterations else "an unrecorded number of passes"
        for iterations, warmup in counts
    ]
    by_duration = [row.iterations for row in timed if row.warmup is None and row.iterations is not None]
    if by_duration:
        least, most = min(by_duration), max(by_duration)
        count = f"{least} to {most}" if least < most else f"{least}"
        texts.append(f"{count} timed passes, as many as filled a set time")
        counts[None, None] = len(by_duration)
    if len(counts) > 1:
        texts = [f"{text} ({count} rows)" for text, count in zip(texts, counts.values(), strict=True)]
    return f"Times are the median of {', '.join(texts)}." if texts else ""


def spread_of(row: Record) -> float | None:
    """From the 20th to the 80th percentile of a row's passes, in percent of their median; a single one has none."""
    if not row.median_ms or row.p20_ms is None or row.p80_ms is None or row.iterations == 1:
        return None
    return 100 * (row.p80_ms - row.p20_ms) / row.median_ms


def is_steady(row: Record) -> bool:
    """Whether a row's time may be expected to come out alike another time."""
    return (spread_of(row) or 0.0) <= STEADY


def spread(rows: Sequence[Record]) -> str:
    """How far the times can be trusted: throttling clocks or a busy machine show here."""
    spreads = sorted(value for row in rows if (value := spread_of(row)) is not None)
    if not spreads:
        return ""
    unsteady = sum(not is_steady(row) for row in rows)
    text = (
        "Spread, from the 20th to the 80th percentile of a row's passes, over the median: "
        f"{spreads[len(spreads) // 2]:.1f} % for the middle row, {spreads[-1]:.1f} % for the worst, above {STEADY} % "
        f"for {unsteady} of {len(spreads)} rows; each row has its own in the JSONL."
    )
    single = sum(row.median_ms is not None and row.iterations == 1 for row in rows)
    if single:
        text += f" {single} rows of a single pass have none."
    if unsteady:
        text += f" ~ marks those above {STEADY} %: another run may give a time that differs by as much."
        if rows[0].driver:  # on a GPU
            text += " Where a pass takes less than a millisecond, that is mostly the host, which launches its kernels."
    return text


def _apart(rows: Sequence[Row], what: str) -> str:
    """A note on how many lines hold rows that were not measured one right after the other, as a run does it.

    Where another size was measured between them, or they lie longer apart than any row takes, they are of two runs, or
    two runs went on at a time. `what` the lines are called.
    """
    lines: dict[tuple[object, ...], list[float]] = {}  # size and pass -> when its rows were measured
    for row in rows:
        lines.setdefault((_size(row), row.pass_), []).append(_seconds(row))
    apart = sum(
        max(times) - min(times) > LONGEST_ROW_S
        or any(min(times) < _seconds(row) < max(times) and _size(row) != size for row in rows)
        for (size, _), times in lines.items()
    )
    if not apart:
        return ""
    return (
        f"{apart} of {len(lines)} {what} hold rows of several runs, or of one beside which another went on: clocks and "
        "load may have differed."
    )


def _size(row: Row) -> tuple[object, ...]:
    return tuple(value(row) for name, value in _LINE_KEYS.items() if name != "pass")


def _seconds(row: Row) -> float:
    return datetime.fromisoformat(row.time).timestamp()


def messages(rows: Sequence[AnyRecord], where: Callable[[AnyRecord], str]) -> list[str]:
    """What rows have to say, each text once with where it was said."""
    places: dict[str, list[str]] = {}
    for row in rows:
        if row.message:
            places.setdefault(f"{row.implementation}, {row.status}: {short_message(row)}", []).append(where(row))
    return [
        f"{text} ({found[0]}{f', and {len(found) - 1} more' if found[1:] else ''})" for text, found in places.items()
    ]


def short_message(row: Record) -> str | None:
    """A row's message without how much memory was free just then and who held it, which differs from row to row."""
    return row.message.partition(" GPU ")[0] if row.message and row.status == "oom" else row.message


def _place(row: Row) -> str:
    return ", ".join(f"{name} {_LINE_KEYS[name](row)}" for name in _ALWAYS)


def environments(rows: Sequence[Record]) -> list[str]:
    """One line for each environment in which rows were measured: a sweep that went on later may have had several."""
    lines = dict.fromkeys(
        f"Measured on {row.gpu}, driver {row.driver or 'none'}, torch {row.torch}, triton {row.triton or 'none'}, "
        f"{code_of(row)}, float32 matmul precision {_PRECISIONS.get(row.float32_precision, row.float32_precision)}."
        for row in rows
    )
    return list(lines)


def code_of(row: Environment) -> str:
    """The commit and the source of a row, ten digits each."""
    source = f", source {row.source[:10]}" if row.source else ""
    return f"commit {(row.commit or 'unknown')[:10]}{' with local changes' if row.dirty else ''}{source}"


def code_notes(rows: Sequence[Record]) -> list[str]:
    """How a source is computed, and that the code has changed since rows were measured, where it has.

    Rows without a source are older than the code that gives them one.
    """
    older = sum(row.source != present_source() for row in rows)
    which = "these rows were" if older == len(rows) else f"{older} of {len(rows)} rows were"
    changed = f"The code has changed since {which} measured." if older else ""
    return [note for note in (SOURCE_METHOD if any(row.source for row in rows) else "", changed) if note]


def _markdown_line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(_one_line(cell).replace('|', ESCAPED_PIPE) for cell in cells)} |"


def _one_line(text: str) -> str:
    return " ".join(text.split())
