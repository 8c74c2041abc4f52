"""A tiny text and its configuration, and runs of it: stopped, streamed, in two processes."""

import dataclasses
import functools
import json
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
import yaml
from transformers import AutoConfig, AutoModelForCausalLM

from tests.factories import SEED
from twell import results
from twell.config import TrainConfig
from twell.models import load
from twell.train import train
from twell.train.loop import Run

WORDS = [f"{a}{b}" for a in "bdfgklmnprst" for b in ("a", "e", "ain", "o", "un")]
SHORT = {"tokens": 512, "warmup_steps": 0}  # one step
COMPARED = {
    "train": ["loss", "cross_entropy", "l1", "grad_norm", "active_mean", "dead_fraction"],
    "valid": ["cross_entropy", "cross_entropy_silenced", "active_mean"],
}


def write_text(path):
    """Write 80 documents with some structure: every word decides the next but two."""
    random = np.random.default_rng(11)
    follow = random.integers(0, len(WORDS), (len(WORDS), 3))
    with open(path, "w", encoding="utf-8") as file:
        for _ in range(80):
            word, words = int(random.integers(len(WORDS))), []
            for _ in range(150):
                words.append(WORDS[word])
                word = int(follow[word, random.integers(3)])
            file.write(json.dumps({"text": " ".join(words), "source": "tiny"}) + "\n")


def configuration(source):
    """Return a configuration of 16 steps, which train in a second."""
    return TrainConfig(
        source=str(source),
        vocab_size=320,
        context=32,
        hidden_size=32,
        intermediate_size=96,
        num_layers=2,
        num_heads=2,
        tokens=16 * 512,
        batch_tokens=512,
        warmup_steps=2,
        learning_rate=5e-3,
        l1_coefficient=1e-2,
        dead_window_tokens=2048,
        log_every=4,
        valid_every=8,
        valid_tokens=512,
    )


def stream_config(config, text, folder):
    """Return the configuration with its text streamed from a folder, and with a tokenizer."""
    folder.mkdir()
    (folder / "part.jsonl").write_bytes(text.read_bytes())
    config.prepare_text()[0].save_pretrained(folder.parent / "tokenizer")
    given = {"source": f"hf:{folder}", "tokenizer": str(folder.parent / "tokenizer")}
    return dataclasses.replace(config, checkpoint_every=8, valid_tokens=320, **given)


# Fields of a short training of `twell relufy`.
BRIEF = "context=32 batch_tokens=512 micro_batch=null precision=fp32 valid_tokens=512 "
BRIEF += "learning_rate=3e-3 log_every=5 valid_every=20 warmup_steps=2 checkpoint_every=0 "
BRIEF += "l1_zero_steps=0"
BRIEF = BRIEF.split()


def write_pretrained(folder, text, kind="llama", **changes):
    """Write a random SiLU model with the tokenizer of the tiny text; return the folder."""
    tokenizer = configuration(text).prepare_text()[0]
    ends = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    torch.manual_seed(SEED)
    sizes = dict(vocab_size=320, hidden_size=32, intermediate_size=96, num_hidden_layers=2)
    sizes |= dict(num_attention_heads=2, num_key_value_heads=1, head_dim=16)
    sizes |= dict(max_position_embeddings=64, initializer_range=0.2) | ends | changes
    config = AutoConfig.for_model(kind, **sizes)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def write_config(config, path):
    path.write_text(yaml.safe_dump(dataclasses.asdict(config)))


def train_changed(config, folder, **changes):
    """Train with some fields changed; return the run's folder."""
    return train(dataclasses.replace(config, **changes), folder, quiet=True)


def log_of(config, folder, **changes):
    """Train with some fields changed; return the run's log."""
    return results.load_run(train_changed(config, folder, **changes))[1]


resume = functools.partial(train, resume=True, quiet=True)


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


def series(log, metric, split="train"):
    rows = log[(log.metric == metric) & (log.split == split)]
    return rows.set_index(["step", "layer"]).value


def assert_same_numbers(one, other, rtol):
    """Compare the logs of two runs: losses, norms and activity."""
    for split, metrics in COMPARED.items():
        for metric in metrics:
            numbers = series(one, metric, split), series(other, metric, split)
            np.testing.assert_allclose(*numbers, rtol=rtol, err_msg=metric)


def contents(folder):
    """Return the bytes of each file below a folder."""
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


# Accelerate shards on accelerators only. This turns its FSDP2 on for processes on the CPU, with the
# options of the command line, and checks that each decoder layer is sharded on its own. PRELUDE may
# replace more.
LAUNCHED = """
import sys
import accelerate
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from torch.distributed.fsdp import FSDPModule
from twell.__main__ import main
from twell.train import TrainConfig, start, train
from twell.train.loop import Run

def sharded(**options):
    accelerator = accelerate.Accelerator(**options)
    accelerator.state.distributed_type = DistributedType.FSDP
    accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin()
    return accelerator

def run(self, bar, train_run=Run.train):
    weight = self.model.ffns[0].gate_proj.weight
    assert self.accelerator.num_processes == 2
    assert not fsdp or weight.to_local().shape[0] * 2 == weight.shape[0]
    layers = [type(m) for m in self.model.modules() if "DecoderLayer" in type(m).__name__]
    assert len(layers) >= 2 and all(issubclass(layer, FSDPModule) == fsdp for layer in layers)
    assert fsdp or (self.wrapped.gradient_as_bucket_view and not self.wrapped.broadcast_buffers)
    return train_run(self, bar)

fsdp = sys.argv.pop(1) == "fsdp2"
Run.train = run
if fsdp:
    start.Accelerator = sharded
PRELUDE
sys.exit(main(sys.argv[1:]))
"""


LAUNCHERS = {"ddp": ["--multi_gpu"], "fsdp2": ["--use_fsdp", "--fsdp_version", "2"]}


def launch(tmp_path, name, kind, *arguments, prelude=""):
    """Train by the command line in two processes on the CPU; return the run's log and model.

    Accelerate's launcher starts them. They run the code `prelude` first.
    """
    (tmp_path / "launched.py").write_text(LAUNCHED.replace("PRELUDE", prelude))
    environment = os.environ | {
        "ACCELERATE_USE_CPU": "true",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(results.root()), os.environ.get("PYTHONPATH", "")]),
    }
    command = [sys.executable, "-m", "accelerate.commands.launch", "--main_process_port", "0"]
    command += ["--num_processes", "2", "--mixed_precision", "no", *LAUNCHERS[kind]]
    command += [tmp_path / "launched.py", kind, "train", tmp_path / "config.yaml"]
    command += ["--out", tmp_path / name, *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-9000:]
    return results.load_run(tmp_path / name)[1], load(tmp_path / name)[0]
