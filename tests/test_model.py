import copy
import json
import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, LlamaForCausalLM
from transformers.utils import logging as transformers_logging

from twell.choose import Calibration, Point
from twell.ffn import SparseFFN, backend_status, summarize_activity
from twell.model import (
    SparseLlamaConfig,
    SparseLlamaForCausalLM,
    densify,
    l1_by_layer,
    load,
    silence,
    sparse_ffns,
    sparsify,
)

VOCAB = 90


def make(**changes):
    fields = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 84,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "max_position_embeddings": 32,
        "initializer_range": 0.2,
        "l1_coefficient": 0.03,
        "bos_token_id": 0,
        "eos_token_id": 0,
    }
    torch.manual_seed(torch.seed() % 2**31)
    return SparseLlamaForCausalLM(SparseLlamaConfig(**fields | changes))


def tokens(*shape):
    return torch.randint(1, VOCAB, shape)


def gradients(model):
    return torch.cat([p.grad.reshape(-1) for p in model.parameters()])


def test_logits_and_checkpoints_are_those_of_transformers_llama(tmp_path):
    model = make().eval()
    model.save_pretrained(tmp_path)
    stock = LlamaForCausalLM.from_pretrained(tmp_path).eval()
    assert stock.config.hidden_act == "relu"
    x = tokens(3, 20)
    assert torch.equal(model(input_ids=x).logits, stock(input_ids=x).logits)
    assert {name for name, _ in model.named_parameters()} == {name for name, _ in stock.named_parameters()}
    again = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert type(again) is SparseLlamaForCausalLM
    assert AutoConfig.from_pretrained(tmp_path).to_dict() == again.config.to_dict()
    for (name, a), (_, b) in zip(model.state_dict().items(), again.state_dict().items(), strict=True):
        assert torch.equal(a, b), name


@pytest.mark.parametrize("changes", [{"gated_mlp": False}, {"hidden_act": "silu"}, {"mlp_bias": True}])
def test_other_layers_survive_saving(tmp_path, changes):
    model = make(**changes).eval()
    model.save_pretrained(tmp_path)
    again = SparseLlamaForCausalLM.from_pretrained(tmp_path).eval()
    x = tokens(2, 9)
    assert torch.equal(model(input_ids=x).logits, again(input_ids=x).logits)
    assert again.ffns[0].gated == model.config.gated_mlp


def test_new_weights_have_the_configured_spread():
    for name, parameter in make(initializer_range=0.02, hidden_size=128, intermediate_size=512).named_parameters():
        if parameter.dim() == 2:
            assert 0.018 < parameter.std().item() < 0.022, name


def test_reference_backend_gives_the_same_text_and_gradients():
    model = make().double()
    x = tokens(2, 12)
    model(input_ids=x, labels=x).loss.backward()
    dense = gradients(model)
    model.zero_grad()
    model.set_ffn_backend("reference")
    model(input_ids=x, labels=x).loss.backward()
    torch.testing.assert_close(gradients(model), dense, rtol=1e-8, atol=1e-10)
    model.eval()
    generated = model.generate(x[:, :4], max_new_tokens=12, do_sample=False)
    model.set_ffn_backend("dense")
    assert torch.equal(generated, model.generate(x[:, :4], max_new_tokens=12, do_sample=False))
    assert generated.shape[1] > 4


def test_loss_is_cross_entropy_plus_l1_in_training_alone():
    model = make()
    x = tokens(4, 16)
    hidden = []
    hooks = [ffn.register_forward_hook(lambda f, i, _: hidden.append(f.activations(i[0])[1])) for ffn in model.ffns]
    output = model(input_ids=x, labels=x)
    [hook.remove() for hook in hooks]
    l1 = torch.stack([h.abs().sum(-1) for h in hidden]).mean()
    torch.testing.assert_close(output.l1, l1)
    expected = torch.nn.functional.cross_entropy(output.logits[:, :-1].reshape(-1, VOCAB), x[:, 1:].reshape(-1))
    torch.testing.assert_close(output.cross_entropy, expected)
    torch.testing.assert_close(output.loss, expected + 0.03 * l1)
    model.eval()
    output = model(input_ids=x, labels=x)
    torch.testing.assert_close(output.loss, expected)
    torch.testing.assert_close(output.l1, l1)
    without = model(input_ids=x)
    assert without.loss is None and without.cross_entropy is None and without.l1 is None


