"""Compiles the kernels without a GPU; run by test_compile.py.

    python -m tests.kernels.compiled compile|launch ARCHITECTURE [VARIANTS]

The paths run on CPU or meta tensors, with a driver that names the architecture. Launches compile
and do not run. Prints Triton's version and the results as JSON.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from types import SimpleNamespace

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import JITFunction, driver

from twell.kernels import decode, dense, float8, options, rowwise, training, union
from twell.kernels import launch as launch_module
from twell.kernels.common import Gradients
from twell.kernels.paper import hybrid
from twell.kernels.paper import rowwise as twell_rowwise
from twell.sparse import training_ops
from twell.sparse.activations import RELU, Activation, Weights, get_activation
from twell.sparse.float8 import FLOAT8

# CUDA's limits for x, y and z.
GRID = (2**31 - 1, 65_535, 65_535)
# Layers [tokens, neurons, hidden size], M N and M K above 2^31: wide ones, and one of many tokens.
# Larger ones do not fit a device.
INFERENCE = ((2**22, 65_536, 4096), (2**20, 65_536, 16_384), (2**28, 64, 16))
TRAINING = {
    training: ((3 * 2**19, 65_536, 4096), (2**20, 16_384, 16_384), (2**28, 64, 16)),
    hybrid: ((2**21, 65_536, 4096), (2**20, 16_384, 16_384), (2**28, 64, 16)),
}
# options.HOPPER_TILES, and a value by which other kernels compute the gate of any size.
HOPPER_TILES, NEVER_HOPPER = options.HOPPER_TILES, 2**60
# Numbers of tokens with all options of few.py, and some of them.
FEW = 3, 4, 20, 40, 100, 200, 500
SOME = 4, 100, 500
WITH_FP8 = "sm_89", "sm_90", "sm_100", "sm_120"
SAVED = {training: training.UnionSaved, hybrid: hybrid.HybridSaved}


def use(architecture: str, launch: Callable) -> None:
    """Lets every launch call `launch(compile_only, kernel, *args, **options)`; nothing runs."""
    target = GPUTarget("hip", architecture, 64)
    if architecture.startswith("sm_"):
        target = GPUTarget("cuda", int(architecture[3:]), 32)
    run = JITFunction.run

    def compile_only(kernel, *args, grid, **given):
        return run(kernel, *args, grid=grid, **{**given, "warmup": True})

    launch_module.Direct._launch = lambda self, grid, *args, **given: self.kernel[grid](
        *args, **given
    )
    JITFunction.run = lambda *args, **given: launch(compile_only, *args, **given)
    device = {"get_current_device": lambda: 0, "get_current_stream": lambda device: 0}
    driver.set_active(SimpleNamespace(get_current_target=lambda: target, **device))
    options.architecture = lambda device: architecture
    properties = SimpleNamespace(multi_processor_count=132, L2_cache_size=60 * 2**20)
    torch.cuda.get_device_properties = lambda device: properties


def full_name(kernel) -> str:
    return f"{kernel.fn.__module__}.{kernel.fn.__name__}"


def step(path, x: torch.Tensor, layer: Weights, mask: torch.Tensor | None, capacity: int) -> None:
    """A training step, with the gradients of all tensors."""
    _, _, _, _, _, *saved = path.forward(x, layer, mask, capacity)
    given = x, *layer[:5]
    gradients = Gradients(*(None if t is None else torch.empty_like(t) for t in given))
    dl1 = torch.empty(len(x), dtype=torch.float32, device=x.device)
    path.backward(x, layer, SAVED[path](*saved), x, dl1, gradients)


def resources(cubin: bytes) -> dict[str, int]:
    """Registers of a thread, and its bytes of stack and local memory, where registers spill."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return {name: int(number) for name, number in re.findall(r"(REG|STACK|LOCAL):(\d+)", text)}


def races(ttgir: str) -> set[str]:
    """Types of buffers that asynchronous products of Hopper read, and loads into registers too.

    Triton 3.6 and 3.7 pipeline these with a buffer too few: a copy then overwrites one that a
    product may still read, and results are wrong now and then.
    """
    buffer = r"memdesc<([^>]*?)(?:, \d+x[\dx]+)?>"  # its type, without the size of a whole ring
    products = re.findall(r"warp_group_dot .*isAsync = true.*", ttgir)
    registers = re.findall(rf"local_load .*{buffer} ->", ttgir)
    return set(registers) & set(re.findall(buffer, "".join(products)))


