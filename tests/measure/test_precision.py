"""What FP8 costs in cross-entropy: every row against the loss of a model made otherwise."""

import copy

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn

from tests.factories import SEED, measure
from twell.measure import imposed
from twell.measure.precision import quality
from twell.measure.rows import COLUMNS
from twell.sparse import float8

NAMES = "dense eager,dense FP8 eager,reference FP8,dense FP8 all eager,reference FP8 all".split(",")
FFN, ATTENTION = ("gate_proj", "up_proj", "down_proj"), ("q_proj", "k_proj", "v_proj", "o_proj")
IN_FP8 = (), FFN, FFN[:2], FFN + ATTENTION, FFN[:2] + ATTENTION  # projections by row


class Rounded(nn.Module):
    """A linear layer whose input and weight are rounded to FP8 and back."""

    def __init__(self, part):
        super().__init__()
        self.weight = float8.wide(*float8.quantize(part.weight)).float()

    def forward(self, x):
        rows = float8.wide(*float8.quantize(x.flatten(0, -2))).float()
        return (rows @ self.weight.t()).bfloat16().view(*x.shape[:-1], -1)


def exact(model, sequences, names):
    """The summed loss of each sequence, with these projections of every layer in FP8."""
    model = copy.deepcopy(model)
    for layer in model.model.layers:
        for name in names:
            module = layer.mlp if name in FFN else layer.self_attn
            setattr(module, name, Rounded(getattr(module, name)))
    losses = []
    for sequence in sequences:
        ids = torch.tensor([sequence])
        with torch.no_grad():
            logits = model(input_ids=ids).logits[0, :-1].double()
        losses.append(float(nn.functional.cross_entropy(logits, ids[0, 1:], reduction="sum")))
    return np.array(losses)


def test_rows_are_the_losses_of_quantised_models(tmp_path):
    model = measure.model(max_position_embeddings=64)
    imposed.impose(model, [20.0] * 4, imposed.draw_tokens(640, 8, 64))
    tokens = imposed.draw_tokens(640, 12, 30, seed=SEED).tolist()
    sequences = [*tokens[:9], *(row[:11] for row in tokens[9:]), [5]]
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    rows = quality("tiny", model, sequences, source="x", out=tmp_path)
    table = pd.read_csv(tmp_path / "quality.csv").set_index("provider")
    assert list(table.index) == NAMES and all(list(row) == COLUMNS["quality"] for row in rows)
    state = model.state_dict()
    assert list(state) == list(before) and model.config.ffn_backend == "dense"
    assert all(torch.equal(state[name], before[name]) for name in before)

    known = sequences[:-1]  # the last one has nothing to predict
    predicted = np.array([len(sequence) - 1 for sequence in known])
    assert (table["tokens"] == predicted.sum()).all() and (table["sequences"] == len(known)).all()
    losses = [exact(model, known, names) for names in IN_FP8]
    means = [loss.sum() / predicted.sum() for loss in losses]
    assert np.allclose(table["cross_entropy"], means, atol=2e-4)
    assert np.allclose(table["difference"], table["cross_entropy"] - means[0], atol=2e-4)
    for one, other in ((1, 2), (3, 4)):
        distance = table["cross_entropy"].iloc[other] - table["cross_entropy"].iloc[one]
        assert table["dense_difference"].iloc[other] == pytest.approx(distance, abs=1e-5)
    assert (table["difference"].iloc[1:].abs() > 1e-6).all()
    assert (table.filter(like="dense_").iloc[[0, 1, 3]] == 0).all(axis=None)
    assert (table["active"] - 20).abs().max() < 6
    # The interval of different sequences has about normal's width.
    rows = pd.DataFrame(quality("tiny", model, sequences[:9]))
    width = 2 * 1.96 * ((losses[1] - losses[0])[:9] / 29).std() / 3
    assert rows["high"][1] - rows["low"][1] == pytest.approx(width, rel=0.25)
    with pytest.raises(ValueError, match="at least two sequences"):
        quality("tiny", model, [sequences[0], [3]])
