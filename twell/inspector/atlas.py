"""An atlas: all neurons of a model as a static site, which opens from disk without a network.

It is the page of a side without a text. `index.html` has the script and the overview; `chunks/` has
a file for each other chunk of the catalog, which the page loads when it needs it. A page from disk
may not fetch, so each file is a script that hands its bytes over. `neurons.jsonl.gz` has the same
for other programs.
"""

from __future__ import annotations

import base64
import dataclasses
import gzip
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from twell import results, trace
from twell.inspector.catalog import Catalog
from twell.inspector.packing import pack
from twell.inspector.pages import document
from twell.inspector.side import AGGREGATE, Side, load_side
from twell.trace import Aggregate


def write_atlas(
    what: str | Path,
    out: str | Path,
    *,
    aggregate: Aggregate | str | Path | None = None,
    labels: str | Path | None = None,
) -> Side:
    """Write the atlas of a model, or of an aggregate's file, to the folder `out`.

    aggregate: of a model, if it is not beside it; labels: a file of notes (notes.py) in place of
    the one beside the model. Returns what was shown. Raises ValueError for a model without an
    aggregate, and FileExistsError for a folder with other files.
    """
    out, alone = Path(out), str(what).endswith(".npz")
    if not alone and aggregate is None and not (Path(what) / AGGREGATE).is_file():
        raise ValueError(
            f"{what} has no {AGGREGATE}; make one by `twell trace {what} --aggregate`, "
            "or name it by --aggregate"
        )
    if alone and aggregate is not None:
        raise ValueError(f"{what} is an aggregate itself; leave out --aggregate")
    if labels is not None and not Path(labels).is_file():
        raise FileNotFoundError(f"there is no file of notes at {labels}")
    side = load_side(what, aggregate)
    side = dataclasses.replace(side, notes_file=Path(labels) if labels else side.notes_file)
    lines = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in _lines(side))
    if out.is_dir() and any(out.iterdir()) and not (out / "chunks" / "text.js").is_file():
        raise FileExistsError(f"{out} has other files; choose an empty folder, or an atlas")
    catalog = Catalog(side)
    (out / "chunks").mkdir(parents=True, exist_ok=True)
    for path in (out / "chunks").glob("*.js"):
        path.unlink()
    for name in catalog.names[1:]:
        text = base64.b64encode(catalog.chunk(name)).decode()
        results.write_atomically(
            out / "chunks" / f"{name}.js", f'twellChunk("{name}", "{text}");\n'
        )
    packed = gzip.compress(lines.encode(), mtime=0)
    results.write_atomically(out / "neurons.jsonl.gz", packed)
    title = f"{side.name}: an atlas of its neurons"
    first = {"data": pack([side]), "0:overview": catalog.chunk("overview")}
    results.write_atomically(out / "index.html", document(title, {}, first, atlas=True))
    return side


def _lines(side: Side) -> Iterator[dict]:
    """Yield the lines of neurons.jsonl.gz, one a neuron; docs/inspector.md describes them."""
    aggregate, notes = side.aggregate, side.notes
    fires, sums, largest = aggregate.neurons()
    for layer, neuron in np.ndindex(*side.shape):
        places = [
            {"h": h, "quantile": None if kind == "top" else quantile, "before": before,
             "token": token, "after": after, "sequence": sequence, "position": position}
            for kind in ("top", "quantile")
            for h, quantile, before, token, after, sequence, position in trace.places(
                aggregate, layer, neuron, kind
            )
        ]  # fmt: skip
        often = max(int(fires[layer, neuron]), 1)
        yield {
            "layer": layer,
            "neuron": neuron,
            "fires": int(fires[layer, neuron]),
            "tokens": aggregate.num_tokens,
            "mean": float(sums[layer, neuron]) / often,
            "mean_abs": float(aggregate.abs_sum[layer, neuron]) / often,
            "largest": float(largest[layer, neuron]),
            "note": notes.get((layer, neuron), ""),
            "examples": places,
        }