def test_accumulation_and_padding_give_the_value_of_one_big_batch():
    model = make().double()
    lengths = [12, 5, 9, 1, 12, 7]
    x = tokens(6, 12)
    mask = (torch.arange(12) < torch.tensor(lengths)[:, None]).long()
    labels = x.masked_fill(mask == 0, -100)
    whole = model(input_ids=x, attention_mask=mask, labels=labels)
    whole.loss.backward()
    expected = gradients(model)
    model.zero_grad()
    totals = {
        "num_items_in_batch": (labels[:, 1:] != -100).sum(),
        "num_tokens_in_batch": mask.sum(),
    }
    loss = l1 = 0.0
    for rows, width in ((slice(0, 1), 12), (slice(1, 4), 9), (slice(4, 6), 12)):
        part = model(
            input_ids=x[rows, :width], attention_mask=mask[rows, :width], labels=labels[rows, :width], **totals
        )
        part.loss.backward()
        loss, l1 = loss + part.loss.detach(), l1 + part.l1.detach()
    torch.testing.assert_close(loss, whole.loss.detach(), rtol=1e-6, atol=0)  # cross-entropy is summed in fp32
    torch.testing.assert_close(l1, whole.l1.detach())
    torch.testing.assert_close(gradients(model), expected, rtol=1e-9, atol=1e-12)


def test_padding_changes_nothing():
    model = make().double()
    x = tokens(2, 8)
    padded = torch.cat([x, tokens(2, 5)], 1)
    mask = torch.cat([torch.ones(2, 8), torch.zeros(2, 5)], 1).long()
    labels = padded.masked_fill(mask == 0, -100)
    plain = model(input_ids=x, labels=x)
    stats = [summarize_activity(*ffn.stats.take()) for ffn in model.ffns]
    other = model(input_ids=padded, attention_mask=mask, labels=labels)
    torch.testing.assert_close(other.loss, plain.loss, rtol=1e-6, atol=0)  # cross-entropy is summed in fp32
    torch.testing.assert_close(other.l1, plain.l1)
    assert [summarize_activity(*ffn.stats.take()) for ffn in model.ffns] == stats


def test_items_alone_weight_the_l1_term_by_share():
    model = make().double()
    x = tokens(6, 10)
    whole = model(input_ids=x, labels=x).loss
    parts = [model(input_ids=part, labels=part, num_items_in_batch=54).loss for part in (x[:2], x[2:])]
    torch.testing.assert_close(sum(parts), whole, rtol=1e-6, atol=0)  # cross-entropy is summed in fp32


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing_repeats_but_does_not_recount(reentrant):
    model = make().double()
    x = tokens(3, 10)
    model(input_ids=x, labels=x).loss.backward()
    expected, stats = gradients(model), [ffn.stats.take() for ffn in model.ffns]
    model.zero_grad()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    if reentrant:  # would silently train without the L1 term
        with pytest.raises(RuntimeError, match="use_reentrant=True drops it"):
            model(input_ids=x, labels=x)
        return
    model(input_ids=x, labels=x).loss.backward()
    torch.testing.assert_close(gradients(model), expected, rtol=1e-10, atol=1e-14)
    for before, after in zip(stats, (ffn.stats.take() for ffn in model.ffns), strict=True):
        assert torch.equal(before[0], after[0]) and torch.equal(before[1], after[1])


def test_silence():
    model = make().eval()
    x = tokens(2, 8)
    plain = model(input_ids=x).logits
    with silence(model, [1]):
        one = model(input_ids=x).logits
    with silence(model):
        none = model(input_ids=x).logits
    without = copy.deepcopy(model)
    with torch.no_grad():
        for ffn in without.ffns:
            ffn.down_proj.weight.zero_()
    torch.testing.assert_close(none, without(input_ids=x).logits)
    assert not torch.allclose(one, plain) and not torch.allclose(one, none)
    assert torch.equal(model(input_ids=x).logits, plain)
    with (
        pytest.raises(IndexError, match="layer 3 does not exist: the model has SparseFFN layers 0 to 2"),
        silence(model, [3]),
    ):
        pass


