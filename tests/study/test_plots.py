"""Saving is exact, complete and repeatable."""

import io
import subprocess
import sys

import numpy as np
import pandas as pd
import pytest
from matplotlib.figure import Figure
from PIL import Image

from study import plots
from tests.factories import SEED
from twell import results


def layers(means):
    """A small figure."""
    table = pd.DataFrame({"layer": range(len(means)), "mean": means})
    table = table.assign(p99=2 * table["mean"], max=9 * table["mean"])
    return plots.fig06_layers(table, "A model")


SAVE = """
import sys
import pandas as pd
from study import plots
table = pd.DataFrame({"token": ["a", "b$", "\u00e9"], "count": 20, "mean_active": [1.0, 2.0, 3.0]})
plots.save(plots.fig07a_tokens(table), sys.argv[1])
"""


def test_another_process_writes_the_same_bytes(tmp_path, monkeypatch):
    environment = {"PYTHONHASHSEED": "1", "HOME": str(tmp_path), "PATH": "/usr/bin:/bin"}
    command = [sys.executable, "-c", SAVE, str(tmp_path / "1" / "fig")]
    subprocess.run(command, env=environment, cwd=results.root(), check=True)
    monkeypatch.setattr(sys, "argv", ["", str(tmp_path / "2" / "fig")])
    exec(SAVE, {})
    for suffix in ("png", "pdf"):
        first, second = (tmp_path / seed / f"fig.{suffix}" for seed in "12")
        assert first.read_bytes() == second.read_bytes(), suffix
    pdf = (tmp_path / "1" / "fig.pdf").read_bytes()
    assert b"CreationDate" not in pdf and b"/CIDFontType2" in pdf and b"/Type3" not in pdf


def test_few_colours_look_like_all(tmp_path):
    figure = layers([1.0, 2.0, 30.0])
    path = plots.save(figure, tmp_path / "fig")
    whole = io.BytesIO()
    figure.savefig(whole, format="png", dpi=200)
    with Image.open(path) as few, Image.open(whole) as every:
        assert few.mode == "P" and few.size == every.size
        assert few.info["dpi"] == pytest.approx((200, 200), abs=0.1)
        apart = np.abs(np.asarray(few.convert("RGB"), int) - np.asarray(every.convert("RGB"), int))
    assert apart.mean() < 0.1 and (apart > 64).mean() < 1e-4
    assert path.stat().st_size < 0.6 * len(whole.getvalue())
    # Of many shades each stays near its own, or all are kept.
    noise = np.random.default_rng(SEED).random((200, 200, 3))
    for shades, mode in (0.9 * noise[..., :1] + 0.04 * noise, "P"), (noise, "RGB"):
        figure, whole = Figure(figsize=(1, 1)), io.BytesIO()
        figure.figimage(shades)
        figure.savefig(whole, format="png", dpi=200)
        path = plots.save(figure, tmp_path / mode)
        with Image.open(path) as few, Image.open(whole) as every:
            assert few.mode == mode and every.convert("RGB").getcolors(8192) is None
            pair = [np.asarray(one.convert("RGB"), int) for one in (few, every)]
        assert np.abs(pair[0] - pair[1]).max() <= 12


def test_a_figure_is_replaced_whole_or_not_at_all(tmp_path):
    path = plots.save(layers([1.0, 2.0]), tmp_path / "new" / "fig.v2")
    assert sorted(file.name for file in path.parent.iterdir()) == ["fig.v2.pdf", "fig.v2.png"]
    before = path.read_bytes()

    class Broken(Figure):
        def savefig(self, buffer, **options):
            buffer.write(b"half a fig")
            raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        plots.save(Broken(), path.with_suffix(""))
    assert path.read_bytes() == before
    assert plots.save(layers([7.0]), path.with_suffix("")) == path
    assert path.read_bytes() != before and len(list(path.parent.iterdir())) == 2


def test_keep_saves_and_names_figures_or_neither(tmp_path, monkeypatch):
    monkeypatch.setattr(results, "root", lambda: tmp_path)
    figure = Figure(figsize=(1, 1))
    assert plots.Keep(None)(figure, "a") is figure and figure.get_label() == "a"
    assert not list(tmp_path.iterdir())
    assert plots.Keep("live")(figure, "b") is figure and figure.get_label() == "b"
    assert (tmp_path / "live" / "b.png").is_file()
    said = plots.Keep("live")(None, "c")
    assert said == "c is not drawn: nothing is recorded for it here."
