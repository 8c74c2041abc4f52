"""The paper's gate: g = relu(x w^T + b), packed as TwELL in the product's own epilogue.

A tile of the product is one of the format: 256 neurons of a token become 256 / C words. Word 0 is
the true count of non-zeros. Each of the others is a non-zero: its 16 bits above the 16 of its
neuron. A tile with 256 / C or more has no room for the last ones, which go to `rest`; nothing else
of that is touched.

On sm_90, gate_hopper.py packs while it multiplies. Elsewhere, and with a bias, the words are made
from the bits of gate.py as those of a whole row: Triton moves scattered stores between threads,
through more shared memory than there is.

    x [M, K]    w [N, K]    b [N] or None    T = ceil(N / 256)
    words [M, T * 256 / C] int32    rest [M, T * 256] int32, behind them in one buffer

Paper: App. A.1; `rest` is ours. Reference: twell.sparse.reference.gate_pack.
"""

from __future__ import annotations

import torch
from torch import Tensor

from twell.kernels.common import cdiv
from twell.kernels.gate import gate_bits
from twell.kernels.options import hopper_gate, hopper_name, launch_options, num_processors
from twell.kernels.rowwise import token_lists_kernel

TILE_N = 256  # the paper's tile, and the widest product of one tensor-core instruction of Hopper
COMPRESSIONS = 2, 4, 8, 16


def check_compression(compression: int) -> None:
    """Raises ValueError for a compression that the kernels do not have."""
    if compression not in COMPRESSIONS:
        raise ValueError(f"compression={compression}, expected one of {COMPRESSIONS}")


def gate_words(x: Tensor, w: Tensor, b: Tensor | None = None, compression: int = 8) -> Tensor:
    """relu(x w^T + b), rounded to x.dtype and packed: the `words` of a PackedTwELL, tiles of 256.

    x [M, K], w [N, K] contiguous, b [N] or None, all bf16 or all fp16. Returns words as above, C =
    `compression`, 0 in unused slots; non-zeros without a slot are dropped. Off Hopper g is stored,
    too. Raises ValueError for a compression other than 2, 4, 8 and 16.
    """
    check_compression(compression)
    words = torch.zeros(
        len(x), cdiv(len(w), TILE_N) * (TILE_N // compression), dtype=torch.int32, device=x.device
    )
    if len(x):
        store_words(x, w, b, words, TILE_N // compression, 0)
    return words


def store_words(
    x: Tensor, w: Tensor, b: Tensor | None, words: Tensor, num_slots: int, rest: int
) -> None:
    """Writes words of tiles with `num_slots` slots; the others to words[rest:] unless it is 0.

    Unused slots stay as they are.
    """
    num_tokens, (intermediate_size, hidden_size) = x.shape[0], w.shape
    num_tiles = cdiv(intermediate_size, TILE_N)
    fits = words.numel() < 2**31  # gate_hopper.py has places in int32
    if fits and hopper_gate(num_tokens, w, x.device, by_neuron=False, bias=b is not None):
        from twell.kernels.gate_hopper import blocks, gate_hopper_kernel

        options = launch_options(hopper_name(False), x.device)
        num_programs = min(num_processors(x.device), cdiv(num_tokens, options["BM"]) * num_tiles)
        sizes = num_tokens, intermediate_size, hidden_size, num_tiles, num_programs
        descriptors = blocks(x, [options["BM"], options["BK"]]), blocks(w, [TILE_N, options["BK"]])
        given = *descriptors, None, None, None, rest, words, None, None, *sizes
        gate_hopper_kernel[(num_programs,)](*given, BY_NEURON=False, S=num_slots, **options)
        return
    g, bits = gate_bits(x, w, b, by_neuron=False)
    sizes = intermediate_size, g.shape[1], num_tiles * num_slots
    token_lists_kernel[(num_tokens, num_tiles)](
        *(g, bits, words, rest, *sizes),
        WORDS=TILE_N // 32,
        SLOTS=num_slots,
        **launch_options("token_lists", x.device),
    )
