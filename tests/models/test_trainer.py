"""transformers' Trainer: losses with the L1 term, predictions, and stock Llama's arguments."""

import copy

import numpy as np
import pytest
import torch
from transformers import Trainer, TrainingArguments

import twell
from tests.factories import SEED
from tests.factories.models import make, stock, tokens

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
    """With one big batch, and with micro-batches of unequal shares of the labels."""
    model = make(l1_coefficient=0.5).double()
    start = torch.cat([p.detach().flatten() for p in model.parameters()])
    # The trainer's own loss is computed without labels, so the model cannot add the term.
    smoothing = {"label_smoothing_factor": LABEL_SMOOTHING}
    for refused in (smoothing, {"loss": smoothed}):
        with pytest.raises(RuntimeError, match="the loss has no L1 term"):
            trained(model, tmp_path, **refused)

    without = copy.deepcopy(model)
    without.config.l1_coefficient = 0.0
    plain = trained(without, tmp_path, label_smoothing_factor=LABEL_SMOOTHING)
    changes = {}
    for batch in (4, 1):
        # Read where Trainer's copy of the model keeps it: in the configuration they share.
        loss = twell.with_l1(model, **options)
        changes[batch] = trained(model, tmp_path, batch, loss) - plain
        parts = twell.with_l1(without, **options)
        assert torch.allclose(trained(without, tmp_path, batch, parts), plain, atol=1e-6)
    model.train()
    with twell.collect_l1(model) as terms:
        model(input_ids=ROWS)
    weights = torch.tensor([9, 9, 9, 4]) / 31
    for batch, expected in ((4, torch.full((4,), 0.25)), (1, weights)):
        model.zero_grad()
        per_token = torch.stack([l1 for _, l1 in terms.terms]).mean(0)
        (-0.5 * (per_token.mean(1) * expected).sum()).backward(retain_graph=True)
        step = torch.cat(
            [(0 * p if p.grad is None else p.grad).flatten() for p in model.parameters()]
        )
        assert step.any() and start.shape == step.shape
        torch.testing.assert_close(changes[batch], step, rtol=1e-4, atol=2e-6)


def test_a_loss_with_l1_needs_a_model_with_the_term_and_labels():
    with pytest.raises(ValueError, match="model is a Qwen2ForCausalLM, whose output has no L1 t"):
        twell.with_l1(twell.sparsify(stock("qwen2")))
    with pytest.raises(ValueError, match="labels is None"):
        twell.with_l1(make())(None, None)


def test_predictions_are_logits_alone(tmp_path):
    model, rows = make(), tokens(3, 6)
    arguments = TrainingArguments(str(tmp_path), report_to=[], use_cpu=True, disable_tqdm=True)
    trainer = Trainer(model, arguments)
    result = trainer.predict([{"input_ids": row, "labels": row} for row in rows])
    assert isinstance(result.predictions, np.ndarray)
    expected = model.eval()(input_ids=rows).logits
    np.testing.assert_allclose(result.predictions, expected.detach(), rtol=1e-4, atol=1e-5)
