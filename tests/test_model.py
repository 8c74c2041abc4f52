import copy
import json
import re
import shutil
import warnings

import numpy as np
import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    DynamicCache,
    LlamaForCausalLM,
    StaticCache,
)
from transformers.utils import logging as transformers_logging

from twell import model as model_module
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
from twell.sparse.calibration import Calibration, Point
from twell.sparse.layer import SparseFFN, backend_status, summarize_activity
from twell.sparse.training import SparseTraining

VOCAB = 90
triton_here = pytest.mark.skipif(
    backend_status()["triton"] is not None, reason=str(backend_status()["triton"])
)


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
    assert {name for name, _ in model.named_parameters()} == {
        name for name, _ in stock.named_parameters()
    }
    again = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert type(again) is SparseLlamaForCausalLM
    assert AutoConfig.from_pretrained(tmp_path).to_dict() == again.config.to_dict()
    for (name, a), (_, b) in zip(
        model.state_dict().items(), again.state_dict().items(), strict=True
    ):
        assert torch.equal(a, b), name


@pytest.mark.parametrize(
    "changes", [{"gated_mlp": False}, {"hidden_act": "silu"}, {"mlp_bias": True}]
)
def test_other_layers_survive_saving(tmp_path, changes):
    model = make(**changes).eval()
    model.save_pretrained(tmp_path)
    again = SparseLlamaForCausalLM.from_pretrained(tmp_path).eval()
    x = tokens(2, 9)
    assert torch.equal(model(input_ids=x).logits, again(input_ids=x).logits)
    assert again.ffns[0].gated == model.config.gated_mlp


def test_new_weights_have_the_configured_spread():
    for name, parameter in make(
        initializer_range=0.02, hidden_size=128, intermediate_size=512
    ).named_parameters():
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
    hooks = [
        ffn.register_forward_hook(lambda f, i, _: hidden.append(f.activations(i[0])[1]))
        for ffn in model.ffns
    ]
    output = model(input_ids=x, labels=x)
    [hook.remove() for hook in hooks]
    l1 = torch.stack([h.abs().sum(-1) for h in hidden]).mean()
    torch.testing.assert_close(output.l1, l1)
    expected = torch.nn.functional.cross_entropy(
        output.logits[:, :-1].reshape(-1, VOCAB), x[:, 1:].reshape(-1)
    )
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
            input_ids=x[rows, :width],
            attention_mask=mask[rows, :width],
            labels=labels[rows, :width],
            **totals,
        )
        part.loss.backward()
        loss, l1 = loss + part.loss.detach(), l1 + part.l1.detach()
    torch.testing.assert_close(
        loss, whole.loss.detach(), rtol=1e-6, atol=0
    )  # cross-entropy is summed in fp32
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
    torch.testing.assert_close(
        other.loss, plain.loss, rtol=1e-6, atol=0
    )  # cross-entropy is summed in fp32
    torch.testing.assert_close(other.l1, plain.l1)
    assert [summarize_activity(*ffn.stats.take()) for ffn in model.ffns] == stats


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize(
    "totals",
    [
        {},
        {"num_items_in_batch": 0},
        {"num_items_in_batch": torch.tensor(0), "num_tokens_in_batch": torch.tensor(0)},
        {"num_items_in_batch": 0, "num_tokens_in_batch": 0},
        {"num_items_in_batch": 30},
        {"num_items_in_batch": torch.tensor(30), "num_tokens_in_batch": 40},
    ],
)
@pytest.mark.parametrize("content", ["ids", "large", "nan", "inf"])
def test_a_batch_of_padding_alone_has_loss_and_gradients_of_zero(
    training, attention, totals, content
):
    model = make(attn_implementation=attention).train(training)
    x, mask = tokens(2, 8), torch.zeros(2, 8, dtype=torch.long)
    inputs = {"input_ids": x}
    if content != "ids":
        embeds = model.get_input_embeddings()(x).detach()
        embeds[1, 3:] = {"large": 1e30, "nan": torch.nan, "inf": -torch.inf}[content]
        inputs = {"inputs_embeds": embeds}
    output = model(**inputs, attention_mask=mask, labels=torch.full_like(x, -100), **totals)
    assert output.loss == output.cross_entropy == output.l1 == 0
    output.loss.backward()
    reached = [p.grad for p in model.parameters() if p.grad is not None]
    assert reached and not any(gradient.any() for gradient in reached)  # NaN counts as true
    if training:
        assert not l1_by_layer(model, mask).any()


@pytest.mark.parametrize("kind", ["labels", "mask", "one token"])
def test_each_part_of_the_loss_is_zero_where_only_it_has_nothing_to_average(kind):
    model = make().double()
    x = tokens(2, 1 if kind == "one token" else 8)
    mask = torch.full_like(x, kind != "mask")
    labels = torch.full_like(x, -100) if kind == "labels" else x
    output = model(input_ids=x, attention_mask=mask, labels=labels)
    assert (output.cross_entropy == 0) == (kind != "mask") and (output.l1 == 0) == (kind == "mask")
    torch.testing.assert_close(output.loss, output.cross_entropy + 0.03 * output.l1)
    output.loss.backward()
    assert torch.isfinite(gradients(model)).all() and gradients(model).any()


