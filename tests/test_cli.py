"""Every script's command line: help and wrong flags without PyTorch, messages that name the flag, Ctrl-C, consoles."""

import ast
import importlib.util
import io
import os
import re
import runpy
import signal
import subprocess
import sys
import textwrap
from dataclasses import dataclass, fields
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import pytest
import torch

from cs336_systems import bench_pytorch_attention, benchmark
from cs336_systems.attention import ATTENTION
from cs336_systems.bench import cli
from cs336_systems.bench.cli import CommandLine, flag_of, parse, run_script
from cs336_systems.bench.model import MODEL_PASSES, SIZES
from cs336_systems.bench.report import Table
from cs336_systems.bench.workload import DTYPES
from cs336_systems.inputs import MAX_HEAD_DIM
from cs336_systems.kernels.tiles import GPUS

ROOT = Path(__file__).resolve().parents[1]
SYSTEMS, SCRIPTS = ROOT / "cs336_systems", ROOT / "scripts"
PYTHON = [*sorted(SYSTEMS.glob("bench_*.py")), SYSTEMS / "benchmark.py", SYSTEMS / "autotune.py"]
PYTHON += sorted(SCRIPTS.glob("*.py"))
HEAVY = ("torch", "triton", "einx", "matplotlib", "jinja2", "numpy")
by_name = pytest.mark.parametrize("path", PYTHON, ids=lambda path: path.name)


def config_of(path: Path) -> Any:
    """The script's Config, in a module that tyro finds again."""
    spec = importlib.util.spec_from_file_location(f"script_{path.stem}", path)
    assert spec and spec.loader
    module = sys.modules.setdefault(spec.name, importlib.util.module_from_spec(spec))
    spec.loader.exec_module(module)
    return module.Config


def refusal(config: Any, *flags: str, capsys: pytest.CaptureFixture[str]) -> str:
    """What a wrong command line prints, without the box around it."""
    with pytest.raises(SystemExit) as caught:
        parse(config, flags)
    assert caught.value.code == 2
    return " ".join(re.sub("[│╭╮╰╯─]", " ", capsys.readouterr().err).split())


def test_every_script_is_known():
    """A file that runs by path has a command line, and so a place in the tests below."""
    runnable = [path for path in SYSTEMS.glob("*.py") if "__main__" in path.read_text(encoding="utf-8")]
    assert {*runnable, *SCRIPTS.glob("*.py")} == set(PYTHON)


