"""The validation loss is a mean over all tokens and leaves counters alone."""

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from twell.models import SparseLlamaForCausalLM
from twell.train.validation import evaluate


def test_evaluate_is_the_mean_over_all_tokens(tiny_run, tiny_config):
    model = AutoModelForCausalLM.from_pretrained(tiny_run / "model").eval()
    _, _, blocks = tiny_config.prepare_text()
    losses = []
    for number in range(len(blocks)):
        x = blocks.draw([number])
        logits = model(input_ids=x).logits[0, :-1].detach()
        losses += torch.nn.functional.cross_entropy(logits, x[0, 1:], reduction="none").tolist()
    for batch in (1, 3, 64):
        loss = evaluate(model, blocks, batch)["cross_entropy"]
        assert loss == pytest.approx(np.mean(losses), rel=1e-6)
    assert not model.training and not model.recording


def counters(model):
    return [(ffn.stats.neuron_counts, ffn.stats.histogram) for ffn in model.ffns]


def test_an_evaluation_leaves_counters_as_they_were(tiny_config):
    model = SparseLlamaForCausalLM(tiny_config.model_config())
    _, _, blocks = tiny_config.prepare_text()
    evaluate(model, blocks)
    assert counters(model) == [(None, None)] * 2
    model.train()(input_ids=blocks.draw([0]))
    counted = counters(model)
    evaluate(model, blocks)
    for now, before in zip(counters(model), counted, strict=True):
        assert now[0] is before[0] and now[1] is before[1]
    assert counted[0][1].sum() == tiny_config.context
