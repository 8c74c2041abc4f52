import pytest
import torch
from torch.utils.checkpoint import set_checkpoint_early_stop

from tests.models.factories import gradients, make, present_gradients, stock, tokens
from twell.models import l1_by_layer, sparse_ffns, sparsify


def assert_no_gradient(model):
    """Gradients reached the parameters, and all are 0; NaN counts as another value."""
    assert not present_gradients(model).any()


def assert_same_loss(loss, expected):
    """Cross-entropy is summed in fp32."""
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)


# --- micro-batches


def test_micro_batches_with_padding_give_the_value_of_one_big_batch():
    model = make().double()
    lengths = [12, 5, 9, 1, 12, 7]
    x = tokens(6, 12)
    mask = (torch.arange(12) < torch.tensor(lengths)[:, None]).long()
    labels = x.masked_fill(mask == 0, -100)
    whole = model(input_ids=x, attention_mask=mask, labels=labels)
    whole.loss.backward()
    expected = gradients(model)
    model.zero_grad()
    predicted = (labels[:, 1:] != -100).sum()
    totals = {"num_items_in_batch": predicted, "num_tokens_in_batch": mask.sum()}
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
    assert_same_loss(loss, whole.loss.detach())
    torch.testing.assert_close(l1, whole.l1.detach())
    torch.testing.assert_close(gradients(model), expected, rtol=1e-9, atol=1e-12)


def test_items_alone_weight_the_l1_term_by_share():
    model = make().double()
    x = tokens(6, 10)
    whole = model(input_ids=x, labels=x).loss
    parts = [
        model(input_ids=part, labels=part, num_items_in_batch=54).loss for part in (x[:2], x[2:])
    ]
    assert_same_loss(sum(parts), whole)


@pytest.mark.parametrize("totals", [{"num_tokens_in_batch": torch.tensor(18)}, {}])
def test_a_micro_batch_of_padding_adds_nothing_to_a_step(totals):
    model = make().double()
    x = tokens(4, 9)
    mask = torch.ones_like(x)
    mask[2:] = 0
    labels = x.masked_fill(mask == 0, -100)
    whole = model(input_ids=x, attention_mask=mask, labels=labels)
    whole.loss.backward()
    expected = gradients(model)
    model.zero_grad()
    loss, totals = 0.0, {"num_items_in_batch": 16} | totals
    for rows in (slice(0, 2), slice(2, 4)):
        part = model(input_ids=x[rows], attention_mask=mask[rows], labels=labels[rows], **totals)
        part.loss.backward()
        loss = loss + part.loss.detach()
    assert_same_loss(loss, whole.loss.detach())
    torch.testing.assert_close(gradients(model), expected, rtol=1e-9, atol=1e-12)


# --- nothing to average


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
    assert_no_gradient(model)
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


def test_a_sparsified_model_has_an_l1_term_of_zero_for_padding_alone():
    model = sparsify(stock("qwen2")).train()
    x = tokens(2, 12)
    model(input_ids=x)
    for num_tokens in (None, 0, torch.tensor(0), 24):
        model.zero_grad()
        term = l1_by_layer(model, torch.zeros(2, 12), num_tokens)
        assert term.shape == (3,) and not term.any()
        term.mean().backward(retain_graph=True)
        assert_no_gradient(model)


# --- any model


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


@pytest.mark.parametrize("shape", [(2, 1, 8, 8), (1, 8), (2, 9)])
def test_a_mask_of_another_shape_is_refused(shape):
    model = make()
    model(input_ids=tokens(2, 8))
    message = r"token_mask has shape \(.*\); expected \(2, 8\), one entry a token"
    with pytest.raises(ValueError, match=message):
        l1_by_layer(model, torch.ones(shape))


@pytest.mark.parametrize("early_stop", [True, False])
def test_activation_checkpointing_repeats_but_does_not_recount(early_stop):
    model = make().double()
    x = tokens(3, 10)
    model(input_ids=x, labels=x).loss.backward()
    expected, stats = gradients(model), [ffn.stats.take() for ffn in model.ffns]
    model.zero_grad()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    with set_checkpoint_early_stop(early_stop):  # by default it stops before the layer's counters
        model(input_ids=x, labels=x).loss.backward()
    torch.testing.assert_close(gradients(model), expected, rtol=1e-10, atol=1e-14)
    for before, after in zip(stats, (ffn.stats.take() for ffn in model.ffns), strict=True):
        assert torch.equal(before[0], after[0]) and torch.equal(before[1], after[1])


def test_reentrant_activation_checkpointing_is_refused():
    """It would silently train without the L1 term."""
    model, x = make(), tokens(3, 10)
    model.gradient_checkpointing_enable({"use_reentrant": True})
    with pytest.raises(RuntimeError, match="use_reentrant=True drops it"):
        model(input_ids=x, labels=x)
