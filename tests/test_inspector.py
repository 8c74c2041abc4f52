"""What the inspector packs, knows and selects, against slow loops over random traces; tests/test_browser.py has the browser."""

import base64
import json
import re
import secrets
import sys

import numpy as np
import pandas as pd
import pytest
import torch
import traitlets
from matplotlib.figure import Figure

import twell
from tests.factories.trace import aggregate_of
from tests.test_analysis import make_trace
from twell import analysis, inspector, trace
from twell.inspector import VIEW, Side


@pytest.fixture
def seed():
    seed = secrets.randbits(32)
    print(f"seed {seed}")
    return seed


@pytest.fixture(scope="module")
def model(tiny_run):
    """The tiny model with its tokenizer, and an aggregate beside it."""
    trace.aggregate_run(tiny_run, tokens=512).save(tiny_run / "aggregate.npz")
    yield tiny_run
    (tiny_run / "aggregate.npz").unlink()


def unpacked(data):
    """The entries of each side as the browser has them: rows of (neurons, values), and everything else."""
    header, arrays = inspector.unpack(data)
    sides = []
    for number, about in enumerate(header["sides"]):
        found = {
            name.split(".")[1]: array
            for name, array in arrays.items()
            if name.startswith(f"{number}.")
        }
        most = about["strongest"] or 65536
        ends = np.minimum(found["counts"].astype(int), most).cumsum()
        gap = found["gap_low"] + 256 * found["gap_high"].astype(int)
        bits = sum(
            found[f"value_{n}"].astype(np.uint32) << (24 - 8 * n)
            for n in range(3 if about["precise"] else 2)
        )
        parts = zip(
            np.split(gap, ends[:-1]),
            np.split(bits.astype(np.uint32).view(np.float32), ends[:-1]),
            strict=True,
        )
        found["rows"] = [(gaps.cumsum(), values) for gaps, values in parts]
        sides.append((about, found))
    return header, sides


@pytest.mark.parametrize("bits", [16, 24])
def test_leading_bits_are_the_nearest(seed, bits):
    random = np.random.default_rng(seed)
    every = random.integers(0, 2**32, 20000, dtype=np.uint32).view(np.float32)
    odd = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 1 + 2**-8, 1 + 3 * 2**-8], np.float32)
    values = np.concatenate([every, odd])
    found = (inspector.leading(values, bits) << (32 - bits)).astype(np.uint32).view(np.float32)
    if bits == 16:
        expected = torch.from_numpy(values).bfloat16().float().numpy()
        np.testing.assert_array_equal(found, expected)
    normal = np.isfinite(values) & (np.abs(values) > 1e-30) & (np.abs(values) < 1e38)
    np.testing.assert_allclose(found[normal], values[normal], rtol=2.0 ** (8 - bits))
    assert np.array_equal(np.isnan(found), np.isnan(values))


