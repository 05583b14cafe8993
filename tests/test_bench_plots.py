"""bench.plots: every number in a figure is a row's, figures can be told apart and read, and scripts/plot.py."""

import errno
import importlib.util
import runpy
import sys
import warnings
from itertools import combinations
from pathlib import Path

import matplotlib
import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.transforms import Bbox

from cs336_systems.bench import plots as module
from cs336_systems.bench import record
from cs336_systems.bench.plots import STYLES, draw, plan, styles
from cs336_systems.bench.record import Row

from .bench_examples import row

SCRIPT = Path(__file__).resolve().parents[1] / "scripts" / "plot.py"
LENGTHS = (128, 1024, 65536)
SPEED = {"naive": 1.0, "compiled": 2.0, "flash_triton": 40.0}


def at(n: int, name: str = "naive", **changes) -> Row:
    """A row of length `n` whose numbers belong to no other length and implementation."""
    ms = n / SPEED.get(name, 3.0)
    numbers = {"median_ms": ms, "p20_ms": 0.9 * ms, "p80_ms": 1.2 * ms, "tflops": 1e6 / ms, "memory_mib": 2 * ms}
    if changes.get("status", "ok") != "ok":
        numbers = dict.fromkeys(numbers) | {"memory_mib": 2 * ms}  # the forward may fit where the backward does not
    sizes = {"n_queries": n, "n_keys": n, "predicted_memory_mib": 3.0 * n}
    return row(implementation=name, **sizes | numbers | changes)


def grid(**changes) -> list[Row]:
    return [at(n, name, d=d, **changes) for n in LENGTHS for name in SPEED for d in (16, 64)]


def figures(rows: list[Row], baseline: str | None = None) -> dict[str, Figure]:
    """First word of the file name -> figure, of rows that make one figure of each kind."""
    plots = plan(rows, baseline)
    found = {plot.file_name.split("-")[0]: plot.figure("title") for plot in plots}
    assert len(found) == len(plots)
    return found


def lines(axes: Axes, label: str) -> dict[str | None, Line2D]:
    """Implementation -> its line with that label in the legend."""
    return {line.get_gid(): line for line in axes.get_lines() if line.get_label() == label}


def numbers(xs: object) -> list[float]:
    return np.asarray(xs, dtype=float).tolist()


def points(axes: Axes, name: str) -> dict[float, float]:
    line = lines(axes, name).get(name)
    return dict(zip(numbers(line.get_xdata()), numbers(line.get_ydata()), strict=True)) if line else {}


def crosses(axes: Axes) -> dict[str | None, list[float]]:
    return {name: numbers(line.get_xdata()) for name, line in lines(axes, "out of memory").items()}


def bands(axes: Axes) -> dict[str | None, list[float]]:
    """Implementation -> the ordinates of its band's corners."""
    return {
        band.get_gid(): np.concatenate(
            [np.asarray(path.vertices, dtype=float)[:, 1] for path in band.get_paths()]
        ).tolist()
        for band in axes.collections
    }


def footer(figure: Figure) -> str:
    return figure.texts[1].get_text()


def test_points_are_the_rows_numbers():
    rows = grid()
    found = figures(rows[::-1])  # whatever order they were measured in
    assert list(found) == ["latency", "speedup", "tflops", "memory"]
    number = {
        "latency": lambda row: row.median_ms,
        "speedup": lambda row: row.n_keys / row.median_ms,  # naive takes n ms
        "tflops": lambda row: row.tflops,
        "memory": lambda row: row.memory_mib,
    }
    for kind, figure in found.items():
        assert [axes.get_title() for axes in figure.axes] == ["d = 16", "d = 64"]
        for axes, d in zip(figure.axes, (16, 64), strict=True):
            for name in SPEED:
                mine = [row for row in rows if (row.implementation, row.d) == (name, d)]
                expected = {row.n_keys: number[kind](row) for row in mine}
                is_baseline = kind == "speedup" and name == "naive"
                assert points(axes, name) == pytest.approx({} if is_baseline else expected), (kind, name)
                assert list(points(axes, name)) == sorted(points(axes, name))