def test_shifted_labels_count_where_they_are_given():
    model = make().double()
    x = tokens(2, 8)
    shifted = torch.nn.functional.pad(x[:, 1:], (0, 1), value=-100)
    given = {"labels": torch.full_like(x, -100), "shift_labels": shifted}
    plain = model(input_ids=x, labels=x)
    torch.testing.assert_close(model(input_ids=x, **given).loss, plain.loss)
    torch.testing.assert_close(model(input_ids=x, **given, num_items_in_batch=14).loss, plain.loss)


def test_what_stands_at_padding_positions_changes_no_gradient():
    model = make().double()
    x = tokens(2, 8)
    mask = torch.ones(2, 8).index_fill(1, torch.tensor([0, 1]), 0)
    labels, found = x.clone(), []
    labels[:, :3] = -100  # the first token after padding is predicted from padding
    for content in (0.0, 7.0, torch.nan, torch.inf):
        embeds = torch.where(
            mask[..., None] == 0, content, model.get_input_embeddings()(x).detach()
        )
        model.zero_grad()
        output = model(inputs_embeds=embeds, attention_mask=mask, labels=labels)
        output.loss.backward()
        reached = [p.grad.reshape(-1) for p in model.parameters() if p.grad is not None]
        found.append(torch.cat([output.loss.detach().reshape(1), *reached]))
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], rtol=1e-9, atol=1e-12)


def test_a_micro_batch_of_padding_adds_nothing_to_a_step():
    model = make().double()
    x = tokens(4, 9)
    mask = torch.ones_like(x)
    mask[2:] = 0
    labels = x.masked_fill(mask == 0, -100)
    whole = model(input_ids=x, attention_mask=mask, labels=labels)
    whole.loss.backward()
    expected = gradients(model)
    for tokens_too in (True, False):
        model.zero_grad()
        totals = {"num_items_in_batch": 16} | (
            {"num_tokens_in_batch": torch.tensor(18)} if tokens_too else {}
        )
        loss = 0.0
        for rows in (slice(0, 2), slice(2, 4)):
            part = model(
                input_ids=x[rows], attention_mask=mask[rows], labels=labels[rows], **totals
            )
            part.loss.backward()
            loss = loss + part.loss.detach()
        torch.testing.assert_close(
            loss, whole.loss.detach(), rtol=1e-6, atol=0
        )  # cross-entropy is summed in fp32
        torch.testing.assert_close(gradients(model), expected, rtol=1e-9, atol=1e-12)


def test_a_sparsified_model_has_an_l1_term_of_zero_for_padding_alone():
    model = sparsify(stock("qwen2")).train()
    x = tokens(2, 12)
    model(input_ids=x)
    for num_tokens in (None, 0, torch.tensor(0), 24):
        model.zero_grad()
        term = l1_by_layer(model, torch.zeros(2, 12), num_tokens)
        assert term.shape == (3,) and not term.any()
        term.mean().backward(retain_graph=True)
        reached = [p.grad for p in model.parameters() if p.grad is not None]
        assert reached and not any(gradient.any() for gradient in reached)


def attends(mask, causal=True):
    """The 4-D mask [B, 1, S, S] of a 2-D one: True where a query may attend to a key."""
    size = mask.shape[1]
    square = (
        torch.ones(size, size, dtype=torch.bool).tril()
        if causal
        else torch.ones(size, size, dtype=torch.bool)
    )
    return square & (mask != 0)[:, None, None, :] & (mask != 0)[:, None, :, None]


def additive(allowed, masked):
    return torch.zeros(allowed.shape, dtype=torch.float64).masked_fill(~allowed, masked)


MASKS = {
    "bool": attends,
    "int": lambda mask: attends(mask).long(),
    "heads": lambda mask: attends(mask).expand(-1, 4, -1, -1),
    "min": lambda mask: additive(attends(mask), torch.finfo(torch.float64).min),
    "inf": lambda mask: additive(attends(mask), -torch.inf),
    "-1e4": lambda mask: additive(attends(mask), -1e4),
    "biased": lambda mask: additive(attends(mask), -1e9) - 3.0 * torch.rand(4, 1, 1),
    "one row": lambda mask: (mask != 0)[:, None, None, :],
    "2-D": lambda mask: mask,
    "2-D bool": lambda mask: mask.bool(),
}


def counted(model):
    return [int(ffn.stats.take()[1].sum()) for ffn in model.ffns]


@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("side", ["left", "right", "all", "none"])
@pytest.mark.parametrize("training", [True, False])
def test_every_kind_of_mask_says_what_is_padding(kind, side, training, monkeypatch):
    model = make().double().train(training)
    x = tokens(3, 8)
    mask = torch.arange(8) >= torch.tensor([[3], [0], [5]])
    mask = {"left": mask, "right": mask.flip(1), "all": mask & False, "none": mask | True}[
        side
    ].long()
    # What the layers see is of no interest here, and attention does not take integers.
    monkeypatch.setattr(
        LlamaForCausalLM,
        "forward",
        lambda self, attention_mask, forward=LlamaForCausalLM.forward, **kwargs: forward(
            self, **kwargs
        ),
    )
    model(input_ids=x, labels=x)
    expected = torch.stack([ffn.l1 for ffn in model.ffns])[:, mask != 0].sum(1) / max(
        int(mask.sum()), 1
    )
    counted(model)
    model.recording = not training
    output = model(input_ids=x, attention_mask=MASKS[kind](mask), labels=x)
    assert counted(model) == [int(mask.sum())] * 3
    torch.testing.assert_close(output.l1, expected.mean())


