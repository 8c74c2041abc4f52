import copy

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaForCausalLM

from twell.ffn import summarize_activity
from twell.model import SparseLlamaConfig, SparseLlamaForCausalLM, silence

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
    torch.testing.assert_close(loss, whole.loss.detach())
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
    torch.testing.assert_close(other.loss, plain.loss)
    torch.testing.assert_close(other.l1, plain.l1)
    assert [summarize_activity(*ffn.stats.take()) for ffn in model.ffns] == stats


def test_items_alone_weight_the_l1_term_by_share():
    model = make().double()
    x = tokens(6, 10)
    whole = model(input_ids=x, labels=x).loss
    parts = [model(input_ids=part, labels=part, num_items_in_batch=54).loss for part in (x[:2], x[2:])]
    torch.testing.assert_close(sum(parts), whole)


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


def test_negative_coefficient_is_refused():
    with pytest.raises(ValueError, match=r"l1_coefficient is -1\.0"):
        make(l1_coefficient=-1.0)
