"""The gate for Hopper without a GPU: its roles against a model of the barriers, and its choice.

The model runs the Python code of the roles themselves. Roles take turns at random, one operation at
a time, and copies land at random. tests/gpu/test_gate.py compares results on a GPU.
"""

from __future__ import annotations

import random
import threading
from types import FunctionType, SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")
pytest.importorskip("triton.experimental.gluon")

from twell.kernels import gate, gate_hopper, options

BLOCK, STEP, STAGES = 128, 64, 3
BARRIERS = ("full", "empty", "order")


class Wrong(Exception):
    """What a GPU would do wrong."""


class Barrier:
    """Completes a phase by an arrival, or by the bytes that it expects."""

    def __init__(self, name: str):
        self.name, self.phases, self.bytes = name, 0, 0

    def passes(self, parity: int) -> bool:
        return self.phases % 2 != parity


class Buffer:
    """A place in shared memory: which block it holds, and the products that read it."""

    shape, dtype = (STAGES, BLOCK, STEP), SimpleNamespace(primitive_bitwidth=16)

    def __init__(self):
        self.block, self.readers = None, 0

    def permute(self, order):
        return self


class Several(list):
    shape, dtype = Buffer.shape, Buffer.dtype
    index = list.__getitem__


class Program:
    """One program of the kernel. Waits for the barriers named in `ignored` return at once."""

    def __init__(self, number, tiles, num_steps, seed, ignored=()):
        self.random, self.ignored, self.number = random.Random(seed), ignored, number
        self.copies, self.stored, self.error, self.waiting = [], [], None, {}
        self.main = threading.Semaphore(0)
        full, empty = (
            Several(Barrier(f"{name}[{i}]") for i in range(STAGES)) for name in BARRIERS[:2]
        )
        order = Several(Barrier(f"order[{i}]") for i in range(2))
        ring = *(Several(Buffer() for _ in range(STAGES)) for _ in "wx"), full, empty
        work = ring, order, tiles, (None,) * 4, None, None, None, num_steps
        w_desc, x_desc = (
            SimpleNamespace(block_shape=[BLOCK, STEP], dtype=Buffer.dtype, name=name)
            for name in "wx"
        )
        roles = [(gate_hopper.consumer, (work, None, None, 8, STAGES, turn)) for turn in (0, 1)]
        loads = w_desc, x_desc, ring, tiles, num_steps * STEP, 8, STAGES
        self.roles = [
            threading.Thread(target=self.role, args=role, daemon=True)
            for role in (*roles, (gate_hopper.loader, loads))
        ]

    def run(self) -> list:
        """Stored tiles: neuron, token and products. Raises Wrong."""
        for role in self.roles:
            self.waiting[role] = threading.Semaphore(0), lambda: True
            role.start()
        while self.waiting and not self.error:
            able = [turn for turn, condition in self.waiting.values() if condition()]
            choices = able + self.copies
            if not choices:
                raise Wrong("every role waits")
            choice = self.random.choice(choices)
            if choice in self.copies:
                self.land(choice)
            else:
                choice.release()
                self.main.acquire()
        if self.error:
            raise self.error
        return self.stored

    def role(self, kernel, arguments):
        """Runs a role in its thread, with the model in place of Gluon."""
        names = {name: getattr(self, name) for name in ("wait", "arrive", "expect")}
        tma = SimpleNamespace(async_copy_global_to_shared=self.copy, store_wait=lambda n: None)
        gl = SimpleNamespace(
            program_id=lambda axis: self.number,
            minimum=min,
            float32=None,
            zeros=lambda *given: SimpleNamespace(products=[], running=[]),
        )
        model = dict(gl=gl, tma=tma, mbarrier=SimpleNamespace(**names), store_tile=self.store)
        model |= dict(warpgroup_mma=self.multiply, warpgroup_mma_wait=self.finish)
        model |= dict(product_layout=lambda *given: None, range=range)
        model["tile_of"] = FunctionType(gate_hopper.tile_of.fn.__code__, model)
        turn, _ = self.waiting[threading.current_thread()]
        turn.acquire()
        try:
            FunctionType(kernel.fn.__code__, model)(*arguments)
        except Wrong as error:
            self.error = error
        del self.waiting[threading.current_thread()]
        self.main.release()

    def pause(self, condition=lambda: True):
        """Lets others run, at least until the condition holds."""
        thread = threading.current_thread()
        turn, _ = self.waiting[thread]
        self.waiting[thread] = turn, condition
        self.main.release()
        turn.acquire()

    def wait(self, barrier, parity):
        if barrier.name not in self.ignored:
            self.pause(lambda: barrier.passes(parity))

    def arrive(self, barrier, count, pred=True):
        self.pause()
        barrier.phases += bool(pred)

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
        ready.bytes -= BLOCK * STEP * 2
        ready.phases += not ready.bytes

    def multiply(self, w, x, acc, use_acc, is_async):
        self.pause()
        if use_acc != bool(acc.products):
            raise Wrong("a tile does not begin with its first product")
        acc.products.append((w.block, x.block))
        acc.running.append((w, x))
        for buffer in (w, x):
            buffer.readers += 1
        return acc

    def finish(self, pending, deps):
        """Waits until so many products run; they read their buffers until then."""
        self.pause()
        while len(deps[0].running) > pending:
            for buffer in deps[0].running.pop(0):
                buffer.readers -= 1
        return deps[0]

    def store(self, acc, bits, buffer, neuron, token, *given):
        for _ in range(self.random.choice((0, 40))):
            self.pause()
        self.stored.append((neuron, token, acc.products))


