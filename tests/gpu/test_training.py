"""Training on a GPU: gradients at real shapes, compiled by Inductor, and runs beside dense ones."""

import dataclasses
import json
import os
import subprocess
import sys

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from tests import fuzz, fuzz_training
from tests.factories import ops
from tests.factories.sparse import watched
from tests.factories.train import series, write_config
from tests.gpu.test_gpu import LARGE, SEED, large_layer, skewed, some_rows, two_gpus
from twell import collect_l1, results
from twell.sparse import training_ops
from twell.sparse.layer import SparseFFN
from twell.sparse.training import SparseTraining
from twell.train import TrainConfig, train

PATHS = sorted(training_ops.TRAIN_PATHS)


def leaves_of(tensors):
    """The same tensors as leaves that require gradients."""
    return {name: None if t is None else t.detach().requires_grad_() for name, t in tensors.items()}


def gradients_of(trained, leaves, dy, dl1):
    """The gradients of all leaves by name."""
    given = {name: t for name, t in leaves.items() if t is not None}
    gradients = torch.autograd.grad([trained.y, trained.l1], list(given.values()), [dy, dl1])
    return dict(zip(given, gradients, strict=True))


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("pattern", ["edges", "even", "skewed", "heavy", "full"])
def test_gradients_at_full_width(pattern, path):
    case = fuzz.Case(path, 4096 - 3, 5632, 2048, pattern=pattern, seed=SEED)
    fuzz_training.check_training(case, "cuda", path)


@pytest.mark.parametrize("path", PATHS)
def test_a_step_saves_less_than_a_dense_layer(path):
    tensors = leaves_of(skewed(16_384))
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    # Hybrid uses its capacity for backup rows alone.
    capacity = {"union": 48, "hybrid": 192}[path]
    trained = ops.train(path, capacity, **tensors)
    assert int(trained.needed) <= capacity
    x = tensors["x"]
    # y is not saved, and is as large as x, which is.
    held = torch.cuda.memory_allocated() - before
    assert held <= 0.25 * (2 * x.numel() + 3 * 2 * 16_384 * 5632)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("gated", [True, False])
def test_compiled_by_inductor(gated, path):
    torch.manual_seed(SEED)
    ffn = SparseFFN(512, 1408, gated=gated, bias=True, backend="triton", device="cuda")
    with torch.no_grad():
        (ffn.gate_proj if gated else ffn.up_proj).bias.fill_(-1.0)
    ffn.train_path, ffn.capacity = path, 1408
    ffn.outbox.watch_capacity = True
    x = torch.randn(4, 256, 512, device="cuda")

    def step(call):
        ffn.zero_grad()
        leaf = x.detach().requires_grad_()
        with torch.autocast("cuda", torch.bfloat16):
            y, l1 = watched(ffn, leaf, call, counts=True)
        (y.float().square().mean() + 1e-3 * l1.mean()).backward()
        counts = ffn.stats.take()
        return [y, leaf.grad, *(p.grad for p in ffn.parameters())], counts

    expected, counted = step(ffn)
    torch.compiler.reset()
    results, recounted = step(torch.compile(ffn, fullgraph=True))
    assert ffn.outbox.needed is not None and 0 < int(ffn.outbox.needed) < 700
    for a, b in zip(results, expected, strict=True):
        assert (a - b).float().norm() <= 5e-3 * b.float().norm()
    for a, b in zip(recounted, counted, strict=True):
        assert torch.equal(a, b)


def write_text(path):
    """4,000 texts in which each word leaves four choices for the next."""
    random = np.random.default_rng(0)
    words = [f"{a}{b}" for a in "bdfgklmnprst" for b in ("a", "e", "ain", "o", "un", "ir", "el")]
    follow = random.integers(0, len(words), (len(words), 4))
    with open(path, "w", encoding="utf-8") as file:
        for _ in range(4000):
            chain = [int(random.integers(len(words)))]
            for choice in random.integers(0, 4, 200):
                chain.append(int(follow[chain[-1], choice]))
            file.write(json.dumps({"text": " ".join(words[word] for word in chain)}) + "\n")


