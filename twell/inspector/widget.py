"""The neuron inspector as a widget (anywidget): Python and browser share its state as traits."""

from __future__ import annotations

import html
from collections.abc import Sequence
from pathlib import Path

import pandas as pd
from IPython.core.interactiveshell import InteractiveShell
from IPython.display import display

try:
    import anywidget
    import traitlets
    from traitlets import Bool, Enum, Int, Unicode
except ModuleNotFoundError as error:
    package = error.name.partition(".")[0]
    raise ModuleNotFoundError(
        f"twell.inspect needs the package {package}: pip install 'twell[notebooks]'"
    ) from None

from twell import results
from twell.inspector.catalog import Catalog
from twell.inspector.packing import pack
from twell.inspector.pages import document, page, script, style
from twell.inspector.shown import COLOURS, VIEW, entries, silence_each
from twell.inspector.side import Side, Source, changing, sides
from twell.trace import Aggregate, Trace


class Inspector(anywidget.AnyWidget):
    """A passage whose tokens, layers and neurons can be looked at; made by `twell.inspect`.

    The selection can be read and set: `side` (0, or 1 where two are compared), `token` (its number
    in the passage), `layer` and `neuron`, each None for none. So can the colours: `colour`
    ("count", "neuron", "surprise", "effect": of `silence_each`); `skip_first` leaves out the first
    token of each sequence; `difference` of the second side to the first. `texts` has the typed
    texts, one a side; setting it runs the model. `changes` has the changed neurons, each a dict of
    layer, neuron, and scale (0 silences) or value, as of `twell.intervene`; setting it runs the
    model again, as the second side. A wrong value raises a TraitError that says what exists.
    """

    _esm = script()
    _css = style() + ".twell-page { display: none; }"  # of _ipython_display_

    data = traitlets.Bytes().tag(sync=True)
    side = Int(0).tag(sync=True)
    token = Int(None, allow_none=True).tag(sync=True)
    layer = Int(None, allow_none=True).tag(sync=True)
    neuron = Int(None, allow_none=True).tag(sync=True)
    colour = Enum(COLOURS, "count").tag(sync=True)
    skip_first = Bool(True).tag(sync=True)
    difference = Bool(False).tag(sync=True)
    texts = traitlets.List(Unicode()).tag(sync=True)
    changes = traitlets.List(traitlets.Dict()).tag(sync=True)
    runs = Bool(False).tag(sync=True)
    busy = Bool(False).tag(sync=True)
    error = Unicode("").tag(sync=True)

    def __init__(self, sides: Sequence[Side], texts: Sequence[str], view: dict):
        runs = all(side.model is not None for side in sides)
        super().__init__(data=pack(sides), texts=list(texts), runs=runs)
        self.sides = list(sides)
        self.catalogs = [Catalog(side) for side in sides]
        self.on_msg(self._asked)
        for name in sorted(view, key=[*VIEW].index):  # a token is one of the side before it
            setattr(self, name, view[name])

    def __repr__(self) -> str:
        lengths = (f"{side.name}: {side.trace.num_tokens} tokens" for side in self.sides)
        return f"Inspector({'; '.join(lengths)})"

    def _ipython_display_(self) -> None:
        """Show the widget, and a page that its style hides: exported notebooks show that alone."""
        if not InteractiveShell.initialized():
            raise NotImplementedError
        bundle, metadata = self._repr_mimebundle_()
        display(bundle, metadata=metadata, raw=True)
        page = html.escape(document(repr(self), self.view, {"data": self.data}))
        look = 'class="twell-page" loading="lazy" style="width: 100%; height: 800px; border: 0"'
        display({"text/html": f'<iframe {look} srcdoc="{page}"></iframe>'}, raw=True)

    @property
    def trace(self) -> Trace:
        """The passage of the selected side."""
        return self.sides[self.side].trace

    @property
    def view(self) -> dict:
        """The traits of the selection and the colours, by name."""
        return {name: getattr(self, name) for name in VIEW}

    @traitlets.validate("side", "token", "layer", "neuron")
    def _check_number(self, proposal: dict) -> int | None:
        value, name = proposal["value"], proposal["trait"].name
        layers, neurons = self.sides[self.side].shape
        sizes = {"side": len(self.sides), "token": self.trace.num_tokens}
        size = (sizes | {"layer": layers, "neuron": neurons})[name]
        if value is not None and not 0 <= value < size:
            there = f"use 0 to {size - 1}" if size else "the passage is empty"
            raise traitlets.TraitError(f"{name} {value} does not exist; {there}")
        return value

    @traitlets.validate("changes")
    def _check_changes(self, proposal: dict) -> list[dict]:
        value, unchanged = proposal["value"], self._unchanged()
        if value and len(unchanged) > 1:
            raise traitlets.TraitError(
                "changes are shown beside the unchanged model, and this view compares already; "
                "make one of one model and one text"
            )
        try:
            if value:
                unchanged[0].check_runs()
                with changing(unchanged[0].model, value):  # refuses what does not exist
                    pass
        except (ValueError, IndexError, TypeError) as error:
            raise traitlets.TraitError(str(error)) from None
        return value

    def _asked(self, _: Inspector, message: dict, __: list) -> None:
        """Answer the browser: send a chunk of a catalog, or keep a note.

        message: {"ask": "side:chunk"} or {"note": "side:layer:neuron", "text": ...}.
        """
        answer, chunks = {"key": message.get("ask", message.get("note"))}, []
        try:
            number, _, name = answer["key"].partition(":")
            if "note" in message:
                layer, neuron = map(int, name.split(":"))
                self.sides[int(number)].note(layer, neuron, message["text"])
            else:
                chunks = [self.catalogs[int(number)].chunk(name)]
        except (ValueError, LookupError, RuntimeError, OSError) as error:
            answer["error"] = str(error)
        self.send(answer, chunks)

    def _unchanged(self) -> list[Side]:
        """Return the sides whose model was not changed."""
        return [side for side in self.sides if not side.changes]

    @traitlets.observe("texts", "changes")
    def _run(self, change: dict) -> None:
        """Run what was typed, and the changed model; the view stays as it was if that fails."""
        if not hasattr(self, "sides"):
            return
        try:
            self.busy = True
            sides = self._unchanged()
            if change["name"] == "texts":
                sides = self._run_texts(sides)
            if self.changes:
                sides += [sides[0].changed(self.changes)]
            if change["name"] == "changes":  # what they do to the predictions is shown
                self.difference = len(sides) > 1
                self.colour = "surprise" if self.difference else self.colour
            if self.side >= len(sides):
                self.side = 0
            if self.token is not None and self.token >= sides[self.side].trace.num_tokens:
                self.token = None
            self.sides, self.data, self.error = sides, pack(sides), ""
        except (ValueError, IndexError, RuntimeError) as error:
            self.error = " ".join(str(error).split())
        finally:
            self.busy = False

    def _run_texts(self, sides: list[Side]) -> list[Side]:
        if not self.runs:
            raise ValueError("there is no model to run a text; give inspect a model, not a trace")
        if not self.texts:
            raise ValueError("texts is empty; give one text, or one for each side")
        texts = self.texts if len(self.texts) == len(sides) else self.texts[:1] * len(sides)
        return [side.run(text) for side, text in zip(sides, texts, strict=True)]

    def to_frame(self) -> pd.DataFrame:
        """Return the exact active neurons of the selection; see `inspector.entries`."""
        return entries(self.sides, self.view)

    def predictions(self, token: int | None = None) -> pd.DataFrame:
        """Return the ten likeliest tokens after the selected token, or another, of each side.

        Columns: model (the side's name), text, probability. Raises ValueError without a token, and
        where no model ran.
        """
        token = self.token if token is None else token
        if token is None:
            raise ValueError("no token is selected; give its number")
        return pd.concat([side.expected(token) for side in self.sides], ignore_index=True)

    def silence_each(self, number: int = 200) -> None:
        """Silence the strongest neurons one at a time; pages then show the exact effects."""
        for side in self.sides:
            silence_each(side, number)
        self.data = pack(self.sides)

    def to_html(self, path: str | Path) -> Path:
        """Write the present view as one HTML file (see `inspector.page`) and return its path."""
        results.write_atomically(path, page(self.sides, self.view))
        return Path(path)


