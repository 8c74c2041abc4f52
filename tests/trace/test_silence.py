"""The loss without a neuron, against models whose down projection has a column of zeros."""

import copy

import numpy as np
import pytest
import torch

from twell import models as model_module
from twell import trace
from twell.trace import silence

LENGTHS = (12, 12, 12, 5, 1, 9)
PREDICTED = np.array(LENGTHS) - 1


@pytest.fixture
def loaded(tiny_run):
    return model_module.load(tiny_run)


@pytest.fixture
def sequences():
    return [torch.randint(1, 320, (length,)).tolist() for length in LENGTHS]


def chosen_neurons(counts):
    """Three rare neurons, the one that fires most often, and a dead one where there is one."""
    rare = np.argwhere((counts > 0) & (counts <= counts[counts > 0].min() + 2))[:3]
    most = [np.unravel_index(counts.argmax(), counts.shape)]
    pairs = [*rare, *most, *np.argwhere(counts == 0)[:1]]
    return [tuple(map(int, pair)) for pair in pairs]


def losses(trace):
    return -np.nan_to_num(trace.logprob.astype(np.float64))


def without(model, layer, neuron):
    changed = copy.deepcopy(model)
    changed.ffns[layer].down_proj.weight.data[:, neuron] = 0
    return changed


def tokens_after_firings(traced, layer, neuron):
    fires = np.flatnonzero(np.diff(traced.layer(layer)[:, [neuron]].indptr))
    after = [token + 1 for token in fires if token + 1 < traced.num_tokens]
    return [token for token in after if traced.position[token] > 0]


def test_silenced_loss(loaded, sequences):
    model, tokenizer = loaded
    traced = trace.trace_tokens(model, tokenizer, sequences)
    counts = traced.neurons()[0]
    chosen = chosen_neurons(counts)
    model.train()
    table = trace.silenced_loss(model, sequences, chosen, batch=2)
    assert model.training
    model.eval()
    for row, (layer, neuron) in zip(table.itertuples(), chosen, strict=True):
        silent = trace.trace_tokens(without(model, layer, neuron), tokenizer, sequences)
        change = losses(silent) - losses(traced)
        mean = change.sum() / PREDICTED.sum()
        assert (row.layer, row.neuron, row.fires) == (layer, neuron, counts[layer, neuron])
        assert row.loss_change == pytest.approx(mean, abs=1e-6)
        by_sequence = np.array([change[traced.sequence == n].sum() for n in range(6)])
        spread = np.square(by_sequence - mean * PREDICTED).sum()
        stderr = np.sqrt(6 / 5 * spread) / PREDICTED.sum()
        assert row.stderr == pytest.approx(stderr, abs=1e-6)
        after = tokens_after_firings(traced, layer, neuron)
        expected = change[after].mean() if after else np.nan
        assert row.change_after == pytest.approx(expected, abs=1e-5, nan_ok=True)
    assert (table.loc[table["fires"] == 0, ["loss_change", "stderr"]] == 0).all(axis=None)
    assert table["loss_change"].abs().max() > 1e-5
    assert np.isnan(trace.silenced_loss(model, sequences[:1], chosen[:1])["stderr"]).all()


def test_bad_neurons_and_sequences_are_refused(loaded, sequences):
    model, _ = loaded
    with pytest.raises(IndexError, match="neuron 96 does not exist"):
        trace.silenced_loss(model, sequences, [(0, 0), (1, 96)])
    with pytest.raises(ValueError, match="no token is predicted"):
        trace.silenced_loss(model, [[1], [2]], [(0, 0)])


def test_progress_says_how_far_it_is(loaded, sequences, monkeypatch):
    clock = iter(range(0, 1000, 3))
    monkeypatch.setattr(silence.time, "perf_counter", lambda: next(clock))
    lines = []
    trace.silenced_loss(loaded[0], sequences, [(0, n) for n in range(4)], say=lines.append)
    assert lines == ["2 of 4 neurons  0:09 left", "4 of 4 neurons  0:00 left"]
