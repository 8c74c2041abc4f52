"""Tables of activity: by layer, token, position and neuron, and what neurons have to do with tokens and with each other.

"Active" is always the number of neurons of one layer that are active for one token (the paper's "non-zeros"):
what a trace stores is active, whatever its value is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
import scipy.sparse
import scipy.stats

if TYPE_CHECKING:
    import twell

# --- traces -------------------------------------------------------------------------------------
# Each of these takes a trace or an aggregate, whose methods of the same names give the same counts.


def per_layer(trace: twell.Trace | twell.Aggregate) -> pd.DataFrame:
    """Return each layer's activity (Figs 6, 10, 11).

    Columns: layer; mean, median, p99 and max of the active neurons per token; active_fraction (mean /
    intermediate_size), max_over_mean, dead (fraction of neurons never active in the trace).
    """
    number = np.arange(trace.intermediate_size + 1)
    counts = [
        np.repeat(number, tokens) for tokens in trace.histogram()
    ]  # of every token, ascending
    table = pd.DataFrame(
        {
            "layer": np.arange(trace.num_layers),
            "mean": [layer.mean() for layer in counts],
            "median": [np.median(layer) for layer in counts],
            "p99": [np.percentile(layer, 99) for layer in counts],
            "max": [layer.max() for layer in counts],
        }
    )
    table["dead"] = (trace.neurons()[0] == 0).mean(axis=1)
    table["active_fraction"] = table["mean"] / trace.intermediate_size
    table["max_over_mean"] = table["max"] / table["mean"]
    return table


def per_token(
    trace: twell.Trace | twell.Aggregate, min_frequency: float = 2**-14, min_count: int = 16
) -> pd.DataFrame:
    """Return the mean activity of each token of the vocabulary, lowest first (Fig. 7a).

    Columns: token_id, token, count, frequency, mean_active (over its occurrences and all layers). Tokens are
    left out below `min_frequency` (the paper's filter: 64 occurrences in its 2^20 tokens) and below
    `min_count` occurrences, which is what keeps the means of a small trace from being those of one context.
    """
    token_id, token, count, active = trace.by_token()
    table = pd.DataFrame(
        {
            "token_id": token_id,
            "token": token,
            "count": count,
            "frequency": count / trace.num_tokens,
            "mean_active": active / (count * trace.num_layers),
        }
    )
    table = table[(table["frequency"] >= min_frequency) & (table["count"] >= min_count)]
    return table.sort_values(["mean_active", "token_id"], ignore_index=True)


def by_position(trace: twell.Trace | twell.Aggregate) -> pd.DataFrame:
    """Return the mean activity at each position of a sequence (Fig. 7b): position (0 first), mean_active, n.

    The mean is over layers and over the n sequences that reach the position.
    """
    n, active = trace.by_position()
    means = active.sum(axis=0) / (n * trace.num_layers)
    return pd.DataFrame({"position": np.arange(len(n)), "mean_active": means, "n": n})


def by_neuron(trace: twell.Trace | twell.Aggregate) -> pd.DataFrame:
    """Return each neuron's habits: layer, neuron, rate, mean_value, max_abs.

    rate is the fraction of tokens that activate it; mean_value the signed mean of h where it is active (NaN
    if never); max_abs the largest |h| (0 if never).
    """
    counts, sums, largest = trace.neurons()
    mean = np.full(counts.shape, np.nan)
    np.divide(sums, counts, out=mean, where=counts > 0)
    layer, neuron = np.indices(counts.shape)
    columns = {"layer": layer, "neuron": neuron, "rate": counts / trace.num_tokens}
    columns |= {"mean_value": mean, "max_abs": largest}
    return pd.DataFrame({name: column.reshape(-1) for name, column in columns.items()})


def value_histogram(aggregate: twell.Aggregate, layer: int, neuron: int) -> pd.DataFrame:
    """Return how often a neuron's value h fell between `low` and `high`: low, high, count.

    Both are powers of two or 0, the same for all neurons; values too small for the others count beside 0.
    """
    _check_neuron(aggregate, layer, neuron)
    edges = aggregate.value_edges
    return pd.DataFrame(
        {"low": edges[:-1], "high": edges[1:], "count": aggregate.value_histogram[layer, neuron]}
    )


def contexts(
    aggregate: twell.Aggregate, layer: int, neuron: int, kind: str = "top"
) -> pd.DataFrame:
    """Return places in the text where a neuron fires: the strongest ("top"), or one at each of set quantiles.

    Columns: value (h, signed); quantile (of the neuron's signed values; NaN for the strongest); before, token,
    after (text around the token that fires); sequence and position of that token. The strongest come by
    falling |value|, the others by rising value. A neuron that never fires has no rows; one that fires rarely
    has fewer. Raises ValueError for another kind, IndexError for a neuron that does not exist.
    """
    rows = places(aggregate, layer, neuron, kind)
    return pd.DataFrame(
        rows, columns=["value", "quantile", "before", "token", "after", "sequence", "position"]
    )


def places(aggregate: twell.Aggregate, layer: int, neuron: int, kind: str = "top") -> list[tuple]:
    """Return the rows of `contexts` as tuples, for who asks about thousands of neurons."""
    _check_neuron(aggregate, layer, neuron)
    if kind == "top":
        at, value = aggregate.top_at, aggregate.top_value
        quantiles = [np.nan] * at.shape[-1]
    elif kind == "quantile":
        at, value, quantiles = aggregate.quantile_at, aggregate.quantile_value, aggregate.quantiles
    else:
        raise ValueError(f"kind is {kind!r}; use 'top' or 'quantile'")
    rows = []
    for place, h, quantile in zip(
        at[layer, neuron].tolist(), value[layer, neuron], quantiles, strict=True
    ):
        if place < 0:
            continue
        sequence, position, ids, here = aggregate.context(place)
        words = [aggregate.strings[n] for n in np.searchsorted(aggregate.token_ids, ids)]
        around = "".join(words[:here]), words[here], "".join(words[here + 1 :])
        rows.append((float(h), quantile, *around, sequence, position))
    return rows


def _check_neuron(aggregate: twell.Aggregate, layer: int, neuron: int) -> None:
    layers, neurons = aggregate.num_layers, aggregate.intermediate_size
    if not (0 <= layer < layers and 0 <= neuron < neurons):
        raise IndexError(
            f"layer {layer}, neuron {neuron} does not exist: there are {layers} layers of {neurons}"
        )


def passage(trace: twell.Trace, sequence: int, num_tokens: int) -> pd.DataFrame:
    """Return the first tokens of one sequence: position, token, active (mean over layers), logprob (nats).

    Raises ValueError for a sequence that the trace does not have.
    """
    rows = np.flatnonzero(trace.sequence == sequence)[:num_tokens]
    if len(rows) == 0:
        raise ValueError(f"no sequence {sequence} in the trace; it has 0 to {trace.sequence.max()}")
    return pd.DataFrame(
        {
            "position": trace.position[rows],
            "token": [trace.strings[row] for row in rows],
            "active": trace.counts()[:, rows].mean(axis=0),
            "logprob": trace.logprob[rows],
        }
    )


def firing(trace: twell.Trace, layer: int, start: int, num_tokens: int) -> pd.DataFrame:
    """Return the active neurons of consecutive tokens in one layer, a row each: place (from 0), token, neuron.

    Raises IndexError for tokens that the trace does not have.
    """
    if not 0 <= start < start + num_tokens <= trace.num_tokens:
        raise IndexError(
            f"tokens {start} to {start + num_tokens - 1}: the trace has 0 to {trace.num_tokens - 1}"
        )
    active = trace.layer(layer)[start : start + num_tokens]
    place = np.repeat(np.arange(num_tokens), np.diff(active.indptr))
    words = np.array(trace.strings[start : start + num_tokens])
    return pd.DataFrame({"place": place, "token": words[place], "neuron": active.indices})


def union_sizes(
    trace: twell.Trace | twell.Aggregate, blocks: Sequence[int] = (16, 32, 64, 128, 256)
) -> pd.DataFrame:
    """Return how many different neurons a block of consecutive tokens activates.

    Columns: layer, block, mean and max over the blocks, mean_active. A kernel that treats `block` tokens
    together has to read the weights of their union; mean_active is what one token needs. A last, partial
    block is dropped; block sizes above the length of the trace have no row. Raises ValueError for a block
    size that an aggregate did not count.
    """
    blocks = np.array([block for block in blocks if block <= trace.num_tokens], dtype=np.int64)
    total, largest, active = trace.unions(blocks.tolist())
    num_blocks = trace.num_tokens // blocks
    columns = {
        "layer": np.arange(trace.num_layers)[:, None],
        "block": blocks,
        "mean": total / num_blocks,
    }
    columns |= {"max": largest, "mean_active": active / (num_blocks * blocks)}
    return pd.DataFrame(
        {name: np.broadcast_to(part, total.shape).reshape(-1) for name, part in columns.items()}
    )


def tile_overflow(
    trace: twell.Trace | twell.Aggregate,
    tile_n: int = 256,
    compressions: Sequence[int] = (2, 4, 8, 16),
) -> pd.DataFrame:
    """Return how often TwELL's tiles are too small (section 3.2, App. A.1).

    Columns: layer, compression, capacity, overflow_rows, overflow_tiles. capacity is that of the one-matrix
    form, tile_n / compression - 1 non-zeros; overflow_rows the fraction of tokens with any tile above it,
    overflow_tiles the fraction of all tiles. Raises ValueError when a compression does not divide tile_n, or
    for a width or compression that an aggregate did not count.
    """
    for compression in compressions:
        if tile_n % compression:
            raise ValueError(
                f"compression {compression} does not divide tile_n {tile_n}; use one that does"
            )
    rows, tiles = trace.overflows(tile_n, compressions)
    compression = np.array(compressions)
    columns = {"layer": np.arange(trace.num_layers)[:, None], "compression": compression}
    columns |= {"capacity": tile_n // compression - 1, "overflow_rows": rows / trace.num_tokens}
    columns["overflow_tiles"] = tiles / (trace.num_tokens * -(-trace.intermediate_size // tile_n))
    return pd.DataFrame(
        {name: np.broadcast_to(part, rows.shape).reshape(-1) for name, part in columns.items()}
    )


# --- questions about neurons ----------------------------------------------------------------------
# These need a trace: an aggregate does not keep which neurons fired for which token.


def specific(
    trace: twell.Trace,
    to: str = "token",
    min_fires: int = 8,
    min_count: int = 8,
    skip_first: bool = True,
) -> pd.DataFrame:
    """Return for each neuron the token or the position that it is most specific to, the most specific first.

    to: "token" or "position". Columns: layer, neuron; token (or position); fires, the neuron's firings; count, occurrences of the
    token; both; share = both / fires; coverage = both / count; lift, share over the token's frequency; phi, the correlation
    of "fires" with "is this token", 1 where each implies the other. Neurons with fewer than min_fires firings and tokens with
    fewer than min_count occurrences have no row. skip_first leaves out the first token of each sequence, whose activity
    is unlike all others (for positions it stays). Raises ValueError for another `to`. Ours.
    """
    if to not in ("token", "position"):
        raise ValueError(f"to is {to!r}; use 'token' or 'position'")
    kept = (
        np.flatnonzero(trace.position > 0)
        if skip_first and to == "token"
        else np.arange(trace.num_tokens)
    )
    labels, which, count = np.unique(
        (trace.token_ids if to == "token" else trace.position)[kept],
        return_inverse=True,
        return_counts=True,
    )
    onehot = scipy.sparse.csr_array(
        (np.ones(len(kept)), (which, np.arange(len(kept)))), (len(labels), len(kept))
    )
    tables = []
    for layer in range(trace.num_layers):
        active = _active(trace, layer)[kept]
        fires = np.bincount(active.indices, minlength=trace.intermediate_size)
        both = (onehot @ active).tocoo()
        label, neuron, n = both.row, both.col, both.data
        enough = (fires[neuron] >= min_fires) & (count[label] >= min_count)
        label, neuron, n = label[enough], neuron[enough], n[enough]
        phi = _phi(n, fires[neuron], count[label], len(kept))
        best = np.lexsort(
            (label, -phi, neuron)
        )  # of each neuron the first: highest phi, of equal ones the lowest label
        best = best[np.unique(neuron[best], return_index=True)[1]]
        label, neuron, n, phi = label[best], neuron[best], n[best], phi[best]
        columns = {
            "layer": layer,
            "neuron": neuron,
            to: labels[label],
            "fires": fires[neuron],
            "count": count[label],
        }
        columns |= {
            "both": n.astype(np.int64),
            "share": n / fires[neuron],
            "coverage": n / count[label],
        }
        columns |= {"lift": n / fires[neuron] * len(kept) / count[label], "phi": phi}
        tables.append(pd.DataFrame(columns))
    table = pd.concat(tables) if tables else pd.DataFrame(columns=["layer", "neuron", to, "phi"])
    if to == "token":
        strings = dict(zip(trace.token_ids.tolist(), trace.strings, strict=True))
        table["token"] = table["token"].map(strings)
    return table.sort_values(
        ["phi", "layer", "neuron"], ascending=[False, True, True], ignore_index=True
    )


def together(
    trace: twell.Trace, layer: int, other: int | None = None, min_fires: int = 8, top: int = 100
) -> pd.DataFrame:
    """Return the pairs of neurons of a layer (or of two layers) that fire together most, by falling correlation.

    Columns: layer, neuron, other_layer, other; fires and other_fires; both, tokens that activate both; expected, what
    independence would give; jaccard, both over either; phi, the correlation of the two firing. First tokens of sequences
    are left out, at which many neurons fire at once; so are neurons with fewer than min_fires firings. At most `top` rows.
    Raises IndexError for a layer that does not exist. Ours.
    """
    kept = np.flatnonzero(trace.position > 0)
    other_layer = layer if other is None else other
    a, b = (_active(trace, n)[kept] for n in (layer, other_layer))
    fires, other_fires = (np.bincount(m.indices, minlength=trace.intermediate_size) for m in (a, b))
    pairs = (a.T @ b).tocoo()
    first, second, both = pairs.row, pairs.col, pairs.data
    enough = (fires[first] >= min_fires) & (other_fires[second] >= min_fires)
    if layer == other_layer:
        enough &= first < second
    first, second, both = first[enough], second[enough], both[enough]
    n, m = fires[first], other_fires[second]
    table = {
        "layer": layer,
        "neuron": first,
        "other_layer": other_layer,
        "other": second,
        "fires": n,
        "other_fires": m,
    }
    table |= {
        "both": both.astype(np.int64),
        "expected": n * m / max(len(kept), 1),
        "jaccard": both / (n + m - both),
    }
    table = pd.DataFrame(table | {"phi": _phi(both, n, m, len(kept))})
    return table.sort_values(
        ["phi", "neuron", "other"], ascending=[False, True, True], ignore_index=True
    ).head(top)


def surprise(trace: twell.Trace, layers: Sequence[int] | None = None) -> pd.DataFrame:
    """Return each token's activity and surprise: sequence, position, token, active, surprise, next_surprise.

    active: mean over `layers` (default: all). surprise: -log p of the token given those before it, nats; next_surprise:
    of the token after it, which is what the model predicts here. NaN at the first and the last of a sequence. Ours.
    """
    following = np.append(trace.sequence[1:] == trace.sequence[:-1], False)
    active = trace.counts() if layers is None else trace.counts()[list(layers)]
    columns = {"sequence": trace.sequence, "position": trace.position, "token": trace.strings}
    columns |= {"active": active.mean(axis=0), "surprise": -trace.logprob}
    columns["next_surprise"] = np.where(
        following, np.append(-trace.logprob[1:], np.nan)[: trace.num_tokens], np.nan
    )
    return pd.DataFrame(columns)


def surprise_correlation(
    trace: twell.Trace, block: int = 64, draws: int = 1000, seed: int = 0
) -> pd.DataFrame:
    """Return how activity goes with surprise, layer by layer and for their mean: correlations with 95% intervals.

    Columns: layer (-1: the mean over layers), of ("surprise" or "next_surprise", see `surprise`), n (tokens), spearman, low,
    high: Spearman's rank correlation with its interval, from `draws` bootstrap samples of blocks of at most `block`
    consecutive tokens of one sequence, since tokens near each other are no independent witnesses. First
    tokens are left out. low and high are NaN where there are fewer than 8 blocks. Ours.
    """
    table = surprise(trace)
    kept = np.flatnonzero(trace.position > 0)
    blocks = np.unique(
        np.stack([trace.sequence, trace.position // block])[:, kept], axis=1, return_inverse=True
    )[1]
    counts = np.concatenate([trace.counts(), table["active"].to_numpy()[None]])[:, kept]
    names = [*range(trace.num_layers), -1]
    rows = []
    for of in ("surprise", "next_surprise"):
        values = table[of].to_numpy()[kept]
        known = ~np.isnan(values)
        where = np.unique(blocks[known], return_inverse=True)[1]
        number = where.max(initial=-1) + 1
        y = scipy.stats.rankdata(values[known])
        weights = np.random.default_rng(seed).multinomial(
            number, np.full(number, 1 / max(number, 1)), draws
        )
        for name, active in zip(names, counts, strict=True):
            x = scipy.stats.rankdata(active[known])
            # Six sums of each block are all that a correlation of any sample of blocks needs.
            sums = np.stack(
                [
                    np.bincount(where, part, number)
                    for part in (x * 0 + 1, x, y, x * x, y * y, x * y)
                ]
            )
            low, high = np.nan, np.nan
            if number >= 8:
                low, high = np.nanquantile(_correlation(*(weights @ sums.T).T), [0.025, 0.975])
            rows.append((name, of, len(x), float(_correlation(*sums.sum(axis=1))), low, high))
    return pd.DataFrame(rows, columns=["layer", "of", "n", "spearman", "low", "high"])


def by_surprise(table: pd.DataFrame, of: str = "surprise", bins: int = 10) -> pd.DataFrame:
    """Return the activity in equally filled bins of surprise: low, high, surprise, active, q25, q75, n.

    table: `surprise`; of: its column to bin by, from low to high in a bin; surprise and active are means, q25 and q75
    quartiles of active. First tokens are left out. Ours.
    """
    known = table[(table["position"] > 0) & table[of].notna()]
    bin_of = pd.qcut(known[of], bins, labels=False, duplicates="drop")
    groups = known.groupby(bin_of)
    columns = {"low": groups[of].min(), "high": groups[of].max(), "surprise": groups[of].mean()}
    columns |= {"active": groups["active"].mean(), "n": groups.size()}
    columns |= {f"q{percent}": groups["active"].quantile(percent / 100) for percent in (25, 75)}
    return pd.DataFrame(columns).reset_index(drop=True)


def _active(trace: twell.Trace, layer: int) -> scipy.sparse.csr_array:
    """1 where a neuron is active, whatever its value: [T, N]."""
    h = trace.layer(layer)
    return scipy.sparse.csr_array((np.ones(len(h.data)), h.indices, h.indptr), h.shape)


def _phi(both: np.ndarray, first: np.ndarray, second: np.ndarray, total: int) -> np.ndarray:
    """The correlation of two yes-or-no properties with these counts; NaN where one is always or never so."""
    first, second = first.astype(np.float64), second.astype(np.float64)
    with np.errstate(invalid="ignore", divide="ignore"):
        return (both * total - first * second) / np.sqrt(
            first * second * (total - first) * (total - second)
        )


def _correlation(
    n: np.ndarray, x: np.ndarray, y: np.ndarray, xx: np.ndarray, yy: np.ndarray, xy: np.ndarray
) -> np.ndarray:
    """Pearson's correlation from sums."""
    with np.errstate(invalid="ignore", divide="ignore"):
        return (n * xy - x * y) / np.sqrt((n * xx - x * x) * (n * yy - y * y))
