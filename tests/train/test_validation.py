"""The validation loss is a mean over all tokens and leaves counters alone."""

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from twell.model import SparseLlamaForCausalLM
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
        assert evaluate(model, blocks, batch)["cross_entropy"] == pytest.approx(
            np.mean(losses), rel=1e-6
        )
    assert not model.training and not model.recording


def test_an_evaluation_leaves_counters_as_they_were(tiny_config):
    model = SparseLlamaForCausalLM(tiny_config.model_config())
    _, _, blocks = tiny_config.prepare_text()
    evaluate(model, blocks)
    assert all(
        ffn.stats.histogram is None and ffn.stats.neuron_counts is None for ffn in model.ffns
    )
    model.train()(input_ids=blocks.draw([0]))
    counted = [(ffn.stats.neuron_counts, ffn.stats.histogram) for ffn in model.ffns]
    evaluate(model, blocks)
    assert all(
        a is b
        for ffn, pair in zip(model.ffns, counted, strict=True)
        for a, b in zip((ffn.stats.neuron_counts, ffn.stats.histogram), pair, strict=True)
    )
    assert counted[0][1].sum() == tiny_config.context
