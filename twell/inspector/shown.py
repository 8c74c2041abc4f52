"""What a view shows: its state, presets, the selected entries, the figure."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd

from twell.inspector.figure import visible
from twell.inspector.side import Side

# The state of a view with its defaults. The widget has a trait for each: the number of the selected
# side, token of the passage, layer and neuron, and the colours.
VIEW = {
    "side": 0,
    "token": None,
    "layer": None,
    "neuron": None,
    "colour": "count",
    "layers": None,
    "skip_first": True,
    "difference": False,
}
COLOURS = ("count", "neuron", "surprise")


def presets(side: Side) -> list[dict]:
    """Return places to begin in a passage: name, note, and the view (see VIEW) that shows it."""
    passage = side.trace
    places = [{"name": "Overview", "note": "active neurons of every token", "view": {}}]
    later = np.flatnonzero(passage.position > 0)
    if not len(later) or not passage.num_layers:
        return places

    def add(name: str, note: str, **view) -> None:
        if "neuron" in view:
            note = f"layer {view['layer']}, {view['neuron']}: {note}"
            view |= {"colour": "neuron"}
        places.append({"name": name, "note": note, "view": view})

    def quoted(token: int) -> str:
        return visible(passage.strings[token])

    counts = passage.counts()[:, later]
    mean = counts.mean(axis=0)
    token = int(later[mean.argmax()])
    add("Busiest token", f"{quoted(token)}: {mean.max():.3g} active a layer", token=token)
    surprise = np.nan_to_num(-passage.logprob[later])
    token = int(later[surprise.argmax()])
    note = f"{quoted(token)}: {surprise.max():.3g} nats"
    add("Most surprising token", note, token=token, colour="surprise")
    row = np.repeat(np.arange(len(passage.indptr) - 1), np.diff(passage.indptr))
    inside = np.flatnonzero(passage.position[row % passage.num_tokens] > 0)
    if len(inside):
        entry = inside[np.nan_to_num(np.abs(passage.values[inside])).argmax()]
        layer, token = divmod(int(row[entry]), passage.num_tokens)
        note = f"{passage.values[entry]:+.3g} at {quoted(token)}"
        neuron = int(passage.indices[entry])
        add("Strongest neuron", note, token=token, layer=layer, neuron=neuron)
    return places


def entries(shown: Sequence[Side], view: dict) -> pd.DataFrame:
    """Return the active neurons that match the selection, by token, layer and falling |h|.

    A token, layer or neuron that is not selected restricts nothing; without a layer, `layers` are
    taken. Columns: model (the side's name), token, text, sequence, position, layer, neuron; value
    (h), share (of the sum of |h| in token and layer) and rate (with an aggregate: the share of its
    tokens that fire).
    """
    side = shown[view["side"]]
    passage = side.trace
    first, last = view["layers"] or (0, passage.num_layers - 1)
    if view["layer"] is not None:
        first = last = view["layer"]
    row = np.repeat(np.arange(len(passage.indptr) - 1), np.diff(passage.indptr))
    layer, token = np.divmod(row, max(passage.num_tokens, 1))
    size = np.abs(passage.values)
    total = np.bincount(row, size, minlength=1)[row]
    share = np.divide(size, total, out=np.zeros(len(row)), where=total > 0)
    chosen = (layer >= first) & (layer <= last)
    for name, numbers in (("token", token), ("neuron", passage.indices)):
        if view[name] is not None:
            chosen &= numbers == view[name]
    at = np.flatnonzero(chosen)
    at = at[np.lexsort((-size[at], layer[at], token[at]))]
    token = token[at]
    table = {
        "model": side.name,
        "token": token,
        "text": [passage.strings[n] for n in token],
        "sequence": passage.sequence[token],
        "position": passage.position[token],
        "layer": layer[at],
        "neuron": passage.indices[at].astype(np.int64),
        "value": passage.values[at],
        "share": share[at],
    }
    if side.aggregate is not None:
        rate = side.aggregate.neurons()[0] / max(side.aggregate.num_tokens, 1)
        table["rate"] = rate[table["layer"], table["neuron"]]
    return pd.DataFrame(table)


def drawn(shown: Sequence[Side], view: dict, tokens: int = 256) -> dict:
    """Return the arguments of `fig_inspector` for a view, of at most so many tokens.

    Scales are of the whole passage. Raises ValueError for a passage without tokens.
    """
    passage = shown[view["side"]].trace
    if not passage.num_tokens:
        raise ValueError("the text is empty: there is no token to draw")
    first, last = view["layers"] or (0, passage.num_layers - 1)
    layers = slice(first, last + 1)
    left_out = view["skip_first"] & (passage.position == 0)
    counts = passage.counts()[layers].astype(np.float64)
    counts[:, left_out] = np.nan
    values, label, ends = _coloured(passage, view, counts)
    values[left_out] = np.nan
    middle = view["token"] or 0
    start = max(0, min(middle - tokens // 2, passage.num_tokens - tokens))
    cut = slice(start, start + tokens)
    names = {"index": range(first, last + 1), "columns": range(passage.num_tokens)}
    return {
        "passage": pd.DataFrame({"token": passage.strings, "value": values})[cut],
        "counts": pd.DataFrame(counts, **names).iloc[:, cut],
        "label": label,
        "ends": ends,
    }


def _coloured(passage, view, counts) -> tuple[np.ndarray, str, tuple[float, float]]:
    """Return a value for each token, its label, and the ends of its scale.

    counts: of the shown layers, NaN for the tokens that are left out.
    """
    layer, neuron = view["layer"], view["neuron"]
    if view["colour"] == "neuron" and None not in (layer, neuron):
        column = passage.layer(layer)[:, [neuron]]
        top = float(np.abs(column.data).max(initial=0)) or 1.0
        values = column.toarray()[:, 0].astype(np.float64)
        return values, f"h of layer {layer}, neuron {neuron}", (-top, top)
    if view["colour"] == "surprise":
        values = -passage.logprob.astype(np.float64)
        top = float(np.nanmax(values, initial=1))
        return values, "surprise, $-$log p in nats", (0.0, top)
    values = counts.mean(axis=0)
    known = values[values > 0]  # NaN is not
    top = float(known.max(initial=1))
    low = min(float(known.min(initial=1e9)), top / 2)
    first, last = view["layers"] or (0, passage.num_layers - 1)
    which = f"layer {first}" if first == last else f"mean over layers {first} to {last}"
    return np.where(values == 0, low, values), f"active neurons per token, {which}", (low, top)
