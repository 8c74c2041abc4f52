"""What the neuron inspector shows: a passage and its active neurons, packed for the browser, and the page that needs no server.

One or two sides (two models, or two texts) are shown at a time, each a trace and, where there are, an aggregate and the model.
`pack` turns them into one compressed block of bytes that inspector.js reads; the widget (twell/widget.py) sends it to
JupyterLab, `page` writes it into an HTML file, and both run the same script. Of many values only 16 bits travel (bf16) and, where
there are more than MAX_ENTRIES, only the strongest of each token and layer do; counts, sums and overflow are of all. What is
known of a neuron beyond the passage is a card: statistics and examples of the aggregate, and words from the model's
unembedding.
"""

from __future__ import annotations

import base64
import html
import json
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from transformers import PreTrainedTokenizerBase

from twell import analysis, plots, trace
from twell.models import SparseLlamaForCausalLM
from twell.trace import COMPRESSIONS, TILE_N, Aggregate, Trace

MAX_TOKENS = 4096  # of a trace that are shown
MAX_ENTRIES = (
    800_000  # active neurons of all tokens that are sent: 2,048 tokens x 12 layers x 30 are 737,280
)
PRECISE_ENTRIES = 200_000  # up to which values keep 24 bits, more of them 16
PAGE_BYTES = 2_950_000  # what an exported page may have
WORDS = 10  # that a neuron promotes, and suppresses
AGGREGATE = "aggregate.npz"  # beside a model
FILES = {suffix: Path(__file__).with_name(f"inspector.{suffix}") for suffix in ("js", "css")}
# The state of a view with its defaults: what is selected (numbers of a token of the passage, a layer, a neuron; on which
# side), and how it is coloured. The widget has a trait for each.
VIEW = {
    "side": 0,
    "token": None,
    "layer": None,
    "neuron": None,
    "colour": "count",
    "scale": "all",
    "limit": None,
    "layers": None,
    "skip_first": True,
    "compression": 8,
    "difference": False,
}
COLOURS = ("count", "neuron", "surprise")
SCALES = ("all", "layer", "neuron")
# A trace or its file; or a model, by its folder or name or as the pair that `twell.load` returns.
Source = Trace | str | Path | tuple[SparseLlamaForCausalLM, PreTrainedTokenizerBase | None]


@dataclass
class Side:
    """A trace with its name, and where there are, an aggregate of the same model, the model and its tokenizer.

    Raises ValueError when they do not fit together.
    """

    name: str
    trace: Trace
    aggregate: Aggregate | None = None
    model: SparseLlamaForCausalLM | None = None
    tokenizer: PreTrainedTokenizerBase | None = None
    of: tuple[int, int] = (0, 0)  # the first token shown, and how many the whole trace has

    def __post_init__(self):
        self.of = self.of if self.of[1] else (0, self.trace.num_tokens)
        kinds = {
            "the trace": self.trace if self.trace.num_tokens else None,
            "the aggregate": self.aggregate,
        }
        shapes = {
            kind: (a.num_layers, a.intermediate_size) for kind, a in kinds.items() if a is not None
        }
        if self.model is not None:
            shapes["the model"] = (len(self.model.ffns), self.model.config.intermediate_size)
        self.shape = next(iter(shapes.values()), (0, self.trace.intermediate_size))
        for kind, shape in shapes.items():
            if shape != self.shape:
                first = next(iter(shapes))
                raise ValueError(
                    f"{self.name}: {kind} has {shape[0]} layers of {shape[1]} neurons, {first} {self.shape[0]} of "
                    f"{self.shape[1]}; they have to be of the same model"
                )

    def run(self, text: str) -> Side:
        """The same with another text, at most MAX_TOKENS of it; an empty text has no tokens."""
        ids = trace.encode(self.tokenizer, text) if text else []
        shown = trace.cut(ids[:MAX_TOKENS], self.model)
        found = trace.trace_tokens(self.model, self.tokenizer, shown)
        return Side(self.name, found, self.aggregate, self.model, self.tokenizer, (0, len(ids)))