@pytest.mark.parametrize("neurons", [300, 65536])
def test_a_passage_is_packed_as_it_is(seed, neurons):
    found, mask = make_trace(seed, num_tokens=40, intermediate_size=300)
    found.indices = (found.indices.astype(int) * (neurons - 1) // 299).astype(np.uint16)
    found.intermediate_size = neurons
    found.meta["special_ids"] = [3]
    side = Side("a", found)
    header, [(about, packed)] = unpacked(inspector.pack([side]))
    assert about["precise"] and about["strongest"] is None and not header["aligned"]
    assert (about["tokens"], about["layers"], about["neurons"]) == (40, 3, neurons)
    for layer, token in np.ndindex(3, 40):
        row = layer * 40 + token
        h = found.layer(layer)[[token]]
        names, values = packed["rows"][row]
        assert np.array_equal(names, h.indices)
        np.testing.assert_allclose(values, h.data, rtol=2.0**-16, atol=0)
        assert packed["counts"][row] == len(h.indices)
        tiles = np.bincount(h.indices // 256, minlength=1)
        assert packed["tile_max"][row] == tiles.max()
        total = (packed["total"][row].astype(np.uint32) << 16).view(np.float32)
        assert total == pytest.approx(np.abs(h.data).sum(), rel=2**-8)
    assert [about["strings"][n] for n in packed["token"]] == found.strings
    assert [about["ids"][n] for n in packed["token"]] == found.token_ids.tolist()
    assert [about["ids"][n] for n in about["special"]] == ([3] if 3 in found.token_ids else [])
    assert np.array_equal(packed["logprob"], found.logprob, equal_nan=True)
    assert packed["starts"].tolist() == [0, 16, 32, 40] and np.array_equal(
        packed["position"], found.position
    )
    assert "fires" not in packed and "rate" not in packed


@pytest.mark.parametrize("share", [0.3, 0.9])
def test_of_many_entries_the_strongest_are_packed(seed, share):
    found, _ = make_trace(seed, num_tokens=50)
    counts = np.diff(found.indptr)
    limit = int(share * counts.sum())
    _, [(about, packed)] = unpacked(inspector.pack([Side("a", found)], max_entries=limit))
    k = about["strongest"]
    assert np.minimum(counts, k).sum() <= limit < np.minimum(counts, k + 1).sum()
    assert not about["precise"] and np.array_equal(packed["counts"], counts)
    for row, (names, values) in enumerate(packed["rows"]):
        inside = slice(found.indptr[row], found.indptr[row + 1])
        h = dict(zip(found.indices[inside].tolist(), found.values[inside].tolist(), strict=True))
        assert len(names) == min(len(h), k) and (np.diff(names) > 0).all()
        np.testing.assert_allclose(values, [h[name] for name in names], rtol=2.0**-8)
        left = sorted((abs(h[name]) for name in h if name not in set(names)), reverse=True)
        assert not left or left[0] <= min(abs(h[name]) for name in names)
    assert np.array_equal(packed["fires"].reshape(3, 300), found.neurons()[0])


def test_sides_are_packed_together(seed):
    first, second = (make_trace(seed + n, num_tokens=30)[0] for n in range(2))
    counted = aggregate_of(second)
    header, [_, (about, packed)] = unpacked(
        inspector.pack([Side("a", first), Side("b", second, counted)])
    )
    assert not header["aligned"] and about["name"] == "b" and about["aggregate"] == 30
    rate = (packed["rate"].astype(np.uint32) << 16).view(np.float32).reshape(3, 300)
    np.testing.assert_allclose(rate, second.neurons()[0] / 30, rtol=2**-8)
    second.token_ids = first.token_ids
    assert unpacked(inspector.pack([Side("a", first), Side("b", second)]))[0]["aligned"]


def test_what_does_not_fit_together_is_refused(seed, model):
    found, _ = make_trace(seed)
    other = aggregate_of(make_trace(seed, num_layers=2)[0])
    pair = twell.load(model)
    for arguments, options, words in [
        (
            (found,),
            {"aggregate": other},
            "run: the aggregate has 2 layers of 300 neurons, the trace 3 of 300",
        ),
        ((found,), {"model": pair}, "the model has 2 layers of 96 neurons, the trace 3 of 300"),
        ((found, "a text"), {}, "a trace has its own text"),
        ((found,), {"start": 60}, "start is 60; the trace has tokens 0 to 59"),
        ((pair, "ba"), {"start": 3}, "start and model belong to a trace"),
        ((pair, ("a", "b", "c")), {}, "two sides can be compared"),
        ((pair, ("a", "b")), {"compare": pair}, "two sides can be compared"),
        ((pair, "a"), {"compare_aggregate": other}, "compare_aggregate belongs to compare="),
        (((pair[0], None), "a"), {}, "without a tokenizer"),
    ]:
        found.meta["run"] = "run"
        with pytest.raises(ValueError, match=words):
            twell.inspect(*arguments, **options)
    with pytest.raises(TypeError, match="inspect has no argument 'color'; a view has side, token"):
        twell.inspect(found, color="count")
    with pytest.raises(FileNotFoundError):
        twell.inspect("nothing.npz")


def test_a_long_trace_is_shown_in_parts(seed, monkeypatch, tmp_path):
    monkeypatch.setattr(inspector, "MAX_TOKENS", 20)
    found, _ = make_trace(seed)
    found.save(tmp_path / "long.npz")
    widget = twell.inspect(tmp_path / "long.npz", start=30)
    assert widget.trace.strings == found.strings[30:50]
    about = inspector.unpack(widget.data)[0]["sides"][0]
    assert (about["name"], about["start"], about["of"], about["tokens"]) == ("long", 30, 60, 20)
    assert twell.inspect(found, start=50).trace.num_tokens == 10


# --- the selection


@pytest.mark.parametrize("token", [None, 3])
@pytest.mark.parametrize("layer", [None, 2])
@pytest.mark.parametrize("neuron", [None, 5])
@pytest.mark.parametrize("layers", [None, [1, 2]])
def test_to_frame_has_the_entries_that_match(seed, token, layer, neuron, layers):
    found, mask = make_trace(seed, num_tokens=30)
    dense = np.stack([found.layer(n).toarray() for n in range(3)])
    counted = aggregate_of(found)
    widget = twell.inspect(
        found, aggregate=counted, token=token, layer=layer, neuron=neuron, layers=layers
    )
    table = widget.to_frame()
    chosen = mask.copy()
    outside = np.ones_like(mask)
    of_layer = (
        [layer]
        if layer is not None
        else range(3)
        if layers is None
        else range(layers[0], layers[1] + 1)
    )
    outside[
        np.ix_(
            of_layer,
            range(30) if token is None else [token],
            range(300) if neuron is None else [neuron],
        )
    ] = False
    chosen[outside] = False
    assert sorted(zip(table["layer"], table["token"], table["neuron"], strict=True)) == sorted(
        map(tuple, np.argwhere(chosen).tolist())
    )
    order = table.assign(size=-table["value"].abs()).sort_values(
        ["token", "layer", "size"], kind="stable"
    )
    assert order.index.tolist() == list(range(len(table)))
    for row in table.sample(min(len(table), 50)).itertuples():
        h = dense[row.layer, row.token]
        total = np.abs(h).sum()
        assert row.value == h[row.neuron]
        assert row.share == pytest.approx(abs(h[row.neuron]) / total if total else 0, rel=1e-6)
        assert (row.text, row.position) == (found.strings[row.token], found.position[row.token])
        assert row.rate == pytest.approx(mask[row.layer, :, row.neuron].mean())


def test_traits_refuse_what_does_not_exist(seed):
    found, _ = make_trace(seed)
    widget = twell.inspect(found, token=5)
    for name, value, words in [
        ("token", 60, "token 60 does not exist: the passage has tokens 0 to 59"),
        ("token", -1, "token -1 does not exist"),
        ("layer", 3, "layer 3 does not exist: the model has layers 0 to 2"),
        ("neuron", 300, "neuron 300 does not exist: a layer has neurons 0 to 299"),
        ("side", 1, "side 1 does not exist: the view has sides 0 to 0"),
        ("layers", [2, 1], r"layers is \[2, 1\]; use \[first, last\] of layers 0 to 2"),
        ("limit", 0.0, "limit is 0.0; it has to be above 0"),
        ("colour", "red", "count.*neuron.*surprise"),
        ("compression", 3, "compression"),
    ]:
        with pytest.raises(traitlets.TraitError, match=words):
            setattr(widget, name, value)
    assert widget.view == VIEW | {"token": 5}
    with pytest.raises(ValueError, match="preset 'Nothing' is unknown; use one of Overview"):
        widget.preset("Nothing")


def test_without_anywidget_it_says_what_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "anywidget", None)
    monkeypatch.delitem(sys.modules, "twell.widget")
    with pytest.raises(ImportError, match="twell.inspect needs the package anywidget: pip install"):
        twell.inspect  # noqa: B018


def test_presets_are_what_they_say(seed):
    found, mask = make_trace(seed)
    widget = twell.inspect(found, limit=7.0)
    counts, later = mask.sum(-1), found.position > 0
    for name in widget.presets:
        widget.preset(name)
        assert widget.limit == 7.0
        if name == "Busiest token":
            assert (
                later[widget.token]
                and counts[:, widget.token].sum() == counts[:, later].sum(0).max()
            )
        elif name == "Most surprising token":
            assert (
                -found.logprob[widget.token] == np.nanmax(-found.logprob)
                and widget.colour == "surprise"
            )
        elif name == "Strongest neuron":
            assert abs(found.layer(widget.layer)[widget.token, widget.neuron]) == pytest.approx(
                max(np.abs(found.layer(n)[later].data).max(initial=0) for n in range(3))
            )
        elif name == "Most specific neuron":
            first = analysis.specific(found, min_fires=3, min_count=3).iloc[0]
            assert (widget.layer, widget.neuron) == (
                first["layer"],
                first["neuron"],
            ) and widget.token is None
        elif name == "Busiest layer":
            assert widget.layers == [counts[:, later].sum(1).argmax()] * 2 and widget.neuron is None
    assert len(widget.presets) == 6


# --- cards


def test_cards_have_what_the_aggregate_and_the_weights_say(model):
    widget = twell.inspect(model, "ba de fun")
    network, tokenizer = twell.load(model)
    counted = trace.Aggregate.load(model / "aggregate.npz")
    neurons = [(0, 0), (1, 95), (1, 3), *((0, n) for n in range(8))]
    unembedding = (network.get_output_embeddings().weight * network.model.norm.weight).double()
    strings = trace.token_strings(tokenizer, range(320))
    for card, (layer, neuron) in zip(
        inspector.cards(widget.sides[0], neurons), neurons, strict=True
    ):
        table = analysis.value_histogram(counted, layer, neuron)
        assert card["histogram"] == table["count"].tolist() and card["edges"] == [
            *table["low"],
            table["high"].iloc[-1],
        ]
        rates = analysis.by_neuron(counted).set_index(["layer", "neuron"]).loc[layer, neuron]
        assert (card["tokens"], card["fires"]) == (512, table["count"].sum())
        assert (
            card["fires"] == pytest.approx(512 * rates["rate"])
            and card["largest"] == rates["max_abs"]
        )
        if card["fires"]:
            assert card["mean"] == pytest.approx(rates["mean_value"], rel=1e-5)
        for kind, name in (("top", "top"), ("quantile", "quantiles")):
            rows = analysis.contexts(counted, layer, neuron, kind)
            assert [[*place[2:]] for place in card[name]] == rows.iloc[:, 2:].to_numpy().tolist()
            np.testing.assert_allclose([place[0] for place in card[name]], rows["value"], rtol=1e-3)
            assert [place[1] for place in card[name]] == (
                rows["quantile"].tolist() if name != "top" else [None] * len(rows)
            )
        change = unembedding @ network.ffns[layer].down_proj.weight[:, neuron].double()
        change = (change - change.mean()).detach().numpy()
        for name, sign in (("promotes", 1), ("suppresses", -1)):
            expected = np.sort(sign * change)[::-1][:10]
            np.testing.assert_allclose(
                [sign * value for _, value in card[name]], expected, rtol=2e-3, atol=1e-6
            )
            assert [word for word, _ in card[name]][0] == strings[int((sign * change).argmax())]
    with pytest.raises(
        IndexError, match="layer 2, neuron 0 does not exist: there are 2 layers of 96"
    ):
        inspector.cards(widget.sides[0], [(2, 0)])


def test_the_widget_answers_the_browser(model, monkeypatch):
    widget = twell.inspect(model, "ba de fun")
    sent = []
    monkeypatch.setattr(widget, "send", sent.append)
    for key in ("0:1:5", "0:9:9", "nonsense", "7:0:0"):
        widget._handle_custom_msg({"ask": key}, [])
    assert [answer["key"] for answer in sent] == ["0:1:5", "0:9:9", "nonsense", "7:0:0"]
    assert sent[0]["card"] == inspector.cards(widget.sides[0], [(1, 5)])[0]
    assert "layer 9, neuron 9 does not exist" in sent[1]["card"]["error"]
    assert sent[2]["card"]["error"] and sent[3]["card"]["error"]
    json.dumps(sent)


# --- typed text


def test_typed_text_is_run(model):
    widget = twell.inspect(model, "ba de fun", token=2, neuron=5, layer=1)
    network, tokenizer = twell.load(model)
    before = widget.data
    widget.texts = ["de"]
    expected = trace.trace_text(network, tokenizer, "de")
    assert (
        np.array_equal(widget.trace.values, expected.values)
        and widget.trace.strings == expected.strings
    )
    assert widget.data != before and (widget.busy, widget.error) == (False, "")
    assert widget.token is None and (widget.layer, widget.neuron) == (
        1,
        5,
    )  # the neuron stays, the token is gone
    widget.texts = [""]
    assert (
        widget.trace.num_tokens == 0
        and widget.to_frame().empty
        and "The text is empty" not in widget.error
    )
    assert list(widget.to_frame().columns[:3]) == ["model", "token", "text"]
    with pytest.raises(traitlets.TraitError, match="token 0 does not exist: the passage is empty"):
        widget.token = 0
    with pytest.raises(ValueError, match="the text is empty: there is no token to draw"):
        widget.figure()
    widget.texts = []
    assert widget.error == "texts is empty; give one text, or one for each side" and not widget.busy
    widget.texts = ["ba " * 5000]
    assert (
        widget.trace.num_tokens == inspector.MAX_TOKENS
        and widget.sides[0].of[1] > inspector.MAX_TOKENS
    )
    assert widget.error == ""


def test_a_trace_runs_no_text_without_its_model(seed, model):
    found, _ = make_trace(seed)
    widget = twell.inspect(found)
    assert not widget.runs
    before = widget.data
    widget.texts = ["ba"]
    assert "there is no model to run a text" in widget.error and widget.data == before
    pair = twell.load(model)
    traced = trace.trace_text(*pair, "ba de fun")
    widget = twell.inspect(traced, model=pair)
    assert widget.runs and widget.trace.strings == traced.strings
    widget.texts = ["de"]
    assert widget.trace.strings == trace.trace_text(*pair, "de").strings


def test_two_models_and_two_texts(model):
    pair = twell.load(model)
    both = twell.inspect(model, "ba de fun", compare=pair)
    header = inspector.unpack(both.data)[0]
    assert header["aligned"] and not header["same"] and both.texts == ["ba de fun"]
    assert [side["aggregate"] for side in header["sides"]] == [
        512,
        None,
    ]  # the one beside the model was found
    both.side, both.token = 1, 2
    assert both.to_frame()["model"].unique().tolist() == ["model"]
    both.texts = ["de"]
    assert [side.trace.num_tokens for side in both.sides] == [
        len(trace.trace_text(*pair, "de").token_ids)
    ] * 2
    texts = twell.inspect(pair, ("ba de fun", "de"))
    header = inspector.unpack(texts.data)[0]
    assert header["same"] and not header["aligned"] and texts.texts == ["ba de fun", "de"]
    assert [side["name"] for side in header["sides"]] == ["model, text 1", "model, text 2"]
    assert repr(texts).startswith("Inspector(model, text 1: ")


# --- pages and figures


def page_data(page):
    return base64.b64decode(re.search(r'type="text/plain">([^<]*)<', page)[1])


def test_a_page_needs_nothing_else(seed, model, tmp_path):
    widget = twell.inspect(model, "ba </script> de <b>", colour="surprise", token=1)
    path = widget.to_html(tmp_path / "deep" / "page.html")
    page = path.read_text(encoding="utf-8")
    assert page.count("</script>") == 2 and "https:" not in page and "import(" not in page
    assert set(re.findall(r"http:[^\s\"'`]*", page)) == {"http://www.w3.org/2000/svg"}
    assert '"colour": "surprise"' in page and '"token": 1' in page
    header, arrays = inspector.unpack(page_data(page))
    cards = json.loads(arrays["cards"].tobytes())
    fires = {
        f"0:{layer}:{n}" for layer in range(2) for n in np.unique(widget.trace.layer(layer).indices)
    }
    assert set(cards) == fires  # a small passage has room for all
    key = next(iter(cards))
    assert cards[key] == json.loads(
        json.dumps(inspector.cards(widget.sides[0], [tuple(map(int, key.split(":")[1:]))])[0])
    )


def test_a_page_stays_under_its_limit(seed, model, monkeypatch):
    widget = twell.inspect(model, "ba de fun " * 60)
    whole = len(inspector.page(widget.sides).encode())
    every = json.loads(
        inspector.unpack(page_data(inspector.page(widget.sides)))[1]["cards"].tobytes()
    )
    bare = len(inspector.page([Side("a", widget.trace)]).encode())
    middle = (whole + bare) // 2
    monkeypatch.setattr(inspector, "PAGE_BYTES", middle)
    page = inspector.page(widget.sides)
    assert len(page.encode()) <= middle
    header, arrays = inspector.unpack(page_data(page))
    cards = json.loads(arrays["cards"].tobytes())
    assert 0.2 * len(every) < len(cards) < len(every) and header["sides"][0]["strongest"] is None
    weight = {}
    for layer in range(2):
        h = abs(widget.trace.layer(layer).toarray())
        share = h / np.maximum(h.sum(1, keepdims=True), 1e-30)
        weight |= {f"0:{layer}:{n}": share[:, n].sum() for n in range(96)}
    begin = {
        f"0:{view['layer']}:{view['neuron']}"
        for view in widget.presets.values()
        if "neuron" in view
    }
    assert begin and begin <= set(cards)
    least = min(weight[key] for key in set(cards) - begin)
    assert least >= max(weight[key] for key in set(every) - set(cards)) - 1e-6
    silent = next((1, n) for n in range(96) if f"0:1:{n}" not in cards)
    page = inspector.page(widget.sides, {"layer": silent[0], "neuron": silent[1]})
    assert f"0:1:{silent[1]}" in json.loads(inspector.unpack(page_data(page))[1]["cards"].tobytes())
    monkeypatch.setattr(inspector, "PAGE_BYTES", bare - 3000)
    page = inspector.page([Side("a", widget.trace)])
    assert len(page.encode()) <= bare - 3000
    assert inspector.unpack(page_data(page))[0]["sides"][0]["strongest"] > 0
    monkeypatch.setattr(inspector, "PAGE_BYTES", 1000)
    with pytest.raises(ValueError, match=r"tokens do not fit into 1000 bytes"):
        inspector.page([Side("a", widget.trace)])


@pytest.mark.parametrize("colour", ["count", "neuron", "surprise"])
@pytest.mark.parametrize("scale", ["all", "layer", "neuron"])
def test_a_figure_has_the_values_of_the_view(seed, colour, scale):
    found, mask = make_trace(seed, num_tokens=40)
    layer, neuron = 1, int(found.layer(1).indices[0])
    widget = twell.inspect(
        found, colour=colour, scale=scale, layer=layer, neuron=neuron, layers=[1, 2], compression=16
    )
    drawn = inspector.drawn(widget.sides, widget.view)
    first = found.position == 0
    values = {
        "count": mask[1:3].sum(-1).mean(0),
        "neuron": found.layer(1).toarray()[:, neuron],
        "surprise": -found.logprob,
    }[colour].astype(float)
    assert drawn["passage"]["token"].tolist() == found.strings
    seen = drawn["passage"]["value"].to_numpy()
    assert np.isnan(seen[first]).all()
    low, high = drawn["ends"]
    np.testing.assert_allclose(
        seen[~first], np.where((values == 0) & (colour == "count"), low, values)[~first]
    )
    if colour == "neuron":
        column = {"all": found.values, "layer": found.layer(1).data, "neuron": values}[scale]
        assert -low == high == pytest.approx(np.abs(column).max())
    counts = mask[1:3].sum(-1).astype(float)
    counts[:, first] = np.nan
    pd.testing.assert_frame_equal(
        drawn["counts"], pd.DataFrame(counts, [1, 2], range(40)), check_index_type=False
    )
    tiles = np.stack([mask[1:3, :, at : at + 256].sum(-1) for at in (0, 256)])
    assert np.array_equal(drawn["over"], (tiles > 15).any(0) & ~first)
    assert isinstance(widget.figure(), Figure)


def test_a_figure_of_a_long_passage_is_around_the_token(seed):
    found, _ = make_trace(seed, num_tokens=400)
    for token, start in ((None, 0), (3, 0), (200, 72), (399, 144)):
        widget = twell.inspect(found, token=token)
        drawn = inspector.drawn(widget.sides, widget.view)
        assert (
            drawn["counts"].columns.tolist()
            == list(range(start, start + 256))
            == drawn["passage"].index.tolist()
        )
