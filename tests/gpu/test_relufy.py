"""Students on a GPU: the fit of their down projections, and a run that begins with it."""

import copy
import itertools

import pytest
import torch

pytest.importorskip("triton")

from tests.factories.train import BRIEF, write_pretrained
from twell.train import Student, fit_down, relufy_config


@pytest.fixture(scope="module")
def given(tmp_path_factory, tiny_text):
    folder = write_pretrained(
        tmp_path_factory.mktemp("relufy") / "model", tiny_text, num_hidden_layers=4
    )
    return relufy_config(folder, [f"source={tiny_text}", *BRIEF], lambda line: None)


def test_the_fit_is_that_of_a_cpu(given):
    """Also for a student whose layers are lent to the GPU one at a time."""
    blocks = given.prepare_text()[1]
    batches = [blocks.draw(range(start, start + 16)) for start in (0, 16)]
    student = Student.of(given, torch.device("cpu"))
    placed = {"cpu": copy.deepcopy(student), "lent": copy.deepcopy(student)}
    placed["cuda"] = copy.deepcopy(student).to("cuda")
    for place in ("lent", "cuda"):
        placed[place].teacher = (placed[place].teacher[0].to("cuda"),)
    weights = {}
    for place, one in placed.items():
        device = "cpu" if place == "cpu" else "cuda"
        for number in fit_down(one, [ids.to(device) for ids in batches], lambda sums: sums):
            weights[place, number] = one.ffns[number].down_proj.weight.detach().cpu()
    for place, number in itertools.product(("lent", "cuda"), range(4)):
        before = student.ffns[number].down_proj.weight
        expected = weights["cpu", number] - before
        error = weights[place, number] - before - expected
        assert error.norm() < 1e-2 * expected.norm(), (place, number)