def compile_all(architecture: str, variants: str = "all") -> tuple[dict[str, int], list[str]]:
    """Largest shared memory of each kernel's launches, in bytes, and the problems of all kernels.

    The variants "first" are the first launch of each kernel, in a gated layer that has biases and
    counts activity. Kernels in Gluon say how many registers a thread has, so theirs are checked
    too.
    """
    shared: dict[str, int] = {}
    problems = set()

    def launch(compile_only, kernel, *args, **given):
        name = full_name(kernel)
        if variants == "first" and name in shared:
            return
        compiled = compile_only(kernel, *args, **given)
        shared[name] = max(shared.get(name, 0), compiled.metadata.shared)
        problems.update(f"{name} races for {buffer}" for buffer in races(compiled.asm["ttgir"]))
        if kernel.is_gluon():
            used = resources(compiled.asm["cubin"])
            if used != {"REG": 168, "STACK": 0, "LOCAL": 0}:
                problems.add(f"{name} spills, or does not fit a multiprocessor: {used}")

    use(architecture, launch)
    w = torch.empty(5632, 2048, dtype=torch.bfloat16)
    in_fp8 = (False, True) if architecture in WITH_FP8 else (False,)
    several = [(True, torch.zeros(4, dtype=torch.int64)), (True, None), (False, None)]
    few = FEW if variants == "all" else SOME
    for gated, activity in several if variants == "all" else several[:1]:
        for fp8 in in_fp8:
            compile_layers(w, few, gated, activity, fp8=fp8)
    if variants == "first":  # what a loop carries must have one type without a gate, too
        shared.pop(full_name(rowwise.rowwise_kernel))
        rowwise.ffn(w[:256].clone(), Weights(None, w, w))
    others = [("relu2", 0.1, True), ("relu2", 0.0, False), ("drelu", 0.0, True)]
    for name, threshold, gated in others if variants == "all" else []:
        compile_layers(w, SOME, gated, None, get_activation(name, threshold))
    return shared, sorted(problems)


def compile_layers(
    w: torch.Tensor,
    few: tuple[int, ...],
    gated: bool,
    activity: torch.Tensor | None,
    act: Activation = RELU,
    fp8: bool = False,
) -> None:
    """Every path for 256 tokens, or `few`; counting activity, with biases and a mask too.

    In FP8 the paths of inference, and the kernel that quantises.
    """
    x, layer, mask = w[:256].clone(), Weights(w if gated else None, w, w, act=act), None
    if activity is not None:
        bias, mask = w[:, 0].contiguous(), torch.ones(256, dtype=torch.bool)
        layer = layer._replace(b_gate=bias, b_up=bias, b_down=x[0].clone())
    if fp8:
        float8.quantize(x)
        float8.quantize(x, x if gated else None, act)
        infer(x.to(FLOAT8), quantized(layer), few, activity, torch.empty(len(x)))
        return
    infer(x, layer, few, activity)
    dense.relu_times(x, x if gated else None, act)
    step(training, x, layer, mask, 29)
    if act == RELU:  # the paper's
        twell_rowwise.ffn(x, layer)
        step(hybrid, x, layer, mask, 29)


def infer(x: torch.Tensor, layer: Weights, few: tuple[int, ...], activity, scale=None) -> None:
    """The paths of inference; decoding for 1, 2 and `few` tokens."""
    rowwise.ffn(x, layer, scale, activity=activity)
    for options.HOPPER_TILES in NEVER_HOPPER, HOPPER_TILES:
        union.ffn(x, layer, scale, activity=activity)
    for num_tokens in (1, 2, *few):
        x_scale = None if scale is None else scale[:num_tokens]
        decode.ffn(x[:num_tokens], layer, x_scale, activity=activity)


def quantized(layer: Weights) -> Weights:
    """The same with gate and up in FP8."""
    values = torch.empty_like(layer.w_up, dtype=FLOAT8)
    scale = torch.empty(len(values), dtype=torch.float32, device=values.device)
    layer = layer._replace(w_up=values, s_up=scale)
    return layer._replace(w_gate=values, s_gate=scale) if layer.gated else layer


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def empty_layer(num_tokens: int, num_neurons: int, hidden_size: int, gated: bool) -> tuple:
    w, b = empty(num_neurons, hidden_size), empty(num_neurons)
    layer = Weights(w if gated else None, w, w, b if gated else None, b, empty(hidden_size))
    return empty(num_tokens, hidden_size), layer


def launch_largest(architecture: str) -> tuple[list[str], list[str]]:
    """The kernels launched for the largest layers, and what exceeds CUDA's limits there."""
    names, problems = set(), set()

    def launch(compile_only, kernel, *args, grid, **given):
        names.add(full_name(kernel))
        if any(size > limit for size, limit in zip(grid, GRID, strict=False)):
            problems.add(f"{full_name(kernel)} has the grid {grid}")
        for value in args:  # Triton's or Gluon's
            if type(value).__name__ == "TensorDescriptor" and max(value.shape) >= 2**31:
                problems.add(f"{full_name(kernel)} has a descriptor of {value.shape}")

    use(architecture, launch)
    for gated in (True, False):
        for sizes in INFERENCE:
            x, layer = empty_layer(*sizes, gated)
            activity, scale = empty(4, dtype=torch.int64), empty(len(x), dtype=torch.float32)
            infer(x, layer, FEW, activity)
            infer(empty(*x.shape, dtype=FLOAT8), quantized(layer), FEW, activity, scale)
            twell_rowwise.ffn(x, layer)
            dense.ffn(x, layer)
            float8.quantize(x)
        for path, layers in TRAINING.items():
            for sizes in layers:
                capacity = (training_ops.MAX_ENTRIES - 1) // sizes[0] if path is training else 512
                mask = empty(sizes[0], dtype=torch.bool)
                step(path, *empty_layer(*sizes, gated), mask, capacity)
    return sorted(names), sorted(problems)


if __name__ == "__main__":
    tasks = {"compile": compile_all, "launch": launch_largest}
    print(json.dumps((triton.__version__, tasks[sys.argv[1]](*sys.argv[2:]))))
