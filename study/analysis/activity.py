"""Tables of activity: by layer, token, position and neuron, and what single neurons stand for.

"Active" is the number of neurons of one layer that are active for one token, the paper's
"non-zeros". Every stored entry of a trace is active, whatever its value.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import scipy.stats

from twell.trace.neurons import active_entries, check_neuron, correlated_pairs, places

if TYPE_CHECKING:
    import twell

# --- traces and aggregates, whose methods of the same names return the counts -----------------


def _table(**columns: Any) -> pd.DataFrame:
    """A table of arrays [L, M], a row an entry; others are broadcast to that shape."""
    names, arrays = list(columns), np.broadcast_arrays(*columns.values())
    return pd.DataFrame({n: a.reshape(-1) for n, a in zip(names, arrays, strict=True)})


def per_layer(trace: twell.Trace | twell.Aggregate) -> pd.DataFrame:
    """Return each layer's activity (Figs 6, 10, 11).

    Columns: layer; mean, median, p99 and max of the active neurons per token; dead (fraction of
    neurons never active), active_fraction (mean / intermediate_size), max_over_mean.
    """
    number = np.arange(trace.intermediate_size + 1)
    rows = []
    for tokens in trace.histogram():
        counts = np.repeat(number, tokens)  # of every token, ascending
        middle, high = np.median(counts), np.percentile(counts, 99)
        rows.append((len(rows), counts.mean(), middle, high, counts.max()))
    table = pd.DataFrame(rows, columns=["layer", "mean", "median", "p99", "max"])
    table["dead"] = (trace.neurons()[0] == 0).mean(axis=1)
    table["active_fraction"] = table["mean"] / trace.intermediate_size
    table["max_over_mean"] = table["max"] / table["mean"]
    return table


def per_token(
    trace: twell.Trace | twell.Aggregate, min_frequency: float = 2**-14, min_count: int = 16
) -> pd.DataFrame:
    """Return the mean activity of each token of the vocabulary, lowest first (Fig. 7a).

    Columns: token_id, token, count, frequency, mean_active (over its occurrences and all layers).
    Left out are tokens below `min_frequency` (the paper's filter: 64 occurrences in its 2^20
    tokens) and below `min_count` occurrences, whose mean would be of few contexts.
    """
    token_id, token, count, active = trace.by_token()
    table = pd.DataFrame({"token_id": token_id, "token": token, "count": count})
    table["frequency"] = count / trace.num_tokens
    table["mean_active"] = active / (count * trace.num_layers)
    table = table[(table["frequency"] >= min_frequency) & (table["count"] >= min_count)]
    return table.sort_values(["mean_active", "token_id"], ignore_index=True)


def by_position(trace: twell.Trace | twell.Aggregate) -> pd.DataFrame:
    """Return the mean activity at each position of a sequence (Fig. 7b).

    Columns: position (0 first), mean_active (over layers and sequences), n (sequences that reach
    the position).
    """
    n, active = trace.by_position()
    means = active.sum(axis=0) / (n * trace.num_layers)
    return pd.DataFrame({"position": np.arange(len(n)), "mean_active": means, "n": n})


def by_neuron(trace: twell.Trace | twell.Aggregate) -> pd.DataFrame:
    """Return statistics of each neuron: layer, neuron, rate, mean_value, max_abs.

    rate: fraction of tokens that activate it; mean_value: signed mean of h where it is active (NaN
    if never); max_abs: the largest |h| (0 if never).
    """
    counts, sums, largest = trace.neurons()
    mean = np.full(counts.shape, np.nan)
    np.divide(sums, counts, out=mean, where=counts > 0)
    layer, neuron = np.indices(counts.shape)
    rate = counts / trace.num_tokens
    return _table(layer=layer, neuron=neuron, rate=rate, mean_value=mean, max_abs=largest)


def union_sizes(
    trace: twell.Trace | twell.Aggregate, blocks: Sequence[int] = (16, 32, 64, 128, 256)
) -> pd.DataFrame:
    """Return the number of different neurons that a block of consecutive tokens activates.

    Columns: layer, block, mean and max over the blocks, mean_active (of one token). A kernel that
    treats `block` tokens together reads the weights of their union. A last, partial block is
    dropped; block sizes above the length of the trace have no row. Raises ValueError for a block
    size that an aggregate did not count.
    """
    block = np.array([size for size in blocks if size <= trace.num_tokens], dtype=np.int64)
    total, largest, active = trace.unions(block.tolist())
    number = trace.num_tokens // block
    layer, mean_active = np.arange(trace.num_layers)[:, None], active / (number * block)
    mean = total / number
    return _table(layer=layer, block=block, mean=mean, max=largest, mean_active=mean_active)


def tile_overflow(
    trace: twell.Trace | twell.Aggregate,
    tile_n: int = 256,
    compressions: Sequence[int] = (2, 4, 8, 16),
) -> pd.DataFrame:
    """Return how often TwELL's tiles overflow (section 3.2, App. A.1).

    Columns: layer, compression, capacity (of the one-matrix form, tile_n / compression - 1),
    overflow_rows (fraction of tokens with an overflowing tile), overflow_tiles (fraction of tiles).
    Raises ValueError when a compression does not divide tile_n, or for a width or compression that
    an aggregate did not count.
    """
    for one in compressions:
        if tile_n % one:
            raise ValueError(
                f"compression {one} does not divide tile_n {tile_n}; use one that does"
            )
    rows, tiles = trace.overflows(tile_n, compressions)
    compression = np.array(compressions)
    return _table(
        layer=np.arange(trace.num_layers)[:, None],
        compression=compression,
        capacity=tile_n // compression - 1,
        overflow_rows=rows / trace.num_tokens,
        overflow_tiles=tiles / (trace.num_tokens * -(-trace.intermediate_size // tile_n)),
    )


def kept_activity(trace: twell.Trace | twell.Aggregate) -> pd.DataFrame:
    """Return what is kept of every model's activity: layer (-1 for all), metric and value.

    Of a layer the columns of `per_layer`, and overflow: the share of tokens with an overflowing
    tile at compression 8. Of all: first, the mean activity at position 0; later, in the second half
    of the context; and most, the position (from 0) of the largest mean.
    """
    table = per_layer(trace).set_index("layer")
    table["overflow"] = tile_overflow(trace, compressions=(8,)).set_index("layer")["overflow_rows"]
    rows = table.rename_axis(columns="metric").stack().rename("value").reset_index()
    mean = by_position(trace)["mean_active"]
    positions = {"first": mean[0], "later": mean[len(mean) // 2 :].mean(), "most": mean.idxmax()}
    last = pd.DataFrame({"layer": -1, "metric": positions.keys(), "value": positions.values()})
    return pd.concat([rows, last], ignore_index=True).round(6)


# --- aggregates: one neuron -------------------------------------------------------------------


def strongest(aggregate: twell.Aggregate, number: int) -> list[tuple[int, int]]:
    """Return the neurons (layer, neuron) with the largest sums of |h| over all tokens."""
    order = np.argsort(-aggregate.abs_sum, axis=None, kind="stable")[:number]
    return [divmod(place, aggregate.intermediate_size) for place in order.tolist()]


def value_histogram(aggregate: twell.Aggregate, layer: int, neuron: int) -> pd.DataFrame:
    """Return how often a neuron's value h fell between `low` and `high`: low, high, count.

    Edges are powers of two or 0, the same for all neurons; smaller values count beside 0.
    """
    check_neuron(aggregate, layer, neuron)
    edges, count = aggregate.value_edges, aggregate.value_histogram[layer, neuron]
    return pd.DataFrame({"low": edges[:-1], "high": edges[1:], "count": count})


def contexts(
    aggregate: twell.Aggregate, layer: int, neuron: int, kind: str = "top"
) -> pd.DataFrame:
    """Return the places where a neuron fires, from `trace.places`.

    Columns: value, quantile, before, token, after, sequence, position.
    """
    columns = ["value", "quantile", "before", "token", "after", "sequence", "position"]
    return pd.DataFrame(places(aggregate, layer, neuron, kind), columns=columns)


# --- traces alone: an aggregate does not keep which neurons fired for which token -------------


def passage(trace: twell.Trace, sequence: int, num_tokens: int) -> pd.DataFrame:
    """Return the first tokens of a sequence: position, token, active (mean over layers), logprob.

    logprob is in nats. Raises ValueError for a sequence that the trace does not have.
    """
    rows = np.flatnonzero(trace.sequence == sequence)[:num_tokens]
    if len(rows) == 0:
        raise ValueError(f"no sequence {sequence} in the trace; it has 0 to {trace.sequence.max()}")
    table = pd.DataFrame({"position": trace.position[rows]})
    table["token"] = [trace.strings[row] for row in rows]
    table["active"] = trace.counts()[:, rows].mean(axis=0)
    return table.assign(logprob=trace.logprob[rows])


def firing(trace: twell.Trace, layer: int, start: int, num_tokens: int) -> pd.DataFrame:
    """Return the active neurons of consecutive tokens in one layer: place (from 0), token, neuron.

    Raises IndexError for tokens that the trace does not have.
    """
    end = start + num_tokens
    if not 0 <= start < end <= trace.num_tokens:
        known = f"the trace has 0 to {trace.num_tokens - 1}"
        raise IndexError(f"tokens {start} to {end - 1}: {known}")
    active = trace.layer(layer)[start:end]
    place = np.repeat(np.arange(num_tokens), np.diff(active.indptr))
    words = np.array(trace.strings[start:end])
    return pd.DataFrame({"place": place, "token": words[place], "neuron": active.indices})


def together(
    trace: twell.Trace, layer: int, other: int | None = None, min_fires: int = 8, top: int = 100
) -> pd.DataFrame:
    """Return the pairs of neurons of a layer (or of two layers) that fire together most.

    Columns: layer, neuron, other_layer, other; fires and other_fires; both, tokens that activate
    both; expected, under independence; jaccard, both over either; phi, the correlation of the two,
    falling. First tokens of sequences are left out, at which many neurons fire at once; so are
    neurons with fewer than min_fires firings. At most `top` rows. Raises IndexError for a layer
    that does not exist. Ours.
    """
    rows = np.flatnonzero(trace.position > 0)
    other_layer = layer if other is None else other
    first, second = (active_entries(trace, number, rows) for number in (layer, other_layer))
    table = correlated_pairs(first, second, (min_fires, min_fires))
    if layer == other_layer:
        table = table[table["i"] < table["j"]]
    table = table.assign(layer=layer, other_layer=other_layer)
    names = {"i": "neuron", "j": "other", "n_i": "fires", "n_j": "other_fires"}
    table = table.rename(columns=names)
    fires, other_fires = table["fires"], table["other_fires"]
    table["expected"] = fires * other_fires / max(len(rows), 1)
    table["jaccard"] = table["both"] / (fires + other_fires - table["both"])
    table = table.sort_values(["phi", "neuron", "other"], ascending=[False, True, True])
    columns = "layer neuron other_layer other fires other_fires both expected jaccard phi".split()
    return table[columns].reset_index(drop=True).head(top)


def surprise(trace: twell.Trace, layers: Sequence[int] | None = None) -> pd.DataFrame:
    """Return each token's activity and surprise.

    Columns: sequence, position, token; active: mean over `layers` (default: all); surprise: -log p
    of the token given those before it, nats; next_surprise: of the token after it, which the model
    predicts here. NaN at the first and the last token of a sequence. Ours.
    """
    active = trace.counts() if layers is None else trace.counts()[list(layers)]
    columns = {"sequence": trace.sequence, "position": trace.position, "token": trace.strings}
    columns |= {"active": active.mean(axis=0), "surprise": -trace.logprob}
    table = pd.DataFrame(columns)
    following = table.groupby("sequence")["surprise"].shift(-1)
    return table.assign(next_surprise=following.astype(float))


def surprise_correlation(trace: twell.Trace, block: int = 64) -> pd.DataFrame:
    """Return Spearman's rank correlation of activity and surprise, by layer and for their mean.

    Columns: layer (-1: the mean over layers), of ("surprise" or "next_surprise", see `surprise`), n
    (tokens), spearman, low, high. The 95% interval is from 1,000 bootstrap samples of blocks of
    at most `block` consecutive tokens of one sequence, since near tokens depend on each other; NaN
    below 8 blocks. First tokens are left out. Ours.
    """
    table = surprise(trace)
    counts = [*trace.counts(), table["active"].to_numpy()]
    names = [*range(trace.num_layers), -1]
    rows = []
    for of in ("surprise", "next_surprise"):
        known = table[(table["position"] > 0) & table[of].notna()]
        where = known.groupby(["sequence", known["position"] // block]).ngroup().to_numpy()
        number = where.max(initial=-1) + 1
        y = scipy.stats.rankdata(known[of])
        random = np.random.default_rng(0)
        weights = random.multinomial(number, np.full(number, 1 / number), 1000) if number else None
        for name, active in zip(names, counts, strict=True):
            x = scipy.stats.rankdata(active[known.index])
            # Six sums of each block are all that a correlation of any sample of blocks needs.
            parts = (np.ones(len(x)), x, y, x * x, y * y, x * y)
            sums = np.stack([np.bincount(where, part, number) for part in parts])
            low, high = np.nan, np.nan
            if number >= 8:
                low, high = np.nanquantile(_correlation(*(weights @ sums.T).T), [0.025, 0.975])
            rows.append((name, of, len(x), float(_correlation(*sums.sum(axis=1))), low, high))
    return pd.DataFrame(rows, columns=["layer", "of", "n", "spearman", "low", "high"])


def _correlation(
    n: np.ndarray, x: np.ndarray, y: np.ndarray, xx: np.ndarray, yy: np.ndarray, xy: np.ndarray
) -> np.ndarray:
    """Pearson's correlation from sums."""
    with np.errstate(invalid="ignore", divide="ignore"):
        return (n * xy - x * y) / np.sqrt((n * xx - x * x) * (n * yy - y * y))


def by_surprise(table: pd.DataFrame, bins: int = 10) -> pd.DataFrame:
    """Return the activity in equally filled bins of surprise, from `surprise`.

    Columns: low, high (of the bin), surprise and active (means), n, q25 and q75 (quartiles of
    active). First tokens are left out. Ours.
    """
    known = table[(table["position"] > 0) & table["surprise"].notna()]
    groups = known.groupby(pd.qcut(known["surprise"], bins, labels=False, duplicates="drop"))
    values = groups["surprise"]
    columns = {"low": values.min(), "high": values.max(), "surprise": values.mean()}
    columns |= {"active": groups["active"].mean(), "n": groups.size()}
    columns |= {f"q{percent}": groups["active"].quantile(percent / 100) for percent in (25, 75)}
    return pd.DataFrame(columns).reset_index(drop=True)
