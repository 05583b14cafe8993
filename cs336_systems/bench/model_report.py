"""Rows of whole models -> tables."""

from collections.abc import Sequence

from cs336_systems.bench.ceiling import method_of
from cs336_systems.bench.model import MODEL_PASSES, SIZES, ModelRow
from cs336_systems.bench.report import Table, code_notes, environments, messages, passes, spread, time_cell

MIB_PER_GIB = 1024


def model_tables(rows: Sequence[ModelRow], title: str, method: Sequence[str]) -> list[Table]:
    """One table for each dtype, precision and batch; lines are sizes, contexts and passes, attentions side by side.

    An attention is named twice where the model was measured compiled too.
    """
    settings: dict[tuple[object, ...], list[ModelRow]] = {}
    for row in rows:
        settings.setdefault((row.dtype, row.float32_precision, row.batch), []).append(row)
    return [_table(found, title, method) for found in settings.values()]


def _place_in_table(row: ModelRow) -> tuple[int, int, int]:
    return list(SIZES).index(row.model_size), row.context_length, MODEL_PASSES.index(row.pass_)


def _name(row: ModelRow) -> str:
    return f"{row.implementation}, compiled" if row.compiled else row.implementation


def _table(rows: Sequence[ModelRow], title: str, method: Sequence[str]) -> Table:
    first = rows[0]
    names = list(dict.fromkeys(_name(row) for row in rows))
    lines: dict[tuple[str, int, str], dict[str, ModelRow]] = {}
    for row in sorted(rows, key=_place_in_table):
        lines.setdefault((row.model_size, row.context_length, row.pass_), {})[_name(row)] = row

    headers = ["size", "context", "pass", *(f"{name} ms" for name in names), *(f"{name} ± ms" for name in names)]
    headers += [f"{name} tokens/s" for name in names]
    headers += [f"{name} peak GiB" for name in names] + [f"{name} utilisation" for name in names]
    cells = []
    for (size, context, pass_), by_name in lines.items():
        found = [by_name.get(name) for name in names]
        line = [size, f"{context}", pass_, *map(time_cell, found)]
        line += ["-" if row and row.iterations == 1 else _cell(row, "std_ms", "{:.2f}") for row in found]
        line += [_cell(row, "tokens_per_second", "{:,.0f}") for row in found]
        line += [_cell(row, "peak_memory_mib", "{:.1f}", MIB_PER_GIB) for row in found]
        line += [_cell(row, "utilisation", "{:.1%}") for row in found]
        cells.append(line)
    setting = f"{title}: {first.dtype}, batch {first.batch}"
    parameters = ", ".join(
        f"{name} {SIZES[name].parameters:,}" for name in dict.fromkeys(row.model_size for row in rows)
    )
    notes = [
        f"Parameters: {parameters}.",
        passes(rows),
        "± is the standard deviation of a row's passes, around their mean; ms is the median.",
        *method,
        *dict.fromkeys(method_of(row) for row in rows if row.utilisation is not None),
        spread(rows),
        *messages(rows, _where),
        *environments(rows),
        *code_notes(rows),
    ]
    return Table(setting, headers, cells, [note for note in notes if note])


def _where(row: ModelRow) -> str:
    return f"{row.model_size}, context {row.context_length}, {row.pass_}"


def _cell(row: ModelRow | None, field: str, form: str, unit: float = 1) -> str:
    value = None if row is None else getattr(row, field)
    return "-" if value is None else form.format(value / unit)
