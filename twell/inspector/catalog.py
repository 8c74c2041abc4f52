"""All neurons of a model as chunks of bytes, from which a browser makes cards and searches.

    overview   fires, mean and largest h of each neuron, the tokens at which it fires most, and how
               often each token occurs
    text       the text around all examples, and where in it they are
    layer-N    of each neuron of a layer: the histogram of h, the examples' values, and the neurons
               that fire with it
    words-N    words whose logits each neuron changes most, and the neurons most like it by what
               they write and read

A chunk is computed when it is asked for. The widget sends it then; a page takes all along for
which there is room; an atlas has a file of each. Without an aggregate only the words are known,
without a model only the rest. Words need the model's last norm, whose place an adapter names.
"""

from __future__ import annotations

import functools

import numpy as np
import torch
from torch import Tensor, nn

from twell import trace
from twell.inspector.effects import centred, full_norm, normed, read, written
from twell.inspector.packing import block, leading, least
from twell.inspector.side import Side
from twell.models import last_norm, sparse_ffns

WORDS = 10  # that a neuron promotes, and suppresses
LIKE = 5  # neurons with the most similar rows, of each kind
ACROSS = 65_536  # neurons of a model, up to which rows are compared over all layers
PEAKS = 4  # tokens of the strongest examples that a list shows
BATCH = 256  # neurons whose logits are computed at once


class Catalog:
    """The chunks of one side's model; `names` in the order of their use."""

    def __init__(self, side: Side):
        self.side, self.shape = side, side.shape
        layers = range(side.shape[0])
        self.names = ["overview"]
        if side.aggregate is not None:
            self.names += ["text", *(f"layer-{n}" for n in layers)]
        if side.model is not None:
            self.names += [f"words-{n}" for n in layers]

    @functools.lru_cache  # noqa: B019 - a catalog lives as long as its side
    def chunk(self, name: str) -> bytes:
        """Return a chunk, compressed. Raises ValueError for a name that is none of `names`."""
        if name not in self.names:
            raise ValueError(f"there is no chunk {name!r}; there are {', '.join(self.names)}")
        kind, _, layer = name.partition("-")
        header, arrays = getattr(self, f"_{kind}")(*([int(layer)] if layer else []))
        return block(header, arrays, 9)

    def _overview(self) -> tuple[dict, dict]:
        side, aggregate = self.side, self.side.aggregate
        header = {
            "name": side.name,
            "layers": self.shape[0],
            "neurons": self.shape[1],
            "weights": side.model is not None,
            "words": side.model is not None and last_norm(side.model) is not None,
            "gated": side.model is None or sparse_ffns(side.model)[0].gated,
            "notes": {f"{layer}:{n}": text for (layer, n), text in side.notes.items()},
            "keeps": side.notes_file is not None,
            "tokens": None,
        }
        if aggregate is None:
            return header, {}
        fires, sums, largest = aggregate.neurons()
        often = np.maximum(fires, 1)
        header |= {
            "tokens": aggregate.num_tokens,
            "edges": aggregate.value_edges.tolist(),
            "top": aggregate.top_at.shape[-1],
            "quantiles": aggregate.quantiles,
            "before": aggregate.before,
            "after": aggregate.after,
            "strings": aggregate.strings,
            "run": aggregate.meta.get("run"),
        }
        return header, {
            "occurrences": aggregate.occurrences.astype(np.uint32),
            "fires": fires.astype(np.uint32),
            "peaks": _peaks(aggregate),
            "mean": leading(sums / often, 3),
            "strength": leading(aggregate.abs_sum / often, 3),
            "largest": leading(largest, 3),
        }

    def _text(self) -> tuple[dict, dict]:
        aggregate = self.side.aggregate
        at = np.concatenate([aggregate.top_at, aggregate.quantile_at], -1)
        inside = np.searchsorted(aggregate.text_at, at) + 1
        ends = aggregate.lengths.cumsum()
        sequence = np.searchsorted(ends, aggregate.text_at, side="right")
        return {}, {
            "text": least(np.searchsorted(aggregate.token_ids, aggregate.text)),
            "sequence": least(sequence),
            "position": least(aggregate.text_at - (ends - aggregate.lengths)[sequence]),
            "at": np.where(at >= 0, inside, 0).astype(np.uint32),  # from 1; 0: none
        }

    def _layer(self, layer: int) -> tuple[dict, dict]:
        aggregate = self.side.aggregate
        value = np.concatenate([aggregate.top_value, aggregate.quantile_value], -1)[layer]
        return {}, {
            "histogram": least(aggregate.value_histogram[layer]),
            "near": aggregate.near[layer],
            "together": least(aggregate.together_at[layer] + 1),  # from 1; 0: none
            "phi": leading(aggregate.together[layer], 3),
            "value": leading(value, 3),
        }

    @torch.no_grad()
    def _words(self, layer: int) -> tuple[dict, dict]:
        model, arrays, known = self.side.model, {}, []
        if last_norm(model) is not None:
            ids, values = self._promoted(written(model, layer))
            known, index = np.unique(ids, return_inverse=True)
            arrays = {"word": least(index), "change": leading(values, 3)}
        kin = self._kin(layer)
        for name, (at, cosine) in kin.items():
            arrays |= {name: least(at), f"{name}_cosine": leading(cosine, 3)}
        strings = trace.token_strings(self.side.tokenizer, list(known))
        return {"strings": strings, "like": [*kin]}, arrays

    def _kin(self, layer: int) -> dict[str, tuple]:
        """Return the LIKE neurons most like each of a layer, and their cosines, by kind.

        Neurons are layer * N + number, [N, LIKE]. Kinds: down, which write the same; read, of
        later layers, which read what the neuron writes; written, of earlier layers, which write
        what it reads (without the norm between). A large model has those of the layer alone.
        """
        first, number = layer * self.shape[1], self.shape[0] * self.shape[1]
        if number > ACROSS:
            outputs = _unit(written(self.side.model, layer))
            return {"down": _like(outputs, outputs, 0, first)}
        inputs, outputs = self._directions
        of = slice(first, first + self.shape[1])
        kin = {"down": _like(outputs[of], outputs, first)}
        if of.stop < number:
            kin["read"] = _like(outputs[of], inputs[of.stop :], None, of.stop)
        if first:
            kin["written"] = _like(inputs[of], outputs[:first])
        return kin

    @functools.cached_property
    def _directions(self) -> tuple[Tensor, Tensor]:
        """What all neurons read and write, unit rows [L * N, K]."""
        layers = range(self.shape[0])
        inputs, outputs = (
            torch.cat([_unit(rows(self.side.model, layer)) for layer in layers])
            for rows in (read, written)
        )
        return inputs, outputs

    def _promoted(self, directions: Tensor) -> tuple[np.ndarray, np.ndarray]:
        """Return the words whose logits each direction raises and lowers most; the changes."""
        unembedding, norm = centred(self.side.model), full_norm(self.side.model)
        ids, values = [], []
        for part in directions.split(BATCH):
            logits = normed(norm, part.float()) @ unembedding.t()  # [n, V]
            number = min(WORDS, logits.shape[1])
            best = [logits.topk(number, largest=largest) for largest in (True, False)]
            values.append(torch.cat([part.values for part in best], 1).cpu())
            ids.append(torch.cat([part.indices for part in best], 1).cpu())
        return torch.cat(ids).numpy(), torch.cat(values).numpy()


