"""Whole models: rows of every file, checks before times, checkpoints, mistakes."""

import numpy as np
import pandas as pd
import pytest
import torch

from tests.factories import measure
from tests.factories.measure import TINY, active_entries
from twell.measure import imposed, model, sides
from twell.measure.decode import Decoder
from twell.measure.model import FILES, language_model
from twell.measure.parts import BETWEEN, PARTS, split_kernels
from twell.measure.providers import FP8, FP8_ALL, Provider, model_providers
from twell.measure.rows import COLUMNS
from twell.models import order
from twell.sparse.float8 import FLOAT8
from twell.sparse.plan import Chooser

ops = pytest.importorskip("twell.kernels.ops")
LAYER = [("nvjet", 0.1), ("sdpa", 0.2), *3 * [("nvjet", 0.1)], ("triton_poi", 0.1)]


@pytest.fixture
def quick(dense_kernels):
    """Dense products; each call shows the kernels of a layer."""
    dense_kernels.shown = lambda call: call() is not None and LAYER
    return dense_kernels


def names(*arguments, **options):
    return [provider.name for provider in model_providers(*arguments, **options)]


@pytest.fixture(scope="module")
def shared():
    """What the tests of one command share: its tables."""
    return {}


@pytest.fixture
def tables(quick, tmp_path, monkeypatch, shared):
    """All files of one command."""
    if not shared:
        monkeypatch.setattr(model, "GRAPH_TOKENS", 100)
        options = {"shapes": [(2, 64), (1, 64)], "active": [10, 40], "layers": True}
        options |= {"decode": [1, 3], "decode_context": 20, "tuned": True, "energy": True}
        rows = language_model("quick", TINY, **options, parts=True, out=tmp_path)
        for name in FILES:
            shared[name] = table = pd.read_csv(tmp_path / f"{name}.csv")
            assert all(list(row) == COLUMNS[name] for row in rows[name]), name
            assert len(table) == len(rows[name]) and table["date"].nunique() == 1
            assert (table["sdpa"] == "default").all()
    return shared


def test_rows_of_passes(tables):
    table = tables["model"]
    assert list(table["provider"]) == 4 * names(None)
    assert list(table["batch"]) == 2 * (6 * [2] + 6 * [1])
    assert (table["mode"] == np.where(table["tokens"] > 100, "stream", "graph")).all()
    assert (table["tokens_per_ms"] == table["tokens"]).all() and (table["idle"] == 20).all()
    paths = {"triton": ["decode 3", "decode 3"], "dense eager": ["dense 3", "dense 3"]}
    for name, expected in paths.items():
        assert list(table["path"][table["provider"] == name]) == 2 * expected
    assert table["relative_rms"].between(1e-4, 0.05).all()
    assert table["layer_rms"].between(1e-4, 5e-3).all()
    assert (table["profile"] == "paper").all() and (table["hidden_size"] == 32).all()
    weights = 2 * table["parameters"]
    # The weights once, what a pass takes, and the frequencies of rotary embeddings.
    assert (table["peak"] == weights + 500_000 + 64).all()


def test_rows_of_decoding(tables):
    table = tables["decode"]
    assert list(table["provider"]) == 4 * names(None, tuned=True)
    assert list(table["batch"]) == 2 * (9 * [1] + 9 * [3])
    assert (table["tokens"] == table["batch"]).all() and (table["context"] == 20).all()
    assert table["layer_rms"].between(1e-4, 1e-2).all()
    assert (table["same"] == 1).all() and (table["steps"] == 3).all()
    assert (table["mode"] == "graph").all()
    speed = 1e3 * table["batch"] / table["p50"]
    assert np.allclose(table["tokens_per_second"], speed, rtol=1e-3)
    assert np.allclose(table["p50"], 1 / 3, rtol=1e-3)  # a generation of three steps takes 1 ms


