"""Rows -> PNG figures: time, speed-up, TFLOP/s and memory against the length, from nothing but the rows.

A figure holds the rows of one setting (dtype, mask, pass, …), a panel those of one head dim, a line those of one
implementation. Colour-blind readers and black-and-white print can tell lines apart: colours are Okabe and Ito's, and
each implementation has its own marker and dashes, the same in all figures.
"""

import math
import re
import textwrap
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from io import BytesIO
from pathlib import Path

import matplotlib.style
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, LogLocator, MaxNLocator, NullFormatter, NullLocator

from cs336_systems.bench.ceiling import CEILING, ceiling_name
from cs336_systems.bench.measure import PREDICTION_METHOD
from cs336_systems.bench.record import Row, Status, replace_content
from cs336_systems.bench.report import code_of
from cs336_systems.bench.workload import FLOPS_METHOD, Pass

DEFAULT_BASELINE = "naive"
PERCENTILES = "Shaded: 20th to 80th percentile of a row's passes."
OUT_OF_MEMORY, PREDICTED = "out of memory", "predicted"  # in the legend, once for all implementations
WITH_PREDICTION = ("ok", "oom", "skipped")  # statuses of rows that fit into memory or not; others cannot run at all
NOT_MEASURED, NOT_RECORDED = "not measured", "not recorded"  # no row; a row that is ok, but lacks the figure's number

DPI = 150
LOOK = {"font.size": 9, "axes.spines.top": False, "axes.spines.right": False, "axes.axisbelow": True}
SMALL = 7  # points; footer and names beside crosses
# Inches. matplotlib's layout engines do not keep a legend and a footer apart; fixed places do.
PANEL_WIDTH, PANEL_HEIGHT = 4.0, 2.8
LEFT, RIGHT, COLUMN_GAP, ROW_GAP = 1.12, 0.25, 0.2, 0.6
PANEL_NAME, AXIS_NAME = 0.3, 0.5  # above a panel; below the last row: tick labels and the axis's name
LINE, SMALL_LINE, PADDING = 0.2, 0.14, 0.15
NARROWEST = 6.5  # so that legend and footer of a single panel have room
CHARACTER, SMALL_CHARACTER = 0.082, 0.056  # widths of an average one, and a little more
LEGEND_HANDLE = 0.75  # a legend's line, and the space to the next column
MOST_TICKS, MOST_ENVIRONMENTS, MOST_LENGTHS = 11, 3, 2
LINE_HEIGHT = 0.008  # of a panel's; lines that are closer lie on one another
LANE = 0.065  # of a panel's height, for the crosses of one implementation


@dataclass(frozen=True)
class Style:
    """How an implementation's line looks; `dashes` are points on, points off, and so on, none for a solid line."""

    colour: str
    marker: str
    dashes: tuple[float, ...] = ()
    size: float = 5
    width: float = 1.3

    @property
    def linestyle(self) -> tuple[float, tuple[float, ...]] | str:
        return (0, self.dashes) if self.dashes else "-"


BLACK, GREY, ORANGE, SKY, GREEN, BLUE, VERMILION, PURPLE = (
    "#000000", "#808080", "#E69F00", "#56B4E9", "#009E73", "#0072B2", "#D55E00", "#CC79A7",
)  # fmt: skip

# In the legend's order.
STYLES = {
    "naive": Style(BLACK, "o", (5, 2)),
    "compiled": Style(ORANGE, "s", (5, 2, 1, 2)),
    "flash_pytorch": Style(GREY, "P", (1, 1)),
    "flash_triton": Style(VERMILION, "D", size=5.5, width=2),
    "sdpa_flash": Style(BLUE, "^", (9, 2)),
    "sdpa_cudnn": Style(SKY, "v", (3, 1, 1, 1, 1, 1)),
    "sdpa_efficient": Style(GREEN, "X", (2, 2), size=6),
    "flex": Style(PURPLE, "*", (8, 2, 2, 2), size=8.5),
}
_SPARE_COLOURS = (BLUE, VERMILION, GREEN, PURPLE, BLACK, SKY, ORANGE)
_SPARE_MARKERS = ("<", "p", ">", "h", "d")  # five to seven colours: 35 pairs before one comes again


