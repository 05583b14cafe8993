"""Training: batches, checkpoints that resume exactly and survive a kill, the same curve with every attention."""

import json
import runpy
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from matplotlib import figure

from cs336_basics import nn_utils, training
from cs336_basics.training import Corpus, batch_at, load_checkpoint, save_checkpoint, standard_library_text
from cs336_systems import launch
from cs336_systems.bench.cli import parse
from cs336_systems.bench.measure import float32_precision

from .machine import compile_missing_reason, needs_gpu, skip_if

SCRIPT = Path(__file__).resolve().parents[1] / "scripts" / "train_lm.py"
CPU = torch.device("cpu")
TEXT = "The quick brown fox jumps over the lazy dog, and the dog does not mind. " * 30


@pytest.fixture(scope="module")
def script():
    return runpy.run_path(str(SCRIPT))


@pytest.fixture
def train(script, monkeypatch):
    """main() with a short text, a tiny model and the CPU."""
    monkeypatch.setattr(training, "standard_library_text", lambda: TEXT)
    monkeypatch.setitem(script["MODELS"], "cpu", {"d_model": 16, "d_ff": 32, "num_layers": 1, "num_heads": 2})

    def run(folder: Path, *flags: str) -> list[dict]:
        config = parse(script["Config"], [*flags, "--device", "cpu", "--validate-every", "3"])
        for name, small in {"context_length": 16, "batch": 2, "steps": 6}.items():
            config = replace(config, **{name: getattr(config, name) or small})
        script["main"](replace(config, out_dir=folder))
        return json.loads((folder / f"{config.attention}.json").read_text(encoding="utf-8"))["losses"]

    return run


@pytest.fixture
def ctrl_c():
    """SIGINT interrupts: a suite that a shell started in the background is born ignoring it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_precision_set_by_its_newer_name(train, tmp_path):
    """torch.get_float32_matmul_precision() raises then."""
    backends: Any = torch.backends  # whose settings no type checker sees
    with float32_precision("highest"):
        backends.mkldnn.matmul.fp32_precision = "tf32"
        assert train(tmp_path, "--attention", "naive")


def test_text_is_real():
    text = standard_library_text()
    assert len(text) > 500_000 and "Return the " in text


def test_corpus_and_batches():
    """Targets are the tokens one further on; a step's batch depends on step and seed alone."""
    corpus = Corpus.of(TEXT, 0.1)
    assert len(corpus.train) + len(corpus.validation) == len(TEXT.encode())
    assert bytes(corpus.train.tolist()) + bytes(corpus.validation.tolist()) == TEXT.encode()
    tokens, targets = batch_at(corpus.train, 3, 4, 16, seed=1, device=CPU)
    assert tokens.shape == targets.shape == (4, 16) and torch.equal(tokens[:, 1:], targets[:, :-1])
    assert all(bytes(row.tolist()).decode() in TEXT for row in tokens)
    assert torch.equal(tokens, batch_at(corpus.train, 3, 4, 16, seed=1, device=CPU)[0])
    for other in (batch_at(corpus.train, 4, 4, 16, 1, CPU), batch_at(corpus.train, 3, 4, 16, 2, CPU)):
        assert not torch.equal(tokens, other[0])
    with pytest.raises(ValueError, match="a sequence takes 5001"):
        batch_at(corpus.train, 0, 1, 5000, 0, CPU)
    with pytest.raises(ValueError, match="allowed is between 0 and 1"):
        Corpus.of(TEXT, 1.0)


