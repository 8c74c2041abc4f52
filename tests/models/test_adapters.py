"""Models whose feed-forward layers have other names, activations or parts than Llama's."""

import copy
from concurrent.futures import ThreadPoolExecutor

import peft
import pytest
import torch
from accelerate import init_empty_weights, load_checkpoint_and_dispatch
from torch import nn
from transformers import AutoConfig
from transformers.models.llama.modeling_llama import LlamaMLP

import twell
from tests.factories import models as factory
from tests.factories.models import assert_same, family, inputs_of, make, stock, tokens
from twell.models import densify, load, order, sparse_ffns, sparsify
from twell.sparse.layer import SparseFFN
from twell.sparse.training import SparseTraining

assert_close = torch.testing.assert_close


@torch.no_grad()
def logits(model, x):
    return model(**inputs_of(model, x)).logits


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        *((kind, {}) for kind in factory.FAMILIES if kind != "nemotron"),
        ("nemotron", {"mlp_bias": True}),
        ("t5", {"feed_forward_proj": "gated-relu"}),
        ("llama", {"hidden_act": "relu2"}),
        ("qwen2", {"hidden_act": "relu"}),
    ],
)
def test_a_model_computes_the_same_is_saved_and_comes_back(kind, changes, tmp_path):
    model, x = family(kind, **changes), tokens(2, 12)
    before, text = logits(model, x), repr(model)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    modules, names = dict(model.named_modules()), [name for name, _ in model.named_parameters()]
    sparsify(model, backend="reference")
    assert [name for name, _ in model.named_parameters()] == names
    ffns = sparse_ffns(model)
    assert len(ffns) == (4 if kind == "t5" else 3)
    assert {ffn.backend for ffn in ffns} == {"reference"}
    assert_close(logits(model, x), before, rtol=1e-4, atol=1e-4)

    # Saved files are the model's own. transformers and twell read them.
    assert_same(copy.deepcopy(model).state_dict(), state)
    model.save_pretrained(tmp_path)
    assert torch.equal(logits(type(model).from_pretrained(tmp_path).eval(), x), before)
    loaded, tokenizer = load(tmp_path, backend="reference")
    assert tokenizer is None and not loaded.training and len(sparse_ffns(loaded)) == len(ffns)
    assert_close(logits(loaded, x), before, rtol=1e-4, atol=1e-4)

    assert twell.densify(model) is model
    assert repr(model) == text and torch.equal(logits(model, x), before)
    assert_same(model.state_dict(), state)
    assert all(module is modules[name] for name, module in model.named_modules())
    for name, tensor in model.state_dict().items():
        assert tensor.stride() == state[name].stride(), name


def test_dropout_between_the_projections_of_t5():
    model, x = family("t5", dropout_rate=0.4).train(), tokens(2, 12)
    sparse, results = sparsify(copy.deepcopy(model), backend="reference"), []
    for one in (model, sparse):
        torch.manual_seed(1)
        loss = one(input_ids=x, labels=x[:, :7].contiguous()).loss
        loss.backward()
        results.append([loss, one.encoder.embed_tokens.weight.grad])
    for result, expected in zip(*results, strict=True):
        assert_close(result, expected)
    ffn = sparse_ffns(sparse)[0]
    assert not ffn.readable and ffn.eval().readable


def test_l1_terms_of_layers_that_see_rows_and_of_two_parts():
    model, x, mask = sparsify(family("opt")).train(), tokens(2, 12), torch.ones(2, 12)
    mask[1, 7:] = 0
    with twell.collect_l1(model) as terms:
        model(input_ids=x, labels=x)
    assert terms.terms[0][1].shape == (24,)
    expected = torch.stack([(l1 * mask.reshape(-1)).sum() / 19 for _, l1 in terms.terms])
    assert_close(terms.by_layer(mask), expected)

    model = sparsify(family("t5")).train()
    with twell.collect_l1(model) as terms, twell.collect_l1(model.encoder) as encoder:
        model(input_ids=x, labels=x[:, :7].contiguous())
    term = terms.by_layer()
    assert_close(term, torch.stack([l1.mean() for _, l1 in terms.terms]))
    with pytest.raises(ValueError, match="of model.encoder and of model.decoder"):
        terms.by_layer(mask)
    encoder = encoder.by_layer(mask)
    assert encoder.shape == (3,) and not torch.allclose(encoder, term[:3])
    term.sum().backward()
    assert all(ffn.up_proj.weight.grad is not None for ffn in sparse_ffns(model))


def test_accelerate_loads_and_offloads(tmp_path):
    """Accelerate finds weights by the names of modules, here with feed-forward weights on disk."""
    model, x = family("opt"), tokens(2, 9)
    expected = logits(model, x)
    model.save_pretrained(tmp_path)
    modules = (name.rpartition(".")[0] for name in model.state_dict())
    device_map = {name: "disk" if name.endswith("fc2") else "cpu" for name in modules}
    with init_empty_weights():
        empty = type(model)(model.config).eval()
    empty.tie_weights()
    sparsify(empty, backend="reference")
    options = {"offload_folder": tmp_path / "offloaded", "strict": True}
    loaded = load_checkpoint_and_dispatch(empty, tmp_path, device_map, **options)
    assert not any(ffn.readable for ffn in sparse_ffns(loaded))
    assert_close(logits(loaded, x), expected, rtol=1e-4, atol=1e-4)
    loaded.save_pretrained(tmp_path / "again")
    assert torch.equal(logits(type(model).from_pretrained(tmp_path / "again").eval(), x), expected)
    assert_close(logits(twell.densify(loaded), x), expected)