def styles(rows: Iterable[Row]) -> dict[str, Style]:
    """The style of each implementation among the rows, in the legend's order.

    Names that STYLES does not know get spare styles in alphabetical order: the same in all figures of these rows.
    """
    names = {row.implementation for row in rows} - {CEILING}
    spare = {
        name: Style(_SPARE_COLOURS[i % 7], _SPARE_MARKERS[i % 5], (2 + 2 * (i % 5), 1 + i % 2))
        for i, name in enumerate(sorted(names - STYLES.keys()))
    }
    return {name: style for name, style in (STYLES | spare).items() if name in names}


@dataclass(frozen=True)
class Setting:
    """What the rows of one figure have in common.

    `pass_` is None where the figure shows what is the same in all passes, `n_queries` where each length is that of
    queries and keys alike.
    """

    dtype: str
    float32_precision: str
    causal: bool
    pass_: Pass | None
    batch: int
    heads: int
    n_queries: int | None
    variant: str | None
    gpu: str

    @classmethod
    def of(cls, row: Row) -> "Setting":
        setting = cls(**{field.name: getattr(row, field.name) for field in fields(cls)})
        return replace(setting, n_queries=None) if row.n_queries == row.n_keys else setting

    def title(self) -> str:
        precision = f" (matmul precision {self.float32_precision})" if self.dtype == "float32" else ""
        heads = f"{self.heads} head{'s' if self.heads > 1 else ''}"
        texts = (f"{self.dtype}{precision}", self._mask, self._pass, f"batch {self.batch}", heads, self._queries)
        return ", ".join(text for text in (*texts, self.variant) if text)

    def file_stem(self, figure: str, others: Iterable["Setting"]) -> str:
        """Such as latency-bfloat16-causal-forward; more words only where they tell one of `others` from this.

        float32 always has its precision: times with TF32 must not replace times without.
        """
        texts = {
            "dtype": self.dtype,
            "float32_precision": self.float32_precision,
            "causal": self._mask,
            "pass_": self._pass,
            "batch": f"batch {self.batch}",
            "heads": f"heads {self.heads}",
            "n_queries": self._queries,
            "variant": self.variant,
            "gpu": self.gpu,
        }
        alike = [other for other in others if other.dtype == self.dtype]
        told = {name for name in texts if len({getattr(other, name) for other in alike}) > 1}
        told |= {"dtype", "causal", "pass_"} | ({"float32_precision"} if self.dtype == "float32" else set())
        words = " ".join([figure, *(text for name, text in texts.items() if text and name in told)])
        return re.sub(r"[^a-z0-9]+", "-", words.lower()).strip("-")

    @property
    def _mask(self) -> str:
        return "causal" if self.causal else "not causal"

    @property
    def _pass(self) -> str:
        return (self.pass_ or "").replace("_", " + ")

    @property
    def _queries(self) -> str:
        return f"{self.n_queries} queries" if self.n_queries else ""


@dataclass(frozen=True)
class Point:
    """One row's place at its length; `low` and `high` bound the shaded band, None where the row does not say."""

    y: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class Panel:
    """The rows of one head dim in one setting, and that of the matmul, where there is one."""

    d: int
    rows: Sequence[Row]
    ceiling: Row | None

    @property
    def lengths(self) -> list[int]:
        """Those of all rows, whatever became of them."""
        return sorted({row.n_keys for row in self.rows})

    def of(self, implementation: str) -> list[Row]:
        return [row for row in self.rows if row.implementation == implementation]

    def time(self, implementation: str, length: int) -> float | None:
        """Median in ms."""
        found = [row for row in self.of(implementation) if row.status == "ok" and row.n_keys == length]
        return found[-1].median_ms if found else None


def _no_decoration(axes: Axes, panel: Panel, look: Mapping[str, Style]) -> None:
    """Draw nothing but the lines of measured points."""


