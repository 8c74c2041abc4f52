"""Tables of activity: by layer, token, position and neuron, and what single neurons stand for.

"Active" is the number of neurons of one layer that are active for one token, the paper's
"non-zeros". Every stored entry of a trace is active, whatever its value.
"""

import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pandas as pd
import scipy.stats

from twell.trace import BLOCKS, COMPRESSIONS, Aggregate, Trace
from twell.trace.neurons import active_entries, correlated_pairs, places

WHERE = ("right after the word", "elsewhere in sequences with it", "in sequences without it")
_GROUPS = 8  # sequences or blocks, at least, for an interval
_MIN_FREQUENCY = 2**-14  # of a token, the paper's filter


def _table(**columns: Any) -> pd.DataFrame:
    """Return a table of arrays [L, M], a row an entry; others are broadcast to that shape."""
    names, arrays = list(columns), np.broadcast_arrays(*columns.values())
    return pd.DataFrame({n: a.reshape(-1) for n, a in zip(names, arrays, strict=True)})


def per_layer(aggregate: Aggregate) -> pd.DataFrame:
    """Return mean, median, p99 and max of the active neurons per token, a row a layer (Fig. 6).

    dead: the share of neurons that are never active; max_over_mean: the busiest token over the
    mean.
    """
    number = np.arange(aggregate.intermediate_size + 1)
    rows = []
    for tokens in aggregate.active_histogram:
        counts = np.repeat(number, tokens)  # of every token, ascending
        middle, high = np.median(counts), np.percentile(counts, 99)
        rows.append((len(rows), counts.mean(), middle, high, counts.max()))
    table = pd.DataFrame(rows, columns=["layer", "mean", "median", "p99", "max"])
    table["dead"] = (aggregate.neurons()[0] == 0).mean(axis=1)
    table["active_fraction"] = table["mean"] / aggregate.intermediate_size
    table["max_over_mean"] = table["max"] / table["mean"]
    return table


def per_token(aggregate: Aggregate, min_count: int = 16) -> pd.DataFrame:
    """Return the mean activity of each token of the vocabulary, lowest first (Fig. 7a).

    mean_active is over all occurrences and layers. Rarer tokens are left out: below the paper's
    filter, or with fewer than `min_count` occurrences.
    """
    table = pd.DataFrame({"token_id": aggregate.token_ids, "token": aggregate.strings})
    table["count"] = aggregate.occurrences
    table["frequency"] = table["count"] / aggregate.num_tokens
    table["mean_active"] = aggregate.token_active / (table["count"] * aggregate.num_layers)
    table = table[(table["frequency"] >= _MIN_FREQUENCY) & (table["count"] >= min_count)]
    return table.sort_values(["mean_active", "token_id"], ignore_index=True)


def by_position(aggregate: Aggregate) -> pd.DataFrame:
    """Return the mean activity over layers and sequences at each position, 0 first (Fig. 7b).

    n: the number of sequences that reach the position.
    """
    ends = np.bincount(aggregate.lengths)[1:]  # sequences whose last position is 0, 1, ...
    n = ends[::-1].cumsum()[::-1]
    means = aggregate.position_active.sum(axis=0) / (n * aggregate.num_layers)
    return pd.DataFrame({"position": np.arange(len(n)), "mean_active": means, "n": n})


