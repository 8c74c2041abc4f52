"""The loss and its L1 term, over micro-batches, with padding in every kind of mask."""

import copy
import re
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

import pytest
import torch
from torch.utils.checkpoint import set_checkpoint_early_stop
from transformers import DynamicCache, Trainer, TrainingArguments

import twell
from tests.factories import SEED
from tests.factories import models as factory
from tests.factories.models import counted, make, step, stock, tokens
from twell.models import collect_l1, sparsify

EXACT = {"rtol": 1e-9, "atol": 1e-12}
FP32 = {"rtol": 1e-6, "atol": 0}  # cross-entropy is summed in fp32


assert_close = torch.testing.assert_close


def test_loss_is_cross_entropy_plus_l1_in_training_alone():
    model, x, hidden = make(l1_coefficient=0.3), tokens(4, 16), []
    for ffn in model.ffns:
        ffn.register_forward_hook(lambda f, i, _: hidden.append(f.activations(i[0])[1]))
    with collect_l1(model) as terms:
        output = model(input_ids=x, labels=x, l1_scale=0.5)
    l1 = torch.stack([h.abs().sum(-1) for h in hidden]).mean()
    logits, targets = output.logits[:, :-1].reshape(-1, factory.VOCAB), x[:, 1:].reshape(-1)
    expected = torch.nn.functional.cross_entropy(logits, targets)
    assert_close(output.l1, l1)
    assert_close(output.l1, terms.mean())
    assert_close(output.cross_entropy, expected)
    assert_close(output.loss, expected + 0.5 * 0.3 * l1)
    output = model.eval()(input_ids=x, labels=x)
    assert_close(output.loss, expected)
    assert_close(output.l1, l1)
    without = model(input_ids=x)
    assert without.loss is None and without.cross_entropy is None and without.l1 is None


@pytest.mark.parametrize("way", ["logits", "hidden"])
def test_a_loss_that_is_computed_elsewhere_needs_the_l1_term(way):
    """Also where a library calls the backbone and not the model, as trl does."""
    model, x = make(), tokens(2, 8)

    def loss():
        output = (model.model if way == "hidden" else model)(input_ids=x)
        return output[0].square().mean(), output

    with pytest.raises(RuntimeError, match="the loss has no L1 term"):
        loss()[0].backward()
    if way == "hidden":
        with collect_l1(model) as terms:
            value, _ = loss()
        value = value + terms.mean()
    else:
        value, output = loss()
        value = value + output.l1
    value.backward()
    model.config.l1_coefficient = 0.0
    loss()[0].backward()


@pytest.mark.parametrize(
    ("lengths", "parts"),
    [
        ((12, 5, 9, 1, 0, 0), ((0, 1, 12), (1, 4, 9), (4, 6, 12))),  # padding alone adds nothing
        ((10,) * 6, ((0, 2, 10), (2, 6, 10))),
    ],
)
def test_micro_batches_give_the_value_of_one_big_batch(lengths, parts):
    model, x = make().double(), tokens(len(lengths), max(lengths))
    mask = (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).long()
    labels = x.masked_fill(mask == 0, -100)
    whole, expected = step(model, input_ids=x, attention_mask=mask, labels=labels)
    items = (labels[:, 1:] != -100).sum()
    settings = [{"num_items_in_batch": items, "num_tokens_in_batch": mask.sum()}]
    if len(set(lengths) - {0}) == 1:  # of equal length, the share of items says the same
        settings.append({"num_items_in_batch": int(items)})
    for totals in settings:
        loss = l1 = gradients = 0
        for start, end, width in parts:
            batch = {"input_ids": x, "attention_mask": mask, "labels": labels}
            cut = {name: tensor[start:end, :width] for name, tensor in batch.items()}
            part, gradient = step(model, **cut, **totals)
            loss, l1 = loss + part.loss.detach(), l1 + part.l1.detach()
            gradients = gradients + gradient
        assert_close(loss, whole.loss.detach(), **FP32)
        assert_close(l1, whole.l1.detach())
        assert_close(gradients, expected, **EXACT)


@pytest.mark.parametrize("total", [None, torch.tensor(0), 0])
def test_a_batch_of_padding_alone_has_loss_and_gradients_of_zero(total):
    model = make()
    totals = {"num_items_in_batch": total, "num_tokens_in_batch": total}
    x, mask = tokens(2, 8), torch.zeros(2, 8, dtype=torch.long)
    labels = torch.full_like(x, -100)
    output, gradients = step(model, input_ids=x, attention_mask=mask, labels=labels, **totals)
    assert output.loss == output.cross_entropy == output.l1 == 0
    assert not gradients.any()  # NaN counts as another value


