"""What single neurons stand for: the places where they fire, and the token they fire for."""

from __future__ import annotations

import numpy as np
import pandas as pd
import scipy.sparse

from twell.trace.records import Aggregate, Trace


def places(aggregate: Aggregate, layer: int, neuron: int, kind: str = "top") -> list[tuple]:
    """Return places in the text where a neuron fires: the strongest ("top"), or a place a quantile.

    Each is a tuple: value (h, signed); quantile (of the neuron's signed values; NaN for the
    strongest); the text before the token that fires, the token, and the text after it; sequence and
    position of that token. The strongest come by falling |value|, "quantile" by rising value. A
    neuron that rarely fires has fewer, or none. Raises ValueError for another kind, IndexError for
    an unknown neuron.
    """
    layers, neurons = aggregate.num_layers, aggregate.intermediate_size
    if not (0 <= layer < layers and 0 <= neuron < neurons):
        raise IndexError(f"no layer {layer}, neuron {neuron} in {layers} layers of {neurons}")
    if kind not in ("top", "quantile"):
        raise ValueError(f"kind is {kind!r}; use 'top' or 'quantile'")
    at, value = (getattr(aggregate, f"{kind}_{part}")[layer, neuron] for part in ("at", "value"))
    quantiles = aggregate.quantiles if kind == "quantile" else [np.nan] * len(at)
    rows = []
    for place, h, quantile in zip(at.tolist(), value, quantiles, strict=True):
        if place >= 0:
            sequence, position, ids, here = aggregate.context(place)
            words = [aggregate.strings[n] for n in np.searchsorted(aggregate.token_ids, ids)]
            around = "".join(words[:here]), words[here], "".join(words[here + 1 :])
            rows.append((float(h), quantile, *around, sequence, position))
    return rows


def active_entries(trace: Trace, layer: int, rows: np.ndarray) -> scipy.sparse.csr_array:
    """1 where a neuron is active for a token of `rows`, whatever its value, [len(rows), N]."""
    h = trace.layer(layer)
    return scipy.sparse.csr_array((np.ones(len(h.data)), h.indices, h.indptr), h.shape)[rows]


def correlated_pairs(
    first: scipy.sparse.csr_array, second: scipy.sparse.csr_array, limits: tuple[int, int]
) -> pd.DataFrame:
    """Columns i of `first` [T, I] and j of `second` [T, J] that are 1 in the same row.

    Columns: i, j, n_i and n_j (their numbers of ones, at least `limits`), both, and phi: the
    correlation of the two, NaN where one of them is constant.
    """
    pairs = (first.T @ second).tocoo()
    table = pd.DataFrame({"i": pairs.row, "j": pairs.col, "both": pairs.data.astype(np.int64)})
    for name, matrix in (("i", first), ("j", second)):
        ones = np.bincount(matrix.indices, minlength=matrix.shape[1])
        table[f"n_{name}"] = ones[table[name]]
    table = table[(table["n_i"] >= limits[0]) & (table["n_j"] >= limits[1])].copy()
    i, j, total = table["n_i"].astype(float), table["n_j"].astype(float), first.shape[0]
    covariance = table["both"] * total - i * j
    table["phi"] = covariance / np.sqrt(i * j * (total - i) * (total - j))
    return table


def specific(
    trace: Trace, to: str = "token", min_fires: int = 8, min_count: int = 8
) -> pd.DataFrame:
    """Return of each neuron the token (or position) it is most specific to, highest phi first.

    to: "token" or "position". Columns: layer, neuron; token (or position); fires, the neuron's
    firings; count, occurrences of the token; both; share = both / fires; coverage = both / count;
    lift, share over the token's frequency; phi, the correlation of "fires" with "is this token".
    Neurons with fewer than min_fires firings and tokens with fewer than min_count occurrences have
    no row, nor has the first token of each sequence, whose activity is unlike all others; for
    positions it stays. Raises ValueError for another `to`. Ours.
    """
    if to not in ("token", "position"):
        raise ValueError(f"to is {to!r}; use 'token' or 'position'")
    rows = np.flatnonzero((trace.position > 0) | (to == "position"))
    values = (trace.token_ids if to == "token" else trace.position)[rows]
    labels, which = np.unique(values, return_inverse=True)
    place = np.arange(len(rows))
    onehot = scipy.sparse.csr_array((np.ones(len(rows)), (place, which)), (len(rows), len(labels)))
    tables = []
    for layer in range(trace.num_layers):
        pairs = correlated_pairs(active_entries(trace, layer, rows), onehot, (min_fires, min_count))
        best = pairs.sort_values(["i", "phi", "j"], ascending=[True, False, True])
        tables.append(best.drop_duplicates("i").assign(layer=layer))
    names = {"i": "neuron", "n_i": "fires", "n_j": "count"}
    table = pd.concat(tables).rename(columns=names).assign(**{to: lambda t: labels[t["j"]]})
    table["share"] = table["both"] / table["fires"]
    table["coverage"] = table["both"] / table["count"]
    table["lift"] = table["share"] * len(rows) / table["count"]
    if to == "token":
        table["token"] = table["token"].map(dict(zip(trace.token_ids, trace.strings, strict=True)))
    table = table.sort_values(["phi", "layer", "neuron"], ascending=[False, True, True])
    columns = ["layer", "neuron", to, *"fires count both share coverage lift phi".split()]
    return table[columns].reset_index(drop=True)
