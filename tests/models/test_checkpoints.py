"""Checkpoints of every layout load bit for bit; errors name the file and the reason."""

import shutil
import warnings

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GenerationConfig

from tests.factories import models as factory
from tests.factories.models import assert_same, change_config, change_tensors, published, write
from twell.models import load

BF16, FP32, FP64 = torch.bfloat16, torch.float32, torch.float64


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize(
    ("layout", "kind", "tied", "shard"),
    [("llama", "llama", False, 10**6), ("own", "llama_sparse_relu", True, 20_000)],
)
def test_published_checkpoints_load_bit_for_bit(tmp_path, layout, gated, tied, shard, kind):
    expected = published(tmp_path, layout, gated, kind, tied, shard)
    model, tokenizer = load(tmp_path)
    assert tokenizer is None and not model.training
    assert {tensor.dtype for tensor in model.state_dict().values()} == {BF16}
    assert_same(model.state_dict(), expected.state_dict())
    assert model.config.rope_parameters["rope_theta"] == 100000
    assert model.config.l1_coefficient == 2e-5 and model.config.hidden_act == "relu"
    x = factory.tokens(1, 9)
    assert torch.equal(model(input_ids=x).logits, expected(input_ids=x).logits)


@pytest.mark.parametrize(
    ("field", "layout"), [(True, "llama"), (True, "own"), (False, "own"), (None, "llama")]
)
def test_down_is_read_transposed_by_the_hybrid_field_alone(tmp_path, field, layout):
    fields = {"shard": 20_000, "neurons": 32, "sparsity_use_hybrid_kernel": field}
    model = published(tmp_path, layout, **fields)
    if field and layout == "llama":  # in the paper's names nothing is transposed by the field
        change_tensors(factory.transpose_down)(tmp_path)
    again, _ = load(tmp_path)
    assert_same(again.state_dict(), model.state_dict())
    again.save_pretrained(tmp_path / "again")  # in our layout
    assert_same(load(tmp_path / "again")[0].state_dict(), model.state_dict())


def test_llama_with_relu_loads_and_with_silu_does_not(tmp_path):
    expected = factory.stock("llama", rms_norm_eps=3e-6)
    expected.save_pretrained(tmp_path)
    x = factory.tokens(2, 8)
    model = load(tmp_path, backend="reference", dtype=FP64)[0]
    torch.testing.assert_close(model(input_ids=x).logits, expected.double()(input_ids=x).logits)
    factory.stock("llama", "silu").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="activation 'silu'"):
        load(tmp_path)
    published(tmp_path, "llama", tied=False)
    change_config(tie_word_embeddings=..., rms_norm_eps=...)(tmp_path)
    config = load(tmp_path)[0].config  # Llama's own defaults
    assert config.tie_word_embeddings is False and config.rms_norm_eps == 1e-6


def test_a_configured_type_that_rounds_warns(tmp_path):
    published(tmp_path, "llama")
    norm = {NORM: torch.rand(32)}
    change_tensors(norm)(tmp_path)
    with pytest.warns(UserWarning, match=rf"{FP32} .*{BF16}; dtype={FP32}") as caught:
        model, _ = load(tmp_path)
    assert len(caught) == 1 and caught[0].filename == __file__
    assert all(p.dtype == BF16 for p in model.parameters())
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a type that the caller names rounds without a warning
        load(tmp_path, dtype=BF16)
        weights = load(tmp_path, dtype=FP32)[0].state_dict()
    assert_same({NORM: weights[NORM]}, norm)


def test_a_calibration_beside_the_weights_is_read_for_auto_alone(tmp_path, monkeypatch):
    factory.make().save_pretrained(tmp_path / "model")
    path = tmp_path / "model" / "calibration.json"
    factory.calibration().save(path)
    model = load(tmp_path, backend="auto")[0]
    assert model.config.ffn_backend == "auto"
    for ffn in model.ffns:
        assert ffn.backend == "auto" and ffn.calibration.times == factory.calibration().times
        ffn.observe(2, 30)
        assert ffn.plans["eager"][0] == (512, "decode")
    assert all(ffn.calibration is None for ffn in load(tmp_path)[0].ffns)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "another")
    with pytest.warns(UserWarning, match="has times of 'a device', and this is 'another'"):
        load(tmp_path, backend="auto")
    factory.calibration(gated=False).save(path)
    with pytest.raises(ValueError, match="gated=False"):
        load(tmp_path, backend="auto")