def _unit(rows: Tensor) -> Tensor:
    return nn.functional.normalize(rows.float(), dim=1)


def _like(
    rows: Tensor, others: Tensor, own: int | None = None, first: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """Return of unit rows the LIKE others with the largest |cosine|, from `first`, and the cosine.

    own: where the rows stand among the others, since none is like itself.
    """
    at, cosines = [], []
    for start in range(0, len(rows), BATCH):
        table = rows[start : start + BATCH] @ others.t()
        if own is not None:
            table.diagonal(own + start).zero_()
        best = table.abs().topk(min(LIKE, len(others))).indices
        cosines.append(table.gather(1, best).cpu())
        at.append(best.cpu() + first)
    return torch.cat(at).numpy(), torch.cat(cosines).numpy()


def _peaks(aggregate: trace.Aggregate) -> np.ndarray:
    """Return the first PEAKS different tokens of each neuron's places, from 1; 0: none."""
    inside = np.searchsorted(aggregate.text_at, aggregate.top_at).clip(0, None)
    token = np.searchsorted(aggregate.token_ids, np.append(aggregate.text, 0)[inside]) + 1
    token = np.where(aggregate.top_at >= 0, token, 0).reshape(-1, aggregate.top_at.shape[-1])
    peaks = np.zeros((len(token), PEAKS), np.uint32)
    for row, tokens in enumerate(token.tolist()):
        different = [one for one in dict.fromkeys(tokens) if one][:PEAKS]
        peaks[row, : len(different)] = different
    return least(peaks)
