"""Training with an L1 term on the feed-forward activations: configuration, loop, records.

The recipe is the paper's Table 2: AdamW, linear warm-up and cosine decay to zero, gradient clipping; the L1 term
is added to the cross-entropy and nothing else differs from a dense baseline. A run is one folder (results.py
says what it holds). What is drawn from the text, and in which order, depends on seed and step alone.

A neuron is *dead* when no token of a whole window activated it. The paper's window is one step of 2^20 tokens; ours is
`dead_window_tokens`, carried across steps, since at smaller steps most rare neurons would look dead.
"""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import difflib
import io
import math
import os
import shutil
import time
import types
import typing
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
import yaml
from accelerate import Accelerator
from accelerate.utils import set_seed
from transformers import get_cosine_schedule_with_warmup

from twell import corpus, results
from twell.ffn import summarize_activity
from twell.model import SparseLlamaConfig, SparseLlamaForCausalLM, silence

CONFIGS = Path(__file__).parent / "configs"


@dataclass
class TrainConfig:
    """Everything that decides a run. Optimiser defaults are the paper's (Table 2); sizes are for a laptop."""

    # model
    vocab_size: int = 2048
    context: int = 128  # tokens of a sequence
    hidden_size: int = 128
    intermediate_size: int = 512
    num_layers: int = 4
    num_heads: int = 4
    gated: bool = True
    activation: str = "relu"
    backend: str = "dense"
    # text: see corpus.py
    source: str = "sotu"
    valid_source: str | None = None
    tokenizer: str | None = None
    # optimisation
    tokens: int = 1_000_000  # in all, rounded up to whole steps
    batch_tokens: int = 4096  # a step, over all devices
    micro_batch: int | None = None  # sequences a device and forward pass; None: the whole share of the step
    learning_rate: float = 1e-3
    warmup_steps: int = 600
    weight_decay: float = 0.1
    adam_beta1: float = 0.9
    adam_beta2: float = 0.95
    adam_epsilon: float = 1e-8
    max_grad_norm: float = 1.0
    precision: str = "fp32"
    seed: int = 0
    # sparsity
    l1_coefficient: float = 0.0
    dead_window_tokens: int = 2**20
    # records
    log_every: int = 10  # steps
    valid_every: int = 100  # steps; also before the first and after the last
    valid_tokens: int = 65_536

    def __post_init__(self):
        for field in dataclasses.fields(self):
            setattr(self, field.name, _coerce(field.name, _TYPES[field.name], getattr(self, field.name)))
        positive = ["vocab_size", "context", "hidden_size", "intermediate_size", "num_layers", "num_heads", "tokens"]
        positive += ["batch_tokens", "learning_rate", "max_grad_norm", "dead_window_tokens", "log_every", "valid_every"]
        for name in positive:
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} is {getattr(self, name)}; it has to be more than 0")
        for name in ("l1_coefficient", "warmup_steps", "weight_decay", "seed"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} is {getattr(self, name)}; it has to be a finite number, 0 or more")
        for name, divisor in (("hidden_size", "num_heads"), ("batch_tokens", "context")):
            if getattr(self, name) % getattr(self, divisor):
                raise ValueError(f"{name} {getattr(self, name)} is no multiple of {divisor} {getattr(self, divisor)}")
        if self.valid_tokens < self.context:
            raise ValueError(
                f"valid_tokens is {self.valid_tokens}; it has to hold one context of {self.context} tokens"
            )
        if self.precision not in ("fp32", "bf16"):
            raise ValueError(f"precision is {self.precision!r}; use 'fp32' or 'bf16'")

    @classmethod
    def load(cls, name: str | Path, overrides: Iterable[str] = ()) -> TrainConfig:
        """Read a YAML file, or one of the package's own by name, and apply overrides of the form key=value.

        A file may name another as `base`, whose fields it then overrides. Raises FileNotFoundError for a file that
        does not exist, ValueError for a field that does not exist or a value that cannot be.
        """
        fields = _read_config(name)
        for override in overrides:
            key, equals, value = override.partition("=")
            if not equals:
                raise ValueError(f"{override!r} is no override; write key=value, for example l1_coefficient=3e-4")
            fields[key] = yaml.safe_load(value)
        for key in fields:
            if key not in _TYPES:
                close = difflib.get_close_matches(key, _TYPES, 1)
                hint = f"did you mean {close[0]!r}?" if close else f"there are {', '.join(_TYPES)}"
                raise ValueError(f"unknown field {key!r} in the configuration; {hint}")
        return cls(**fields)

    @property
    def steps(self) -> int:
        return math.ceil(self.tokens / self.batch_tokens)

    def prepare_text(self) -> tuple[corpus.Corpus, corpus.Blocks, corpus.Blocks]:
        """The tokenised text, its training blocks in the seed's order, and the validation blocks of an evaluation."""
        text = corpus.prepare(
            self.source,
            vocab_size=self.vocab_size,
            cache=cache_folder(),
            valid_source=self.valid_source,
            tokenizer=self.tokenizer,
        )
        valid = corpus.Blocks(text.valid[: self.valid_tokens], self.context)
        return text, corpus.Blocks(text.train, self.context, self.seed), valid

    def model_config(self, **special_tokens: int | None) -> SparseLlamaConfig:
        """The model's own configuration."""
        return SparseLlamaConfig(
            vocab_size=self.vocab_size,
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            num_hidden_layers=self.num_layers,
            num_attention_heads=self.num_heads,
            max_position_embeddings=self.context,
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
        if value is None:
            return None
        kind = typing.get_args(kind)[0]
    try:
        if isinstance(value, str) and kind in (int, float):
            value = float(value)
        if kind is int and isinstance(value, float) and value.is_integer():
            value = int(value)
        if kind is float and type(value) is int:
            value = float(value)
    except ValueError:
        pass
    if type(value) is not kind:
        raise ValueError(f"{name} is {value!r}; expected {kind.__name__}")
    return value


def _read_config(name: str | Path) -> dict:
    path = Path(name)
    if not path.is_file():
        path = CONFIGS / f"{name}.yaml"
    if not path.is_file():
        known = ", ".join(sorted(file.stem for file in CONFIGS.glob("*.yaml")))
        raise FileNotFoundError(f"no configuration {name}: it is no file and none of {known}")
    try:
        fields = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not YAML: {error}") from None
    if not isinstance(fields, dict):
        raise ValueError(f"{path} is no configuration: expected lines of the form key: value")
    base = fields.pop("base", None)
    return fields if base is None else _read_config(base) | fields


@torch.no_grad()
def evaluate(model: SparseLlamaForCausalLM, blocks: corpus.Blocks, batch: int = 32) -> dict:
    """Return the mean cross-entropy (nats per predicted token) over all blocks, and each layer's activity.

    Result: {"cross_entropy": float, "layers": [summarize_activity(...) of each layer]}.
    """
    training, model.recording = model.training, True
    model.eval()
    for ffn in model.ffns:
        ffn.stats.take()
    total = 0.0
    for start in range(0, len(blocks), batch):
        tokens = blocks.draw(range(start, min(start + batch, len(blocks)))).to(model.device)
        total += float(model(input_ids=tokens, labels=tokens, use_cache=False).cross_entropy) * len(tokens)
    model.train(training)
    model.recording = False
    layers = [summarize_activity(*ffn.stats.take()) for ffn in model.ffns]
    return {"cross_entropy": total / len(blocks), "layers": layers}


class Log:
    """Appends tidy rows to a run's log.csv, each call's rows at once."""

    def __init__(self, path: Path):
        self.path = path
        path.write_text(",".join(results.LOG_COLUMNS) + "\n", encoding="utf-8")

    def write(self, step: int, tokens: int, split: str, values: dict[str, float | list[float]]) -> None:
        """One row for each number, and for each layer of a list."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        for metric, value in values.items():
            numbered = enumerate(value) if isinstance(value, list) else [("", value)]
            writer.writerows([step, tokens, split, layer, metric, f"{number:.6g}"] for layer, number in numbered)
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(text.getvalue())


class DeadWindow:
    """Which neurons were active in the current window of tokens, layer by layer, on their devices."""

    def __init__(self, num_layers: int, window_tokens: int):
        self.window_tokens = window_tokens
        self.tokens = 0
        self.active: list[torch.Tensor | None] = [None] * num_layers

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
        return dead


def train(config: TrainConfig, folder: str | Path, *, overwrite: bool = False, quiet: bool = False) -> Path:
    """Train a model and leave the run in `folder`.

    Raises FileExistsError when the folder holds something and `overwrite` is not set.
    """
    folder = Path(folder)
    if folder.exists() and any(folder.iterdir()):
        if not overwrite:
            raise FileExistsError(f"{folder} already holds a run; choose another folder, or --overwrite it")
        if not (folder / "config.yaml").is_file():
            raise FileExistsError(f"{folder} is no run (it has no config.yaml), so it is not overwritten")
        shutil.rmtree(folder)
    return _Run(config, folder, quiet).train()


class _Run:
    def __init__(self, config: TrainConfig, folder: Path, quiet: bool):
        self.config, self.folder, self.quiet = config, folder, quiet
        self.accelerator = Accelerator(mixed_precision="bf16" if config.precision == "bf16" else "no")
        self.main = self.accelerator.is_main_process
        set_seed(config.seed)
        with self.accelerator.main_process_first():
            text, self.blocks, self.valid_blocks = config.prepare_text()
        self.tokenizer = text.tokenizer
        ends = {"bos_token_id": text.tokenizer.bos_token_id, "eos_token_id": text.tokenizer.eos_token_id}
        self.model = SparseLlamaForCausalLM(config.model_config(**ends))
        # As usual for transformers, the norms' gains do not decay.
        decay = [p for p in self.model.parameters() if p.dim() >= 2]
        rest = [p for p in self.model.parameters() if p.dim() < 2]
        optimizer = torch.optim.AdamW(
            [{"params": decay, "weight_decay": config.weight_decay}, {"params": rest, "weight_decay": 0.0}],
            lr=config.learning_rate,
            betas=(config.adam_beta1, config.adam_beta2),
            eps=config.adam_epsilon,
        )
        self.schedule = get_cosine_schedule_with_warmup(optimizer, config.warmup_steps, config.steps)
        self.wrapped, self.optimizer = self.accelerator.prepare(self.model, optimizer)
        self.window = DeadWindow(config.num_layers, config.dead_window_tokens)

    def train(self) -> Path:
        config = self.config
        if self.main:
            self.folder.mkdir(parents=True, exist_ok=True)
            parameters = sum(p.numel() for p in self.model.parameters())
            self.origin = results.provenance() | {"parameters": parameters, "complete": False}
            results.write_run(self.folder, dataclasses.asdict(config), self.origin)
            self.log = Log(self.folder / "log.csv")
            self.say(
                f"{self.folder}: {parameters / 1e6:.2f}M parameters, {config.steps} steps, {self.origin['device']}"
            )
        self.start = self.since = time.perf_counter()
        self.validate(0)
        sums = torch.zeros(
            4, device=self.accelerator.device
        )  # loss, cross-entropy, L1, gradient norm since the last row
        for step in range(1, config.steps + 1):
            sums += self.step(step)
            if step % config.log_every == 0 or step == config.steps:
                self.record(step, sums / ((step - 1) % config.log_every + 1))
                sums.zero_()
            if step % config.valid_every == 0 or step == config.steps:
                self.validate(step)
        return self.finish()

    def step(self, step: int) -> torch.Tensor:
        """One optimiser step; returns [loss, cross-entropy, L1, gradient norm] of the whole step, on the device."""
        config, world = self.config, self.accelerator.num_processes
        sequences = config.batch_tokens // config.context
        first = (step - 1) * sequences
        share = range(first + self.accelerator.process_index, first + sequences, world)
        micro = config.micro_batch or len(share)
        totals = {"num_items_in_batch": sequences * (config.context - 1), "num_tokens_in_batch": config.batch_tokens}
        parts = torch.zeros(3, device=self.accelerator.device)
        self.wrapped.train()
        for at in range(0, len(share), micro):
            tokens = self.blocks.draw(share[at : at + micro]).to(self.accelerator.device)
            last = at + micro >= len(share)
            with self.accelerator.no_sync(self.wrapped) if not last else contextlib.nullcontext():
                output = self.wrapped(input_ids=tokens, labels=tokens, use_cache=False, **totals)
                self.accelerator.backward(output.loss * world)  # gradients are averaged over processes
            parts += torch.stack([output.loss.detach(), output.cross_entropy.detach(), output.l1.detach()])
        norm = self.accelerator.clip_grad_norm_(self.wrapped.parameters(), config.max_grad_norm)
        self.optimizer.step()
        self.schedule.step()
        self.optimizer.zero_grad()
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
            raise FloatingPointError(
                f"the loss is {loss} at step {step}; lower learning_rate (now {config.learning_rate})"
            )
        now = time.perf_counter()
        layers = [summarize_activity(*pair) for pair in taken]
        values = {
            "loss": loss,
            "cross_entropy": cross_entropy,
            "l1": l1,
            "lr": self.optimizer.param_groups[0]["lr"],
            "grad_norm": norm,
            "tokens_per_second": steps * config.batch_tokens / (now - self.since),
        } | activity_columns(layers)
        if dead is not None:
            values["dead_fraction"] = [float(layer.double().mean()) for layer in dead]
        else:
            del values["dead_fraction"]
        if self.main:
            self.log.write(step, step * config.batch_tokens, "train", values)
            active = sum(layer["mean"] for layer in layers) / len(layers)
            left = (now - self.start) / step * (config.steps - step)
            self.say(
                f"{self.folder.name}  step {step}/{config.steps}  cross-entropy {cross_entropy:.3f}  active {active:.1f} of "
                f"{config.intermediate_size}  {values['tokens_per_second']:,.0f} tokens/s  {_clock(left)} left"
            )
        self.since = time.perf_counter()

    def validate(self, step: int) -> None:
        """Write the validation loss and activity; after the last step also the loss without feed-forward layers."""
        if self.main:
            found = evaluate(self.model, self.valid_blocks)
            values = {"cross_entropy": found["cross_entropy"]} | activity_columns(found["layers"])
            if step == self.config.steps:
                with silence(self.model):
                    silenced = evaluate(self.model, self.valid_blocks)
                values["cross_entropy_silenced"] = silenced["cross_entropy"]
            self.log.write(step, step * self.config.batch_tokens, "valid", values)
            self.say(f"{self.folder.name}  step {step}/{self.config.steps}  validation {found['cross_entropy']:.3f}")
        self.since = time.perf_counter()

    def finish(self) -> Path:
        self.accelerator.wait_for_everyone()
        if self.main:
            self.model.eval().save_pretrained(self.folder / "model")
            self.tokenizer.save_pretrained(self.folder / "model")
            results.write_run(self.folder, dataclasses.asdict(self.config), self.origin | {"complete": True})
        return self.folder

    def say(self, line: str) -> None:
        if not self.quiet:
            print(line, flush=True)


def activity_columns(layers: list[dict]) -> dict[str, list[float]]:
    """The per-layer metrics of a log from summarize_activity's results."""
    names = {"active_mean": "mean", "active_p99": "p99", "active_max": "max", "dead_fraction": "dead"}
    return {metric: [layer[key] for layer in layers] for metric, key in names.items()}


def cache_folder() -> Path:
    """Where tokenised text is kept: TWELL_CACHE, else the user's cache folder."""
    return Path(os.environ.get("TWELL_CACHE") or Path.home() / ".cache" / "twell")


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(int(seconds), 60)
    return f"{minutes}:{seconds:02d}"
