"""Which code runs: the commit of the checkout, and a hash of the source files that needs no git."""

import os
import stat
import subprocess
from functools import cache
from hashlib import sha1
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("cs336_basics", "cs336_systems")
SOURCE_METHOD = f"Source: what `git ls-tree COMMIT {' '.join(PACKAGES)} | git mktree` prints."


@cache
def present_source() -> str:
    """The hash of the files that this process runs, see `source_of`; computed once."""
    return source_of(ROOT)


def source_of(root: Path) -> str:
    """The hash of the source files in the two packages below `root`, 40 hexadecimal digits, computed without git.

    It is the hash that git gives to a tree of the two folders. In a checkout, anybody can compute it again:

        git ls-tree COMMIT cs336_basics cs336_systems | git mktree

    An installed wheel has the same files and so the same hash. Hidden files, `__pycache__` and `*.pyc` do not count.
    """
    entries = [entry for name in PACKAGES if (entry := _entry(root / name))]
    return _hashed(b"tree", _joined(entries)).hex()


def _entry(path: Path) -> tuple[bytes, bytes, bytes] | None:
    """Git's mode, name and hash of a file or folder, or None for what git does not keep."""
    name = os.fsencode(path.name)
    if path.is_symlink():
        return b"120000", name, _hashed(b"blob", os.fsencode(os.readlink(path)))
    if path.is_dir():
        inside = [entry for each in path.iterdir() if _is_source(each) and (entry := _entry(each))]
        return (b"40000", name, _hashed(b"tree", _joined(inside))) if inside else None
    if not path.is_file():
        return None
    mode = b"100755" if path.stat().st_mode & stat.S_IXUSR and os.name != "nt" else b"100644"
    return mode, name, _hashed(b"blob", path.read_bytes())


def _is_source(path: Path) -> bool:
    return not path.name.startswith(".") and path.name != "__pycache__" and path.suffix != ".pyc"


def _joined(entries: list[tuple[bytes, bytes, bytes]]) -> bytes:
    """A tree object's content; git sorts a folder as if its name ended in a slash."""
    ordered = sorted(entries, key=lambda entry: entry[1] + b"/" * (entry[0] == b"40000"))
    return b"".join(b"%s %s\0%s" % entry for entry in ordered)


def _hashed(kind: bytes, content: bytes) -> bytes:
    return sha1(b"%s %d\0%s" % (kind, len(content), content), usedforsecurity=False).digest()


def present_commit() -> tuple[str | None, bool | None]:
    """The checkout's commit and whether files differ from it; without a checkout $GIT_COMMIT and None."""
    git = ("git", "-C", str(ROOT))
    # Installed into a virtual environment, the package may lie inside another project's checkout.
    if output_of(*git, "rev-parse", "--show-prefix") == "" and (commit := output_of(*git, "rev-parse", "HEAD")):
        # Results land in runs/ while a sweep is under way: they do not make the code another one.
        return commit, bool(output_of(*git, "status", "--porcelain", "--", ".", ":!runs"))
    return os.environ.get("GIT_COMMIT"), None


def output_of(*command: str) -> str | None:
    """What the command prints, stripped; None where it fails or does not exist."""
    try:
        return subprocess.run(command, capture_output=True, encoding="utf-8", check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
