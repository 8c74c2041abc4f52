"""Every kernel compiles without a GPU, fits the shared memory, and keeps its indices in range.

A subprocess runs the paths on CPU or meta tensors, with a driver that names the architecture. Its
launches compile and do not run. tests/ir.py checks the compiled code. The Triton of
requirements.gpu.lock compiles the kernels as well as the installed one does.
"""

from __future__ import annotations

import inspect
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests import ir

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")

ROOT = Path(__file__).parents[1]
OLDER = Path(sys.prefix) / "triton-older"  # where `make test` installs requirements.gpu.lock
OLDER_VERSION = re.search(r"triton==(\S+)", (ROOT / "requirements.gpu.lock").read_text())[1]

LIMITS = {
    "sm_80": 166_912,
    "sm_89": 101_376,
    "sm_90": 232_448,
    "sm_100": 232_448,
    "sm_120": 101_376,
    "gfx942": 65_536,
}
# sm_90 is the architecture of the measurements. sm_100 is the only one with tensor memory, and has
# passes of its own in the compiler.
OLDER_ARCHITECTURES = ("sm_90", "sm_100")
KERNELS = {
    "gate": {"gate_words_kernel", "gate_bits_kernel"},
    "rowwise": {"lists_kernel", "count_kernel", "up_down_kernel"},
    "union": {"lists_kernel", "up_kernel", "down_kernel"},
    "entries": {"entries_index_kernel", "entries_forward_kernel", "entries_backward_kernel"},
    "weight_gradients": {
        "list_gradients_kernel",
        "bias_gradients_kernel",
        "backup_fill_kernel",
        "backup_gradients_kernel",
    },
    "paper.hybrid_pack": {"hybrid_pack_kernel", "hybrid_count_kernel", "hybrid_needed_kernel"},
    "paper.hybrid_rows": {"hybrid_rows_forward_kernel", "hybrid_rows_backward_kernel"},
    "paper.hybrid_backup": {
        "hybrid_backup_up_kernel",
        "hybrid_backup_product_kernel",
        "hybrid_backup_backward_kernel",
    },
    "paper.hybrid_transpose": {"hybrid_marks_kernel", "hybrid_ranks_kernel"},
    "paper.hybrid_weights": {"hybrid_list_gradients_kernel", "hybrid_backup_gradients_kernel"},
    "decode": {"few_up_kernel", "up_kernel", "few_down_kernel", "down_kernel"},
    "dense": {"relu_times_kernel"},
    "pack": {"pack_kernel", "unpack_kernel", "flags_kernel", "union_kernel"},
}
# CUDA's limits for x, y and z.
GRID = (2**31 - 1, 65_535, 65_535)

# Layers [tokens, neurons, hidden size], M N and M K above 2^31: wide ones, and one of many tokens.
# Larger ones do not fit a device.
INFERENCE = ((2**22, 65_536, 4096), (2**20, 65_536, 16_384), (2**28, 64, 16))
TRAINING = {
    "training": ((3 * 2**19, 65_536, 4096), (2**20, 16_384, 16_384), (2**28, 64, 16)),
    "hybrid": ((2**21, 65_536, 4096), (2**20, 16_384, 16_384), (2**28, 64, 16)),
}
# Expressions that `ir.overflows` cannot know to be in range, by file.
BOUNDED = {
    ("kernels/common.py", "bits * 0x01010101"): "wraps on purpose: the highest byte is the sum",
    ("kernels/union.py", "block * BM"): "the first token of a block in the queue, so below M",
}