def test_without_graphs_nothing_is_captured(quick, monkeypatch):
    monkeypatch.setattr(quick, "capture", lambda calls: pytest.fail("captured"))
    paths = {"eager": "decode", "compiled": "dense", "graph": "decode"}
    monkeypatch.setattr(Chooser, "path", lambda self, size, situation="eager": paths[situation])
    options = {"shapes": [(1, 64)], "active": [10], "decode": [2], "decode_context": 20}
    rows = language_model("quick", TINY, **options, graphs=False)
    for name in ("model", "decode"):
        table = pd.DataFrame(rows[name]).set_index("provider")
        assert (table["mode"] == "stream").all()
        assert table.loc["auto", "path"] == "decode 3"
        assert table.loc["auto torch.compile", "path"] == "dense 3"


def test_rows_of_layers_and_parts(tables):
    layers = tables["model_layers"]
    assert list(layers["layer"]) == 4 * [0, 1, 2] and layers["level"].nunique() == 4
    timed, times = layers["batch"] == 2, layers[["dense", "sparse", "auto"]]
    assert (times[timed] == 1.0).all(axis=None) and times[~timed].isna().all(axis=None)
    for mean, rows in zip((10, 40), (layers[:6], layers[6:]), strict=True):
        assert rows["wanted"][:3].mean() == pytest.approx(mean, abs=0.01)
        assert rows["level"].iloc[0] == pytest.approx(rows["active"][:3].mean(), abs=0.01)
        assert (rows["active"] < rows["p99"]).all() and (rows["p99"] <= rows["active_max"]).all()
        assert (rows["union"] > rows["active"]).all()
        assert np.allclose(rows["active"], rows["wanted"], rtol=0.6)
    parts = tables["model_parts"]  # of each level two providers in the first batch
    assert list(parts["part"]) == 2 * 2 * list(PARTS) and (parts["batch"] == 2).all()
    times = {"attention": 0.2, "projections": 0.2, "gate": 0.1, "up and down": 0.1}
    # Kernels take 0.8 of 1 ms.
    times |= {"norms, rotary, residuals": 0.1, BETWEEN: 0.3}
    assert all(parts["ms"][parts["part"] == part].eq(ms).all() for part, ms in times.items())


def test_the_activity_of_a_checkpoint_is_its_own(quick, tmp_path, monkeypatch):
    sizes = {"hidden_size": 32, "intermediate_size": 96}
    given = measure.model(**sizes, num_hidden_layers=2, num_attention_heads=2)
    ids = imposed.draw_tokens(640, 4, 64, seed=3)
    imposed.impose(given, [7.0, 30.0], ids)
    checkpoint = ("tiny", given, ids.flatten().tolist())
    options = {"checkpoint": checkpoint, "shapes": [(4, 64)], "compiled": True}
    rows = language_model(**options, out=tmp_path)
    means = [float(layer.double().sum(1).mean()) for layer in active_entries(given, ids)]
    layers = rows["model_layers"]
    assert [row["active"] for row in layers] == [round(mean, 2) for mean in means]
    about = {(row["model"], row["profile"], row["wanted"]) for row in layers}
    assert about == {("tiny", "checkpoint", None)}
    assert [row["provider"] for row in rows["model"]] == names(True)
    assert {row["energy"] for row in rows["model"]} == {None}
    assert not rows["decode"] and not rows["model_parts"]
    files = sorted(path.name for path in tmp_path.glob("[!.]*"))
    assert files == ["model.csv", "model_layers.csv"]
    # Random weights get these means.
    beside = language_model(**options, alike=True, decode=[2], decode_context=32)
    layers = [row for row in beside["model_layers"] if row["profile"] == "imposed"]
    assert [row["wanted"] for row in layers] == [round(mean, 2) for mean in means]
    for row in layers:
        assert row["active"] == pytest.approx(row["wanted"], rel=0.2)
    for file in ("model", "decode"):
        profiles = [row["profile"] for row in beside[file]]
        half = len(profiles) // 2
        assert profiles == ["checkpoint"] * half + ["imposed"] * half and half
    # In another order of the tokens: checked against the same results.
    monkeypatch.setattr(order, "MIN_TOKENS", 100)
    rows = language_model(**options, ordered=True)
    assert {row["profile"] for row in rows["model"]} == {model.ORDERED}
    assert all(len(ffn.token_order.order) == 4 * 64 for ffn in given.ffns)


