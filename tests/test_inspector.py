"""The inspector against slow loops: packing, selection, cards, pages; not what a browser draws."""

import base64
import re
from hashlib import sha256

import numpy as np
import pytest
import traitlets

import twell
from tests.factories import SEED
from tests.factories.inspector import aggregate_of, make_trace, unpack, unpacked
from twell import inspector, trace
from twell.inspector import VIEW, Side, pages

# --- packing


@pytest.mark.parametrize("neurons", [300, 2**18])
def test_a_passage_is_packed_as_it_is(neurons):
    passage, _ = make_trace(SEED, num_tokens=40)
    indices = passage.indices.astype(int) * (neurons - 1) // 299
    passage.indices = indices.astype(np.min_scalar_type(neurons - 1))
    passage.intermediate_size = neurons
    _, [(about, packed)] = unpacked(inspector.pack([Side("a", passage)]))
    assert (about["tokens"], about["layers"], about["neurons"]) == (40, 3, neurons)
    for layer, token in np.ndindex(3, 40):
        row = layer * 40 + token
        h = passage.layer(layer)[[token]]
        names, values = packed["rows"][row]
        assert np.array_equal(names, h.indices) and packed["counts"][row] == len(h.indices)
        np.testing.assert_allclose(values, h.data, rtol=2.0**-16, atol=0)
        total = packed["total"][row]
        np.testing.assert_allclose(total, np.abs(h.data).sum(), rtol=2**-8)
    assert [about["strings"][n] for n in packed["token"]] == passage.strings
    assert np.array_equal(packed["logprob"], passage.logprob, equal_nan=True)
    assert packed["starts"].tolist() == [0, 16, 32, 40]


def test_of_many_entries_the_strongest_are_packed():
    passage, _ = make_trace(SEED, num_tokens=50)
    counts = np.diff(passage.indptr)
    limit = int(0.3 * counts.sum())
    shown = [Side("a", passage, aggregate_of(passage))]
    _, [(about, packed)] = unpacked(inspector.pack(shown, max_entries=limit))
    k = about["strongest"]
    assert np.minimum(counts, k).sum() <= limit < np.minimum(counts, k + 1).sum()
    assert np.array_equal(packed["counts"], counts)
    for row, (names, values) in enumerate(packed["rows"]):
        layer, token = divmod(row, 50)
        h = passage.layer(layer)[[token]].toarray()[0]
        np.testing.assert_allclose(values, h[names], rtol=2.0**-8)
        strongest = np.sort(np.abs(h))[::-1][: min(k, counts[row])]
        np.testing.assert_allclose(sorted(np.abs(values))[::-1], strongest, rtol=2.0**-8)
    fires = passage.neurons()[0]
    assert np.array_equal(packed["fires"].reshape(3, 300), fires)
    np.testing.assert_allclose(packed["rate"].reshape(3, 300), fires / 50, rtol=2**-8)


# --- sides


def test_what_does_not_fit_together_is_refused(pair):
    passage, _ = make_trace(SEED)
    other = aggregate_of(make_trace(SEED, num_layers=2)[0])
    for arguments, options, words in [
        ((passage,), {"aggregate": other}, "2 layers of 300 neurons, the trace 3 of 300"),
        ((passage,), {"model": pair}, "2 layers of 96 neurons, the trace 3 of 300"),
        ((passage,), {"start": 60}, "start is 60"),
        (((pair[0], None), "a"), {}, "tokenizer"),
        ((pair, ("a", "")), {}, "empty"),
        ((passage, (None, "a")), {}, "a model"),
    ]:
        with pytest.raises(ValueError, match=words):
            twell.inspect(*arguments, **options)
    with pytest.raises(TypeError, match="'color'"):
        twell.inspect(passage, color="count")


def test_a_long_trace_is_shown_in_parts(monkeypatch):
    monkeypatch.setattr("twell.inspector.side.MAX_TOKENS", 20)
    passage, _ = make_trace(SEED)
    widget = twell.inspect(passage, start=30)
    assert widget.trace.strings == passage.strings[30:50]
    about = unpack(widget.data)[0]["sides"][0]
    assert (about["start"], about["of"], about["tokens"]) == (30, 60, 20)


def test_typed_text_is_run(model, pair):
    widget = twell.inspect(model, ("ba", "ba de fun"), token=2, side=1, neuron=5, layer=1)
    widget.texts = ["de"]
    expected = trace.trace_text(*pair, "de")
    assert np.array_equal(widget.trace.values, expected.values)
    assert widget.trace.strings == expected.strings
    # The neuron stays, the token is gone.
    assert (widget.token, widget.layer, widget.neuron) == (None, 1, 5)
    widget.texts = [""]
    assert widget.trace.num_tokens == 0 and widget.to_frame().empty and widget.error == ""
    widget.texts = ["ba " * 5000]
    assert widget.trace.num_tokens == inspector.MAX_TOKENS < widget.sides[0].of[1]
    # A trace runs a text by its model alone.
    traced = trace.trace_text(*pair, "ba de fun")
    without, by_model = twell.inspect(traced), twell.inspect(traced, model=pair)
    without.texts = by_model.texts = ["de"]
    assert "no model" in without.error and without.trace is not by_model.trace
    assert by_model.trace.strings == expected.strings


