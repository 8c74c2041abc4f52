"""The neuron inspector as a widget (anywidget): its state as traits that Python and the browser share.

What is computed and how it is packed stands in twell/inspector.py, how it is drawn in twell/inspector.js.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure

try:
    import anywidget
    import traitlets
except ModuleNotFoundError as error:
    package = error.name.partition(".")[0]
    raise ModuleNotFoundError(
        f"twell.inspect needs the package {package}: pip install 'twell[notebooks]'"
    ) from None

from twell import inspector, plots, results
from twell.inspector import COLOURS, FILES, SCALES, Side, Source
from twell.trace import COMPRESSIONS, Aggregate, Trace


class Inspector(anywidget.AnyWidget):
    """A passage whose tokens, layers and neurons can be looked at; made by `twell.inspect`.

    The selection can be read and set: `side` (0, or 1 where two are compared), `token` (its number in the passage), `layer`
    and `neuron`, each None for none; `colour` ("count", "neuron", "surprise") and its `scale` ("all", "layer", "neuron"), whose
    end `limit` fixes; `layers` (first, last) or None for all; `skip_first`, which leaves out the first token of each
    sequence; `compression`, at which overflow of TwELL's tiles is marked, or 0; `difference` of the second side to the first.
    `texts` are what was typed, one or one for each side; setting them runs the model. What does not exist is refused with a
    traitlets.TraitError that says what does.
    """

    _esm = FILES["js"]
    _css = FILES["css"]

    data = traitlets.Bytes().tag(sync=True)
    side = traitlets.Int(0).tag(sync=True)
    token = traitlets.Int(None, allow_none=True).tag(sync=True)
    layer = traitlets.Int(None, allow_none=True).tag(sync=True)
    neuron = traitlets.Int(None, allow_none=True).tag(sync=True)
    colour = traitlets.Enum(COLOURS, "count").tag(sync=True)
    scale = traitlets.Enum(SCALES, "all").tag(sync=True)
    limit = traitlets.Float(None, allow_none=True).tag(sync=True)
    layers = traitlets.List(
        traitlets.Int(), default_value=None, minlen=2, maxlen=2, allow_none=True
    ).tag(sync=True)
    skip_first = traitlets.Bool(True).tag(sync=True)
    compression = traitlets.Enum((0, *COMPRESSIONS), 8).tag(sync=True)
    difference = traitlets.Bool(False).tag(sync=True)
    texts = traitlets.List(traitlets.Unicode()).tag(sync=True)
    runs = traitlets.Bool(False).tag(sync=True)
    busy = traitlets.Bool(False).tag(sync=True)
    error = traitlets.Unicode("").tag(sync=True)

    def __init__(self, sides: Sequence[Side], texts: Sequence[str], view: dict):
        self.sides = list(sides)
        runs = all(side.model is not None for side in sides)
        super().__init__(data=inspector.pack(sides), texts=list(texts), runs=runs)
        self.on_msg(self._asked)
        self.observe(self._run, "texts")
        for name, value in view.items():
            setattr(self, name, value)

    def __repr__(self) -> str:
        return f"Inspector({'; '.join(f'{side.name}: {side.trace.num_tokens} tokens' for side in self.sides)})"

    @property
    def trace(self) -> Trace:
        """The passage of the selected side."""
        return self.sides[self.side].trace

    @property
    def view(self) -> dict:
        """What is selected and how it is coloured: the traits by name."""
        return {name: getattr(self, name) for name in inspector.VIEW}

    @traitlets.validate("side")
    def _check_side(self, proposal: dict) -> int:
        return self._below(proposal, len(self.sides), "the view has sides")

    @traitlets.validate("token")
    def _check_token(self, proposal: dict) -> int | None:
        return self._below(proposal, self.trace.num_tokens, "the passage has tokens")

    @traitlets.validate("layer")
    def _check_layer(self, proposal: dict) -> int | None:
        return self._below(proposal, self.sides[self.side].shape[0], "the model has layers")

    @traitlets.validate("neuron")
    def _check_neuron(self, proposal: dict) -> int | None:
        return self._below(proposal, self.sides[self.side].shape[1], "a layer has neurons")

    @traitlets.validate("layers")
    def _check_layers(self, proposal: dict) -> list[int] | None:
        value, most = proposal["value"], max(side.shape[0] for side in self.sides) - 1
        if value is not None and not 0 <= value[0] <= value[1] <= most:
            raise traitlets.TraitError(
                f"layers is {value}; use [first, last] of layers 0 to {most}, or None for all"
            )
        return value

    @traitlets.validate("limit")
    def _check_limit(self, proposal: dict) -> float | None:
        if proposal["value"] is not None and not proposal["value"] > 0:
            raise traitlets.TraitError(
                f"limit is {proposal['value']}; it has to be above 0, or None"
            )
        return proposal["value"]

    @staticmethod
    def _below(proposal: dict, number: int, what: str) -> int | None:
        value, name = proposal["value"], proposal["trait"].name
        if value is not None and not 0 <= value < number:
            has = f"{what} 0 to {number - 1}" if number else "the passage is empty"
            raise traitlets.TraitError(f"{name} {value} does not exist: {has}")
        return value

    def _asked(self, _: Inspector, message: dict, __: list) -> None:
        """Answer the browser's question for a card, "side:layer:neuron"."""
        key = message.get("ask", "")
        try:
            side, layer, neuron = map(int, key.split(":"))
            card = inspector.cards(self.sides[side], [(layer, neuron)])[0]
        except (ValueError, LookupError, RuntimeError) as error:
            card = {"error": str(error)}
        self.send({"key": key, "card": card})

    def _run(self, _: dict) -> None:
        """Run the texts; a mistake is one line beneath the text, and what was shown before stays."""
        try:
            if not self.runs:
                raise ValueError(
                    "there is no model to run a text; give inspect a model instead of a trace"
                )
            texts = (
                self.texts
                if len(self.texts) == len(self.sides)
                else self.texts[:1] * len(self.sides)
            )
            if not texts:
                raise ValueError("texts is empty; give one text, or one for each side")
            self.busy = True
            sides = [side.run(text) for side, text in zip(self.sides, texts, strict=True)]
            if self.token is not None and self.token >= sides[self.side].trace.num_tokens:
                self.token = None
            self.sides, self.data, self.error = sides, inspector.pack(sides), ""
        except (ValueError, IndexError, RuntimeError) as error:
            self.error = " ".join(str(error).split())
        finally:
            self.busy = False

    def preset(self, name: str) -> None:
        """Go to one of `presets`. Raises ValueError for another name."""
        known = self.presets
        if name not in known:
            raise ValueError(f"preset {name!r} is unknown; use one of {', '.join(known)}")
        begin = dict.fromkeys(("token", "layer", "neuron", "layers")) | {
            "side": 0,
            "colour": "count",
            "scale": "all",
        }
        for trait, value in (begin | known[name]).items():
            setattr(self, trait, value)

    @property
    def presets(self) -> dict[str, dict]:
        """Views to begin with, found in the passage: what each sets, by name."""
        return {found["name"]: found["view"] for found in inspector.presets(self.sides[0])}

    def to_frame(self) -> pd.DataFrame:
        """Return the active neurons of the selection, with exact values: see `inspector.entries`."""
        return inspector.entries(self.sides, self.view)

    def figure(self) -> Figure:
        """Return the present view as a figure for a paper: the passage, and its layers by tokens."""
        return plots.fig_inspector(**inspector.drawn(self.sides, self.view))

    def to_html(self, path: str | Path) -> Path:
        """Write one HTML file that shows this view without a server or a network, under 3 MB, and return its path."""
        results.write_atomically(path, inspector.page(self.sides, self.view))
        return Path(path)


