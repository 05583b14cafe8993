"""Command lines of the scripts: flags they share, checks of what was typed, and from `main` to an exit status.

A script parses its command line before it imports PyTorch: `--help` and a wrong flag answer at once. So this module
imports nothing heavy, and a script's `main` imports what it runs on.
"""

import getpass
import io
import os
import re
import signal
import sys
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType, NoneType
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar, get_args, get_origin, get_type_hints

INTERRUPTED = 130  # the exit status that a shell reports for a process that Ctrl-C ended

try:
    import tyro
    from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo
except KeyboardInterrupt:  # the longest import before `run_script` watches for Ctrl-C
    os.write(2, b"interrupted\n")
    os._exit(INTERRUPTED)

if TYPE_CHECKING:
    import torch

Config = TypeVar("Config")

ImplementationName = Literal[
    "naive",
    "compiled",
    "flash_pytorch",
    "flash_triton",
    "sdpa",
    "sdpa_flash",
    "sdpa_cudnn",
    "sdpa_efficient",
    "flex",
]
"""The names in `cs336_systems.attention.ATTENTION`."""
DtypeName = Literal["bfloat16", "float16", "float32"]
"""The names in `cs336_systems.bench.workload.DTYPES`."""
DEVICE_NAME = re.compile(r"cpu|cuda(:[0-9]+)?")


@dataclass(frozen=True)
class AtLeast:
    """In an annotation: the smallest value that the flag, or each of its values, may have. NaN is refused too."""

    least: float


@dataclass(frozen=True)
class Above:
    """In an annotation: the flag's value is a finite number above this one."""

    bound: float


Size = Annotated[int, AtLeast(1)]


@dataclass(frozen=True)
class ByDevice:
    """In an annotation: the defaults on a GPU and on a CPU of a flag that is None until the device is known."""

    cuda: Any
    cpu: Any


def by_device(cuda: Any, cpu: Any, help: str | None = None) -> tuple[object, ...]:
    """Annotations of a flag whose default depends on the device, the help's too: `Annotated[T | None, *by_device(…)]`.

    Args:
        cuda: the default on a GPU.
        cpu: the default on a CPU.
        help: the flag's text, if no docstring follows the field.
    """
    return ByDevice(cuda, cpu), shown_default(f"{_joined(cuda)}; on a CPU {_joined(cpu)}", help)


def shown_default(text: str, help: str | None = None) -> object:
    """The annotation that makes the help show `text` as the flag's default."""
    return tyro.conf.arg(help=help, help_behavior_hint=f"(default: {text})")


def _joined(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, tuple) else str(value)


WARMUP_MS = "Milliseconds of passes before those that are timed."
REP_MS = "Milliseconds of timed passes. Rows on record stay; --fresh measures them again."
RowsPath = Annotated[Path, tyro.conf.arg(help="Where rows are written.")]
TablesPath = Annotated[Path, tyro.conf.arg(help="Where tables are written.")]
Fresh = Annotated[bool, tyro.conf.arg(help="Start over instead of going on with what an earlier run left.")]


@dataclass(frozen=True, kw_only=True)
class CommandLine:
    """A script's flags. They are checked when it is made; the bounds stand in their annotations.

    Raises:
        ValueError: a flag is out of its bounds; the message has the flag's name, its value and what is allowed.
    """

    def __post_init__(self) -> None:
        for name, annotation in get_type_hints(type(self), include_extras=True).items():
            flag, value = flag_of(name), getattr(self, name)
            if isinstance(value, tuple) and not value and getattr(type(self), name, None) != ():
                raise ValueError(f"the number of {flag} is 0; allowed is at least 1")
            bound = _bound(annotation)
            for each in value if isinstance(value, tuple) else (value,):
                verb = "has" if isinstance(value, tuple) else "is"
                if isinstance(bound, AtLeast) and each is not None and not each >= bound.least:
                    raise ValueError(f"{flag} {verb} {each:g}; allowed is at least {bound.least:g}")
                if isinstance(bound, Above) and each is not None and not bound.bound < each < float("inf"):
                    raise ValueError(f"{flag} {verb} {each:g}; allowed is a number above {bound.bound:g}")

    def require_range(self, least: str, most: str) -> None:
        """Raise ValueError if both fields are given and the first is above the second."""
        low, high = getattr(self, least), getattr(self, most)
        if low is not None and high is not None and low > high:
            raise ValueError(f"{flag_of(least)} is {low}; allowed is at most {flag_of(most)}, {high}")

    def on(self, device: "torch.device") -> Any:
        """The same flags with this device's defaults in place of None.

        Returns:
            An instance of the same class. (Its type is Any: the fields that are declared as `T | None` are a T.)
        """
        defaults = {}
        for name, annotation in get_type_hints(type(self), include_extras=True).items():
            for each in getattr(annotation, "__metadata__", ()):
                if isinstance(each, ByDevice) and getattr(self, name) is None:
                    defaults[name] = getattr(each, device.type)
        return replace(self, **defaults)


