"""Notes on neurons: a text file beside the model, a line a neuron, such as `5:482 years`.

A line is LAYER:NEURON, white space, and the note. Empty lines and lines that begin with # are left
as they are.
"""

from __future__ import annotations

import re
from pathlib import Path

from twell import results

NOTES = "notes.txt"
_LINE = re.compile(r"(\d+):(\d+)\s+(\S.*)")


def read_notes(path: Path, shape: tuple[int, int]) -> dict[tuple[int, int], str]:
    """Return the notes of a file by (layer, neuron); none where there is no file.

    shape: layers, and neurons a layer. Raises ValueError naming a line that is no note, and a
    neuron that does not exist.
    """
    notes = {}
    if not path.is_file():
        return notes
    for number, line in enumerate(path.read_text(encoding="utf-8-sig").splitlines(), 1):
        if not line.strip() or line.startswith("#"):
            continue
        match = _LINE.fullmatch(line.strip())
        if match is None:
            raise ValueError(
                f"{path}, line {number}: {line.strip()!r} is no note; write LAYER:NEURON TEXT, "
                "such as 5:482 years"
            )
        layer, neuron = int(match[1]), int(match[2])
        check_neuron(layer, neuron, shape, f"{path}, line {number}: ")
        notes[layer, neuron] = match[3]
    return notes


def write_note(path: Path, layer: int, neuron: int, text: str) -> None:
    """Replace the note on a neuron in the file; an empty one removes it. Other lines stay."""
    lines = path.read_text(encoding="utf-8-sig").splitlines() if path.is_file() else []
    kept = [line for line in lines if not re.match(rf"\s*0*{layer}:0*{neuron}\s", line)]
    text = " ".join(text.split())
    kept += [f"{layer}:{neuron} {text}"] if text else []
    results.write_atomically(path, "".join(f"{line}\n" for line in kept))


def check_neuron(layer: int, neuron: int, shape: tuple[int, int], where: str = "") -> None:
    """Raise IndexError unless the neuron exists."""
    if not (0 <= layer < shape[0] and 0 <= neuron < shape[1]):
        raise IndexError(
            f"{where}layer {layer}, neuron {neuron} does not exist: "
            f"there are {shape[0]} layers of {shape[1]}"
        )