@pytest.mark.parametrize("backend", ["dense", "reference"])
@pytest.mark.parametrize("gated", [True, False])
def test_silence_of_single_neurons(backend, gated):
    model = make(gated_mlp=gated, ffn_backend=backend).eval()
    x = tokens(2, 8)
    plain = model(input_ids=x).logits
    without = copy.deepcopy(model)
    with torch.no_grad():
        without.ffns[1].down_proj.weight[:, [3, 80]] = 0
        without.ffns[2].down_proj.weight[:, :40] = 0
    expected = without(input_ids=x).logits
    with silence(model, 1, [3]), silence(model, np.int64(2), range(40)), silence(model, 1, np.int64(80)):
        torch.testing.assert_close(model(input_ids=x).logits, expected)
        with pytest.raises(KeyError), silence(model, 0, [1]):
            raise KeyError
        with silence(model, 1):
            assert not torch.allclose(model(input_ids=x).logits, expected)
        torch.testing.assert_close(model(input_ids=x).logits, expected)  # what was silent before still is
    assert all(ffn.muted is None and not ffn.silenced for ffn in model.ffns)
    assert torch.equal(model(input_ids=x).logits, plain) and not torch.allclose(plain, expected)
    for error, arguments, words in [
        (IndexError, (1, [84]), "neuron 84 does not exist: the layer has neurons 0 to 83"),
        (IndexError, (1, [0, -1]), "neuron -1 does not exist"),
        (IndexError, (3, [0]), "layer 3 does not exist"),
        (ValueError, ([1], [0]), r"neurons belong to one layer, .*layers is \[1\]"),
        (ValueError, (None, [0]), "neurons belong to one layer"),
    ]:
        with pytest.raises(error, match=words), silence(model, *arguments):
            pass
        assert all(ffn.muted is None for ffn in model.ffns)


def test_negative_coefficient_is_refused():
    with pytest.raises(ValueError, match=r"l1_coefficient is -1\.0"):
        make(l1_coefficient=-1.0)


# --- existing models and checkpoints


def stock(kind, act="relu", **changes):
    sizes = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 84,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "initializer_range": 0.2,
    }
    config = AutoConfig.for_model(kind, hidden_act=act, **sizes | changes)
    return AutoModelForCausalLM.from_config(config).eval()


