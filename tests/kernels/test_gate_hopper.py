"""The gate for Hopper without a GPU: its roles against a model of the barriers, and its choice.

The model runs the Python code of the roles themselves. Roles take turns at random, one operation at
a time, and copies land at random. tests/gpu/test_gate.py compares results on a GPU.
"""

from __future__ import annotations

import random
from types import FunctionType, SimpleNamespace
from unittest.mock import MagicMock

import greenlet
import pytest
import torch

pytest.importorskip("triton")
pytest.importorskip("triton.experimental.gluon")

from twell.kernels import gate, gate_hopper, options

ROWS, COLUMNS, STEP, STAGES = 128, 256, 64, 3
BY_NEURON = True


class Wrong(Exception):
    """What a GPU would do wrong."""


class Barrier:
    """Completes a phase by `count` arrivals, or by the bytes that it expects."""

    def __init__(self, name: str, count: int):
        self.name, self.count, self.arrived, self.phases, self.bytes = name, count, 0, 0, 0

    def passes(self, parity: int) -> bool:
        return self.phases % 2 != parity


class Buffer:
    """A place in shared memory: which block it holds, and the products that read it."""

    dtype = SimpleNamespace(primitive_bitwidth=16)

    def __init__(self, size):
        self.size, self.block, self.readers = size, None, 0

    def permute(self, order):
        return self

    def slice(self, start, length):
        return self


class Several(list):
    dtype = Buffer.dtype
    index = list.__getitem__


class Sum:
    """A tile's accumulators: the products in them, and those that still run."""

    def __init__(self):
        self.products, self.running = [], []

    def to(self, dtype):
        return self


class Program:
    """One program of the kernel. Waits for the barriers named in `ignored` return at once."""

    def __init__(self, number, tiles, num_steps, seed, ignored=()):
        self.random, self.ignored, self.number = random.Random(seed), ignored, number
        self.copies, self.stored, self.main = [], [], greenlet.getcurrent()
        full, empty = (
            Several(Barrier(f"{name}[{i}]", count) for i in range(STAGES))
            for name, count in (("full", 1), ("empty", 2))
        )
        buffers = (Several(Buffer(size) for _ in range(STAGES)) for size in (ROWS, COLUMNS))
        ring = *buffers, full, empty
        outputs = SimpleNamespace(dtype=None), None, None
        work = ring, tiles, (None,) * 5, outputs, None, None, num_steps
        descs = [
            SimpleNamespace(block_shape=[size, STEP], dtype=Buffer.dtype, name=name)
            for name, size in (("rows", ROWS), ("columns", COLUMNS))
        ]
        model = self.model()

        def role(kernel, *arguments):
            function = FunctionType(kernel.fn.__code__, model)
            return greenlet.greenlet(lambda: function(*arguments))

        # Each with the condition on which it goes on.
        loads = descs, ring, tiles, num_steps * STEP, 8, STAGES, BY_NEURON
        self.roles = {role(gate_hopper.loader, *loads): lambda: True}
        for half in (0, 1):
            given = work, 8, STAGES, BY_NEURON, 0, half
            self.roles[role(gate_hopper.consumer, *given)] = lambda: True

    def model(self):
        """What the roles' code calls, with the model in place of Gluon."""
        names = {name: getattr(self, name) for name in ("wait", "arrive", "expect")}
        tma = SimpleNamespace(async_copy_global_to_shared=self.copy, store_wait=lambda n: None)
        gl = SimpleNamespace(program_id=lambda axis: self.number, minimum=min)
        gl.float32 = gl.int32 = None
        gl.static_range, gl.zeros = range, lambda *given: Sum()
        model = dict(gl=gl, tma=tma, mbarrier=SimpleNamespace(**names), store_panel=self.store)
        model |= dict(warpgroup_mma=self.multiply, warpgroup_mma_wait=self.finish)
        model |= dict(product_layout=lambda *given: None, ROW_LAYOUT=None)
        model |= dict(gate_value=lambda acc, *given: acc)
        model |= dict(panels_of=lambda acc, bits: [acc] * 4, range=range, tl=gl)
        for name in ("tile_of", "place_of", "multiply", "release", "store_part"):
            model[name] = FunctionType(getattr(gate_hopper, name).fn.__code__, model)
        return model

    def run(self) -> list:
        """Stored panels: row, column and products. Raises Wrong."""
        while self.roles:
            able = [role for role, condition in self.roles.items() if condition()]
            if not able + self.copies:
                raise Wrong("every role waits")
            choice = self.random.choice(able + self.copies)
            if choice in self.copies:
                self.land(choice)
                continue
            self.roles[choice] = choice.switch()
            if choice.dead:
                del self.roles[choice]
        return self.stored

    def pause(self, condition=lambda: True):
        """Lets others run, at least until the condition holds."""
        self.main.switch(condition)

    def wait(self, barrier, parity):
        if barrier.name not in self.ignored:
            self.pause(lambda: barrier.passes(parity))

    def arrive(self, barrier, count, pred=True):
        self.pause()
        barrier.arrived += bool(pred)
        if barrier.arrived == barrier.count:
            barrier.arrived, barrier.phases = 0, barrier.phases + 1

    def expect(self, barrier, size):
        if barrier.bytes:
            raise Wrong(f"{barrier.name} expects two copies at once")
        barrier.bytes = size

    def copy(self, desc, place, ready, buffer):
        self.pause()
        if buffer.readers:
            raise Wrong("a copy overwrites what a product reads")
        buffer.block = None
        self.copies.append((buffer, (desc.name, *place), ready))

    def land(self, copy):
        self.copies.remove(copy)
        buffer, block, ready = copy
        buffer.block = block
        ready.bytes -= buffer.size * STEP * 2
        ready.phases += not ready.bytes

    def multiply(self, rows, columns, acc, use_acc, is_async):
        self.pause()
        acc = acc if use_acc else Sum()
        acc.products.append((rows.block, columns.block))
        acc.running.append((rows, columns))
        for buffer in (rows, columns):
            buffer.readers += 1
        return acc

    def finish(self, pending, deps):
        """Waits until so many products run; they read their buffers until then."""
        self.pause()
        while len(deps[0].running) > pending:
            for buffer in deps[0].running.pop(0):
                buffer.readers -= 1
        return deps[0]

    def store(self, acc, i, row, column, *given):
        if acc.running:
            raise Wrong("a tile is stored while it is computed")
        for _ in range(self.random.choice((0, 40))):
            self.pause()
        self.stored.append((row, column, acc.products))