def test_checkpoint_is_whole_at_any_moment(tmp_path, monkeypatch):
    """A write that dies leaves the checkpoint before, and nothing beside it."""
    path = tmp_path / "a.pt"
    save_checkpoint(path, {"settings": {}, "step": 1, "weight": torch.arange(3)})

    def dies(state, file):
        file.write(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(torch, "save", dies)
    with pytest.raises(KeyboardInterrupt):
        save_checkpoint(path, {"step": 2})
    assert load_checkpoint(path, CPU)["step"] == 1
    assert [each.name for each in tmp_path.iterdir()] == ["a.pt"]
    for broken in (b"", b"text", path.read_bytes()[:-40]):
        path.write_bytes(broken)
        with pytest.raises(ValueError, match=r"a\.pt is no whole checkpoint .*; --fresh starts over"):
            load_checkpoint(path, CPU)


def test_resumed_run_is_the_same_run(train, tmp_path, capsys):
    """Stopped after 2 of 6 steps and started again: the losses are bit-equal to those of a run at one go."""
    whole = train(tmp_path / "whole", "--attention", "naive")
    assert [entry["step"] for entry in whole] == [1, 2, 3, 4, 5, 6]
    assert [entry["validation_loss"] is not None for entry in whole] == [False, False, True] * 2
    stopped = train(tmp_path / "parts", "--attention", "naive", "--stop-after", "2")
    assert stopped == whole[:2]
    assert train(tmp_path / "parts", "--attention", "naive") == whole
    assert "holds 2 of 6 steps" in capsys.readouterr().out
    assert train(tmp_path / "parts", "--attention", "naive", "--fresh") == whole


def test_interrupted_run_goes_on_where_it_was(train, tmp_path, monkeypatch):
    """Ctrl-C at the beginning of the fourth step leaves a checkpoint of three, and says so."""
    whole = train(tmp_path / "whole", "--attention", "naive")
    calls: list[tuple[int, int]] = []

    def interrupting(content, step, size, context_length, seed, device):
        calls.append((step, seed))
        if calls.count((3, 0)) == 1 and calls[-1] == (3, 0):  # validation has another seed
            raise KeyboardInterrupt
        return batch_at(content, step, size, context_length, seed, device)

    monkeypatch.setattr(training, "batch_at", interrupting)
    with pytest.raises(KeyboardInterrupt, match=r"interrupted after step 3; start again without --fresh"):
        train(tmp_path / "parts", "--attention", "naive")
    assert load_checkpoint(tmp_path / "parts" / "naive.pt", CPU)["step"] == 3
    assert train(tmp_path / "parts", "--attention", "naive") == whole


@pytest.mark.parametrize("presses", [1, 2])
def test_ctrl_c_in_the_middle_of_a_step(presses, train, tmp_path, monkeypatch, ctrl_c):
    """The first lets the step end, and its checkpoint goes on exactly; a second ends it at once, and keeps nothing."""
    whole = train(tmp_path / "whole", "--attention", "naive")
    clip, calls = nn_utils.clip_gradient, []

    def pressing(*arguments):
        calls.append(arguments)
        if len(calls) == 3:
            for _ in range(presses):
                signal.raise_signal(signal.SIGINT)
        return clip(*arguments)

    monkeypatch.setattr(nn_utils, "clip_gradient", pressing)
    lost = "interrupted in step 3, which is lost; there is no checkpoint yet"
    said = "interrupted after step 3" if presses == 1 else lost
    with pytest.raises(KeyboardInterrupt, match=said):
        train(tmp_path / "parts", "--attention", "naive")
    assert (tmp_path / "parts" / "naive.pt").exists() == (presses == 1)
    assert train(tmp_path / "parts", "--attention", "naive") == whole
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_fresh_forgets_the_run_before_at_once(train, tmp_path, monkeypatch):
    """Or the run that is killed before its first checkpoint would be taken for the finished one."""
    train(tmp_path, "--attention", "naive")
    monkeypatch.setattr(training, "batch_at", None)
    with pytest.raises(TypeError):
        train(tmp_path, "--attention", "naive", "--fresh")
    assert not (tmp_path / "naive.pt").exists()


def test_any_attention_is_trained_and_sampled(train, tmp_path, capsys):
    """A text is sampled at many lengths, for each of which a compiled attention would be compiled."""
    skip_if(compile_missing_reason())
    train(tmp_path, "--attention", "compiled", "--amp", "bf16", "--steps", "2")
    assert "'Return the ' goes on: " in capsys.readouterr().out.replace("\n", " ")


def test_a_single_curve_without_validation(script, train, tmp_path, monkeypatch):
    """Nothing but the losses: no second panel, and no mark for a validation that never was."""
    train(tmp_path, "--attention", "naive", "--stop-after", "2")
    figures = []
    made = figure.Figure
    monkeypatch.setattr(figure, "Figure", lambda *a, **k: figures.append(made(*a, **k)) or figures[-1])
    script["draw_losses"](tmp_path)
    (axes,) = figures[0].axes
    assert [line.get_label() for line in axes.lines] == ["naive"] and axes.get_xlabel() == "step"


def test_losses_are_written_before_matplotlib_is_imported(train, tmp_path, monkeypatch):
    """A machine that cannot draw keeps what was trained."""
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)  # to import it is an ImportError
    with pytest.raises(ImportError):
        train(tmp_path, "--attention", "naive", "--steps", "1")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["naive.json", "naive.pt"]


