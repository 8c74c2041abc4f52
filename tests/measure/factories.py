"""Layers, masks, models and a fake profiler for the tests of twell.measure."""

import types

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from twell.measure import imposed, step
from twell.measure.case import Case
from twell.measure.patterns import synthetic_layer
from twell.models import SparseLlamaConfig
from twell.sparse import reference

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # of the kernels
K, N = 32, 96
TINY = "num_layers=3 hidden_size=32 intermediate_size=96 num_heads=2 vocab_size=320".split()
PEAKS = [
    {"metric": "copy bandwidth", "value": 4000.0, "unit": "GB/s"},
    {"metric": "matmul", "value": 800.0, "unit": "TFLOP/s"},
]


def relative(result, exact):
    return float((result.double() - exact.double()).norm() / exact.double().norm())


def counts_of(x, w_gate):
    """Active neurons of each token."""
    return (torch.relu(x.double() @ w_gate.double().t()) != 0).sum(1)


def fresh_mask(r, num_tokens, num_neurons):
    """Random rows with an empty one, a full one, and one with the first and last neuron alone."""
    mask = r.random((num_tokens, num_neurons)) < r.random((num_tokens, 1)) ** 3
    ends = np.isin(np.arange(num_neurons), (0, num_neurons - 1))
    for row, value in zip(r.permutation(num_tokens)[:3], (False, True, ends), strict=False):
        mask[row] = value
    return mask


def layer(num_tokens, gated, seed=0, active=9.0, device="cpu"):
    """x and weights in bf16."""
    options = {"active": active, "device": device, "seed": seed}
    x, w_gate, w_up, w_down = synthetic_layer(num_tokens, K, N, **options)
    return x, (w_gate, w_up, w_down) if gated else (None, w_gate, w_down)


def layer_step(num_tokens, gated, seed, active=9.0, device="cpu"):
    """x, weights, dy and dl1 in bf16."""
    x, weights = layer(num_tokens, gated, seed, active, device)
    g = torch.Generator(device).manual_seed(seed)
    dy = (step.DY * torch.randn(x.shape, generator=g, device=device)).bfloat16()
    return x, weights, dy, torch.full((num_tokens,), step.DL1, device=device)


def case(num_tokens, gated=True, active=9.0, weight_sets=1, device="cpu", seed=0):
    options = {"active": active, "device": device, "seed": seed}
    return Case.of("skewed", synthetic_layer(num_tokens, K, N, **options), gated, weight_sets)


def model(dtype=torch.bfloat16, seed=0, **changes):
    """A model of random weights, 4 layers of 192 neurons."""
    sizes = {"vocab_size": 640, "hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 4}
    sizes |= {"num_attention_heads": 4, "max_position_embeddings": 256}
    result = AutoModelForCausalLM.from_config(SparseLlamaConfig(**(sizes | changes)), dtype=dtype)
    imposed.draw_weights(result, seed)
    return result.eval()


def active_entries(model, tokens):
    """[T, N] bool of each layer."""
    layers = []

    def visit(_, ffn, x):
        layers.append(ffn.activations(x.flatten(0, 1))[0] != 0)

    with imposed.before_ffn(model, visit):
        model.model(input_ids=tokens, use_cache=False)
    return layers


def run(path, x, w_gate, w_up, w_down, *_, activity=None):
    """ops.run by dense products."""
    return reference.ffn(x, w_gate, w_up, w_down)


def train(path, capacity, x, w_gate, w_up, w_down, *biases, token_mask=None):
    """ops.train by dense products; NaN where the capacity does not suffice."""
    assert not any(bias is not None for bias in biases)
    y, l1 = step.dense(x, w_gate, w_up, w_down)
    g = torch.relu(x @ (w_up if w_gate is None else w_gate).t()).detach()
    counts = (g != 0).sum(1)
    needed = counts.sum().add(len(x) - 1) // len(x)
    y = y * torch.where(needed > capacity, float("nan"), 1.0).to(x.dtype)
    return step.training_ops().Trained(y, l1, counts.int(), (g != 0).sum(0).int(), needed)


class Graph:
    """Stands for a CUDA graph: replays its calls into the same outputs."""

    def __init__(self, calls):
        self.calls = calls
        self.outputs = [call() for call in calls]

    def replay(self):
        for index, call in enumerate(self.calls):
            result = call()
            if isinstance(self.outputs[index], torch.Tensor):
                self.outputs[index].copy_(result)


def capture(calls):
    graph = Graph(calls)
    return graph, graph.outputs


def event(key, count=1, total=0.0, start=0.0, ms=0.0, device="CUDA"):
    """A profiler's event, in both of its forms."""
    kind = getattr(torch.autograd.DeviceType, device)
    span = types.SimpleNamespace(start=start, elapsed_us=lambda: 1e3 * ms)
    fields = {"key": key, "name": key, "count": count, "self_device_time_total": total}
    return types.SimpleNamespace(**fields, time_range=span, device_type=kind)
