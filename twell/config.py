"""The configuration of a training: its fields, their checks, and the YAML files that hold them.

This module is a leaf and cheap to import: the two methods that need text or a model load those
when they are called. The configurations of the package lie in configs/.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import math
import os
import types
import typing
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import yaml

if TYPE_CHECKING:
    import numpy as np
    from transformers import PreTrainedTokenizerFast

    from twell.corpus import Blocks, Stream
    from twell.models import SparseLlamaConfig

CONFIGS = Path(__file__).parent / "configs"


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
    parse_special: bool = False  # special tokens that a text spells, as chats do; else it is text
    # optimisation
    tokens: int = 1_000_000  # in all, rounded up to whole steps
    batch_tokens: int = 4096  # a step, over all devices
    # Sequences a device and forward pass; None: the device's whole share of the step.
    micro_batch: int | None = None
    learning_rate: float = 1e-3
    warmup_steps: int = 600
    weight_decay: float = 0.1
    adam_beta1: float = 0.9
    adam_beta2: float = 0.95
    adam_epsilon: float = 1e-8
    max_grad_norm: float = 1.0
    precision: str = "fp32"  # or "bf16": compute under autocast, weights and optimiser in fp32
    checkpoint_activations: bool = False  # backward passes compute the layers again
    compile: bool = False  # torch.compile each decoder layer
    seed: int = 0
    # sparsity
    l1_coefficient: float = 0.0
    l1_zero_steps: int = 0  # L1 warm-up: first so many steps without the term ...
    l1_warmup_steps: int = 0  # ... then so many in which it grows linearly
    dead_window_tokens: int = 2**20
    # Share of noise mixed into the gate weights of dead neurons, once a window; the paper: 0.1.
    reinit: float = 0.0
    balance_every: int = 0  # steps between two calls of `balance`; 0: none
    threshold: float = 0.0  # a neuron is active where its gate is above
    # From a model that exists: see twell/train/relufy.py. Sizes are then those of the teacher.
    teacher: str | None = None
    sampled_tokens: int = 2**20  # that it writes, where there is no source or a sampled_share
    sampled_share: float = 0.0  # of the training text, beside source
    sampled_chat: bool = False  # conversations, begun by the header of its chat template
    samples: str | None = None  # their file in `cache_folder`; `twell relufy` sets it
    fit_tokens: int = 0  # tokens to which its down projections are fitted at first; 0: none
    hidden_weight: float = 0.0  # of the distance between both models' hidden states, in the loss
    active_share: float = 0.0  # of the neurons, wanted; 0: L1 coefficient and threshold stay
    l1_growth: float = 1.5  # factor on one of these after a stage with too many active
    l1_stage_steps: int = 100  # of L1; the threshold changes every `log_every` steps
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
        own = self.teacher is None  # a teacher's heads may have another size
        for name, divisor in _DIVISORS.items():
            value, part = getattr(self, name), getattr(self, divisor)
            if value % part and (own or name != "hidden_size"):
                raise ValueError(f"{name} {value} is no multiple of {divisor} {part}")
        if own and (head := self.hidden_size // self.num_heads) % 2:
            raise ValueError(
                f"hidden_size {self.hidden_size} and num_heads {self.num_heads} give heads of "
                f"{head}; rotary positions need an even number"
            )
        if self.valid_tokens < self.context:
            raise ValueError(
                f"valid_tokens is {self.valid_tokens}; "
                f"it has to hold one context of {self.context} tokens"
            )
        if self.active_share and not self.l1_coefficient:
            self._check_steered_threshold()
        if self.active_share and self.steering_steps % self.log_every:
            raise ValueError(
                f"l1_stage_steps {self.l1_stage_steps} is no multiple of log_every "
                f"{self.log_every}, at which activity is known"
            )
        name = f"{self.activation} above {self.threshold}" if self.threshold else self.activation
        if self.balance_every and not self.gated and name != "relu":
            raise ValueError(
                f"balance_every is {self.balance_every}; without a gate it needs the activation "
                f"'relu', not {name!r}, which is not proportional to its input; set it to 0"
            )
        # A run whose learning rate or L1 term is 0 in every step:
        steps = "1 step" if self.steps == 1 else f"{self.steps} steps"
        run = f"the run has {steps} (tokens {self.tokens}, batch_tokens {self.batch_tokens})"
        if self.steps == 1 and self.warmup_steps:
            raise ValueError(
                f"warmup_steps is {self.warmup_steps} and {run}: a warm-up starts at a learning "
                "rate of 0, so nothing would be trained; set warmup_steps to 0 or raise tokens"
            )
        if self.l1_coefficient and self.l1_zero_steps >= self.steps:
            raise ValueError(
                f"l1_zero_steps is {self.l1_zero_steps} and {run}: l1_coefficient "
                f"{self.l1_coefficient} would never act; "
                "lower l1_zero_steps, raise tokens or set l1_coefficient to 0"
            )

    def _check_steered_threshold(self) -> None:
        """Without an L1 term it is the threshold that brings activity to `active_share`."""
        wanted = f"active_share is {self.active_share}, and l1_coefficient 0"
        if not self.threshold:
            raise ValueError(
                f"{wanted}; give an l1_coefficient above 0, or a threshold above 0 to steer"
            )
        if self.active_share >= 0.5:
            raise ValueError(f"{wanted}; a threshold keeps less than half of the neurons active")
        if self.compile and self.backend != "dense":
            raise ValueError(
                f"{wanted}; compiled sparse kernels have the threshold as a constant, which would "
                f"change: set compile to false, or backend to 'dense', not {self.backend!r}"
            )

    @property
    def steering_steps(self) -> int:
        """Steps between changes of what is steered to `active_share`."""
        return self.l1_stage_steps if self.l1_coefficient else self.log_every

    def remarks(self) -> list[str]:
        """Return a line for each schedule that the run does not finish, or that never acts."""
        lines, steps, tokens = [], self.steps, self.steps * self.batch_tokens
        warm_up = "the run ends within the warm-up of the"
        if self.warmup_steps >= steps:
            share = (steps - 1) / self.warmup_steps
            settings = f"(warmup_steps {self.warmup_steps}, {steps} steps)"
            reached = f"it reaches {share:.0%} of {self.learning_rate:g}"
            lines.append(f"{warm_up} learning rate {settings}: {reached}")
        share = l1_schedule(steps, self.l1_zero_steps, self.l1_warmup_steps)
        if self.l1_coefficient and share < 1:
            fields = f"l1_zero_steps {self.l1_zero_steps}, l1_warmup_steps {self.l1_warmup_steps}"
            reached = f"it reaches {share:.0%} of l1_coefficient"
            lines.append(f"{warm_up} L1 term ({fields}, {steps} steps): {reached}")
        stage = self.steering_steps
        begin = self.l1_zero_steps + self.l1_warmup_steps
        if self.active_share and (steps - 1) // stage <= begin // stage:
            run = f"the run has {steps} steps, {begin} of them before the first"
            lines.append(f"active_share never acts: it would every {stage} steps, and {run}")
        if self.reinit and tokens < self.dead_window_tokens:
            window = f"dead_window_tokens is {self.dead_window_tokens}"
            run = f"the run has {tokens} tokens"
            lines.append(f"reinit {self.reinit:g} never acts: {run}, and {window}")
        if self.balance_every > steps:
            run = f"the run has {steps} steps"
            lines.append(f"balance_every {self.balance_every} never acts: {run}")
        return lines

    @classmethod
    def load(cls, name: str | Path, overrides: Iterable[str] = ()) -> TrainConfig:
        """Read a YAML file, or one of the package's own by name, and apply key=value overrides.

        A file may name another as `base`, whose fields it then overrides. Raises FileNotFoundError
        for a file that does not exist, ValueError for an unknown field or an unfit value.
        """
        fields = _read_config(name)
        if Path(name).is_file() and (Path(name).parent / "provenance.json").is_file():
            fields.setdefault("parse_special", True)  # of a run: versions without the field did
        fields |= _parse_overrides(overrides)
        for key in fields:
            if key not in _TYPES:
                near = _nearest(str(key), _TYPES)
                hint = f"did you mean {near!r}?" if near else f"there are {', '.join(_TYPES)}"
                raise ValueError(f"unknown field {key!r} in the configuration; {hint}")
        return cls(**fields)

    @property
    def steps(self) -> int:
        return math.ceil(self.tokens / self.batch_tokens)

    def changes(self, before: dict) -> str:
        """Return the fields that differ from `before`, with both values; "" for none.

        A field that `before` lacks, since an older version wrote it, is unchanged.
        """
        now = dataclasses.asdict(self)
        changed = [name for name in now if name in before and now[name] != before[name]]
        return "; ".join(f"{name} was {before[name]!r} and is {now[name]!r}" for name in changed)

    def prepare_text(
        self, process: int = 0, num_processes: int = 1
    ) -> tuple[PreTrainedTokenizerFast, Blocks | Stream, Blocks]:
        """Return tokenizer, training blocks (of a stream this process's) and validation blocks."""
        import numpy as np

        from twell import corpus

        source, context = self.source, self.context
        if not source.startswith("hf:"):
            options = {
                "vocab_size": self.vocab_size,
                "cache": cache_folder(),
                "valid_source": self.valid_source,
                "tokenizer": self.tokenizer,
                "parse_special": self.parse_special,
            }
            text = corpus.prepare(source, **options)
            train = text.train
            if self.samples is not None:  # repeated, or cut, to their share
                written = self._written(options)
                number = round(len(train) * self.sampled_share / (1 - self.sampled_share))
                train = np.concatenate([train, np.resize(written, number)])
            valid = corpus.Blocks(text.valid[: self.valid_tokens], context)
            return text.tokenizer, corpus.Blocks(train, context, self.seed), valid
        if self.tokenizer is None:
            raise ValueError(
                f"source {source} is streamed, so no tokenizer is trained on it; set tokenizer"
            )
        if self.valid_source is not None:
            raise ValueError(
                f"valid_source {self.valid_source}: of a stream the first documents are held out"
            )
        tokenizer = corpus.load_tokenizer(self.tokenizer, self.vocab_size)
        options = {"process": process, "num_processes": num_processes}
        options |= {"valid_tokens": self.valid_tokens, "parse_special": self.parse_special}
        stream = corpus.Stream(source, tokenizer, context, **options)
        return tokenizer, stream, corpus.Blocks(stream.valid, context)

    def _written(self, options: dict) -> np.ndarray:
        """Return the tokens of what the teacher wrote; none of them are held out."""
        from twell import corpus

        samples = cache_folder() / self.samples
        if not samples.is_file():
            raise FileNotFoundError(
                f"{samples} is missing, which the teacher of this run wrote: put it back, or set "
                "TWELL_CACHE to the folder that has it"
            )
        options = options | {"valid_source": self.valid_source or str(samples)}
        options["parse_special"] = self.parse_special or self.sampled_chat
        return corpus.prepare(str(samples), **options).train

    def model_config(self, **special_tokens: int | None) -> SparseLlamaConfig:
        """Return the model's own configuration."""
        from twell.models import SparseLlamaConfig

        return SparseLlamaConfig(
            vocab_size=self.vocab_size,
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            num_hidden_layers=self.num_layers,
            num_attention_heads=self.num_heads,
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
    """Return the folder of tokenised text: TWELL_CACHE, else in the user's cache folder.

    It is created. Raises OSError when it cannot be.
    """
    try:
        folder = Path(os.environ.get("TWELL_CACHE") or Path.home() / ".cache" / "twell")
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError) as error:  # RuntimeError: the user has no home
        raise OSError(f"no folder for a cache: {error}; TWELL_CACHE names another place") from None
    return folder


def l1_schedule(step: int, zero_steps: int, warmup_steps: int) -> float:
    """Return the factor on the L1 coefficient at a step (from 1): 0, then linear, then 1.

    Paper: App. C.3.
    """
    if not warmup_steps:
        return float(step > zero_steps)
    return min(max(step - zero_steps, 0) / warmup_steps, 1.0)


_TYPES = typing.get_type_hints(TrainConfig)
_DIVISORS = {
    "hidden_size": "num_heads",
    "batch_tokens": "context",
    "checkpoint_every": "log_every",
}
# Fields, the test of their values, and what an error says of fit ones. No comparison holds for NaN.
_POSITIVE = (
    "vocab_size context hidden_size intermediate_size num_layers num_heads tokens batch_tokens "
    "learning_rate max_grad_norm dead_window_tokens log_every valid_every rope_theta adam_epsilon "
    "l1_stage_steps sampled_tokens"
)
_NOT_NEGATIVE = (
    "l1_coefficient warmup_steps weight_decay seed l1_zero_steps l1_warmup_steps "
    "checkpoint_every balance_every threshold fit_tokens hidden_weight"
)
_MICRO_BATCH = "be at least 1, or null for the whole share of the step"
# Fields, the test of their values (which NaN fails), and what they have to do.
_RULES: list[tuple[str, Callable, str]] = [
    (_POSITIVE, lambda x: x > 0, "be more than 0"),
    (_NOT_NEGATIVE, lambda x: 0 <= x < math.inf, "be a finite number, 0 or more"),
    ("learning_rate rope_theta adam_epsilon", lambda x: x < math.inf, "be a finite number"),
    ("adam_beta1 adam_beta2", lambda x: 0 <= x < 1, "be from 0 to less than 1"),
    ("micro_batch", lambda x: x is None or x >= 1, _MICRO_BATCH),
    ("seed", lambda x: x < 2**32, "be below 2^32"),
    ("context", lambda x: x >= 2, "be at least 2, so that a token is predicted"),
    ("reinit active_share", lambda x: 0 <= x <= 1, "be a share, from 0 to 1"),
    ("sampled_share", lambda x: 0 <= x <= 0.9, "be a share, from 0 to 0.9"),
    ("l1_growth", lambda x: 1 < x <= 100, "be above 1, and 100 at most"),
    ("precision", lambda x: x in ("fp32", "bf16"), "be 'fp32' or 'bf16'"),
    ("source valid_source tokenizer teacher samples", lambda x: x != "", "name something"),
]


def _coerce(name: str, kind: type, value):
    """Return the value as the field's type: YAML reads 1e-3 as text, and 1e6 tokens are fine."""
    if isinstance(kind, types.UnionType):
        kind, _ = typing.get_args(kind)  # the other is None
        if value is None:
            return None
    if kind in (int, float):
        if isinstance(value, list):
            raise ValueError(f"{name} is {value!r}; give one number")
        with contextlib.suppress(ValueError):
            value = float(value) if isinstance(value, str) else value
        if kind is int and isinstance(value, float) and value.is_integer():
            value = int(value)
        if kind is float and type(value) is int:
            value = float(value)
    if type(value) is not kind:
        raise ValueError(f"{name} is {value!r}; expected {kind.__name__}")
    return value


def _nearest(name: str, known: Iterable[str]) -> str | None:
    """Return the known name that is meant: one that is spelled alike, or else begins alike."""
    alike = difflib.get_close_matches(name, known, 1)
    return next(iter(alike or [one for one in known if name and one.startswith(name)]), None)


def _parse_overrides(overrides: Iterable[str]) -> dict:
    """Return the fields of key=value texts, the values read as YAML."""
    fields, given = {}, {}
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
        except (yaml.YAMLError, ValueError, RecursionError):  # a date of month 13 is a ValueError
            raise ValueError(
                f"{override!r} is no YAML value; write {key}=value, lists as [1, 2]"
            ) from None
    return fields


class _OnceLoader(yaml.SafeLoader):
    """Refuses a key that is given twice; YAML's own loader takes the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        keys = [self.construct_object(key, deep=deep) for key, _ in node.value]
        for place, key in enumerate(keys):
            if key in keys[:place]:
                raise ValueError(f"{key} is given twice")
        return super().construct_mapping(node, deep)


def _read_config(name: str | Path, above: tuple[Path, ...] = ()) -> dict:
    """Return the fields of a file and of its bases. `above` lists the files that led to it."""
    paths = Path(name), CONFIGS / f"{name}.yaml"
    path = next(filter(Path.is_file, paths), None)
    if path is None:
        known = sorted(file.stem for file in CONFIGS.glob("*.yaml"))
        near = _nearest(str(name), known)
        hint = f" (did you mean {near}?)" if near else ""
        known = ", ".join(known)
        raise FileNotFoundError(f"no configuration {name}{hint}: it is no file and none of {known}")
    if path.resolve() in map(Path.resolve, above):
        chain = " -> ".join(map(str, (*above, path)))
        raise ValueError(f"{path} is its own base: {chain}; change or remove the line base:")
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
    return fields if base is None else _read_config(base, (*above, path)) | fields
