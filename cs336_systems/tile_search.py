"""Tiles for the three kernels: which are worth trying, whether they are right, how to run them.

`bench.tuning` measures what this hands it, and `autotune.py` is the command.
"""

import math
import re
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import product
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor

from cs336_systems import launch
from cs336_systems.bench.accuracy import (
    MOST_CHECKED_HEADS,
    SLACK,
    attention_and_gradients,
    error_budget,
    require_within,
)
from cs336_systems.bench.record import Environment, Row
from cs336_systems.bench.report import Table
from cs336_systems.bench.sweep import Measured, classify
from cs336_systems.bench.tuning import FINAL_METHOD, Resources, Trial, TrialRow, ranked, ranking
from cs336_systems.bench.workers import done_apart
from cs336_systems.bench.workload import AttentionShape, Pass
from cs336_systems.implementation import AttentionFunction
from cs336_systems.kernels.tiles import (
    INTERPRETER,
    KERNELS,
    Gpu,
    Tile,
    Tiles,
    padded_head_dim,
    shared_memory_bound,
    shipped_tiles,
)
from cs336_systems.user_tiles import pick_tiles, table_key, write_user_table

COMPILE_S = 300  # after which a tile is given up as one that hangs
# Each length is a multiple of no tile size from 32 on. They have the divisors that Triton compiles for (16) in common
# with most lengths, so that what is checked is the very code that is timed.
CHECK_LENGTHS = (336, 304)
CHECK_BATCH = 2

TILE_METHOD = (
    "A tile is q x k rows, warps, stages of the pipeline, heads side by side where causal (g), tiles fetched by "
    "descriptor or pointers, and the registers that a thread is held to (r), if it is."
)
CANDIDATE_METHOD = (
    "Tried: what the tables have, and tiles that fit into shared memory (--quick: some of them). Left out: one stage "
    "where two fit; fewer than 8 rows of accumulators a warp; accumulators over 4/5 of a thread's registers; "
    "descriptors with a side below 64; a limit of 168 or 128 registers, unless one more program then fits on a "
    "multiprocessor and accumulators fill half of them."
)
CHECK_METHOD = (
    f"Each was first found right at some {CHECK_LENGTHS[0]} queries and {CHECK_LENGTHS[1]} keys, within "
    f"{2 * SLACK} times the error that dense attention has against float64 and {SLACK} roundings of the dtype."
)
KERNEL_FLOPS_METHOD = (
    "FLOPs: those of the matrix products that the kernel does, 2·B·H·n_queries·n_keys·d each, halved when causal: two "
    "in forward, four in dk_dv, three in dq."
)
TIME_NOTE = "A launch allocates its outputs, as in use: at short lengths the host decides and the ranking says little."


def tile_text(tile: Tile) -> str:
    """One word for each choice, as in "64x128 4w 2s g4 desc r168"; the inverse of `tile_from_text`."""
    words = [f"{tile.q_tile_size}x{tile.k_tile_size}", f"{tile.num_warps}w", f"{tile.num_stages}s"]
    words += [f"g{tile.head_group}", "desc" if tile.by_descriptor else "ptr"]
    return " ".join(words + ([f"r{tile.max_registers}"] if tile.max_registers else []))


def tile_from_text(text: str) -> Tile:
    """The tile that `tile_text` wrote.

    Raises:
        ValueError: it wrote no such text.
    """
    match = re.fullmatch("{0}x{0} {0}w {0}s g{0} (desc|ptr)(?: r{0})?".format("([1-9][0-9]{0,3})"), text)
    if match is None:
        raise ValueError(f"{text!r} is no tile; one looks like '64x128 4w 2s g4 desc r168' or '64x64 4w 3s g8 ptr'")
    *numbers, fetched, registers = match.groups()
    q, k, warps, stages, group = map(int, numbers)
    return Tile(q, k, warps, stages, group, fetched == "desc", None if registers is None else int(registers))


