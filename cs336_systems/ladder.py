"""The ladder of the leaderboard: from plain PyTorch over the first kernel of the assignment to the present one.

From the first kernel on each rung adds one optimisation to the one before, so that the difference is what it is worth.
"""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import replace

from cs336_systems.attention import ATTENTION
from cs336_systems.dense_backward import FlashAttention2TritonDenseBackward
from cs336_systems.flash_triton import FlashAttention2Triton
from cs336_systems.implementation import AttentionFunction, Implementation
from cs336_systems.inputs import Keys, Queries
from cs336_systems.kernels.tiles import Tile, Tiles
from cs336_systems.launch import tiles_changed_by

SMALL_TILE = Tile(q_tile_size=32, k_tile_size=32, num_warps=4, num_stages=2, skip_masked=False)


def _small(tiles: Tiles) -> Tiles:
    return Tiles(SMALL_TILE, SMALL_TILE, SMALL_TILE)


def _without_skipping(tiles: Tiles) -> Tiles:
    return Tiles(*(replace(tile, skip_masked=False) for tile in (tiles.forward, tiles.dk_dv, tiles.dq)))


def _portable(q: Queries, k: Keys, v: Keys, is_causal: bool) -> Queries:
    """FlashAttention2Triton without Hopper's own kernels."""
    return FlashAttention2Triton.apply(q, k, v, is_causal, False)


PORTABLE = replace(
    ATTENTION["flash_triton"],
    name="portable",
    function=_portable,
    description="flash_triton by the kernels that run on every GPU",
)


def _rung(name: str, function: AttentionFunction, description: str, change: Callable[[Tiles], Tiles]) -> Implementation:
    @contextmanager
    def context() -> Generator[None]:
        import torch._dynamo  # cannot be imported by a user without an account

        torch.compiler.reset()
        # The dense backward is compiled for one shape at a time, not generalised over the sizes seen before.
        with tiles_changed_by(change), torch._dynamo.config.patch(automatic_dynamic_shapes=False):
            yield

    return replace(ATTENTION["flash_triton"], name=name, function=function, description=description, context=context)


LADDER = (
    ATTENTION["naive"],
    ATTENTION["compiled"],
    _rung(
        "small_tiles",
        FlashAttention2TritonDenseBackward.apply,
        "a Triton forward in tiles of 32 x 32, all of them visited, and a dense backward under torch.compile",
        _small,
    ),
    _rung("tuned_tiles", FlashAttention2TritonDenseBackward.apply, "small_tiles with tuned tiles", _without_skipping),
    _rung(
        "triton_backward",
        FlashAttention2Triton.apply,
        "tuned_tiles with the backward in Triton too, in two passes",
        _without_skipping,
    ),
    replace(
        PORTABLE,
        name="skipped_tiles",
        description="triton_backward without the tiles that the mask hides, and with comparisons on the diagonal alone",
    ),
    replace(
        ATTENTION["flash_triton"],
        description="FlashAttention2Triton as it is: skipped_tiles, but where Hopper's own kernels apply those",
    ),
)
