"""The user's own table of tiles, which goes before the shipped ones: read, checked, written, and picked from.

`autotune.py --write` writes it, as JSON: at $CS336_TILES, or ~/.config/cs336_systems/tiles.json.
"""

import json
import os
from collections.abc import Collection, Mapping
from dataclasses import asdict, replace
from functools import lru_cache
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch

from cs336_systems.kernels.tiles import HOPPER, KERNELS, Gpu, Tile, Tiles, cut_to_fit, padded_head_dim, shipped_tiles

USER_TABLE_VARIABLE = "CS336_TILES"
USER_TABLE = "~/.config/cs336_systems/tiles.json"


class UserTableError(ValueError):
    """The user's table cannot be read; the message names the file, what came and what is allowed."""


UserTable = dict[str, dict[str, dict[str, Tile]]]
"""GPU name -> `table_key` -> name of a kernel -> tile. In JSON a tile is an object with the fields of `Tile`."""

_TILE_SIZES = (16, 32, 64, 128, 256)
# `skip_masked` is not there: it is for the ladder of benchmarks.
_ALLOWED: dict[str, tuple[Collection[Any], str]] = {
    "q_tile_size": (_TILE_SIZES, "16, 32, 64, 128, 256"),
    "k_tile_size": (_TILE_SIZES, "16, 32, 64, 128, 256"),
    "num_warps": ((1, 2, 4, 8, 16), "1, 2, 4, 8, 16"),
    "num_stages": (range(1, 9), "1 to 8"),
    "head_group": (range(1, 1025), "1 to 1024"),
    "by_descriptor": ((False, True), "true, false"),
    "max_registers": ((None, *range(16, 256)), "null, 16 to 255"),
}


@lru_cache
def pick_tiles(gpu: Gpu, d: int, dtype: torch.dtype) -> Tiles:
    """The tiles for tensors (…, n, d) of `dtype` on `gpu`: the user's own, cut to fit, where there are any.

    Raises:
        TypeError, ValueError: as for `shipped_tiles`.
        UserTableError: the user's table is broken.
    """
    own = read_user_table(user_table_path()).get(gpu.name, {}).get(table_key(d, dtype), {})
    return cut_to_fit(replace(shipped_tiles(gpu, d, dtype), **own), gpu, d, dtype)


def table_key(d: int, dtype: torch.dtype) -> str:
    """How the user's table calls a head dim and dtype: bytes per element/padded head dim, as in "2/64"."""
    return f"{dtype.itemsize}/{padded_head_dim(d)}"


def user_table_path() -> Path | None:
    """$CS336_TILES, or ~/.config/cs336_systems/tiles.json; None where the variable is set to nothing."""
    named = os.environ.get(USER_TABLE_VARIABLE)
    return None if named == "" else Path(os.path.expanduser(named or USER_TABLE))


def read_user_table(path: Path | None) -> UserTable:
    """The user's table; empty where there is none.

    Raises:
        UserTableError: the file cannot be read, is no JSON, or says something that is not allowed.
    """
    if path is None:
        return {}
    try:
        values = json.loads(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except PermissionError as error:
        if not os.environ.get(USER_TABLE_VARIABLE):
            return {}  # nobody asked for it: with HOME left at another user's, attention has to work
        raise UserTableError(f"{path} cannot be read: {error.strerror}") from error
    except (OSError, ValueError, RecursionError) as error:
        raise UserTableError(
            f"{path} is no table of tiles: {error}; allowed is JSON as autotune.py writes it"
        ) from error

    def entries(value: Any, where: str, allowed: Collection[str] | None = None) -> dict[str, Any]:
        """value, once it is sure that it is an object with no keys but the allowed ones."""
        if not isinstance(value, dict):
            raise UserTableError(f"{path}: {where} is {value!r}; allowed: an object")
        for key in value:
            if allowed is not None and key not in allowed:
                raise UserTableError(f"{path}: {where} has {key!r}; allowed: {', '.join(allowed)}")
        return value

    def tile(value: Any, where: str) -> Tile:
        fields = entries(value, where, _ALLOWED)
        if missing := [name for name in _ALLOWED if name not in fields]:
            raise UserTableError(f"{path}: {where} lacks {', '.join(missing)}; a tile has {', '.join(_ALLOWED)}")
        for name, (allowed, text) in _ALLOWED.items():
            # By type as well: in Python True is 1, and 64.0 is 64.
            if not any(type(fields[name]) is type(each) and fields[name] == each for each in allowed):
                raise UserTableError(f"{path}: {name} of {where} is {fields[name]!r}; allowed: {text}")
        return Tile(**fields)

    keys = [f"{size}/{width}" for size, width in HOPPER]
    kernels = [kernel.name for kernel in KERNELS]
    return {
        gpu: {
            key: {name: tile(value, f"{gpu}, {key}, {name}") for name, value in entries(of_key, key, kernels).items()}
            for key, of_key in entries(of_gpu, gpu, keys).items()
        }
        for gpu, of_gpu in entries(values, "the file").items()
    }


times_written = 0  # by this process: what was prepared for the tiles before is no longer what they say


def write_user_table(path: Path, gpu: Gpu, d: int, dtype: torch.dtype, tiles: Mapping[str, Tile]) -> None:
    """Put tiles, by name of their kernel, into the user's table, where everything else stays.

    Raises:
        UserTableError: there is a file, and it is broken. OSError: it cannot be written.
    """
    global times_written
    table = read_user_table(path)
    table.setdefault(gpu.name, {}).setdefault(table_key(d, dtype), {}).update(tiles)
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f"{path.name}.{uuid4().hex}.new")  # no other process's
    try:
        beside.write_text(json.dumps(table, default=_tile_to_json, indent=2) + "\n", encoding="utf-8")
        beside.replace(path)  # atomic: there is never half a table
    finally:
        beside.unlink(missing_ok=True)
    times_written += 1
    pick_tiles.cache_clear()


def _tile_to_json(tile: Tile) -> dict[str, Any]:
    return {name: value for name, value in asdict(tile).items() if name in _ALLOWED}