@dataclass(frozen=True)
class Operands:
    """What the kernels take: tensors (batch, heads, n, d); L, delta, and L in their base, (batch, heads, n_queries)."""

    q: Float[Tensor, "b h n_queries d"]
    k: Float[Tensor, "b h n_keys d"]
    v: Float[Tensor, "b h n_keys d"]
    o: Float[Tensor, "b h n_queries d"]
    dO: Float[Tensor, "b h n_queries d"]
    L: Float[Tensor, "b h n_queries"]
    L_base: Float[Tensor, "b h n_queries"]
    delta: Float[Tensor, "b h n_queries"]
    causal: bool

    @classmethod
    def of(cls, q: Tensor, k: Tensor, v: Tensor, o: Tensor, dO: Tensor, L: Tensor, causal: bool) -> "Operands":
        """With L in the kernels' base and delta as they make it."""
        _, L_base, delta = launch.launch_dq(q, k, v, o, dO, L, causal, wants_dq=False)
        return cls(q, k, v, o, dO, L, L_base, delta, causal)


@dataclass(frozen=True)
class TunedKernel:
    """A kernel as the search sees it, by the name of its field in `Tiles`."""

    outputs: tuple[str, ...]
    launch: Callable[[Operands, Tile], tuple[Tensor, ...]]
    pass_: Pass
    products: int  # matrix products of the size of Q K^T
    rows: Callable[[Tile], int]  # of the accumulators that stay
    accumulators: Callable[[Tile, int], int]  # float32 numbers held at once by a program, for a width


TUNED = {
    "forward": TunedKernel(
        outputs=("o", "L"),
        launch=lambda x, tile: launch.launch_forward(x.q, x.k, x.v, x.causal, tile),
        pass_="forward",
        products=2,
        rows=lambda tile: tile.q_tile_size,
        accumulators=lambda tile, width: tile.q_tile_size * (width + tile.k_tile_size),  # o, S
    ),
    "dk_dv": TunedKernel(
        outputs=("dk", "dv"),
        launch=lambda x, tile: launch.launch_dk_dv(x.q, x.k, x.v, x.dO, x.L_base, x.delta, x.causal, tile),
        pass_="backward",
        products=4,
        rows=lambda tile: tile.k_tile_size,
        accumulators=lambda tile, width: 2 * tile.k_tile_size * (width + tile.q_tile_size),  # dK, dV; S, dP
    ),
    "dq": TunedKernel(
        outputs=("dq",),
        launch=lambda x, tile: (launch.launch_dq(x.q, x.k, x.v, x.o, x.dO, x.L, x.causal, tile=tile)[0],),
        pass_="backward",
        products=3,
        rows=lambda tile: tile.q_tile_size,
        accumulators=lambda tile, width: tile.q_tile_size * (width + 2 * tile.k_tile_size),  # dQ; S, dP
    ),
}


@dataclass(frozen=True)
class Space:
    """What each choice of a tile is drawn from."""

    sizes: tuple[int, ...]
    warps: tuple[int, ...]
    stages: tuple[int, ...]
    head_groups: tuple[int, ...]  # if none, those of the tables
    max_registers: tuple[int | None, ...]
    with_pointers: bool  # also where descriptors can be had


REGISTERS = 65536  # of a multiprocessor, on every GPU so far
MOST_REGISTERS = 255  # of a thread
FEWER_REGISTERS = (168, 128)  # 12 or 16 warps on a multiprocessor
SMALLEST_BY_DESCRIPTOR = 64


def space(gpu: Gpu, dtype: torch.dtype, quick: bool) -> Space:
    """Where to look on `gpu`: float32 may want smaller tiles, and before Ampere there is no pipeline to speak of."""
    sizes = (32, 64, 128) if dtype.itemsize == 2 else (16, 32, 64, 128)
    stages = (2, 3, 4, 1) if gpu.capability >= (8, 0) else (1, 2)  # which first: --quick takes two
    if quick:
        return Space(sizes[1:], (4, 8), stages[:2], (), (None,), with_pointers=False)
    return Space(sizes, (4, 8), stages, (4, 8), (None, *FEWER_REGISTERS), with_pointers=True)