def sides(
    what: Source,
    text: str | tuple[str, str] | None = None,
    *,
    compare: Source | None = None,
    aggregate: Aggregate | str | Path | None = None,
    compare_aggregate: Aggregate | str | Path | None = None,
    model: Source | None = None,
    start: int = 0,
) -> list[Side]:
    """Return the one or two sides of a view; see `twell.inspect` for the arguments and what is raised."""
    texts = list(text) if isinstance(text, tuple | list) else [text]
    if len(texts) > 2 or (len(texts) == 2 and compare is not None):
        raise ValueError("two sides can be compared: give two texts, or one and compare=")
    first = _side(what, texts[0], aggregate, model, start)
    if compare is not None:
        return [first, _side(compare, texts[0], compare_aggregate, None, start)]
    if compare_aggregate is not None:
        raise ValueError("compare_aggregate belongs to compare=, which is not given")
    if len(texts) == 1:
        return [first]
    both = [first, first.run(texts[1] or "")]
    for number, side in enumerate(both, 1):
        side.name = f"{side.name}, text {number}"
    return both


def _side(
    what: Source,
    text: str | None,
    aggregate: Aggregate | str | Path | None,
    model: Source | None,
    start: int,
) -> Side:
    """A side of a trace or its file, with the model it came from if given; or of a model (see `_load`) and a text."""
    if not (isinstance(what, Trace) or str(what).endswith(".npz")):
        if start or model is not None:
            raise ValueError(
                "start and model belong to a trace; this is a model, which runs a text"
            )
        side = _load(what, aggregate)
        return side.run(text or "")
    if text is not None:
        raise ValueError("a trace has its own text; give a model to run another")
    whole = what if isinstance(what, Trace) else Trace.load(what)
    if not 0 <= start <= max(whole.num_tokens - 1, 0):
        raise ValueError(f"start is {start}; the trace has tokens 0 to {whole.num_tokens - 1}")
    name = whole.meta.get("run") or ("trace" if isinstance(what, Trace) else Path(what).stem)
    shown = whole.part(start, min(start + MAX_TOKENS, whole.num_tokens))
    of = (start, whole.num_tokens)
    if model is None:
        return Side(name, shown, _aggregate(aggregate), of=of)
    loaded = _load(model, aggregate)
    return Side(name, shown, loaded.aggregate, loaded.model, loaded.tokenizer, of)


def _load(what: Source, aggregate: Aggregate | str | Path | None) -> Side:
    """A model by its folder or name, or the pair that `twell.load` returns, without a text yet."""
    if isinstance(what, tuple):
        name, (model, tokenizer) = "model", what
        if tokenizer is None:
            raise ValueError("the model comes without a tokenizer, which a text needs")
    else:
        name, (model, tokenizer) = Path(what).name, trace.load_with_tokenizer(what)
        if aggregate is None and (Path(what) / AGGREGATE).is_file():
            aggregate = Path(what) / AGGREGATE
    return Side(
        name, trace.trace_tokens(model, tokenizer, []), _aggregate(aggregate), model, tokenizer
    )


def _aggregate(given: Aggregate | str | Path | None) -> Aggregate | None:
    return given if given is None or isinstance(given, Aggregate) else Aggregate.load(given)


# --- packing --------------------------------------------------------------------------------------------


def leading(values: np.ndarray, bits: int) -> np.ndarray:
    """float32 rounded to its leading bits, to the nearest, ties to even, as uint32; 16 bits are bfloat16. NaN stays NaN."""
    values = np.asarray(values, np.float32)
    whole = np.where(np.isnan(values), np.float32(np.nan), values).view(np.uint32).astype(np.uint64)
    rest = 32 - bits
    return ((whole + (1 << (rest - 1)) - 1 + (whole >> rest & 1)) >> rest).astype(np.uint32)


