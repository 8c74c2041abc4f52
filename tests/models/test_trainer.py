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


def test_predictions_are_logits_alone(tmp_path):
    model, rows = make(), tokens(3, 6)
    arguments = TrainingArguments(str(tmp_path), report_to=[], use_cpu=True, disable_tqdm=True)
    trainer = Trainer(model, arguments)
    result = trainer.predict([{"input_ids": row, "labels": row} for row in rows])
    assert isinstance(result.predictions, np.ndarray)
    expected = model.eval()(input_ids=rows).logits
    np.testing.assert_allclose(result.predictions, expected.detach(), rtol=1e-4, atol=1e-5)
