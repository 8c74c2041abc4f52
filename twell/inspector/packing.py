"""A passage as bytes: one compressed block that twell/inspector/browser/data.js unpacks.

Values of large passages are rounded to 16 bits (bf16). Of more than MAX_ENTRIES active neurons each
token and layer keeps its strongest; counts and sums are of all.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Sequence

import numpy as np

from twell import trace
from twell.inspector.compare import compared
from twell.inspector.effects import Direct
from twell.inspector.figure import PALETTES
from twell.inspector.side import Side
from twell.trace import Trace

MAX_ENTRIES = 800_000  # active neurons of all tokens: 2,048 tokens x 12 layers x 30 are 737,280
MOVERS = 20  # neurons with the largest direct effects that each token keeps
PRECISE_ENTRIES = 200_000  # passages with more round their values to 16 bits, others to 24


def leading(values: np.ndarray, number: int) -> np.ndarray:
    """Round float32 values to their leading bytes, of which two are bfloat16. NaN stays NaN."""
    values = np.asarray(values, np.float32)
    whole = np.where(np.isnan(values), np.float32(np.nan), values).view(np.uint32).astype(np.uint64)
    rest = 32 - 8 * number
    rounded = (whole + (1 << (rest - 1)) - 1 + (whole >> rest & 1)) >> rest << rest
    return rounded.astype(np.uint32).view(np.float32)


def least(numbers: np.ndarray) -> np.ndarray:
    """Return numbers from 0 in the smallest type that the browser reads."""
    return numbers.astype(np.min_scalar_type(int(numbers.max(initial=0))))


def block(header: dict, arrays: dict[str, np.ndarray], level: int) -> bytes:
    """Return a header and arrays, compressed (zlib).

    Inside: the length of the header as JSON (uint32), the header, and the arrays one after the
    other. header["arrays"] lists (name, dtype, entries, planes). A plane has one byte of all
    entries (0: the lowest): so they compress better. Planes of zeros are left out.
    """
    listed, parts = [], []
    for name, array in arrays.items():
        entries = np.frombuffer(array.tobytes(), np.uint8).reshape(-1, array.itemsize)
        planes = np.flatnonzero(entries.any(axis=0)).tolist()
        listed.append((name, array.dtype.str.lstrip("<|"), array.size, planes))
        parts += [entries[:, plane].tobytes() for plane in planes]
    text = json.dumps(header | {"arrays": listed}).encode()
    return zlib.compress(b"".join([len(text).to_bytes(4, "little"), text, *parts]), level)


def pack(shown: Sequence[Side], *, max_entries: int = MAX_ENTRIES, level: int = 6) -> bytes:
    """Return sides as a `block` for the browser; names of the arrays of side i begin with "i.".

    max_entries: active neurons of all sides that are kept; where there are more, each token and
    layer keeps its header["sides"][i]["strongest"] strongest.
    """
    strongest = _strongest([side.trace for side in shown], max_entries)
    precise = strongest is None and sum(len(side.trace.values) for side in shown) <= PRECISE_ENTRIES
    arrays = {
        f"{number}.{name}": array
        for number, side in enumerate(shown)
        for name, array in _arrays(side, strongest, precise).items()
    }
    about = compared(shown)
    if not precise:
        about["reasons"].append("Values are rounded to bf16, within 0.4%.")
    if strongest is not None:
        about["reasons"].append(
            f"Of each token and layer the {strongest} strongest neurons are kept here; counts, "
            "shares and marks are of all. Find neurons ranks the kept ones."
        )
    header = {
        "sides": [_about(side, strongest) for side in shown],
        **about,
        "palettes": PALETTES,
    }
    return block(header, arrays, level)


def _strongest(traces: Sequence[Trace], max_entries: int) -> int | None:
    """The most entries that each token and layer can keep within max_entries; None: all."""
    counts = np.concatenate([np.diff(t.indptr) for t in traces])
    if counts.sum() <= max_entries:
        return None
    # As the limit k rises by one, as many entries come in as rows have more than k.
    more = len(counts) - np.bincount(counts).cumsum()
    return int(np.searchsorted(more.cumsum(), max_entries, side="right"))


def _arrays(side: Side, strongest: int | None, precise: bool) -> dict[str, np.ndarray]:
    """Return the arrays of one side, rows (layer, token) in the order of the trace.

    token: index of the header's strings; starts: the first token of each sequence, and the end;
    total: the sum of |h| in a row; gap: from the neuron before in the row. fires (where entries are
    missing) and rate (of the aggregate) are of each neuron. expected: indices of header words.
    """
    passage = side.trace
    counts = np.diff(passage.indptr)
    rows = np.repeat(np.arange(len(counts)), counts)
    kept = np.ones(len(rows), bool)
    if strongest is not None:
        order = np.lexsort((-np.abs(np.nan_to_num(passage.values, nan=np.inf)), rows))
        rank = np.arange(len(rows)) - np.repeat(passage.indptr[:-1], counts)
        kept[order] = rank < strongest
    neuron = passage.indices.astype(np.int64)[kept]
    first = np.diff(rows[kept], prepend=-1) > 0
    gap = np.where(first, neuron, np.diff(neuron, prepend=0))
    starts = np.flatnonzero(np.diff(passage.sequence, prepend=-1))
    total = np.bincount(rows, weights=np.abs(passage.values), minlength=len(counts))
    arrays = {
        "token": least(np.unique(passage.token_ids, return_inverse=True)[1]),
        "starts": np.append(starts, passage.num_tokens).astype(np.uint32),
        "position": passage.position.astype(np.uint32),
        "logprob": passage.logprob.astype(np.float32),
        "counts": least(counts),
        "total": leading(total, 2),
        "gap": least(gap),
        "value": leading(passage.values[kept], 3 if precise else 2),
    }
    if strongest is not None:
        arrays["fires"] = passage.neurons()[0].reshape(-1).astype(np.uint32)
    if side.aggregate is not None:
        fires = side.aggregate.neurons()[0].reshape(-1)
        arrays["rate"] = leading(fires / max(side.aggregate.num_tokens, 1), 2)
    if side.predictions is not None:
        words = np.unique(side.predictions.ids, return_inverse=True)[1]
        arrays["expected"] = words.reshape(-1).astype(np.uint32)
        arrays["probability"] = leading(side.predictions.probability.reshape(-1), 2)
    if side.direct is not None:
        arrays |= _effects(passage, side.direct)
    if side.silenced is not None:
        layer, silent, rise = side.silenced
        arrays["silenced"] = (layer * passage.intermediate_size + silent).astype(np.uint32)
        arrays["rises"] = leading(np.round(rise * 1024) / 1024, 2)  # compresses to half
    return arrays


def _effects(passage: Trace, direct: Direct) -> dict[str, np.ndarray]:
    """Return direct effects on two logits of each token.

    parts: of the embedding, then attention and neurons of each layer; mover: the MOVERS neurons
    with the largest effect, layer * N + neuron, from 1 (0: none); moved: their effects.
    """
    size = np.abs(direct.neurons).max(1)
    row = np.repeat(np.arange(len(passage.indptr) - 1), np.diff(passage.indptr))
    layer, token = np.divmod(row, max(passage.num_tokens, 1))
    order = np.lexsort((-size, token))
    rank = np.arange(len(order)) - np.searchsorted(token[order], token[order])
    best, rank = order[rank < MOVERS], rank[rank < MOVERS]
    mover = np.zeros((passage.num_tokens, MOVERS), np.uint32)
    moved = np.zeros((passage.num_tokens, MOVERS, 2))
    mover[token[best], rank] = 1 + layer[best] * passage.intermediate_size + passage.indices[best]
    moved[token[best], rank] = direct.neurons[best]
    layers = np.stack([direct.attention, direct.sums], 2).reshape(len(mover), -1, 2)
    parts = np.concatenate([direct.start[:, None], layers], 1)
    packed = {"parts": leading(parts, 2), "moved": leading(moved, 2)}
    return {name: array.reshape(-1) for name, array in packed.items()} | {"mover": least(mover)}


def _about(side: Side, strongest: int | None) -> dict:
    """The header's entry of one side."""
    passage = side.trace
    ids, first = np.unique(passage.token_ids, return_index=True)
    expected = [] if side.predictions is None else np.unique(side.predictions.ids).tolist()
    special = np.isin(ids, passage.meta.get("special_ids", []))
    return {
        "name": side.name,
        "tokens": passage.num_tokens,
        "start": side.of[0],
        "of": side.of[1],
        "layers": side.shape[0],
        "neurons": side.shape[1],
        "strings": [passage.strings[token] for token in first],
        "ids": ids.tolist(),
        "special": np.flatnonzero(special).tolist(),
        "strongest": strongest,
        "aggregate": None if side.aggregate is None else side.aggregate.num_tokens,
        "words": side.model is not None,
        "expected": trace.token_strings(side.tokenizer, expected) if expected else [],
        "changes": list(side.changes),
    }