@dataclass(frozen=True)
class Kind:
    """One kind of figure.

    `point` makes a row that is ok a point, or None where it has no such number. `decorate` draws what is no line of
    measured points. `base` is that of the logarithmic y axis; None makes it linear, from zero. `explained` are statuses
    whose rows need no word where they have no point: the figure tells in another way.
    """

    file_stem: str
    title: str
    y_label: str
    point: Callable[[Row, Panel], Point | None]
    decorate: Callable[[Axes, Panel, Mapping[str, Style]], None] = _no_decoration
    base: int | None = 10
    per_pass: bool = True
    note: str = ""
    explained: tuple[Status, ...] = ()

    def points(self, implementation: str, panel: Panel) -> dict[int, Point]:
        """Length -> point, by length."""
        rows = sorted(panel.of(implementation), key=lambda row: row.n_keys)
        return {row.n_keys: point for row in rows if row.status == "ok" and (point := self.point(row, panel))}

    def out_of_memory(self, implementation: str, panel: Panel) -> list[int]:
        """Lengths at which the implementation ran out of memory; not where another pass gave the same number."""
        rows = panel.of(implementation)
        fits = {row.n_keys for row in rows if row.status == "ok"}
        return sorted({row.n_keys for row in rows if row.status == "oom"} - fits)

    def gaps(self, implementation: str, panel: Panel) -> dict[int, str]:
        """Length of the panel -> why the implementation has no number and no cross; not where it cannot run."""
        rows = panel.of(implementation)
        if rows and all(row.status == "unsupported" for row in rows):
            return {}  # also at lengths at which nobody asked
        unnamed = {row.n_keys for row in rows if row.status in ("unsupported", *self.explained)}
        unnamed.update(self.points(implementation, panel), self.out_of_memory(implementation, panel))
        reasons = {row.n_keys: NOT_RECORDED if row.status == "ok" else row.status for row in rows}
        return {n: reasons.get(n, NOT_MEASURED) for n in panel.lengths if n not in unnamed}


def _latency(row: Row, panel: Panel) -> Point | None:
    return Point(row.median_ms, row.p20_ms, row.p80_ms) if row.median_ms else None


def _throughput(row: Row, panel: Panel) -> Point | None:
    if not row.tflops or not row.median_ms:
        return None
    work = row.tflops * row.median_ms
    return Point(row.tflops, _over(work, row.p80_ms), _over(work, row.p20_ms))


def _ceiling(axes: Axes, panel: Panel, look: Mapping[str, Style]) -> None:
    if panel.ceiling is not None:
        label = f"{ceiling_name(panel.ceiling)}, {panel.ceiling.tflops:.3g} TFLOP/s"
        axes.axhline(panel.ceiling.tflops or 0, color="0.3", linestyle="--", linewidth=1, label=label, gid=CEILING)


def _memory(row: Row, panel: Panel) -> Point | None:
    return Point(row.memory_mib) if row.memory_mib else None


def _predictions(axes: Axes, panel: Panel, look: Mapping[str, Style]) -> None:
    for name, style in look.items():
        found = {row.n_keys: row.predicted_memory_mib for row in panel.of(name) if row.status in WITH_PREDICTION}
        known = sorted((length, mib) for length, mib in found.items() if mib)
        if known:
            axes.plot(
                *zip(*known, strict=True), color=style.colour, linestyle=(0, (2, 2)), linewidth=0.7,
                label=PREDICTED, gid=name,
            )  # fmt: skip


LATENCY = Kind("latency", "time of one pass", "Median time (ms)", _latency)
THROUGHPUT = Kind("tflops", "throughput", "TFLOP/s", _throughput, _ceiling, base=None, note=FLOPS_METHOD)
MEMORY = Kind(
    "memory",
    "memory before backward",
    "Memory (MiB)",
    _memory,
    _predictions,
    per_pass=False,
    note=PREDICTION_METHOD,
    explained=("skipped",),  # the predicted line goes on
)


def speed_up(baseline: str) -> Kind:
    """The baseline's median time over an implementation's; the band is the implementation's own spread."""

    def point(row: Row, panel: Panel) -> Point | None:
        time = panel.time(baseline, row.n_keys)
        if row.implementation == baseline or not time or not row.median_ms:
            return None
        return Point(time / row.median_ms, _over(time, row.p80_ms), _over(time, row.p20_ms))

    def decorate(axes: Axes, panel: Panel, look: Mapping[str, Style]) -> None:
        style = look[baseline]
        axes.axhline(
            1, color=style.colour, linestyle=style.linestyle, linewidth=1, label=f"{baseline} = 1", gid=baseline
        )

    return Kind(
        f"speedup over {baseline}",
        f"speed-up over {baseline}",
        f"Speed-up over {baseline} (×)",
        point,
        decorate,
        base=2,
        explained=("ok",),  # the baseline has no number there, and its cross or its own gap says so
    )