@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen2", "qwen3"])
@pytest.mark.parametrize("backend", ["dense", "reference"])
def test_sparsify_and_back(kind, backend, tmp_path):
    model = stock(kind)
    x = tokens(2, 12)
    names = [name for name, _ in model.named_parameters()]
    before, mlps = model(input_ids=x).logits, [layer.mlp for layer in model.model.layers]
    assert sparsify(model, backend=backend) is model
    assert all(isinstance(layer.mlp, SparseFFN) for layer in model.model.layers)
    torch.testing.assert_close(model(input_ids=x).logits, before, rtol=1e-4, atol=1e-5)
    assert [name for name, _ in model.named_parameters()] == names
    model.save_pretrained(tmp_path)
    assert torch.equal(AutoModelForCausalLM.from_pretrained(tmp_path)(input_ids=x).logits, before)
    model.train()
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight.mul_(2)  # as training would
    changed = model.eval()(input_ids=x).logits
    assert densify(model) is model
    assert [layer.mlp for layer in model.model.layers] == mlps
    torch.testing.assert_close(model(input_ids=x).logits, changed, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(changed, before)


def test_a_sparsified_model_trains_with_the_l1_term():
    model = sparsify(stock("qwen2")).train()
    x = tokens(2, 12)
    with pytest.raises(RuntimeError, match="run the model in training mode first"):
        l1_by_layer(model)
    loss = model(input_ids=x, labels=x).loss
    mask = torch.ones(2, 12)
    mask[1, 7:] = 0
    term = l1_by_layer(model, mask)
    assert term.shape == (3,)
    expected = [(ffn.l1 * mask).sum() / 19 for ffn in sparse_ffns(model)]
    torch.testing.assert_close(term, torch.stack(expected))
    (loss + 0.1 * term.mean()).backward()
    assert all(p.grad is not None for p in model.parameters())


def test_silu_is_refused_unless_told():
    model = stock("llama", "silu")
    x = tokens(2, 12)
    before = model(input_ids=x).logits
    with pytest.raises(ValueError, match="activation is 'silu', which makes nothing zero; relufy=True"):
        sparsify(model)
    assert torch.equal(model(input_ids=x).logits, before)
    with pytest.warns(UserWarning, match="'silu' became 'relu': the model needs training"):
        sparsify(model, relufy=True)
    relu = model(input_ids=x).logits
    assert not torch.allclose(relu, before)
    torch.testing.assert_close(densify(model)(input_ids=x).logits, relu)
    assert model.config.hidden_act == "relu"
    with pytest.raises(ValueError, match="was not made by twell.sparsify"):
        densify(model)
    with pytest.raises(ValueError, match="type 'gpt2' cannot be made sparse; supported are llama"):
        sparsify(stock("gpt2", activation_function="relu", n_inner=84, hidden_size=32))
    with pytest.raises(ValueError, match="has no SparseFFN layer"):
        sparse_ffns(model)


def published(folder, layout, gated=True, kind="llama_sparse_relu", tied=True, shards=1, **changes):
    """Write a checkpoint as the paper's authors publish theirs; returns the model that it holds."""
    model = make(
        gated_mlp=gated,
        tie_word_embeddings=tied,
        l1_coefficient=2e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 1e5},
    )
    frequencies = model.model.rotary_emb.inv_freq.clone()  # rotary tables stay fp32, as transformers loads a model
    tensors = {name: t.detach().clone() for name, t in model.bfloat16().state_dict().items()}
    model.model.rotary_emb.inv_freq = frequencies
    if tied:
        del tensors["lm_head.weight"]
    if layout == "own":
        for name in [name for name in tensors if ".mlp." in name]:
            part = name.split(".")[-2].removesuffix("_proj")
            turn = part == "gate" or part == "down" or not gated
            weight = tensors.pop(name)
            tensors[name.replace(f"{part}_proj.weight", f"{part}_weight")] = weight.t().contiguous() if turn else weight
        tensors["model.layers.0.mlp.tracker.count"] = torch.ones(3)
        tensors["metrics_accumulator.steps"] = torch.ones(1)
    config = {
        "model_type": kind,
        "architectures": ["LlamaSparse"],
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 4 * 32,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "max_position_embeddings": 32,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 100000,
        "tie_word_embeddings": tied,
        "torch_dtype": "bfloat16",
        "sparsity_gated_mlp": gated,
        "sparsity_l1_coeff": 2e-5,
        "sparsity_new_intermediate_size": 84,
        "sparsity_something_else": [1],
    }
    (folder / "config.json").write_text(json.dumps(config | changes))
    names = sorted(tensors)
    parts = [{name: tensors[name] for name in names[n::shards]} for n in range(shards)]
    if shards == 1:
        save_file(parts[0], folder / "model.safetensors")
    else:
        files = [f"model-{n}.safetensors" for n in range(shards)]
        for file, part in zip(files, parts, strict=True):
            save_file(part, folder / file)
        weight_map = {name: file for file, part in zip(files, parts, strict=True) for name in part}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return model.eval()


@pytest.mark.parametrize("layout", ["llama", "own"])
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("kind", ["llama", "llama_sparse_relu"])
def test_published_checkpoints_load_bit_for_bit(tmp_path, layout, gated, tied, shards, kind):
    expected = published(tmp_path, layout, gated, kind, tied, shards)
    model, tokenizer = load(tmp_path)
    assert tokenizer is None and not model.training
    for (name, a), (_, b) in zip(expected.state_dict().items(), model.state_dict().items(), strict=True):
        assert a.dtype == b.dtype == torch.bfloat16 and torch.equal(a, b), name
    assert model.config.rope_parameters["rope_theta"] == 100000
    assert model.config.l1_coefficient == 2e-5 and model.config.hidden_act == "relu"
    x = tokens(1, 9)
    assert torch.equal(model(input_ids=x).logits, expected(input_ids=x).logits)


