"""One row per measurement: its schema, the environment it was measured in, and the JSONL file that keeps it."""

import json
import math
import os
import platform
import warnings
from collections.abc import Generator, Hashable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, fields
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, Any, ClassVar, Generic, Literal, Self, TypeVar
from uuid import uuid4

import torch
from filelock import FileLock, Timeout
from pydantic import AfterValidator, BeforeValidator, ConfigDict, ValidationError, model_validator
from pydantic.dataclasses import dataclass

from cs336_systems.bench.source import output_of, present_commit, present_source
from cs336_systems.bench.workload import AttentionShape, Pass
from cs336_systems.inputs import float32_matmul_precision

Status = Literal["ok", "oom", "skipped", "unsupported", "error"]
ROW_BEGINS = b'{"implementation": '  # also one that a process died in the middle of
LEFT_OUT = ("variant", "source", "free_mib")  # keys that a line of JSON has only where they are set


class RecordError(ValueError):
    """A line of a JSONL file is no row; the message names the file, the line and what is wrong."""


class BusyError(OSError):
    """Another process measures into the same folder."""


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _in_iso(text: str) -> str:
    datetime.fromisoformat(text)
    return text


Number = Annotated[float | None, BeforeValidator(_finite)]
"""A measured figure; None where there is none, and in place of a NaN or an infinity, which strict JSON has not."""


@dataclass(
    frozen=True,
    kw_only=True,
    config=ConfigDict(
        strict=True, extra="forbid", validate_by_name=True, alias_generator=lambda field: field.rstrip("_")
    ),
)
class Environment:
    """Where a row was measured. `gpu` is the CPU's name on a CPU; what does not apply or is unknown is None.

    `source` is the hash of the code, see `bench.source`; rows of older files have none.
    """

    gpu: str
    driver: str | None
    torch: str
    triton: str | None
    commit: str | None
    dirty: bool | None
    source: str | None = None
    float32_precision: str

    @classmethod
    def capture(cls, device: torch.device) -> "Environment":
        on_gpu = device.type == "cuda"
        commit, dirty = present_commit()
        return Environment(
            gpu=torch.cuda.get_device_name(device) if on_gpu else _cpu_name(),
            driver=_driver() if on_gpu else None,
            torch=str(torch.__version__),
            triton=_version("triton"),
            commit=commit,
            dirty=dirty,
            source=present_source(),
            float32_precision=float32_matmul_precision(device.type),
        )


@dataclass(frozen=True, kw_only=True)
class Record(Environment):
    """What any benchmark's row has: how it ended, and where and when. JSON writes the field `pass_` as "pass".

    `warmup` and `iterations` are the passes behind the times; None where nothing was timed, and in older files.
    `free_mib` is the GPU's free memory before a measurement that ran out of it.

    Raises:
        ValueError: a field is missing, unknown or of another type, or a row that is ok has no time.
    """

    KEY: ClassVar[tuple[str, ...]]
    """The fields that make two rows the same measurement; the later row replaces the earlier one."""
    MEASURED: ClassVar[frozenset[str]] = frozenset({"median_ms", "p20_ms", "p80_ms", "warmup", "iterations"})
    """Fields that are None where nothing was timed."""

    implementation: str
    pass_: str
    median_ms: Number = None
    p20_ms: Number = None
    p80_ms: Number = None
    status: Status
    message: str | None = None
    time: Annotated[str, AfterValidator(_in_iso)]
    warmup: int | None = None
    iterations: int | None = None
    free_mib: Number = None

    @model_validator(mode="after")
    def _ok_has_a_time(self) -> Self:
        if self.status == "ok" and self.median_ms is None:
            raise ValueError("status is 'ok', but median_ms is null")
        return self

    @property
    def key(self) -> Hashable:
        return tuple(getattr(self, name) for name in self.KEY)

    def to_json(self) -> str:
        """One line of strict JSON, the environment last."""
        where = {field.name for field in fields(Environment)}
        values = dict(sorted(asdict(self).items(), key=lambda item: item[0] in where))
        written = {
            name.rstrip("_"): value for name, value in values.items() if value is not None or name not in LEFT_OUT
        }
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
        try:
            return cls(**values)
        except ValidationError as error:
            raise ValueError("; ".join(_described(each) for each in error.errors())) from error


@dataclass(frozen=True, kw_only=True)
class Row(Record):
    """One attention implementation, shape and pass, measured once."""

    KEY = (
        *("implementation", "pass_", "batch", "heads", "n_queries", "n_keys", "d", "dtype", "causal"),
        *("gpu", "float32_precision", "variant"),
    )
    MEASURED = Record.MEASURED | {"tflops"}

    pass_: Pass
    batch: int
    heads: int
    n_queries: int
    n_keys: int
    d: int
    dtype: str
    causal: bool
    tflops: Number = None
    memory_mib: Number = None
    predicted_memory_mib: Number = None
    variant: str | None = None

    @classmethod
    def of(
        cls,
        implementation: str,
        pass_: Pass,
        shape: AttentionShape,
        at: Environment,
        variant: str | None = None,
        **values: Any,
    ) -> Self:
        """The row of a measurement at `shape` in the environment `at`; skipped, unless `values` say otherwise."""
        known: dict[str, Any] = (
            asdict(at) | asdict(shape) | {"dtype": shape.dtype_name, "status": "skipped", "time": now()}
        )
        return cls(implementation=implementation, pass_=pass_, variant=variant, **known | values)