def _over(dividend: float, divisor: float | None) -> float | None:
    return dividend / divisor if divisor else None


@dataclass(frozen=True)
class Plot:
    """One figure before it is drawn."""

    kind: Kind
    setting: Setting
    panels: Sequence[Panel]
    look: Mapping[str, Style]
    file_name: str

    def figure(self, title: str) -> Figure:
        """The figure; `title` stands above what it shows."""
        with _house_style():
            figure = Figure()
            FigureCanvasAgg(figure)
            _draw_panels(self, figure)
            _arrange(self, figure, title)
            return figure

    def save(self, out_dir: Path, title: str) -> Path:
        """Write the figure into `out_dir`; returns its path.

        Raises:
            OSError: it cannot be written; the file stays as it is.
        """
        path, content = out_dir / self.file_name, BytesIO()
        figure = self.figure(title)
        with _house_style():
            figure.savefig(content, dpi=DPI, metadata={"Software": None})  # the same rows give the same bytes
        replace_content(path, content.getvalue())
        return path


def plan(rows: Sequence[Row], baseline: str | None = None) -> list[Plot]:
    """The figures that the rows have points for.

    Args:
        baseline: over whose time speed-ups are given; by default naive, where the rows have it.

    Raises:
        ValueError: no rows, no points in any of them, or a baseline that none of them has.
    """
    if not rows:
        raise ValueError("there are no rows to plot")
    look = styles(rows)
    if baseline is not None and baseline not in look:
        raise ValueError(f"the baseline {baseline!r} is none of the rows' implementations: {', '.join(look) or 'none'}")
    baselines = [name for name in (baseline or DEFAULT_BASELINE,) if name in look]
    kinds = (LATENCY, *map(speed_up, baselines), THROUGHPUT, MEMORY)
    plots = [plot for kind in kinds for plot in _plan_kind(kind, rows, look)]
    if not plots:
        raise ValueError(f"none of the {len(rows)} rows has a number to plot")
    return plots


def draw(rows: Sequence[Row], out_dir: Path, title: str, baseline: str | None = None) -> list[Path]:
    """Write a PNG for each figure of `plan` into `out_dir`; returns their paths.

    Raises:
        ValueError: as `plan` does, before anything is written.
    """
    plots = plan(rows, baseline)
    out_dir.mkdir(parents=True, exist_ok=True)
    return [plot.save(out_dir, title) for plot in plots]


def _ceilings(rows: Iterable[Row]) -> dict[tuple[str, str, str], Row]:
    """GPU, dtype and precision -> the row of its fastest matmul."""
    timed = [row for row in rows if row.implementation == CEILING and row.status == "ok" and row.tflops]
    timed.sort(key=lambda row: row.tflops or 0)
    return {(row.gpu, row.dtype, row.float32_precision): row for row in timed}


def _plan_kind(kind: Kind, rows: Sequence[Row], look: Mapping[str, Style]) -> Iterator[Plot]:
    settings: dict[Setting, dict[int, list[Row]]] = {}
    for row in rows:
        if row.implementation in look:
            setting = Setting.of(row) if kind.per_pass else replace(Setting.of(row), pass_=None)
            settings.setdefault(setting, {}).setdefault(row.d, []).append(row)

    ceilings = _ceilings(rows)
    stems: list[str] = []
    for setting, by_d in settings.items():
        ceiling = ceilings.get((setting.gpu, setting.dtype, setting.float32_precision))
        panels = [Panel(d, found, ceiling) for d, found in sorted(by_d.items())]
        if not any(kind.points(name, panel) for name in look for panel in panels):
            continue
        shown = [panel for panel in panels if any(kind.points(x, panel) or kind.out_of_memory(x, panel) for x in look)]
        stem = setting.file_stem(kind.file_stem, settings)
        stems.append(stem)
        again = f"-{stems.count(stem)}" if stems.count(stem) > 1 else ""  # variants that differ in signs alone
        yield Plot(kind, setting, shown, look, f"{stem}{again}.png")