def test_a_sparsified_model_trains_with_the_l1_term():
    model, x = sparsify(stock("qwen2")).train(), tokens(2, 12)
    with collect_l1(model) as terms:
        loss = model(input_ids=x, labels=x).loss
    for num_tokens in (None, 0, torch.tensor(0), 24):
        term = terms.by_layer(torch.zeros(2, 12), num_tokens)
        assert term.shape == (3,) and not term.any()
        term.mean().backward(retain_graph=True)
    assert not any(p.grad.any() for p in model.parameters() if p.grad is not None)
    mask = torch.ones(2, 12)
    mask[1, 7:] = 0
    term = terms.by_layer(mask)
    assert_close(term, torch.stack([(l1 * mask).sum() / 19 for _, l1 in terms.terms]))
    (loss + 0.1 * terms.mean(mask)).backward()
    assert all(p.grad is not None for p in model.parameters())
    with pytest.raises(ValueError, match=r"token_mask has shape \(1, 12\); expected \(2, 12\)"):
        terms.mean(torch.ones(1, 12))


def test_what_a_block_holds():
    """Every pass inside, of these layers, that ran; and the same for a block around it."""
    model = make().double()
    first, second = tokens(2, 12), tokens(1, 5)
    with collect_l1(model) as outer, collect_l1(model.model.layers[1]) as inner:
        separate = [model(input_ids=x).l1.detach() for x in (first, second)]
    assert_close(outer.mean().detach(), (24 * separate[0] + 5 * separate[1]) / 29)
    assert_close(inner.by_layer(), outer.by_layer()[1:2])
    with outer, torch.no_grad():  # a block of its own, without what the collector held
        model.eval()(input_ids=first)
    assert_close(outer.mean(), separate[0])
    model.train().model.layers[2].forward = lambda hidden, **_: hidden  # a pass may skip a layer
    output = model(input_ids=first, labels=first)
    with collect_l1(model) as terms:
        model(input_ids=first)
    assert len(terms.terms) == 2
    assert_close(output.l1, torch.stack([l1.mean() for _, l1 in terms.terms]).mean())
    with terms, pytest.raises(RuntimeError, match="open already"):
        terms.__enter__()
    with pytest.raises(RuntimeError, match="no SparseFFN layer ran"):
        terms.mean()


@pytest.mark.parametrize("whole", [False, True])
def test_compiled_layers_hand_on_the_same(whole):
    model, x = make(num_hidden_layers=2).double(), tokens(2, 9)
    expected, gradient = step(model, input_ids=x, labels=x, use_cache=False)
    stats = [ffn.stats.take() for ffn in model.ffns]
    options = {"fullgraph": True, "backend": "eager" if whole else "aot_eager"}
    for layer in () if whole else model.model.layers:
        layer.compile(**options)
    run = torch.compile(model, **options) if whole else model
    for _ in range(2):
        model.zero_grad()
        with collect_l1(model) as terms:
            output = run(input_ids=x, labels=x, use_cache=False)
        output.loss.backward()
        assert_close(output.l1, expected.l1)
        assert_close(terms.mean().detach(), expected.l1.detach())
        assert_close(torch.cat([p.grad.flatten() for p in model.parameters()]), gradient, **EXACT)
        for before, ffn in zip(stats, model.ffns, strict=True):
            assert all(map(torch.equal, before, ffn.stats.take()))
    one, given = (run, {"labels": x}) if whole else (model.model, {})
    for inside in (nullcontext(), collect_l1(model)):
        with pytest.raises(RuntimeError, match="which holds one pass"), collect_l1(model):
            one(input_ids=x, use_cache=False, **given)
            with inside:
                one(input_ids=x, use_cache=False, **given)
    with collect_l1(model), ThreadPoolExecutor() as o, pytest.raises(RuntimeError, match="thread"):
        o.submit(collect_l1(model).__enter__).result()
    torch.compiler.reset()


def test_activation_checkpointing_repeats_but_does_not_recount():
    model, x = make().double(), tokens(3, 10)
    _, expected = step(model, input_ids=x, labels=x)
    stats = [ffn.stats.take() for ffn in model.ffns]
    model.gradient_checkpointing_enable({"use_reentrant": False})
    for early_stop in (True, False):  # by default it stops before the layer's counters
        with set_checkpoint_early_stop(early_stop):
            assert_close(step(model, input_ids=x, labels=x)[1], expected, rtol=1e-10, atol=1e-14)
        for before, ffn in zip(stats, model.ffns, strict=True):
            assert all(map(torch.equal, before, ffn.stats.take()))


def test_reentrant_checkpointing_is_refused_where_it_would_lose_the_term():
    model, x = make(l1_coefficient=1.0), tokens(3, 10)
    model.gradient_checkpointing_enable({"use_reentrant": True})
    with pytest.raises(RuntimeError, match="use_reentrant=True"):
        model(input_ids=x, labels=x)
    model.config.l1_coefficient = 0.0
    model(input_ids=x, labels=x).loss.backward()