def test_loading_draws_no_bar_and_leaves_it_to_others_as_it_was(tmp_path, capfd, monkeypatch):
    monkeypatch.delenv("TQDM_DISABLE", raising=False)
    make().save_pretrained(tmp_path)
    capfd.readouterr()
    before = transformers_logging.is_progress_bar_enabled()
    try:
        for enable in (transformers_logging.enable_progress_bar, transformers_logging.disable_progress_bar):
            enable()
            shown = transformers_logging.is_progress_bar_enabled()
            load(tmp_path)
            assert transformers_logging.is_progress_bar_enabled() == shown
            assert capfd.readouterr() == ("", "")
    finally:
        (transformers_logging.enable_progress_bar if before else transformers_logging.disable_progress_bar)()


def test_llama_with_relu_loads_and_with_silu_does_not(tmp_path):
    expected = stock("llama", rms_norm_eps=3e-6)
    expected.save_pretrained(tmp_path)
    x = tokens(2, 8)
    model = load(tmp_path, backend="reference", dtype=torch.float64)[0]
    torch.testing.assert_close(model(input_ids=x).logits, expected.double()(input_ids=x).logits)
    stock("llama", "silu").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"activation 'silu'; load it with transformers and use twell\.sparsify"):
        load(tmp_path)


def test_own_checkpoints_keep_everything(tmp_path):
    model = make(l1_coefficient=[0.1, 0.0, 0.3], gated_mlp=False)
    model.save_pretrained(tmp_path)
    again = load(tmp_path)[0]
    assert again.config.l1_coefficients == [0.1, 0.0, 0.3] and not again.config.gated_mlp


def change_tensors(folder, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            lambda t: t.pop("model.layers.1.mlp.up_weight"),
            r"model\.layers\.1\.mlp\.up_proj\.weight is missing, expected with shape \(84, 32\)",
        ),
        (
            lambda t: t.update({"model.norm.weight": torch.ones(33)}),
            r"model\.norm\.weight has shape \(33,\); expected \(32,\)",
        ),
        (
            lambda t: t.update({"model.layers.0.mlp.gate_weight": torch.ones(84, 32)}),
            r"gate_proj\.weight has shape \(32, 84\); expected \(84, 32\)",
        ),
        (lambda t: t.update({"model.extra": torch.ones(1)}), r"the tensor model\.extra is not part of the model"),
        (
            lambda t: t.update({"lm_head.weight": torch.ones(VOCAB, 32)}),
            r"lm_head\.weight differs from model\.embed_tokens\.weight",
        ),
    ],
)
def test_wrong_tensors_are_named(tmp_path, change, words):
    published(tmp_path, "own")
    change_tensors(tmp_path, change)
    with pytest.raises(ValueError, match=words):
        load(tmp_path)


def test_per_layer_coefficients_and_scale_weight_the_l1_term():
    model = make(l1_coefficient=[0.1, 0.0, 0.3])
    x = tokens(2, 10)
    output = model(input_ids=x, labels=x, l1_scale=0.5)
    layers = l1_by_layer(model)
    torch.testing.assert_close(output.loss, output.cross_entropy + 0.5 * (0.1 * layers[0] + 0.3 * layers[2]) / 3)
    torch.testing.assert_close(output.l1, layers.mean())
    with pytest.raises(ValueError, match="l1_coefficient has 2 entries; the model has 3 layers"):
        make(l1_coefficient=[0.1, 0.2])


def rounding(logits, exact):
    return (logits - exact).square().mean().sqrt()