def _draw_panels(plot: Plot, figure: Figure) -> None:
    """Lines, bands and crosses into axes that share their limits; where the axes stand comes later."""
    kind, look = plot.kind, plot.look
    for panel in plot.panels:
        axes = figure.add_subplot(sharey=figure.axes[0] if figure.axes else None)
        axes.set_title(f"d = {panel.d}", fontsize="medium")
        axes.grid(color="0.9", linewidth=0.6)
        for name, style in look.items():
            if points := kind.points(name, panel):
                _draw_line(axes, _with_breaks(points, panel.lengths), name, style)
        kind.decorate(axes, panel, look)

    lengths = [row.n_keys for panel in plot.panels for row in panel.rows if row.status in WITH_PREDICTION]
    lanes = [name for name in look if any(kind.out_of_memory(name, panel) for panel in plot.panels)]
    _scale_values(figure.axes[0], kind.base, len(lanes) * LANE)
    for panel, axes in zip(plot.panels, figure.axes, strict=True):
        _scale_lengths(axes, sorted(set(lengths)))
        for lane, name in enumerate(lanes):
            _draw_crosses(axes, kind.out_of_memory(name, panel), 1 - (lane + 0.5) * LANE, name, look[name])


def _with_breaks(points: Mapping[int, Point], lengths: Iterable[int]) -> dict[int, Point]:
    """The points, and a NaN at each of `lengths` between them that has none: there a line ends and begins anew."""
    return {n: points.get(n, Point(math.nan)) for n in lengths if min(points) <= n <= max(points)}


def _draw_line(axes: Axes, points: Mapping[int, Point], name: str, style: Style) -> None:
    axes.plot(
        list(points), [point.y for point in points.values()], label=name, gid=name, color=style.colour,
        linestyle=style.linestyle, linewidth=style.width, marker=style.marker, markersize=style.size,
        markeredgecolor="white", markeredgewidth=0.5,
    )  # fmt: skip
    low = [math.nan if point.low is None else point.low for point in points.values()]
    high = [math.nan if point.high is None else point.high for point in points.values()]
    if any(point.low is not None and point.high is not None for point in points.values()):
        axes.fill_between(list(points), low, high, color=style.colour, alpha=0.2, linewidth=0, gid=name)


def _draw_crosses(axes: Axes, lengths: Sequence[int], height: float, name: str, style: Style) -> None:
    """Crosses in the implementation's lane above all lines; its name beside them, for print has no colours."""
    if not lengths:
        return
    if name not in [line.get_gid() for line in axes.get_lines() if line.get_label() != PREDICTED]:
        _draw_line(axes, {}, name, style)  # its place in the legend
    axes.plot(
        lengths, [height] * len(lengths), transform=axes.get_xaxis_transform(), label=OUT_OF_MEMORY, gid=name,
        color=style.colour, linestyle="none", marker="x", markersize=5.5, markeredgewidth=1.6,
    )  # fmt: skip
    left, right = axes.transLimits.transform(axes.transScale.transform([(lengths[0], 1), (lengths[-1], 1)]))[:, 0]
    is_left = left > 1 - right
    if max(left, 1 - right) * PANEL_WIDTH > len(name) * SMALL_CHARACTER + PADDING:
        axes.annotate(
            name, (lengths[0 if is_left else -1], height), xycoords=axes.get_xaxis_transform(),
            xytext=(-6 if is_left else 6, 0), textcoords="offset points", ha="right" if is_left else "left",
            va="center", fontsize=SMALL, color="0.3", parse_math=False,
        )  # fmt: skip


def _scale_lengths(axes: Axes, lengths: Sequence[int]) -> None:
    shortest, longest = lengths[0], lengths[-1]
    axes.set_xscale("log", base=2)
    axes.set_xlim(shortest / 2**0.5, longest * 2**0.5)
    powers = range(math.floor(math.log2(shortest)), math.ceil(math.log2(longest)) + 1)
    few = len(lengths) <= MOST_TICKS
    ticks = lengths if few else [2**power for power in powers[:: math.ceil(len(powers) / MOST_TICKS)]]
    labels = _tick_labels(ticks, PANEL_WIDTH / (math.log2(longest / shortest) + 1))
    axes.xaxis.set_major_locator(FixedLocator(ticks))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(lambda length, _: labels.get(round(length), ""))


