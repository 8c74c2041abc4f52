import pytest
import torch
from transformers import DynamicCache, LlamaForCausalLM, StaticCache

from tests.models.factories import (
    MASKS,
    counted,
    gradients,
    make,
    present_gradients,
    square,
    tokens,
)
from twell.sparse.layer import summarize_activity


def test_padding_changes_neither_loss_nor_statistics():
    model = make().double()
    x = tokens(2, 8)
    padded = torch.cat([x, tokens(2, 5)], 1)
    mask = torch.cat([torch.ones(2, 8), torch.zeros(2, 5)], 1).long()
    labels = padded.masked_fill(mask == 0, -100)
    plain = model(input_ids=x, labels=x)
    stats = [summarize_activity(*ffn.stats.take()) for ffn in model.ffns]
    other = model(input_ids=padded, attention_mask=mask, labels=labels)
    # Cross-entropy is summed in fp32.
    torch.testing.assert_close(other.loss, plain.loss, rtol=1e-6, atol=0)
    torch.testing.assert_close(other.l1, plain.l1)
    assert [summarize_activity(*ffn.stats.take()) for ffn in model.ffns] == stats


def test_values_at_padding_positions_change_no_gradient():
    model = make().double()
    x = tokens(2, 8)
    mask = torch.ones(2, 8).index_fill(1, torch.tensor([0, 1]), 0)
    labels, results = x.clone(), []
    labels[:, :3] = -100  # the first token after padding is predicted from padding
    embeddings = model.get_input_embeddings()(x).detach()
    for content in (0.0, 7.0, torch.nan, torch.inf):
        embeds = torch.where(mask[..., None] == 0, content, embeddings)
        model.zero_grad()
        output = model(inputs_embeds=embeds, attention_mask=mask, labels=labels)
        output.loss.backward()
        results.append(torch.cat([output.loss.detach().reshape(1), present_gradients(model)]))
    for other in results[1:]:
        torch.testing.assert_close(other, results[0], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("side", ["left", "right", "all", "none"])
@pytest.mark.parametrize("training", [True, False])
def test_every_kind_of_mask_marks_the_padding(kind, side, training, monkeypatch):
    model = make().double().train(training)
    x = tokens(3, 8)
    mask = torch.arange(8) >= torch.tensor([[3], [0], [5]])
    masks = {"left": mask, "right": mask.flip(1), "all": mask & False, "none": mask | True}
    mask = masks[side].long()
    forward = LlamaForCausalLM.forward

    def without_mask(self, attention_mask, **kwargs):  # attention does not take integers
        return forward(self, **kwargs)

    monkeypatch.setattr(LlamaForCausalLM, "forward", without_mask)
    model(input_ids=x, labels=x)
    per_token = torch.stack([ffn.l1 for ffn in model.ffns])
    expected = per_token[:, mask != 0].sum(1) / max(int(mask.sum()), 1)
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
    cache, later = DynamicCache(config=model.config), 0
    if kind == "static":
        cache, later = StaticCache(model.config, max_cache_len=12), 4
    counts = []
    for start, end in ((0, 3), (3, 4), (4, 8)):
        given = mask[:, :end]
        if dimensions == 4:
            padded = torch.nn.functional.pad(mask, (0, later)) if later else given
            given = square(padded)[:, :, start:end]
        model(input_ids=x[:, start:end], attention_mask=given, past_key_values=cache)
        counts.append(counted(model))
    assert counts == [[4] * 3, [2] * 3, [7] * 3]


@pytest.mark.parametrize("cache", ["static", "dynamic"])
def test_generated_text_is_counted_without_its_padding(cache):
    model = make(eos_token_id=None).eval()
    model.recording = True
    x, mask = tokens(2, 6), torch.ones(2, 6).long()
    mask[0, :4] = 0
    options = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    options |= {"cache_implementation": cache, "disable_compile": True}
    model.generate(x, attention_mask=mask, **options)
    assert counted(model) == [8 + 2 * 4] * 3  # the last token that is written is not read


KINDS = r"expected None, \(2, 8 or more\) or \(2 or 1, heads or 1, 8 or 1, 8 or more\)"


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (torch.ones(2, 8, 8), rf"attention_mask has shape \(2, 8, 8\); {KINDS}: the loss or the "),
        (torch.ones(2, 8, 8), "statistics have to know which tokens are padding"),
        (torch.ones(8), r"attention_mask has shape \(8,\)"),
        (torch.ones(2, 7), rf"has shape \(2, 7\); {KINDS}"),
        (torch.ones(1, 8), r"has shape \(1, 8\)"),
        (torch.ones(3, 1, 8, 8), r"has shape \(3, 1, 8, 8\)"),
        (torch.ones(2, 1, 7, 8), r"has shape \(2, 1, 7, 8\)"),
        (torch.ones(2, 1, 8, 7), r"has shape \(2, 1, 8, 7\)"),
        ({"full_attention": None}, r"attention_mask is a dict; expected None"),
    ],
)
def test_an_unreadable_mask_is_refused_where_padding_counts(mask, message, monkeypatch):
    model, seen, forward = make().eval(), [], LlamaForCausalLM.forward

    def spy(self, attention_mask, **kwargs):
        seen.append(attention_mask)
        return forward(self, **kwargs)

    monkeypatch.setattr(LlamaForCausalLM, "forward", spy)
    x = tokens(2, 8)
    with pytest.raises(ValueError, match=message):
        model(input_ids=x, attention_mask=mask, labels=x)
    model.recording = True
    with pytest.raises(ValueError, match=message):
        model(input_ids=x, attention_mask=mask)
    model.recording = False
    with pytest.raises(ValueError, match=message):
        model.train()(input_ids=x, attention_mask=mask)
    assert not seen
    model.eval()(input_ids=x, attention_mask=mask)
    assert len(seen) == 1 and seen[0] is mask