@by_name
def test_help_comes_without_pytorch(path):
    """By path: its folder comes first among the modules. Each option has a text, and says its default once."""
    code = f"""
        import runpy, sys
        sys.path[0], sys.argv = {str(path.parent)!r}, [{str(path)!r}, "--help"]
        try:
            runpy.run_path(sys.argv[0], run_name="__main__")
        finally:
            print("imported:", *[name for name in {HEAVY} if name in sys.modules], file=sys.stderr)
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    done = subprocess.run(command, capture_output=True, encoding="utf-8", cwd=ROOT, timeout=10)
    assert done.returncode == 0 and done.stderr == "imported:\n"
    assert done.stdout.startswith("usage: ") and "uv run" in done.stdout
    for wrong in ("{None}", "default: None", "{[", "by default"):
        assert wrong not in done.stdout
    for _, flag, text in options(done.stdout):
        assert text.count("(default: ") <= 1, flag
        assert flag.startswith("-h") or re.match(r"\S.*\(default: |\S.*\(required\)", text), (flag, text)


def options(help: str) -> list[tuple[str, str, str]]:
    """(line, flag and metavar, text) of each option in a help."""
    lines = [line.strip("│").rstrip() for line in help.splitlines() if line.startswith("│")]
    starts = [i for i, line in enumerate(lines) if re.match(r" [-\[P]", line)] + [len(lines)]
    found = []
    for begin, end in pairwise(starts):
        whole = " ".join(" ".join(lines[begin:end]).split())
        match = re.match(r"(.*?(?:[A-Z]+\b(?: \.\.\.)?|\}(?: \.\.\.)?|--no-[\w-]+|--help))\]? +(\S.*)", whole)
        assert match, whole
        found.append((lines[begin], match[1], match[2]))
    return found


@pytest.mark.skipif(not Path("/bin/bash").exists(), reason="needs bash")
@pytest.mark.parametrize("path", sorted(SCRIPTS.glob("*.sh")), ids=lambda path: path.name)
def test_shell_scripts_have_a_help(path):
    for flag in ("--help", "-h"):
        done = subprocess.run(["/bin/bash", str(path), flag], capture_output=True, encoding="utf-8", timeout=10)
        assert done.returncode == 0 and not done.stderr
        assert f"scripts/{path.name} " in done.stdout and "#" not in done.stdout and "set -" not in done.stdout


@by_name
def test_messages_name_the_flag(path, capsys):
    """For each flag of each script: what it is called, what was given, and what is allowed."""
    config = config_of(path)
    for field in fields(config):
        flag, kind = flag_of(field.name), cli._without_none(field.type)
        is_many = get_origin(kind) is tuple
        element = cli._without_none(get_args(kind)[0] if is_many else kind)
        if get_origin(element) is Literal:
            said = refusal(config, flag, "nosuch", capsys=capsys)
            assert f"invalid choice 'nosuch' for argument '{flag}'. Expected one of (" in said and "None" not in said
        elif element in (int, float):
            said = refusal(config, flag, "-1", capsys=capsys)
            assert re.search(rf"{flag} (is|has) -1; (allowed|Hopper has)", said), said
            said = refusal(config, flag, "many", capsys=capsys)
            assert flag in said and re.search(r"'many' is not (an INT|a FLOAT)", said), said
        else:
            assert element in (bool, str, Path), "a new kind of flag: what is refused?"
        if is_many and flag != "--sweep-contexts":
            assert f"the number of {flag} is 0; allowed is at least 1" in refusal(config, flag, capsys=capsys)


def test_an_unknown_flag_is_refused(capsys):
    assert "--lenghts" in refusal(bench_pytorch_attention.Config, "--lenghts", "64", capsys=capsys)


def test_names_are_those_of_the_tables():
    """The command lines know them without importing what has them."""
    assert get_args(cli.ImplementationName) == tuple(ATTENTION)
    assert set(get_args(cli.DtypeName)) == set(DTYPES)
    compiled = runpy.run_path(str(SCRIPTS / "compiled_kernels.py"))
    assert get_args(compiled["GpuClass"]) == tuple(GPUS) and compiled["LARGEST_HEAD_DIM"] == MAX_HEAD_DIM
    config = parse(benchmark.Config, ["--model-size", *SIZES])
    assert config.model_size == tuple(SIZES) and config.passes == MODEL_PASSES


def test_defaults_depend_on_the_device():
    """What was typed stays, None included where a flag has no default."""
    config = parse(bench_pytorch_attention.Config, ["--warmup", "0", "--lengths", "7"])
    chosen = config.on(torch.device("cpu"))
    assert (chosen.warmup, chosen.lengths, chosen.iters, chosen.memory_limit_gib) == (0, (7,), 10, None)
    assert config.on(torch.device("cuda", 1)).iters == 100


# Ctrl-C


@dataclass(frozen=True, kw_only=True)
class NoFlags(CommandLine):
    """The command line: there are no flags."""


def test_ctrl_c_while_a_module_is_imported(tmp_path):
    """Modules may swallow the exception: the process ends nevertheless, in one line."""
    (tmp_path / "swallowing.py").write_text(
        "import signal\ntry: signal.raise_signal(signal.SIGINT)\nexcept BaseException: pass\n", encoding="utf-8"
    )
    code = f"""
        import signal, sys
        from dataclasses import dataclass
        from cs336_systems.bench.cli import CommandLine, run_script

        @dataclass(frozen=True, kw_only=True)
        class Config(CommandLine):
            pass

        def main(config):
            import swallowing
            print("went on")

        signal.signal(signal.SIGINT, signal.default_int_handler)
        sys.path.insert(0, {str(tmp_path)!r})
        run_script(main, Config, None)
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "interrupted\n")


@pytest.mark.skipif(os.name != "posix", reason="Windows has no SIGINT for one process")
def test_ctrl_c_while_pytorch_is_imported(tmp_path):
    """When the interpreter reports the first module of PyTorch, the process gets a SIGINT."""
    environment = os.environ | {"PYTHONPROFILEIMPORTTIME": "1"}
    command = [sys.executable, str(SYSTEMS / "bench_pytorch_attention.py"), "--out-dir", str(tmp_path)]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )  # fmt: skip
    with process:
        assert process.stderr and process.stdout
        for line in process.stderr:
            if re.search(r"\| +torch\.", line):
                process.send_signal(signal.SIGINT)
                break
        left = [line for line in process.stderr if not line.startswith("import time:")]
        assert left == ["interrupted\n"] and not process.stdout.read()
    assert process.returncode == 130