def candidates(
    kernel: str, shape: AttentionShape, gpu: Gpu, always: Sequence[Tile] = (), quick: bool = False
) -> list[Tile]:
    """The tiles worth trying, as CANDIDATE_METHOD says.

    Args:
        kernel: a field of `Tiles`.
        always: tiles that come first, whatever the rules say of them: what the tables have.
        quick: only some.
    """
    width = padded_head_dim(shape.d)
    (needs,) = (each for each in KERNELS if each.name == kernel)
    where = space(gpu, shape.dtype, quick)
    has_pipeline = gpu.capability >= (8, 0)
    descriptors = gpu.capability >= (9, 0) and shape.d * shape.dtype.itemsize % 16 == 0
    head_groups = where.head_groups or dict.fromkeys(tile.head_group for tile in always)
    # A group of more heads than there are is all of them, and so is the next larger one. Without a mask none is made.
    most = shape.batch * shape.heads if shape.causal else 1
    head_groups = [group for group in head_groups if group <= most] or list(head_groups)[:1]

    def fits(tile: Tile) -> bool:
        return shared_memory_bound(needs, tile, width, shape.dtype, gpu) <= gpu.shared_memory

    def is_worth_it(tile: Tile) -> bool:
        if not fits(tile) or (tile.num_stages == 1 and has_pipeline and fits(replace(tile, num_stages=2))):
            return False
        suits_descriptors = descriptors and min(tile.q_tile_size, tile.k_tile_size) >= SMALLEST_BY_DESCRIPTOR
        if tile.by_descriptor and not suits_descriptors:
            return False
        if not tile.by_descriptor and suits_descriptors and not where.with_pointers:
            return False
        if TUNED[kernel].rows(tile) < 8 * tile.num_warps:
            return False
        accumulators = TUNED[kernel].accumulators(tile, width) / (32 * tile.num_warps)
        if tile.max_registers is not None:
            programs = [REGISTERS // (registers * 32 * tile.num_warps) for registers in (256, tile.max_registers)]
            if programs[1] == programs[0] or 2 * accumulators < tile.max_registers:
                return False
        return accumulators <= 4 / 5 * (tile.max_registers or MOST_REGISTERS)

    drawn = (
        Tile(*choices)
        for choices in product(
            where.sizes, where.sizes, where.warps, where.stages, head_groups, (True, False), where.max_registers
        )
    )
    return list(dict.fromkeys([*always, *filter(is_worth_it, drawn)]))


def interpreted_candidates(kernel: str, quick: bool = False) -> list[Tile]:
    """A few small tiles for Triton's interpreter, where a tile's time says nothing about a GPU."""
    shipped = getattr(INTERPRETER, kernel)
    others = [replace(shipped, q_tile_size=32), replace(shipped, k_tile_size=64)]
    return [shipped, *others[: 1 if quick else None]]


@dataclass(frozen=True)
class Tables:
    """What the tables have for one shape on one device; `gpu` is None in the interpreter, which has one choice.

    Raises:
        TypeError, ValueError: as for `pick_tiles`.
    """

    gpu: Gpu | None
    shipped: Tiles
    in_force: Tiles  # the user's, where there are any

    @classmethod
    def at(cls, shape: AttentionShape, device: torch.device) -> "Tables":
        if device.type != "cuda":
            return cls(None, INTERPRETER, INTERPRETER)
        gpu = launch.gpu_of(device)
        return cls(gpu, shipped_tiles(gpu, shape.d, shape.dtype), pick_tiles(gpu, shape.d, shape.dtype))

    def marks(self, kernel: str) -> dict[str, str]:
        """The kernel's tiles in words, with the names of the tables that they stand in, the shipped one first."""
        marks = {tile_text(getattr(self.shipped, kernel)): "shipped"}
        marks.setdefault(tile_text(getattr(self.in_force, kernel)), "user's table")
        return marks

    def candidates(self, kernel: str, shape: AttentionShape, quick: bool) -> list[Tile]:
        """What is worth trying, the tables' own first."""
        if self.gpu is None:
            return interpreted_candidates(kernel, quick)
        return candidates(kernel, shape, self.gpu, [*map(tile_from_text, self.marks(kernel))], quick)

    def write(self, path: Path, shape: AttentionShape, kernels: Sequence[str], rows: Sequence[TrialRow]) -> list[str]:
        """Put the fastest tile of each kernel into the user's table, where it is not in force already.

        Returns:
            What changed, and what did not, in words.

        Raises:
            UserTableError, OSError: as for `write_user_table`.
        """
        assert self.gpu is not None, "the interpreter has no table"
        said, changed = [f"{path}, {self.gpu.name}, {table_key(shape.d, shape.dtype)}:"], {}
        for kernel in kernels:
            before, timed = getattr(self.in_force, kernel), ranked(rows_of(kernel, rows))
            winner = tile_from_text(timed[0].variant or "") if timed else before
            if winner != before:
                changed[kernel] = winner
            said.append(
                f"  {kernel}: {tile_text(before)} " + (f"-> {tile_text(winner)}" if kernel in changed else "stays")
            )
        if changed:
            write_user_table(path, self.gpu, shape.d, shape.dtype, changed)
        return said


def row_name(kernel: str) -> str:
    """The `implementation` of a kernel's rows."""
    return f"flash_triton.{kernel}"


def rows_of(kernel: str, rows: Sequence[TrialRow]) -> list[TrialRow]:
    """Those of the rows that are the kernel's."""
    return [row for row in rows if row.implementation == row_name(kernel)]


def rankings(
    rows: Sequence[TrialRow],
    kernels: Sequence[str],
    tables: Tables,
    shape: AttentionShape,
    note: str,
    time_method: str,
    shown: int | None = None,
) -> list[Table]:
    """One table for each kernel: its tiles from the fastest to the slowest, with what the tables have marked.

    Args:
        note: stands in the titles.
        shown: as in `bench.tuning.ranking`.
    """
    sizes = f"{shape.batch} x {shape.heads} heads x {shape.n_queries} x {shape.d}"
    setting = f"{sizes}, {shape.dtype_name}, {'causal' if shape.causal else 'not causal'}"
    method = [TILE_METHOD, CANDIDATE_METHOD if tables.gpu else "", CHECK_METHOD, time_method, FINAL_METHOD]
    method += [TIME_NOTE, KERNEL_FLOPS_METHOD]
    return [
        ranking(
            rows_of(kernel, rows),
            f"Tiles of {kernel}: {setting}{f' ({note})' if note else ''}",
            tables.marks(kernel),
            method,
            shown,
        )
        for kernel in kernels
    ]


def log_sum_exp(
    q: Float[Tensor, "b h n_queries d"], k: Float[Tensor, "b h n_keys d"], causal: bool
) -> Float[Tensor, "b h n_queries"]:
    """L (12), densely: the scores in the dtype of q, the sum in float32 at least."""
    S = q @ k.mT * q.shape[-1] ** -0.5
    if causal:
        S = S.masked_fill(~torch.ones_like(S[0, 0], dtype=torch.bool).tril(), -math.inf)
    return torch.logsumexp(S.to(torch.promote_types(S.dtype, torch.float32)), -1)


Job = tuple[str, Tile]
Trials = Mapping[Trial, Job]


@dataclass(frozen=True)
class TileBench:
    """Where tiles are checked and run: one shape on one device. Tensors are made when they are first needed.

    `reference` is the plain attention that every tile has to agree with.
    """

    shape: AttentionShape
    device: torch.device
    reference: AttentionFunction

    def trials(self, tables: Tables, kernels: Sequence[str], recorded: Sequence[TrialRow], quick: bool) -> Trials:
        """The candidates of each kernel, and what there are times of from an earlier run at this shape."""
        environment = Environment.capture(self.device)
        return {
            self.trial(kernel, tile): (kernel, tile)
            for kernel in kernels
            for tile in dict.fromkeys(
                [
                    *tables.candidates(kernel, self.shape, quick),
                    *(tile_from_text(row.variant or "") for row in recorded if self.is_of(row, kernel, environment)),
                ]
            )
        }

    def is_of(self, row: TrialRow, kernel: str, environment: Environment) -> bool:
        """Whether the row holds a time of the kernel at this shape on this device."""
        key = Row.of(row_name(kernel), TUNED[kernel].pass_, self.shape, environment, row.variant).key
        return row.median_ms is not None and row.key == key

    def trial(self, kernel: str, tile: Tile) -> Trial:
        """What `bench.tuning` measures."""
        return Trial(
            kernel=row_name(kernel),
            pass_=TUNED[kernel].pass_,
            variant=tile_text(tile),
            flops=TUNED[kernel].products / 2 * self.shape.flops("forward"),
            check=partial(self.check, kernel, tile),
            run=partial(self.launch, kernel, tile),
            resources=partial(self.resources, kernel, tile),
        )

    def launch(self, kernel: str, tile: Tile) -> tuple[Tensor, ...]:
        """Run the kernel once at the shape that is timed."""
        return TUNED[kernel].launch(self.timed_operands, tile)

    def resources(self, kernel: str, tile: Tile) -> Resources:
        """What Triton made of the kernel; nothing in the interpreter."""
        with launch.launched_kernels() as compiled:
            self.launch(kernel, tile)
        return (
            Resources(compiled[-1].n_regs, compiled[-1].n_spills, compiled[-1].metadata.shared)
            if compiled
            else Resources()
        )

    def check(self, kernel: str, tile: Tile) -> None:
        """Compare the kernel's outputs with dense attention's at CHECK_LENGTHS.

        Raises:
            WrongResultError: one is off, or NaN; the message names each, by how much, and what is allowed.
        """
        operands, exact, allowed = self.checked
        require_within(
            dict(zip(TUNED[kernel].outputs, TUNED[kernel].launch(operands, tile), strict=True)), exact, allowed
        )

    @cached_property
    def timed_operands(self) -> Operands:
        """Standard normal tensors; L is what it is for them on average, log(keys seen) + 1/2, and o is left at zero.

        So no forward runs ahead of the kernel that is tried, and P and dS are of their usual size.
        """
        q, k, v = (x.detach() for x in self.shape.inputs(self.device))
        dO = self.shape.output_gradient(self.device)
        seen = torch.full(q.shape[:-1], self.shape.n_keys, device=self.device)
        if self.shape.causal:
            seen = torch.minimum(seen, torch.arange(1, self.shape.n_queries + 1, device=self.device))
        return Operands.of(q, k, v, torch.zeros_like(q), dO, seen.log() + 0.5, self.shape.causal)

    @cached_property
    def checked(self) -> tuple[Operands, Mapping[str, Tensor], Mapping[str, float]]:
        """Operands of a small ragged shape; the exact outputs; and the error that each may have."""
        shape, dtype = self.shape, self.shape.dtype
        n_queries, n_keys = (n + self.shape.n_queries % 16 for n in CHECK_LENGTHS)
        batch, heads = min(shape.batch, CHECK_BATCH), min(shape.heads, MOST_CHECKED_HEADS)
        small = replace(shape, batch=batch, heads=heads, n_queries=n_queries, n_keys=n_keys)
        q, k, v = (x.detach() for x in small.inputs(self.device))
        dO = small.output_gradient(self.device)
        exact = attention_and_gradients(self.reference, (q, k, v), dO, shape.causal, torch.float64)
        dense = attention_and_gradients(self.reference, (q, k, v), dO, shape.causal, dtype)
        allowed = {name: error_budget(dense[name], exact[name], dtype) for name in exact}
        exact["L"] = log_sum_exp(q.double(), k.double(), shape.causal)
        allowed["L"] = error_budget(log_sum_exp(q, k, shape.causal), exact["L"], torch.float32)
        operands = Operands.of(q, k, v, exact["o"].to(dtype), dO, exact["L"].float(), shape.causal)
        return operands, exact, allowed


def compiled_ahead(
    bench: TileBench, trials: Trials, n_processes: int, todo: Sequence[Trial]
) -> Generator[tuple[Trial, Measured | None]]:
    """Run each trial once in another process, which leaves the compiled kernel in Triton's cache on disk.

    What crashes, hangs or cannot be compiled does so there. What only finds the memory full, which these processes
    share, is left to be measured.
    """
    by_job = {trials[trial]: trial for trial in todo}
    start, lost = partial(_start, replace(bench)), partial(Measured, "error")  # a copy without tensors
    with closing(done_apart(list(by_job), start, lost, n_processes, COMPILE_S)) as done:
        for job, failure in done:
            yield by_job[job], None if failure and failure.status == "oom" else failure


def _start(bench: TileBench) -> Callable[[Job], Measured | None]:
    """In a process of `compiled_ahead`: what compiles and runs a tile."""
    operands = bench.timed_operands  # where memory has no room for them, that is no tile's fault

    def run(job: Job) -> Measured | None:
        kernel, tile = job
        try:
            TUNED[kernel].launch(operands, tile)
            if bench.device.type == "cuda":
                torch.cuda.synchronize(bench.device)
        except Exception as error:
            return Measured(*classify(error))
        return None

    return run