def in_subprocess(tmp_path: Path, *arguments: str, older: bool = False):
    """What this file prints for these arguments under the installed or the older Triton."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    if older:
        if triton.__version__ == OLDER_VERSION:
            pytest.skip(f"the installed Triton is {OLDER_VERSION}")
        if not (OLDER / "triton").exists():
            command = f"pip install --no-deps --target {OLDER} -r requirements.gpu.lock"
            pytest.skip(f"no Triton {OLDER_VERSION}; `make test` installs it, as does {command}")
        paths = [str(OLDER), os.environ.get("PYTHONPATH")]
        environment["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    done = subprocess.run(
        [sys.executable, "-m", "tests.test_compile", *arguments],
        capture_output=True,
        text=True,
        env=environment,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    version, result = json.loads(done.stdout.splitlines()[-1])
    assert version == (OLDER_VERSION if older else triton.__version__)
    return result


COMPILERS = [
    *(pytest.param(name, False, id=name) for name in LIMITS),
    *(pytest.param(name, True, id=f"{name}-older") for name in OLDER_ARCHITECTURES),
]


@pytest.mark.parametrize(("architecture", "older"), COMPILERS)
def test_all_kernels_compile_and_fit(architecture, older, tmp_path):
    shared, problems = in_subprocess(tmp_path, "compile", architecture, older=older)
    expected = {f"twell.kernels.{module}.{name}" for module in KERNELS for name in KERNELS[module]}
    assert set(shared) == expected
    assert max(shared.values()) <= LIMITS[architecture], shared
    assert not problems, "\n".join(problems)


def test_indices_and_grids_stay_in_range_at_the_largest_sizes(tmp_path):
    launched, problems = in_subprocess(tmp_path, "launch", "sm_90")
    expected = {f"twell.kernels.{module}.{name}" for module in KERNELS for name in KERNELS[module]}
    assert set(launched) == expected
    reported = {(file, expression) for file, _, expression, _ in problems}
    assert set(BOUNDED) <= reported, "BOUNDED has an expression that is not reported"
    problems = [p for p in problems if (p[0], p[2]) not in BOUNDED]
    assert not problems, "\n".join("{}:{}: {} reaches {}".format(*p) for p in problems)


@pytest.mark.parametrize("older", [False, True], ids=["installed", "older"])
def test_checks_find_what_they_should(older, tmp_path):
    buffers, indices, again = in_subprocess(tmp_path, "samples", "sm_90", older=older)
    assert {mode: len(found) for mode, found in again.items()} == {
        "once": 0,
        "again": 1,
        "barrier": 0,
    }
    # The load feeds the product and registers, directly or transposed.
    for mode in ("x", "w"):
        assert len(buffers[mode]) == 2
        assert buffers[mode][0].startswith("read by a product and into registers")
        assert buffers[mode][1].startswith("2 copies ahead in 2 buffers")
    assert not buffers["none"] and not buffers["two products"]
    reported = {mode: [tuple(problem[2:]) for problem in indices[mode]] for mode in indices}
    assert reported == INDEX_MODES


# A product whose operand a loop carries and two views change. The registers read {source}.
VIEWS = """
    %a = ttg.local_alloc : () -> !ttg.memdesc<3x64x64xbf16, #shared, #smem, mutable> loc(#loc1)
    %b = ttg.local_alloc : () -> !ttg.memdesc<3x64x64xbf16, #shared, #smem, mutable> loc(#loc1)
    %first = ttg.memdesc_index %a[%c0] : !type -> !type loc(#loc1)
    %other = ttg.memdesc_index %b[%c0] : !type -> !type loc(#loc1)
    %r:2 = scf.for %i = %c0 to %n step %c1 iter_args(%x = %first, %s = %cst) -> (!type)  : i32 {{
      %part = ttg.memdesc_subslice %x[0, 0] : !type -> !type loc(#loc1)
      %turned = ttg.memdesc_trans %part {{order = array<i32: 1, 0>}} : !type -> !type loc(#loc1)
      %slot = ttg.memdesc_index {source}[%i] : !type -> !type loc(#loc1)
      %values = ttg.local_load %slot : !type -> tensor<64x64xbf16, #blocked> loc(#loc1)
      %p = ttng.warp_group_dot %turned, %other, %s {{isAsync = true}} : !type -> !type loc(#loc1)
      %next = ttg.memdesc_index %a[%i] : !type -> !type loc(#loc1)
      scf.yield %next, %p : !type, !type loc(#loc1)
    }} loc(#loc1)
    scf.if %c {{
      %turned = ttg.memdesc_index %c[%c0] : !type -> !type loc(#loc1)
    }} loc(#loc1)
"""


@pytest.mark.parametrize(("source", "problems"), [("%a", 1), ("%b", 1), ("%c", 0)])
def test_views_lead_to_their_allocation(source, problems):
    assert len(ir.races(VIEWS.format(source=source))) == problems


@triton.jit
def product_kernel(
    x_ptr,
    w_ptr,
    y_ptr,
    sums_ptr,
    K,
    MODE: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    """x w^T; MODE: what of it is summed in registers as well, or multiplied once more."""
    m = tl.arange(0, BM)
    n = tl.arange(0, BN)
    acc = tl.zeros((BM, BN), tl.float32)
    squares = tl.zeros((BM, BM), tl.float32)
    sums = tl.zeros((BM,), tl.float32)
    for start in range(0, K, BK):
        k = start + tl.arange(0, BK)
        x = tl.load(x_ptr + m[:, None] * K + k[None, :])
        w = tl.load(w_ptr + n[:, None] * K + k[None, :])
        acc = tl.dot(x, w.T, acc)
        if MODE == "x":
            sums += tl.sum(x.to(tl.float32), 1)
        if MODE == "w":
            sums += tl.sum(tl.reshape(w.to(tl.float32), (BM, BN // BM * BK)), 1)
        if MODE == "two products":
            squares = tl.dot(x, x.T, squares)
    tl.store(y_ptr + m[:, None] * BN + n[None, :], acc)
    tl.store(sums_ptr + m[:, None] * BM + m[None, :], squares + sums[:, None])


@triton.jit
def copy_kernel(x_ptr, y_ptr, MODE: tl.constexpr):
    """Stores what it loads, and in two modes loads it again."""
    place = tl.arange(0, 16)
    tl.store(y_ptr + place, tl.load(x_ptr + place))
    if MODE == "barrier":
        tl.debug_barrier()
    if MODE != "once":
        tl.store(x_ptr + place, tl.load(y_ptr + place) + 1)


# What `ir.overflows` reports of index_kernel in 2^20 programs of width 2^14.
INDEX_MODES = {
    "int32": [("row * width", "17,179,852,800")],
    "late": [("row * width", "17,179,852,800")],
    "scaled": [("(row // 64 * width + columns) * 64", "17,178,821,568")],
    "memory": [("tl.load(y_ptr + row) * width", "any number")],
    "loop": [("offset += width", "17,179,885,583")],
    "sum": [("offset = tl.sum(counts, 0) + columns", "17,179,869,184")],
    "descriptor": [("row * width", "17,179,852,800")],
    "int64": [],
    "masked": [],
    "few": [],
}


@triton.jit
def index_kernel(x_ptr, y_ptr, y_desc, width, MODE: tl.constexpr):
    """Stores at an offset that is computed in one of several ways."""
    row = tl.program_id(0)
    columns = tl.arange(0, 16)
    offset = columns
    if MODE == "int64":
        offset = row.to(tl.int64) * width + columns
    elif MODE == "int32":
        offset = row * width + columns
    elif MODE == "late":
        offset = (row * width).to(tl.int64) + columns
    elif MODE == "scaled":
        offset = (row // 64 * width + columns) * 64
    elif MODE == "memory":
        offset = tl.load(y_ptr + row) * width + columns
    elif MODE == "masked":
        offset = (tl.load(y_ptr + row) & 0xFFFF) * width + columns
    elif MODE == "few":
        offset = row % 4 * width + columns
    elif MODE == "loop":
        for _ in range(0, tl.num_programs(0)):
            offset += width
    elif MODE == "sum":
        counts = tl.zeros((16384,), tl.int32) + tl.num_programs(0)
        offset = tl.sum(counts, 0) + columns
    elif MODE == "descriptor":
        columns += tl.sum(y_desc.load([row * width, 0]).to(tl.int32), 0)
    tl.store(x_ptr + offset, columns)


def use(architecture: str, launch: Callable) -> None:
    """Lets every launch call `launch(compile_only, kernel, *args, **options)`; nothing runs."""
    import torch
    from triton.backends.compiler import GPUTarget
    from triton.runtime import JITFunction, driver

    from twell.kernels import options

    target = GPUTarget("hip", architecture, 64)
    if architecture.startswith("sm_"):
        target = GPUTarget("cuda", int(architecture[3:]), 32)

    class Driver:
        def get_current_target(self):
            return target

        def get_current_device(self):
            return 0

        def get_current_stream(self, device):
            return 0

    run = JITFunction.run

    def compile_only(kernel, *args, grid, **options):
        return run(kernel, *args, grid=grid, **{**options, "warmup": True})

    JITFunction.run = lambda *args, **options: launch(compile_only, *args, **options)
    driver.set_active(Driver())
    options.architecture = lambda device: architecture
    torch.cuda.get_device_properties = lambda device: SimpleNamespace(multi_processor_count=132)


def full_name(kernel) -> str:
    return f"{kernel.fn.__module__}.{kernel.fn.__name__}"


def compile_all(architecture: str) -> tuple[dict[str, int], list[str]]:
    """Largest shared memory of each kernel's launches, in bytes, and the races of all kernels."""
    import torch

    from twell.kernels import decode, dense, entries, pack, rowwise, training, union
    from twell.kernels.paper import hybrid, hybrid_pack
    from twell.sparse.formats import ELL, PackedTwELL

    shared: dict[str, int] = {}
    problems = []

    def launch(compile_only, kernel, *args, **options):
        compiled = compile_only(kernel, *args, **options)
        name = full_name(kernel)
        shared[name] = max(shared.get(name, 0), compiled.metadata.shared)
        found = ir.races(compiled.asm["ttgir"]) + ir.read_back(compiled.asm["ttir"])
        problems.extend(f"{name}: {problem}" for problem in found)

    use(architecture, launch)
    hidden_size, intermediate_size = 2048, 5632
    w = torch.empty(intermediate_size, hidden_size, dtype=torch.bfloat16)
    for gated in (True, False):
        tensors = (w if gated else None, w, w, None, None, None)
        x = torch.empty(256, hidden_size, dtype=w.dtype)
        activity = torch.zeros(4, dtype=torch.int64)
        rowwise.ffn(x, *tensors, 8)
        for counted in (None, activity) if gated else (None,):
            rowwise.ffn(x, *tensors, 1, activity=counted)
            for union.LARGE_BLOCK_TOKENS in (0, 256):
                union.ffn(x, *tensors, activity=counted)
            bias = None if counted is None else w[:, 0].contiguous()
            mask = None if counted is None else torch.ones(256, dtype=torch.bool)
            saved_types = {training: entries.UnionSaved, hybrid: hybrid_pack.HybridSaved}
            for path, saved_type in saved_types.items():
                _, _, _, _, _, *saved = path.forward(x, *tensors[:3], bias, bias, None, mask, 29)
                given = (x, *tensors[:3], bias, bias)
                needs = [t is not None for t in given]
                path.backward(*given, saved_type(*saved), x, torch.zeros(256), needs)
            for num_tokens in (1, 2, 4, 16, 64):
                decode.ffn(x[:num_tokens], *tensors, activity=counted)
    dense.relu_times_kernel[(1,)](w, w, w.numel(), BLOCK=dense.BLOCK, num_warps=dense.NUM_WARPS)
    dense = torch.zeros(64, intermediate_size, dtype=w.dtype)
    for sparse in (ELL.pack(dense), PackedTwELL.pack(dense)):
        pack.unpack(sparse)
    pack._pack(dense, 256, 32)
    pack._pack(dense, 256, 31, words=True)
    pack.to_union(dense)
    return shared, sorted(set(problems))


class Lowered(Exception):
    """Carries the TTIR of a kernel out of its compilation."""


def stop_at_ttir() -> None:
    """Lets compilations raise `Lowered` after the first stage."""
    from triton.compiler.compiler import make_backend
    from triton.runtime import driver

    backend = type(make_backend(driver.active.get_current_target()))
    add_stages = backend.add_stages

    def stages_to_ttir(self, stages, *options):
        add_stages(self, stages, *options)
        lower = stages["ttir"]

        def stop(module, metadata):
            raise Lowered(str(lower(module, metadata)))

        stages["ttir"] = stop

    backend.add_stages = stages_to_ttir


def integers(argument) -> list[int]:
    """The integers that an argument hands to a kernel."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    if isinstance(argument, TensorDescriptor):
        return [*argument.shape, *argument.strides]
    if isinstance(argument, tuple):
        return [number for part in argument for number in integers(part)]
    return [argument] if type(argument) is int else []


def specialization(argument):
    """Arguments for which this is the same share a compiled kernel."""
    import torch
    from triton.tools.tensor_descriptor import TensorDescriptor

    if isinstance(argument, torch.Tensor):
        return argument.dtype, argument.data_ptr() % 16
    if isinstance(argument, TensorDescriptor):
        return argument.base.dtype, tuple(argument.block_shape)
    if isinstance(argument, tuple):
        return tuple(specialization(part) for part in argument)
    return (argument == 1, argument % 16, argument >= 2**31) if type(argument) is int else argument


def launch_largest(architecture: str) -> tuple[list[str], list[ir.Problem]]:
    """The kernels launched at the largest sizes, and what leaves its range there."""
    import torch
    from triton.tools.tensor_descriptor import TensorDescriptor

    from twell.kernels import decode, dense, entries, pack, rowwise, training, training_ops, union
    from twell.kernels.paper import hybrid, hybrid_pack

    lowered: dict[tuple, str] = {}
    launches = set()
    problems = {}

    def report(file: str, line: int, expression: str, number: str) -> None:
        problems.setdefault((file, line, expression), number)

    def launch(compile_only, kernel, *args, grid, **options):
        named = {name: value for name, value in options.items() if name in kernel.arg_names}
        arguments = inspect.signature(kernel.fn).bind(*args, **named).arguments
        constants = {p.name: arguments.pop(p.name) for p in kernel.params if p.is_constexpr}
        numbers = {name: integers(value) for name, value in arguments.items()}
        key = kernel, str(constants), tuple(specialization(value) for value in arguments.values())
        if (key, str(numbers), grid) in launches:
            return
        launches.add((key, str(numbers), grid))
        if key not in lowered:
            with pytest.raises(Lowered) as error:
                compile_only(kernel, *args, grid=grid, **options)
            lowered[key] = str(error.value)
        for problem in ir.overflows(lowered[key], numbers, grid):
            report(*problem)
        code = kernel.fn.__code__
        file = "/".join(Path(code.co_filename).parts[-2:])
        for axis, size, limit in zip("xyz", grid, GRID, strict=False):
            if size > limit:
                axis = f"the {axis} of {kernel.fn.__name__}'s grid"
                report(file, code.co_firstlineno, axis, f"{size:,}")
        for name, value in arguments.items():
            if isinstance(value, TensorDescriptor) and max(value.shape) >= 2**31:
                report(file, code.co_firstlineno, f"the shape of {name}", f"{max(value.shape):,}")

    def empty(*shape, dtype=torch.bfloat16):
        return torch.empty(shape, dtype=dtype, device="meta")

    def layer(intermediate_size, hidden_size, gated):
        w, b = empty(intermediate_size, hidden_size), empty(intermediate_size)
        return (w if gated else None, w, w, b if gated else None, b, empty(hidden_size))

    use(architecture, launch)
    stop_at_ttir()
    activity = empty(4, dtype=torch.int64)
    for num_tokens, intermediate_size, hidden_size in INFERENCE:
        x = empty(num_tokens, hidden_size)
        for gated in (True, False):
            tensors = layer(intermediate_size, hidden_size, gated)
            for path in (rowwise, union, decode):
                path.ffn(x, *tensors, activity=activity)
            for few in (2, 4):
                decode.ffn(x[:few], *tensors, activity=activity)
            rowwise.ffn(x, *tensors, 8)
            dense.ffn(x, *tensors)
    saved_types = {training: entries.UnionSaved, hybrid: hybrid_pack.HybridSaved}
    for path, saved_type in saved_types.items():
        for num_tokens, intermediate_size, hidden_size in TRAINING[path.__name__.split(".")[-1]]:
            x, dl1 = empty(num_tokens, hidden_size), empty(num_tokens, dtype=torch.float32)
            mask = empty(num_tokens, dtype=torch.bool)
            most = (training_ops.MAX_ENTRIES - 1) // num_tokens
            capacity = most if path is training else 512
            for gated in (True, False):
                tensors = layer(intermediate_size, hidden_size, gated)
                _, _, _, _, _, *saved = path.forward(x, *tensors, mask, capacity)
                needs = [t is not None for t in (x, *tensors[:5])]
                path.backward(x, *tensors[:5], saved_type(*saved), x, dl1, needs)

    # Segments above 2^31, as many tokens as possible, and blocks of one token.
    for num_tokens, num_columns, tile in ((2**17, 65_536, 2), (2**28, 64, 64)):
        matrix = empty(num_tokens, num_columns)
        values, indices, counts = pack._pack(matrix, tile, 1)
        pack._scatter(values, indices, counts, matrix, num_columns // tile, 1)
        words = pack._pack(matrix, tile, 1, words=True)
        pack._scatter(words, words, words, matrix, num_columns // tile, 1)
    for num_tokens, num_columns, block_m in ((2**23, 4096, 64), (2**17, 65_536, 1)):
        matrix = empty(num_tokens, num_columns)
        try:
            pack.to_union(matrix, block_m)
        except NotImplementedError:
            pass  # after the first kernel it asks for the size of the unions
        packed = SimpleNamespace(
            offsets=empty(num_tokens // block_m + 1, dtype=torch.int64),
            values=empty(2**32),
            indices=empty(2**26, dtype=torch.int32),
            block_m=block_m,
        )
        for to_packed in (True, False):
            pack._move_union(matrix, packed, pack=to_packed)
    names = sorted({full_name(kernel) for (kernel, *_), _, _ in launches})
    return names, sorted((*place, number) for place, number in problems.items())


def compile_samples(architecture: str) -> tuple[dict, dict, dict]:
    """What the three checks find in the kernels of this file, by their MODE."""
    import torch
    from triton.tools.tensor_descriptor import TensorDescriptor

    use(architecture, lambda compile_only, *args, **options: compile_only(*args, **options))
    x = torch.empty(16, dtype=torch.bfloat16)
    y, table = x.float(), x.int()
    buffers, indices = {}, {}
    for mode in ("none", "x", "w", "two products"):
        compiled = product_kernel[(1,)](x, x, y, y, 1024, mode, 64, 128, 64, num_stages=3)
        buffers[mode] = ir.races(compiled.asm["ttgir"])
    rows, width = 2**20, 2**14
    descriptor = TensorDescriptor.from_tensor(torch.empty(64, 16, dtype=torch.bfloat16), [16, 16])
    for mode in INDEX_MODES:
        compiled = index_kernel[(rows,)](table, table, descriptor, width, mode)
        numbers = {"x_ptr": [], "y_ptr": [], "y_desc": integers(descriptor), "width": [width]}
        indices[mode] = ir.overflows(compiled.asm["ttir"], numbers, (rows,))
    modes = ("once", "again", "barrier")
    kernels = {mode: copy_kernel[(1,)](y, y, mode) for mode in modes}
    again = {mode: ir.read_back(kernel.asm["ttir"]) for mode, kernel in kernels.items()}
    return buffers, indices, again


if __name__ == "__main__":
    tasks = {"compile": compile_all, "launch": launch_largest, "samples": compile_samples}
    print(json.dumps((triton.__version__, tasks[sys.argv[1]](sys.argv[2]))))