def union_sizes(aggregate: Aggregate) -> pd.DataFrame:
    """Return the number of different neurons that a block of consecutive tokens activates.

    Columns: layer, block, and mean and max over whole blocks. Blocks longer than the text have no
    row.
    """
    block = np.array(BLOCKS)
    fits = block <= aggregate.num_tokens
    mean = aggregate.union_sum[:, fits] / (aggregate.num_tokens // block[fits])
    layer = np.arange(aggregate.num_layers)[:, None]
    return _table(layer=layer, block=block[fits], mean=mean, max=aggregate.union_max[:, fits])


def tile_overflow(aggregate: Aggregate) -> pd.DataFrame:
    """Return the share of tokens with an overflowing tile of TwELL (section 3.2, App. A.1)."""
    layer = np.arange(aggregate.num_layers)[:, None]
    shares = aggregate.overflow_rows / aggregate.num_tokens
    return _table(layer=layer, compression=np.array(COMPRESSIONS), overflow_rows=shares)


def kept_activity(aggregate: Aggregate) -> pd.DataFrame:
    """Return the activity that is kept of every model: layer (-1 for all), metric and value.

    Metrics of a layer: the columns of `per_layer`, and overflow, the share of tokens with an
    overflowing tile at compression 8. Of all layers: first, the mean activity at position 0; later,
    in the second half of the context; and most, the position of the largest mean.
    """
    table = per_layer(aggregate).set_index("layer")
    overflow = tile_overflow(aggregate).query("compression == 8")
    table["overflow"] = overflow.set_index("layer")["overflow_rows"]
    rows = table.rename_axis(columns="metric").stack().rename("value").reset_index()
    mean = by_position(aggregate)["mean_active"]
    positions = {"first": mean[0], "later": mean[len(mean) // 2 :].mean(), "most": mean.idxmax()}
    last = pd.DataFrame({"layer": -1, "metric": positions.keys(), "value": positions.values()})
    return pd.concat([rows, last], ignore_index=True).round(6)


def strongest(aggregate: Aggregate, number: int) -> list[tuple[int, int]]:
    """Return the neurons (layer, neuron) with the largest sums of |h| over all tokens."""
    order = np.argsort(-aggregate.abs_sum, axis=None, kind="stable")[:number]
    return [divmod(place, aggregate.intermediate_size) for place in order.tolist()]


def contexts(aggregate: Aggregate, layer: int, neuron: int, kind: str = "top") -> pd.DataFrame:
    """Return the places where a neuron fires, from `trace.places`."""
    columns = ["value", "quantile", "before", "token", "after", "sequence", "position"]
    return pd.DataFrame(places(aggregate, layer, neuron, kind), columns=columns)


def around_examples(aggregate: Aggregate) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the tokens around each neuron's examples, and its h there, [L, N, places, window].

    Tokens are indices of aggregate.strings, -1 for none; h is in 127ths of the neuron's largest
    |h|, and 0 where it does not fire. The third array says which begin a sequence.
    """
    at = np.concatenate([aggregate.top_at, aggregate.quantile_at], axis=2)[..., None]
    near = at + np.arange(-aggregate.before, aggregate.after + 1)
    ends = aggregate.lengths.cumsum()
    same = np.searchsorted(ends, near, side="right") == np.searchsorted(ends, at, side="right")
    known = (at >= 0) & (near >= 0) & same
    ids = aggregate.text[np.searchsorted(aggregate.text_at, np.where(known, near, 0))]
    token = np.where(known, np.searchsorted(aggregate.token_ids, ids), -1)
    return token, aggregate.near, np.isin(near, ends - aggregate.lengths)


def tells_apart(aggregate: Aggregate, pattern: str = r"\d") -> pd.DataFrame:
    """Return phi of each neuron, best first: of firing with the tokens that have a pattern.

    Over the tokens around the neuron's own examples, as the inspector's search.
    """
    if not aggregate.near.shape[-1]:
        raise ValueError("this aggregate has no text around its examples: trace the model again")
    token, h, first = around_examples(aggregate)
    texts = [re.sub("<0x[0-9A-F]{2}>", "", text) for text in aggregate.strings]  # no bytes
    fits = np.array([bool(re.search(pattern, text)) for text in texts])
    axis, known = (2, 3), token >= 0
    member = fits[token] & known
    known &= member | ~first  # many neurons fire at first tokens
    fires = (h != 0) & known
    n, p, f, both = (some.sum(axis) for some in (known, member, fires, member & fires))
    phi = _correlation(n, p, f, p, f, both)
    numbers = np.arange(aggregate.num_layers)[:, None], np.arange(aggregate.intermediate_size)
    table = _table(layer=numbers[0], neuron=numbers[1], phi=np.nan_to_num(phi))
    return table.sort_values("phi", ascending=False, kind="stable", ignore_index=True)


def examples(aggregate: Aggregate, layer: int, neuron: int) -> list[pd.DataFrame]:
    """Return the text around each example of a neuron: token, and h over its largest |h|."""
    tokens, values, _ = (some[layer, neuron] for some in around_examples(aggregate))
    strings = np.array(aggregate.strings, dtype=object)
    return [
        pd.DataFrame({"token": strings[token[token >= 0]], "value": h[token >= 0] / 127})
        for token, h in zip(tokens, values, strict=True)
        if (token >= 0).any()
    ]


def passage(trace: Trace, sequence: int, num_tokens: int) -> pd.DataFrame:
    """Return `surprise` of a sequence's first tokens."""
    table = surprise(trace)
    return table[table["sequence"] == sequence].head(num_tokens)


def firing(trace: Trace, layer: int, start: int, num_tokens: int) -> pd.DataFrame:
    """Return the active neurons of consecutive tokens in a layer: place (from 0), token, neuron."""
    active = trace.layer(layer)[start : start + num_tokens]
    place = np.repeat(np.arange(num_tokens), np.diff(active.indptr))
    words = np.array(trace.strings[start : start + num_tokens])
    return pd.DataFrame({"place": place, "token": words[place], "neuron": active.indices})


def together(trace: Trace, layer: int, min_fires: int = 8, top: int = 100) -> pd.DataFrame:
    """Return the pairs of neurons of a layer that fire together most, by falling phi.

    both: tokens that activate both; expected: the same if they were independent; phi: their
    correlation. First tokens of sequences are left out, at which many neurons fire at once.
    """
    rows = np.flatnonzero(trace.position > 0)
    entries = active_entries(trace, layer, rows)
    table = correlated_pairs(entries, entries, (min_fires, min_fires))
    names = {"i": "neuron", "j": "other", "n_i": "fires", "n_j": "other_fires"}
    table = table[table["i"] < table["j"]].assign(layer=layer).rename(columns=names)
    table["expected"] = table["fires"] * table["other_fires"] / max(len(rows), 1)
    table = table.sort_values(["phi", "neuron", "other"], ascending=[False, True, True])
    columns = "layer neuron other fires other_fires both expected phi".split()
    return table[columns].reset_index(drop=True).head(top)


def surprise(trace: Trace) -> pd.DataFrame:
    """Return each token's activity (mean over layers) and surprise, -log p in nats.

    next_surprise is of the token after it, which the model predicts here. NaN at the first and the
    last token of a sequence.
    """
    columns = {"sequence": trace.sequence, "position": trace.position, "token": trace.strings}
    columns |= {"active": trace.counts().mean(axis=0), "surprise": -trace.logprob}
    table = pd.DataFrame(columns)
    following = table.groupby("sequence")["surprise"].shift(-1)
    return table.assign(next_surprise=following.astype(float))


def _bootstrap(
    statistic: Callable[..., np.ndarray], groups: np.ndarray, values: Sequence[np.ndarray]
) -> tuple[float, float, float]:
    """Return a statistic of sums, and its 95% interval over 1,000 bootstrap samples of groups."""
    number = int(groups.max(initial=-1)) + 1
    sums = np.stack([np.bincount(groups, one, number) for one in values])
    low = high = np.nan
    if number >= _GROUPS:
        random = np.random.default_rng(0)
        weights = random.multinomial(number, np.full(number, 1 / number), 1000)
        low, high = np.nanquantile(statistic(*(weights @ sums.T).T), [0.025, 0.975])
    with np.errstate(invalid="ignore"):
        return float(statistic(*sums.sum(axis=1))), low, high


def _correlation(n, x, y, xx, yy, xy) -> np.ndarray:
    """Return Pearson's correlation from sums."""
    with np.errstate(invalid="ignore", divide="ignore"):
        return (n * xy - x * y) / np.sqrt((n * xx - x * x) * (n * yy - y * y))


def surprise_correlation(trace: Trace, block: int = 64) -> pd.DataFrame:
    """Return Spearman's rank correlation of activity and surprise, by layer and for their mean.

    Columns: layer (-1: the mean over layers), of ("surprise" or "next_surprise"), n (tokens),
    spearman, low and high. The 95% interval is over blocks of at most `block` consecutive tokens of
    one sequence, since near tokens depend on each other. First tokens are left out.
    """
    table = surprise(trace)
    counts = [*trace.counts(), table["active"].to_numpy()]
    rows = []
    for of in ("surprise", "next_surprise"):
        known = table[(table["position"] > 0) & table[of].notna()]
        where = known.groupby(["sequence", known["position"] // block]).ngroup().to_numpy()
        y = scipy.stats.rankdata(known[of])
        for name, active in zip([*range(trace.num_layers), -1], counts, strict=True):
            x = scipy.stats.rankdata(active[known.index])
            parts = np.ones(len(x)), x, y, x * x, y * y, x * y
            rows.append((name, of, len(x), *_bootstrap(_correlation, where, parts)))
    return pd.DataFrame(rows, columns=["layer", "of", "n", "spearman", "low", "high"])


def by_surprise(table: pd.DataFrame, bins: int = 10) -> pd.DataFrame:
    """Return means of `surprise` in equally filled bins, with quartiles of active (q25, q75)."""
    known = table[(table["position"] > 0) & table["surprise"].notna()]
    groups = known.groupby(pd.qcut(known["surprise"], bins, labels=False, duplicates="drop"))
    columns = {"surprise": groups["surprise"].mean(), "active": groups["active"].mean()}
    columns |= {f"q{percent}": groups["active"].quantile(percent / 100) for percent in (25, 75)}
    return pd.DataFrame(columns | {"n": groups.size()}).reset_index(drop=True)


def neuron_of(specific: pd.DataFrame, word: str) -> tuple[int, int]:
    """Return layer and number of the neuron most specific to a token (`trace.neurons.specific`).

    Raises ValueError for a token to which no neuron is most specific.
    """
    rows = specific[specific["token"] == word]
    if rows.empty:
        known = ", ".join(map(repr, specific["token"].drop_duplicates().head(8)))
        raise ValueError(
            f"no neuron stands for the token {word!r} in the text that was searched: raise tokens, "
            f"so that it occurs more often, or take another, such as {known}"
        )
    return int(rows["layer"].iloc[0]), int(rows["neuron"].iloc[0])


def around_word(before: Trace, logprob: np.ndarray, word: str) -> pd.DataFrame:
    """Return the rise of the loss (nats a token) in a changed model, by place around a word.

    logprob [T]: log probabilities of the changed model. Columns: where (WHERE), tokens, rise, low,
    high: the 95% interval over sequences. First tokens of sequences are not predicted. Raises
    ValueError for a token that does not occur.
    """
    at = np.flatnonzero(np.array(before.strings, dtype=object) == word)
    if not len(at):
        raise ValueError(f"the token {word!r} does not occur in the text")
    following = np.isin(np.arange(before.num_tokens), at + 1)
    having = np.isin(before.sequence, before.sequence[at])
    rise = before.logprob.astype(np.float64) - logprob
    rows = []
    for where, place in zip(WHERE, (following, having & ~following, ~having), strict=True):
        chosen = place & (before.position > 0)
        sequence = np.unique(before.sequence[chosen], return_inverse=True)[1]
        parts = rise[chosen], np.ones(chosen.sum())
        rows.append((where, int(chosen.sum()), *_bootstrap(np.divide, sequence, parts)))
    return pd.DataFrame(rows, columns=["where", "tokens", "rise", "low", "high"])
