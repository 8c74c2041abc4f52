"""Conversions between dense matrices and the formats of twell.sparse.formats, bit for bit.

For tests of the formats on a GPU. Values are moved and tested as bits (a non-zero has a bit set
beside the sign), so NaN payloads survive and -0.0 becomes +0.0. One kernel packs all formats whose
entries stand at the front of slots: a *segment* of a row is a tile for TwELL, the whole row for
ELL. A function waits for the device where the size of its result depends on the data.

    dense [M, N] of bf16, fp16 or fp32; the formats have shapes of their own

Reference: `pack` and `unpack` of each format in twell.sparse.formats;
test: tests/kernels/test_paper_pack.py; options: kernels/options.py 'pack', 'pack_union'.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from twell.kernels.common import cdiv
from twell.kernels.options import launch_options
from twell.sparse.formats import (
    ELL,
    MAX_COLUMNS,
    Hybrid,
    PackedTwELL,
    SparseRows,
    TileUnion,
    TwELL,
    check_backup,
)

BITS = {torch.bfloat16: torch.int16, torch.float16: torch.int16, torch.float32: torch.int32}


@triton.jit
def pack_segments_kernel(
    dense_ptr,
    values_ptr,
    indices_ptr,
    counts_ptr,
    num_segments,
    N,
    tile_n,
    num_tiles,
    capacity,
    MAGNITUDE: tl.constexpr,
    WORDS: tl.constexpr,
    SEGMENTS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Moves the non-zeros of segments of `tile_n` columns to `capacity` slots; counts them all."""
    segments = tl.program_id(0).to(tl.int64) * SEGMENTS + tl.arange(0, SEGMENTS)
    valid = segments < num_segments
    row_ptr = dense_ptr + (segments // num_tiles)[:, None] * N
    begin = (segments % num_tiles * tile_n).to(tl.int32)
    end = tl.minimum(begin + tile_n, N)
    slot_ptr = values_ptr + segments[:, None] * (capacity + WORDS) + WORDS
    index_ptr = indices_ptr + segments[:, None] * capacity
    counts = tl.zeros((SEGMENTS,), tl.int32)
    for start in range(0, tile_n, CHUNK):
        columns = begin[:, None] + start + tl.arange(0, CHUNK)[None, :]
        bits = tl.load(row_ptr + columns, mask=valid[:, None] & (columns < end[:, None]), other=0)
        active = (bits & MAGNITUDE) != 0
        slots = counts[:, None] + tl.cumsum(active.to(tl.int32), 1) - 1
        kept = active & (slots < capacity)
        if WORDS:
            tl.store(slot_ptr + slots, (bits.to(tl.int32) << 16) | columns, mask=kept)
        else:
            tl.store(slot_ptr + slots, bits, mask=kept)
            tl.store(index_ptr + slots, columns.to(tl.int16), mask=kept)
        counts += tl.sum(active.to(tl.int32), 1)
    if WORDS:
        tl.store(values_ptr + segments * (capacity + 1), counts, mask=valid)
    else:
        tl.store(counts_ptr + segments, counts, mask=valid)


@triton.jit
def unpack_segments_kernel(
    values_ptr,
    indices_ptr,
    counts_ptr,
    dense_ptr,
    num_segments,
    N,
    num_tiles,
    capacity,
    WORDS: tl.constexpr,
    SEGMENTS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """The reverse: scatters the filled slots of segments into a matrix of zeros."""
    segments = tl.program_id(0).to(tl.int64) * SEGMENTS + tl.arange(0, SEGMENTS)
    valid = segments < num_segments
    row_ptr = dense_ptr + (segments // num_tiles)[:, None] * N
    segment_ptr = values_ptr + segments[:, None] * (capacity + WORDS)
    if WORDS:
        counts = tl.load(values_ptr + segments * (capacity + 1), mask=valid, other=0)
    else:
        counts = tl.load(counts_ptr + segments, mask=valid, other=0)
    for start in range(0, capacity, CHUNK):
        slots = start + tl.arange(0, CHUNK)[None, :]
        filled = (slots < tl.minimum(counts, capacity)[:, None]) & valid[:, None]
        values = tl.load(segment_ptr + WORDS + slots, mask=filled, other=0)
        if WORDS:
            columns = values & 0xFFFF
            values = values >> 16
        else:
            place = indices_ptr + segments[:, None] * capacity + slots
            columns = tl.load(place, mask=filled, other=0).to(tl.int32) & 0xFFFF
        tl.store(row_ptr + columns, values.to(dense_ptr.dtype.element_ty), mask=filled)


@triton.jit
def block_flags_kernel(
    dense_ptr,
    flags_ptr,
    M,
    N,
    block_m,
    MAGNITUDE: tl.constexpr,
    ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Whether any token of a block has a column active."""
    block = tl.program_id(0)
    columns = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    end = tl.minimum(block * block_m + block_m, M)
    some = tl.zeros((CHUNK,), tl.int32)
    for start in range(block * block_m, end, ROWS):
        rows = start + tl.arange(0, ROWS)
        inside = (rows < end)[:, None] & (columns < N)[None, :]
        bits = tl.load(
            dense_ptr + rows.to(tl.int64)[:, None] * N + columns[None, :], mask=inside, other=0
        )
        some |= tl.max(((bits & MAGNITUDE) != 0).to(tl.int32), 0)
    tl.store(flags_ptr + block.to(tl.int64) * N + columns, some.to(tl.int8), mask=columns < N)


@triton.jit
def move_union_kernel(
    dense_ptr,
    values_ptr,
    indices_ptr,
    offsets_ptr,
    M,
    N,
    block_m,
    PACK: tl.constexpr,
    MAGNITUDE: tl.constexpr,
    ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Gathers the columns of a block's union into [block_m, union], or scatters them back."""
    parts = tl.cdiv(block_m, ROWS)
    block = tl.program_id(0) // parts
    tokens = tl.program_id(0) % parts * ROWS + tl.arange(0, ROWS)
    rows = block * block_m + tokens
    offset = tl.load(offsets_ptr + block)
    size = tl.load(offsets_ptr + block + 1) - offset
    for start in range(0, size, CHUNK):
        places = start + tl.arange(0, CHUNK)
        columns = tl.load(indices_ptr + offset + places, mask=places < size, other=0)
        in_block = (tokens < block_m)[:, None] & (places < size)[None, :]
        in_dense = in_block & (rows < M)[:, None]
        dense = dense_ptr + rows.to(tl.int64)[:, None] * N + columns[None, :]
        packed = values_ptr + block_m * offset + tokens[:, None] * size + places[None, :]
        if PACK:
            bits = tl.load(dense, mask=in_dense, other=0)
            tl.store(packed, tl.where((bits & MAGNITUDE) != 0, bits, 0), mask=in_block)
        else:
            tl.store(dense, tl.load(packed, mask=in_dense, other=0), mask=in_dense)


def _check_dense(dense: Tensor) -> Tensor:
    if dense.dim() != 2 or not 1 <= dense.shape[1] <= MAX_COLUMNS:
        raise ValueError(
            f"dense has shape {tuple(dense.shape)}, expected [tokens, 1 to {MAX_COLUMNS}]"
        )
    if dense.dtype not in BITS:
        raise TypeError(f"dense has dtype {dense.dtype}, expected {' or '.join(map(str, BITS))}")
    return dense.contiguous()


def _bits(values: Tensor) -> Tensor:
    return values.view(BITS[values.dtype])


def _magnitude(values: Tensor) -> int:
    return torch.iinfo(BITS[values.dtype]).max


def _pack(dense: Tensor, tile_n: int, capacity: int, words: bool = False):
    """Values (or words) and indices [M, tiles, capacity], counts [M, tiles]; of all segments."""
    num_tokens, n_cols = dense.shape
    num_tiles = cdiv(n_cols, tile_n)
    shape = num_tokens, num_tiles, capacity + words
    values = torch.zeros(
        shape, dtype=torch.int32 if words else BITS[dense.dtype], device=dense.device
    )
    indices = counts = values
    if not words:
        indices = torch.zeros(shape, dtype=torch.int16, device=dense.device)
        counts = torch.empty(shape[:2], dtype=torch.int32, device=dense.device)
    num_segments = num_tokens * num_tiles
    if num_segments:
        options = launch_options("pack", dense.device)
        pack_segments_kernel[(cdiv(num_segments, options["SEGMENTS"]),)](
            _bits(dense),
            values,
            indices,
            counts,
            num_segments,
            n_cols,
            tile_n,
            num_tiles,
            capacity,
            MAGNITUDE=_magnitude(dense),
            WORDS=words,
            **options,
        )
    if words:
        return values
    return values.view(dense.dtype), indices.view(torch.uint16), counts


def _overflow(dense: Tensor, counts: Tensor, capacity: int) -> tuple[Tensor, Tensor]:
    rows = (counts > capacity).any(1).nonzero().flatten()
    return rows.int(), _without_negative_zero(dense[rows])


def _without_negative_zero(values: Tensor) -> Tensor:
    return values.masked_fill(values == 0, 0)


def to_twell(dense: Tensor, tile_n: int = 256, compression: int = 8) -> TwELL:
    """As `TwELL.pack`; dense [M, N] of bf16, fp16 or fp32.

    Waits for the number of overflow rows.
    """
    dense = _check_dense(dense)
    capacity = TwELL._capacity(tile_n, compression)
    values, indices, counts = _pack(dense, tile_n, capacity)
    return TwELL(
        values,
        indices,
        counts,
        *_overflow(dense, counts, capacity),
        dense.shape[1],
        tile_n,
        compression,
    )


def to_packed_twell(dense: Tensor, tile_n: int = 256, compression: int = 8) -> PackedTwELL:
    """As `PackedTwELL.pack`; dense [M, N] of bf16 or fp16.

    Waits for the number of overflow rows.
    """
    dense = _check_dense(dense)
    if dense.dtype == torch.float32:
        raise TypeError("dense has dtype torch.float32, expected torch.bfloat16 or torch.float16")
    capacity = PackedTwELL._capacity(tile_n, compression)
    words = _pack(dense, tile_n, capacity, words=True)
    overflow = _overflow(dense, words[:, :, 0], capacity)
    return PackedTwELL(words.flatten(1), *overflow, dense.shape[1], tile_n, compression)


def to_ell(dense: Tensor, width: int | None = None) -> ELL:
    """As `ELL.pack`; dense [M, N] of bf16, fp16 or fp32.

    Waits for the length of the longest row.
    """
    dense = _check_dense(dense)
    num_tokens, n_cols = dense.shape
    _, _, counts = _pack(dense, n_cols, 0)
    longest = int(counts.max()) if num_tokens else 0
    width = longest if width is None else width
    if longest > width:
        raise ValueError(
            f"a row has {longest} non-zeros, more than width={width}; "
            f"a width of {longest} is needed"
        )
    values, indices, counts = _pack(dense, n_cols, width)
    return ELL(values[:, 0], indices[:, 0], counts[:, 0], n_cols)


def to_hybrid(dense: Tensor, ell_width: int = 128, backup_rows: int | None = None) -> Hybrid:
    """As `Hybrid.pack`; dense [M, N] of bf16, fp16 or fp32.

    Waits for the number of backup rows.
    """
    dense = _check_dense(dense)
    values, indices, counts = _pack(dense, dense.shape[1], ell_width)
    values, indices, counts = values[:, 0], indices[:, 0], counts[:, 0]
    compact = counts <= ell_width
    rows = compact.nonzero().flatten()
    needed = len(compact) - len(rows)
    backup_rows = check_backup(needed, ell_width, backup_rows)
    indices = indices.view(torch.int16)[rows].view(torch.uint16)  # torch does not index uint16
    ell = ELL(values[rows], indices, counts[rows], dense.shape[1])
    backup = dense.new_zeros(backup_rows, dense.shape[1])
    backup[:needed] = _without_negative_zero(dense[~compact])
    slot = torch.where(compact, compact.cumsum(0) - 1, ~((~compact).cumsum(0) - 1))
    return Hybrid(ell, backup, slot.int())


def to_union(dense: Tensor, block_m: int = 64) -> TileUnion:
    """As `TileUnion.pack`; dense [M, N] of bf16, fp16 or fp32.

    Waits for the total size of the unions.
    """
    dense = _check_dense(dense)
    if block_m < 1:
        raise ValueError(f"block_m={block_m}, expected at least 1")
    num_tokens, n_cols = dense.shape
    num_blocks = cdiv(num_tokens, block_m)
    flags = torch.zeros(num_blocks, n_cols, dtype=torch.int8, device=dense.device)
    offsets = torch.zeros(num_blocks + 1, dtype=torch.int64, device=dense.device)
    if num_blocks:
        options = launch_options("pack_union", dense.device)
        block_flags_kernel[(num_blocks, cdiv(n_cols, options["CHUNK"]))](
            _bits(dense),
            flags,
            num_tokens,
            n_cols,
            block_m,
            MAGNITUDE=_magnitude(dense),
            **options,
        )
    offsets[1:] = flags.sum(1).cumsum(0)
    indices = flags.nonzero()[:, 1].int()
    values = dense.new_empty(block_m * len(indices))
    union = TileUnion(values, indices, offsets, num_tokens, n_cols, block_m)
    _move_union(dense, union, pack=True)
    return union


def _move_union(dense: Tensor, union: TileUnion, pack: bool) -> None:
    num_blocks = len(union.offsets) - 1
    if num_blocks:
        options = launch_options("pack_union", dense.device)
        move_union_kernel[(num_blocks * cdiv(union.block_m, options["ROWS"]),)](
            _bits(dense),
            _bits(union.values),
            union.indices,
            union.offsets,
            *dense.shape,
            union.block_m,
            PACK=pack,
            MAGNITUDE=_magnitude(dense),
            **options,
        )


def _scatter(
    values: Tensor, indices: Tensor, counts: Tensor, dense: Tensor, num_tiles: int, capacity: int
) -> None:
    """Writes the slots of all segments into `dense`, which is 0.

    Words hold values, indices and counts: one tensor given three times.
    """
    words = values is indices
    num_segments = dense.shape[0] * num_tiles
    if num_segments:
        options = launch_options("pack", dense.device)
        unpack_segments_kernel[(cdiv(num_segments, options["SEGMENTS"]),)](
            values.contiguous() if words else _bits(values.contiguous()),
            indices.contiguous().view(torch.int32 if words else torch.int16),
            counts.contiguous(),
            _bits(dense),
            num_segments,
            dense.shape[1],
            num_tiles,
            capacity,
            WORDS=words,
            **options,
        )


def unpack(sparse: SparseRows) -> Tensor:
    """The dense matrix [M, N] of any of the formats, as their own `unpack`. Waits for nothing.

    Raises TypeError for values other than bf16, fp16 and fp32, or for the 32-bit indices of a wide
    transposed Hybrid.
    """
    if isinstance(sparse, Hybrid):
        # Backup row ~slot stands at index `slot`, counted from the end.
        stacked = torch.cat([unpack(sparse.ell), sparse.backup.flip(0)])
        return stacked[sparse.slot.long()]
    if sparse.dtype not in BITS:
        raise TypeError(f"values have dtype {sparse.dtype}, expected {' or '.join(map(str, BITS))}")
    device = sparse.words.device if isinstance(sparse, PackedTwELL) else sparse.values.device
    dense = torch.zeros(sparse.shape, dtype=sparse.dtype, device=device)
    if isinstance(sparse, TileUnion):
        _move_union(dense, sparse, pack=False)
        return dense
    if isinstance(sparse, ELL):
        if sparse.indices.dtype != torch.uint16:
            raise TypeError(f"indices have dtype {sparse.indices.dtype}, expected torch.uint16")
        _scatter(sparse.values, sparse.indices, sparse.counts, dense, 1, sparse.values.shape[1])
        return dense
    num_tiles = cdiv(sparse.n_cols, sparse.tile_n)
    capacity = sparse._capacity(sparse.tile_n, sparse.compression)
    if isinstance(sparse, PackedTwELL):
        _scatter(sparse.words, sparse.words, sparse.words, dense, num_tiles, capacity)
    else:
        _scatter(sparse.values, sparse.indices, sparse.counts, dense, num_tiles, capacity)
    _bits(dense)[sparse.overflow_rows.long()] = _bits(sparse.overflow_values)
    return dense
