import copy

import peft
import pytest
import torch

from tests.factories.models import family, stock, tokens
from twell.models import densify, sparse_ffns, sparsify
from twell.sparse.training import SparseTraining

PARTS = {"llama": ["gate_proj", "up_proj", "down_proj"], "opt": ["fc1", "fc2"]}


def assert_close(result, expected):
    torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-5)


def with_adapters(base, kind, sparsified=None):
    """A copy of `base` with random adapters, sparsified "before" or "after" them, or not (None)."""
    torch.manual_seed(0)
    parts, model = PARTS[base.config.model_type], copy.deepcopy(base)
    if sparsified == "before":
        sparsify(model, backend="reference")
    if kind == "ia3":
        options = {"feedforward_modules": parts[-1:], "init_ia3_weights": False}
        config = peft.IA3Config(target_modules=parts, **options)
    else:
        options = {"r": 2, "init_lora_weights": False, "use_dora": kind == "dora"}
        config = peft.LoraConfig(target_modules=parts, **options)
    model = peft.get_peft_model(model, config)
    if sparsified == "after":
        sparsify(model, backend="reference")
    return model.train()


@pytest.mark.parametrize(
    ("kind", "adapter", "sparsified"),
    [("llama", "dora", "before"), ("llama", "ia3", "after"), ("opt", "lora", "before")],
)
def test_adapters_of_peft_act_and_learn(kind, adapter, sparsified):
    """Logits and gradients are those of peft's model of the stock one, in SparseTraining too."""
    base, x = stock("llama") if kind == "llama" else family("opt", dropout=0.0), tokens(2, 12)
    dense, sparse = with_adapters(base, adapter), with_adapters(base, adapter, sparsified)
    dense(input_ids=x, labels=x).loss.backward()
    training = SparseTraining(sparse)
    for _ in training.attempts():
        sparse.zero_grad()
        sparse(input_ids=x, labels=x).loss.backward()
    assert training.summary()["sparse_layers"] == 0
    expected = {name: p.grad for name, p in dense.named_parameters() if p.requires_grad}
    result = {name: p.grad for name, p in sparse.named_parameters() if p.requires_grad}
    assert result.keys() == expected.keys() and len(result) >= 9
    assert all(gradient.any() for gradient in expected.values())
    atol = 1e-6 if kind == "llama" else 1e-4  # whose weights are larger
    for name, gradient in expected.items():
        torch.testing.assert_close(result[name], gradient, rtol=1e-4, atol=atol, msg=name)
    dense.eval()
    sparse.eval()
    with torch.no_grad():
        expected = dense(input_ids=x).logits
        torch.testing.assert_close(sparse(input_ids=x).logits, expected, rtol=1e-4, atol=10 * atol)
        assert all(ffn.path == "dense" for ffn in sparse_ffns(sparse))
        merged = sparse.merge_and_unload()
        assert all(ffn.readable for ffn in sparse_ffns(merged))
        tolerance = {"rtol": 1e-3, "atol": max(1e-4, 10 * atol)}
        torch.testing.assert_close(merged(input_ids=x).logits, expected, **tolerance)


def test_hooks_of_a_replaced_layer_are_carried_over_and_back():
    model = stock("llama")
    x, seen = tokens(2, 12), []

    def double(module, args, y):
        seen.append(type(module).__name__)
        return 2 * y

    before = model.model.layers[1].mlp.register_forward_hook(double)
    expected = model(input_ids=x).logits
    sparsify(model)
    assert_close(model(input_ids=x).logits, expected)
    after = model.model.layers[1].mlp.register_forward_pre_hook(lambda *_: seen.append("after"))
    model(input_ids=x)
    densify(model)
    assert_close(model(input_ids=x).logits, expected)
    before.remove()
    after.remove()
    assert not torch.allclose(model(input_ids=x).logits, expected, rtol=1e-3, atol=1e-3)
    assert seen == ["LlamaMLP", "SparseFFN", "after", "SparseFFN", "after", "LlamaMLP"]


def test_silu_needs_relufy():
    model = stock("llama", "silu")
    x = tokens(2, 12)
    before = model(input_ids=x).logits
    with pytest.raises(ValueError, match="'silu', .*relufy=True"):
        sparsify(model)
    with pytest.warns(UserWarning, match="'silu' became 'relu': the model needs training"):
        sparsify(model, relufy=True)
    relu = model(input_ids=x).logits
    assert not torch.allclose(relu, before)
    torch.testing.assert_close(densify(model)(input_ids=x).logits, relu)
    assert model.config.hidden_act == "relu"
    for refuse in (densify, sparse_ffns):
        with pytest.raises(ValueError, match="LlamaForCausalLM"):
            refuse(model)