def test_text_is_generated_as_the_folder_says(tmp_path):
    factory.make().save_pretrained(tmp_path)
    fields = {"eos_token_id": [3, 7], "pad_token_id": 5, "do_sample": True, "temperature": 0.6}
    GenerationConfig(**fields).save_pretrained(tmp_path)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path).generation_config.to_dict()
    model, _ = load(tmp_path)
    assert fields.items() <= model.generation_config.to_dict().items() <= theirs.items()
    (tmp_path / "generation_config.json").unlink()
    assert load(tmp_path)[0].generation_config.eos_token_id == 0  # config.json's


NORM, GATE = "model.norm.weight", "model.layers.0.mlp.gate_weight"
UP = "model.layers.1.mlp.up_weight"


def index(text):
    def change(folder):
        (folder / "model.safetensors").unlink()
        (folder / factory.INDEX).write_text(text)

    return change


def norm(tensor):
    return change_tensors({NORM: tensor})


OURS = [
    (write("adapter_config.json", "{}"), r"adapter_config\.json, an adapter of peft"),
    (change_config(hidden_size="wide"), "wide"),
    (index("{"), r"index\.json is not JSON"),
    (write("model.safetensors", "x"), r"model\.safetensors is damaged or cut short"),
    (write("tokenizer.json", "{}"), r"tokenizer\.json"),
    (norm(torch.full((32,), torch.inf)), r"model\.norm\.weight has NaN or infinite"),
]
PAPER = [
    (change_config(torch_dtype="int8"), "dtype is 'int8'; expected one of bfloat16"),
    (change_config(quantization_config={"load_in_8bit": True}), "load_in_8bit"),
    (change_tensors(lambda tensors: tensors.pop(UP)), r"missing keys, such as .*mlp\.up_proj\.weight"),
    (norm(torch.ones(33)), r"mismatched keys, .*model\.norm\.weight.*33.*32"),
    (change_tensors({GATE: torch.ones(84, 32)}), r"mismatched keys, .*gate_proj\.weight"),
    (change_tensors({"model.extra": torch.ones(1)}), r"unexpected keys, such as model\.extra"),
    (change_tensors({"lm_head.weight": torch.ones(90, 32)}), r"lm_head\.weight differs from"),
    (write("generation_config.json", "{"), r"generation_config\.json is not JSON"),
]


@pytest.mark.parametrize(
    ("ours", "change", "names"),
    [*((True, *damage) for damage in OURS), *((False, *damage) for damage in PAPER)],
)
def test_damaged_checkpoints_are_named(tiny_run, tmp_path, ours, change, names):
    folder = tmp_path / "model"
    if ours:
        shutil.copytree(tiny_run / "model", folder)
    else:
        folder.mkdir()
        published(folder, "own")
    change(folder)
    with pytest.raises(ValueError, match=names):
        load(folder)


def test_missing_files_and_a_tensor_in_two_shards_are_refused(tmp_path):
    published(tmp_path, "llama", shard=20_000)
    *_, file = sorted(tmp_path.glob("model-*"))
    save_file(load_file(file) | {"model.embed_tokens.weight": torch.ones(factory.VOCAB, 32)}, file)
    with pytest.raises(ValueError, match=r"model\.embed_tokens\.weight twice"):
        load(tmp_path)
    file.unlink()
    with pytest.raises(FileNotFoundError, match=f"has no {file.name}"):
        load(tmp_path)
    (tmp_path / "config.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"it has no config\.json"):
        load(tmp_path)
    with pytest.raises(FileNotFoundError, match="no/such/folder"):
        load(tmp_path / "no/such/folder")