@pytest.mark.parametrize("kind", ["bool", "heads", "min", "inf", "-1e4"])
def test_a_4d_mask_gives_the_loss_of_the_2d_one(kind):
    model = make().double()
    x = tokens(2, 8)
    mask = (torch.arange(8) < torch.tensor([[5], [8]])).long()
    labels = x.masked_fill(mask == 0, -100)
    results = []
    for given in (mask, MASKS[kind](mask)):
        model.zero_grad()
        output = model(input_ids=x, attention_mask=given, labels=labels)
        output.loss.backward()
        results.append((output.loss.detach(), output.l1.detach(), gradients(model), counted(model)))
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(other, one, rtol=1e-6, atol=1e-9)
    assert results[0][-1] == [13] * 3


@pytest.mark.parametrize("kind", ["dynamic", "static"])
@pytest.mark.parametrize("dimensions", [2, 4])
def test_with_a_cache_the_tokens_of_the_pass_are_counted(kind, dimensions):
    model = make().eval()
    model.recording = True
    x = tokens(2, 8)
    mask = torch.ones(2, 8).index_fill(1, torch.tensor([0]), 0).long()
    mask[1, 6] = 0
    static = kind == "static"
    cache = (
        StaticCache(model.config, max_cache_len=12) if static else DynamicCache(config=model.config)
    )
    found = []
    for start, end in ((0, 3), (3, 4), (4, 8)):
        given = mask[:, :end]
        if dimensions == 4:
            given = attends(torch.nn.functional.pad(mask, (0, 4)) if static else given)[
                :, :, start:end
            ]
        model(input_ids=x[:, start:end], attention_mask=given, past_key_values=cache)
        found.append(counted(model))
    assert found == [[4] * 3, [2] * 3, [7] * 3]


@pytest.mark.parametrize("cache", ["static", "dynamic"])
def test_generated_text_is_counted_without_its_padding(cache):
    model = make(eos_token_id=None).eval()
    model.recording = True
    x, mask = tokens(2, 6), torch.ones(2, 6).long()
    mask[0, :4] = 0
    options = {
        "max_new_tokens": 5,
        "do_sample": False,
        "pad_token_id": 0,
        "cache_implementation": cache,
    }
    model.generate(x, attention_mask=mask, disable_compile=True, **options)
    assert counted(model) == [8 + 2 * 4] * 3  # the last token that is written is not read


@pytest.mark.parametrize(
    ("mask", "words"),
    [
        (
            torch.ones(2, 8, 8),
            r"attention_mask has shape \(2, 8, 8\); .*statistics have to know which tokens are padding",
        ),
        (torch.ones(8), r"attention_mask has shape \(8,\)"),
        (
            torch.ones(2, 7),
            r"has shape \(2, 7\); expected None, \(2, 8 or more\) or \(2 or 1, heads or 1, 8 or 1, 8 or",
        ),
        (torch.ones(1, 8), r"has shape \(1, 8\)"),
        (torch.ones(3, 1, 8, 8), r"has shape \(3, 1, 8, 8\)"),
        (torch.ones(2, 1, 7, 8), r"has shape \(2, 1, 7, 8\)"),
        (torch.ones(2, 1, 8, 7), r"has shape \(2, 1, 8, 7\)"),
        ({"full_attention": None}, r"attention_mask is a dict; expected None"),
    ],
)
def test_a_mask_that_does_not_say_is_refused_where_padding_counts(mask, words, monkeypatch):
    model = make().eval()
    seen = []
    monkeypatch.setattr(
        LlamaForCausalLM,
        "forward",
        lambda self, attention_mask, forward=LlamaForCausalLM.forward, **kwargs: (
            seen.append(attention_mask) or forward(self, **kwargs)
        ),
    )
    x = tokens(2, 8)
    with pytest.raises(ValueError, match=words):
        model(input_ids=x, attention_mask=mask, labels=x)
    model.recording = True
    with pytest.raises(ValueError, match=words):
        model(input_ids=x, attention_mask=mask)
    model.recording = False
    with pytest.raises(ValueError, match=words):
        model.train()(input_ids=x, attention_mask=mask)
    assert not seen
    model.eval()(input_ids=x, attention_mask=mask)
    assert len(seen) == 1 and seen[0] is mask


def test_an_l1_term_with_a_mask_of_another_shape_is_refused():
    model = make()
    model(input_ids=tokens(2, 8))
    for mask in (torch.ones(2, 1, 8, 8), torch.ones(1, 8), torch.ones(2, 9)):
        with pytest.raises(
            ValueError, match=r"token_mask has shape \(.*\); expected \(2, 8\), one entry a token"
        ):
            l1_by_layer(model, mask)


