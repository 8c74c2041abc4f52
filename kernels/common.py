"""What all kernels share: number types, ReLU, and the block sizes for each kind of device.

Values are stored in bf16 or fp16 and accumulated in fp32. A neuron is active for a token where its value
after ReLU *and rounding to the storage type* is `!= 0`: NaN is active, -0.0 is not.

Every kernel also runs on the CPU under TRITON_INTERPRET=1. There bf16 is a bare 16-bit integer: arithmetic
and tl.dot on it work on the raw bits, and rounding to it truncates. `wide` and `narrow` stand at every load
and every store so that kernels need not know.

Block sizes come from the table below, not from autotuning: a result never depends on what ran before, a
launch can be captured in a graph at once, and a test can compile exactly what each device will run.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
DTYPES = torch.bfloat16, torch.float16


@triton.jit
def wide(value):
    """What was loaded, as an operand: unchanged on a GPU, fp32 in the interpreter."""
    if INTERPRETED:
        return value.to(tl.float32)
    else:
        return value


@triton.jit
def narrow(value, dtype: tl.constexpr):
    """fp32 rounded to the storage type: to nearest, ties to even; a NaN stays one."""
    if INTERPRETED and dtype == tl.bfloat16:
        bits = value.to(tl.uint32, bitcast=True)
        rounded = bits + 0x7FFF + ((bits >> 16) & 1)
        bits = tl.where(value == value, rounded, bits | 0x400000)
        return (bits >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        return value.to(dtype)


@triton.jit
def relu(value):
    """max(value, 0), NaN where the value is NaN."""
    return tl.maximum(value, 0.0, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def popcount(bits):
    """Number of bits that are set in each int32."""
    bits = bits.to(tl.uint32, bitcast=True)
    bits = bits - ((bits >> 1) & 0x55555555)
    bits = (bits & 0x33333333) + ((bits >> 2) & 0x33333333)
    bits = (bits + (bits >> 4)) & 0x0F0F0F0F
    return ((bits * 0x01010101) >> 24).to(tl.int32)


# For each kernel the launch options of each architecture; "default" serves every other one and the
# interpreter, and fits the 64 KiB of shared memory of gfx942. BM tokens, BN neurons (in products with w_down:
# entries of the output), BK entries of the summed axis in one step of a product.
CONFIGS: dict[str, dict[str, dict[str, int]]] = {
    # Figures behind this table: docs/kernel-log.md.
    "gate_words": {
        "default": {"BM": 16, "BK": 32, "num_warps": 4, "num_stages": 2},
        "sm_80": {"BM": 64, "BK": 32, "num_warps": 8, "num_stages": 3},
        "sm_89": {"BM": 32, "BK": 32, "num_warps": 4, "num_stages": 3},
        "sm_90": {"BM": 128, "BK": 64, "num_warps": 8, "num_stages": 3},
    },
    # The largest tiles that fit come closest to cuBLAS.
    "gate_tokens": {
        "default": {"BM": 64, "BN": 128, "BK": 32, "num_warps": 4, "num_stages": 2},
        "sm_80": {"BM": 128, "BN": 128, "BK": 64, "num_warps": 8, "num_stages": 3},
        "sm_89": {"BM": 128, "BN": 128, "BK": 32, "num_warps": 8, "num_stages": 3},
        "sm_90": {"BM": 128, "BN": 256, "BK": 64, "num_warps": 8, "num_stages": 3},
    },
    "gate_neurons": {
        "default": {"BM": 128, "BN": 64, "BK": 32, "num_warps": 4, "num_stages": 2},
        "sm_80": {"BM": 128, "BN": 128, "BK": 64, "num_warps": 8, "num_stages": 3},
        "sm_89": {"BM": 128, "BN": 128, "BK": 32, "num_warps": 8, "num_stages": 3},
        "sm_90": {"BM": 256, "BN": 128, "BK": 64, "num_warps": 8, "num_stages": 3},
    },
    # Tiles that overflow: neurons at a time (registers limit them, the interpreter pays for steps).
    "rowwise": {
        "default": {"AGAIN_N": 4, "AGAIN_K": 512, "num_stages": 2},
        "cpu": {"AGAIN_N": 256, "AGAIN_K": 128, "num_stages": 2},
    },
    # By tokens in a block. PER_SM programs stay resident on each multiprocessor: many bytes have to be in flight.
    "union_up_64": {
        "default": {"BN": 64, "BK": 32, "PER_SM": 2, "num_warps": 4, "num_stages": 2},
        "sm_80": {"BN": 128, "BK": 64, "PER_SM": 2, "num_warps": 4, "num_stages": 3},
        "sm_89": {"BN": 128, "BK": 64, "PER_SM": 1, "num_warps": 4, "num_stages": 3},
        "sm_90": {"BN": 128, "BK": 64, "PER_SM": 3, "num_warps": 4, "num_stages": 3},
    },
    "union_up_128": {
        "default": {"BN": 64, "BK": 32, "PER_SM": 2, "num_warps": 4, "num_stages": 2},
        "sm_80": {"BN": 128, "BK": 64, "PER_SM": 1, "num_warps": 4, "num_stages": 3},
        "sm_89": {"BN": 128, "BK": 32, "PER_SM": 1, "num_warps": 4, "num_stages": 3},
        "sm_90": {"BN": 128, "BK": 64, "PER_SM": 2, "num_warps": 4, "num_stages": 3},
    },
    # The lists are read in the same loop as the rows they name, which takes two of the stages.
    "union_down_64": {
        "default": {"BN": 128, "BK": 32, "num_warps": 4, "num_stages": 2},
        "sm_80": {"BN": 256, "BK": 32, "num_warps": 4, "num_stages": 5},
        "sm_89": {"BN": 128, "BK": 32, "num_warps": 4, "num_stages": 5},
        "sm_90": {"BN": 256, "BK": 32, "num_warps": 4, "num_stages": 5},
    },
    "union_down_128": {
        "default": {"BN": 128, "BK": 32, "num_warps": 4, "num_stages": 2},
        "sm_80": {"BN": 128, "BK": 32, "num_warps": 4, "num_stages": 6},
        "sm_89": {"BN": 128, "BK": 32, "num_warps": 4, "num_stages": 4},
        "sm_90": {"BN": 128, "BK": 32, "num_warps": 4, "num_stages": 6},
    },
    # Training. BN of "training_elements" divides the neurons of a tile of "union_up_64"; WORDS are of 32 tokens.
    "training_index": {"default": {"BN": 16, "WORDS": 128, "num_warps": 4, "num_stages": 1}},
    "training_elements": {"default": {"BN": 32, "num_warps": 8, "num_stages": 1}},
    "training_lists": {"default": {"UNROLL": 4, "num_stages": 1}},
    # Wide tiles win where the backup has many rows.
    "training_backup": {
        "default": {"BH": 64, "BN": 64, "BT": 32, "num_warps": 4, "num_stages": 2},
        "sm_80": {"BH": 64, "BN": 128, "BT": 64, "num_warps": 4, "num_stages": 3},
        "sm_89": {"BH": 64, "BN": 128, "BT": 64, "num_warps": 4, "num_stages": 3},
        "sm_90": {"BH": 128, "BN": 256, "BT": 64, "num_warps": 8, "num_stages": 3},
    },
    # SLOTS: entries of a list at a time (on a GPU registers limit them, the interpreter pays for steps).
    "hybrid_rows": {
        "default": {"SLOTS": 1, "num_stages": 2},
        "cpu": {"SLOTS": 32, "num_stages": 1},
    },
    "hybrid_weights": {
        "default": {"SLOTS": 4, "num_stages": 2},
        "cpu": {"SLOTS": 64, "num_stages": 1},
    },
    "hybrid_backup": {
        "default": {"BM": 64, "BN": 64, "BK": 32, "num_warps": 4, "num_stages": 2},
        "sm_80": {"BM": 64, "BN": 128, "BK": 32, "num_warps": 8, "num_stages": 3},
        "sm_89": {"BM": 64, "BN": 64, "BK": 32, "num_warps": 4, "num_stages": 3},
        "sm_90": {"BM": 64, "BN": 128, "BK": 64, "num_warps": 8, "num_stages": 3},
    },
    # By the tokens of a block: 16, or 32 and 64.
    "decode_up_16": {
        "default": {"BN": 16, "BK": 64, "num_warps": 2, "num_stages": 2},
        "sm_80": {"BN": 16, "BK": 256, "num_warps": 2, "num_stages": 4},
        "sm_89": {"BN": 16, "BK": 256, "num_warps": 2, "num_stages": 4},
        "sm_90": {"BN": 16, "BK": 256, "num_warps": 2, "num_stages": 4},
    },
    "decode_up_64": {
        "default": {"BN": 32, "BK": 32, "num_warps": 4, "num_stages": 2},
        "sm_80": {"BN": 64, "BK": 128, "num_warps": 4, "num_stages": 3},
        "sm_89": {"BN": 64, "BK": 64, "num_warps": 4, "num_stages": 3},
        "sm_90": {"BN": 64, "BK": 256, "num_warps": 4, "num_stages": 3},
    },
    # As many programs as there are multiples of BN in the outputs: 128 for 2,048.
    "decode_down": {
        "default": {"BN": 16, "BK": 32, "num_warps": 4, "num_stages": 2},
        "sm_80": {"BN": 16, "BK": 64, "num_warps": 4, "num_stages": 5},
        "sm_89": {"BN": 16, "BK": 64, "num_warps": 4, "num_stages": 4},
        "sm_90": {"BN": 16, "BK": 64, "num_warps": 4, "num_stages": 8},
    },
    # BK: words of eight neurons.
    "decode_few_down": {
        "default": {"BN": 16, "BK": 16, "num_warps": 4, "num_stages": 1},
        "sm_80": {"BN": 16, "BK": 64, "num_warps": 8, "num_stages": 1},
        "sm_89": {"BN": 16, "BK": 64, "num_warps": 8, "num_stages": 1},
        "sm_90": {"BN": 16, "BK": 64, "num_warps": 8, "num_stages": 1},
    },
}
# Architectures without a row of their own that have the shared memory of another one.
LIKE = {"sm_86": "sm_89", "sm_87": "sm_80"}
LIKE |= dict.fromkeys(("sm_100", "sm_103"), "sm_90") | dict.fromkeys(("sm_120", "sm_121"), "sm_89")


@cache
def architecture(device: torch.device) -> str:
    """Name of the device's architecture, such as "sm_90" or "gfx942"; "cpu" for the interpreter's."""
    if device.type == "cpu":
        return "cpu"
    if torch.version.hip:
        return torch.cuda.get_device_properties(device).gcnArchName.split(":")[0]
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"


def config(kernel: str, device: torch.device) -> dict[str, int]:
    """Launch options of a kernel on a device, block sizes among them."""
    table, name = CONFIGS[kernel], architecture(device)
    return launch_options(**table.get(LIKE.get(name, name), table["default"]))


def launch_options(**options: int) -> dict[str, int]:
    """The options with those of every launch: fused multiply-add, whose default differs between versions."""
    return {**options, "enable_fp_fusion": True}


@cache
def num_processors(device: torch.device) -> int:
    """Multiprocessors of the device: as many programs share the tiles of a matmul that stays resident."""
    return (
        3
        if device.type == "cpu"
        else torch.cuda.get_device_properties(device).multi_processor_count
    )


# Triton's own two take ten times as long, which every launch would pay.
def cdiv(number: int, divisor: int) -> int:
    """number / divisor, rounded up."""
    return -(-number // divisor)


def next_power_of_2(number: int) -> int:
    """The smallest power of two that is not below the number, from 1."""
    return 1 << (number - 1).bit_length()


def round_up(number: int, multiple: int) -> int:
    """The smallest multiple that is not below the number."""
    return -(-number // multiple) * multiple