def test_bands_are_p20_to_p80():
    found = figures([at(128, "naive"), at(128, "compiled")])
    expected = {
        "latency": (0.9 * 64, 1.2 * 64),
        "speedup": (2 / 1.2, 2 / 0.9),
        "tflops": (1e6 / 64 / 1.2, 1e6 / 64 / 0.9),
    }
    for kind, (low, high) in expected.items():
        corners = bands(found[kind].axes[0])["compiled"]
        assert (min(corners), max(corners)) == pytest.approx((low, high)), kind
    assert not bands(found["memory"].axes[0])


@pytest.mark.parametrize("missing", ["p20_ms", "p80_ms", "tflops", "memory_mib", "predicted_memory_mib"])
def test_numbers_that_a_row_lacks(missing):
    """The figure loses what the number stood for, and nothing else; matplotlib has no reason to warn."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = figures([at(n, name, **{missing: None}) for n in LENGTHS for name in SPEED])
        for figure in found.values():
            FigureCanvasAgg(figure).draw()
    gone = {"tflops": {"tflops"}, "memory_mib": {"memory"}}.get(missing, set())
    assert found.keys() == {"latency", "speedup", "tflops", "memory"} - gone
    assert points(found["latency"].axes[0], "naive") == {n: n for n in LENGTHS}
    if missing in ("p20_ms", "p80_ms"):
        assert not bands(found["latency"].axes[0]) and "Shaded" not in footer(found["latency"])
    if missing == "predicted_memory_mib":
        assert not lines(found["memory"].axes[0], "predicted")


def test_out_of_memory_is_a_cross_and_no_point():
    rows = [at(n, name) for n in (128, 1024) for name in SPEED] + [at(65536, "flash_triton"), at(65536, status="oom")]
    rows += [at(65536, "compiled", status="error"), at(2048, "compiled", status="unsupported")]
    rows += [at(n, "compiled", d=16, status="oom") for n in (128, 65536)] + [at(128, d=16)]
    for kind, figure in figures(rows).items():
        few, many = figure.axes
        assert crosses(many) == {"naive": [65536]}, kind
        assert crosses(few) == {"compiled": [128, 65536]}, kind
        assert set(points(many, "compiled")) == {128, 1024}
        (cross,) = lines(many, "out of memory").values()
        assert cross.get_color() == STYLES["naive"].colour and cross.get_marker() == "x"
        assert "naive" in [text.get_text() for text in many.texts], "print has no colours"


@pytest.mark.parametrize("status", ["oom", "error", "skipped", "unsupported", None])
def test_a_line_breaks_at_lengths_without_a_number(status):
    """Nothing is drawn between two points that were no neighbours, and a point between two gaps keeps its marker."""
    gaps, lengths = (512, 1024, 4096), [2**power for power in range(8, 15)]
    rows = [at(n, "compiled") for n in lengths if n not in gaps]
    rows += [at(n, "compiled", status=status) for n in gaps if status]
    for kind, figure in figures(rows + [at(n, name) for n in lengths for name in ("naive", "flex")]).items():
        (axes,) = figure.axes
        line, others = points(axes, "compiled"), points(axes, "flex")
        assert list(line) == list(others) == lengths, kind
        assert [n for n, y in line.items() if np.isnan(y)] == list(gaps), kind
        assert not np.isnan(list(others.values())).any(), kind
        assert lines(axes, "compiled")["compiled"].get_marker() == STYLES["compiled"].marker
        if kind != "memory":
            band = next(band for band in axes.collections if band.get_gid() == "compiled")
            spans = [(path.get_extents().x0, path.get_extents().x1) for path in band.get_paths()]
            assert spans == [(256, 256), (2048, 2048), (8192, 16384)], kind


def test_footer_says_what_has_no_number_and_why():
    lengths = [2**power for power in range(7, 14)]
    rows = [at(n, name, d=d) for n in lengths for name in ("naive", "flash_triton") for d in (16, 64)]
    assert not any("No number" in footer(figure) for figure in figures(rows).values())

    rows += [at(n, "compiled", d=d, status="ok" if n < 1024 else "error") for n in lengths for d in (16, 64)]
    rows += [at(n, "flash_pytorch", d=d) for n in (128, 256, 8192) for d in (16, 64)]
    rows += [at(n, "flex", d=d, status="ok" if n == 128 else "error") for n in (128, 256) for d in (16, 64)]
    rows += [at(n, name) for n in (128, 256, 8192) for name in ("a", "b")]
    rows += [at(n, name, d=16) for n in lengths for name in ("a", "b")]
    for kind, figure in figures(rows).items():
        text = (
            "No number: compiled, d 16, 64: error at 4 lengths from 1024 to 8192; "
            "flash_pytorch, d 16, 64: not measured at 4 lengths from 512 to 4096; "
            "flex, d 16, 64: error at 256, not measured at 5 lengths from 512 to 8192; "
            "a, b, d 64: not measured at 4 lengths from 512 to 4096."
        )
        assert text in footer(figure).replace("\n", " "), kind


def test_footer_leaves_out_what_the_figure_tells_and_what_cannot_run():
    """Crosses and predictions need no words, and a baseline's gap is everyone's."""
    rows = [at(n, "flex") for n in LENGTHS] + [at(128, tflops=None)]
    rows += [at(1024, status="error"), at(65536, status="oom"), at(1024, "compiled", status="skipped")]
    rows += [at(n, "compiled") for n in (128, 65536)] + [at(128, "sdpa_flash", status="unsupported")]
    rows += [at(n, "sdpa_flash", d=16, status="unsupported") for n in LENGTHS] + [at(n, d=16) for n in LENGTHS]
    rows += [at(n, name, d=16) for n in LENGTHS for name in ("compiled", "flex")]
    expected = {
        "latency": "No number: naive, d 64: error at 1024; compiled, d 64: skipped at 1024.",
        "speedup": "No number: naive, d 64: error at 1024; compiled, d 64: skipped at 1024.",
        "tflops": "No number: naive, d 64: not recorded at 128, error at 1024; compiled, d 64: skipped at 1024.",
        "memory": "No number: naive, d 64: error at 1024.",
    }
    found = figures(rows)
    for kind, text in expected.items():
        assert text in footer(found[kind]).splitlines()
    rows += [at(65536, "flex", pass_=pass_, d=32) for pass_ in ("forward", "backward")] + [at(65536, d=32)]
    rows += [at(128, "flex", pass_="forward", d=32, status="error"), at(128, "flex", pass_="backward", d=32)]
    memory = next(plot for plot in plan(rows) if plot.kind.file_stem == "memory").figure("title")
    assert "flex" not in footer(memory).split("No number")[1], "the other pass tells the memory"


def test_what_only_ran_out_of_memory_is_in_the_legend():
    rows = [at(n, name) for n in LENGTHS for name in ("naive", "flex")]
    for kind, figure in figures([*rows, *(at(n, "compiled", status="oom") for n in LENGTHS)]).items():
        labels = [text.get_text() for text in figure.legends[0].get_texts()]
        assert labels.count("compiled") == labels.count("out of memory") == 1, kind
        assert not figure.axes[0].texts, "there is no room beside crosses at each length"


def test_crosses_lie_above_all_lines():
    rows = [*grid(), at(2**17, d=64, status="oom"), at(2**17, "compiled", d=16, status="oom")]
    rows.append(at(1, "matmul", tflops=1e6))
    for kind, figure in figures(rows).items():
        for axes in figure.axes:
            drawn = [line for line in axes.get_lines() if line.get_label() != "out of memory"]
            top = max(axes.transData.transform((1, y))[1] for line in drawn for y in numbers(line.get_ydata()))
            (cross,) = lines(axes, "out of memory").values()
            height = axes.transAxes.transform((0, numbers(cross.get_ydata())[0]))[1]
            assert top < height - 5, kind
            assert height < axes.bbox.y1


def test_memory_is_shown_once_for_all_passes():
    rows = [at(128), at(1024), at(128, pass_="backward"), at(1024, pass_="backward", status="oom")]
    rows += [at(2048, pass_=pass_, status="oom") for pass_ in ("forward", "backward")]
    names = [plot.file_name for plot in plan(rows)]
    assert [name for name in names if name.startswith("memory")] == ["memory-float32-highest-causal.png"]
    (axes,) = plan(rows)[-1].figure("title").axes
    assert points(axes, "naive") == {128: 256, 1024: 2048}
    assert crosses(axes) == {"naive": [2048]}, "at 1024 the forward tells the memory"


def test_prediction_goes_on_where_memory_ends():
    rows = [at(128), at(1024, status="oom"), at(2048, status="skipped"), at(4096, status="unsupported")]
    (axes,) = figures(rows)["memory"].axes
    prediction, line = lines(axes, "predicted")["naive"], lines(axes, "naive")["naive"]
    assert numbers(prediction.get_xdata()) == [128, 1024, 2048]
    assert numbers(prediction.get_ydata()) == [384, 3072, 6144]
    assert prediction.get_linewidth() < line.get_linewidth() and prediction.is_dashed()
    assert prediction.get_color() == line.get_color()


def test_ceiling_is_the_matmul_of_the_same_dtype_precision_and_gpu():
    others = [{"dtype": "bfloat16"}, {"float32_precision": "high"}, {"gpu": "another"}, {"status": "oom"}]
    rows = [*grid(), *(at(8, "matmul", **{"tflops": 999.0} | change) for change in others)]
    assert not any("matmul" in str(line.get_label()) for line in figures(rows)["tflops"].axes[0].get_lines())

    rows += [at(8, "matmul", tflops=51.23, d=8, batch=1), at(16, "matmul", tflops=50.0, pass_="backward")]
    found = figures(rows)
    for axes in found["tflops"].axes:
        line = lines(axes, "matmul without tensor cores, 51.2 TFLOP/s")["matmul"]
        assert numbers(line.get_ydata()) == [51.23] * 2
        assert line.is_dashed()
    for kind in ("latency", "memory", "speedup"):
        assert len(found[kind].axes) == 2, "matmul has no panel"
        assert not any("matmul" in str(line.get_gid()) for line in found[kind].axes[0].get_lines())


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("matmul without tensor cores", {}),
        ("matmul in float32 with TF32", {"float32_precision": "high"}),
        ("matmul in bfloat16", {"dtype": "bfloat16"}),
        ("matmul in float32", {"driver": None}),  # on a CPU
    ],
)
def test_the_legend_says_which_matmul_it_is(name, changes):
    """A kernel on tensor cores lies above a matmul without, and that is no error."""
    found = figures([*grid(**changes), at(8, "matmul", tflops=51.23, **changes)])
    assert lines(found["tflops"].axes[0], f"{name}, 51.2 TFLOP/s")


def test_a_full_disk_names_the_figure(tmp_path, monkeypatch):
    full = OSError(errno.ENOSPC, "No space left on device")
    monkeypatch.setattr(record.Path, "write_bytes", lambda *_: (_ for _ in ()).throw(full))
    with pytest.raises(OSError, match=r"No space left on device, the file stays as it is: '.*latency-float32-.*\.png'"):
        draw(grid(), tmp_path, "title")
    assert not list(tmp_path.iterdir())


def test_speed_up_over_another_baseline():
    found = figures(grid(), baseline="compiled")
    axes = found["speedup"].axes[0]
    assert points(axes, "naive") == {n: 0.5 for n in LENGTHS}
    assert not points(axes, "compiled")
    assert "compiled = 1" in [text.get_text() for text in found["speedup"].legends[0].get_texts()]
    assert not any("naive" in plot.file_name for plot in plan(grid(), "compiled"))
    assert "speedup" not in figures([at(128, "compiled")]), "naive was not measured"


def test_nothing_to_draw_is_an_error(tmp_path):
    cases = [
        ([], None, "there are no rows to plot"),
        ([at(128, status="error"), at(256, status="oom")], None, "none of the 2 rows has a number to plot"),
        ([at(128, "matmul")], None, "none of the 1 rows has a number to plot"),
        (grid(), "sdpa", "the baseline 'sdpa' is none of the rows' implementations: naive, compiled, flash_triton"),
    ]
    for rows, baseline, message in cases:
        with pytest.raises(ValueError, match=message):
            draw(rows, tmp_path / "figures", "title", baseline)
    assert not list(tmp_path.iterdir())


def test_file_names(tmp_path):
    rows = [at(128, dtype="bfloat16"), at(128, dtype="float16", causal=False, pass_="forward_backward")]
    paths = draw(rows, tmp_path / "new" / "figures", "title")
    assert [path.name for path in paths] == [
        "latency-bfloat16-causal-forward.png",
        "latency-float16-not-causal-forward-backward.png",
        "tflops-bfloat16-causal-forward.png",
        "tflops-float16-not-causal-forward-backward.png",
        "memory-bfloat16-causal.png",
        "memory-float16-not-causal.png",
    ]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in paths)


def test_a_figure_for_each_setting():
    """What was measured under other conditions is never a point of the same line, nor a file of the same name."""
    changes: list[dict] = [
        {},
        {"batch": 1},
        {"heads": 16},
        {"variant": "a/b"},
        {"variant": "a b"},
        {"gpu": "NVIDIA B200"},
    ]
    changes += [{"float32_precision": "high"}, {"n_queries": 1}, {"dtype": "bfloat16"}]
    plots = plan([at(n, **change) for n in (128, 256) for change in changes])
    names = [plot.file_name for plot in plots if plot.kind.file_stem == "latency"]
    assert names == [
        "latency-float32-highest-causal-forward-batch-8-heads-1-nvidia-h200.png",
        "latency-float32-highest-causal-forward-batch-1-heads-1-nvidia-h200.png",
        "latency-float32-highest-causal-forward-batch-8-heads-16-nvidia-h200.png",
        "latency-float32-highest-causal-forward-batch-8-heads-1-a-b-nvidia-h200.png",
        "latency-float32-highest-causal-forward-batch-8-heads-1-a-b-nvidia-h200-2.png",
        "latency-float32-highest-causal-forward-batch-8-heads-1-nvidia-b200.png",
        "latency-float32-high-causal-forward-batch-8-heads-1-nvidia-h200.png",
        "latency-float32-highest-causal-forward-batch-8-heads-1-1-queries-nvidia-h200.png",
        "latency-bfloat16-causal-forward.png",
    ]
    for plot in plots:
        assert sum(len(panel.rows) for panel in plot.panels) == 2
    few_queries = next(plot for plot in plots if plot.setting.n_queries).figure("title").axes[0]
    assert few_queries.get_xlabel() == "Keys (tokens)" and set(points(few_queries, "naive")) == {128, 256}


def test_an_implementation_looks_the_same_in_every_figure():
    rows = [*grid(), *grid(dtype="bfloat16", pass_="backward")[6:]]
    rows += [at(n, name, dtype=dtype) for n in LENGTHS for name, dtype in (("b", "float32"), ("c", "bfloat16"))]
    rows.append(at(128, "a", dtype="float16"))
    looks: dict[str, set] = {}
    for plot in plan(rows):
        for axes in plot.figure("title").axes:
            for line in axes.get_lines():
                if line.get_label() == line.get_gid():
                    look = (line.get_color(), line.get_marker(), line.is_dashed(), line.get_linewidth())
                    looks.setdefault(str(line.get_gid()), set()).add(look)
    assert looks.keys() == {*SPEED, "a", "b", "c"}
    assert all(len(look) == 1 for look in looks.values())
    assert len({look[:2] for each in looks.values() for look in each}) == len(looks)
    assert looks["naive"].pop()[:2] == (STYLES["naive"].colour, STYLES["naive"].marker)


def test_styles_differ_in_print():
    names = ["naive", "compiled", "flash_pytorch", "flash_triton", "sdpa_flash", "sdpa_cudnn", "sdpa_efficient", "flex"]
    assert list(STYLES) == names
    for one, other in combinations(STYLES.values(), 2):
        assert one.marker != other.marker and one.dashes != other.dashes and one.colour != other.colour
    okabe_ito = {"#000000", "#e69f00", "#56b4e9", "#009e73", "#f0e442", "#0072b2", "#d55e00", "#cc79a7"}
    assert {to_hex(style.colour) for style in STYLES.values()} - okabe_ito == {"#808080"}
    unknown = styles([at(128, f"new_{i:02}") for i in range(30)])
    assert list(unknown) == sorted(unknown), "Python orders a set's names anew in each run"
    assert len({(style.colour, style.marker) for style in unknown.values()}) == 30
    assert not {style.marker for style in unknown.values()} & {style.marker for style in STYLES.values()}


def test_axes():
    found = figures([at(2**power, name) for power in range(7, 17) for name in SPEED])
    for kind, (scale, label) in {
        "latency": ("log", "Median time (ms)"),
        "speedup": ("log", "Speed-up over naive (×)"),
        "tflops": ("linear", "TFLOP/s"),
        "memory": ("log", "Memory (MiB)"),
    }.items():
        figure = found[kind]
        (axes,) = figure.axes
        FigureCanvasAgg(figure).draw()
        ticks = [text.get_text() for text in axes.get_xticklabels()]
        assert ticks == ["128", "256", "512", "1k", "2k", "4k", "8k", "16k", "32k", "64k"]
        assert (axes.get_xscale(), axes.get_yscale()) == ("log", scale)
        assert (axes.get_xlabel(), axes.get_ylabel()) == ("Sequence length (tokens)", label)
        low, high = axes.get_ylim()
        values = [(axes.yaxis.get_major_formatter()(y), y) for y in axes.get_yticks() if low <= y <= high]
        assert len(values) >= 3
        assert low == 0 if scale == "linear" else low > 0
        assert all(float(text.replace(",", "")) == pytest.approx(y) for text, y in values), "as a person writes them"


@pytest.mark.parametrize(
    ("lengths", "labels"),
    [
        ((100, 256), ["100", "256"]),
        ((100, 1000, 2560, 50257, 1000000), ["100", "1000", "2.5k", "50257", "1000000"]),
        ((100,), ["100"]),
        ((100, 110, 1024, 2**16), ["100", "", "1k", "64k"]),  # a second label would lie on the first
        (range(100, 1300, 100), ["64", "128", "256", "512", "1k", "2k"]),  # one length more than there may be ticks
    ],
)
def test_ticks_are_the_measured_lengths(lengths, labels):
    for kind, figure in figures([at(n, name) for n in lengths for name in SPEED]).items():
        (axes,) = figure.axes
        canvas = FigureCanvasAgg(figure)
        canvas.draw()
        ticks = axes.get_xticklabels()
        assert [text.get_text() for text in ticks] == labels, kind
        if len(lengths) <= module.MOST_TICKS:
            assert numbers(axes.get_xticks()) == list(lengths)
        boxes = [text.get_window_extent(canvas.get_renderer()) for text in ticks if text.get_text()]
        assert not any(one.overlaps(other) for one, other in combinations(boxes, 2)), kind


@pytest.mark.parametrize("span", [1.01, 1.5, 3, 30, 1e6])
def test_logarithmic_axes_always_have_numbers(span):
    rows = [at(128, p20_ms=None), at(256, p20_ms=None)]
    rows += [at(n, "compiled", median_ms=ms, p20_ms=None) for n, ms in ((128, 128 / 1.2), (256, 256 / 1.2 / span))]
    found = figures(rows)
    for axes in (found["latency"].axes[0], found["speedup"].axes[0]):
        low, high = axes.get_ylim()
        assert 2 <= sum(low <= y <= high for y in axes.get_yticks()) <= 10


def test_title_and_footer_say_what_was_measured():
    rows = [at(128), at(256, commit="c" * 40, dirty=True, torch="2.15.0")]
    found = figures(rows)
    title = found["latency"].texts[0].get_text()
    assert title == "title: time of one pass\nfloat32 (matmul precision highest), causal, forward, batch 8, 1 head"
    for text in (
        "NVIDIA H200, torch 2.11.0, triton 3.6.0, commit abc123\n",
        "NVIDIA H200, torch 2.15.0, triton 3.6.0, commit cccccccccc with local changes",
        "20th to 80th percentile",
    ):
        assert text in footer(found["latency"])
    assert "FLOPs: forward 4·B·H" in footer(found["tflops"])
    assert "Predicted: q, k, v, o" in footer(found["memory"])
    assert "Shaded" not in footer(found["memory"]), "it was read once"
    many = figures([at(128 * 2**i, commit=str(i)) for i in range(9)])
    assert footer(many["latency"]).endswith("commit 2\nand 6 other environments")


def test_lines_that_cover_one_another_are_named():
    """All flash kernels keep the same bytes: the memory figure has one line for them."""
    rows = [at(n, name) for n in LENGTHS for name in SPEED]
    rows += [at(n, "flex", memory_mib=1.001 * 2 * n / 40) for n in LENGTHS]
    found = figures(rows)
    assert "One line at this scale: flash_triton, flex." in footer(found["memory"])
    assert "One line" not in footer(found["latency"])


def _boxes(figure: Figure) -> dict[str, Bbox]:
    """What must not overlap, in pixels: panels with all their labels, legend, title, footer."""
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    renderer = canvas.get_renderer()
    boxes = {f"panel {i}": axes.get_tightbbox(renderer) for i, axes in enumerate(figure.axes)}
    boxes |= {text.get_text(): text.get_window_extent(renderer) for text in figure.texts}
    return {name: box for name, box in boxes.items() if box} | {"legend": figure.legends[0].get_window_extent(renderer)}


@pytest.mark.parametrize("head_dims", [(64,), (16, 64), (8, 16, 32, 64, 128)])
def test_nothing_overlaps_or_is_cut_off(head_dims):
    names = [*STYLES, "a_rather_long_name_of_a_kernel"]
    gpu = "A GPU of many words, " * 10
    rows = [at(n, name, d=d, gpu=gpu) for n in (128, 2**16) for name in names for d in head_dims]
    rows += [at(n, name, d=d, gpu=gpu, status="oom") for n in (2**19, 2**20) for name in names[:2] for d in head_dims]
    rows += [at(64, name, d=d, gpu=gpu, status="oom") for name in names[-1:] for d in head_dims]
    rows.append(at(8, "matmul", gpu=gpu, tflops=743.2))
    for plot in plan(rows)[-2:]:  # throughput has the longest legend and footer, memory the longest numbers
        figure = plot.figure("A title that is longer than the figure is wide, $or _nearly so, if it has one panel")
        boxes = _boxes(figure)
        for (name, box), (other, against) in combinations(boxes.items(), 2):
            assert not box.overlaps(against), f"{plot.file_name}: {name} and {other}"
        for name, box in boxes.items():
            assert figure.bbox.x0 <= box.x0 and box.x1 <= figure.bbox.x1, f"{plot.file_name}: {name}"
            assert figure.bbox.y0 <= box.y0 and box.y1 <= figure.bbox.y1, f"{plot.file_name}: {name}"


def test_same_rows_same_bytes_whatever_the_user_configured(tmp_path):
    (plain, *_) = draw([at(128), at(256)], tmp_path / "plain", "title")
    with matplotlib.rc_context({"font.size": 30, "savefig.bbox": "tight", "axes.facecolor": "black"}):
        (styled, *_) = draw([at(128), at(256)], tmp_path / "styled", "title")
        assert matplotlib.rcParams["font.size"] == 30
    assert plain.read_bytes() == styled.read_bytes()


def test_needs_no_display_and_no_pyplot(tmp_path, monkeypatch):
    """pyplot keeps every figure alive and, with a window system about, may open windows."""
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)  # to import it is an ImportError
    spec = importlib.util.spec_from_file_location("plots_again", module.__file__)
    assert spec and spec.loader
    again = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, again)
    spec.loader.exec_module(again)
    assert len(again.draw([at(128)], tmp_path, "title")) == 3
    assert type(again.plan([at(128)])[0].figure("title").canvas) is FigureCanvasAgg


def _write(path: Path, rows: list[Row]) -> Path:
    path.write_text("".join(f"{row.to_json()}\n" for row in rows), encoding="utf-8")
    return path


def _run(monkeypatch, *arguments: object) -> None:
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *map(str, arguments)])
    runpy.run_path(str(SCRIPT), run_name="__main__")


def test_script_draws_beside_the_rows(tmp_path, monkeypatch, capsys):
    _run(monkeypatch, _write(tmp_path / "metrics.jsonl", [at(128)]))
    paths = [Path(line) for line in capsys.readouterr().out.splitlines()]
    assert [path.name.split("-")[0] for path in paths] == ["latency", "tflops", "memory"]
    assert set(paths) == set(tmp_path.glob("*.png"))


def test_figures_of_two_files_in_one_folder(tmp_path, monkeypatch):
    for name in ("one", "two"):
        _run(monkeypatch, _write(tmp_path / f"{name}.jsonl", [at(128)]))
        assert len(list((tmp_path / name).glob("*.png"))) == 3
    assert not list(tmp_path.glob("*.png"))


def test_script_options(tmp_path, monkeypatch, capsys):
    path = _write(tmp_path / "metrics.jsonl", [at(128), at(128, "compiled")])
    _run(monkeypatch, path, "--out-dir", tmp_path / "figures", "--baseline", "compiled", "--title", "T")
    assert "figures/speedup-over-compiled-float32-highest-causal-forward.png" in capsys.readouterr().out.replace(
        "\\", "/"
    )
    assert len(list((tmp_path / "figures").iterdir())) == 4


def test_script_says_what_is_wrong_in_one_line(tmp_path, monkeypatch):
    whole = at(128).to_json()
    for content, arguments, message in (
        (None, (), "No such file or directory"),
        ("", (), "there are no rows to plot"),
        (whole.replace('"p20_ms"', '"p25_ms"') + "\n", (), "line 1 is not a benchmark row: key 'p25_ms' is unknown"),
        (whole + "\nhello\n", (), "line 2 is not a benchmark row"),
        (whole + "\n", ("--baseline", "sdpa"), "the baseline 'sdpa' is none of"),
    ):
        path = tmp_path / "metrics.jsonl"
        if content is not None:
            path.write_text(content, encoding="utf-8")
        with pytest.raises(SystemExit) as exit_:
            _run(monkeypatch, path, *arguments)
        text = str(exit_.value.code)  # a text is printed, and the exit code is 1
        assert text.startswith("error: ") and message in text and "\n" not in text
    assert not list(tmp_path.glob("*.png"))