def test_items_alone_weight_the_l1_term_by_share():
    model = make().double()
    x = tokens(6, 10)
    whole = model(input_ids=x, labels=x).loss
    parts = [
        model(input_ids=part, labels=part, num_items_in_batch=54).loss for part in (x[:2], x[2:])
    ]
    torch.testing.assert_close(
        sum(parts), whole, rtol=1e-6, atol=0
    )  # cross-entropy is summed in fp32


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
        pytest.raises(
            IndexError, match="layer 3 does not exist: the model has SparseFFN layers 0 to 2"
        ),
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
    with (
        silence(model, 1, [3]),
        silence(model, np.int64(2), range(40)),
        silence(model, 1, np.int64(80)),
    ):
        torch.testing.assert_close(model(input_ids=x).logits, expected)
        with pytest.raises(KeyError), silence(model, 0, [1]):
            raise KeyError
        with silence(model, 1):
            assert not torch.allclose(model(input_ids=x).logits, expected)
        torch.testing.assert_close(
            model(input_ids=x).logits, expected
        )  # what was silent before still is
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


@pytest.mark.parametrize("value", [-1.0, [0.1, 0.0, 0.3]])
def test_a_coefficient_that_is_no_number_of_0_or_more_is_refused(value):
    words = re.escape(f"l1_coefficient is {value}; it has to be a finite number, 0 or more")
    with pytest.raises(ValueError, match=words):
        make(l1_coefficient=value)


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


BACKENDS = ["dense", "reference"]
BACKENDS += [pytest.param(name, marks=triton_here) for name in ("triton", "auto")]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("adapter", ["lora", "dora", "ia3"])
def test_adapters_of_peft_act_and_learn(adapter, when, backend):
    """Logits and gradients are those of peft's model of the stock Llama, with SparseTraining around the step."""
    peft = pytest.importorskip("peft")
    parts = ["gate_proj", "up_proj", "down_proj"]
    if adapter == "ia3":
        options = peft.IA3Config(
            target_modules=parts, feedforward_modules=["down_proj"], init_ia3_weights=False
        )
    else:
        options = peft.LoraConfig(
            r=2,
            target_modules=parts,
            use_dora=adapter == "dora",
            init_lora_weights=False,
            lora_dropout=0.0,
        )
    base = stock("llama")
    x = tokens(2, 12)
    models = []
    for sparse in (False, True):
        torch.manual_seed(0)
        model = copy.deepcopy(base)
        if sparse and when == "after":
            sparsify(model, backend=backend)
        model = peft.get_peft_model(model, options)
        if sparse and when == "before":
            assert sparsify(model, backend=backend) is model
        models.append(model.train())
    dense, sparse = models
    with torch.no_grad():
        assert not torch.allclose(dense(input_ids=x).logits, base(input_ids=x).logits, atol=1e-3)
    dense(input_ids=x, labels=x).loss.backward()
    training = SparseTraining(sparse)
    for _ in training.attempts():
        sparse.zero_grad()
        sparse(input_ids=x, labels=x).loss.backward()
    assert training.summary()["sparse_layers"] == 0
    expected = {name: p.grad for name, p in dense.named_parameters() if p.requires_grad}
    found = {name: p.grad for name, p in sparse.named_parameters() if p.requires_grad}
    assert found.keys() == expected.keys() and len(found) >= 9
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-6, msg=name)
    with torch.no_grad():
        for model in models:
            model.eval()
        torch.testing.assert_close(
            sparse(input_ids=x).logits, dense(input_ids=x).logits, rtol=1e-4, atol=1e-5
        )
        assert all(
            ffn.path == ("dense" if backend != "dense" else ffn.path) for ffn in sparse_ffns(sparse)
        )
        merged = sparse.merge_and_unload()
        assert all(ffn.readable for ffn in sparse_ffns(merged))
        if backend != "triton":  # which refuses fp32
            torch.testing.assert_close(
                merged(input_ids=x).logits, dense(input_ids=x).logits, rtol=1e-3, atol=1e-4
            )


def test_a_second_sparsify_sets_the_backend():
    model = stock("llama")
    sparsify(model)
    layers = sparse_ffns(model)
    sparsify(model, backend="reference")
    assert sparse_ffns(model) == layers and all(ffn.backend == "reference" for ffn in layers)


def test_hooks_of_a_replaced_layer_are_carried_over_and_back():
    model = stock("llama")
    x, seen = tokens(2, 12), []
    before = model.model.layers[1].mlp.register_forward_hook(
        lambda module, args, y: seen.append(type(module)) or 2 * y
    )
    expected = model(input_ids=x).logits
    sparsify(model)
    torch.testing.assert_close(model(input_ids=x).logits, expected, rtol=1e-4, atol=1e-5)
    after = model.model.layers[1].mlp.register_forward_pre_hook(
        lambda module, args: seen.append("after")
    )
    model(input_ids=x)
    densify(model)
    torch.testing.assert_close(model(input_ids=x).logits, expected, rtol=1e-4, atol=1e-5)
    before.remove()
    after.remove()
    assert not torch.allclose(model(input_ids=x).logits, expected, rtol=1e-3, atol=1e-3)
    names = [kind if isinstance(kind, str) else kind.__name__ for kind in seen]
    assert names == ["LlamaMLP", "SparseFFN", "after", "SparseFFN", "after", "LlamaMLP"]


@triton_here
def test_densify_restores_strides():
    model = sparsify(stock("llama"), backend="triton")
    weights = [layer.mlp.down_proj.weight for layer in model.model.layers]
    assert not any(weight.is_contiguous() for weight in weights)
    densify(model)
    assert all(weight.is_contiguous() for weight in weights)