@dataclass(frozen=True, kw_only=True)
class OnDevice(CommandLine):
    """The flags of what runs on one device and continues an earlier run."""

    device: Annotated[str | None, shown_default("the GPU if there is one")] = None
    """cpu, cuda, cuda:0, …"""
    fresh: Fresh = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.device is not None and not DEVICE_NAME.fullmatch(self.device):
            raise ValueError(f"--device is {self.device!r}; allowed are cpu, cuda, cuda:0, …")


@dataclass(frozen=True, kw_only=True)
class MemoryLimited(OnDevice):
    """The flags of the sweeps over attention shapes."""

    memory_limit_gib: Annotated[float | None, Above(0), shown_default("no limit")] = None
    """Let PyTorch have no more than this of the GPU's memory, as on a smaller card."""


def flag_of(field: str) -> str:
    """The flag that sets the field: "--seq-len" for "seq_len"."""
    return f"--{field.replace('_', '-')}"


def _bound(annotation: Any) -> object:
    """The first bound anywhere in an annotation, or None."""
    for each in (*getattr(annotation, "__metadata__", ()), *get_args(annotation)):
        if isinstance(each, AtLeast | Above):
            return each
        if get_args(each) and (found := _bound(each)):
            return found
    return None


_RULES = ConstructorRegistry()