def _tick_labels(ticks: Sequence[int], octave: float) -> dict[int, str]:
    """Tick -> label, for ticks whose label would not run into the one before; `octave` is the inches of a doubling."""
    labels: dict[int, str] = {}
    end = -math.inf
    for tick in ticks:
        text = f"{tick / 1024:g}k" if tick >= 1024 and tick % 256 == 0 else f"{tick}"  # 1.5k, but not 0.976562k
        middle, half = math.log2(tick) * octave, len(text) * CHARACTER / 2
        if middle - half >= end:
            labels[tick] = text
            end = middle + half
    return labels


def _scale_values(axes: Axes, base: int | None, free: float) -> None:
    """Scale, limits and ticks of the shared y axis; the upper `free` of its height stays free."""
    if base is None:
        axes.set_ylim(bottom=0)
    else:
        axes.set_yscale("log", base=base)
    to_height = axes.yaxis.get_transform()
    low, high = to_height.transform(axes.get_ylim())
    axes.set_ylim(top=to_height.inverted().transform([low + (high - low) / (1 - free)])[0])
    if base is not None:
        bottom, top = axes.get_ylim()
        between = (2, 5) if base == 10 and top / bottom < 1000 else ()
        few = top / bottom < 4  # of powers there may be none
        axes.yaxis.set_major_locator(MaxNLocator(5) if few else LogLocator(base, subs=(1, *between)))
        axes.yaxis.set_minor_formatter(NullFormatter())
        axes.yaxis.set_major_formatter(lambda y, _: f"{y:,.10g}")


def _arrange(plot: Plot, figure: Figure, title: str) -> None:
    """Give panels, title, legend and footer their places, each its own."""
    count = len(plot.panels)
    columns = count if count <= 3 else math.ceil(math.sqrt(count))
    rows = math.ceil(count / columns)
    width = max(NARROWEST, LEFT + columns * PANEL_WIDTH + (columns - 1) * COLUMN_GAP + RIGHT)
    panel_width = (width - LEFT - RIGHT - (columns - 1) * COLUMN_GAP) / columns

    header = textwrap.wrap(f"{title}: {plot.kind.title}", int(width / CHARACTER))
    header += textwrap.wrap(plot.setting.title(), int(width / CHARACTER))
    has_bands = any(axes.collections for axes in figure.axes)
    covered, gaps = _coinciding(plot, figure.axes[0]), _gaps(plot)
    notes = (PERCENTILES if has_bands else "", plot.kind.note, *covered, *gaps, *_environments(plot))
    footer = [line for note in notes for line in textwrap.wrap(note, int(width / SMALL_CHARACTER))]
    handles = _legend_handles(plot, figure)
    longest = max(map(len, handles))
    legend_columns = max(1, int((width - 2 * PADDING) / (longest * CHARACTER + LEGEND_HANDLE)))
    legend_rows = math.ceil(len(handles) / legend_columns)

    # From the bottom up, in inches.
    legend_bottom = PADDING + len(footer) * SMALL_LINE + PADDING
    panels_bottom = legend_bottom + legend_rows * LINE + PADDING + AXIS_NAME
    panels_top = panels_bottom + rows * PANEL_HEIGHT + (rows - 1) * ROW_GAP
    height = panels_top + PANEL_NAME + len(header) * LINE + PADDING
    figure.set_size_inches(width, height)
    for index, axes in enumerate(figure.axes):
        row, column = divmod(index, columns)
        left = LEFT + column * (panel_width + COLUMN_GAP)
        bottom = panels_top - (row + 1) * PANEL_HEIGHT - row * ROW_GAP
        axes.set_position((left / width, bottom / height, panel_width / width, PANEL_HEIGHT / height))
        axes.tick_params(labelleft=column == 0)
        axes.set_ylabel(plot.kind.y_label if column == 0 else "")
        axes.set_xlabel(_length_name(plot.setting) if index + columns >= count else "")
    figure.text(0.5, 1 - PADDING / height, "\n".join(header), ha="center", va="top", fontsize="large", parse_math=False)
    figure.text(
        PADDING / width, PADDING / height, "\n".join(footer), va="bottom", fontsize=SMALL, color="0.3", parse_math=False
    )
    legend = figure.legend(
        list(handles.values()), list(handles), loc="lower center", bbox_to_anchor=(0.5, legend_bottom / height),
        ncols=legend_columns, frameon=False, handlelength=4, borderpad=0, borderaxespad=0,
    )  # fmt: skip
    for handle, text in zip(legend.legend_handles, legend.get_texts(), strict=True):
        if text.get_text() in (OUT_OF_MEMORY, PREDICTED) and isinstance(handle, Line2D):
            handle.set_color("0.3")  # it stands for all implementations


