"""Every kernel compiles without a GPU for each architecture, as configured there, and fits its shared memory.

A subprocess runs the paths as usual (K = 2048, N = 5632) on CPU tensors, with a driver that names the
architecture and launches that compile and do not run.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

LIMITS = {
    "sm_80": 166_912,
    "sm_89": 101_376,
    "sm_90": 232_448,
    "sm_100": 232_448,
    "sm_120": 101_376,
    "gfx942": 65_536,
}
KERNELS = {
    "gate": {"gate_words_kernel", "gate_bits_kernel"},
    "rowwise": {"lists_kernel", "count_kernel", "up_down_kernel"},
    "union": {"lists_kernel", "up_kernel", "down_kernel"},
    "training": {
        "index_kernel",
        "multiply_kernel",
        "gradient_kernel",
        "lists_gradient_kernel",
        "bias_gradient_kernel",
        "backup_kernel",
        "backup_gradient_kernel",
    },
    "hybrid": {
        "needed_kernel",
        "pack_kernel",
        "count_kernel",
        "row_forward_kernel",
        "row_backward_kernel",
        "backup_up_kernel",
        "backup_product_kernel",
        "backup_backward_kernel",
        "mark_kernel",
        "rank_kernel",
        "weights_kernel",
        "backup_weights_kernel",
    },
    "decode": {"few_up_kernel", "up_kernel", "few_down_kernel", "down_kernel"},
    "dense": {"relu_times_kernel"},
    "pack": {"pack_kernel", "unpack_kernel", "flags_kernel", "union_kernel"},
}


@pytest.mark.parametrize("architecture", LIMITS)
def test_all_kernels_compile_and_fit(architecture, tmp_path):
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    done = subprocess.run(
        [sys.executable, "-m", "tests.test_compile", architecture],
        capture_output=True,
        text=True,
        env=environment,
        cwd=Path(__file__).parents[1],
    )
    assert done.returncode == 0, done.stderr[-3000:]
    shared = json.loads(done.stdout.splitlines()[-1])
    assert set(shared) == {f"twell.kernels.{module}.{name}" for module in KERNELS for name in KERNELS[module]}
    assert max(shared.values()) <= LIMITS[architecture], shared


def _check_buffers(name: str, ttgir: str) -> None:
    """No buffer is read by asynchronous products and into registers.

    Triton 3.7 gives a load that is also read into registers one buffer less in the pipeline, and the copy that comes next
    overwrites it while the product still reads: wrong results now and then, on Hopper.
    """
    products = re.findall(r"ttng\.warp_group_dot (%[\w#]+), (%[\w#]+),.*isAsync = true", ttgir)
    loaded = set(re.findall(r"ttg\.local_load (%[\w#]+)", ttgir))
    assert not {operand for pair in products for operand in pair} & loaded, name


def compile_all(architecture: str) -> dict[str, int]:
    """Largest shared memory of each kernel, in bytes, over the ways in which it is launched."""
    import torch
    from triton.backends.compiler import GPUTarget
    from triton.runtime import JITFunction, driver

    from twell.format import ELL, PackedTwELL
    from twell.kernels import common, decode, dense, hybrid, pack, rowwise, training, union

    cuda = architecture.startswith("sm_")
    target = GPUTarget("cuda", int(architecture[3:]), 32) if cuda else GPUTarget("hip", architecture, 64)

    class Driver:
        def get_current_target(self):
            return target

        def get_current_device(self):
            return 0

        def get_current_stream(self, device):
            return 0

    shared: dict[str, int] = {}

    def compile_only(kernel, *args, grid, **options):
        compiled = run(kernel, *args, grid=grid, **{**options, "warmup": True})
        name = f"{kernel.fn.__module__}.{kernel.fn.__name__}"
        _check_buffers(name, compiled.asm["ttgir"])
        shared[name] = max(shared.get(name, 0), compiled.metadata.shared)
        return compiled

    run, JITFunction.run = JITFunction.run, compile_only
    driver.set_active(Driver())
    common.architecture = lambda device: architecture

    hidden_size, intermediate_size = 2048, 5632
    w = torch.empty(intermediate_size, hidden_size, dtype=torch.bfloat16)
    for gated in (True, False):
        tensors = (w if gated else None, w, w, None, None, None)
        x = torch.empty(256, hidden_size, dtype=w.dtype)
        activity = torch.zeros(4, dtype=torch.int64)
        rowwise.ffn(x, *tensors, 8)
        for counted in (None, activity) if gated else (None,):
            rowwise.ffn(x, *tensors, 1, activity=counted)
            for union.FEW_TOKENS in (0, 256):
                union.ffn(x, *tensors, activity=counted)
            bias = None if counted is None else w[:, 0].contiguous()
            mask = None if counted is None else torch.ones(256, dtype=torch.bool)
            for path in (training, hybrid):
                _, _, _, _, _, *saved = path.forward(x, *tensors[:3], bias, bias, None, mask, 29)
                given = (x, *tensors[:3], bias, bias)
                needs = [t is not None for t in given]
                path.backward(*given, path.Saved(*saved), x, torch.zeros(256), needs)
            for num_tokens in (1, 2, 4, 16, 64):
                decode.ffn(x[:num_tokens], *tensors, activity=counted)
    dense.relu_times_kernel[(1,)](w, w, w.numel(), BLOCK=dense.BLOCK, num_warps=dense.NUM_WARPS)
    dense = torch.zeros(64, intermediate_size, dtype=w.dtype)
    for sparse in (ELL.pack(dense), PackedTwELL.pack(dense)):
        pack.unpack(sparse)
    pack._pack(dense, 256, 32)
    pack._pack(dense, 256, 31, words=True)
    pack.to_union(dense)
    return shared


if __name__ == "__main__":
    print(json.dumps(compile_all(sys.argv[1])))