@pytest.mark.skipif(backend_status()["triton"] is not None, reason=str(backend_status()["triton"]))
def test_triton_backend_is_as_near_to_the_exact_model_as_dense(tmp_path):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = make(hidden_size=64).half().eval().to(device)
    model.save_pretrained(tmp_path)
    exact = copy.deepcopy(model).double()
    sparse = load(tmp_path, backend="triton")[0].to(device)
    assert all(ffn.down_proj.weight.stride() == (1, 64) for ffn in sparse.ffns)
    x = tokens(4, 16).to(device)
    with torch.no_grad():
        right = exact(input_ids=x).logits
        error = rounding(model(input_ids=x).logits, right)
        assert rounding(sparse(input_ids=x).logits, right) <= 1.5 * error <= 0.02
        # Both round, so where two tokens are equally likely they may write either: never one that is less likely.
        written = sparse.generate(x[:1, :5], max_new_tokens=4, do_sample=False)
        right = exact(input_ids=written[:, :-1]).logits[:, 4:]
        chosen = right.gather(-1, written[:, 5:, None])[..., 0]
        assert written.shape[1] > 5 and (right.amax(-1) - chosen <= 10 * error).all()
    sparse.save_pretrained(tmp_path / "again")
    again = SparseLlamaForCausalLM.from_pretrained(tmp_path / "again")  # its configuration names the backend
    assert again.config.ffn_backend == "triton" and again.ffns[0].down_proj.weight.stride() == (1, 64)
    for (name, a), (_, b) in zip(again.state_dict().items(), model.state_dict().items(), strict=True):
        assert torch.equal(a, b.cpu()), name


def calibration(**changes):
    times = tuple(Point(m, 84, 84, {"dense": 1.0, "decode": 0.5, "union": 0.6}) for m in (1, 1000))
    about = {"hidden_size": 32, "intermediate_size": 84, "gated": True, "expected": (2.0, 30.0)}
    about |= {"device": "a device", "dtype": "bfloat16", "versions": "", "date": "2026-01-01"}
    return Calibration(times=times, **about | changes)


def test_a_calibration_beside_the_weights_is_read_for_auto(tmp_path, monkeypatch):
    make().save_pretrained(tmp_path / "model")
    dense = SparseFFN(32, 84).plan
    assert all(ffn.plan == dense for ffn in load(tmp_path, backend="auto")[0].ffns)
    calibration().save(tmp_path / "model" / "calibration.json")
    model = load(tmp_path, backend="auto")[0]
    assert model.config.ffn_backend == "auto"
    for ffn in model.ffns:
        assert ffn.backend == "auto" and ffn.calibration.times == calibration().times
        assert ffn.plan == ((2**20, "decode"),) != dense
    assert all(ffn.calibration is None for ffn in load(tmp_path)[0].ffns)
    x = tokens(2, 9)
    with torch.no_grad():
        torch.testing.assert_close(model(input_ids=x).logits, load(tmp_path)[0](input_ids=x).logits)

    model.save_pretrained(tmp_path / "again")  # the configuration names the backend
    calibration().save(tmp_path / "again" / "calibration.json")
    assert load(tmp_path / "again")[0].ffns[0].calibration is not None

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "another")
    with pytest.warns(UserWarning, match="has times of 'a device', and this is 'another'"):
        load(tmp_path, backend="auto")
    monkeypatch.undo()

    calibration(gated=False).save(tmp_path / "model" / "calibration.json")
    with pytest.raises(ValueError, match=r"gated=False; this layer has .*gated=True"):
        load(tmp_path, backend="auto")
    (tmp_path / "model" / "calibration.json").write_text("{")
    with pytest.raises(ValueError, match=r"calibration\.json is no calibration: it is not JSON"):
        load(tmp_path, backend="auto")
    load(tmp_path)


def test_a_calibration_can_be_given():
    model = make()
    given = calibration()
    model.set_ffn_backend("auto", given)
    assert all(ffn.calibration is given for ffn in model.ffns)
    model.set_ffn_backend("dense")
    model.set_ffn_backend("auto")
    assert all(ffn.calibration is given for ffn in model.ffns)


@pytest.mark.skipif(backend_status()["triton"] is not None, reason=str(backend_status()["triton"]))
def test_auto_computes_what_dense_does_and_trains():
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = make(hidden_size=64).half().eval().to(device)
    x = tokens(4, 7).to(device)
    with torch.no_grad():
        exact = copy.deepcopy(model).double()(input_ids=x).logits
        error = rounding(model(input_ids=x).logits, exact)
        model.set_ffn_backend("auto", calibration(hidden_size=64))
        assert rounding(model(input_ids=x).logits, exact) <= 1.5 * error <= 0.02
        cache = model(input_ids=x[:, :5]).past_key_values  # a prompt, then token by token
        for n in (5, 6):
            step = model(input_ids=x[:, n : n + 1], past_key_values=cache).logits
            assert rounding(step[:, 0], exact[:, n]) <= 3 * error
    model.train()(input_ids=x, labels=x).loss.backward()
    assert all(p.grad is not None for p in model.parameters())


