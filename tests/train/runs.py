"""Runs that several files of tests make: streamed, stopped, in two processes."""

import dataclasses
import os
import subprocess
import sys

import numpy as np
import pytest

from twell import results
from twell.models import load
from twell.train import train
from twell.train.loop import Run

COMPARED = {
    "train": ["loss", "cross_entropy", "l1", "grad_norm", "active_mean", "dead_fraction"],
    "valid": ["cross_entropy", "cross_entropy_silenced", "active_mean"],
}


def series(log, metric, split="train"):
    rows = log[(log.metric == metric) & (log.split == split)]
    return rows.set_index(["step", "layer"]).value


# Accelerate shards on accelerators only. This turns its FSDP2 on for processes on the CPU, and
# checks that the weights are sharded. PRELUDE may replace more.
LAUNCHED = """
import sys
import accelerate
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from twell.__main__ import main
from twell.train import TrainConfig, start, train
from twell.train.loop import Run

def sharded(**options):
    accelerator = accelerate.Accelerator(**options)
    accelerator.state.distributed_type = DistributedType.FSDP
    accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
    )
    return accelerator

def run(self, resume, train_run=Run.train):
    weight = self.model.ffns[0].gate_proj.weight
    assert self.accelerator.num_processes == 2
    assert not fsdp or weight.to_local().shape[0] * 2 == weight.shape[0]
    assert fsdp or (self.wrapped.gradient_as_bucket_view and not self.wrapped.broadcast_buffers)
    return train_run(self, resume)

fsdp = sys.argv.pop(1) == "fsdp2"
Run.train = run
if fsdp:
    start.Accelerator = sharded
PRELUDE
sys.exit(main(sys.argv[1:]))
"""


def launch(tmp_path, name, kind, *arguments, prelude=""):
    """Train by the command line in two processes on the CPU; return the run's log and model.

    They run the code `prelude` first.
    """
    (tmp_path / "launched.py").write_text(LAUNCHED.replace("PRELUDE", prelude))
    environment = os.environ | {
        "ACCELERATE_USE_CPU": "true",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(results.root()),
    }
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += [tmp_path / "launched.py", kind, "train", tmp_path / "config.yaml"]
    command += ["--out", tmp_path / name, *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return results.load_run(tmp_path / name)[1], load(tmp_path / name)[0]


def train_changed(config, folder, **changes):
    """Train with some fields changed; return the run's folder."""
    return train(dataclasses.replace(config, **changes), folder, quiet=True)


def log_of(config, folder, **changes):
    """Train with some fields changed; return the run's log."""
    return results.load_run(train_changed(config, folder, **changes))[1]


def assert_same_numbers(one, other, rtol):
    """Compare the logs of two runs: losses, norms and activity."""
    for split, metrics in COMPARED.items():
        for metric in metrics:
            numbers = series(one, metric, split), series(other, metric, split)
            np.testing.assert_allclose(*numbers, rtol=rtol, err_msg=metric)


def stop_training(config, folder, step, **options):
    """Train, and stop as if killed, right after the checkpoint of a step."""
    save = Run.save_checkpoint

    def save_and_stop(self, now):
        save(self, now)
        if now == step:
            raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Run, "save_checkpoint", save_and_stop)
        train(config, folder, **{"quiet": True} | options)


def stream_config(tiny_config, tiny_text, folder):
    """The tiny configuration with its text streamed from a folder, and with a given tokenizer."""
    folder.mkdir()
    (folder / "part.jsonl").write_bytes(tiny_text.read_bytes())
    tiny_config.prepare_text()[0].save_pretrained(folder.parent / "tokenizer")
    given = {"source": f"hf:{folder}", "tokenizer": str(folder.parent / "tokenizer")}
    return dataclasses.replace(tiny_config, checkpoint_every=8, valid_tokens=320, **given)
