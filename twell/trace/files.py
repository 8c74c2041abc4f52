"""Traces and aggregates on disk: arrays and a description in one compressed .npz."""

from __future__ import annotations

import dataclasses
import io
import json
import lzma
import zipfile
import zlib
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np

from twell import results


class Record:
    """A dataclass of arrays, and of fields that JSON can hold."""

    kind: ClassVar[str]  # "a trace"
    compression: ClassVar[int]  # one of zipfile's constants

    def __repr__(self) -> str:
        layers = f"{self.num_layers} layers of {self.intermediate_size:,} neurons"
        return f"{type(self).__name__}({self.num_tokens:,} tokens, {layers})"

    @classmethod
    def arrays(cls) -> list[str]:
        """Return the names of the fields that are arrays."""
        return [field.name for field in dataclasses.fields(cls) if field.type == "np.ndarray"]

    def pack(self) -> bytes:
        """Return the .npz that `save` writes; the same contents give the same bytes."""
        described = {name: value for name, value in vars(self).items() if name not in self.arrays()}
        arrays = self.to_file({name: getattr(self, name) for name in self.arrays()})
        arrays["described"] = np.frombuffer(json.dumps(described).encode(), np.uint8)
        buffer = io.BytesIO()
        with zipfile.ZipFile(buffer, "w", self.compression) as file:
            for name, array in arrays.items():
                with file.open(f"{name}.npy", "w", force_zip64=True) as member:
                    array = np.ascontiguousarray(array)
                    np.lib.format.write_array(member, array, allow_pickle=False)
        return buffer.getvalue()

    def save(self, path: str | Path) -> None:
        """Write one compressed .npz; it appears whole or not at all."""
        results.write_atomically(path, self.pack())

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read the file that `save` wrote. Raises ValueError naming a damaged or other file."""
        # zipfile raises RuntimeError for unknown methods and encrypted members.
        damages = KeyError, ValueError, TypeError, EOFError, RuntimeError, zipfile.BadZipFile
        damages += lzma.LZMAError, zlib.error
        try:
            with np.load(path) as file:
                described = json.loads(file["described"].tobytes())
                return cls(
                    **cls.of_file({n: file[n] for n in cls.arrays() if n in file}), **described
                )
        except damages as error:
            raise ValueError(
                f"{path} is not {cls.kind}, or it is damaged: {error}; `twell trace` makes it again"
            ) from None

    @staticmethod
    def to_file(arrays: dict[str, Any]) -> dict[str, Any]:
        """Return the arrays as the file has them."""
        return arrays

    @staticmethod
    def of_file(arrays: dict[str, Any]) -> dict[str, Any]:
        """Undo `to_file`."""
        return arrays
