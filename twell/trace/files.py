"""Traces and aggregates on disk: arrays and a description in one compressed .npz."""

from __future__ import annotations

import io
import json
import lzma
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import numpy as np

Record = TypeVar("Record")


def pack(arrays: dict[str, np.ndarray], described: dict, compression: int) -> bytes:
    """Return an .npz that numpy.load reads; the same contents give the same bytes.

    described: what JSON can hold; compression: one of zipfile's constants.
    """
    arrays = arrays | {"described": np.frombuffer(json.dumps(described).encode(), np.uint8)}
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", compression) as file:
        for name, array in arrays.items():
            with file.open(f"{name}.npy", "w", force_zip64=True) as member:
                np.lib.format.write_array(member, np.ascontiguousarray(array), allow_pickle=False)
    return buffer.getvalue()


def unpack(
    path: str | Path, make: Callable[..., Record], names: Sequence[str], kind: str
) -> Record:
    """Return `make` of the arrays `names` and the description in a file.

    Raises ValueError naming a file that is damaged, or not of this `kind`.
    """
    try:
        with np.load(path) as file:
            described = json.loads(file["described"].tobytes())
            return make(**{name: file[name] for name in names}, **described)
    except (KeyError, ValueError, TypeError, zipfile.BadZipFile, lzma.LZMAError, EOFError) as error:
        raise ValueError(
            f"{path} is not {kind}, or it is damaged: {error}; `twell trace` makes it again"
        ) from None