def inspect(
    what: Source,
    text: str | tuple[str, str] | None = None,
    *,
    compare: Source | None = None,
    aggregate: Aggregate | str | Path | None = None,
    model: Source | None = None,
    start: int = 0,
    **view,
) -> Inspector:
    """Return a widget that shows which neurons fire for which token.

    what: a model, by its folder or name or as the pair that `twell.load` returns, which runs `text`
    and whatever is typed into the widget; or a trace, or its file, and `model`, if given, that it
    came from. compare: the same once more, shown beside it, with the same text; two texts are
    compared by a model and a pair of texts. aggregate: statistics over many tokens, or their file;
    by default `aggregate.npz` in the model's folder, where there is one. start: the first token of
    a trace to show; a view has 4,096. view: traits of Inspector, such as token=5 or
    colour="surprise". Raises ValueError for what does not fit together and FileNotFoundError for
    what is missing.
    """
    unknown = [name for name in view if name not in VIEW]
    if unknown:
        raise TypeError(f"inspect has no argument {unknown[0]!r}; a view has {', '.join(VIEW)}")
    shown = sides(what, text, compare=compare, aggregate=aggregate, model=model, start=start)
    if view.get("neuron") is not None:
        view = {"colour": "neuron"} | view
    return Inspector(shown, list(text) if isinstance(text, tuple | list) else [text or ""], view)