def test_layers_in_fp8_join_passes_and_decoding(quick, monkeypatch):
    monkeypatch.setattr(model.float8, "why_not", lambda device: None)
    monkeypatch.setattr(model, "GRAPH_TOKENS", 100)
    options = {"shapes": [(2, 64)], "active": [10], "decode": [2], "decode_context": 20}
    rows = language_model("quick", TINY, **options, compiled=True, fp8=True)
    dense, *others = [row["provider"] for row in rows["model"]]
    assert [dense, *others] == names(True, precisions=(None, FP8, FP8_ALL))
    assert [row["provider"] for row in rows["decode"]] == names(True, precisions=(None, FP8))
    assert [Provider.parse(name).name for name in others] == others
    table = pd.DataFrame(rows["model"]).set_index("provider")
    in_fp8 = table.index.str.contains("FP8")
    # Weights in FP8 take less memory; the outputs of layers are those of these weights.
    assert (table.loc[in_fp8, "peak"] < table["peak"].iloc[0]).all()
    assert table.loc[in_fp8, "layer_rms"].between(1e-4, 5e-2).all()
    order = [dense, "dense FP8 torch.compile", "dense FP8 all torch.compile"]
    assert table.loc[order, "relative_rms"].is_monotonic_increasing
    assert table["relative_rms"].max() < 0.1


def test_a_wrong_layer_in_fp8_is_found(quick, monkeypatch):
    monkeypatch.setattr(model.float8, "why_not", lambda device: None)

    def wrong(path, x, *tensors, **_):
        return measure.run(path, x, *tensors) * (1.05 if tensors[1].dtype == FLOAT8 else 1.0)

    monkeypatch.setattr(ops, "run", wrong)
    with pytest.raises(ArithmeticError, match="^layer 0 of triton FP8 of quick"):
        language_model("quick", TINY, shapes=[(2, 32)], active=[20], compiled=True, fp8=True)


DECODING = r"decoding 2 x 1 behind 20 tokens .*"


@pytest.mark.parametrize(
    "wrong, message",
    [
        ("layer", "^layer 0 of triton of quick  2 x 32 tokens .* is wrong"),
        ("pass", r"^hidden states \(quick .*\) of auto are wrong"),
        ("replay", r"^hidden states \(quick .*\) of dense eager are wrong"),
        ("layer of a step", f"^layer 0 of triton of quick  {DECODING} is wrong"),
        ("step", rf"^logits \(quick  {DECODING}\) of triton are wrong"),
        ("layer alone", "^triton decode at .* layer 0 .* is wrong"),
    ],
)
def test_nothing_is_timed_before_all_is_checked(quick, tmp_path, monkeypatch, wrong, message):
    forward, step, capture = sides.forward, Decoder.step, quick.capture

    def bad_forward(model, ids):
        hidden, logits = forward(model, ids)
        return hidden * (1.1 if model.ffns[0].backend == "auto" else 1.0), logits

    def bad_step(decoder, *kind):
        return step(decoder, *kind) * (1.1 if decoder.model.ffns[0].backend == "triton" else 1.0)

    def bad_capture(calls):
        replay, outputs = capture(calls)
        return lambda: replay() or outputs[0][0].mul_(1.1), outputs

    def alone(subject, ids, _):
        return [], activity_of(subject.model, ids)

    activity_of, layers = imposed.activity_of, wrong == "layer alone"
    patches = {
        "pass": (model, "forward", bad_forward),
        "step": (Decoder, "step", bad_step),
        "replay": (quick, "capture", bad_capture),
    }
    run = (ops, "run", lambda *tensors, **_: 1.01 * measure.run(*tensors))
    monkeypatch.setattr(*patches.get(wrong, run))
    if layers:
        monkeypatch.setattr(model, "measure_forward", alone)
    shapes, documents = ([], [2]) if wrong.endswith("step") else ([(2, 32)], [])
    options = {"shapes": shapes, "decode": documents, "decode_context": 20, "active": [20]}
    with pytest.raises(ArithmeticError, match=message):
        language_model("quick", TINY, **options, compiled=False, layers=layers, out=tmp_path)
    assert not quick.timed and not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "changes, options, message",  # of the model, of the arguments
    [
        ({"dtype": torch.float32}, {}, "x is in torch.float32; load it in torch.bfloat16"),
        ({"mlp_bias": True}, {}, "x has feed-forward layers with biases"),
        ({"hidden_act": "silu"}, {}, "x has the activation 'silu'"),
        ({"hidden_size": 40}, {}, "hidden_size is 40; the kernels need"),
        ({}, {}, "the text has 1 tokens; 2 x 32 need 64"),
        ({}, {"shapes": [(1, 300)]}, "x is for 256 tokens; 300 were asked for"),
    ],
)
def test_checkpoints_that_are_not_measured(quick, changes, options, message):
    given = measure.model(num_hidden_layers=1, **changes)
    options = {"checkpoint": ("x", given, [1]), "shapes": [(2, 32)]} | options
    with pytest.raises(ValueError, match=message):
        language_model(**options)
    assert not quick.timed


