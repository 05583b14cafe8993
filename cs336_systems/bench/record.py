"""One row per measurement: its schema, the environment it was measured in, and the JSONL file that keeps it."""

import json
import math
import os
import platform
import subprocess
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, ClassVar, Generic, Literal, NamedTuple, Self, TypeVar, get_args, get_origin
from uuid import uuid4

import torch
from filelock import FileLock

from cs336_systems.bench.workload import AttentionShape, Pass
from cs336_systems.inputs import float32_matmul_precision

Status = Literal["ok", "oom", "skipped", "unsupported", "error"]
ROW_BEGINS = b'{"implementation": '  # also one that a process died in the middle of


class RecordError(ValueError):
    """A line of a JSONL file is no row; the message names the file, the line and what is wrong."""


@dataclass(frozen=True, kw_only=True)
class Environment:
    """Where a row was measured. `gpu` is the CPU's name on a CPU; what does not apply or is unknown is None."""

    gpu: str
    driver: str | None
    torch: str
    triton: str | None
    commit: str | None
    dirty: bool | None
    float32_precision: str

    @classmethod
    def capture(cls, device: torch.device) -> "Environment":
        on_gpu = device.type == "cuda"
        commit, dirty = _commit()
        return cls(
            gpu=torch.cuda.get_device_name(device) if on_gpu else _cpu_name(),
            driver=_driver() if on_gpu else None,
            torch=torch.__version__,
            triton=_version("triton"),
            commit=commit,
            dirty=dirty,
            float32_precision=float32_matmul_precision(device.type),
        )


@dataclass(frozen=True, kw_only=True)
class Record:
    """What any benchmark's row has: how it ended, and where and when. JSON writes the field `pass_` as "pass".

    `warmup` and `iterations` are the passes behind the times; None where nothing was timed, and in older files.
    """

    OPTIONAL: ClassVar[frozenset[str]] = frozenset({"warmup", "iterations"})
    """Keys that a line of JSON may lack."""
    LEFT_OUT: ClassVar[frozenset[str]] = frozenset()
    """Keys that a line of JSON has only where they are set."""
    MEASURED: ClassVar[frozenset[str]] = frozenset({"median_ms", "p20_ms", "p80_ms", "warmup", "iterations"})
    """Fields that are None where nothing was timed."""

    implementation: str
    pass_: str
    median_ms: float | None = None
    p20_ms: float | None = None
    p80_ms: float | None = None
    status: Status
    message: str | None = None
    gpu: str
    driver: str | None
    torch: str
    triton: str | None
    commit: str | None
    dirty: bool | None
    float32_precision: str
    time: str
    warmup: int | None = None
    iterations: int | None = None

    @property
    def key(self) -> Hashable:
        """What makes two rows the same measurement, one of which replaces the other; commit and time do not."""
        raise NotImplementedError

    def to_json(self) -> str:
        """One line of strict JSON, what was measured before how it went: a NaN or an infinity becomes null."""
        common = [field.name for field in fields(Record)]
        own = [field.name for field in fields(self) if field.name not in common]
        values = {_to_key(name): _finite(getattr(self, name)) for name in (*common[:2], *own, *common[2:])}
        written = {key: value for key, value in values.items() if value is not None or key not in self.LEFT_OUT}
        return json.dumps(written, allow_nan=False, ensure_ascii=False)

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """The row that `to_json` wrote.

        Raises:
            ValueError: JSON that is not strict or has another schema.
        """
        values = json.loads(text, parse_constant=_refuse_constant)
        if not isinstance(values, dict):
            raise ValueError(f"a row is a JSON object, not {values!r}")
        types = {_to_key(field.name): field.type for field in fields(cls)}
        missing, unknown = types.keys() - cls.OPTIONAL - values.keys(), values.keys() - types.keys()
        if missing or unknown:
            raise ValueError(f"keys missing: {sorted(missing)}, keys unknown: {sorted(unknown)}")
        for key, value in values.items():
            if not _fits(value, allowed := types[key]):
                raise ValueError(f"{key} is {value!r}; allowed: {_describe(allowed)}")
        if values["status"] == "ok" and values["median_ms"] is None:
            raise ValueError("status is 'ok', but median_ms is null")
        datetime.fromisoformat(values["time"])
        return cls(**{_to_field(key): value for key, value in values.items()})


class Key(NamedTuple):
    """The key of a `Row`."""

    implementation: str
    pass_: Pass
    batch: int
    heads: int
    n_queries: int
    n_keys: int
    d: int
    dtype: str
    causal: bool
    gpu: str
    float32_precision: str
    variant: str | None = None

    @classmethod
    def of(cls, implementation: str, pass_: Pass, shape: AttentionShape, at: Environment, variant: str | None) -> "Key":
        """The key of what is measured at `shape` in the environment `at`."""
        sizes: dict[str, Any] = asdict(shape) | {"dtype": shape.dtype_name}
        return cls(implementation, pass_, **sizes, gpu=at.gpu, float32_precision=at.float32_precision, variant=variant)


@dataclass(frozen=True, kw_only=True)
class Row(Record):
    """One attention implementation, shape and pass, measured once. JSON has `variant` only if it is set."""

    OPTIONAL = Record.OPTIONAL | {"variant"}
    LEFT_OUT = Record.LEFT_OUT | {"variant"}
    MEASURED = Record.MEASURED | {"tflops"}

    pass_: Pass
    batch: int
    heads: int
    n_queries: int
    n_keys: int
    d: int
    dtype: str
    causal: bool
    tflops: float | None = None
    memory_mib: float | None = None
    predicted_memory_mib: float | None = None
    variant: str | None = None

    @property
    def key(self) -> Key:
        return Key(**{name: getattr(self, name) for name in Key._fields})