def test_feed_forward_modules_that_compute_something_else_are_refused():
    model = stock("llama")
    mlp = model.model.layers[1].mlp

    class Other(type(mlp)):
        def forward(self, x):
            return 2 * super().forward(x)

    mlp.__class__ = Other
    with pytest.raises(
        ValueError, match=r"a feed-forward module is a .*Other, not the one of 'llama'"
    ):
        sparsify(model)
    mlp.__class__ = Other.__base__
    mlp.forward = lambda x: x
    with pytest.raises(ValueError, match="has a forward of its own, which SparseFFN would replace"):
        sparsify(model)
    del mlp.forward
    mlp.act_fn = torch.nn.SiLU()
    with pytest.raises(ValueError, match=r"says 'relu', and a feed-forward module has SiLU\(\)"):
        sparsify(model)
    assert not any(isinstance(layer.mlp, SparseFFN) for layer in model.model.layers)


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
    with pytest.raises(
        ValueError, match="activation is 'silu', which makes nothing zero; relufy=True"
    ):
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


def published(
    folder, layout, gated=True, kind="llama_sparse_relu", tied=True, shards=1, neurons=84, **changes
):
    """Write a checkpoint as the paper's authors publish theirs; returns the model that it holds."""
    model = make(
        gated_mlp=gated,
        tie_word_embeddings=tied,
        intermediate_size=neurons,
        l1_coefficient=2e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 1e5},
    )
    frequencies = (
        model.model.rotary_emb.inv_freq.clone()
    )  # rotary tables stay fp32, as transformers loads a model
    tensors = {name: t.detach().clone() for name, t in model.bfloat16().state_dict().items()}
    model.model.rotary_emb.inv_freq = frequencies
    if tied:
        del tensors["lm_head.weight"]
    if layout == "own":
        for name in [name for name in tensors if ".mlp." in name]:
            part = name.split(".")[-2].removesuffix("_proj")
            turn = part == "gate" or part == "down" or not gated
            weight = tensors.pop(name)
            tensors[name.replace(f"{part}_proj.weight", f"{part}_weight")] = (
                weight.t().contiguous() if turn else weight
            )
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
        "sparsity_new_intermediate_size": neurons,
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
    for (name, a), (_, b) in zip(
        expected.state_dict().items(), model.state_dict().items(), strict=True
    ):
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
        for enable in (
            transformers_logging.enable_progress_bar,
            transformers_logging.disable_progress_bar,
        ):
            enable()
            shown = transformers_logging.is_progress_bar_enabled()
            load(tmp_path)
            assert transformers_logging.is_progress_bar_enabled() == shown
            assert capfd.readouterr() == ("", "")
    finally:
        (
            transformers_logging.enable_progress_bar
            if before
            else transformers_logging.disable_progress_bar
        )()


def test_llama_with_relu_loads_and_with_silu_does_not(tmp_path):
    expected = stock("llama", rms_norm_eps=3e-6)
    expected.save_pretrained(tmp_path)
    x = tokens(2, 8)
    model = load(tmp_path, backend="reference", dtype=torch.float64)[0]
    torch.testing.assert_close(model(input_ids=x).logits, expected.double()(input_ids=x).logits)
    stock("llama", "silu").save_pretrained(tmp_path)
    with pytest.raises(
        ValueError, match=r"activation 'silu'; load it with transformers and use twell\.sparsify"
    ):
        load(tmp_path)


def test_own_checkpoints_keep_everything(tmp_path):
    model = make(l1_coefficient=0.1, gated_mlp=False)
    model.save_pretrained(tmp_path)
    again = load(tmp_path)[0]
    assert again.config.l1_coefficient == 0.1 and not again.config.gated_mlp


@pytest.mark.parametrize("how", [lambda path: load(path)[0], AutoModelForCausalLM.from_pretrained])
def test_a_model_stored_with_a_list_of_coefficients_computes_and_does_not_train(tmp_path, how):
    model = make().eval()
    model.save_pretrained(tmp_path)
    path, x = tmp_path / "config.json", tokens(2, 8)
    path.write_text(json.dumps(json.loads(path.read_text()) | {"l1_coefficient": [0.1, 0.0, 0.3]}))
    again = how(tmp_path)
    assert torch.equal(again.eval()(input_ids=x, labels=x).logits, model(input_ids=x).logits)
    with pytest.raises(
        ValueError,
        match=r"stored with a list of L1 coefficients; set config\.l1_coefficient to a number",
    ):
        again.train()(input_ids=x, labels=x)
    again.config.l1_coefficient = 0.1
    output = again(input_ids=x, labels=x)
    torch.testing.assert_close(output.loss, output.cross_entropy + 0.1 * output.l1)
    again.config.l1_coefficient = None
    again.save_pretrained(tmp_path)
    assert how(tmp_path).config.l1_coefficient is None


