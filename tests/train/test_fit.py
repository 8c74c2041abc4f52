"""Down projections that are fitted to the original before training."""

import copy
import dataclasses

import pytest
import torch

from tests.factories import SEED
from tests.factories.train import series, stop_training
from tests.kills import differences
from twell import results
from twell.train import Student, fit_down, loop, relufy, train


def student_of(config):
    return Student.of(config, torch.device("cpu")).eval()


def fitted(student, batches):
    assert list(fit_down(student, batches, lambda tensor: tensor)) == [0, 1]
    return student


@torch.no_grad()
def seen(model, ids, number):
    """What a decoder layer returns, and what its feed-forward module reads."""
    layer, found = model.base_model.layers[number], {}
    hooks = [
        layer.register_forward_hook(lambda _, inputs, output: found.update(output=output)),
        layer.mlp.register_forward_pre_hook(lambda _, inputs: found.update(x=inputs[0])),
    ]
    model(input_ids=ids)
    for hook in hooks:
        hook.remove()
    return found["output"].double().flatten(0, 1), found["x"]


def test_each_layer_makes_up_for_its_activation_and_for_earlier_layers(config):
    """Against least squares on [h; sqrt(ridge) I], on the outputs of whole models."""
    given = config()
    before, blocks = student_of(given), given.prepare_text()[1]
    batches = [blocks.draw(range(start, start + 8)) for start in (0, 8, 16)]
    after = fitted(copy.deepcopy(before), batches)
    ids, other = torch.cat(batches), blocks.draw(range(200, 232))
    (teacher,), partly = before.teacher, copy.deepcopy(before.student)
    for number, ffn in enumerate(after.ffns):  # earlier layers are fitted, this one is not
        found, x = seen(partly, ids, number)
        wanted, _ = seen(teacher, ids, number)
        with torch.no_grad():
            h = before.ffns[number].activations(x)[1].double().flatten(0, 1)
        ridge = (relufy.RIDGE * h.square().sum(0).mean()).sqrt() * torch.eye(h.shape[1])
        error = torch.cat([wanted - found, torch.zeros(h.shape[1], found.shape[1])])
        expected = torch.linalg.lstsq(torch.cat([h, ridge.double()]), error).solution.T
        weight = before.ffns[number].down_proj.weight
        change = (ffn.down_proj.weight - weight).double()
        assert (change - expected).norm() < 2e-3 * expected.norm()
        partly.base_model.layers[number].mlp.down_proj.weight.data.copy_(ffn.down_proj.weight)
    weights, others = after.student.state_dict(), before.student.state_dict()
    changed = {name for name in weights if not torch.equal(weights[name], others[name])}
    assert changed == {f"model.layers.{number}.mlp.down_proj.weight" for number in (0, 1)}
    with torch.no_grad():
        assert after(other).kl < 0.5 * before(other).kl  # on text that it did not see


def test_a_layer_without_activations_stays(config):
    student = student_of(config("threshold=1e6"))
    before = copy.deepcopy(student.state_dict())
    ids = torch.randint(320, (2, 16), generator=torch.Generator().manual_seed(SEED))
    fitted(student, [ids])
    assert all(torch.equal(weight, before[n]) for n, weight in student.state_dict().items())


def test_activations_that_are_not_finite_are_refused(config):
    student = student_of(config())
    student.ffns[1].up_proj.weight.data[3] = torch.inf
    with pytest.raises(ValueError, match="layer 1"):
        list(fit_down(student, [torch.zeros(1, 8, dtype=torch.long)], lambda tensor: tensor))


def test_a_run_begins_with_it_and_does_not_repeat_it(config, tmp_path, monkeypatch):
    given = dataclasses.replace(
        config("tokens=7680", "l1_stage_steps=5", "l1_growth=1.2", "hidden_weight=0.5"),
        **{"precision": "bf16", "checkpoint_every": 5, "fit_tokens": 4000},
    )
    whole = train(given, tmp_path / "whole", quiet=True)
    kl = series(results.load_run(whole)[1], "kl", "valid").iloc[0]
    with torch.no_grad():
        without = student_of(given)(given.prepare_text()[2].draw(range(8))).kl
    assert kl < 0.5 * without
    stop_training(given, tmp_path / "stopped", 10)
    monkeypatch.setattr(loop, "fit_down", None)  # from the checkpoint it goes on without
    resumed = train(given, tmp_path / "stopped", resume=True, quiet=True)
    assert differences(resumed, whole) == []