def pack(
    shown: Sequence[Side], *, max_entries: int = MAX_ENTRIES, chosen: dict | None = None
) -> bytes:
    """Return what inspector.js shows, compressed (zlib).

    Inside: the length of a JSON header (uint32), the header, and arrays, little endian, each beginning at a multiple of 8 bytes
    after it; header["arrays"] lists (name, dtype, entries, offset). Arrays of side i begin with "i."; see `_arrays`.
    max_entries: active neurons of all tokens and sides that are kept; where there are more, each token and layer keeps its
    strongest header["sides"][i]["strongest"]. chosen: cards that a page has with it, by "side:layer:neuron".
    """
    strongest = _strongest([side.trace for side in shown], max_entries)
    precise = strongest is None and sum(len(side.trace.values) for side in shown) <= PRECISE_ENTRIES
    arrays: dict[str, np.ndarray] = {}
    for number, side in enumerate(shown):
        arrays |= {
            f"{number}.{name}": array for name, array in _arrays(side, strongest, precise).items()
        }
    if chosen is not None:
        arrays["cards"] = np.frombuffer(json.dumps(chosen).encode(), np.uint8)
    ids = [side.trace.token_ids for side in shown]
    header = {
        "sides": [_described(side, strongest) | {"precise": precise} for side in shown],
        "aligned": len(ids) == 2 and np.array_equal(*ids),
        "same": len(shown) == 2 and shown[0].model is not None and shown[0].model is shown[1].model,
        "compressions": [0, *COMPRESSIONS],
        "tile": TILE_N,
        "palettes": plots.PALETTES,
        "arrays": [],
    }
    offset = 0
    for name, array in arrays.items():
        header["arrays"].append([name, array.dtype.str.lstrip("<|"), len(array), offset])
        offset += -(-array.nbytes // 8) * 8
    text = json.dumps(header).encode()
    text += b" " * (-(4 + len(text)) % 8)
    parts = [len(text).to_bytes(4, "little"), text]
    for array in arrays.values():
        parts += [array.tobytes(), bytes(-array.nbytes % 8)]
    return zlib.compress(b"".join(parts), 9 if chosen is not None else 6)


def unpack(data: bytes) -> tuple[dict, dict[str, np.ndarray]]:
    """Return the header and the arrays of `pack`, each as it was packed."""
    raw = zlib.decompress(data)
    length = int.from_bytes(raw[:4], "little")
    header = json.loads(raw[4 : 4 + length])
    found = {
        name: np.frombuffer(raw, dtype, n, 4 + length + at)
        for name, dtype, n, at in header["arrays"]
    }
    return header, found


def _strongest(traces: Sequence[Trace], max_entries: int) -> int | None:
    """The most entries that each token and layer can keep within max_entries; None: all."""
    counts = np.concatenate([np.diff(t.indptr) for t in traces])
    if counts.sum() <= max_entries:
        return None
    # As the limit k rises by one, as many entries come in as rows have more than k.
    more = len(counts) - np.bincount(counts).cumsum()
    return int(np.searchsorted(more.cumsum(), max_entries, side="right"))


def _arrays(side: Side, strongest: int | None, precise: bool) -> dict[str, np.ndarray]:
    """The arrays of one side, rows (layer, token) in the order of the trace.

    token: which of the header's strings and ids; starts: the first token of each sequence, and the end; position; logprob
    float32; of each row: counts of active neurons, the largest count in a tile, and total, the sum of |h| (bf16); of the
    entries kept, byte by byte, which compresses better: gap, the distance to the neuron before it in the row (the first: to 0),
    low byte and high byte, and value, the leading bytes of its float32: two (bf16), or three where `precise`. fires [L * N],
    only where entries are missing: the tokens that activate each neuron. rate [L * N] (bf16), only with an aggregate: the
    fraction of its tokens that do.
    """
    shown = side.trace
    counts = np.diff(shown.indptr)
    rows = np.repeat(np.arange(len(counts)), counts)
    kept = np.ones(len(rows), bool)
    magnitude = np.abs(np.nan_to_num(shown.values, nan=np.inf))
    if strongest is not None:
        order = np.lexsort((-magnitude, rows))
        kept[order] = np.arange(len(rows)) - np.repeat(shown.indptr[:-1], counts) < strongest
    indices = shown.indices.astype(np.int64)
    first = np.concatenate([[True], np.diff(rows[kept]) > 0]) if kept.any() else np.zeros(0, bool)
    gap = np.diff(indices[kept], prepend=0)
    gap = np.where(first, indices[kept], gap).astype(np.uint16)
    value = leading(shown.values[kept], 24 if precise else 16) << (8 if precise else 16)
    _, token = np.unique(shown.token_ids, return_inverse=True)
    starts = np.flatnonzero(np.diff(shown.sequence, prepend=-1))
    arrays = {
        "token": token.astype(np.uint32),
        "starts": np.append(starts, shown.num_tokens).astype(np.uint32),
        "position": shown.position.astype(np.uint32),
        "logprob": shown.logprob.astype(np.float32),
        "counts": counts.astype(np.uint16),
        "tile_max": _fullest_tile(shown).reshape(-1).astype(np.uint16),
        "total": leading(
            np.bincount(rows, weights=np.abs(shown.values), minlength=len(counts)), 16
        ).astype(np.uint16),
        "gap_low": (gap & 255).astype(np.uint8),
        "gap_high": (gap >> 8).astype(np.uint8),
        **{
            f"value_{byte}": (value >> (24 - 8 * byte)).astype(np.uint8)
            for byte in range(3 if precise else 2)
        },
    }
    if strongest is not None:
        arrays["fires"] = shown.neurons()[0].reshape(-1).astype(np.uint32)
    if side.aggregate is not None:
        fires = side.aggregate.neurons()[0].reshape(-1)
        arrays["rate"] = leading(fires / max(side.aggregate.num_tokens, 1), 16).astype(np.uint16)
    return arrays


def _fullest_tile(shown: Trace) -> np.ndarray:
    """The active neurons of each token in the tile that holds the most of them, [L, T]."""
    num_tiles, counts = -(-shown.intermediate_size // TILE_N), np.diff(shown.indptr)
    tile = (
        np.repeat(np.arange(len(counts)), counts) * num_tiles
        + shown.indices.astype(np.int64) // TILE_N
    )
    in_tile = np.bincount(tile, minlength=len(counts) * num_tiles)
    return in_tile.reshape(shown.num_layers, shown.num_tokens, num_tiles).max(axis=-1, initial=0)


def _described(side: Side, strongest: int | None) -> dict:
    """The header's entry of one side."""
    shown = side.trace
    layers, neurons = side.shape
    ids, first = np.unique(shown.token_ids, return_index=True)
    return {
        "name": side.name,
        "tokens": shown.num_tokens,
        "start": side.of[0],
        "of": side.of[1],
        "layers": layers,
        "neurons": neurons,
        "strings": [shown.strings[at] for at in first],
        "ids": ids.tolist(),
        "special": np.flatnonzero(np.isin(ids, shown.meta.get("special_ids", []))).tolist(),
        "strongest": strongest,
        "aggregate": None if side.aggregate is None else side.aggregate.num_tokens,
        "words": side.model is not None,
        "starts_with": presets(side),
    }


def presets(side: Side) -> list[dict]:
    """Places to begin in a passage, from its trace: name, note, and the view (see VIEW) that shows it."""
    shown = side.trace
    found = [{"name": "Overview", "note": "active neurons of every token", "view": {}}]
    inside = np.flatnonzero(shown.position > 0)
    if not len(inside) or not shown.num_layers:
        return found

    def add(name: str, note: str, **view) -> None:
        found.append({"name": name, "note": note, "view": view})

    def quoted(token: int) -> str:
        return plots.visible(shown.strings[token])

    by_neuron = {"colour": "neuron", "scale": "neuron"}
    counts = shown.counts()
    mean = counts[:, inside].mean(axis=0)
    token = int(inside[mean.argmax()])
    add("Busiest token", f"{quoted(token)}: {mean.max():.3g} active a layer", token=token)
    surprise = np.nan_to_num(-shown.logprob[inside])
    token = int(inside[surprise.argmax()])
    add(
        "Most surprising token",
        f"{quoted(token)}: {surprise.max():.3g} nats",
        token=token,
        colour="surprise",
    )
    rows = np.repeat(np.arange(len(shown.indptr) - 1), np.diff(shown.indptr))
    later = np.flatnonzero(shown.position[rows % shown.num_tokens] > 0)
    if len(later):
        at = later[np.nan_to_num(np.abs(shown.values[later])).argmax()]
        layer, token = divmod(int(rows[at]), shown.num_tokens)
        view = {"layer": layer, "neuron": int(shown.indices[at]), "token": token, **by_neuron}
        add(
            "Strongest neuron",
            f"layer {layer}, {view['neuron']}: {shown.values[at]:+.3g} at {quoted(token)}",
            **view,
        )
    specific = analysis.specific(shown, min_fires=3, min_count=3).head(1)
    for row in specific.itertuples():
        view = {"layer": row.layer, "neuron": row.neuron, **by_neuron}
        note = f"layer {row.layer}, {row.neuron}: {row.both} of {row.fires} times at {plots.visible(row.token)}"
        add("Most specific neuron", note, **view)
    busy = int(counts[:, inside].mean(axis=1).argmax())
    add(
        "Busiest layer",
        f"layer {busy}: {counts[busy, inside].mean():.3g} active",
        layers=[busy, busy],
    )
    return found


# --- cards ----------------------------------------------------------------------------------------------


def cards(side: Side, neurons: Sequence[tuple[int, int]]) -> list[dict]:
    """What is known of neurons (pairs: layer, neuron) beyond the passage, for each one.

    With an aggregate: tokens (that it has), fires, mean and largest h, edges and histogram of h, and the places top and quantiles,
    each [h, quantile, before, token, after, sequence, position]. With a model: promotes and suppresses, the words whose logits
    an h of 1 raises and lowers most, relative to the mean over the vocabulary, without what later layers make of it:
    [word, change]. Raises IndexError for a neuron that does not exist.
    """
    for layer, neuron in neurons:
        if not (0 <= layer < side.shape[0] and 0 <= neuron < side.shape[1]):
            raise IndexError(
                f"layer {layer}, neuron {neuron} does not exist: there are {side.shape[0]} layers of {side.shape[1]}"
            )
    found: list[dict] = [{} for _ in neurons]
    if side.aggregate is not None:
        for card, (layer, neuron) in zip(found, neurons, strict=True):
            card |= _statistics(side.aggregate, layer, neuron)
    if side.model is not None:
        for card, words in zip(found, _words(side, neurons), strict=True):
            card |= words
    return found


def _statistics(aggregate: Aggregate, layer: int, neuron: int) -> dict:
    histogram = aggregate.value_histogram[layer, neuron]
    fires = int(histogram.sum())
    card = {
        "tokens": aggregate.num_tokens,
        "fires": fires,
        "mean": float(aggregate.value_sum[layer, neuron]) / max(fires, 1),
        "largest": float(aggregate.max_abs[layer, neuron]),
        "edges": [float(edge) for edge in aggregate.value_edges],
        "histogram": histogram.tolist(),
    }
    for kind, name in (("top", "top"), ("quantile", "quantiles")):
        found = analysis.places(aggregate, layer, neuron, kind)
        card[name] = [
            [_short(value), None if kind == "top" else q, *around] for value, q, *around in found
        ]
    return card


def _short(value: float) -> float:
    return float(f"{value:.4g}")


@torch.no_grad()
def _words(side: Side, neurons: Sequence[tuple[int, int]]) -> list[dict]:
    model = side.model
    unembedding, norm = model.get_output_embeddings().weight, model.base_model.norm.weight
    found: list[dict] = []
    for start in range(0, len(neurons), 256):
        rows = torch.stack(
            [model.ffns[layer].direction(n) for layer, n in neurons[start : start + 256]], 1
        )
        logits = (unembedding @ (rows * norm[:, None])).float()  # [V, n]
        logits = (logits - logits.mean(0)).t()
        number = min(WORDS, logits.shape[1])
        ends = [logits.topk(number, largest=largest) for largest in (True, False)]
        lists = []
        for values, ids in ends:
            strings = iter(trace.token_strings(side.tokenizer, ids.reshape(-1).tolist()))
            lists.append([[[next(strings), _short(v)] for v in row] for row in values.tolist()])
        found += [{"promotes": up, "suppresses": down} for up, down in zip(*lists, strict=True)]
    return found


# --- the selection --------------------------------------------------------------------------------------


def entries(shown: Sequence[Side], view: dict) -> pd.DataFrame:
    """Return the active neurons that match the selection, one a row: of the token, of the neuron, or of both.

    What is not selected is not restricted: without token and neuron these are all entries of the passage. Where no layer is
    selected those of `layers` are taken. Columns: model (the side's name); token, its number in the passage; text; sequence,
    position; layer, neuron; value (h, signed); share, |value| over the sum of all in this token and layer; with an
    aggregate rate, the fraction of its tokens that activate the neuron. By token, layer and falling |value|.
    """
    side = shown[view["side"]]
    passage = side.trace
    first, last = view["layers"] or (0, passage.num_layers - 1)
    layers = range(first, last + 1) if view["layer"] is None else [view["layer"]]
    layers = layers if passage.num_tokens else []
    tokens = range(passage.num_tokens) if view["token"] is None else [view["token"]]
    tables = []
    for layer in layers:
        h = passage.layer(layer)[list(tokens)].tocoo()
        magnitude = np.abs(h.data)
        total = np.bincount(h.row, weights=magnitude, minlength=len(tokens))[h.row]
        share = np.divide(magnitude, total, out=np.zeros(len(total)), where=total > 0)
        table = {
            "token": np.asarray(tokens, np.int64)[h.row],
            "layer": layer,
            "neuron": h.col,
            "value": h.data,
        }
        table = pd.DataFrame(table | {"share": share})
        tables.append(table if view["neuron"] is None else table[table["neuron"] == view["neuron"]])
    nothing = pd.DataFrame(columns=["token", "layer", "neuron", "value", "share"], dtype=int)
    table = pd.concat(tables) if tables else nothing
    falling = table.assign(size=-table["value"].abs())
    table = table.iloc[np.lexsort([falling[name] for name in ("size", "layer", "token")])]
    at = table["token"].to_numpy()
    table.insert(0, "model", side.name)
    table.insert(2, "text", [passage.strings[n] for n in at])
    table.insert(3, "sequence", passage.sequence[at])
    table.insert(4, "position", passage.position[at])
    if side.aggregate is not None:
        rate = side.aggregate.neurons()[0] / max(side.aggregate.num_tokens, 1)
        table["rate"] = rate[table["layer"].to_numpy(), table["neuron"].to_numpy()]
    return table.reset_index(drop=True)


def drawn(shown: Sequence[Side], view: dict, tokens: int = 256) -> dict:
    """Return what `plots.fig_inspector` draws of a view: at most so many tokens, the selected one among them.

    Scales are those of the whole passage, as in the browser. Raises ValueError for a passage without tokens.
    """
    side = shown[view["side"]]
    passage, skip = side.trace, view["skip_first"]
    if not passage.num_tokens:
        raise ValueError("the text is empty: there is no token to draw")
    first, last = view["layers"] or (0, passage.num_layers - 1)
    counts = passage.counts()[first : last + 1].astype(np.float64)
    left_out = skip & (passage.position == 0)
    counts[:, left_out] = np.nan
    layer, neuron, limit = view["layer"], view["neuron"], view["limit"]
    if view["colour"] == "neuron" and layer is not None and neuron is not None:
        of = {"neuron": passage.layer(layer)[:, [neuron]], "layer": passage.layer(layer)}.get(
            view["scale"]
        )
        largest = np.abs(passage.values if of is None else of.data).max(initial=0)
        values = passage.layer(layer)[:, [neuron]].toarray()[:, 0].astype(np.float64)
        top = limit or float(largest) or 1.0
        label, ends = f"h of layer {layer}, neuron {neuron}", (-top, top)
    elif view["colour"] == "surprise":
        values = -passage.logprob.astype(np.float64)
        label, ends = (
            "surprise, $-$log p in nats",
            (0.0, limit or float(np.nanmax(values, initial=1))),
        )
    else:
        values = counts.mean(axis=0)
        known = values[values > 0]  # NaN is not
        low, top = float(known.min(initial=1e9)), limit or float(known.max(initial=1))
        which = f"layer {first}" if first == last else f"mean over layers {first} to {last}"
        label, ends = f"active neurons per token, {which}", (min(low, top / 2), top)
        values = np.where(values == 0, ends[0], values)
    values[left_out] = np.nan
    start = (
        0
        if view["token"] is None
        else max(0, min(view["token"] - tokens // 2, passage.num_tokens - tokens))
    )
    cut = slice(start, start + tokens)
    capacity = TILE_N // view["compression"] - 1 if view["compression"] else np.inf
    over = (_fullest_tile(passage)[first : last + 1] > capacity) & ~left_out
    names = {"index": range(first, last + 1), "columns": range(passage.num_tokens)}
    return {
        "passage": pd.DataFrame({"token": passage.strings, "value": values})[cut],
        "counts": pd.DataFrame(counts, **names).iloc[:, cut],
        "over": pd.DataFrame(over, **names).iloc[:, cut],
        "label": label,
        "ends": ends,
    }


# --- a page ---------------------------------------------------------------------------------------------

PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'">
<title>{title}</title>
<style>
:root {{ color-scheme: light dark; }}
body {{ margin: 0; padding: 16px 20px 28px; background: Canvas; }}
{css}
</style>
</head>
<body>
<noscript>This page needs JavaScript; it loads nothing from anywhere.</noscript>
<main id="twell"></main>
<script id="data" type="text/plain">{data}</script>
<script type="module">
{js}
openPage(document.getElementById("twell"), document.getElementById("data").textContent, {view});
</script>
</body>
</html>
"""


def page(shown: Sequence[Side], view: dict | None = None) -> str:
    """Return one HTML file that shows these sides without a server or a network, of at most PAGE_BYTES.

    It takes with it as many cards as there is room for, those of the neurons first that carry most of the passage. Where the
    passage alone would be larger, fewer of its weaker entries are kept; the page says how many. view: where to begin (VIEW).
    Raises ValueError for a passage of which even the counts do not fit.
    """
    view = VIEW | (view or {})
    files = {suffix: path.read_text(encoding="utf-8") for suffix, path in FILES.items()}
    title = html.escape(
        " and ".join(dict.fromkeys(side.name for side in shown)) + ": active neurons"
    )

    def written(data: bytes) -> str:
        state = json.dumps({name: view[name] for name in VIEW})
        return PAGE.format(title=title, data=base64.b64encode(data).decode(), view=state, **files)

    def room(data: bytes) -> int:
        return PAGE_BYTES - len(written(data).encode())

    max_entries = MAX_ENTRIES
    data = pack(shown, max_entries=max_entries, chosen={})
    while room(data) < 0:
        max_entries = max_entries * 4 // 5
        if max_entries < 1000:
            raise ValueError(
                f"{sum(s.trace.num_tokens for s in shown)} tokens do not fit into {PAGE_BYTES} bytes"
            )
        data = pack(shown, max_entries=max_entries, chosen={})
    order = _by_weight(shown, view)
    sample = _cards(shown, order[:256])
    if sample:
        spent = room(data) - room(pack(shown, max_entries=max_entries, chosen=sample))
        known = list(
            _cards(shown, order[: int(0.97 * room(data) * len(sample) / max(spent, 1))]).items()
        )
        while known:
            packed = pack(shown, max_entries=max_entries, chosen=dict(known))
            if room(packed) >= 0:
                return written(packed)
            known = known[: len(known) * 9 // 10]
    return written(data)


def _by_weight(shown: Sequence[Side], view: dict) -> list[tuple[int, int, int]]:
    """(side, layer, neuron) of those where the view and its presets begin, then of all that fire, by falling weight.

    Weight: the sum over tokens of the shares of |h|. Only of sides of which more is known than the passage.
    """
    first, found = [(view["side"], view["layer"], view["neuron"])], []
    for number, side in enumerate(shown):
        first += [
            (number, preset["view"].get("layer"), preset["view"].get("neuron"))
            for preset in presets(side)
        ]
        passage = side.trace
        for layer in range(passage.num_layers):
            h = abs(passage.layer(layer))
            total = h.sum(axis=1)
            weight = h.T @ np.divide(1, total, out=np.zeros_like(total), where=total > 0)
            found += [
                (-weight[neuron], (number, layer, int(neuron))) for neuron in np.unique(h.indices)
            ]
    known = {
        number
        for number, side in enumerate(shown)
        if side.aggregate is not None or side.model is not None
    }
    every = dict.fromkeys([*first, *(key for _, key in sorted(found))])
    return [key for key in every if None not in key and key[0] in known]


def _cards(shown: Sequence[Side], neurons: Sequence[tuple[int, int, int]]) -> dict[str, dict]:
    """Cards by "side:layer:neuron", in this order."""
    found = {key: {} for key in neurons}
    for number, side in enumerate(shown):
        own = [key for key in neurons if key[0] == number]
        found |= dict(zip(own, cards(side, [key[1:] for key in own]), strict=True))
    return {":".join(map(str, key)): card for key, card in found.items()}
