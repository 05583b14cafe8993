"""Small pieces that every kernel uses: how a program finds its work, how tiles enter and leave memory, what is visible.

Inputs (batch, heads, n, d) arrive as `Strided` tuples or, where Hopper's copy engine is to read them, as Triton's
tensor descriptors; L and delta as bare pointers, or as descriptors too. In the portable kernels only `load_tile` and
`load_per_query` know the difference, and outputs are always written by pointer.

Every kernel takes n_batch_heads = batch · heads, and what it is compiled for as one constexpr, T, a `Tiling`. MASKED
says whether the tiles of a loop need comparisons.
"""

from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)


class Strided(NamedTuple):
    """A tensor (batch, heads, n, d) as kernels take it: where it starts, and the steps between its elements."""

    ptr: Any
    batch_stride: Any
    head_stride: Any
    row_stride: Any
    col_stride: Any


@dataclass(frozen=True)
class Constexprs:
    """A base for what kernels take as one constexpr. Its plain values become constexprs, which Triton's shapes need."""

    def __post_init__(self) -> None:
        for field in fields(self):
            object.__setattr__(self, field.name, tl.constexpr(getattr(self, field.name)))


@dataclass(frozen=True)
class Tiling(Constexprs):
    """What a portable kernel is compiled for."""

    D: tl.constexpr  # columns of q, k, v and o
    D_TILE_SIZE: tl.constexpr  # D padded to a power of two
    Q_TILE_SIZE: tl.constexpr  # rows of a query tile
    K_TILE_SIZE: tl.constexpr  # rows of a key tile
    IS_CAUSAL: tl.constexpr
    HEAD_GROUP: tl.constexpr  # see `assigned_tile`
    SKIP_MASKED: tl.constexpr  # see `visible_keys`
    INPUT_PRECISION: tl.constexpr  # of tl.dot, for float32
    BASE_2: tl.constexpr  # see `to_base`


@triton.jit
def assigned_tile(n_tiles, n_heads, n_batch_heads, HEAD_GROUP: tl.constexpr):
    """Which tile of which head this program works on: (tile, batch, head).

    Programs start in the order of their number. Heads go in groups of HEAD_GROUP whose tensors stay in L2 together;
    within a group all heads do tile 0 first, then tile 1, and so on. A kernel that numbers its longest tile 0 therefore
    starts with the longest work and ends with the shortest. Without a causal mask all tiles are alike: HEAD_GROUP is 1.
    """
    program = tl.program_id(0)
    first = program // (n_tiles * HEAD_GROUP) * HEAD_GROUP
    group_size = tl.minimum(n_batch_heads - first, HEAD_GROUP)
    within = program % (n_tiles * HEAD_GROUP)
    batch_head = first + within % group_size
    return within // group_size, batch_head // n_heads, batch_head % n_heads


@triton.jit
def load_tile(x, batch, head, start, n, TILE_SIZE: tl.constexpr, T: tl.constexpr, CHECK_ROWS: tl.constexpr):
    """Rows start, …, start + TILE_SIZE - 1 of one head's matrix (n, D), as a tile (TILE_SIZE, D_TILE_SIZE).

    Columns past D are zeros, and so are rows past n, which may only occur where CHECK_ROWS says so.
    """
    if isinstance(x, tl.tensor_descriptor):
        # The copy engine knows the tensor's shape and fills in the zeros by itself.
        return x.load([batch, head, start, 0]).reshape(TILE_SIZE, T.D_TILE_SIZE)
    else:
        rows = start + tl.arange(0, TILE_SIZE)
        cols = tl.arange(0, T.D_TILE_SIZE)
        pointers = tile_pointers(x, batch, head, start, TILE_SIZE, T.D_TILE_SIZE)
        if CHECK_ROWS and T.D < T.D_TILE_SIZE:
            return tl.load(pointers, mask=(rows < n)[:, None] & (cols < T.D)[None, :], other=0.0)
        elif CHECK_ROWS:
            return tl.load(pointers, mask=(rows < n)[:, None], other=0.0)
        elif T.D < T.D_TILE_SIZE:
            return tl.load(pointers, mask=(cols < T.D)[None, :], other=0.0)
        else:
            return tl.load(pointers)


@triton.jit
def store_tile(x, batch, head, start, n, tile, TILE_SIZE: tl.constexpr, T: tl.constexpr):
    """Store a tile where `load_tile` would read it, without its rows past n and its columns past D."""
    rows = start + tl.arange(0, TILE_SIZE)
    cols = tl.arange(0, T.D_TILE_SIZE)
    pointers = tile_pointers(x, batch, head, start, TILE_SIZE, T.D_TILE_SIZE)
    tl.store(pointers, tile.to(x.ptr.dtype.element_ty), mask=(rows < n)[:, None] & (cols < T.D)[None, :])


@triton.jit
def tile_pointers(x, batch, head, start, TILE_SIZE: tl.constexpr, D_TILE_SIZE: tl.constexpr):
    """Where the elements of a tile lie. In 64 bits: a tensor may have more than 2^31 elements, and any strides."""
    matrix = x.ptr + tl.cast(batch, tl.int64) * x.batch_stride + tl.cast(head, tl.int64) * x.head_stride
    tile = matrix + tl.cast(start, tl.int64) * x.row_stride
    rows = tl.arange(0, TILE_SIZE).to(tl.int64)
    cols = tl.arange(0, D_TILE_SIZE).to(tl.int64)
    return tile + rows[:, None] * x.row_stride + cols[None, :] * x.col_stride


