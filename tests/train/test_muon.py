"""Muon's steps against torch.optim.Muon's, and trainings with it."""

import dataclasses

import numpy as np
import pytest
import torch

from tests.factories import SEED
from tests.factories.train import launch, log_of, series, stop_training, write_config
from twell import results
from twell.models import SparseLlamaForCausalLM, load
from twell.train import start, train
from twell.train.build import build_optimizer
from twell.train.muon import Muon, orthogonalized


def test_singular_values_come_near_one_and_vectors_stay():
    generator = torch.Generator().manual_seed(SEED)
    matrices = (
        torch.randn(3, 12, 30, generator=generator) * torch.tensor([1e-6, 1, 1e6])[:, None, None]
    )
    result = orthogonalized(matrices).float()
    assert result.dtype == torch.float32 and (torch.linalg.svdvals(result) - 0.95).abs().max() < 0.3
    left, _, right = torch.linalg.svd(matrices, full_matrices=False)
    inner = left.mT @ result @ right.mT  # diagonal, if the vectors are the same
    assert (inner - torch.diag_embed(inner.diagonal(dim1=1, dim2=2))).abs().max() < 0.03
    assert not orthogonalized(torch.zeros(1, 4, 4)).any()  # a layer without a gradient stays


def test_steps_are_those_of_torch():
    generator = torch.Generator().manual_seed(SEED)
    shapes = (8, 20), (20, 8), (8, 8), (20, 8)
    ours = [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]
    theirs = [torch.nn.Parameter(p.detach().clone()) for p in ours]
    vector = torch.nn.Parameter(torch.ones(5))
    options = {"lr": 1e-2, "weight_decay": 0.1}
    muon = Muon([{"params": [vector]}, {"params": ours, "muon": True}], **options)
    expected = torch.optim.Muon(theirs, momentum=0.95, adjust_lr_fn="match_rms_adamw", **options)
    before = [p.detach().clone() for p in ours]
    for _ in range(5):
        vector.grad = torch.ones(5)
        for one, other in zip(ours, theirs, strict=True):
            one.grad = torch.randn(one.shape, generator=generator)
            other.grad = one.grad.clone()
        muon.step()
        expected.step()
    for one, other, old in zip(ours, theirs, before, strict=True):
        moved = (other - old).abs().max()
        assert moved > 0.01 and (one - other).abs().max() < 0.03 * moved  # bf16, other shapes
    torch.testing.assert_close(vector.detach(), torch.full((5,), 1 - 5e-2), atol=6e-3, rtol=0)


def test_embeddings_and_vectors_stay_with_adamw(tiny_config):
    given = dataclasses.replace(tiny_config, optimizer="muon")
    model = SparseLlamaForCausalLM(given.model_config())
    *others, matrices = build_optimizer(model, given, torch.device("cpu")).param_groups
    assert matrices["muon"] and [group["weight_decay"] for group in others] == [0.1, 0.0]
    names = {id(p): name for name, p in model.named_parameters()}
    taken = {names[id(p)] for p in matrices["params"]}
    assert taken == {name for name in names.values() if ".layers." in name and "norm" not in name}
    assert sum(len(group["params"]) for group in [*others, matrices]) == len(names)


def test_a_training_learns_and_resumes_exactly(tiny_config, tmp_path):
    given = dataclasses.replace(tiny_config, optimizer="muon", checkpoint_every=8)
    whole = train(given, tmp_path / "whole", quiet=True)
    log = results.load_run(whole)[1]
    loss = series(log, "cross_entropy", "valid")
    assert loss.iloc[-1] < loss.iloc[0] - 0.5
    adamw = log_of(tiny_config, tmp_path / "adamw")
    assert series(adamw, "loss").iloc[-1] != series(log, "loss").iloc[-1]
    stop_training(given, tmp_path / "stopped", 8)
    resumed = train(given, tmp_path / "stopped", resume=True, quiet=True)
    assert series(results.load_run(resumed)[1], "loss").equals(series(log, "loss"))
    models = [load(folder)[0].state_dict() for folder in (whole, resumed)]
    assert all(torch.equal(weight, models[1][name]) for name, weight in models[0].items())


def test_another_optimizer_is_refused(tiny_config):
    with pytest.raises(ValueError, match="optimizer is 'sgd'; it has to be 'adamw' or 'muon'"):
        dataclasses.replace(tiny_config, optimizer="sgd")


def test_sharded_matrices_are_refused(tiny_config):
    given = dataclasses.replace(tiny_config, optimizer="muon")
    start.check_shares(given, 1, False)
    with pytest.raises(ValueError, match="optimizer is 'muon', which needs whole matrices"):
        start.check_shares(given, 1, True)


@pytest.mark.slow
def test_two_processes_give_the_losses_of_one(tiny_config, tmp_path):
    given = dataclasses.replace(tiny_config, optimizer="muon", tokens=4096, log_every=2)
    write_config(given, tmp_path / "config.yaml")
    one = results.load_run(train(given, tmp_path / "one", quiet=True))[1]
    two, _ = launch(tmp_path, "two", "ddp")
    np.testing.assert_allclose(series(one, "loss"), series(two, "loss"), rtol=3e-3)
