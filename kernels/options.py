"""Launch options of every kernel: block sizes, warps and stages by architecture and by size.

The table is fixed; nothing is autotuned. So a result never depends on earlier calls, a CUDA graph
can capture the first launch, and a test compiles exactly the code that each device will run.
docs/kernel-log.md has the measurements behind the numbers, in sections named here in brackets.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

# Architectures without a row of their own that have the shared memory of another one.
LIKE = {"sm_86": "sm_89", "sm_87": "sm_80"}
LIKE |= dict.fromkeys(("sm_100", "sm_103"), "sm_90") | dict.fromkeys(("sm_120", "sm_121"), "sm_89")

# In products BM is tokens, BN neurons (in products with w_down outputs), BK entries of the summed
# axis in one step; w is num_warps, s num_stages. "default" serves the architectures without values
# and Triton's interpreter ("cpu"), and fits the 64 KiB of shared memory of gfx942.
TABLE = """
kernel            | options      | default        | sm_80          | sm_89          | sm_90  | cpu

The largest tiles that fit: within 5% of cuBLAS, smaller ones within 9% [Gate].
gate_tokens       | BM BN BK w s | 64 128 32 4 2  | 128 128 64 8 3 | 128 128 32 8 3 | 128 256 64 8 3
gate_neurons      | BM BN BK w s | 128 64 32 4 2  | 128 128 64 8 3 | 128 128 32 8 3 | 256 128 64 8 3

FP8 (sm_89 and newer): 1.285 ms for 65,536 tokens, steps of 64 with 5 stages 1.293, two smaller
tiles a multiprocessor 1.39 [FP8].
gate_tokens_fp8 | BM BN BK w s | 64 128 32 4 2| | 128 128 64 8 3 | 128 256 128 8 3| 128 256 64 8 3
gate_neurons_fp8| BM BN BK w s | 128 64 32 4 2| | 128 128 64 8 3 | 256 128 128 8 3| 256 128 64 8 3

gate_hopper.py, on sm_90 alone; w of a consumer; the compiler pipelines nothing. On an H100, 131,072
tokens: 4.19 ms, in groups of 8 4.58, gate_neurons 4.48, cuBLAS 4.24 [Gate].
gate_neurons_hopper     | BM BN BK STAGES GROUP w s | | | | 256 128 64 4 4 4 1
gate_neurons_hopper_fp8 | BM BN BK STAGES GROUP w s | | | | 256 128 128 4 4 4 1
gate_tokens_hopper      | BM BN BK STAGES GROUP w s | | | | 128 256 64 4 8 4 1

One pass over the words of a block; not tuned.
union_lists       | CHUNK w s    | 4096 8 1

By the tokens of a block. PER_SM programs stay resident on each multiprocessor, so that many bytes
are in flight: 1.37 ms with three, 1.43 with two; 1.26 for blocks of 128, 1.55 with 8 warps
[Unions].
union_up_64       | BN BK PER_SM w s | 64 32 2 4 2 | 128 64 2 4 3  | 128 64 1 4 3   | 128 64 3 4 3
union_up_128      | BN BK PER_SM w s | 64 32 2 4 2 | 128 64 1 4 3  | 128 32 1 4 3   | 128 64 2 4 3

The same in FP8, with the same BN: 0.437 ms; steps of 64 0.468, two programs 0.475 [FP8].
union_up_64_fp8   | BN BK PER_SM w s | 64 32 2 4 2 |               | 128 128 1 4 3  | 128 128 3 4 3
union_up_128_fp8  | BN BK PER_SM w s | 64 32 2 4 2 |               | 128 64 1 4 3   | 128 128 2 4 3

Short steps and many stages, two of which go to reading the list in the same loop: 1.00 ms; steps of
64 with 3 stages 1.24 [Unions].
union_down_64     | BN BK w s    | 128 32 4 2     | 256 32 4 5     | 128 32 4 5     | 256 32 4 5
union_down_128    | BN BK w s    | 128 32 4 2     | 128 32 4 6     | 128 32 4 4     | 128 32 4 6