@triton.jit
def per_query(ptr, batch, head, n_heads, n_queries):
    """Where one head's row of a contiguous (batch, heads, n_queries) begins: L and delta are kept like that."""
    return ptr + (tl.cast(batch, tl.int64) * n_heads + head) * n_queries


@triton.jit
def load_per_query(x, batch, head, n_heads, start, n_queries, TILE_SIZE: tl.constexpr, CHECK: tl.constexpr):
    """Entries start, …, start + TILE_SIZE - 1 of one head's row; zeros past n_queries, which may only occur where CHECK
    says so.

    x: a pointer as for `per_query`, or a descriptor of (batch, heads, 1, n_queries).
    """
    if isinstance(x, tl.tensor_descriptor):
        return x.load([batch, head, 0, start]).reshape(TILE_SIZE)
    else:
        queries = start + tl.arange(0, TILE_SIZE)
        pointers = per_query(x, batch, head, n_heads, n_queries) + queries
        return tl.load(pointers, mask=queries < n_queries, other=0.0) if CHECK else tl.load(pointers)


@triton.jit
def store_per_query(ptr, batch, head, n_heads, start, n_queries, values, TILE_SIZE: tl.constexpr):
    """Store where `load_per_query` would read, without entries past n_queries."""
    queries = start + tl.arange(0, TILE_SIZE)
    pointers = per_query(ptr, batch, head, n_heads, n_queries) + queries
    tl.store(pointers, values, mask=queries < n_queries)


@triton.jit
def to_base(x, T: tl.constexpr):
    """x in the units of `exp_in_base`: with BASE_2, log2(e) · x, so that exp2 of it is exp(x).

    The hardware's exponential is exp2. With log2(e) folded into the scale, exp(scale · S - m) takes one multiply-add
    and one exp2 a score, without another multiplication; in return S picks up an error in the last place of float32.
    Kernels therefore take base 2 for 16-bit inputs, and e for float32.
    """
    return x * LOG2_E if T.BASE_2 else x


@triton.jit
def from_base(x, T: tl.constexpr):
    """The inverse of `to_base`."""
    return x * LN_2 if T.BASE_2 else x


@triton.jit
def exp_in_base(x, T: tl.constexpr):
    """exp of the number that `to_base` made x of."""
    return tl.exp2(x) if T.BASE_2 else tl.exp(x)


@triton.jit
def log_in_base(x, T: tl.constexpr):
    """The inverse of `exp_in_base`."""
    return tl.log2(x) if T.BASE_2 else tl.log(x)


@triton.jit
def visible(queries, keys, n_keys, IS_CAUSAL: tl.constexpr):
    """True where a query sees a key: the key exists (j < n_keys) and, if causal, i >= j."""
    if IS_CAUSAL:
        return (keys < n_keys) & (queries >= keys)
    else:
        return keys < n_keys


@triton.jit
def visible_keys(i, n_keys, T: tl.constexpr):
    """(diagonal, end): all queries of the tile at i see all keys before `diagonal`, a multiple of K_TILE_SIZE, and none
    sees a key from `end` on. Between the two lie the diagonal and the ragged edge.

    Without SKIP_MASKED a causal kernel visits every tile and compares it with the mask: a rung of the ladder.
    """
    if not T.IS_CAUSAL:
        diagonal = n_keys
        end = n_keys
    elif T.SKIP_MASKED:
        diagonal = tl.minimum(n_keys, i + 1)
        end = tl.minimum(n_keys, i + T.Q_TILE_SIZE)
    else:
        diagonal = 0
        end = n_keys
    return diagonal // T.K_TILE_SIZE * T.K_TILE_SIZE, end


@triton.jit
def visible_queries(j, n_queries, T: tl.constexpr):
    """(begin, unmasked_begin, unmasked_end), multiples of Q_TILE_SIZE in this order:

        begin | masked: the diagonal | unmasked_begin | unmasked | unmasked_end | masked: the ragged edge | n_queries

    No query before `begin` sees a key of the tile at j. The queries of unmasked tiles see all of its keys. If no tile
    is unmasked, the last two are equal and may exceed n_queries. SKIP_MASKED: as in `visible_keys`.
    """
    if not T.IS_CAUSAL:
        begin = 0
        unmasked_begin = 0
    elif T.SKIP_MASKED:
        begin = j // T.Q_TILE_SIZE * T.Q_TILE_SIZE
        unmasked_begin = tl.cdiv(j + T.K_TILE_SIZE - 1, T.Q_TILE_SIZE) * T.Q_TILE_SIZE
    else:
        begin = 0
        unmasked_begin = tl.cdiv(n_queries, T.Q_TILE_SIZE) * T.Q_TILE_SIZE
    return begin, unmasked_begin, tl.maximum(unmasked_begin, n_queries // T.Q_TILE_SIZE * T.Q_TILE_SIZE)