def _legend_handles(plot: Plot, figure: Figure) -> dict[str, Artist]:
    """Label -> what it looks like, each once: implementations in their order, then all else."""
    found: dict[str, Artist] = {}
    for axes in figure.axes:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            found.setdefault(label, handle)
    order = {name: index for index, name in enumerate(plot.look)}
    return {label: found[label] for label in sorted(found, key=lambda label: order.get(label, len(order)))}


def _coinciding(plot: Plot, axes: Axes) -> list[str]:
    """Which lines cannot be told apart at the figure's scale, as a note: the last one drawn covers the others."""
    lines: list[tuple[list[str], dict[tuple[int, int], float]]] = []
    for name in plot.look:
        heights = {
            (panel.d, length): axes.transLimits.transform(axes.transScale.transform((1, point.y)))[1]
            for panel in plot.panels
            for length, point in plot.kind.points(name, panel).items()
        }
        for names, others in lines:
            both = heights.keys() & others.keys()
            if both and all(abs(heights[at] - others[at]) < LINE_HEIGHT for at in both):
                names.append(name)
                break
        else:
            lines.append(([name], heights))
    return [f"One line at this scale: {', '.join(names)}." for names, _ in lines if len(names) > 1]


def _gaps(plot: Plot) -> list[str]:
    """What has no number and why, as a note; implementations and head dims that lack the same have one entry."""
    head_dims: dict[tuple[str, str], list[int]] = {}
    for name in plot.look:
        if all(row.status == "unsupported" for panel in plot.panels for row in panel.of(name)):
            continue  # the figure is not about it
        for panel in plot.panels:
            if found := plot.kind.gaps(name, panel):
                head_dims.setdefault((name, _reasons(found)), []).append(panel.d)
    entries: dict[str, list[str]] = {}
    for (name, reasons), found in head_dims.items():
        entries.setdefault(f"d {', '.join(map(str, found))}: {reasons}", []).append(name)
    text = "; ".join(f"{', '.join(names)}, {entry}" for entry, names in entries.items())
    return [f"No number: {text}."] if text else []


def _reasons(gaps: Mapping[int, str]) -> str:
    """Such as "error at 512 and 1024, not measured at 5 lengths from 4096 to 65536"."""
    lengths: dict[str, list[int]] = {}
    for length, reason in gaps.items():
        lengths.setdefault(reason, []).append(length)
    return ", ".join(
        f"{reason} at {' and '.join(map(str, found))}"
        if len(found) <= MOST_LENGTHS
        else f"{reason} at {len(found)} lengths from {found[0]} to {found[-1]}"
        for reason, found in lengths.items()
    )


def _length_name(setting: Setting) -> str:
    return "Keys (tokens)" if setting.n_queries else "Sequence length (tokens)"


def _environments(plot: Plot) -> list[str]:
    """Where the rows were measured; a sweep that went on later may have had several commits."""
    rows = (row for panel in plot.panels for row in panel.rows)
    found = dict.fromkeys(
        f"{row.gpu}, torch {row.torch}, triton {row.triton or 'none'}, {code_of(row)}" for row in rows
    )
    shown = list(found)[:MOST_ENVIRONMENTS]
    return shown + ([f"and {len(found) - len(shown)} other environments"] if len(found) > len(shown) else [])


@contextmanager
def _house_style() -> Generator[None]:
    """The same figures whatever a user's matplotlibrc says."""
    with matplotlib.style.context(["default", LOOK]):
        yield
