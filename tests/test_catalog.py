"""The catalog of all neurons against slow loops, and notes; not what a browser draws."""

import numpy as np
import pandas as pd
import pytest
import torch

import twell
from study import analysis
from tests.factories.inspector import unpack
from twell import inspector, results, trace


def test_a_catalog_has_what_the_aggregate_says(model, pair):
    counted = trace.Aggregate.load(model / "aggregate.npz")
    catalog = inspector.Catalog(inspector.sides(model, "ba de fun")[0])
    chunks = {name: unpack(catalog.chunk(name)) for name in catalog.names}
    assert [*chunks] == "overview text layer-0 layer-1 words-0 words-1".split()
    about, overview = chunks["overview"]
    counts, sums, largest = (array.reshape(-1) for array in counted.neurons())
    means = sums / np.maximum(counts, 1)
    assert (about["tokens"], about["strings"]) == (512, counted.strings)
    assert np.array_equal(overview["fires"], counted.neurons()[0].reshape(-1))
    alive = overview["fires"] > 0
    strength = counted.abs_sum.reshape(-1) / np.maximum(counts, 1)
    for name, expected in (("mean", means), ("largest", largest), ("strength", strength)):
        np.testing.assert_allclose(overview[name][alive], expected[alive], 1e-4)
    text = {name: array.astype(int) for name, array in chunks["text"][1].items()}
    words = [about["strings"][n] for n in text["text"]]
    at = text["at"].reshape(2, 96, -1) - 1
    peaks = overview["peaks"].reshape(2, 96, -1)
    for layer, neuron in [(1, 95), (1, 3), (0, 0), (0, 7)]:
        own = chunks[f"layer-{layer}"][1]
        bins = counted.value_histogram[layer, neuron]
        assert own["histogram"].reshape(96, -1)[neuron].tolist() == bins.tolist()
        top = analysis.contexts(counted, layer, neuron)
        table = pd.concat([top, analysis.contexts(counted, layer, neuron, "quantile")])
        known = at[layer, neuron] >= 0
        places = at[layer, neuron][known]
        np.testing.assert_array_equal(own["value"].reshape(96, -1)[neuron][known], table["value"])
        assert [words[place] for place in places] == table["token"].tolist()
        for name in ("sequence", "position"):
            assert text[name][places].tolist() == table[name].astype(int).tolist()
        seen = [about["strings"][n - 1] for n in peaks[layer, neuron] if n]
        assert seen == [*dict.fromkeys(top["token"])][:4]
        assert np.array_equal(own["near"].reshape(96, 13, -1), counted.near[layer])
        together = own["together"].reshape(96, -1)[neuron].astype(int) - 1
        assert np.array_equal(together, counted.together_at[layer, neuron])


def test_a_catalog_has_what_the_weights_say(model, pair, monkeypatch):
    monkeypatch.setattr("twell.inspector.catalog.BATCH", 40)
    network, tokenizer = pair
    catalog = inspector.Catalog(inspector.sides(pair, "ba de fun")[0])
    assert catalog.names == ["overview", "words-0", "words-1"]
    unembedding = (network.get_output_embeddings().weight * network.model.norm.weight).double()
    strings = trace.token_strings(tokenizer, range(320))
    both = [(ffn.gate_proj.weight, ffn.down_proj.weight.T) for ffn in network.ffns]
    gates, outputs = (
        torch.cat(parts).detach().double().numpy() for parts in zip(*both, strict=True)
    )
    for layer in range(2):
        header, arrays = unpack(catalog.chunk(f"words-{layer}"))
        ffn, own = network.ffns[layer], slice(96 * layer, 96 * layer + 96)
        change = (unembedding @ ffn.down_proj.weight.double()).detach().numpy()
        change -= change.mean(0)
        words = np.array(header["strings"])[arrays["word"].reshape(96, 2, 10)]
        changes = arrays["change"].reshape(96, 2, 10)
        for half, sign in enumerate((1, -1)):
            expected = np.sort(sign * change.T)[:, ::-1][:, :10]
            np.testing.assert_allclose(sign * changes[:, half], expected, 2e-3, 1e-6)
            first = (sign * change).argmax(0)
            assert words[:, half, 0].tolist() == [strings[word] for word in first]
        kin = {
            "down": (outputs[own], outputs, 0, 96 * layer),
            "read": (outputs[:96], gates[96:], 96, None),
            "written": (gates[96:], outputs[:96], 0, None),
        }
        assert header["like"] == ["down", ["read", "written"][layer]]
        for name in header["like"]:
            kin_are_the_nearest(arrays, name, *kin[name])


def kin_are_the_nearest(arrays, name, rows, others, first, own):
    """first: number of the first of the others; own: where the rows stand among them."""
    lengths = [np.linalg.norm(matrix, axis=1) for matrix in (rows, others)]
    cosine = rows @ others.T / np.outer(*lengths)
    if own is not None:
        cosine[np.arange(96), own + np.arange(96)] = 0
    at = arrays[name].reshape(96, 5).astype(int) - first
    values = arrays[f"{name}_cosine"].reshape(96, 5)
    np.testing.assert_allclose(values, np.take_along_axis(cosine, at, 1), 1e-3, 1e-6)
    largest = np.sort(np.abs(cosine), 1)[:, ::-1][:, :5]
    np.testing.assert_allclose(np.abs(values), largest, 1e-3, 1e-6)


def test_an_aggregate_alone_has_an_atlas_without_words(tmp_path):
    recorded = results.root() / "data" / "traces" / "85m-50m-l1-6e-4-aggregate.npz"
    side = inspector.write_atlas(recorded, tmp_path)
    assert side.model is None and side.shape == (12, 2112)
    names = {path.name.partition(".")[0] for path in tmp_path.rglob("*") if path.is_file()}
    assert "layer-11" in names and "words-0" not in names


def test_notes_are_lines_of_a_file_beside_the_model(model):
    file = model / inspector.NOTES
    widget = twell.inspect(model, "ba de fun")
    notes = [(1, 5, "ends of\nlines"), (0, 7, "x"), (1, 5, " years "), (0, 7, "")]
    for layer, neuron, text in notes:
        widget._handle_custom_msg({"note": f"0:{layer}:{neuron}", "text": text}, [])
    assert file.read_text() == "1:5 years\n"
    file.write_text("# mine\n\n1:5 years\n0:10 a  b\n0:01\told\n")
    inspector.write_note(file, 0, 1, "c")
    assert file.read_text() == "# mine\n\n1:5 years\n0:10 a  b\n0:1 c\n"
    assert widget.sides[0].notes == {(1, 5): "years", (0, 10): "a  b", (0, 1): "c"}
    file.write_text("1;5 years")
    with pytest.raises(ValueError, match="line 1: '1;5 years'"):
        inspector.read_notes(file, (2, 96))
    file.unlink()
