"""A side of the inspector: a passage, with the model and its aggregate where there are any."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd
import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from twell import trace
from twell.inspector.effects import Direct, Lens, direct, lenses
from twell.inspector.notes import NOTES, check_neuron, read_notes, write_note
from twell.models import intervene, sparse_ffns
from twell.trace import Aggregate, Trace

MAX_TOKENS = 4096  # of a trace that are shown
AGGREGATE = "aggregate.npz"  # beside a model
WORDS = 10  # likeliest next tokens that are kept
# A trace or its file; or a model, by its folder or name or as the pair that `twell.load` returns.
Source = Trace | str | Path | tuple[PreTrainedModel, PreTrainedTokenizerBase | None]


class Silenced(NamedTuple):
    """How the surprise of each token rises without one neuron: layer, neuron [M]; rise [M, T]."""

    layer: np.ndarray
    neuron: np.ndarray
    rise: np.ndarray  # nats, NaN at first tokens


class Predictions(NamedTuple):
    """The likeliest tokens after each of T tokens, falling: ids and probabilities [T, WORDS]."""

    ids: np.ndarray
    probability: np.ndarray


@dataclass
class Side:
    """A trace with its name; where there are any, an aggregate, the model and its tokenizer.

    Raises ValueError when they are not of the same model.
    """

    name: str
    trace: Trace
    aggregate: Aggregate | str | Path | None = None  # or its file, which is read
    model: PreTrainedModel | None = None
    tokenizer: PreTrainedTokenizerBase | None = None
    of: tuple[int, int] = (0, 0)  # the first token shown, and the number of the whole trace
    notes_file: Path | None = None  # beside the model
    predictions: Predictions | None = None  # where a model ran
    lens: Lens | None = None  # the same, where its last norm is known
    silenced: Silenced | None = None  # of neurons that were silenced one at a time
    changes: Sequence[dict] = ()  # of neurons while it ran, as of `changed`

    def __post_init__(self):
        if isinstance(self.aggregate, str | Path):
            self.aggregate = Aggregate.load(self.aggregate)
        self.of = self.of if self.of[1] else (0, self.trace.num_tokens)
        shapes = {}
        for part, value in (("the trace", self.trace), ("the aggregate", self.aggregate)):
            if value is not None and value.num_tokens:
                shapes[part] = value.num_layers, value.intermediate_size
        if self.model is not None:
            ffns = sparse_ffns(self.model)
            shapes["the model"] = len(ffns), ffns[0].intermediate_size
        first, self.shape = next(iter(shapes.items()), ("", (0, self.trace.intermediate_size)))
        for part, (layers, neurons) in shapes.items():
            if (layers, neurons) != self.shape:
                raise ValueError(
                    f"{self.name}: {part} has {layers} layers of {neurons} neurons, {first} "
                    f"{self.shape[0]} of {self.shape[1]}; they have to be of the same model"
                )

    @property
    def notes(self) -> dict[tuple[int, int], str]:
        """The notes on neurons, as the file has them now."""
        return read_notes(self.notes_file, self.shape) if self.notes_file else {}

    def note(self, layer: int, neuron: int, text: str) -> None:
        """Keep a note on a neuron in the file beside the model."""
        check_neuron(layer, neuron, self.shape)
        if self.notes_file is None:
            raise ValueError("there is no model's folder to keep the note in; give inspect one")
        write_note(self.notes_file, layer, neuron, text)

    def run(self, text: str) -> Side:
        """Return the side with another text, at most MAX_TOKENS of it; it may be empty."""
        ids = trace.encode(self.tokenizer, text) if text else []
        run = self._run(trace.cut(ids[:MAX_TOKENS], self.model))
        return dataclasses.replace(run, of=(0, len(ids)))

    def changed(self, changes: Sequence[dict]) -> Side:
        """Return the side with its tokens run again while neurons are changed, see `changing`."""
        self.check_runs()
        run = self._run(self.sequences(), changes)
        return dataclasses.replace(run, name=f"{self.name}, changed", changes=list(changes))

    def expected(self, token: int) -> pd.DataFrame:
        """Return the likeliest tokens after one: model (the name), text, probability."""
        if self.predictions is None:
            raise ValueError(f"{self.name} ran no model; give inspect a model instead of a trace")
        ids, probability = (part[token] for part in self.predictions)
        text = trace.token_strings(self.tokenizer, ids)
        return pd.DataFrame({"model": self.name, "text": text, "probability": probability})

    @functools.cached_property
    def direct(self) -> Direct | None:
        """Direct effects on the logits behind each token; None where no unchanged model ran."""
        known = self.lens is not None and not self.changes  # else a trace has other h
        return direct(self.model, self.trace, self.lens) if known else None

    def check_runs(self) -> None:
        """Raise ValueError unless the model can run the passage again."""
        if self.model is None:
            raise ValueError("there is no model to run; give inspect a model instead of a trace")
        if self.trace.num_tokens and self.trace.position[0]:
            raise ValueError(
                f"the view begins at position {self.trace.position[0]} of a sequence, whose "
                "beginning the model needs; choose a start= at position 0"
            )

    def sequences(self) -> list[np.ndarray]:
        if not self.trace.num_tokens:
            return []
        return np.split(self.trace.token_ids, np.flatnonzero(self.trace.position == 0)[1:])

    def _run(self, sequences: Sequence[Sequence[int]], changes: Sequence[dict] = ()) -> Side:
        seen, ids = [], np.concatenate([[], *sequences]).astype(int)
        ends = np.cumsum([len(one) for one in sequences], dtype=int) - 1
        following = np.append(ids[1:], -1)[: len(ids)]
        following[ends] = -1

        def predict(head: torch.nn.Module, inputs: tuple, logits: Tensor) -> None:
            for rows in logits.flatten(0, -2).split(1024):  # fp32 of few tokens at a time
                top = rows.float().softmax(-1).topk(min(WORDS, rows.shape[-1]))
                seen.append((top.indices.cpu().numpy(), top.values.cpu().numpy()))

        handle = self.model.get_output_embeddings().register_forward_hook(predict)
        try:
            with changing(self.model, changes), lenses(self.model, following) as read:
                traced = trace.trace_tokens(self.model, self.tokenizer, sequences)
        finally:
            handle.remove()
        parts = map(np.concatenate, zip(*seen, strict=True))
        predictions = Predictions(*parts) if seen else None
        lens = Lens(*map(np.concatenate, zip(*read, strict=True))) if read else None
        ran = {"trace": traced, "predictions": predictions, "lens": lens, "silenced": None}
        return dataclasses.replace(self, **ran)


@contextlib.contextmanager
def changing(model: PreTrainedModel, changes: Sequence[dict]) -> Iterator[None]:
    """Change neurons inside a `with` block, each as `twell.intervene` does."""
    with contextlib.ExitStack() as stack:
        for change in changes:
            how = {name: value for name, value in change.items() if name in ("scale", "value")}
            if set(change) - set(how) != {"layer", "neuron"}:
                raise ValueError(f"a change is {change}; it has layer, neuron, and scale or value")
            stack.enter_context(intervene(model, change["layer"], change["neuron"], **how))
        yield


def sides(
    what: Source,
    text: str | tuple[str, str] | None = None,
    *,
    compare: Source | None = None,
    aggregate: Aggregate | str | Path | None = None,
    model: Source | None = None,
    start: int = 0,
) -> list[Side]:
    """Return the one or two sides of a view; see `twell.inspect`."""
    texts = list(text) if isinstance(text, tuple | list) else [text]
    if "" in texts:
        raise ValueError("the text is empty; give at least one character, or no text to type one")
    if len(texts) + (compare is not None) > 2:
        raise ValueError("two sides can be compared: give two texts, or one and compare=")
    first = _side(what, texts[0], aggregate, model, start)
    second = None if compare is None else _side(compare, texts[0], start=start)
    if second is not None and first.of[1] and not second.of[1]:
        raise ValueError("a trace has its own text; compare it with a trace of the other model")
    if second is not None or len(texts) == 1:
        return [first] if second is None else [first, second]
    if first.model is None:
        raise ValueError("two texts need a model to run them; this is a trace, which has its own")
    both = [first, first.run(texts[1] or "")]
    for number, side in enumerate(both, 1):
        side.name = f"{side.name}, text {number}"
    return both


def _side(what, text, aggregate=None, model=None, start=0) -> Side:
    """Return a side of a model and a text, or of a trace and the model that it came from."""
    if not (isinstance(what, Trace) or str(what).endswith(".npz")):
        if start or model is not None:
            raise ValueError("start and model belong to a trace; this is a model, which runs text")
        return load_side(what, aggregate).run(text or "")
    if text is not None:
        raise ValueError("a trace has its own text; give a model to run another")
    whole = what if isinstance(what, Trace) else Trace.load(what)
    if not 0 <= start <= max(whole.num_tokens - 1, 0):
        raise ValueError(f"start is {start}; the trace has tokens 0 to {whole.num_tokens - 1}")
    name = whole.meta.get("run") or ("trace" if isinstance(what, Trace) else Path(what).stem)
    shown = whole.part(start, min(start + MAX_TOKENS, whole.num_tokens))
    of = (start, whole.num_tokens)
    if model is None:
        return Side(name, shown, aggregate, of=of)
    side = dataclasses.replace(load_side(model, aggregate), name=name, trace=shown, of=of)
    if shown.num_tokens and shown.position[0] == 0:
        side = dataclasses.replace(side._run(side.sequences()), trace=shown)
    return side


def load_side(what: Source, aggregate: Aggregate | str | Path | None = None) -> Side:
    """Return a side without a text: of a model, or of an aggregate's file."""
    if str(what).endswith(".npz"):
        counted = Aggregate.load(what)
        none, count = np.zeros(0, np.int32), np.zeros(1, np.int64)
        empty = Trace(none, [], none, none, none, count, none, none, counted.intermediate_size)
        return Side(counted.meta.get("run") or Path(what).stem, empty, counted)
    name, notes = "model", None
    if isinstance(what, tuple):
        model, tokenizer = what
        if tokenizer is None:
            raise ValueError("the model comes without a tokenizer, which a text needs")
    else:
        name, (model, tokenizer) = Path(what).name, trace.load_with_tokenizer(what)
        if aggregate is None and (Path(what) / AGGREGATE).is_file():
            aggregate = Path(what) / AGGREGATE
        notes = Path(what) / NOTES if Path(what).is_dir() else None
    empty = trace.trace_tokens(model, tokenizer, [])
    return Side(name, empty, aggregate, model, tokenizer, notes_file=notes)