# --- damaged files ------------------------------------------------------------------------------------


def edit_config(**fields):
    def edit(folder):
        path = folder / "config.json"
        changed = json.loads(path.read_text()) | fields
        path.write_text(json.dumps({name: value for name, value in changed.items() if value is not ...}))

    return edit


def write(name, text):
    return lambda folder: (folder / name).write_text(text)


def edit_tensors(edit):
    def rewrite(folder):
        tensors = load_file(folder / "model.safetensors")
        edit(tensors)
        save_file(tensors, folder / "model.safetensors")

    return rewrite


def in_two_layouts(tensors):
    tensors["model.layers.0.mlp.gate_weight"] = tensors["model.layers.0.mlp.gate_proj.weight"].t().contiguous()


def not_finite(value):
    def edit(tensors):
        tensors["model.norm.weight"][3] = value

    return edit


INDEX = "model.safetensors.index.json"
DAMAGE = {
    "a list for a configuration": (write("config.json", "[1]"), r"config\.json holds a list, expected a JSON object"),
    "a size missing": (edit_config(hidden_size=...), r"config\.json has no hidden_size; put back the file"),
    "a word for a size": (edit_config(hidden_size="wide"), r"config\.json describes no model: .*'hidden_size'.*wide"),
    "no heads": (edit_config(num_attention_heads=0), r"config\.json describes no model: ZeroDivisionError"),
    "an unknown activation": (edit_config(hidden_act="gelu2"), r"config\.json describes no model: KeyError: 'gelu2'"),
    "an unknown rope type": (
        edit_config(rope_parameters={"rope_type": "spiral", "rope_theta": 1e4}),
        r"config\.json describes no model: rope_type is 'spiral'; use one of default, .*linear",
    ),
    "a negative rope_theta": (
        edit_config(rope_parameters={"rope_type": "default", "rope_theta": -1.0}),
        r"config\.json describes no model: rope_theta is -1\.0; .* a finite number above 0",
    ),
    "an index cut short": (write(INDEX, "{"), r"index\.json is not JSON: .*; put back the file"),
    "an index that is a list": (write(INDEX, "[]"), r"index\.json holds a list, expected a JSON object"),
    "an index without files": (write(INDEX, '{"weight_map": {"a": 1}}'), r"index\.json has no weight_map with a file"),
    "a tokenizer cut short": (write("tokenizer.json", '{"version'), r"tokenizer\.json is not JSON: .*; put back"),
    "an empty tokenizer": (write("tokenizer.json", "{}"), r"tokenizer\.json and tokenizer_config\.json make no tok"),
    "a tokenizer's settings cut short": (write("tokenizer_config.json", "{"), r"tokenizer_config\.json is not JSON"),
    "a weight in two layouts": (
        edit_tensors(in_two_layouts),
        r"safetensors: \S*gate_proj\.weight and \S*gate_weight would be one weight twice; take one of them out",
    ),
    "a weight that is NaN": (
        edit_tensors(not_finite(float("nan"))),
        r"model\.safetensors: the tensor model\.norm\.weight has NaN or infinite values: put back a whole copy",
    ),
    "a weight that is infinite": (edit_tensors(not_finite(float("inf"))), r"model\.norm\.weight has NaN or infinite"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_files_are_named(tiny_run, tmp_path, damage):
    folder = shutil.copytree(tiny_run / "model", tmp_path / "model")
    edit, words = DAMAGE[damage]
    edit(folder)
    with pytest.raises(ValueError, match=words):
        load(folder)


def test_a_weight_in_two_files_is_refused(tiny_run, tmp_path):
    folder = shutil.copytree(tiny_run / "model", tmp_path / "model")
    shutil.copy(folder / "model.safetensors", folder / "other.safetensors")
    write(INDEX, json.dumps({"weight_map": {"a": "model.safetensors", "b": "other.safetensors"}}))(folder)
    with pytest.raises(ValueError, match=r"other\.safetensors: lm_head\.weight|other\.safetensors: \S+ would be one"):
        load(folder)