def run_programs(seed, num_steps, ignored=(), tiles=(5, 2), num_programs=2):
    """Raises Wrong unless every panel is stored once, as the sum of its products."""
    stored = []
    for number in range(num_programs):
        stored += Program(number, (*tiles, num_programs), num_steps, seed, ignored).run()
    expected = []
    for row in range(0, tiles[1] * ROWS, 64):
        for column in range(0, tiles[0] * COLUMNS, 64):
            first = row // ROWS * ROWS, column // COLUMNS * COLUMNS
            products = [
                (("rows", first[0], k), ("columns", first[1], k))
                for k in range(0, num_steps * STEP, STEP)
            ]
            expected.append((row, column, products))
    if sorted(stored, key=str) != sorted(expected, key=str):
        raise Wrong("a panel is missing, or the sum of other products")


@pytest.mark.parametrize("num_steps", [4, 7])
def test_roles_store_every_panel_in_any_order(num_steps):
    for seed in range(10):
        run_programs(seed, num_steps)
    run_programs(0, num_steps, tiles=(9, 3), num_programs=4)  # tiles for odd programs
    run_programs(0, num_steps, tiles=(1, 1), num_programs=1)


@pytest.mark.parametrize("ignored", ["full[1]", "empty[1]"])
def test_no_barrier_can_be_left_out(ignored):
    with pytest.raises(Wrong):
        for seed in range(20):
            run_programs(seed, 7, (ignored,))


# The choice between the kernels

ENOUGH = 256 * 6 - 127, 5632  # 264 tiles of 128 x 256, two for each of 132 multiprocessors
GIVEN = {"num_tokens": ENOUGH[0], "num_neurons": ENOUGH[1], "k": 256, "by_neuron": True}
GIVEN |= {"bias": False, "architecture": "sm_90", "version": "3.6.0", "interpret": False}
CHOICES = [
    (True, {}),
    (False, {"num_tokens": 256 * 5}),  # fewer than two tiles a multiprocessor
    (False, {"num_neurons": 43 * 128}),
    (False, {"k": 240}),
    (True, {"by_neuron": False}),
    (False, {"by_neuron": False, "bias": True}),
    *((False, {"architecture": name}) for name in ("sm_80", "sm_100", "gfx942", "cpu")),
    *((True, {"version": version}) for version in ("3.6.0+git9844da95", "3.7.1")),
    *((False, {"version": version}) for version in ("3.5.1", "3.8.0", "3.60.0", "3.10.0")),
    (False, {"interpret": True}),
]


@pytest.mark.parametrize(("expected", "changes"), CHOICES)
def test_hopper_takes_its_kernel_where_it_can(expected, changes, monkeypatch):
    """And `gate_bits` launches it, with results of its layout."""
    given, hopper, other = GIVEN | changes, MagicMock(), MagicMock()
    monkeypatch.setattr("triton.knobs.runtime.interpret", given["interpret"])
    monkeypatch.setattr("triton.__version__", given["version"])
    monkeypatch.setattr(options, "architecture", lambda device: given["architecture"])
    for module in (options, gate):
        monkeypatch.setattr(module, "num_processors", lambda device: 132)
    monkeypatch.setattr(gate, "gate_bits_kernel", other)
    monkeypatch.setattr(gate_hopper, "gate_hopper_kernel", hopper)
    tokens, neurons, by_neuron = given["num_tokens"], given["num_neurons"], given["by_neuron"]
    x, w = (torch.empty(n, given["k"], dtype=torch.bfloat16) for n in (tokens, neurons))
    bias = w[:, 0].contiguous() if given["bias"] else None
    chosen = {"by_neuron": by_neuron, "bias": given["bias"]}
    assert options.hopper_gate(tokens, w, torch.device("cpu"), **chosen) == expected
    if given["architecture"] != "cpu" and not given["interpret"]:
        g, bits = gate.gate_bits(x, w, bias, by_neuron=by_neuron)
        launches = [kernel.__getitem__.call_args_list for kernel in (hopper, other)]
        assert [bool(grids) for grids in launches] == [expected, not expected]
    if changes in ({}, {"by_neuron": False}):
        hopper.__getitem__.assert_called_once_with((132,))
        assert hopper[132].call_args.kwargs["BM"] == (256 if by_neuron else 128)
        shapes = ((24, 5632, 64), (48, 5632)) if by_neuron else ((1409, 5632), (1536, 176))
        assert (g.shape, bits.shape) == shapes
