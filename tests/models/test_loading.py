import warnings

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from tests.models.factories import (
    assert_same,
    calibration,
    change_config,
    make,
    published,
    stock,
    tokens,
    write_shards,
)
from twell.models import SparseLlamaForCausalLM, load, save
from twell.sparse.layer import SparseFFN

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64


def test_own_checkpoints_keep_everything(tmp_path):
    model = make(l1_coefficient=0.1, gated_mlp=False)
    model.save_pretrained(tmp_path)
    again = load(tmp_path)[0]
    assert again.config.l1_coefficient == 0.1 and not again.config.gated_mlp


def test_llama_with_relu_loads_and_with_silu_does_not(tmp_path):
    expected = stock("llama", rms_norm_eps=3e-6)
    expected.save_pretrained(tmp_path)
    x = tokens(2, 8)
    model = load(tmp_path, backend="reference", dtype=FP64)[0]
    torch.testing.assert_close(model(input_ids=x).logits, expected.double()(input_ids=x).logits)
    stock("llama", "silu").save_pretrained(tmp_path)
    message = r"activation 'silu'; load it with transformers and use twell\.sparsify"
    with pytest.raises(ValueError, match=message):
        load(tmp_path)


def test_fields_that_config_json_lacks_have_llamas_defaults(tmp_path):
    published(tmp_path, "llama", tied=False)
    change_config(tie_word_embeddings=..., rms_norm_eps=...)(tmp_path)
    config = load(tmp_path)[0].config
    assert config.tie_word_embeddings is False and config.rms_norm_eps == 1e-6


@pytest.mark.parametrize("how", [lambda path: load(path)[0], AutoModelForCausalLM.from_pretrained])
def test_a_model_stored_with_a_list_of_coefficients_computes_and_does_not_train(tmp_path, how):
    model = make().eval()
    model.save_pretrained(tmp_path)
    x = tokens(2, 8)
    change_config(l1_coefficient=[0.1, 0.0, 0.3])(tmp_path)
    again = how(tmp_path)
    assert torch.equal(again.eval()(input_ids=x, labels=x).logits, model(input_ids=x).logits)
    message = r"stored with a list of L1 coefficients; set config\.l1_coefficient to a number"
    with pytest.raises(ValueError, match=message):
        again.train()(input_ids=x, labels=x)
    again.config.l1_coefficient = 0.1
    output = again(input_ids=x, labels=x)
    torch.testing.assert_close(output.loss, output.cross_entropy + 0.1 * output.l1)
    again.config.l1_coefficient = None
    again.save_pretrained(tmp_path)
    assert how(tmp_path).config.l1_coefficient is None


def test_loading_draws_no_bar_and_restores_the_setting(tmp_path, capfd, monkeypatch):
    monkeypatch.delenv("TQDM_DISABLE", raising=False)
    make().save_pretrained(tmp_path)
    capfd.readouterr()
    switches = {True: logging.enable_progress_bar, False: logging.disable_progress_bar}
    before = logging.is_progress_bar_enabled()
    try:
        for enabled in (True, False):
            switches[enabled]()
            load(tmp_path)
            assert logging.is_progress_bar_enabled() == enabled
            assert capfd.readouterr() == ("", "")
    finally:
        switches[before]()


@pytest.mark.parametrize("part", ["model", "tokenizer"])
def test_a_folder_that_cannot_be_written_is_named(tiny_run, tmp_path, monkeypatch, part):
    model, tokenizer = load(tiny_run)
    # What the two libraries raise on a full disk.
    kind, target = {"model": (SafetensorError, model), "tokenizer": (Exception, tokenizer)}[part]

    def full(*_, **__):
        raise kind("No space left on device")

    monkeypatch.setattr(target, "save_pretrained", full)
    with pytest.raises(OSError, match=r"out could not be written: No space left on device"):
        save(model, tokenizer, tmp_path / "out")


# --- the type of the weights


def mixed(folder, types, order, named=None, field="dtype"):
    """Write a checkpoint with one type a shard, shards in `order`, and return the stored tensors.

    named: type in config.json, under `field`; None: none.
    """
    published(folder, "llama")
    names = sorted(load_file(folder / "model.safetensors"))
    (folder / "model.safetensors").unlink()
    change_config(torch_dtype=...)(folder)
    if named:
        change_config(**{field: named})(folder)
    shapes = {name: tensor.shape for name, tensor in make().state_dict().items()}
    shards = [{} for _ in types]
    for number, name in enumerate(names):
        place = number % len(types)
        values = torch.randn(shapes[name], dtype=FP64)
        shards[place][name] = values.to(types[place])
    write_shards(folder, [shards[place] for place in order])
    return {name: tensor for shard in shards for name, tensor in shard.items()}