def test_copies_threads_and_compiled_code_compute_the_same():
    dense, x = family("opt", num_hidden_layers=2), tokens(2, 9)
    expected, sparse = logits(dense, x), sparsify(copy.deepcopy(dense))
    assert_close(torch.func.functional_call(sparse, dict(dense.named_parameters()), x)[0], expected)
    with ThreadPoolExecutor(8) as pool:
        for result in pool.map(lambda _: logits(sparse, x), range(40)):
            assert_close(result, expected)
    compiled = torch.compile(sparse, fullgraph=True, backend="eager")
    with torch.no_grad():
        assert_close(compiled(x, use_cache=False).logits, expected)
    copied = copy.deepcopy(sparse)
    for parameter in sparse.parameters():
        parameter.data.zero_()
    assert_close(logits(copied, x), expected)
    assert torch.equal(logits(twell.densify(copied), x), expected)


class Other(LlamaMLP):
    def forward(self, x):
        return 2 * super().forward(x)


REFUSED = [  # a family, an attribute of its second layer, its value, and what the error names
    ("bitnet", None, None, "BitNetForCausalLM has no feed-forward layer"),
    ("t5", None, None, "NewGELUActivation"),
    ("opt", "activation_dropout", 0.1, "activation_dropout=0.1"),
    ("llama", "mlp.__class__", Other, "a Other inherits from a known layer"),
    ("llama", "mlp.forward", lambda x: x, "a LlamaMLP has a forward of its own"),
    ("llama", "mlp.act_fn", nn.SiLU(), r"'relu', .* SiLU\(\)"),
]


@pytest.mark.parametrize(("kind", "attribute", "value", "names"), REFUSED)
def test_models_that_compute_something_else_are_refused_by_name(kind, attribute, value, names):
    model = stock(kind) if kind == "llama" else family(kind, feed_forward_proj="gated-gelu")
    if attribute is not None:
        layers = model.get_decoder().layers
        owner, _, name = attribute.rpartition(".")
        setattr(layers[1].get_submodule(owner), name, value)
    with pytest.raises(ValueError, match=names):
        sparsify(model)
    assert not any(isinstance(module, SparseFFN) for module in model.modules())


def test_folders_without_a_model_or_all_its_weights_are_refused(tmp_path):
    model = family("opt")
    model.save_pretrained(tmp_path, state_dict=dict(list(model.state_dict().items())[:-2]))
    with pytest.raises(ValueError, match="missing keys, such as model.decoder"):
        load(tmp_path)
    AutoConfig.for_model("bert").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="BertLMHeadModel"):
        load(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "unheard"}')
    with pytest.raises(ValueError, match=r"config\.json describes no model"):
        load(tmp_path)


PARTS = {"llama": ["gate_proj", "up_proj", "down_proj"], "opt": ["fc1", "fc2"]}


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

    handle = model.model.layers[1].mlp.register_forward_hook(double)
    expected = model(input_ids=x).logits
    for change in (sparsify, densify):
        change(model)
        assert_close(model(input_ids=x).logits, expected, rtol=1e-4, atol=1e-5)
    handle.remove()
    assert not torch.allclose(model(input_ids=x).logits, expected, rtol=1e-3, atol=1e-3)
    assert seen == ["LlamaMLP", "SparseFFN", "LlamaMLP"]


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


@pytest.mark.parametrize("kind", ["opt", "t5"])
def test_a_model_with_similar_tokens_side_by_side_computes_the_same(kind, monkeypatch):
    monkeypatch.setattr(order, "MIN_TOKENS", 24)
    model = twell.sparsify(family(kind), backend="reference")
    inputs = inputs_of(model, tokens(2, 16))
    with torch.no_grad():
        expected = model(**inputs).logits
        ordered = twell.order_tokens(model, clusters=5)
        assert_close(model(**inputs).logits, expected, rtol=1e-4, atol=1e-4)
        ffns = sparse_ffns(model)
        if kind != "t5":  # whose decoder sees fewer tokens, behind the encoder
            places = ordered.places[inputs["input_ids"].reshape(-1)]
            assert torch.equal(ffns[0].token_order.order, places.argsort(stable=True))
            assert all(ffn.token_order.order is ffns[0].token_order.order for ffn in ffns)
        model(**inputs_of(model, tokens(1, 8)))
        assert all(ffn.token_order is None for ffn in ffns)  # too few to gain
        model(**inputs)
    model(**inputs)
    assert all(ffn.token_order is None for ffn in ffns)  # gradients may be computed again
    with torch.no_grad():
        model(**inputs)
        ordered.remove()
        assert all(ffn.token_order is None for ffn in ffns)


def test_models_that_have_no_order():
    with pytest.raises(ValueError, match="offloaded"):
        twell.order_tokens(make().to("meta"))
