"""Layers, masks and models of the measurements, and a clock that needs no GPU."""

from functools import partial

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from tests.factories import SEED
from tests.factories.sparse import FakeKernels
from twell.measure import imposed, runner
from twell.measure.check import hooked
from twell.measure.imposed import synthetic_layer
from twell.measure.layer import Case
from twell.models import SparseLlamaConfig, sparse_ffns
from twell.sparse import float8, ops, reference
from twell.sparse.activations import RELU

K, N = 32, 96
SIZES = {"hidden_size": K, "intermediate_size": N}
TINY = "num_layers=3 hidden_size=32 intermediate_size=96 num_heads=2 vocab_size=320".split()


class FakeGpu(runner.Gpu):
    """A clock of our own: calls run on the CPU, and take the ms by which they move `now`, or one.

    Power is 20 W. `timed` has the calls that were timed; `shown` the kernels of each call.
    """

    device = torch.device("cpu")

    def __init__(self):
        self.meter, self.now, self.timed = None, 0.0, []
        self.bytes, self.shown = iter(range(1000, 10**12, 500_000)), lambda call: []

    def spend(self, ms):
        self.now += ms

    def flushed_times(self, run, budget):
        return self.replay_times(run, 2, lead=0)

    def replay_times(self, run, number, lead=None):
        times, lead = [], runner.LEAD if lead is None else lead
        for _ in range(lead + number):
            start = self.now
            run()
            times.append(self.now - start or 1.0)
            self.now = start + times[-1]
        self.timed.append(run)
        return np.array(times[lead:])

    def capture(self, calls):
        outputs = [call() for call in calls]

        def replay():
            for output, call in zip(outputs, calls, strict=True):
                one, other = (x if isinstance(x, tuple) else (x,) for x in (output, call()))
                for old, new in zip(one, other, strict=True):
                    old.copy_(new)

        return replay, outputs

    def metered(self, run):
        start = self.now
        result, seconds = run(), (self.now - start) / 1e3 or 1e-3
        return result, 2e4 * seconds, seconds

    def allocated(self):
        return next(self.bytes)

    def peak(self, run):
        before = self.allocated()
        run()
        return before, self.allocated()

    def kernels(self, calls, rounds):
        shown = [kernel for _ in range(rounds) for call in calls for kernel in self.shown(call)]
        return [(name, 1, ms) for name, ms in shown]


def counts_of(x, w_gate):
    """Active neurons of each token."""
    return (torch.relu(x.double() @ w_gate.double().t()) != 0).sum(1)


def case(num_tokens, gated=True, active=9.0, kind=Case, **options):
    inputs = synthetic_layer(num_tokens, K, N, active=active, device="cpu", seed=SEED)
    return kind(FakeGpu(), "skewed", inputs, gated=gated, **options)


def model(dtype=torch.bfloat16, **changes):
    """A model of random weights, 4 layers of 192 neurons."""
    sizes = {"vocab_size": 640, "hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 4}
    sizes |= {"num_attention_heads": 4, "max_position_embeddings": 256}
    result = AutoModelForCausalLM.from_config(SparseLlamaConfig(**(sizes | changes)), dtype=dtype)
    imposed.draw_weights(result, SEED)
    return result.eval().requires_grad_(False)


def active_entries(model, tokens):
    """[T, N] bool of each layer."""
    layers = []

    def visit(_, ffn, inputs):
        layers.append(ffn.activations(inputs[0].flatten(0, 1))[0] != 0)

    with hooked(sparse_ffns(model), visit, before=True), torch.no_grad():
        model.model(input_ids=tokens, use_cache=False)
    return layers


def run(path, x, *tensors, activity=None, act=RELU):
    """The sparse paths by dense products."""
    if tensors[1].dtype == float8.FLOAT8:
        weights, x_scale = ops.weights_of(act.name, act.threshold, *tensors)
        return float8.ffn(x, weights, x_scale)
    return reference.ffn(x, *tensors, act=act)


train = FakeKernels(noise=0)  # sparse training, by dense products too


# Third parties' layers, as `twell measure --provider tests.factories.measure:NAME` takes them.


def plain(w_gate, w_up, w_down, factor=1.0):
    def call(x):
        h = reference.activations(x, w_gate, w_up)[1]
        y = factor * (h @ w_down.t())
        return (y, h.abs().sum(1, dtype=torch.float32)) if w_up.requires_grad else y

    return call


wrong, empty = partial(plain, factor=1.4), partial(plain, factor=float("nan"))


def refusing(*weights):
    raise RuntimeError(f"K is {weights[1].shape[1]}; this layer needs 2048")


def narrow(*weights):
    return lambda x: x[:, 1:]