def turn_down(tensors):
    for name in [name for name in tensors if name.endswith("down_proj.weight")]:
        tensors[name] = tensors[name].t().contiguous()


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("neurons", [84, 32])
@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("kind", ["llama", "llama_sparse_relu"])
def test_the_hybrid_kernels_down_projection_is_read_transposed(
    tmp_path, gated, neurons, shards, kind
):
    field = {"sparsity_use_hybrid_kernel": True}
    expected = published(
        tmp_path, "llama", gated, kind, True, shards, neurons, **field
    ).state_dict()
    for file in tmp_path.glob("*.safetensors"):
        tensors = load_file(file)
        turn_down(tensors)
        save_file(tensors, file)
    model, _ = load(tmp_path)
    for name, tensor in model.state_dict().items():
        assert tensor.dtype == torch.bfloat16 and torch.equal(tensor, expected[name]), name
    model.save_pretrained(tmp_path / "again")  # as every model of ours
    again = load(tmp_path / "again")[0].state_dict()
    assert all(torch.equal(tensor, again[name]) for name, tensor in expected.items())


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("neurons", [84, 32])
@pytest.mark.parametrize(
    ("field", "layout"), [(True, "own"), (False, "own"), (False, "llama"), (None, "llama")]
)
def test_without_the_hybrid_kernels_field_and_in_their_own_names_nothing_is_turned(
    tmp_path, gated, neurons, field, layout
):
    field = {"sparsity_use_hybrid_kernel": field}
    expected = published(tmp_path, layout, gated, neurons=neurons, **field).state_dict()
    weights = load(tmp_path)[0].state_dict()
    assert all(torch.equal(tensor, weights[name]) for name, tensor in expected.items())


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize(
    ("field", "shape", "words"),
    [
        (
            True,
            (32, 84),
            r"expected \(84, 32\), since sparsity_use_hybrid_kernel in config.json is true; .* to false",
        ),
        (
            True,
            (83, 32),
            r"expected \(84, 32\), since sparsity_use_hybrid_kernel in config.json is true$",
        ),
        (
            False,
            (84, 32),
            r"expected \(32, 84\), since sparsity_use_hybrid_kernel in config.json is not true; .* to true",
        ),
        (
            None,
            (84, 32),
            r"expected \(32, 84\), since sparsity_use_hybrid_kernel in config.json is not true; .* to true",
        ),
    ],
)
def test_a_down_projection_that_contradicts_the_field_is_refused(
    tmp_path, gated, field, shape, words
):
    published(
        tmp_path, "llama", gated, **({} if field is None else {"sparsity_use_hybrid_kernel": field})
    )
    change_tensors(tmp_path, turn_down if field else lambda tensors: None)
    name = "model.layers.1.mlp.down_proj.weight"
    change_tensors(tmp_path, lambda t: t.update({name: torch.ones(shape, dtype=torch.bfloat16)}))
    found = ", ".join(map(str, shape))
    with pytest.raises(
        ValueError, match=rf"layers\.1\.mlp\.down_proj\.weight has shape \({found}\); {words}"
    ):
        load(tmp_path)


@pytest.mark.parametrize("field", ["false", 1, [True]])
def test_a_hybrid_field_that_is_no_bool_is_refused(tmp_path, field):
    published(tmp_path, "llama", sparsity_use_hybrid_kernel=field)
    with pytest.raises(
        ValueError, match="sparsity_use_hybrid_kernel is .*; expected true or false"
    ):
        load(tmp_path)


def mixed(folder, types, order, named=None, field="dtype"):
    """Write a checkpoint of tensors of mixed types; `order` says which type the first shard begins with.

    Returns the stored tensors.
    """
    published(folder, "llama")
    config = json.loads((folder / "config.json").read_text())
    del config["torch_dtype"]
    (folder / "config.json").write_text(json.dumps(config | ({field: named} if named else {})))
    names = sorted(load_file(folder / "model.safetensors"))
    (folder / "model.safetensors").unlink()
    shards, stored = [{} for _ in types], {}
    for number, name in enumerate(names):
        place = number % len(types)
        shape = make().state_dict()[name].shape
        stored[name] = shards[place][name] = torch.randn(shape, dtype=torch.float64).to(
            types[place]
        )
    shards = [shards[place] for place in order]
    for number, shard in enumerate(shards):
        save_file(shard, folder / f"model-{number}.safetensors")
    weight_map = {
        name: f"model-{number}.safetensors" for number, shard in enumerate(shards) for name in shard
    }
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return stored


BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64


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
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("field", ["dtype", "torch_dtype"])
def test_shards_of_mixed_types_keep_their_values(tmp_path, types, named, expected, turned, field):
    order = range(len(types))[::-1] if turned else range(len(types))
    stored = mixed(tmp_path, types, order, named, field)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model, _ = load(tmp_path)
    weights = model.state_dict()
    assert model.config.dtype == expected
    for name, tensor in stored.items():
        assert weights[name].dtype == expected and torch.equal(
            weights[name], tensor.to(expected)
        ), name
    model.save_pretrained(tmp_path / "again")
    again, _ = load(tmp_path / "again")
    for (name, a), (_, b) in zip(weights.items(), again.state_dict().items(), strict=True):
        assert a.dtype == b.dtype and torch.equal(a, b), name


