"""A side of the inspector: a passage, with the model and its aggregate where there are any."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from twell import trace
from twell.models import sparse_ffns
from twell.trace import Aggregate, Trace

MAX_TOKENS = 4096  # of a trace that are shown
AGGREGATE = "aggregate.npz"  # beside a model
# A trace or its file; or a model, by its folder or name or as the pair that `twell.load` returns.
Source = Trace | str | Path | tuple[PreTrainedModel, PreTrainedTokenizerBase | None]


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

    def __post_init__(self):
        if isinstance(self.aggregate, str | Path):
            self.aggregate = Aggregate.load(self.aggregate)
        self.of = self.of if self.of[1] else (0, self.trace.num_tokens)
        parts = {"the aggregate": self.aggregate}
        if self.trace.num_tokens:
            parts = {"the trace": self.trace} | parts
        shapes = {
            part: (value.num_layers, value.intermediate_size)
            for part, value in parts.items()
            if value is not None
        }
        if self.model is not None:
            ffns = sparse_ffns(self.model)
            shapes["the model"] = (len(ffns), ffns[0].intermediate_size)
        first, self.shape = next(iter(shapes.items()), ("", (0, self.trace.intermediate_size)))
        for part, (layers, neurons) in shapes.items():
            if (layers, neurons) != self.shape:
                raise ValueError(
                    f"{self.name}: {part} has {layers} layers of {neurons} neurons, {first} "
                    f"{self.shape[0]} of {self.shape[1]}; they have to be of the same model"
                )

    def run(self, text: str) -> Side:
        """Return the side with another text, at most MAX_TOKENS of it; it may be empty."""
        ids = trace.encode(self.tokenizer, text) if text else []
        shown = trace.cut(ids[:MAX_TOKENS], self.model)
        traced = trace.trace_tokens(self.model, self.tokenizer, shown)
        return Side(self.name, traced, self.aggregate, self.model, self.tokenizer, (0, len(ids)))


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
    """Return the one or two sides of a view; see `twell.inspect`."""
    texts = list(text) if isinstance(text, tuple | list) else [text]
    if len(texts) > 2 or (len(texts) == 2 and compare is not None):
        raise ValueError("two sides can be compared: give two texts, or one and compare=")
    if compare is None and compare_aggregate is not None:
        raise ValueError("compare_aggregate belongs to compare=, which is not given")
    first = _side(what, texts[0], aggregate, model, start)
    if compare is not None:
        return [first, _side(compare, texts[0], compare_aggregate, start=start)]
    if len(texts) == 1:
        return [first]
    both = [first, first.run(texts[1] or "")]
    for number, side in enumerate(both, 1):
        side.name = f"{side.name}, text {number}"
    return both


def _side(what, text, aggregate, model=None, start=0) -> Side:
    """A side of a model and a text, or of a trace and the model that it came from."""
    if not (isinstance(what, Trace) or str(what).endswith(".npz")):
        if start or model is not None:
            raise ValueError(
                "start and model belong to a trace; this is a model, which runs a text"
            )
        return _load(what, aggregate).run(text or "")
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
    loaded = _load(model, aggregate)
    return Side(name, shown, loaded.aggregate, loaded.model, loaded.tokenizer, of)


def _load(what, aggregate) -> Side:
    """A side of a model, without a text yet."""
    if isinstance(what, tuple):
        name, (model, tokenizer) = "model", what
        if tokenizer is None:
            raise ValueError("the model comes without a tokenizer, which a text needs")
    else:
        name, (model, tokenizer) = Path(what).name, trace.load_with_tokenizer(what)
        if aggregate is None and (Path(what) / AGGREGATE).is_file():
            aggregate = Path(what) / AGGREGATE
    empty = trace.trace_tokens(model, tokenizer, [])
    return Side(name, empty, aggregate, model, tokenizer)