def run_programs(seed, num_steps, ignored=(), tiles=(5, 2), num_programs=2):
    """Raises Wrong unless every tile is stored once, as the sum of its products."""
    stored = []
    for number in range(num_programs):
        stored += Program(number, (*tiles, num_programs), num_steps, seed, ignored).run()
    steps = range(0, num_steps * STEP, STEP)
    expected = [
        (neuron, token, [(("w", neuron, k), ("x", token, k)) for k in steps])
        for neuron in range(0, tiles[1] * BLOCK, BLOCK)
        for token in range(0, tiles[0] * BLOCK, BLOCK)
    ]
    if sorted(stored, key=str) != sorted(expected, key=str):
        raise Wrong("a tile is missing, or the sum of other products")


@pytest.mark.parametrize("num_steps", [1, 2, 3, 4, 7])
def test_roles_store_every_tile_in_any_order(num_steps):
    for seed in range(5):
        run_programs(seed, num_steps)
        run_programs(seed, num_steps, tiles=(9, 3), num_programs=4)  # tiles for odd programs
    run_programs(0, num_steps, tiles=(1, 1), num_programs=1)


@pytest.mark.parametrize(
    "ignored", [("order[0]",), ("order[1]",), ("full[1]",), ("empty[1]",)], ids=str
)
def test_no_barrier_can_be_left_out(ignored):
    with pytest.raises(Wrong):
        for seed in range(20):
            run_programs(seed, 7, ignored)


# The choice between the kernels

ENOUGH = 128 * 6 - 127, 5632  # 6 x 44 tiles of 128, two for each of 132 multiprocessors


@pytest.fixture
def hopper(monkeypatch):
    """An H200 with Triton 3.6, as far as the choice can see."""
    monkeypatch.setattr("triton.knobs.runtime.interpret", False)
    monkeypatch.setattr("triton.__version__", "3.6.0")
    monkeypatch.setattr(options, "architecture", lambda device: "sm_90")
    monkeypatch.setattr(options, "num_processors", lambda device: 132)
    monkeypatch.setattr(options, "has_small_cache", lambda device: False)
    return monkeypatch


def chosen(num_tokens=ENOUGH[0], num_neurons=ENOUGH[1]):
    return options.hopper_gate(num_tokens, num_neurons, torch.device("cpu"))


def test_hopper_takes_its_kernel_for_two_tiles_a_multiprocessor(hopper):
    assert chosen() and not chosen(ENOUGH[0] - 1) and not chosen(num_neurons=43 * 128)


def test_a_small_cache_takes_it_for_fewer_tokens(hopper):
    assert chosen(2**20)
    hopper.setattr(options, "has_small_cache", lambda device: True)
    assert chosen(2**16) and not chosen(2**16 + 1)


@pytest.mark.parametrize("l2, small", [(50 * 2**20, True), (60 * 2**20, False)])
def test_which_caches_are_small(l2, small, monkeypatch):
    properties = SimpleNamespace(L2_cache_size=l2)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda device: properties)
    assert options.has_small_cache.__wrapped__(torch.device("cuda")) == small


@pytest.mark.parametrize("architecture", ["sm_80", "sm_89", "sm_100", "sm_103", "gfx942", "cpu"])
def test_other_architectures_do_not(architecture, hopper):
    hopper.setattr(options, "architecture", lambda device: architecture)
    assert not chosen(2**20)


@pytest.mark.parametrize(
    "version, expected",
    [("3.6.0", True), ("3.6.0+git9844da95", True), ("3.7.1", True)]
    + [(version, False) for version in ("3.5.1", "3.8.0", "3.60.0", "4.0.0", "3.10.0")],
)
def test_versions_of_gluon_that_compile_it(version, expected, hopper):
    hopper.setattr("triton.__version__", version)
    assert chosen() == expected


def test_the_interpreter_does_not(hopper):
    hopper.setattr("triton.knobs.runtime.interpret", True)
    assert not chosen()


@pytest.mark.parametrize("by_neuron", [True, False])
@pytest.mark.parametrize("version", ["3.6.0", "3.8.0"])
def test_gate_bits_launches_the_chosen_kernel(version, by_neuron, hopper):
    launched = []

    class Recorder:
        def __init__(self, name):
            self.name = name

        def __getitem__(self, grid):
            return lambda *arguments, **given: launched.append((self.name, grid, given))

    hopper.setattr("triton.__version__", version)
    hopper.setattr(gate, "num_processors", lambda device: 132)
    hopper.setattr(gate, "gate_bits_kernel", Recorder("any"))
    hopper.setattr(gate_hopper, "gate_hopper_kernel", Recorder("hopper"))
    x, w = (torch.empty(size, 64, dtype=torch.bfloat16) for size in ENOUGH)
    g, bits = gate.gate_bits(x, w, None, by_neuron=by_neuron)
    ((name, grid, given),) = launched
    assert name == ("hopper" if by_neuron and version == "3.6.0" else "any") and grid == (132,)
    assert given["GROUP"] == (4 if name == "hopper" else 8)
    assert given["BM"] == (128 if name == "hopper" or not by_neuron else 256)
    shapes = ((5632, 768), (24, 5632)) if by_neuron else ((641, 5632), (768, 176))
    assert (g.shape, bits.shape) == shapes