# --- kernels of a layer -----------------------------------------------------------------------

BEFORE = [("triton_red_fused__to_copy_mean_0", 1.0), ("nvjet_tst_256x128", 30.0)]
BEFORE += [("sm90_xmma_gemm_bf16bf16", 40.0)]
# Inductor names a fused kernel after its consumer.
BEFORE += [("triton_poi_fused__scaled_dot_product_cudnn_attention_add_mul_1", 2.0)]
OUTPUT = [("nvjet_tst_192", 80.0), ("triton_red_fused__to_copy_add_ffn_union_2", 4.0)]
AFTER = [("triton_poi_fused_add_view_4", 8.0)]
GATE = ("gate_bits_kernel", 300.0)
UNION = [GATE, ("union_lists_kernel", 5.0), ("union_up_kernel", 40.0), ("union_down_kernel", 30.0)]
SPLIT = [("nvjet_splitK", 200.0), ("cublasLt::splitKreduce_kernel<32>", 100.0), ("nvjet", 9.0)]
DENSE = [("nvjet", 300.0), ("nvjet", 500.0), ("triton_poi_fused_mul_relu_3", 50.0), ("nvjet", 7.0)]


@pytest.mark.parametrize(
    "attention",
    [
        "void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64> >(Params)",
        "fmha_cutlassF_bf16_aligned_64x64_sm80",
        "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_3i",
        "void cudnn::fusion::lean_reduction_kernel<false, false, false>(void*)",
    ],
)
@pytest.mark.parametrize(
    "ffn, gate, rest",
    [
        (DENSE, 300, 557),
        (2 * UNION, 600, 150),
        ([("decode_up_kernel", 8.0), ("decode_down_kernel", 4.0)], 8, 4),
        ([("Memset (Device)", 16.0), GATE, ("rowwise_kernel", 30.0)], 300, 30),
        ([DENSE[0], *DENSE[2:]], 300, 57),  # without a gate
        (SPLIT, 300, 9),
    ],
)
def test_kernels_are_told_apart(attention, ffn, gate, rest):
    times = split_kernels([*BEFORE, (attention, 1000.0), *OUTPUT, *ffn, *AFTER])
    extra = sum(ms for name, ms in ffn if name.startswith("Memset"))
    assert list(times) == list(PARTS[:-1])
    assert list(times.values()) == [1000.0, 150.0, 15.0 + extra, gate, rest]
    message = "no kernel of attention among triton_red_fused__to_copy_mean_0, nvjet"
    with pytest.raises(ValueError, match=message):
        split_kernels([*BEFORE, *OUTPUT])