# --- the selection


@pytest.mark.parametrize(("token", "layer"), [(None, None), (3, 2)])
def test_to_frame_has_the_entries_that_match(token, layer):
    passage, mask = make_trace(SEED, num_tokens=30)
    counted = aggregate_of(passage)
    table = twell.inspect(passage, aggregate=counted, token=token, layer=layer).to_frame()
    first, last = (0, 2) if layer is None else (layer, layer)
    chosen = np.argwhere(mask[first : last + 1]) + [first, 0, 0]
    expected = chosen if token is None else chosen[chosen[:, 1] == token]
    entries = table[["layer", "token", "neuron"]].sort_values(["layer", "token", "neuron"])
    assert np.array_equal(entries, expected)
    falling = table.assign(size=-table["value"].abs())
    order = falling.sort_values(["token", "layer", "size"], kind="stable")
    assert order.index.tolist() == list(range(len(table)))
    for row in table.sample(min(len(table), 20), random_state=SEED).itertuples():
        h = passage.layer(row.layer)[[row.token]].toarray()[0]
        assert row.value == h[row.neuron]
        assert row.share == pytest.approx(abs(h[row.neuron]) / (np.abs(h).sum() or 1), rel=1e-6)
        assert (row.text, row.position) == (passage.strings[row.token], row.token % 16)
        assert row.rate == pytest.approx(mask[row.layer, :, row.neuron].mean())


def test_traits_refuse_what_does_not_exist():
    widget = twell.inspect(make_trace(SEED)[0], token=5)
    refused = {"token": (60, -1), "layer": (3,), "neuron": (300,), "side": (1,)}
    refused |= {"colour": ("red",)}
    for name, values in refused.items():
        for value in values:
            with pytest.raises(traitlets.TraitError):
                setattr(widget, name, value)
    assert widget.view == VIEW | {"token": 5}


# --- pages


def page_of(shown, view=None):
    """A page, the header of its passage, and the names of its chunks."""
    page = inspector.page(shown, view)
    parts = dict(re.findall(r'<script id="([^"]*)" type="text/plain">([^<]*)<', page))
    parts = {name: unpack(base64.b64decode(text)) for name, text in parts.items()}
    return page, parts.pop("data")[0], parts


def test_a_page_needs_nothing_else(model, tmp_path):
    widget = twell.inspect(model, "ba </script> de <b>", colour="surprise", token=1)
    path = widget.to_html(tmp_path / "deep" / "page.html")
    page, _, chunks = page_of(widget.sides, widget.view)
    assert path.read_text(encoding="utf-8") == page
    assert page.count("</script>") == 2 + len(chunks)
    names = set(re.findall(r"https?:[^\s\"'`]*", page))  # of XML, which nothing loads
    assert all(name.startswith("http://www.w3.org/") for name in names)
    # There is room for all.
    assert {*chunks} == {f"0:{name}" for name in inspector.Catalog(widget.sides[0]).names}


def test_the_bundle_is_of_these_sources():
    """`npm ci && npm run build` in twell/inspector/browser writes bundle and hashes."""
    lines = (pages.FOLDER / "bundle.sha256").read_text().splitlines()
    hashes = {name: value for value, name in map(str.split, lines)}
    sources = [*pages.FOLDER.glob("*.js"), pages.FOLDER / "package-lock.json"]
    assert hashes == {path.name: sha256(path.read_bytes()).hexdigest() for path in sources}


def test_a_page_stays_under_its_limit(model, monkeypatch):
    shown = inspector.sides(model, "ba de fun " * 60)
    bare = [Side("a", shown[0].trace)]
    whole, _, every = page_of(shown)
    most, least = len(whole.encode()), len(page_of(bare)[0].encode())
    monkeypatch.setattr(pages, "PAGE_BYTES", (most + least) // 2)
    page, header, chunks = page_of(shown)
    assert len(page.encode()) <= pages.PAGE_BYTES
    # Statistics come first, then texts, examples and words.
    assert "0:overview" in chunks and 0 < len(chunks) < len(every)
    assert header["sides"][0]["strongest"] is None
    monkeypatch.setattr(pages, "PAGE_BYTES", 1000)
    with pytest.raises(ValueError, match=r"tokens do not fit into 1000 bytes"):
        inspector.page(bare)
