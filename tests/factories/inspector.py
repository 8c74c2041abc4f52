"""Random sides for the tests of the inspector, and what the browser makes of a packed one."""

import json
import zlib

import numpy as np

from tests.factories.analysis import make_trace  # noqa: F401
from tests.factories.trace import aggregate_of  # noqa: F401


def unpack(data: bytes) -> tuple[dict, dict[str, np.ndarray]]:
    """Return the header and the arrays of `pack`, each as it was packed."""
    raw = zlib.decompress(data)
    start = 4 + int.from_bytes(raw[:4], "little")
    header = json.loads(raw[4:start])
    arrays = {}
    for name, dtype, length, planes in header["arrays"]:
        entries = np.zeros((length, np.dtype(dtype).itemsize), np.uint8)
        for plane in planes:
            entries[:, plane] = np.frombuffer(raw, np.uint8, length, start)
            start += length
        arrays[name] = np.frombuffer(entries.tobytes(), dtype).copy()
    return header, arrays


def unpacked(data):
    """The header, and of each side its entry there and its arrays; rows: (neurons, values) each."""
    header, arrays = unpack(data)
    sides = []
    for number, about in enumerate(header["sides"]):
        own = [name for name in arrays if name.startswith(f"{number}.")]
        side = {name.split(".")[1]: arrays[name] for name in own}
        kept = np.minimum(side["counts"].astype(int), about["strongest"] or about["neurons"])
        parts = [np.split(side[name], kept.cumsum()[:-1]) for name in ("gap", "value")]
        side["rows"] = [(gaps.cumsum(), values) for gaps, values in zip(*parts, strict=True)]
        sides.append((about, side))
    return header, sides
