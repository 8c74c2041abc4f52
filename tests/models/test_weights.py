import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.models.factories import (
    VOCAB,
    assert_same,
    change_tensors,
    published,
    tokens,
    transpose_down,
)
from twell.models import load


@pytest.mark.parametrize("layout", ["llama", "own"])
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("kind", ["llama", "llama_sparse_relu"])
def test_published_checkpoints_load_bit_for_bit(tmp_path, layout, gated, tied, shards, kind):
    expected = published(tmp_path, layout, gated, kind, tied, shards)
    model, tokenizer = load(tmp_path)
    assert tokenizer is None and not model.training
    assert {tensor.dtype for tensor in model.state_dict().values()} == {torch.bfloat16}
    assert_same(model.state_dict(), expected.state_dict())
    assert model.config.rope_parameters["rope_theta"] == 100000
    assert model.config.l1_coefficient == 2e-5 and model.config.hidden_act == "relu"
    x = tokens(1, 9)
    assert torch.equal(model(input_ids=x).logits, expected(input_ids=x).logits)


# --- down projections of the paper's hybrid kernels


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("neurons", [84, 32])
@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("kind", ["llama", "llama_sparse_relu"])
def test_the_hybrid_kernels_down_projection_is_read_transposed(
    tmp_path, gated, neurons, shards, kind
):
    field = {"sparsity_use_hybrid_kernel": True}
    model = published(tmp_path, "llama", gated, kind, True, shards, neurons, **field)
    change_tensors(transpose_down)(tmp_path)
    again, _ = load(tmp_path)
    assert_same(again.state_dict(), model.state_dict())
    again.save_pretrained(tmp_path / "again")  # in our layout
    assert_same(load(tmp_path / "again")[0].state_dict(), model.state_dict())


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("neurons", [84, 32])
@pytest.mark.parametrize(
    ("field", "layout"), [(True, "own"), (False, "own"), (False, "llama"), (None, "llama")]
)
def test_without_the_hybrid_field_and_in_the_papers_names_nothing_is_transposed(
    tmp_path, gated, neurons, field, layout
):
    field = {"sparsity_use_hybrid_kernel": field}
    model = published(tmp_path, layout, gated, neurons=neurons, **field)
    assert_same(load(tmp_path)[0].state_dict(), model.state_dict())


TRUE = r"expected \(84, 32\), since sparsity_use_hybrid_kernel in config.json is true"
FALSE = r"expected \(32, 84\), since sparsity_use_hybrid_kernel in config.json is not true"


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize(
    ("field", "shape", "message"),
    [
        (True, (32, 84), rf"{TRUE}; if the file is right, set it to false"),
        (True, (83, 32), rf"{TRUE}$"),
        (False, (84, 32), rf"{FALSE}; if the file is right, set it to true"),
        (None, (84, 32), rf"{FALSE}; if the file is right, set it to true"),
    ],
)
def test_a_down_projection_that_contradicts_the_field_is_refused(
    tmp_path, gated, field, shape, message
):
    fields = {} if field is None else {"sparsity_use_hybrid_kernel": field}
    published(tmp_path, "llama", gated, **fields)
    wrong = {"model.layers.1.mlp.down_proj.weight": torch.ones(shape, dtype=torch.bfloat16)}
    if field:
        change_tensors(transpose_down)(tmp_path)
    change_tensors(lambda tensors: tensors.update(wrong))(tmp_path)
    rows, columns = shape
    place = rf"layers\.1\.mlp\.down_proj\.weight has shape \({rows}, {columns}\)"
    with pytest.raises(ValueError, match=f"{place}; {message}"):
        load(tmp_path)


@pytest.mark.parametrize("field", ["false", 1, [True]])
def test_a_hybrid_field_that_is_no_bool_is_refused(tmp_path, field):
    published(tmp_path, "llama", sparsity_use_hybrid_kernel=field)
    message = "sparsity_use_hybrid_kernel is .*; expected true or false"
    with pytest.raises(ValueError, match=message):
        load(tmp_path)


# --- wrong tensors


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda tensors: tensors.pop("model.layers.1.mlp.up_weight"),
            r"model\.layers\.1\.mlp\.up_proj\.weight is missing, expected with shape \(84, 32\)",
        ),
        (
            {"model.norm.weight": torch.ones(33)},
            r"model\.norm\.weight has shape \(33,\); expected \(32,\)",
        ),
        (
            {"model.layers.0.mlp.gate_weight": torch.ones(84, 32)},
            r"gate_proj\.weight has shape \(32, 84\); expected \(84, 32\)",
        ),
        (
            {"model.layers.0.mlp.gate_weight": torch.ones(84)},
            r"gate_weight has shape \(84,\); expected a matrix",
        ),
        ({"model.extra": torch.ones(1)}, r"the tensor model\.extra is not part of the model"),
        (
            {"lm_head.weight": torch.ones(VOCAB, 32)},
            r"lm_head\.weight differs from model\.embed_tokens\.weight",
        ),
        (
            {"model.norm.weight": torch.ones(32).to(torch.int8)},
            r"model\.norm\.weight has type torch\.int8; expected one of bfloat16",
        ),
        (
            {"model.norm.weight": torch.ones(32).to(torch.float8_e4m3fn)},
            r"model\.norm\.weight has type torch\.float8_e4m3fn; expected one of bfloat16",
        ),
    ],
)
def test_wrong_tensors_are_named(tmp_path, change, message):
    published(tmp_path, "own")
    edit = change if callable(change) else lambda tensors: tensors.update(change)
    change_tensors(edit)(tmp_path)
    with pytest.raises(ValueError, match=message):
        load(tmp_path)


def test_a_tensor_in_two_shards_is_refused(tmp_path):
    published(tmp_path, "llama", shards=3)
    file = tmp_path / "model-2.safetensors"
    save_file(load_file(file) | {"model.embed_tokens.weight": torch.ones(VOCAB, 32)}, file)
    message = r"model-2\.safetensors: model\.embed_tokens\.weight would be one weight twice"
    with pytest.raises(ValueError, match=message):
        load(tmp_path)
