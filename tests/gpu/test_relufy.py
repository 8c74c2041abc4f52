"""Students on a GPU: the fit of their down projections, and a run that begins with it."""

import dataclasses

import pytest

pytest.importorskip("triton")

from tests.factories.train import BRIEF, series, write_pretrained
from twell import results
from twell.train import relufy_config, train


@pytest.fixture(scope="module")
def given(tmp_path_factory, tiny_text):
    folder = write_pretrained(
        tmp_path_factory.mktemp("relufy") / "model", tiny_text, num_hidden_layers=4
    )
    return relufy_config(folder, [f"source={tiny_text}", *BRIEF], lambda line: None)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_a_run_begins_near_its_teacher(given, tmp_path, compiled):
    brief = dataclasses.replace(given, precision="bf16", compile=compiled, tokens=2048)
    logs = [
        results.load_run(train(one, tmp_path / name, quiet=True))[1]
        for name, one in (
            ("plain", brief),
            ("fitted", dataclasses.replace(brief, fit_tokens=4000)),
        )
    ]
    plain, fitted = (series(log, "kl", "valid").iloc[0] for log in logs)
    assert fitted < 0.5 * plain
