import copy

import pytest
import torch
from torch.nn.utils import parametrize, prune

from tests.sparse.layers import (
    DEVICE,
    make,
    make_auto,
    relative,
    triton_here,
)

# --- projections that are not what their weight says


class Scaled(torch.nn.Linear):
    """A subclass with a forward of its own."""

    def forward(self, x):
        return 1.5 * super().forward(x)


class Adapter(torch.nn.Module):
    """A low-rank adapter around a projection; as peft's, it hands on the weight that it stands
    around.
    """

    def __init__(self, base):
        super().__init__()
        self.base_layer = base
        options = {"bias": False, "dtype": base.weight.dtype, "device": base.weight.device}
        self.down = torch.nn.Linear(base.in_features, 2, **options)
        self.up = torch.nn.Linear(2, base.out_features, **options)

    @property
    def weight(self):
        return self.base_layer.weight

    @property
    def bias(self):
        return self.base_layer.bias

    def forward(self, x):
        return self.base_layer(x) + self.up(self.down(x))


class Int8(torch.nn.Linear):
    """Weights in eight bits, read with a scale."""

    def __init__(self, base):
        super().__init__(
            base.in_features, base.out_features, bias=base.bias is not None, dtype=base.weight.dtype
        )
        scale = base.weight.detach().abs().max() / 127
        self.weight = torch.nn.Parameter(
            (base.weight.detach() / scale).round().to(torch.int8), requires_grad=False
        )
        self.register_buffer("scale", 1.5 * scale)
        self.bias = base.bias

    def forward(self, x):
        return torch.nn.functional.linear(x, self.weight.to(x.dtype) * self.scale, self.bias)


def scaled(base):
    changed = Scaled(
        base.in_features, base.out_features, bias=base.bias is not None, dtype=base.weight.dtype
    )
    changed.load_state_dict(base.state_dict())
    return changed.to(base.weight.device)


def hooked(base):
    base.register_forward_hook(lambda module, args, y: 1.5 * y)
    return base


def hooked_before(base):
    base.register_forward_pre_hook(lambda module, args: (1.5 * args[0],))
    return base


def hooked_backward(base):
    base.register_full_backward_hook(lambda module, inputs, outputs: (2 * inputs[0],))
    return base


def own_forward(base):
    forward = base.forward
    base.forward = lambda x: 1.5 * forward(x)
    return base


def pruned(base):
    prune.random_unstructured(base, "weight", 0.5)
    with torch.no_grad():
        base.weight_orig.mul_(
            1.5
        )  # as an optimiser would; `weight` is stale until the module is called
    return base


def normed(base):
    with pytest.warns(FutureWarning):
        torch.nn.utils.weight_norm(base)
    with torch.no_grad():
        base.weight_g.mul_(1.5)
    return base


def parametrised(base):
    class Double(torch.nn.Module):
        def forward(self, weight):
            return 2 * weight

    parametrize.register_parametrization(base, "weight", Double())
    return base


CHANGES = {
    "adapter": Adapter,
    "subclass": scaled,
    "int8": lambda base: Int8(base).to(base.weight.device),
    "hook": hooked,
    "pre-hook": hooked_before,
    "backward hook": hooked_backward,
    "own forward": own_forward,
    "prune": pruned,
    "weight_norm": normed,
    "parametrisation": parametrised,
}

