"""Projections that are not what their weight says: the layer calls them.

tests/models/test_adapters.py has the adapters of peft.
"""

import copy

import pytest
import torch
from torch.nn.utils import prune

from tests.factories.sparse import DEVICE, make, make_auto, positive, relative, triton_here, watched


class Scaled(torch.nn.Linear):
    """A subclass with a forward of its own."""

    def forward(self, x):
        return 1.5 * super().forward(x)


def subclass(base):
    base.__class__ = Scaled


def own_forward(base):
    forward = base.forward
    base.forward = lambda x: 1.5 * forward(x)


def pruned(base):
    prune.random_unstructured(base, "weight", 0.5)
    base.weight_orig.data.mul_(1.5)  # as an optimiser would; `weight` is stale until a call


CHANGES = {
    "subclass": subclass,
    "hook": lambda base: base.register_forward_hook(lambda module, args, y: 1.5 * y),
    "pre-hook": lambda base: base.register_forward_pre_hook(lambda module, a: (1.5 * a[0],)),
    "backward hook": lambda base: base.register_full_backward_hook(lambda m, dx, dy: (2 * dx[0],)),
    "own forward": own_forward,
    "prune": pruned,
}


@pytest.mark.parametrize(
    ("part", "backend"),
    [
        ("gate_proj", "reference"),
        pytest.param("up_proj", "triton", marks=triton_here),
        pytest.param("down_proj", "auto", marks=triton_here),
    ],
)
@pytest.mark.parametrize("change", CHANGES)
def test_projections_are_called_where_their_weight_is_not_all(change, part, backend):
    """Values, L1 term, counts and gradients are the dense layer's, and `repr` says so."""
    dense = make(bias=True, dtype=torch.bfloat16, sizes=(32, 48)).to(DEVICE)
    before = dense(x := torch.randn(5, 32, dtype=torch.bfloat16, device=DEVICE) / 8).detach()
    sparse = copy.deepcopy(dense)
    for ffn in (dense, sparse):
        torch.manual_seed(0)
        CHANGES[change](getattr(ffn, part))
    sparse.backend = backend
    sparse.observe(1, 2)  # at which auto would take a sparse path
    results = []
    for ffn in (dense, sparse):
        leaf = x.clone().requires_grad_()
        y, l1 = watched(ffn, leaf, counts=True)
        (y.float().square().sum() / 100 + l1.sum()).backward()
        gradients = [p.grad for p in ffn.parameters() if p.requires_grad]
        with torch.no_grad():
            again = ffn.eval()(x)
        results.append([y, l1, leaf.grad, *ffn.stats.take(), *gradients, again])
    for expected, result in zip(*results, strict=True):
        assert torch.equal(result, expected)
    assert change == "backward hook" or relative(results[0][0], before) > 0.01
    assert sparse.path == "dense" and not sparse.readable
    assert f"path=dense ({part} is a" in repr(sparse) and "path=dense" not in repr(dense)
    assert sparse.plans["eager"] == ((2**20, "dense"),)


@pytest.mark.parametrize("compiled", [False, True])
def test_a_projection_of_another_class_is_said_once(compiled):
    """As servers do that put linear layers of their own in place."""
    ffn, x = make(sizes=(32, 48)).eval(), torch.randn(2, 32).double()
    ffn.backend = "reference"
    name = f"ColumnParallelLinear{compiled}"  # once for each class
    ffn.up_proj.__class__ = type(name, (torch.nn.Linear,), {})
    call = torch.compile(ffn, fullgraph=True, backend="eager") if compiled else ffn
    with torch.no_grad(), pytest.warns(UserWarning, match=f"up_proj is a .*{name}") as caught:
        call(x), call(x)
    assert len(caught) == 1


@triton_here
def test_hooks_that_come_and_go_and_a_device_map_of_accelerate(taken):
    """Accelerate's hooks move inputs; where they also fetch weights, projections are called."""
    from accelerate.hooks import AlignDevicesHook, add_hook_to_module

    ffn, x = make_auto(), positive(3)
    ffn.backend, ffn.path = "triton", "union"
    with torch.no_grad():
        plain = ffn(x)
        handle = ffn.up_proj.register_forward_hook(lambda module, args, y: 0 * y)
        assert not ffn(x).any() and len(taken) == 1
        handle.remove()
        assert torch.equal(ffn(x), plain) and len(taken) == 2
        assert ffn.path == "union" and ffn.readable
        for part in (ffn, ffn.gate_proj, ffn.up_proj, ffn.down_proj):
            add_hook_to_module(part, AlignDevicesHook(execution_device=x.device))
        assert torch.equal(ffn(x), plain) and len(taken) == 3
        weights = {name: tensor.clone() for name, tensor in ffn.up_proj.state_dict().items()}
        hook = AlignDevicesHook(execution_device=x.device, offload=True, weights_map=weights)
        add_hook_to_module(ffn.up_proj, hook)
        assert ffn.up_proj.weight.is_meta and ffn.path == "dense"
        assert relative(ffn(x), plain) < 2e-3 and len(taken) == 3


def test_hooks_for_all_modules_are_called_too():
    ffn, x = make(backend="reference").eval(), torch.randn(3, 24, dtype=torch.float64)
    handle = torch.nn.modules.module.register_module_forward_hook(
        lambda module, args, y: 0 * y if module is ffn.up_proj else None
    )
    with torch.no_grad():
        try:
            assert not ffn(x).any() and "path=dense (every module has hooks)" in repr(ffn)
        finally:
            handle.remove()
        assert ffn(x).any() and ffn.readable
