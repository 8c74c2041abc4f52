"""What a view shows: its state, the selected entries, and exact effects of neurons."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd
from accelerate.utils import tqdm

from twell import trace
from twell.inspector.side import Side, Silenced

# The state of a view with its defaults. The widget has a trait for each: the number of the selected
# side, token of the passage, layer and neuron, and the colours.
VIEW = {
    "side": 0,
    "token": None,
    "layer": None,
    "neuron": None,
    "colour": "count",
    "skip_first": True,
    "difference": False,
}
COLOURS = ("count", "neuron", "surprise", "effect")


def entries(shown: Sequence[Side], view: dict) -> pd.DataFrame:
    """Return the active neurons that match the selection, by token, layer and falling |h|.

    A token, layer or neuron that is not selected restricts nothing. Columns: model (the side's name), token, text, sequence, position, layer, neuron; value
    (h), share (of the sum of |h| in token and layer) and rate (with an aggregate: the share of its
    tokens that fire).
    """
    side = shown[view["side"]]
    passage = side.trace
    row = np.repeat(np.arange(len(passage.indptr) - 1), np.diff(passage.indptr))
    layer, token = np.divmod(row, max(passage.num_tokens, 1))
    size = np.abs(passage.values)
    total = np.bincount(row, size, minlength=1)[row]
    share = np.divide(size, total, out=np.zeros(len(row)), where=total > 0)
    chosen = np.ones(len(row), bool)
    for name, numbers in (("token", token), ("layer", layer), ("neuron", passage.indices)):
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


def silence_each(side: Side, number: int, progress: bool = False) -> None:
    """Silence the strongest neurons one at a time and keep the exact effects as `side.silenced`.

    Strongest are those with the largest share of the sum of |h| at some token, first tokens apart.
    Nothing is kept where no model ran, or a changed one.
    """
    if side.predictions is None or side.changes or not number:
        return
    share = entries([side], VIEW).query("position > 0").groupby(["layer", "neuron"])["share"].max()
    pairs = share.nlargest(number).index.tolist()
    sequences = side.sequences()
    passage = trace.trace_tokens(side.model, side.tokenizer, sequences)
    rises = np.zeros((len(pairs), passage.num_tokens), np.float32)
    for row, pair in enumerate(tqdm(pairs, unit=" neurons silenced", disable=not progress)):
        silent = trace.scaled_logprob(side.model, sequences, passage, *pair, 0)
        rises[row] = passage.logprob - silent
    side.silenced = Silenced(*np.array(pairs, int).reshape(-1, 2).T, rises)