def test_with_a_cache_the_tokens_of_the_pass_are_counted():
    model = make(eos_token_id=None).eval()
    model.recording = True
    x, mask = tokens(2, 8), torch.ones(2, 8).index_fill(1, torch.tensor([0]), 0).long()
    mask[1, 6] = 0
    cache, counts = DynamicCache(config=model.config), []
    for start, end in ((0, 3), (3, 4), (4, 8)):
        given = {"attention_mask": mask[:, :end], "past_key_values": cache}
        model(input_ids=x[:, start:end], **given)
        counts.append(counted(model))
    assert counts == [[4] * 3, [2] * 3, [7] * 3]


@pytest.mark.parametrize(
    "mask", [*map(torch.ones, ((2, 7), (3, 8), (2, 1, 8, 8))), {"full_attention": None}]
)
def test_an_unreadable_mask_is_refused_where_padding_counts(mask):
    model, x = make().eval(), tokens(2, 8)
    names = "dict" if isinstance(mask, dict) else re.escape(str(tuple(mask.shape)))
    for training, recording, labels in ((0, 0, x), (0, 1, None), (1, 0, None)):
        model.train(bool(training)).recording = bool(recording)
        with pytest.raises(ValueError, match=f"attention_mask is .*{names}"):
            model(input_ids=x, attention_mask=mask, labels=labels)


LABEL_SMOOTHING = 0.1
ROWS = torch.randint(90, (4, 10), generator=torch.Generator().manual_seed(SEED))


def trained(model, folder, batch=4, loss=None, **changes):
    """The model after a step of SGD over four documents, the last without a loss on its start."""
    labels = ROWS.clone()
    labels[3, :6] = -100
    documents = [{"input_ids": x, "labels": y} for x, y in zip(ROWS, labels, strict=True)]
    arguments = {
        **{"max_steps": 1, "learning_rate": 1.0, "optim": "sgd", "lr_scheduler_type": "constant"},
        **{"per_device_train_batch_size": batch, "gradient_accumulation_steps": 4 // batch},
        **{"report_to": [], "save_strategy": "no", "use_cpu": True, "disable_tqdm": True},
        **{"max_grad_norm": 0.0, "output_dir": str(folder)},
    }
    model = copy.deepcopy(model)
    arguments = TrainingArguments(**arguments | changes)
    trainer = Trainer(model, arguments, train_dataset=documents, compute_loss_func=loss)
    trainer.train()
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def smoothed(outputs, labels, num_items_in_batch=None):
    logits, targets = outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    options = {"label_smoothing": LABEL_SMOOTHING, "reduction": "sum"}
    return torch.nn.functional.cross_entropy(logits, targets, **options) / num_items_in_batch


@pytest.mark.parametrize("options", [{"label_smoothing": LABEL_SMOOTHING}, {"loss": smoothed}])
def test_a_loss_of_the_trainer_has_the_l1_term(options, tmp_path):
    """With micro-batches of unequal shares of the labels."""
    model = make(l1_coefficient=0.5, num_hidden_layers=1).double()
    without = copy.deepcopy(model)
    without.config.l1_coefficient = 0.0
    # The trainer's own loss is computed without labels, so the model cannot add the term.
    own = options if "loss" in options else {"label_smoothing_factor": LABEL_SMOOTHING}
    with pytest.raises(RuntimeError, match="the loss has no L1 term"):
        trained(model, tmp_path, **own)
    plain = trained(without, tmp_path, 1, twell.with_l1(without, **options))
    torch.testing.assert_close(plain, trained(without, tmp_path, **own), rtol=0, atol=1e-6)
    # Read where Trainer's copy of the model keeps it: in the configuration they share.
    change = trained(model, tmp_path, 1, twell.with_l1(model, **options)) - plain

    with twell.collect_l1(model.train()) as terms:
        model(input_ids=ROWS)
    weights = torch.tensor([9, 9, 9, 4]) / 31
    per_token = torch.stack([l1 for _, l1 in terms.terms]).mean(0)
    (-0.5 * (per_token.mean(1) * weights).sum()).backward()
    steps = [0 * p if p.grad is None else p.grad for p in model.parameters()]
    step = torch.cat([step.flatten() for step in steps])
    assert step.any()
    torch.testing.assert_close(change, step, rtol=1e-4, atol=2e-6)


def test_a_loss_with_l1_needs_a_model_with_the_term_and_labels():
    with pytest.raises(ValueError, match="model is a Qwen2ForCausalLM, whose output has no L1 t"):
        twell.with_l1(twell.sparsify(stock("qwen2")))
    with pytest.raises(ValueError, match="labels is None"):
        twell.with_l1(make())(None, None)