SMALL = dict(
    vocab_size=400,
    context=128,
    hidden_size=256,
    intermediate_size=704,
    num_layers=4,
    num_heads=4,
    tokens=200 * 8192,
    batch_tokens=8192,
    warmup_steps=20,
    precision="bf16",
    l1_coefficient=3e-3,
    log_every=5,
    valid_every=200,
    valid_tokens=4096,
)


def run_of(config, folder):
    """Losses and mean active neurons at the logged steps of a run."""
    log = results.load_run(train(config, folder, quiet=True))[1]
    active = series(log, "active_mean").groupby("step").mean()
    return series(log, "cross_entropy").to_numpy(), active.to_numpy()


def test_200_steps_follow_the_dense_ones(tmp_path):
    """Losses of the sparse run differ from the dense run's no more than a second dense run's do.

    The three differ in rounding alone: the second dense run is compiled, which fuses and so rounds
    less.
    """
    write_text(tmp_path / "text.jsonl")
    config = TrainConfig(source=str(tmp_path / "text.jsonl"), **SMALL)
    variants = {
        "dense": {},
        "compiled": {"compile": True},
        "sparse": {"backend": "triton"},
        "auto": {"backend": "auto"},
    }
    losses, active = {}, {}
    for name, changes in variants.items():
        run = run_of(dataclasses.replace(config, **changes), tmp_path / name)
        losses[name], active[name] = run
    torch.compiler.reset()
    assert losses["dense"][-1] < losses["dense"][0] - 1 and active["dense"][-1] < 200
    late = slice(len(losses["dense"]) // 2, None)

    def distance(name, values):
        return float(np.sqrt(np.mean((values[name][late] - values["dense"][late]) ** 2)))

    least_active = 0.02 * active["dense"][-1]
    for name in ("sparse", "auto"):
        assert distance(name, losses) <= 2 * distance("compiled", losses) + 2e-3
        assert distance(name, active) <= 2 * distance("compiled", active) + least_active


@pytest.mark.usefixtures("whole_card")
@pytest.mark.parametrize("shape", LARGE, ids=str)
@pytest.mark.parametrize("path", PATHS)
def test_more_than_2_to_the_31_entries(path, shape):
    torch.use_deterministic_algorithms(False)
    tensors = large_layer(*shape)
    num_tokens, num_neurons, hidden_size = shape
    leaves = leaves_of(tensors)
    dy = torch.randn(num_tokens, hidden_size, device="cuda").bfloat16()
    dl1 = torch.rand(num_tokens, device="cuda")
    capacity = max(1, int(ops.train(path, 1, **leaves).needed))
    trained = ops.train(path, capacity, **leaves)
    assert int(trained.needed) <= capacity
    gradients = gradients_of(trained, leaves, dy, dl1)
    rows, neurons = some_rows(num_tokens), slice(-256, None)
    results = {"y": trained.y[rows].detach(), "l1": trained.l1[rows].detach()}
    results |= {"x": gradients["x"][rows], "w_down": gradients["w_down"][:, neurons]}
    results |= {name: gradients[name][neurons] for name in ("w_gate", "w_up")}
    tensors = {name: None if t is None else t.detach() for name, t in tensors.items()}
    part = {name: tensors[name][neurons] for name in ("w_gate", "w_up")}
    part = {**tensors, **part, "w_down": tensors["w_down"][:, neurons]}

    def exact(edge):
        some = {**tensors, "x": tensors["x"][rows]}
        of_rows = fuzz_training.exact_training(some, dy[rows], dl1[rows], edge=edge)
        sums = {name: of_rows[name][0] for name in ("y", "l1", "x")}
        for chunk in torch.arange(num_tokens, device="cuda").split(8192):
            some = {**part, "x": tensors["x"][chunk]}
            of_chunk = fuzz_training.exact_training(some, dy[chunk], dl1[chunk], edge=edge)
            for name in ("w_gate", "w_up", "w_down"):
                sums[name] = sums.get(name, 0) + of_chunk[name][0]
        return sums

    # A gate within the rounding of fp32 sums from zero may be active or not.
    expected, fewest, most = (
        exact(edge) for edge in (0.0, fuzz_training.FP32_SUM, -fuzz_training.FP32_SUM)
    )
    for name, value in results.items():
        error = (value.double() - expected[name]).norm() - (most[name] - fewest[name]).norm()
        assert error <= 6e-3 * expected[name].norm(), name


@two_gpus
@pytest.mark.parametrize("compile", [False, True], ids=["eager", "compiled"])
def test_sharded_over_two_gpus_the_losses_are_those_of_one(tmp_path, compile):
    """FSDP2 by Accelerate's launcher. Sums are in another order, and so round otherwise."""
    write_text(tmp_path / "text.jsonl")
    changes = {"tokens": 20 * 8192, "backend": "triton", "compile": compile}
    config = TrainConfig(source=str(tmp_path / "text.jsonl"), **SMALL | changes)
    write_config(config, tmp_path / "config.yaml")
    train(config, tmp_path / "one", quiet=True)
    torch.compiler.reset()
    command = [sys.executable, "-m", "accelerate.commands.launch", "--main_process_port", "0"]
    command += ["--num_processes", "2", "--use_fsdp", "--fsdp_version", "2"]
    command += ["--mixed_precision", "bf16", "-m", "twell", "train", tmp_path / "config.yaml"]
    paths = [str(results.root()), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    subprocess.run([*command, "--out", tmp_path / "two"], env=environment, check=True)
    one, two = (results.load_run(tmp_path / name)[1] for name in ("one", "two"))
    for metric, rtol in {"cross_entropy": 5e-3, "l1": 2e-2, "sparse_layers": 0}.items():
        values = [series(log, metric) for log in (one, two)]
        assert len(values[0]) == 4
        np.testing.assert_allclose(*values, rtol=rtol, err_msg=metric)
    launched = results.load_provenance(tmp_path / "two")["command"]
    assert "--use_fsdp --fsdp_version 2 --fsdp_auto_wrap_policy TRANSFORMER_BASED_WRAP" in launched


@two_gpus
def test_layers_on_two_gpus_train_sparsely():
    """As a device map places them; the steps equal those of the same layers on one GPU."""
    losses = []
    for devices in (("cuda:0", "cuda:0"), ("cuda:0", "cuda:1")):
        torch.manual_seed(0)
        layers = torch.nn.ModuleList(
            SparseFFN(256, 704, backend="triton", bias=True) for _ in range(2)
        )
        with torch.no_grad():
            for ffn, device in zip(layers, devices, strict=True):
                ffn.gate_proj.bias.fill_(-0.7)
                ffn.to(device)
        optimizer = torch.optim.AdamW(layers.parameters(), 1e-3)
        sparse = SparseTraining(layers)
        x = torch.randn(500, 256)
        losses.append([])
        for _ in range(5):
            for _ in sparse.attempts():
                optimizer.zero_grad()
                y = x.to(devices[0])
                autocast = torch.autocast("cuda", torch.bfloat16)
                with autocast, collect_l1(layers) as terms:
                    for ffn, device in zip(layers, devices, strict=True):
                        y = y.to(device) + ffn(y.to(device))
                loss = y.float().square().mean() + 1e-3 * terms.by_layer().sum().to(device)
                loss.backward()
            optimizer.step()
            losses[-1].append(float(loss))
        assert sparse.summary()["sparse_layers"] == 2
    assert losses[0] == losses[1] and losses[0][-1] < losses[0][0]
