import copy

import numpy as np
import pytest
import torch

from tests.models.factories import make, tokens
from twell.models import silence


def test_silent_layers_add_nothing_to_the_residual_stream():
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


@pytest.mark.parametrize("backend", ["dense", "reference"])
@pytest.mark.parametrize("gated", [True, False])
def test_silent_neurons_add_nothing_and_blocks_nest(backend, gated):
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
        # The inner blocks restored the outer ones.
        torch.testing.assert_close(model(input_ids=x).logits, expected)
    assert all(ffn.muted is None and not ffn.silenced for ffn in model.ffns)
    assert torch.equal(model(input_ids=x).logits, plain) and not torch.allclose(plain, expected)


@pytest.mark.parametrize(
    ("error", "selection", "message"),
    [
        (IndexError, ([3],), "layer 3 does not exist: the model has SparseFFN layers 0 to 2"),
        (IndexError, (3, [0]), "layer 3 does not exist"),
        (IndexError, (1, [84]), "neuron 84 does not exist: the layer has neurons 0 to 83"),
        (IndexError, (1, [0, -1]), "neuron -1 does not exist"),
        (ValueError, ([1], [0]), r"neurons belong to one layer, .*layers is \[1\]"),
        (ValueError, (None, [0]), "neurons belong to one layer"),
    ],
)
@pytest.mark.parametrize("gated", [True, False])
def test_layers_and_neurons_that_do_not_exist_are_refused(error, selection, message, gated):
    model = make(gated_mlp=gated)
    with pytest.raises(error, match=message), silence(model, *selection):
        pass
    assert all(ffn.muted is None and not ffn.silenced for ffn in model.ffns)