@pytest.mark.parametrize("content", ["{}", '{"settings": 5', "[1]"])
def test_losses_of_another_program_are_passed_over(content, script, train, tmp_path):
    (tmp_path / "odd.json").write_text(content, encoding="utf-8")
    with pytest.raises(ValueError, match="holds no losses; train first"):
        script["draw_losses"](tmp_path)
    train(tmp_path, "--attention", "naive", "--steps", "1")
    assert (tmp_path / "loss.png").exists() and (tmp_path / "odd.json").read_text(encoding="utf-8") == content


@pytest.mark.parametrize(
    ("changed", "value"),
    [
        ("step", 99),
        ("step", "1"),
        ("step", -1),
        ("losses", []),
        ("losses", [5]),
        ("optimizer", {}),
        ("model", {"a": 1}),
    ],
)
def test_a_checkpoint_that_was_tampered_with_is_refused(changed, value, train, tmp_path):
    train(tmp_path, "--attention", "naive", "--stop-after", "1")
    path = tmp_path / "naive.pt"
    save_checkpoint(path, load_checkpoint(path, CPU) | {changed: value})
    with pytest.raises(ValueError, match="none of this program's; --fresh starts over"):
        train(tmp_path, "--attention", "naive")


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--max-gradient-norm", "0"], "--max-gradient-norm is 0; allowed is a number above 0"),
        (["--learning-rate", "nan"], "--learning-rate is nan; allowed is a number above 0"),
        (
            ["--context-length", "400"],
            "--context-length is 400: a sequence takes 401 bytes; there are 2052 to train on, and 108 for validation",
        ),
    ],
)
def test_what_cannot_be_trained_costs_no_checkpoint(flags, said, train, tmp_path, capsys):
    """Whatever is wrong with a command line is said before --fresh removes what an earlier one has left."""
    train(tmp_path, "--attention", "naive", "--stop-after", "1")
    with pytest.raises((ValueError, SystemExit)) as caught:
        train(tmp_path, "--attention", "naive", "--fresh", *flags)
    assert said in str(caught.value) + capsys.readouterr().err
    assert (tmp_path / "naive.pt").exists()


def test_what_a_killed_write_left_goes_with_the_next(tmp_path):
    (tmp_path / "a.pt.new").write_bytes(b"half of it")
    save_checkpoint(tmp_path / "a.pt", {"settings": {}, "step": 1})
    assert [path.name for path in tmp_path.iterdir()] == ["a.pt"]


def test_a_checkpoint_of_another_program_is_refused(train, tmp_path):
    for state in ({"settings": 5}, {"step": 1}):
        save_checkpoint(tmp_path / "naive.pt", state)
        with pytest.raises(
            ValueError, match=r"(none of this program's|no checkpoint of this training); --fresh starts over"
        ):
            train(tmp_path, "--attention", "naive")


def test_another_text_is_another_run(train, tmp_path, monkeypatch):
    train(tmp_path, "--attention", "naive", "--stop-after", "1")
    monkeypatch.setattr(training, "standard_library_text", lambda: TEXT + TEXT)
    with pytest.raises(
        ValueError, match=r"the checkpoint is of a run with text [0-9a-f]{16}, not [0-9a-f]{16}; --fresh"
    ):
        train(tmp_path, "--attention", "naive")


def test_interrupted_while_it_validates(train, tmp_path, monkeypatch):
    """The step before is not lost, and its validation is made up for."""
    whole = train(tmp_path / "whole", "--attention", "naive")
    calls = []

    def interrupting(content, step, size, context_length, seed, device):
        calls.append(seed)
        if calls.count(1) == 2 and seed == 1:
            raise KeyboardInterrupt
        return batch_at(content, step, size, context_length, seed, device)

    monkeypatch.setattr(training, "batch_at", interrupting)
    with pytest.raises(KeyboardInterrupt, match="interrupted after step 3"):
        train(tmp_path / "parts", "--attention", "naive")
    assert load_checkpoint(tmp_path / "parts" / "naive.pt", CPU)["step"] == 3
    assert train(tmp_path / "parts", "--attention", "naive") == whole


