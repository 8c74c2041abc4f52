"""Compile kernels of plans without a device; run in worker processes.

python offline.py: all plans of variants.py for sm_90, with registers, spills and shared memory.
"""
from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from types import SimpleNamespace


def use_fake_driver():
    import torch
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    from twell.kernels import options

    class Driver:
        def get_current_target(self):
            return GPUTarget("cuda", 90, 32)

        def get_current_device(self):
            return 0

        def get_current_stream(self, device):
            return 0

    run, done = JITFunction.run, []

    def compile_only(kernel, *args, grid, **given):
        key = kernel.fn.__name__, repr(sorted((k, v) for k, v in given.items()))
        try:
            compiled = run(kernel, *args, grid=grid, **{**given, "warmup": True})
        except Exception as error:
            done.append((kernel.fn.__name__, given, None, (repr(error) + " cause: " + repr(error.__cause__))[-900:]))
        else:
            done.append((kernel.fn.__name__, given, compiled, None))

    JITFunction.run = compile_only
    driver.set_active(Driver())
    options.architecture = lambda device: "sm_90"
    torch.cuda.get_device_properties = lambda device: SimpleNamespace(multi_processor_count=132)
    import few
    few.num_processors = lambda device: 132
    return done


def tensors(fp8=False):
    import torch
    from twell.kernels.common import Layer

    w = torch.empty(5632, 2048, dtype=torch.bfloat16)
    if not fp8:
        return w, Layer(w, w, w)
    v, s = w.to(torch.float8_e4m3fn), torch.empty(5632)
    return v, Layer(v, v, w, s_gate=s, s_up=s)


def resources(compiled):
    """Registers and spilled bytes, by ptxas."""
    import triton
    ptxas = os.path.join(os.path.dirname(triton.__file__), "backends/nvidia/bin/ptxas")
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(compiled.asm["ptx"])
        file.flush()
        out = subprocess.run([ptxas, "-v", "--gpu-name=sm_90a", file.name, "-o", "/dev/null"], capture_output=True, text=True).stderr
    registers = re.search(r"Used (\d+) registers", out)
    spills = re.search(r"(\d+) bytes spill stores", out)
    return (int(registers[1]) if registers else None), (int(spills[1]) if spills else None)


def main(ms, check):
    done = use_fake_driver()
    import few
    import variants
    from tests.kernels import ir
    seen = set()
    for m in ms:
        for form in ("fused", "tiles"):
            if form == "fused" and m > 64:
                continue
            for pdl in (False, True):
                for fp8 in ((False, True) if check == "fp8" else (False,)):
                    w, layer = tensors(fp8)
                    plans = list(variants.sweep(m, form))
                    for plan in plans[:1] if pdl or fp8 else plans:
                        plan = few.Plan(**{**plan.__dict__, "pdl": pdl})
                        import torch
                        few.ffn(w[:m], layer, plan, torch.empty(m) if fp8 else None)
                        for name, given, compiled, error in done:
                            skip = "GATED", "ACT", "EVEN", "enable_fp_fusion", "launch_pdl", "PAD", "SEGMENTS", "SEGMENT", "BLOCKS", "GROUP"
                            text = " ".join(f"{k}={v}" for k, v in given.items() if k not in skip)
                            key = name, text, m, fp8
                            if key in seen:
                                continue
                            seen.add(key)
                            if error:
                                print("FAIL", m, name, text, error, flush=True)
                                continue
                            regs, spills = resources(compiled)
                            races = ir.races(compiled.asm["ttgir"]) + ir.read_back(compiled.asm["ttir"])
                            flag = "" if not spills and compiled.metadata.shared <= 232448 and not races else "   <<<"
                            wg = "wgmma" if "wgmma" in compiled.asm["ptx"] else "mma"
                            print(m, "fp8" if fp8 else "bf16", name, text, "smem", compiled.metadata.shared, "regs", regs, "spill", spills, wg, races or "", flag, flush=True)
                        done.clear()


if __name__ == "__main__":
    main([int(v) for v in sys.argv[2].split(",")], sys.argv[1])
