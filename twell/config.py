"""The configuration of a training: its fields, their checks, and the YAML files that hold them.

This module is a leaf and cheap to import: the two methods that need text or a model load those
when they are called. The configurations of the package lie in configs/.
"""

from __future__ import annotations

import contextlib
import math
import os
import typing
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import yaml

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from twell.corpus import Blocks, Stream
    from twell.models import SparseLlamaConfig

CONFIGS = Path(__file__).parent / "configs"
# Fields that are a model's sizes, and their names in its own configuration
SIZES = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
}


@dataclass
class TrainConfig:
    """All fields that decide a run. Optimiser defaults are Table 2's; sizes suit a laptop."""

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
    # text: see twell/corpus
    source: str = "sotu"
    valid_source: str | None = None
    tokenizer: str | None = None
    parse_special: bool = False  # text that spells a special token means it, as in chats
    # optimisation
    tokens: int = 1_000_000  # of the whole run, rounded up to whole steps
    batch_tokens: int = 4096  # of a step, over all devices
    # Sequences of one forward pass on a device; None: the device's whole share of a step.
    micro_batch: int | None = None
    learning_rate: float = 1e-3
    warmup_steps: int = 600
    # Tokens, with commas, at which a copy of the model ends. The learning rate is then constant,
    # and decays to zero over the last tenth of each copy and of the run. None: a cosine.
    decay_at: str | None = None
    weight_decay: float = 0.1
    adam_beta1: float = 0.9
    adam_beta2: float = 0.95
    adam_epsilon: float = 1e-8
    max_grad_norm: float = 1.0
    precision: str = "fp32"  # or "bf16": compute under autocast, weights and optimiser in fp32
    checkpoint_activations: bool = False  # recompute layers in the backward pass
    compile: bool = False  # torch.compile each decoder layer
    seed: int = 0
    # sparsity
    l1_coefficient: float = 0.0
    l1_zero_steps: int = 0  # L1 warm-up: steps without the L1 term, ...
    l1_warmup_steps: int = 0  # ... then steps in which it grows linearly
    dead_window_tokens: int = 2**20
    # Share of noise mixed into the gate weights of dead neurons, once a window; the paper: 0.1.
    reinit: float = 0.0
    balance_every: int = 0  # steps between two calls of `balance`; 0: none
    threshold: float = 0.0  # a neuron is active where its gate is above
    # `twell relufy` (twell/train/relufy.py): a student of a teacher, which decides its sizes
    teacher: str | None = None
    hidden_weight: float = 0.0  # in the loss, of the distance between the models' hidden states
    # Steering activity: see twell/train/steer.py
    active_share: float = 0.0  # wanted share of active neurons; 0: no steering
    l1_growth: float = 1.5  # factor of the coefficient where 1.25 times too many neurons are active
    l1_stage_steps: int = 100  # of the coefficient; a threshold changes every `log_every` steps
    # records
    log_every: int = 10  # steps
    valid_every: int = 100  # steps; also before the first and after the last
    valid_tokens: int = 65_536
    checkpoint_every: int = 0  # steps, a multiple of log_every; 0: none

    def __post_init__(self):
        for name, kind in _TYPES.items():
            setattr(self, name, _coerce(name, kind, getattr(self, name)))
        for names, fits, rule in _RULES:
            for name in names.split():
                if not fits(value := getattr(self, name)):
                    raise ValueError(f"{name} is {value!r}; it has to {rule}")
        for conflict in self._conflicts():
            raise ValueError(conflict)

    def _conflicts(self) -> Iterator[str]:
        """Yield a message for each pair of fields that do not fit together."""
        # A teacher may set its head size.
        if self.teacher is None and self.hidden_size % (2 * self.num_heads):
            yield (
                f"hidden_size {self.hidden_size} is no multiple of twice num_heads "
                f"{self.num_heads}: rotary positions need heads of an even size"
            )
        for name, divisor in _DIVISORS.items():
            value, part = getattr(self, name), getattr(self, divisor)
            if value % part:
                yield f"{name} {value} is no multiple of {divisor} {part}"
        if self.source.startswith("hf:") and self.valid_source is not None:
            yield f"valid_source is {self.valid_source}; a stream holds out its first documents"
        if self.source.startswith("hf:") and self.tokenizer is None:
            yield f"source {self.source} is a stream, which trains no tokenizer; set tokenizer"
        if self.hidden_weight and self.teacher is None:
            yield f"hidden_weight is {self.hidden_weight}; only `twell relufy` has a teacher"
        if self.decay_at is not None:
            yield from self._decay_conflicts()
        act = f"{self.activation} above {self.threshold}" if self.threshold else self.activation
        if self.balance_every and not self.gated and act != "relu":
            yield f"balance_every is {self.balance_every}; without a gate it needs relu, not {act}"
        if self.l1_coefficient and self.l1_zero_steps >= self.steps:
            yield f"l1_zero_steps is {self.l1_zero_steps}, and the run has {self.steps} steps"
        if self.active_share:
            yield from self._steering_conflicts()

    def _decay_conflicts(self) -> Iterator[str]:
        """Yield why copies of the run cannot decay at `decay_at`."""
        try:
            copies = self.decays.items()
            fit = all(self.warmup_steps < start and end < self.steps for start, end in copies)
        except (ValueError, OverflowError):
            copies, fit = (), False
        if not fit or len(copies) < len(self.decay_at.split(",")):  # two would start at one step
            yield (
                f"decay_at is {self.decay_at!r}; give numbers of tokens such as '6e7,1.2e8', each "
                f"after the warm-up and below the {self.tokens} of the run, in steps of log_every"
            )
        if self.active_share:
            yield f"decay_at is {self.decay_at!r}; a run that steers activity has no copies"

    def _steering_conflicts(self) -> Iterator[str]:
        """Yield why nothing could steer activity to `active_share`."""
        wanted = f"active_share is {self.active_share}, and l1_coefficient {self.l1_coefficient}"
        if self.l1_coefficient:
            if self.l1_stage_steps % self.log_every:
                yield (
                    f"l1_stage_steps {self.l1_stage_steps} is no multiple of log_every "
                    f"{self.log_every}: activity is known at these steps only"
                )
            return
        if not self.threshold:
            yield f"{wanted}; give an l1_coefficient above 0, or a threshold above 0 to steer"
        if self.active_share >= 0.5:
            yield f"{wanted}; a threshold keeps less than half of the neurons active"
        if self.compile and self.backend != "dense":
            yield (
                f"{wanted}; compiled sparse kernels have the threshold as a constant: set compile "
                f"to false, or backend to 'dense', not {self.backend!r}"
            )

    @classmethod
    def load(
        cls, name: str | Path, overrides: Iterable[str] = (), **defaults: object
    ) -> TrainConfig:
        """Read a YAML file, or one of the package's own by name, and apply key=value overrides.

        A file may name another as `base`, whose fields it then overrides. defaults: fields in place
        of the file's. Raises FileNotFoundError for a file that does not exist, ValueError for an
        unknown field or an unfit value.
        """
        fields = _read_config(name) | defaults
        if Path(name).is_file() and (Path(name).parent / "provenance.json").is_file():
            # Runs of versions without this field parsed special tokens.
            fields.setdefault("parse_special", True)
            fields = {key: value for key, value in fields.items() if key not in _GONE}
        for override in overrides:
            key, equals, value = override.partition("=")
            if not equals:
                raise ValueError(f"{override!r} is no override; write key=value, such as seed=1")
            fields[key] = _yaml(value, override)
        for key in fields:
            if key not in _TYPES:
                raise ValueError(f"unknown field {key!r}; there are {', '.join(_TYPES)}")
        return cls(**fields)

    @property
    def steps(self) -> int:
        return math.ceil(self.tokens / self.batch_tokens)

    @property
    def decays(self) -> dict[int, int]:
        """The last step of each copy, by the step at which it starts to decay, a row of the log."""
        words = self.decay_at.split(",") if self.decay_at else ()
        ends = [math.ceil(float(word) / self.batch_tokens) for word in words]
        return {end * 9 // 10 // self.log_every * self.log_every: end for end in ends}

    def changes(self, before: TrainConfig) -> str:
        """Return the fields that differ from `before`, with both values; "" for none."""
        values = ((name, getattr(before, name), getattr(self, name)) for name in _TYPES)
        return "; ".join(f"{name} was {a!r} and is {b!r}" for name, a, b in values if a != b)

    def prepare_text(
        self, process: int = 0, num_processes: int = 1
    ) -> tuple[PreTrainedTokenizerFast, Blocks | Stream, Blocks]:
        """Return tokenizer, training blocks (of a stream this process's) and validation blocks."""
        from twell import corpus

        if self.source.startswith("hf:"):
            tokenizer = corpus.load_tokenizer(self.tokenizer, self.vocab_size)
            stream = corpus.Stream(
                self.source,
                tokenizer,
                self.context,
                valid_tokens=self.valid_tokens,
                process=process,
                num_processes=num_processes,
                parse_special=self.parse_special,
            )
            return tokenizer, stream, corpus.Blocks(stream.valid, self.context)
        text = corpus.prepare(
            self.source,
            vocab_size=self.vocab_size,
            cache=cache_folder(),
            valid_source=self.valid_source,
            tokenizer=self.tokenizer,
            parse_special=self.parse_special,
        )
        valid = corpus.Blocks(text.valid[: self.valid_tokens], self.context)
        return text.tokenizer, corpus.Blocks(text.train, self.context, self.seed), valid

    def model_config(self, **special_tokens: int | None) -> SparseLlamaConfig:
        """Return the model's own configuration."""
        from twell.models import SparseLlamaConfig

        return SparseLlamaConfig(
            **{name: getattr(self, field) for field, name in SIZES.items()},
            max_position_embeddings=self.context,
            rope_parameters={"rope_type": "default", "rope_theta": self.rope_theta},
            hidden_act=self.activation,
            activation_threshold=self.threshold,
            gated_mlp=self.gated,
            l1_coefficient=self.l1_coefficient,
            ffn_backend=self.backend,
            **special_tokens,
        )


def cache_folder() -> Path:
    """Return the folder of tokenised text: TWELL_CACHE, else in the user's cache folder."""
    try:
        return Path(os.environ.get("TWELL_CACHE") or Path.home() / ".cache" / "twell")
    except RuntimeError as error:  # the user has no home
        raise OSError(f"no folder for a cache: {error}; TWELL_CACHE names another place") from None


def l1_schedule(step: int, zero_steps: int, warmup_steps: int) -> float:
    """Return the factor on the L1 coefficient at a step (from 1): 0, then linear, then 1.

    Paper: App. C.3.
    """
    return min(max(step - zero_steps, 0) / max(warmup_steps, 1), 1.0)


_TYPES = typing.get_type_hints(TrainConfig)
# Fields of earlier versions, which recorded runs have
_GONE = "sampled_tokens sampled_share sampled_chat samples fit_tokens".split()
_DIVISORS = {"batch_tokens": "context", "checkpoint_every": "log_every"}
_POSITIVE = (
    "vocab_size context hidden_size intermediate_size num_layers num_heads tokens batch_tokens "
    "learning_rate max_grad_norm dead_window_tokens log_every valid_every rope_theta adam_epsilon "
    "l1_stage_steps"
)
_NOT_NEGATIVE = (
    "l1_coefficient warmup_steps weight_decay seed l1_zero_steps l1_warmup_steps "
    "checkpoint_every balance_every threshold hidden_weight"
)
# Fields, the test of their values (which NaN fails), and what they have to do.
_RULES: list[tuple[str, Callable, str]] = [
    (_POSITIVE, lambda x: x > 0, "be more than 0"),
    (_NOT_NEGATIVE, lambda x: 0 <= x < math.inf, "be a finite number, 0 or more"),
    ("learning_rate rope_theta adam_epsilon", lambda x: x < math.inf, "be a finite number"),
    ("adam_beta1 adam_beta2", lambda x: 0 <= x < 1, "be from 0 to less than 1"),
    ("micro_batch", lambda x: x is None or x >= 1, "be at least 1, or null for the whole share"),
    ("seed", lambda x: x < 2**32, "be below 2^32"),
    ("context", lambda x: x >= 2, "be at least 2, so that a token is predicted"),
    ("reinit active_share", lambda x: 0 <= x <= 1, "be a share, from 0 to 1"),
    ("l1_growth", lambda x: 1 < x <= 100, "be above 1, and 100 at most"),
    ("precision", lambda x: x in ("fp32", "bf16"), "be 'fp32' or 'bf16'"),
    ("source valid_source tokenizer teacher", lambda x: x != "", "name something"),
]


def _coerce(name: str, kind: type, value):
    """Return the value as the field's type: YAML reads 1e-3 as text, and 1e6 tokens are fine."""
    kind, *none = typing.get_args(kind) or [kind]  # none: where the field may be None
    if none and value is None:
        return None
    if kind in (int, float) and isinstance(value, str):
        with contextlib.suppress(ValueError):
            value = float(value)
    if type(value) in (int, float) and (kind in (int, float) or name == "decay_at"):
        if kind is not int or value % 1 == 0:
            value = kind(value)
    if type(value) is not kind:
        raise ValueError(f"{name} is {value!r}; expected {kind.__name__}")
    return value


def _yaml(text: str, name: str | Path):
    try:
        return yaml.safe_load(text)
    except (yaml.YAMLError, ValueError) as error:  # a date of month 13 is a ValueError
        raise ValueError(f"{name} cannot be read as YAML: {error}") from None


def _read_config(name: str | Path, above: tuple[Path, ...] = ()) -> dict:
    """Return the fields of a file and of its bases. `above` lists the files that led to it."""
    paths = Path(name), CONFIGS / f"{name}.yaml"
    path = next(filter(Path.is_file, paths), None)
    if path is None:
        known = ", ".join(sorted(file.stem for file in CONFIGS.glob("*.yaml")))
        raise FileNotFoundError(f"no configuration {name}; there are {known}")
    if path.resolve() in above:
        raise ValueError(f"{path} is its own base; change or remove the line base:")
    fields = _yaml(path.read_text(encoding="utf-8-sig"), path)
    if not isinstance(fields, dict):
        raise ValueError(f"{path} is no configuration: expected lines of the form key: value")
    base = fields.pop("base", None)
    return fields if base is None else _read_config(str(base), (*above, path.resolve())) | fields