def test_ctrl_c_after_the_imports(monkeypatch, capsys):
    """main() can end what it is doing, as a sweep does, and says how far it got; the handler before comes back."""

    def work() -> None:
        signal.raise_signal(signal.SIGINT)

    def main(config: NoFlags) -> None:
        try:
            work()
        except KeyboardInterrupt:
            raise KeyboardInterrupt("interrupted; 2 of 4 rows") from None

    monkeypatch.setattr(sys, "argv", ["script"])
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(SystemExit) as caught:
            run_script(main, NoFlags, None)
        assert caught.value.code == 130 and capsys.readouterr().err == "interrupted; 2 of 4 rows\n"
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # as in a shell's background
        run_script(lambda config: work(), NoFlags, None)
    finally:
        signal.signal(signal.SIGINT, before)


# Consoles, users, folders


@pytest.mark.parametrize("encoding", ["cp932", "cp874", "ascii"])
def test_a_console_that_lacks_characters(encoding, tmp_path, monkeypatch):
    """They are replaced, everything is printed, and the table is written."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    console = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    monkeypatch.setattr(sys, "stdout", console)
    flags = ["--lengths", "16", "--head-dims", "8", "--batch", "1", "--iters", "2", "--out-dir", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["script", *flags])
    run_script(bench_pytorch_attention.main, bench_pytorch_attention.Config, "σ × …")
    console.seek(0)
    said = console.buffer.read().decode(encoding)
    assert "B?H?n_queries" in said and "Rows are in " in said
    assert "4·B·H·n_queries" in (tmp_path / "table.md").read_text(encoding="utf-8")


def test_tables_are_written_before_they_are_printed(tmp_path, monkeypatch):
    def closed(table: Table, console: object) -> None:
        raise BrokenPipeError

    monkeypatch.setattr(Table, "print", closed)
    flags = ["--device", "cpu", "--lengths", "16", "--head-dims", "8", "--iters", "1", "--out-dir", str(tmp_path)]
    with pytest.raises(BrokenPipeError):
        bench_pytorch_attention.main(parse(bench_pytorch_attention.Config, flags))
    assert "naive ms" in (tmp_path / "table.md").read_text(encoding="utf-8")


def test_a_user_without_an_account_has_a_name(monkeypatch):
    """PyTorch asks for it when torch._dynamo is imported."""

    def unknown() -> str:
        raise KeyError("getpwuid(): uid not found: 12345")

    monkeypatch.setattr("getpass.getuser", unknown)
    monkeypatch.setenv("LOGNAME", "")
    monkeypatch.setattr(sys, "argv", ["script"])
    names = []
    run_script(lambda config: names.append(os.environ["LOGNAME"]), NoFlags, None)
    assert names == [f"uid-{os.getuid()}"]


def test_nothing_is_compiled_when_a_module_is_imported():
    """No torch.compile and no compiler at module level, nor einx, which imports one."""
    for path in [*ROOT.glob("cs336_*/**/*.py"), *SCRIPTS.glob("*.py")]:
        waiting: list[ast.AST] = [*ast.parse(path.read_text(encoding="utf-8")).body]
        while waiting:
            node = waiting.pop()
            if isinstance(node, ast.FunctionDef | ast.Lambda):
                continue
            waiting += ast.iter_child_nodes(node)
            assert not (isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.compile"), path
            if isinstance(node, ast.Import | ast.ImportFrom):
                assert not re.search(r"import einx|torch\._(dynamo|inductor)", ast.unparse(node)), path


def test_bounds_are_found_in_any_annotation():
    @dataclass(frozen=True, kw_only=True)
    class Config(CommandLine):
        several: Annotated[tuple[cli.Size, ...] | None, "text"] = None
        share: Annotated[float, cli.Above(0)] = 0.5

    for wrong in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match=f"--share is {wrong:g}; allowed is a number above 0"):
            Config(share=wrong)
    with pytest.raises(ValueError, match="--several has 0; allowed is at least 1"):
        Config(several=(3, 0))
    assert Config(several=(3, 1)).several == (3, 1)
