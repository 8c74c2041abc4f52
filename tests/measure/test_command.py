"""The command line `twell measure`: what it passes on, and mistakes in one line."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import scipy.sparse
import torch

from twell import measure, results, trace
from twell.__main__ import main
from twell.measure import clock
from twell.sparse.calibration import DEFAULT, Calibration, Point

NO_GPU = "measuring needs a GPU, and torch sees none"


@pytest.fixture
def seen(monkeypatch):
    """Measurements without measuring: name -> its arguments and options."""
    seen = {}
    for name in ("ffn", "ffn_steps", "train_step", "language_model"):

        def record(*arguments, name=name, **options):
            seen[name] = arguments, options

        monkeypatch.setattr(measure, name, record)
    monkeypatch.setattr(clock, "gpu", lambda: None)
    return seen


def run(words, *more):
    assert main([*words.split(), *map(str, more)]) == 0


def test_layers_get_everything(seen, tmp_path):
    h = scipy.sparse.csr_array(np.array([[0, 2.0, 0], [3.0, 0, 0], [0, 0, 0]], np.float32))
    h.data[0] = 0  # active, though its value came out 0
    recorded = trace.Trace(
        token_ids=np.arange(3, dtype=np.int32),
        strings=["a", "b", "c"],
        logprob=np.zeros(3, np.float32),
        sequence=np.zeros(3, np.int32),
        position=np.arange(3, dtype=np.int32),
        indptr=np.concatenate([np.zeros(3, np.int64), h.indptr]),
        indices=h.indices.astype(np.uint16),
        values=h.data,
        intermediate_size=3,
    )
    path = tmp_path / "text.npz"
    recorded.save(path)
    words = "--tokens 1,64 --active 2.5,9 --pattern even,recorded --hidden 64 --intermediate 128"
    words += f" --non-gated --energy --kernels --trace {path} --layer 1 --out {tmp_path}"
    run(f"measure ffn --mode graph --calibration {DEFAULT} {words}")
    run(f"measure ffn --backward {words}")
    assert seen["ffn"][1].pop("calibration").device == "NVIDIA H200"
    assert seen["ffn"][1].pop("mode") == "graph"
    sizes = {"hidden_size": 64, "intermediate_size": 128, "gated": False}
    for arguments, options in (seen["ffn"], seen["ffn_steps"]):
        masks = options.pop("masks")
        mask = [[False, True, False], [True, False, False], [False] * 3]
        assert list(masks) == ["text_1"] and masks["text_1"].tolist() == mask
        assert arguments == ([1, 64], [2.5, 9.0], ["even", "recorded"])
        assert options == sizes | {"energy": True, "kernels": True, "out": tmp_path}
    run("measure ffn --backward")
    assert seen["ffn_steps"][0] == ([65536, 16384], [29.0], ["skewed"])


def test_train_step_gets_everything(seen):
    words = "measure train-step --model quick --layers 3 --hidden 64 --intermediate 128 --heads 4"
    words += " --vocab 300 --context 16 --micro-batch 5 --non-gated --active 9 --profile paper"
    run(words + " --checkpoint-activations --no-compile --energy --largest --out x")
    fields = "num_layers=3 hidden_size=64 intermediate_size=128 num_heads=4 vocab_size=300"
    fields += " context=16 micro_batch=5 gated=false checkpoint_activations=true"
    options = {"active": 9.0, "compiled": False, "energy": True, "out": Path("x")}
    options |= {"profile": "paper", "largest": True}
    assert seen["train_step"] == (("quick", fields.split()), options)
    run("measure train-step")
    options = {"active": None, "compiled": None, "energy": False, "out": Path("build/bench")}
    options |= {"profile": "flat", "largest": False}
    assert seen["train_step"] == (("171m", []), options)


def test_model_gets_everything(seen, tmp_path, tiny_run, monkeypatch):
    words = "measure model --size 1.5b --tokens 4x64,1x128 --profile flat --active 2.5,9 --layers"
    words += " --parts --decode 1,8 --context 30 --no-compile --tuned --energy"
    run(words, "--calibration", DEFAULT, "--out", tmp_path)
    arguments, options = seen["language_model"]
    assert options.pop("calibration").device == "NVIDIA H200"
    assert arguments == ("1.5b",) and options == {
        "checkpoint": None,
        "shapes": [(4, 64), (1, 128)],
        "profile": "flat",
        "active": [2.5, 9.0],
        "layers": True,
        "parts": True,
        "decode": [1, 8],
        "decode_context": 30,
        "compiled": False,
        "tuned": True,
        "energy": True,
        "out": tmp_path,
    }
    run("measure model")
    arguments, options = seen["language_model"]
    assert arguments == ("2b",) and options["shapes"] == [(64, 2048), (16, 2048), (1, 2048)]
    assert (options["profile"], options["active"], options["decode"]) == ("paper", None, ())
    assert options["out"] == Path("build/bench")
    assert options["compiled"] is None and not options["tuned"]
    # A checkpoint has the name of its run.
    text = tmp_path / "text.txt"
    text.write_text("bain da fo")
    monkeypatch.chdir(tiny_run)
    for model in (tiny_run, Path(tiny_run) / "model", "model"):
        run("measure model --model", model, "--text", text, "--tokens", "none", "--decode", 1)
        name, loaded, ids = seen["language_model"][1]["checkpoint"]
        assert name == Path(tiny_run).name and loaded.dtype == torch.bfloat16 and len(ids) >= 3
        assert loaded.model.rotary_emb.inv_freq.dtype == torch.float32


@pytest.mark.parametrize(
    "arguments, message",
    [
        ("ffn --tokens 1,many", "--tokens is '1,many'; write numbers with commas"),
        ("ffn --trace x --pattern recorded", "--trace FILE and --layer NUMBER go together"),
        ("ffn --trace x --layer 0", "--trace is for --pattern recorded; the pattern is skewed"),
        ("ffn --backward --mode graph", "--mode graph is for forward passes"),
        ("ffn --backward --calibration x.json", "--calibration is for auto, which --backward does"),
        ("model --tokens 64", "--tokens is '64'; write sequences x tokens with commas"),
        ("model --decode 1,many", "--decode is '1,many'; write numbers with commas"),
        ("model --model x", "--model NAME and --text FILE go together"),
        ("model --model x --text y --active 3", "--size, --profile and --active are for random"),
        *((what, NO_GPU) for what in ("ffn", "ffn --backward", "train-step", "model")),
    ],
)
def test_a_mistake_is_one_clear_line(arguments, message, capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["measure", *arguments.split(), "--out", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"twell measure: {message}") and error.count("\n") == 1
    assert not list(tmp_path.iterdir())


# --- calibrate --------------------------------------------------------------------------------


@pytest.fixture
def calibrating(tmp_path, monkeypatch):
    """`measure calibrate` without measuring, in an empty folder; the list has the arguments."""
    seen = []

    def calibrate(*shape, gated, out):
        seen.append((shape, gated, out))
        points = (Point(1, 1, 1, {"dense": 1.0, "union": 0.5}),)
        calibration = Calibration("x", *shape, gated, "bfloat16", "", "", points)
        calibration.save(out)
        return calibration

    def crossover(*shape, gated):
        seen.append((shape, gated))
        return 12.5

    monkeypatch.setattr(measure, "calibrate", calibrate)
    monkeypatch.setattr(measure, "crossover", crossover)
    monkeypatch.chdir(tmp_path)
    return seen


def test_a_model_is_calibrated_by_its_configuration(calibrating, tiny_run, tmp_path, capsys):
    model = Path(shutil.copytree(tiny_run, tmp_path / "run")) / "model"
    for words, shape, gated, out in (
        (f"--model {model.parent}", (32, 96), True, model / "calibration.json"),
        (f"--model {model} --out c.json", (32, 96), True, Path("c.json")),
        ("--hidden 64 --non-gated", (64, 5632), False, Path("build/calibration.json")),
    ):
        calibrating.clear()
        run("measure calibrate " + words)
        assert calibrating == [(shape, gated, out), (shape, gated)]
        written = Calibration.load(out)
        assert written.training == 12.5 and written.times[0].ms == {"dense": 1.0, "union": 0.5}
        written.check_shape(*shape, gated)
    assert main(["measure", "calibrate", "--model", str(model), "--hidden", "64"]) == 2
    message = "leave out --hidden, --intermediate and --non-gated"
    assert message in capsys.readouterr().err


def test_nothing_is_written_into_recorded_data_unasked(calibrating, tmp_path, capsys):
    folder = results.root(Path(__file__).parent) / "data" / "checkpoints" / "twell-6m"
    out = folder / "calibration.json"
    assert main(["measure", "calibrate", "--model", str(folder)]) == 2
    message = f"twell-6m is recorded data; --out {out} writes there"
    assert message in capsys.readouterr().err
    assert calibrating == [] and not out.exists()
    run("measure calibrate --out new/c.json --model", folder)
    assert (tmp_path / "new" / "c.json").is_file()


def test_times_are_kept_where_training_cannot_be_measured(calibrating, monkeypatch, capsys):
    def crossover(*_, **__):
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(measure, "crossover", crossover)
    assert main(["measure", "calibrate", "--hidden", "64"]) == 2
    message = "twell measure: not enough memory: lower the sizes (out of memory)\n"
    assert capsys.readouterr().err == message
    assert Calibration.load("build/calibration.json").training is None