@pytest.mark.parametrize(
    ("types", "named", "expected", "words"),
    [
        (
            (BF16, FP32),
            "bfloat16",
            BF16,
            r"stored as torch\.float32 and .*, torch\.bfloat16; dtype=torch\.float32 keeps",
        ),
        (
            (BF16, FP16),
            "bfloat16",
            BF16,
            r"stored as torch\.float16 and .*, torch\.bfloat16; dtype=torch\.float32 keeps",
        ),
        (
            (BF16, FP32),
            "float16",
            FP16,
            r"stored as torch\..*, torch\.float16; dtype=torch\.float32 keeps",
        ),
        (
            (FP64, FP32),
            "float32",
            FP32,
            r"stored as torch\.float64 and .*, torch\.float32; dtype=torch\.float64 keeps",
        ),
    ],
)
@pytest.mark.parametrize("turned", [False, True])
def test_a_configured_type_that_rounds_is_said(tmp_path, types, named, expected, words, turned):
    stored = mixed(tmp_path, types, (1, 0) if turned else (0, 1), named)
    with pytest.warns(UserWarning, match=rf"the tensor model\.\S+ is {words}") as caught:
        model, _ = load(tmp_path)
    assert len(caught) == 1 and caught[0].filename == __file__
    assert all(p.dtype == expected for p in model.parameters())
    widest = torch.promote_types(*types)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # who asks for a type is told nothing
        load(tmp_path, dtype=torch.bfloat16)
        weights = load(tmp_path, dtype=widest)[0].state_dict()
    assert all(torch.equal(weights[name], tensor.to(widest)) for name, tensor in stored.items())


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32, FP64])
def test_saved_models_keep_their_type(tmp_path, dtype):
    model = make().to(dtype)
    model.save_pretrained(tmp_path)
    for again in (load(tmp_path)[0], SparseLlamaForCausalLM.from_pretrained(tmp_path)):
        for (name, a), (_, b) in zip(
            model.state_dict().items(), again.state_dict().items(), strict=True
        ):
            assert a.dtype == b.dtype == dtype and torch.equal(a, b), name
        assert again.config.dtype == dtype


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn", "nonsense", {"text": "bfloat16"}])
def test_types_that_weights_cannot_have_are_refused(tmp_path, dtype):
    published(tmp_path, "llama", torch_dtype=dtype)
    with pytest.raises(
        ValueError, match=r"config\.json: dtype is .*; expected one of bfloat16, float16, float32"
    ):
        load(tmp_path)
    if isinstance(dtype, str) and hasattr(torch, dtype):
        published(tmp_path, "llama")
        change_tensors(
            tmp_path,
            lambda t: t.update({"model.norm.weight": torch.ones(32).to(getattr(torch, dtype))}),
        )
        with pytest.raises(
            ValueError,
            match=rf"model\.norm\.weight has type torch\.{dtype}; expected one of bfloat16",
        ):
            load(tmp_path)


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
        (
            lambda t: t.update({"model.extra": torch.ones(1)}),
            r"the tensor model\.extra is not part of the model",
        ),
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


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"sparsity_gated_mlp": "false"}, "gated_mlp is 'false'; expected true or false"),
        ({"sparsity_gated_mlp": None}, "gated_mlp is None; expected true or false"),
        (
            {"sparsity_l1_coeff": "much"},
            "l1_coefficient is 'much'; it has to be a finite number, 0 or more",
        ),
        (
            {"sparsity_l1_coeff": 1e999},
            "l1_coefficient is inf; it has to be a finite number, 0 or more",
        ),
        ({"sparsity_new_intermediate_size": None, "intermediate_size": None}, "intermediate_size"),
        ({"hidden_size": "32"}, "'hidden_size' expected int, got str"),
        ({"tie_word_embeddings": "yes"}, "'tie_word_embeddings' expected bool, got str"),
        ({"rope_theta": "abc"}, "TypeError"),
        ({"rope_scaling": {"type": "foo", "factor": 2.0}}, "foo"),
        (
            {"quantization_config": {"load_in_8bit": True}},
            "quantization_config; quantised weights cannot be read",
        ),
    ],
)
def test_odd_configurations_are_refused_by_file_and_field(tmp_path, fields, words):
    published(tmp_path, "llama", **fields)
    with pytest.raises(ValueError, match=rf"config\.json (describes no model: .*|has a ){words}"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("file", "text", "words"),
    [
        ("config.json", "[1]", r"config\.json holds a list, expected a JSON object"),
        ("model.safetensors.index.json", "{", r"model\.safetensors\.index\.json is not JSON"),
        ("model.safetensors.index.json", "[]", r"index\.json holds a list, expected a JSON object"),
        (
            "model.safetensors.index.json",
            "{}",
            r"index\.json has no weight_map with a file for each tensor",
        ),
        ("model.safetensors.index.json", '{"weight_map": ["a"]}', r"index\.json has no weight_map"),
        (
            "model.safetensors.index.json",
            '{"weight_map": {"a": 3}}',
            r"index\.json has no weight_map",
        ),
        ("tokenizer.json", "{", r"tokenizer(_config)?\.json"),
        ("tokenizer_config.json", "{", r"tokenizer(_config)?\.json"),
    ],
)
def test_broken_files_beside_the_weights_are_named(tmp_path, file, text, words):
    published(tmp_path, "llama")
    (tmp_path / file).write_text(text)
    with pytest.raises(ValueError, match=words):
        load(tmp_path)


def test_a_tensor_in_two_shards_is_refused(tmp_path):
    published(tmp_path, "llama", shards=3)
    file = tmp_path / "model-2.safetensors"
    save_file(load_file(file) | {"model.embed_tokens.weight": torch.ones(VOCAB, 32)}, file)
    with pytest.raises(
        ValueError,
        match=r"model-2\.safetensors: model\.embed_tokens\.weight would be one weight twice",
    ):
        load(tmp_path)