def test_a_loss_that_is_no_number_ends_the_run(train, tmp_path):
    """And leaves the last checkpoint with finite parameters."""
    said = r"the (loss|gradients' norm) of step \d is (nan|inf): training diverged at --learning-rate 1e\+30"
    with pytest.raises(ValueError, match=said):
        train(tmp_path, "--attention", "naive", "--learning-rate", "1e30", "--checkpoint-every", "1")
    assert not list(tmp_path.glob("*.json"))
    kept = load_checkpoint(tmp_path / "naive.pt", CPU)
    assert kept["step"] > 0 and all(value.isfinite().all() for value in kept["model"].values())


def test_a_validation_loss_that_is_no_number_ends_the_run(train, tmp_path, monkeypatch):
    """A step with finite gradients may leave parameters that are not: they are not kept."""
    cross_entropy = nn_utils.cross_entropy

    def diverged(logits, targets):
        return cross_entropy(logits, targets) if torch.is_grad_enabled() else torch.tensor(torch.nan)

    monkeypatch.setattr(nn_utils, "cross_entropy", diverged)
    with pytest.raises(ValueError, match="the validation loss of step 3 is nan: training diverged"):
        train(tmp_path, "--attention", "naive", "--checkpoint-every", "1")
    assert load_checkpoint(tmp_path / "naive.pt", CPU)["step"] == 2
    assert [path.name for path in tmp_path.iterdir()] == ["naive.pt"]


def test_curves_of_other_settings_are_left_out(script, train, tmp_path, capsys):
    """A difference between two curves is the attention's, or it is not drawn."""
    train(tmp_path, "--attention", "naive")
    train(tmp_path, "--attention", "flash_pytorch", "--seed", "1")
    assert "without naive, trained with other settings" in capsys.readouterr().out.replace("\n", " ")
    train(tmp_path, "--attention", "flash_pytorch", "--fresh")
    assert "trained with other settings" not in capsys.readouterr().out.replace("\n", " ")


def test_attentions_train_alike(train, tmp_path):
    """From one seed, naive and flash attention have the same losses but for rounding; another seed has others."""
    naive = train(tmp_path, "--attention", "naive")
    flash = train(tmp_path, "--attention", "flash_pytorch")
    for a, b in zip(naive, flash, strict=True):
        assert a["loss"] == pytest.approx(b["loss"], abs=1e-5)
    other = train(tmp_path / "other", "--attention", "naive", "--seed", "1")
    assert abs(other[0]["loss"] - naive[0]["loss"]) > 1e-4
    assert (tmp_path / "loss.png").stat().st_size > 0


def test_loss_falls(train, tmp_path):
    losses = train(tmp_path, "--attention", "flash_pytorch", "--steps", "30", "--learning-rate", "1e-2")
    assert losses[-1]["loss"] < losses[0]["loss"] - 1


def test_a_checkpoint_of_other_settings_is_refused(train, tmp_path):
    train(tmp_path, "--attention", "naive", "--stop-after", "1")
    with pytest.raises(ValueError, match=r"a run with learning_rate 0\.0003, not 0\.5; --fresh starts over"):
        train(tmp_path, "--attention", "naive", "--learning-rate", "0.5")


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (
            ["--attention", "flash_triton"],
            "--attention flash_triton cannot run here: FlashAttention2Triton needs tensors on a GPU",
        ),
        (["--plot"], "holds no losses; train first"),
    ],
)
def test_one_line_on_failure(flags, said, tmp_path, monkeypatch):
    monkeypatch.setattr(launch, "is_interpreted", lambda: False)
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *flags, "--device", "cpu", "--out-dir", str(tmp_path)])
    with pytest.raises(SystemExit) as caught:
        runpy.run_path(str(SCRIPT), run_name="__main__")
    line = str(caught.value.code)  # a text is printed, and the exit code is 1
    assert line.startswith("error: ") and said in line and "\n" not in line


@needs_gpu
def test_curves_agree_in_bfloat16(script, tmp_path):
    """On a GPU: 60 steps of naive and flash_triton under autocast stay within 1e-2 of one another."""
    losses = {}
    for attention in ("naive", "flash_triton"):
        config = parse(script["Config"], ["--attention", attention, "--amp", "bf16", "--steps", "60"])
        script["main"](replace(config, out_dir=tmp_path))
        losses[attention] = json.loads((tmp_path / f"{attention}.json").read_text(encoding="utf-8"))["losses"]
    for a, b in zip(losses["naive"], losses["flash_triton"], strict=True):
        assert abs(a["loss"] - b["loss"]) < 1e-2