BACKENDS = [
    "reference",
    pytest.param("triton", marks=triton_here),
    pytest.param("auto", marks=triton_here),
]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("part", ["gate_proj", "up_proj", "down_proj"])
@pytest.mark.parametrize("change", CHANGES)
def test_projections_are_called_where_their_weight_is_not_all(change, part, backend):
    """Values, the L1 term, counts and gradients are those of the dense layer; the layer says what
    it does.
    """
    dense = make(bias=True, dtype=torch.bfloat16, sizes=(32, 48)).to(DEVICE)
    before = dense(x := torch.randn(5, 32, dtype=torch.bfloat16, device=DEVICE) / 8).detach()
    sparse = copy.deepcopy(dense)
    for ffn in (dense, sparse):
        torch.manual_seed(0)
        setattr(ffn, part, CHANGES[change](getattr(ffn, part)))
    sparse.backend = backend
    sparse.chooser.observe(1, 2)  # at which auto would take a sparse path
    results = []
    for ffn in (dense, sparse):
        ffn.record = True
        leaf = x.clone().requires_grad_()
        y = ffn(leaf)
        (y.float().square().sum() / 100 + ffn.l1.sum()).backward()
        results.append(
            [
                y,
                ffn.l1,
                leaf.grad,
                *ffn.stats.take(),
                *(p.grad for p in ffn.parameters() if p.requires_grad),
            ]
        )
        ffn.eval().record = False
        with torch.no_grad():
            results[-1].append(ffn(x))
    for expected, found in zip(*results, strict=True):
        assert torch.equal(found, expected)
    if change != "backward hook":
        assert relative(results[0][0], before) > 0.01
    assert (
        sparse.path == "dense"
        and not sparse.readable
        and f"path=dense ({part} is a" in repr(sparse)
    )
    assert sparse.plan == ((2**20, "dense"),) and "path=dense" not in repr(dense)


@triton_here
def test_hooks_that_come_and_go(taken):
    ffn = make_auto()
    ffn.backend = "triton"
    x = torch.randn(3, 32, dtype=torch.float16, device=DEVICE)
    with torch.no_grad():
        plain = ffn(x)
        handle = ffn.up_proj.register_forward_hook(lambda module, args, y: 0 * y)
        assert not ffn(x).any() and len(taken) == 1
        handle.remove()
        assert torch.equal(ffn(x), plain) and len(taken) == 2 and ffn.path is None and ffn.readable


@triton_here
def test_a_device_map_of_accelerate_does_not_make_it_dense(taken):
    """Its hooks move inputs; where they also fetch weights, the projections are called."""
    from accelerate.hooks import AlignDevicesHook, add_hook_to_module

    ffn = make_auto()
    ffn.backend = "triton"
    x = torch.randn(3, 32, dtype=torch.float16, device=DEVICE)
    with torch.no_grad():
        expected = ffn(x)
        device = x.device if x.is_cuda else torch.device("cpu")
        for part in (ffn, ffn.gate_proj, ffn.up_proj, ffn.down_proj):
            add_hook_to_module(part, AlignDevicesHook(execution_device=device))
        assert torch.equal(ffn(x), expected) and len(taken) == 2
        weights = {name: tensor.clone() for name, tensor in ffn.up_proj.state_dict().items()}
        add_hook_to_module(
            ffn.up_proj,
            AlignDevicesHook(execution_device=device, offload=True, weights_map=weights),
        )
        assert ffn.up_proj.weight.is_meta and ffn.path == "dense"
        assert relative(ffn(x), expected) < 2e-3 and len(taken) == 2


def test_tensor_parallel_shards_are_refused_where_they_would_be_miscounted():
    ffn = make()
    ffn.up_proj, ffn.gate_proj = torch.nn.Linear(24, 35).double(), torch.nn.Linear(24, 35).double()
    ffn.down_proj = torch.nn.Linear(35, 24).double()
    with pytest.raises(
        ValueError, match="returns 35 neurons, and the layer has 70: of tensor-parallel shards"
    ):
        ffn(torch.randn(2, 24).double())


def test_hooks_for_all_modules_are_called_too():
    ffn = make(backend="reference").eval()
    x = torch.randn(3, 24, dtype=torch.float64)
    handle = torch.nn.modules.module.register_module_forward_hook(
        lambda module, args, y: 0 * y if module is ffn.up_proj else None
    )
    try:
        with torch.no_grad():
            assert not ffn(x).any() and "path=dense (every module has hooks)" in repr(ffn)
    finally:
        handle.remove()
    with torch.no_grad():
        assert ffn(x).any() and ffn.readable


@pytest.mark.parametrize("adapter", [False, True])
def test_directions_are_columns_of_the_down_projection(adapter):
    ffn = make(bias=True)
    if adapter:
        ffn.down_proj = Adapter(ffn.down_proj)
    h = torch.zeros(70, dtype=torch.float64)
    zero = ffn.down_proj(h).detach()
    h[13] = 2
    torch.testing.assert_close(ffn.direction(13), (ffn.down_proj(h).detach() - zero) / 2)
    assert ffn.direction(13).shape == (24,)