def inspect(
    what: Source,
    text: str | tuple[str, str] | None = None,
    *,
    compare: Source | None = None,
    aggregate: Aggregate | str | Path | None = None,
    compare_aggregate: Aggregate | str | Path | None = None,
    model: Source | None = None,
    start: int = 0,
    **view,
) -> Inspector:
    """Return a widget that shows which neurons fire for which token.

    what: a model, by its folder or name or as the pair that `twell.load` returns, which runs `text` and whatever is typed into
    the widget; or a trace, or its file, and `model`, if given, that it came from. compare: the same once more, shown beside
    it, with the same text; two texts are compared by a model and a pair of texts. aggregate, compare_aggregate:
    statistics over many tokens, or their file; by default `aggregate.npz` in the model's folder, where there is one. start:
    the first token shown of a trace, of which 4,096 are. view: traits of Inspector, such as token=5 or colour="surprise".
    Raises ValueError for what does not fit together and FileNotFoundError for what is missing.
    """
    texts = list(text) if isinstance(text, tuple | list) else [text or ""]
    unknown = [name for name in view if name not in inspector.VIEW]
    if unknown:
        raise TypeError(
            f"inspect has no argument {unknown[0]!r}; a view has {', '.join(inspector.VIEW)}"
        )
    shown = inspector.sides(
        what,
        text,
        compare=compare,
        aggregate=aggregate,
        compare_aggregate=compare_aggregate,
        model=model,
        start=start,
    )
    if view.get("neuron") is not None:
        view = {"colour": "neuron", "scale": "neuron"} | view
    return Inspector(shown, texts, view)
