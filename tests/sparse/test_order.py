import copy

import pytest
import torch

from tests.factories import SEED
from tests.factories.sparse import make, make_auto, positive, relative, triton_here, watched
from twell.sparse.order import TokenOrder, similar_side_by_side


@pytest.mark.parametrize("training", [False, True])
def test_a_layer_computes_the_same_in_any_order(training):
    ffn = make(bias=True, backend="reference").train(training)
    other = copy.deepcopy(ffn)
    other.token_order = TokenOrder.by(torch.arange(2 * 35) * 7 % 11)
    x = torch.randn(2, 35, 24, dtype=torch.float64)
    results = []
    for layer in (ffn, other):
        given = x.clone().requires_grad_()
        y, l1 = watched(layer, given, counts=True)
        loss = (y * x).sum() + (l1 * x[..., 0]).sum() if training else (y * x).sum()
        loss.backward()
        results.append([y, given.grad, *(p.grad for p in layer.parameters())])
        results[-1] += [l1] if training else []
    for expected, computed in zip(*results, strict=True):
        assert relative(computed, expected) < 1e-12
    assert all(map(torch.equal, ffn.stats.take(), other.stats.take()))


def test_an_order_is_used_only_for_its_tokens():
    ffn, x = make(backend="reference").eval(), torch.randn(5, 24, dtype=torch.float64)
    expected = ffn(x)
    ffn.token_order = TokenOrder.by(torch.tensor([2, 0, 1, 0, 2]))
    assert relative(ffn(x[:4]), expected[:4]) < 1e-12  # of another call
    mask = torch.tensor([1, 1, 1, 0, 1])  # is in text order
    watched(ffn, x, counts=True, token_mask=mask)
    assert int(ffn.stats.take()[0].sum()) == int((ffn.activations(x)[0] != 0)[mask.bool()].sum())


@triton_here
def test_kernels_see_the_tokens_in_order(taken):
    ffn, x = make_auto(), positive(128)
    with torch.no_grad():  # which three neurons are active depends on the sign of a token
        ffn.up_proj.weight.copy_(ffn.up_proj.weight.abs())
    x[::2] *= -1
    ffn.backend, ffn.path = "triton", "union"
    order = TokenOrder.by((x[:, 0] < 0).long())
    with torch.no_grad():
        y = ffn(x)
        ffn.token_order = order
        assert relative(ffn(x), y) < 1e-3 and taken == ["union", "union"]
        unions = []
        for ffn.backend, ffn.token_order in (("auto", None), ("auto", order)):
            ffn.chooser.freeze(None)  # counts anew
            ffn.observe(0, 0)  # so few that the path is the union, which counts
            for _ in range(3):
                ffn(x)
            unions.append(ffn.observed[1])
        assert unions[0] == 70 and unions[1] < 40


def test_similar_vectors_are_side_by_side():
    g = torch.Generator().manual_seed(SEED)
    centres, of = torch.randn(8, 32, generator=g), torch.arange(400) % 8
    vectors = centres[of] + 0.05 * torch.randn(400, 32, generator=g)
    places = similar_side_by_side(vectors, clusters=40)
    assert sorted(places.tolist()) == list(range(400))
    listed = of[places.argsort()]
    assert int((listed[1:] != listed[:-1]).sum()) == 7  # each cluster in one piece
    assert torch.equal(places, similar_side_by_side(vectors, clusters=40))
    vectors[3], vectors[5, 2] = 0, float("nan")
    for some in (vectors, vectors[:1], vectors[:, :1], torch.zeros(5, 4)):
        assert sorted(similar_side_by_side(some).tolist()) == list(range(len(some)))
