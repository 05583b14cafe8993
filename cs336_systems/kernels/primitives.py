"""Small pieces that every kernel uses: how a program finds its work, and how a tile gets in and out of memory.

Tensors (batch, heads, n, d) arrive as `Strided` tuples or, where Hopper's copy engine can read them, as Triton's tensor
descriptors. Only `load_tile` knows the difference.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)


class Strided(NamedTuple):
    """A tensor (batch, heads, n, d) as kernels take it: where it starts and how far apart its elements are."""

    ptr: Any
    batch_stride: Any
    head_stride: Any
    row_stride: Any
    col_stride: Any


@triton.jit
def assigned_tile(n_tiles, n_heads, n_batch_heads, HEAD_GROUP: tl.constexpr):
    """Which tile of which head this program works on: (tile, batch, head).

    Programs start in the order of their number. Heads go in groups of HEAD_GROUP whose tensors stay in L2 together;
    within a group all heads do tile 0 first, then tile 1, ..., so a kernel that numbers its longest tile 0 starts the
    longest work first and ends with the shortest.
    """
    program = tl.program_id(0)
    first = program // (n_tiles * HEAD_GROUP) * HEAD_GROUP
    group_size = tl.minimum(n_batch_heads - first, HEAD_GROUP)
    within = program % (n_tiles * HEAD_GROUP)
    batch_head = first + within % group_size
    return within // group_size, batch_head // n_heads, batch_head % n_heads


@triton.jit
def load_tile(
    x,
    batch,
    head,
    start,
    n,
    D: tl.constexpr,
    TILE_SIZE: tl.constexpr,
    D_TILE_SIZE: tl.constexpr,
    CHECK_ROWS: tl.constexpr,
):
    """Rows `start` to `start` + TILE_SIZE of one head's (n, d) matrix: a tile (TILE_SIZE, D_TILE_SIZE).

    Columns past D are zeros, and so are rows past n; they may only occur where CHECK_ROWS says so.
    """
    rows = tl.arange(0, TILE_SIZE)
    cols = tl.arange(0, D_TILE_SIZE)
    if isinstance(x, tl.tensor_descriptor):
        # The copy engine knows the tensor's shape and fills in the zeros by itself.
        return x.load([batch, head, start, 0]).reshape(TILE_SIZE, D_TILE_SIZE)
    elif CHECK_ROWS and D < D_TILE_SIZE:
        in_range = (start + rows < n)[:, None] & (cols < D)[None, :]
        return tl.load(tile_pointers(x, batch, head, start, rows, cols), mask=in_range, other=0.0)
    elif CHECK_ROWS:
        return tl.load(tile_pointers(x, batch, head, start, rows, cols), mask=(start + rows < n)[:, None], other=0.0)
    elif D < D_TILE_SIZE:
        return tl.load(tile_pointers(x, batch, head, start, rows, cols), mask=(cols < D)[None, :], other=0.0)
    else:
        return tl.load(tile_pointers(x, batch, head, start, rows, cols))


@triton.jit
def store_tile(x, batch, head, start, n, tile, D: tl.constexpr, TILE_SIZE: tl.constexpr, D_TILE_SIZE: tl.constexpr):
    """Store a tile in rows `start` … of one head's (n, d) matrix, without its rows past n and its columns past D."""
    rows = tl.arange(0, TILE_SIZE)
    cols = tl.arange(0, D_TILE_SIZE)
    pointers = tile_pointers(x, batch, head, start, rows, cols)
    tl.store(pointers, tile.to(x.ptr.dtype.element_ty), mask=(start + rows < n)[:, None] & (cols < D)[None, :])


@triton.jit
def tile_pointers(x, batch, head, start, rows, cols):
    """Where the elements of a tile lie. In 64 bits: a tensor may have over 2^31 elements, with any strides."""
    matrix = x.ptr + tl.cast(batch, tl.int64) * x.batch_stride + tl.cast(head, tl.int64) * x.head_stride
    tile = matrix + tl.cast(start, tl.int64) * x.row_stride
    return tile + rows[:, None].to(tl.int64) * x.row_stride + cols[None, :].to(tl.int64) * x.col_stride


@triton.jit
def scale_in_base(scale, BASE_2: tl.constexpr):
    """The factor that turns q·k into scores of which `exp_in_base` takes the exponential."""
    return scale * LOG2_E if BASE_2 else scale


@triton.jit
def exp_in_base(x, BASE_2: tl.constexpr):
    """exp2 or exp.

    The hardware's exponential is exp2, and exp(S - m) = exp2(log2(e) · S - log2(e) · m): with log2(e) folded into the
    scale, base 2 saves a multiplication for every score. It costs a rounding or two in the last place of float32, so
    float32 inputs go without.
    """
    return tl.exp2(x) if BASE_2 else tl.exp(x)


@triton.jit
def log_in_base(x, BASE_2: tl.constexpr):
    return tl.log2(x) if BASE_2 else tl.log(x)


@triton.jit
def visible(queries, keys, n_keys, IS_CAUSAL: tl.constexpr):
    """Which query sees which key: every query all keys there are, or, causal, key j from query i = j on."""
    if IS_CAUSAL:
        return (keys < n_keys) & (queries >= keys)
    else:
        return keys < n_keys


@triton.jit
def visible_keys(i, n_keys, Q_TILE_SIZE: tl.constexpr, K_TILE_SIZE: tl.constexpr, IS_CAUSAL: tl.constexpr):
    """(end, unmasked_end): the query tile at i sees keys only before `end`, and all of its queries see all keys before
    `unmasked_end`, a multiple of K_TILE_SIZE. Between the two lie the diagonal and the ragged edge.
    """
    if IS_CAUSAL:
        end = tl.minimum(n_keys, i + Q_TILE_SIZE)
        unmasked_end = tl.minimum(n_keys, i + 1)
    else:
        end = n_keys
        unmasked_end = n_keys
    return end, unmasked_end // K_TILE_SIZE * K_TILE_SIZE


@triton.jit
def visible_queries(j, n_queries, Q_TILE_SIZE: tl.constexpr, K_TILE_SIZE: tl.constexpr, IS_CAUSAL: tl.constexpr):
    """(begin, unmasked_begin, unmasked_end): the key tile at j is seen by no query before `begin`, and by all queries
    of the whole tiles from `unmasked_begin` to `unmasked_end`; before them lies the diagonal, after them the ragged
    edge. All three are multiples of Q_TILE_SIZE, in this order.
    """
    if IS_CAUSAL:
        begin = j // Q_TILE_SIZE * Q_TILE_SIZE
        unmasked_begin = tl.cdiv(j + K_TILE_SIZE - 1, Q_TILE_SIZE) * Q_TILE_SIZE
    else:
        begin = 0
        unmasked_begin = 0
    return begin, unmasked_begin, tl.maximum(unmasked_begin, n_queries // Q_TILE_SIZE * Q_TILE_SIZE)
