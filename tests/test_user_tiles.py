"""The user's own table of tiles: it goes before the shipped one, is written whole or not at all, and is checked."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from cs336_systems.kernels.tiles import KERNELS, KIB, Gpu, Tile, shared_memory_bound, shipped_tiles
from cs336_systems.user_tiles import UserTableError, pick_tiles, read_user_table, user_table_path, write_user_table

H200 = Gpu("NVIDIA H200", (9, 0), 227 * KIB)
OWN = Tile(32, 64, 2, 4, head_group=2, by_descriptor=True, max_registers=128)


@pytest.fixture
def user_table(tmp_path, monkeypatch) -> Iterator[Path]:
    path = tmp_path / "a" / "tiles.json"
    monkeypatch.setenv("CS336_TILES", str(path))
    pick_tiles.cache_clear()
    yield path
    pick_tiles.cache_clear()


def test_the_users_table_goes_before_the_shipped_one(user_table):
    """For that GPU, width and size of element, and for the kernels it has; everything else is as shipped."""
    shipped = shipped_tiles(H200, 64, torch.bfloat16)
    assert pick_tiles(H200, 64, torch.bfloat16) == shipped
    write_user_table(user_table, H200, 64, torch.bfloat16, {"dq": OWN})
    assert pick_tiles(H200, 64, torch.bfloat16) == replace(shipped, dq=OWN)
    assert pick_tiles(H200, 50, torch.float16) == replace(shipped, dq=OWN), "the same size and padded head dim"
    for other in (
        (H200, 128, torch.bfloat16),
        (H200, 64, torch.float32),
        (replace(H200, name="H100"), 64, torch.float16),
    ):
        assert pick_tiles(*other) == shipped_tiles(*other)
    assert shipped_tiles(H200, 64, torch.bfloat16) == shipped


def test_the_users_table_is_cut_to_fit(user_table):
    write_user_table(user_table, H200, 64, torch.bfloat16, {"forward": replace(OWN, k_tile_size=256)})
    small = replace(H200, shared_memory=64 * KIB)
    picked = pick_tiles(small, 64, torch.bfloat16).forward
    assert picked.num_stages < 4
    assert shared_memory_bound(KERNELS[0], picked, 64, torch.bfloat16, small) <= 64 * KIB


def test_writing_keeps_what_is_there(user_table):
    write_user_table(user_table, H200, 64, torch.bfloat16, {"dq": OWN})
    write_user_table(user_table, replace(H200, name="Ünbekannt"), 64, torch.bfloat16, {"dq": OWN})
    write_user_table(user_table, H200, 64, torch.float16, {"forward": OWN})
    write_user_table(user_table, H200, 64, torch.float32, {"forward": OWN})
    assert read_user_table(user_table) == {
        "NVIDIA H200": {"2/64": {"dq": OWN, "forward": OWN}, "4/64": {"forward": OWN}},
        "Ünbekannt": {"2/64": {"dq": OWN}},
    }
    assert list(user_table.parent.iterdir()) == [user_table]


def test_a_write_that_fails_leaves_the_old_table(user_table, monkeypatch):
    write_user_table(user_table, H200, 64, torch.bfloat16, {"dq": OWN})
    before = user_table.read_bytes()

    def full(self, target):
        raise OSError("No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(OSError, match="No space left"):
        write_user_table(user_table, H200, 64, torch.bfloat16, {"dq": replace(OWN, num_warps=8)})
    assert user_table.read_bytes() == before and list(user_table.parent.iterdir()) == [user_table]


def broken(**changes) -> str:
    values = {"q_tile_size": 64, "k_tile_size": 64, "num_warps": 4, "num_stages": 2, "head_group": 4}
    tile = values | {"by_descriptor": False, "max_registers": None} | changes
    return json.dumps({"NVIDIA H200": {"2/64": {"dq": {k: v for k, v in tile.items() if v != "gone"}}}})


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", r"is no table of tiles: .*; allowed is JSON as autotune.py writes it"),
        ('{"NVIDIA H200": ', r"is no table of tiles"),
        ("[1]", r"the file is \[1\]; allowed: an object"),
        ('{"NVIDIA H200": {"2/63": {}}}', r"NVIDIA H200 has '2/63'; allowed: 2/16, 2/32, 2/64"),
        ('{"NVIDIA H200": {"2/64": {"delta": {}}}}', r"'delta'; allowed: forward, dk_dv, dq"),
        ('{"NVIDIA H200": {"2/64": {"dq": 3}}}', r"NVIDIA H200, 2/64, dq is 3; allowed: an object"),
        (broken(q_tile_size=48), r"q_tile_size of NVIDIA H200, 2/64, dq is 48; allowed: 16, 32, 64, 128, 256"),
        (broken(k_tile_size="64"), r"k_tile_size of .* is '64'; allowed: 16"),
        (broken(num_warps=True), r"num_warps of .* is True; allowed: 1, 2, 4, 8, 16"),
        (broken(num_stages=2.0), r"num_stages of .* is 2.0; allowed: 1 to 8"),
        (broken(by_descriptor=1), r"by_descriptor of .* is 1; allowed: true, false"),
        (broken(max_registers=500), r"max_registers of .* is 500; allowed: null, 16 to 255"),
        (broken(head_group="gone"), r"dq lacks head_group; a tile has q_tile_size,"),
        (broken(skip_masked=False), r"dq has 'skip_masked'; allowed: q_tile_size"),
    ],
)
def test_a_broken_table_is_one_clear_error(user_table, content, said):
    user_table.parent.mkdir()
    user_table.write_text(content, encoding="utf-8")
    with pytest.raises(UserTableError, match=said) as caught:
        pick_tiles(H200, 64, torch.bfloat16)
    assert str(user_table) in str(caught.value)
    with pytest.raises(UserTableError, match=said):
        write_user_table(user_table, H200, 64, torch.bfloat16, {"dq": OWN})
    assert user_table.read_text(encoding="utf-8") == content, "nobody's work is overwritten"


def test_bytes_that_are_no_text_are_one_clear_error(user_table):
    user_table.parent.mkdir()
    user_table.write_bytes(b'{"\xff": 1}')
    with pytest.raises(UserTableError, match="is no table of tiles"):
        pick_tiles(H200, 64, torch.bfloat16)


def test_where_the_users_table_is(tmp_path, monkeypatch):
    assert user_table_path() is None, "the suite's own environment"
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("CS336_TILES", "~/mine.json")
    assert user_table_path() == tmp_path / "mine.json"
    monkeypatch.delenv("CS336_TILES")
    assert user_table_path() == tmp_path / ".config/cs336_systems/tiles.json"


def test_a_table_too_deep_to_read_is_named(tmp_path):
    path = tmp_path / "tiles.json"
    path.write_text("[" * 100_000, encoding="utf-8")
    with pytest.raises(UserTableError, match=r"tiles\.json is no table of tiles"):
        read_user_table(path)