@pytest.mark.parametrize(
    ("types", "named", "expected"),
    [
        ((BF16, FP32), None, FP32),
        ((BF16, FP16), None, FP32),  # neither holds the other
        ((BF16, FP32, FP64), None, FP64),
        ((FP16, FP16), None, FP16),
        ((BF16, FP32), "float32", FP32),
        ((BF16, BF16), "float32", FP32),
        ((BF16, FP32), "torch.float64", FP64),
        ((FP16, BF16), "auto", FP32),
    ],
)
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("field", ["dtype", "torch_dtype"])
def test_shards_of_mixed_types_keep_their_values(tmp_path, types, named, expected, reverse, field):
    order = range(len(types))[::-1] if reverse else range(len(types))
    stored = mixed(tmp_path, types, order, named, field)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model, _ = load(tmp_path)
    weights = model.state_dict()
    assert model.config.dtype == expected
    assert_same({n: weights[n] for n in stored}, {n: t.to(expected) for n, t in stored.items()})
    model.save_pretrained(tmp_path / "again")
    assert_same(load(tmp_path / "again")[0].state_dict(), weights)


@pytest.mark.parametrize(
    ("types", "named", "expected", "message"),
    [
        ((BF16, FP32), "bfloat16", BF16, r"float32 and .*bfloat16; dtype=torch\.float32"),
        ((BF16, FP16), "bfloat16", BF16, r"float16 and .*bfloat16; dtype=torch\.float32"),
        ((BF16, FP32), "float16", FP16, r".*, torch\.float16; dtype=torch\.float32"),
        ((FP64, FP32), "float32", FP32, r"float64 and .*float32; dtype=torch\.float64"),
    ],
)
@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_a_configured_type_that_rounds_warns(tmp_path, types, named, expected, message, order):
    stored = mixed(tmp_path, types, order, named)
    message = rf"the tensor model\.\S+ is stored as torch\.{message} keeps"
    with pytest.warns(UserWarning, match=message) as caught:
        model, _ = load(tmp_path)
    assert len(caught) == 1 and caught[0].filename == __file__
    assert all(p.dtype == expected for p in model.parameters())
    widest = torch.promote_types(*types)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a type that the caller names rounds without a warning
        load(tmp_path, dtype=BF16)
        weights = load(tmp_path, dtype=widest)[0].state_dict()
    assert_same({n: weights[n] for n in stored}, {n: t.to(widest) for n, t in stored.items()})


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32, FP64])
def test_saved_models_keep_their_type(tmp_path, dtype):
    model = make().to(dtype)
    model.save_pretrained(tmp_path)
    for again in (load(tmp_path)[0], SparseLlamaForCausalLM.from_pretrained(tmp_path)):
        assert_same(again.state_dict(), model.state_dict())
        assert again.config.dtype == dtype


# --- calibrations


@pytest.fixture
def calibrated(tmp_path):
    """A run folder whose model has a calibration beside its weights."""
    make().save_pretrained(tmp_path / "model")
    calibration().save(tmp_path / "model" / "calibration.json")
    return tmp_path


def test_a_calibration_beside_the_weights_is_read_for_auto(calibrated):
    path, default = calibrated / "model" / "calibration.json", SparseFFN(32, 84).plan
    model = load(calibrated, backend="auto")[0]
    assert model.config.ffn_backend == "auto"
    for ffn in model.ffns:
        assert ffn.backend == "auto" and ffn.calibration.times == calibration().times
        assert ffn.plan == ((2**20, "decode"),) != default
    assert all(ffn.calibration is None for ffn in load(calibrated)[0].ffns)
    x = tokens(2, 9)
    with torch.no_grad():
        expected = load(calibrated)[0](input_ids=x).logits
        torch.testing.assert_close(model(input_ids=x).logits, expected)
    path.unlink()
    assert all(ffn.plan == default for ffn in load(calibrated, backend="auto")[0].ffns)
    model.save_pretrained(calibrated / "again")  # the configuration names the backend
    calibration().save(calibrated / "again" / "calibration.json")
    assert load(calibrated / "again")[0].ffns[0].calibration is not None


def test_a_calibration_of_another_device_warns(calibrated, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "another")
    with pytest.warns(UserWarning, match="has times of 'a device', and this is 'another'"):
        load(calibrated, backend="auto")


def test_an_unusable_calibration_is_refused_for_auto_alone(calibrated):
    path = calibrated / "model" / "calibration.json"
    calibration(gated=False).save(path)
    with pytest.raises(ValueError, match=r"gated=False; this layer has .*gated=True"):
        load(calibrated, backend="auto")
    path.write_text("{")
    with pytest.raises(ValueError, match=r"calibration\.json is no calibration: it is not JSON"):
        load(calibrated, backend="auto")
    load(calibrated)