def _described(error: Any) -> str:
    """What is wrong with a row, in one line: which key, what it is, what is allowed."""
    key = ".".join(map(str, error["loc"]))
    if error["type"] == "missing":
        return f"key {key!r} is missing"
    if error["type"] == "unexpected_keyword_argument":
        return f"key {key!r} is unknown"
    allowed = error["msg"].removeprefix("Value error, ")
    return f"{key} is {error['input']!r}; {allowed}" if key else allowed


AnyRecord = TypeVar("AnyRecord", bound=Record)


@contextmanager
def measuring_into(path: Path) -> Generator[None]:
    """Hold the lock of the folder of `path` in the block: two that measure at once would spoil each other's times.

    Blocks in one process may hold it one inside of another. It ends with the process, however that ends. Where the
    file system refuses a lock, there is one warning, and the block goes on without.

    Raises:
        BusyError: another process holds it.
    """
    folder = path.parent.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / ".measuring.lock"
    lock = FileLock(file, blocking=False, thread_local=False, is_singleton=True, fallback_to_soft=False)
    try:
        lock.acquire()
    except Timeout as error:
        again = "wait until it ends, or write into another folder"
        raise BusyError(f"another run is measuring into {folder}; {again}") from error
    except (OSError, NotImplementedError) as error:
        warnings.warn(f"{file} cannot be locked ({error}); let no other run measure into that folder", stacklevel=3)
        yield
        return
    try:
        yield
    finally:
        lock.release()


class RowFile(Generic[AnyRecord]):
    """The JSONL file of one sweep; whatever moment the process dies at, it can be opened again.

    Rows are added at its end, and the last row of a key counts. Opening leaves one row per key, and mends a
    half-written last line. `fresh` starts with an empty file. `kind` is the class of the rows. One process at a time
    writes to it, see `opened`.

    Raises:
        RecordError: any other line that is no row, also where it was to start afresh; the file stays as it is.
        OSError: it cannot be read or written.
    """

    def __init__(self, path: Path, fresh: bool = False, kind: type[AnyRecord] = Row) -> None:  # ty: ignore[invalid-parameter-default]
        self.path, self.kind = path, kind
        path.parent.mkdir(parents=True, exist_ok=True)
        before = path.read_bytes() if path.exists() else b""
        rows = _by_key(_parse(path, before, kind))
        self.rows: dict[Hashable, AnyRecord] = {} if fresh else rows
        self.n_lines = before.count(b"\n")
        if before and (fresh or not before.endswith(b"\n")):
            self.rewrite()
        self.compact()

    @classmethod
    @contextmanager
    def opened(cls, path: Path, fresh: bool = False, kind: type[AnyRecord] = Row) -> Generator[Self]:  # ty: ignore[invalid-parameter-default]
        """The file for one run, which holds the folder's lock in the block and leaves one row per key.

        Raises:
            BusyError: another process measures into the same folder.
            RecordError, OSError: as the class.
        """
        with measuring_into(path):
            file = cls(path, fresh, kind)
            yield file
            file.compact()

    def compact(self) -> None:
        """Leave one line per key."""
        if self.n_lines > len(self.rows):
            self.rewrite()

    def rewrite(self) -> None:
        """Write all rows anew."""
        replace_content(self.path, b"".join(row.to_json().encode() + b"\n" for row in self.rows.values()))
        self.n_lines = len(self.rows)

    def put(self, row: AnyRecord) -> None:
        """Add the row, or let it replace the one with the same key; on disk when this returns.

        Raises:
            OSError: it cannot be written; the rows before it are safe.
        """
        size = self.path.stat().st_size if self.path.exists() else 0
        try:
            with self.path.open("ab") as file:
                file.write(row.to_json().encode() + b"\n")
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            with suppress(OSError):
                os.truncate(self.path, size)
            safe = f"the {len(self.rows)} rows before are safe in it"
            raise OSError(f"{self.path} cannot be written: {error.strerror}; {safe}") from error
        self.n_lines += 1
        self.rows.pop(row.key, None)
        self.rows[row.key] = row


def replace_content(path: Path, content: bytes) -> None:
    """Give the file this content: whenever the process dies, and whoever reads, it is the old one or the new.

    Raises:
        OSError: it cannot be written; the file stays as it is.
    """
    beside = path.with_name(f"{path.name}.{uuid4().hex}.new")  # no other process's
    try:
        beside.write_bytes(content)
        beside.replace(path)
    except OSError as error:
        raise OSError(error.errno, f"{error.strerror}, the file stays as it is", str(path)) from error
    finally:
        with suppress(OSError):
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


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not strict JSON")


def _driver() -> str | None:
    """The driver's version: one driver serves all GPUs of a machine, and each of them has a line of the output."""
    versions = output_of("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
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