One warp packs a token's words: 0.13 ms beside the 3.5 of the row-wise kernel [Row-wise].
token_lists       | w s          | 1 1

Only counts activity; not tuned.
count_activity    | w s          | 4 1

Unrolling 2 or 4 neurons: 3.3 ms skewed (3.5), but 3.9 to 4.2 even (3.7) [Row-wise].
rowwise           | s            | 2

As rowwise.
twell_rowwise     | s            | 2

By the most tokens: narrow tiles give every multiprocessor work, deep pipelines hide latency. us of
the path, and with other options: 16 tokens 18.3 (19.6), 32: 19.9 (21.1), 64: 21.9 (23.8), 128: 27.8
(29.1), 256: 33.9 (47.2), 512: 49.1 (63.9). FP8 has the same, untuned [Few tokens].
few_gate_16       | BN BK w s    | 64 64 4 2      | 64 128 4 4     | 64 128 4 4     | 64 256 4 5
few_gate_32       | BN BK w s    | 64 64 4 2      | 64 128 4 4     | 64 128 4 3     | 64 256 4 4
few_gate_64       | BN BK w s    | 64 64 4 2      | 64 128 4 4     | 64 64 4 4      | 64 128 4 6
few_gate_128      | BN BK w s    | 64 32 4 2      | 64 64 4 4      | 64 64 4 3      | 64 128 4 4
few_gate_256      | BN BK w s    | 64 32 4 2      | 128 64 8 4     | 128 32 8 4     | 128 64 4 5
few_gate_512      | BN BK w s    | 64 32 4 2      | 128 64 8 3     | 128 32 8 3     | 128 64 4 3

TM tokens of a block, at most all of it; BN places in the lists of JOIN segments. Two warps leave
shorter chains of reductions: 16 tokens 18.5 (19.5 with four) [Few tokens].
few_up_16  | TM BN BK JOIN w s|16 16 64 1 4 2|16 16 256 1 4 4|16 16 128 1 4 4|16 16 512 1 2 3
few_up_32  | TM BN BK JOIN w s|16 16 64 1 4 2|16 16 256 1 4 4|16 16 128 1 4 4|32 16 256 2 2 5
few_up_64  | TM BN BK JOIN w s|32 16 64 1 4 2|32 16 256 1 4 4|32 16 128 1 4 4|64 16 256 1 4 4
few_up_128 | TM BN BK JOIN w s|32 32 64 2 4 2|32 64 128 4 4 4|32 64 64 4 4 4 |64 64 128 4 4 4
few_up_256 | TM BN BK JOIN w s|64 64 32 4 4 2|64 64 64 2 4 4 |64 64 64 2 4 3 |64 64 128 2 4 4
few_up_512 | TM BN BK JOIN w s|64 64 32 4 4 2|128 64 64 2 4 4|128 64 32 2 4 4|128 64 128 2 4 4
few_down_32       | TM BN BK w s | 32 32 32 4 2   | 32 32 64 4 5   | 32 32 64 4 5   | 32 32 128 4 6
few_down_256      | TM BN BK w s | 64 32 32 4 2   | 64 32 64 4 5   | 64 32 64 4 4   | 64 32 128 4 6
few_down_512      | TM BN BK w s | 64 64 32 4 2   | 128 64 32 4 6  | 128 64 32 4 5  | 128 64 64 4 8

BK: words of eight neurons, by the most tokens. One token: 11.8 us; 16 words a step 12.8, 4 warps
11.9 [Few tokens]. Three tokens: 16.2; 64 words a step 18.3 [Few tokens].
decode_down_2     | BN BK w s    | 16 16 4 1      | 16 64 8 1      | 16 64 8 1      | 16 64 8 1
decode_down_4     | BN BK w s    | 16 16 4 1      | 16 128 8 1     | 16 128 8 1     | 16 128 8 1