@_RULES.primitive_rule
def _plain_values(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[Any] | None:
    """How `T`, `T | None` and `tuple[T, ...]` are read: as T, which the help calls INT, PATH, …, not {None}|INT."""
    kind = _without_none(info.type)
    is_many = get_origin(kind) is tuple
    element = _without_none(get_args(kind)[0] if is_many else kind)
    choices = get_args(element) if get_origin(element) is Literal else None
    reads = {int: "INT", float: "FLOAT", str: "STR", Path: "PATH"}
    if choices is None and element not in reads:
        return None
    metavar = f"{{{','.join(choices)}}}" if choices else reads[element]

    def read(text: str) -> Any:
        try:
            return text if choices else element(text)
        except ValueError:
            raise ValueError(f"{text!r} is not {'an' if element is int else 'a'} {metavar}") from None

    return PrimitiveConstructorSpec(
        nargs="*" if is_many else 1,
        metavar=f"{metavar} ..." if is_many else metavar,
        instance_from_str=lambda texts: tuple(map(read, texts)) if is_many else read(texts[0]),
        is_instance=lambda value: True,
        str_from_instance=lambda value: [str(each) for each in (value if isinstance(value, tuple) else (value,))],
        choices=choices,
    )


def _without_none(annotation: Any) -> Any:
    """T, for T | None and annotated T."""
    if get_origin(annotation) is Annotated:
        return _without_none(annotation.__origin__)
    others = [each for each in get_args(annotation) if each is not NoneType]
    return _without_none(others[0]) if NoneType in get_args(annotation) and len(others) == 1 else annotation


def parse(config: type[Config], args: Sequence[str] | None = None, description: str | None = None) -> Config:
    """The config that a command line makes; `args` in place of the process's own.

    Raises:
        SystemExit: after --help, or after a line on stderr that names the wrong flag.
    """
    with _RULES:
        return tyro.cli(config, args=args, description=description)


def run_script(main: Callable[[Config], None], config: type[Config], description: str | None) -> None:
    """Run `main` with the config of the command line; say in one line what goes wrong, Ctrl-C included.

    What the console's encoding lacks is printed as a question mark.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    _name_the_user()
    try:
        with _ended_at_once_while_importing(main):
            main(parse(config, description=description))
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")
    except RuntimeError as error:
        import torch

        from cs336_systems.bench.sweep import DeviceLostError
        from cs336_systems.implementation import first_line

        if not isinstance(error, torch.OutOfMemoryError | DeviceLostError):
            raise
        sys.exit(f"error: {first_line(error)}")
    except KeyboardInterrupt as interrupt:
        print(str(interrupt) or "interrupted", file=sys.stderr)
        sys.exit(INTERRUPTED)


def _name_the_user() -> None:
    """Give a user without an account, as in a container, a name in this process.

    PyTorch names the folder of compiled code after the user, and looks the name up when torch._dynamo is imported, as
    einx does.
    """
    try:
        getpass.getuser()
    except (KeyError, OSError, ImportError):  # ImportError: Windows has no accounts of this kind
        os.environ["LOGNAME"] = f"uid-{os.getuid() if hasattr(os, 'getuid') else 0}"


@contextmanager
def _ended_at_once_while_importing(main: Callable[..., object]) -> Generator[None]:
    """In the block, Ctrl-C ends the process at once until `main` is past its imports; then it is KeyboardInterrupt.

    Modules are free to swallow an exception that is raised while they are imported, or to make another of it.
    """

    def interrupt(number: int, frame: FrameType | None) -> None:
        called: FrameType | None = None  # by main
        while frame is not None and frame.f_code is not getattr(main, "__code__", None):
            called, frame = frame, frame.f_back
        if frame is None or (called is not None and "importlib" in called.f_code.co_filename):
            os.write(2, b"interrupted\n")
            os._exit(INTERRUPTED)
        raise KeyboardInterrupt

    # Where SIGINT is ignored, as in a shell's background, or handled by somebody else, it stays so.
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def device_named(name: str | None) -> "torch.device":
    """The device with that name, as in --device; the GPU if there is one for None.

    Raises:
        ValueError: a GPU that is not there.
    """
    import torch

    device = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
    if device.type == "cpu":
        return device
    if (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"--device is {name!r}; this machine has {torch.cuda.device_count()} GPUs")
    return torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)


def limited(device: "torch.device", gib: float | None) -> str | None:
    """Limit the memory of this process to --memory-limit-gib, if it is given, and name the rows' variant.

    Raises: as `limit_memory`.
    """
    from cs336_systems.bench.measure import limit_memory

    if gib is None:
        return None
    limit_memory(device, gib)
    return f"{gib:g} GiB"


def require_file(flag: str, path: Path) -> None:
    """Make the file's folder, before anything is measured.

    Raises:
        ValueError: the path is a folder or a device, or cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists() and not path.is_file():
            raise ValueError(f"{flag} is {path}, {'a folder' if path.is_dir() else 'a device'}; allowed is a file")
    except OSError as error:
        raise ValueError(f"{flag} is {path}: {error.strerror}") from error
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ValueError(f"{flag} is {path}, which cannot be written")


def require_tables(flag: str, path: Path) -> None:
    """`require_file` for tables.

    Raises:
        ValueError: the file holds rows; or as `require_file`.
    """
    require_file(flag, path)
    if path.exists() and path.read_bytes().startswith(b"{"):
        raise ValueError(f"{flag} is {path}, which holds rows of a benchmark; tables would overwrite them")


def require_outputs(
    jsonl: Path, markdown: Path, jsonl_flag: str = "--out-jsonl", markdown_flag: str = "--out-md"
) -> None:
    """`require_file` for rows, `require_tables` for tables.

    Raises:
        ValueError: both are one file; or as those.
    """
    if jsonl.resolve() == markdown.resolve():
        raise ValueError(f"{jsonl_flag} and {markdown_flag} are both {jsonl}; the tables would overwrite the rows")
    require_file(jsonl_flag, jsonl)
    require_tables(markdown_flag, markdown)
