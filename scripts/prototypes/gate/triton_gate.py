"""Today's kernel in plain Triton with other ways of packing the bits; by neurons only."""
import torch, triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor
from twell.kernels.common import cdiv, gate_value, round_up, scaled
from twell.kernels.gate import tile_of, tile_product, with_bias
from twell.kernels.options import launch_options, num_processors

@triton.jit
def either(a, b):
    return a | b

@triton.jit
def words_of(g, ROWS: tl.constexpr, WORDS: tl.constexpr):
    """32 columns are 4 blocks of 4 threads of 2 entries: or in a thread first, by constants."""
    active = (g.to(tl.uint16, bitcast=True).to(tl.int32) & 0x7FFF) != 0
    active = tl.reshape(active, (ROWS, WORDS, 4, 4, 2))
    block = tl.reshape(tl.arange(0, 4), (1, 1, 4, 1, 1))
    entry = tl.reshape(tl.arange(0, 2), (1, 1, 1, 1, 2))
    part = tl.where(active, 1 << (8 * block + entry), 0)
    part = tl.reduce(tl.reduce(part, 4, either), 2, either)
    return tl.reduce(part << (2 * tl.arange(0, 4)[None, None, :]), 2, either)

@triton.jit(do_not_specialize=["M", "N"])
def kernel(x_desc, w_desc, b_ptr, x_scale_ptr, w_scale_ptr, g_desc, bits_ptr, zero_ptr, threshold, M, N, K, bits_stride, num_programs,
           GROUP: tl.constexpr, BY_NEURON: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    if zero_ptr is not None:
        if tl.program_id(0) == 0:
            tl.store(zero_ptr, 0)
    num_token_tiles = tl.cdiv(M, BM)
    num_neuron_tiles = tl.cdiv(N, BN)
    ROWS: tl.constexpr = BN if BY_NEURON else BM
    WORDS: tl.constexpr = (BM if BY_NEURON else BN) // 32
    for number in tl.range(tl.program_id(0), num_token_tiles * num_neuron_tiles, num_programs, flatten=True):
        token_tile, neuron_tile = tile_of(number, num_token_tiles, num_neuron_tiles, GROUP)
        token, neuron = token_tile * BM, neuron_tile * BN
        acc = tile_product(x_desc, w_desc, token, neuron, K, BM, BN, BK, BY_NEURON)
        tokens, neurons = token + tl.arange(0, BM), neuron + tl.arange(0, BN)
        acc = scaled(acc, x_scale_ptr, w_scale_ptr, tokens, neurons, M, N, BY_NEURON)
        acc = with_bias(acc, b_ptr, neurons, N, BY_NEURON)
        g = gate_value(acc, threshold, g_desc.dtype)
        row, column = (neuron, token) if BY_NEURON else (token, neuron)
        g_desc.store([row, column], g)
        bits = words_of(g, ROWS, WORDS)
        words = column // 32 + tl.arange(0, WORDS)
        inside = (M if BY_NEURON else N) - words * 32
        mask = tl.where(inside >= 32, -1, (1 << tl.minimum(tl.maximum(inside, 0), 31)) - 1)
        bits &= mask[None, :]
        rows = row + tl.arange(0, ROWS)
        if BY_NEURON:
            tl.store(bits_ptr + words.to(tl.int64)[None, :] * bits_stride + rows[:, None], bits)
        else:
            tl.store(bits_ptr + rows.to(tl.int64)[:, None] * bits_stride + words[None, :], bits)

def launch(x, w, b, *, by_neuron, options, zero=None, scales=(None, None), threshold=0.0, run=None):
    M, (N, K) = x.shape[0], w.shape
    fp8 = w.itemsize == 1
    o = launch_options("gate_neurons" if by_neuron else "gate_tokens", x.device, fp8=fp8) | {k: v for k, v in options.items() if k in ("BM", "BN", "BK", "num_stages", "num_warps")}
    tokens, width = round_up(M, o["BM"]), round_up(N, 256)
    dtype = torch.bfloat16 if fp8 else x.dtype
    if by_neuron:
        g, block = x.new_empty(N, tokens, dtype=dtype), [o["BN"], o["BM"]]
        bits = torch.empty(tokens // 32, width, dtype=torch.int32, device=x.device)
    else:
        g, block = x.new_empty(M, width, dtype=dtype), [o["BM"], o["BN"]]
        bits = torch.empty(tokens, width // 32, dtype=torch.int32, device=x.device)
    tiles = cdiv(M, o["BM"]) * cdiv(N, o["BN"])
    P = min(num_processors(x.device), tiles)
    args = (TensorDescriptor.from_tensor(x, [o["BM"], o["BK"]]), TensorDescriptor.from_tensor(w, [o["BN"], o["BK"]]), b, *scales,
            TensorDescriptor.from_tensor(g, block), bits, zero, threshold or None, M, N, K, bits.shape[1], P)
    given = dict(GROUP=options.get("GROUP", 8), BY_NEURON=by_neuron, **o)
    k = options.get("kernel", kernel)
    c = run(k, (P,), args, given) if run else k[(P,)](*args, **given)
    return g, bits, c