def _to_key(field: str) -> str:
    return field.rstrip("_")


def _to_field(key: str) -> str:
    return "pass_" if key == "pass" else key  # `pass` is a reserved word in Python


def _fits(value: object, allowed: Any) -> bool:
    """Whether a value of JSON is what a field's annotation says: True is no int, but 2 is a float."""
    if get_origin(allowed) is Literal:
        return value in get_args(allowed)
    if isinstance(allowed, UnionType):
        return any(_fits(value, each) for each in get_args(allowed))
    return type(value) is allowed or (allowed is float and type(value) is int)


def _describe(allowed: Any) -> str:
    if allowed is NoneType:
        return "null"
    return ", ".join(map(_describe, get_args(allowed))) or getattr(allowed, "__name__", str(allowed))


AnyRecord = TypeVar("AnyRecord", bound=Record)


class RowFile(Generic[AnyRecord]):
    """The JSONL file of one sweep, one row per key; whatever moment the process dies at, it can be opened again.

    Opening mends a half-written last line, and keeps the last row where a key occurs twice. `fresh` starts with an
    empty file. `kind` is the class of the rows. Two processes may write to one file: each adds its rows to what is
    there by then.

    Raises:
        RecordError: any other line that is no row, also where it was to start afresh; the file stays as it is.
    """

    def __init__(self, path: Path, fresh: bool = False, kind: type[AnyRecord] = Row) -> None:  # ty: ignore[invalid-parameter-default]
        self.path, self.kind = path, kind
        path.parent.mkdir(parents=True, exist_ok=True)
        self._lock = FileLock(path.with_name(f".{path.name}.lock"))
        with self._lock:
            before = path.read_bytes() if path.exists() else b""
            self.rows = _by_key(_parse(path, before, kind))
            if fresh:
                self.rows = {}
            if before != self._content():
                self._rewrite()

    def put(self, row: AnyRecord) -> None:
        """Add the row, or let it replace the one with the same key; on disk when this returns."""
        with self._lock:
            self._put(row)

    def _put(self, row: AnyRecord) -> None:
        if row.key in self.rows:
            on_disk = _parse(self.path, self.path.read_bytes(), self.kind) if self.path.exists() else ()
            self.rows = _by_key([*self.rows.values(), *on_disk, row])  # another process may have added rows
            self._rewrite()
            return
        self.rows[row.key] = row
        with self.path.open("ab") as file:
            file.write(row.to_json().encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())

    def _content(self) -> bytes:
        return b"".join(row.to_json().encode() + b"\n" for row in self.rows.values())

    def _rewrite(self) -> None:
        replace_content(self.path, self._content())


def replace_content(path: Path, content: bytes) -> None:
    """Give the file this content: whenever the process dies, and whoever reads, it is the old one or the new.

    Raises:
        OSError: it cannot be written; the file stays as it is.
    """
    beside = path.with_name(f"{path.name}.{uuid4().hex}.new")  # no other process's
    try:
        beside.write_bytes(content)
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)


def read_rows(path: Path, kind: type[AnyRecord] = Row) -> list[AnyRecord]:  # ty: ignore[invalid-parameter-default]
    """The rows of a JSONL file, the last one per key, the file left alone.

    Raises:
        RecordError: a line that is no row, but for a half-written last one.
    """
    return list(_by_key(_parse(path, path.read_bytes(), kind)).values())


def _by_key(rows: Iterable[AnyRecord]) -> dict[Hashable, AnyRecord]:
    """The last row of each key, standing where it was written."""
    found: dict[Hashable, AnyRecord] = {}
    for row in rows:
        found.pop(row.key, None)
        found[row.key] = row
    return found


def _parse(path: Path, content: bytes, kind: type[AnyRecord]) -> Iterator[AnyRecord]:
    *lines, unfinished = content.rstrip(b"\0").split(b"\n")  # zeros: what a power cut may leave of a write
    for number, line in enumerate([*lines, unfinished], start=1):
        if not line.strip():
            continue
        try:
            yield kind.from_json(line)
        except ValueError as error:
            begun = line.startswith(ROW_BEGINS) or ROW_BEGINS.startswith(line)
            if number > len(lines) and begun and isinstance(error, json.JSONDecodeError | UnicodeDecodeError):
                return  # the process died while it wrote this one
            again = "mend or delete that line, or name another file"
            raise RecordError(f"{path}, line {number} is not a benchmark row: {error}; {again}") from error


def now() -> str:
    """The time in UTC, ISO 8601, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not strict JSON")


def _commit() -> tuple[str | None, bool | None]:
    """Commit and whether files differ from it, or GIT_COMMIT and None where the project is no git checkout."""
    root = Path(__file__).resolve().parents[2]
    git = ("git", "-C", str(root))
    # Installed into a virtual environment, the package may lie inside another project's checkout.
    if _output(*git, "rev-parse", "--show-prefix") == "" and (commit := _output(*git, "rev-parse", "HEAD")):
        # Results land in runs/ while a sweep is under way: they do not make the code another one.
        return commit, bool(_output(*git, "status", "--porcelain", "--", ".", ":!runs"))
    return os.environ.get("GIT_COMMIT"), None


def _driver() -> str | None:
    """The driver's version: one driver serves all GPUs of a machine, and each of them has a line of the output."""
    versions = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return versions.splitlines()[0] if versions else None


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _output(*command: str) -> str | None:
    try:
        return subprocess.run(command, capture_output=True, encoding="utf-8", check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
