"""Random sides for the tests of the inspector, and what the browser makes of a packed one."""

import json
import zlib

import numpy as np

from tests.factories.analysis import make_trace  # noqa: F401
from tests.factories.trace import aggregate_of  # noqa: F401
from twell.trace import Trace


def large_trace(random, tokens, layers, neurons, active):
    """A trace of English words, with so many active neurons in the mean of a token and layer."""
    counts = random.poisson(active, layers * tokens)
    indices = np.concatenate([np.sort(random.choice(neurons, n, replace=False)) for n in counts])
    words = [f" {word}" for word in "the of and to in that is was for it with as his on be".split()]
    ids = random.integers(0, len(words), tokens).astype(np.int32)
    signs = random.choice([-1, 1], len(indices))
    return Trace(
        token_ids=ids,
        strings=[words[n] for n in ids],
        logprob=-random.exponential(3, tokens).astype(np.float32),
        sequence=np.zeros(tokens, np.int32),
        position=np.arange(tokens, dtype=np.int32),
        indptr=np.concatenate([[0], counts.cumsum()]),
        indices=indices.astype(np.uint16),
        values=(random.lognormal(-1, 1, len(indices)) * signs).astype(np.float32),
        intermediate_size=neurons,
    )


def float32(bits, shift=16):
    """float32 of which the leading bits are given."""
    return (bits.astype(np.uint32) << np.uint32(shift)).view(np.float32)


def unpack(data: bytes) -> tuple[dict, dict[str, np.ndarray]]:
    """Return the header and the arrays of `pack`, each as it was packed."""
    raw = zlib.decompress(data)
    start = 4 + int.from_bytes(raw[:4], "little")
    header = json.loads(raw[4:start])
    arrays = {
        name: np.frombuffer(raw, dtype, length, start + offset)
        for name, dtype, length, offset in header["arrays"]
    }
    return header, arrays


def floats(arrays, name):
    """float32 of an array's leading bytes."""
    planes = [arrays[one] for one in sorted(arrays) if one.startswith(f"{name}_")]
    return float32(sum(p.astype(np.uint32) << (24 - 8 * n) for n, p in enumerate(planes)), 0)


def unpacked(data):
    """The header, and of each side its entry there and its arrays; rows: (neurons, values) each."""
    header, arrays = unpack(data)
    sides = []
    for number, about in enumerate(header["sides"]):
        own = [name for name in arrays if name.startswith(f"{number}.")]
        side = {name.split(".")[1]: arrays[name] for name in own}
        kept = np.minimum(side["counts"].astype(int), about["strongest"] or about["neurons"])
        gap = sum(side[f"gap_{n}"].astype(int) << 8 * n for n in range(3))
        assert ("value_2" in side) == about["precise"]
        parts = [np.split(array, kept.cumsum()[:-1]) for array in (gap, floats(side, "value"))]
        side["rows"] = [(gaps.cumsum(), values) for gaps, values in zip(*parts, strict=True)]
        sides.append((about, side))
    return header, sides