16 values a thread, two loads of 16 bytes of each operand; no size is measurably better.
dense             | BLOCK w s    | 4096 8 1

WORDS of 32 tokens in one step; not tuned.
training_index    | BN WORDS w s | 16 128 4 1

BN divides the neurons of a tile of union_up_64. 0.126 ms; 64 neurons 0.165 [Training].
training_elements | BN w s       | 32 8 1

Four entries at a time: 0.43 ms; eight 0.44, one slower by a third [Training].
training_lists    | UNROLL s     | 4 1

Wide tiles win where the backup has many rows: 1.24 ms; 128 x 128 1.51 [Training].
training_backup   | BH BN BT w s | 64 64 32 4 2   | 64 128 64 4 3  | 64 128 64 4 3  | 128 256 64 8 3

SLOTS entries of a list at a time: registers limit them on a GPU. Not tuned, as all of hybrid.
hybrid_rows       | SLOTS s      | 1 2            |                |                |        | 32 1
hybrid_weights    | SLOTS s      | 4 2            |                |                |        | 64 1
hybrid_backup     | BM BN BK w s | 64 64 32 4 2   | 64 128 32 8 3  | 64 64 32 4 3   | 64 128 64 8 3
hybrid_gradients  | BM BN BK w s | 64 64 32 4 2   | 64 128 32 8 3  | 64 64 32 4 3   | 128 256 64 8 3
"""


def _parse(table: str) -> dict[str, dict[str, dict[str, int]]]:
    """The options by kernel and architecture."""
    lines = ([cell.strip() for cell in line.split("|")] for line in table.splitlines())
    header, *rows = (cells for cells in lines if len(cells) > 1)
    short = {"w": "num_warps", "s": "num_stages"}
    options = {}
    for kernel, names, *cells in rows:
        keys = [short.get(name, name) for name in names.split()]
        options[kernel] = {
            architecture: dict(zip(keys, map(int, cell.split()), strict=True))
            for architecture, cell in zip(header[2:], cells, strict=False)
            if cell
        }
    return options


OPTIONS = _parse(TABLE)
# The most tokens in the names of options, by what stands before them.
BY_TOKENS = {
    kernel: sorted(int(name.rpartition("_")[2]) for name in OPTIONS if name.startswith(kernel))
    for kernel in ("few_gate_", "few_up_", "few_down_", "decode_down_")
}

# Tiles of the gate are taken in columns of so many row tiles, so that resident programs share rows
# of x and w in the cache. Groups of 32: 4.8 to 5.2 ms (4.6) [Gate].
GATE_GROUP = 8
# Versions of Triton whose Gluon compiles gate_hopper.py. Any other version may have changed Gluon.
GLUON_VERSIONS = "3.6.", "3.7."
# gate_hopper.py needs two tiles a program to overlap them, and this many steps of the summed axis.
HOPPER_TILES, HOPPER_STEPS = 2, 4
# Up to so many tokens decode.py computes without tensor cores: 16.2 us for 3 tokens, few.py 17.0;
# for 4 tokens 17.9 and 17.1 [Few tokens].
VECTOR_TOKENS = 3
# Up to so many in code of torch.compile, which cannot trace few.py.
TRACED_TOKENS = 4
# Up to so many tokens the kernels of few.py overlap: 34.4 us for 256 (35.1), but 51.3 for 512
# (50.7) [Few tokens]. Those of decode.py overlap for one token: 11.6 us (12.5); for two they took
# 14.4 (13.8), for one in FP8 13.1 (12.2) [Few tokens].
DEPENDENT_TOKENS = 256


def block_tokens(num_tokens: int, *, fp8: bool) -> int:
    """Tokens that share a union in inference.

    131,072 tokens, 29 active: 6.88 ms in blocks of 128, 7.05 of 64; in FP8 4.92 and 4.84. 640
    tokens: 0.078 and 0.071, since blocks of 128 are too few for all multiprocessors [Unions].
    """
    return 64 if fp8 or num_tokens <= 2048 else 128


def row_warps(block_k: int) -> int:
    """Warps of a program that holds a row of x and a row of y, `block_k` entries each.

    32 entries of each in a thread; more warps only make the sums over K more expensive.
    """
    return min(max(block_k // 1024, 1), 16)


def decode_up(hidden_size: int) -> dict[str, int]:
    """Launch options of decode_up_kernel: BN whole rows of weights in registers.

    Two neurons a program are slower for 1 and 2 tokens [Few tokens].
    """
    block_k = 1 << (hidden_size - 1).bit_length()
    return with_fusion(BN=1, BK=block_k, num_warps=min(max(block_k // 2048, 1), 16), num_stages=1)


def options_by_tokens(kernel: str, num_tokens: int, device: torch.device) -> dict[str, int]:
    """A copy of the launch options of "few_up_" or another of BY_TOKENS for so many tokens."""
    size = next(most for most in BY_TOKENS[kernel] if num_tokens <= most)
    return launch_options(f"{kernel}{size}", device)


@cache
def launches_dependents(num_tokens: int, device: torch.device) -> bool:
    """Whether kernels for few tokens overlap, which needs Hopper or a successor like it."""
    import triton

    name = architecture(device)
    possible = LIKE.get(name, name) == "sm_90" and not triton.knobs.runtime.interpret
    return possible and (num_tokens == 1 or VECTOR_TOKENS < num_tokens <= DEPENDENT_TOKENS)


@cache
def architecture(device: torch.device) -> str:
    """The device's architecture, such as "sm_90" or "gfx942"; "cpu" for the interpreter's."""
    if device.type == "cpu":
        return "cpu"
    if torch.version.hip:
        return torch.cuda.get_device_properties(device).gcnArchName.split(":")[0]
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"


@cache
def num_processors(device: torch.device) -> int:
    """Multiprocessors of the device, 3 in the interpreter."""
    if device.type == "cpu":
        return 3
    return torch.cuda.get_device_properties(device).multi_processor_count


def hopper_gate(
    num_tokens: int, w: Tensor, device: torch.device, *, by_neuron: bool, bias: bool
) -> bool:
    """Whether gate_hopper.py computes the gate of w [N, K]: device, Triton and size allow it."""
    fp8 = w.itemsize == 1
    if architecture(device) != "sm_90" or (not by_neuron and (bias or fp8)):
        return False
    import triton

    if triton.knobs.runtime.interpret or not triton.__version__.startswith(GLUON_VERSIONS):
        return False
    tile = launch_options(hopper_name(by_neuron), device, fp8=fp8)
    num_tiles = -(-num_tokens // tile["BM"]) * -(-len(w) // tile["BN"])
    enough = num_tiles >= HOPPER_TILES * num_processors(device)
    return enough and w.shape[1] >= HOPPER_STEPS * tile["BK"]


def hopper_name(by_neuron: bool) -> str:
    """The name of its options."""
    return f"gate_{'neurons' if by_neuron else 'tokens'}_hopper"


def launch_options(kernel: str, device: torch.device, *, fp8: bool = False) -> dict[str, int]:
    """A copy of a kernel's options on a device, `fp8`: of its form for FP8 operands.

    Raises KeyError for a name not in OPTIONS, and for a kernel that the device cannot run.
    """
    table, name = OPTIONS[f"{kernel}_fp8" if fp8 else kernel], architecture(device)
    return with_fusion(**(table.get(LIKE.get(name, name)) or table["default"]))


def with_fusion(**options: int) -> dict[str, int]:
    """The options and fused multiply-add, whose default differs between versions of Triton."""
    return {**options, "enable_fp_fusion": True}