def test_a_weight_in_both_layouts_is_refused(tmp_path):
    published(tmp_path, "llama")
    turned = {"model.layers.1.mlp.down_weight": torch.ones(84, 32, dtype=torch.bfloat16)}
    change_tensors(tmp_path, lambda tensors: tensors.update(turned))
    with pytest.raises(ValueError, match="would be one weight twice"):
        load(tmp_path)


def test_coefficient_and_scale_weight_the_l1_term():
    model = make(l1_coefficient=0.3)
    x = tokens(2, 10)
    output = model(input_ids=x, labels=x, l1_scale=0.5)
    torch.testing.assert_close(output.loss, output.cross_entropy + 0.5 * 0.3 * output.l1)
    torch.testing.assert_close(output.l1, l1_by_layer(model).mean())


def rounding(logits, exact):
    return (logits - exact).square().mean().sqrt()


@triton_here
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
    again = SparseLlamaForCausalLM.from_pretrained(
        tmp_path / "again"
    )  # its configuration names the backend
    assert again.config.ffn_backend == "triton" and again.ffns[0].down_proj.weight.stride() == (
        1,
        64,
    )
    for (name, a), (_, b) in zip(
        again.state_dict().items(), model.state_dict().items(), strict=True
    ):
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


@triton_here
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
        path.write_text(
            json.dumps({name: value for name, value in changed.items() if value is not ...})
        )

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
    tensors["model.layers.0.mlp.gate_weight"] = (
        tensors["model.layers.0.mlp.gate_proj.weight"].t().contiguous()
    )


def not_finite(value):
    def edit(tensors):
        tensors["model.norm.weight"][3] = value

    return edit


INDEX = "model.safetensors.index.json"
DAMAGE = {
    "a list for a configuration": (
        write("config.json", "[1]"),
        r"config\.json holds a list, expected a JSON object",
    ),
    "a size missing": (
        edit_config(hidden_size=...),
        r"config\.json has no hidden_size; put back the file",
    ),
    "a word for a size": (
        edit_config(hidden_size="wide"),
        r"config\.json describes no model: .*'hidden_size'.*wide",
    ),
    "no heads": (
        edit_config(num_attention_heads=0),
        r"config\.json describes no model: ZeroDivisionError",
    ),
    "an unknown activation": (
        edit_config(hidden_act="gelu2"),
        r"config\.json describes no model: KeyError: 'gelu2'",
    ),
    "an unknown rope type": (
        edit_config(rope_parameters={"rope_type": "spiral", "rope_theta": 1e4}),
        r"config\.json describes no model: rope_type is 'spiral'; use one of default, .*linear",
    ),
    "a negative rope_theta": (
        edit_config(rope_parameters={"rope_type": "default", "rope_theta": -1.0}),
        r"config\.json describes no model: rope_theta is -1\.0; .* a finite number above 0",
    ),
    "an index cut short": (write(INDEX, "{"), r"index\.json is not JSON: .*; put back the file"),
    "an index that is a list": (
        write(INDEX, "[]"),
        r"index\.json holds a list, expected a JSON object",
    ),
    "an index without files": (
        write(INDEX, '{"weight_map": {"a": 1}}'),
        r"index\.json has no weight_map with a file",
    ),
    "a tokenizer cut short": (
        write("tokenizer.json", '{"version'),
        r"tokenizer\.json is not JSON: .*; put back",
    ),
    "an empty tokenizer": (
        write("tokenizer.json", "{}"),
        r"tokenizer\.json and tokenizer_config\.json make no tok",
    ),
    "a tokenizer's settings cut short": (
        write("tokenizer_config.json", "{"),
        r"tokenizer_config\.json is not JSON",
    ),
    "a weight in two layouts": (
        edit_tensors(in_two_layouts),
        r"safetensors: \S*gate_proj\.weight and \S*gate_weight would be one weight twice; take one of them out",
    ),
    "a weight that is NaN": (
        edit_tensors(not_finite(float("nan"))),
        r"model\.safetensors: the tensor model\.norm\.weight has NaN or infinite values: put back a whole copy",
    ),
    "a weight that is infinite": (
        edit_tensors(not_finite(float("inf"))),
        r"model\.norm\.weight has NaN or infinite",
    ),
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
    write(INDEX, json.dumps({"weight_map": {"a": "model.safetensors", "b": "other.safetensors"}}))(
        folder
    )
    with pytest.raises(
        ValueError,
        match=r"other\.safetensors: lm_head\.weight|other\.safetensors: \S+ would be one",
    ):
        load(folder)


@pytest.mark.parametrize("part", ["model", "tokenizer"])
def test_a_folder_that_cannot_be_written_is_named(tiny_run, tmp_path, monkeypatch, part):
    model, tokenizer = load(tiny_run)
    kind = {"model": SafetensorError, "tokenizer": Exception}[
        part
    ]  # of what both libraries raise on a full disk

    def full(*_, **__):
        raise kind("No space left on device")

    monkeypatch.setattr({"model": model, "tokenizer": tokenizer}[part], "save_pretrained", full)
    with pytest.raises(OSError, match=r"out could not be written: No space left on device"):
        model_module.save(model, tokenizer, tmp_path / "out")
