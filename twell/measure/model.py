"""Whole models: forward passes, each feed-forward layer, and, by parts.py and decode.py, the rest.

A sample of the last hidden states (in decoding: of the logits) is compared with fp32, all of them
with the dense model's, and each feed-forward layer with fp64. Without a checkpoint the weights are
random and the activity is imposed (imposed.py). Energy is counted over the same turns as times.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from twell.measure import check, clock, imposed
from twell.measure.case import GRAPH_TOKENS, Case, check_sizes
from twell.measure.decode import GENERATION, joined_projections, measure_decode
from twell.measure.parts import decode_parts, measure_parts
from twell.measure.patterns import IMPOSED
from twell.measure.providers import DENSE_EAGER, Provider, model_providers
from twell.measure.rows import LAYER_TIMES, Rows, significant
from twell.measure.sides import (
    Bench,
    Sides,
    exact_hidden_states,
    forward,
    hidden_states,
    random_model,
)
from twell.models.llama import SparseLlamaForCausalLM
from twell.sparse import reference
from twell.sparse.calibration import Calibration
from twell.sparse.layer import SparseFFN

FILES = "model", "model_layers", "model_parts", "decode"
Checkpoint = tuple[str, SparseLlamaForCausalLM, Sequence[int]]


@torch.no_grad()
def language_model(
    size: str = "2b",
    overrides: Sequence[str] = (),
    *,
    checkpoint: Checkpoint | None = None,
    shapes: Sequence[tuple[int, int]] = ((64, 2048),),
    profile: str = "paper",
    active: Sequence[float] | None = None,
    layers: bool = False,
    parts: bool = False,
    decode: Sequence[int] = (),
    decode_context: int = 512,
    compiled: bool | None = None,
    tuned: bool = False,
    calibration: Calibration | None = None,
    energy: bool = False,
    out: str | Path | None = None,
) -> dict[str, list[dict]]:
    """Time a language model in bf16: dense, sparse and by "auto", eager and with compiled layers.

    Args:
        size: a configuration of the package or a YAML file (`TrainConfig.load`), random weights.
        overrides: fields of it to change, as key=value.
        checkpoint: instead, its name, the model in bf16 and the tokens of a text with its activity.
        shapes: batches (sequences, tokens of each) whose forward pass is timed.
        profile: how the activity varies over layers, see `Pattern`.
        active: means over layers, each imposed and measured in turn; default: the paper's.
        layers: also time each feed-forward layer alone, on the first of the batches.
        parts: also say where a layer's time goes, on the first of the batches and in decoding.
        decode: numbers of documents to continue by GENERATION tokens behind `decode_context`.
        compiled: True: only with compiled layers; False: only eager; None: both.
        tuned: also time decoding with layers that Inductor tunes.
        calibration: the times that "auto", which knows the activity, chooses by.
        energy: also measure energy, over the same turns.
        out: the folder of model.csv, model_layers.csv, model_parts.csv and decode.csv.

    Up to 4,096 tokens a pass is timed in a CUDA graph, and decoding always. Returns the rows by
    file, COLUMNS. Raises ValueError for unfit arguments, ArithmeticError for a wrong result,
    RuntimeError without a GPU. Paper: section 4.1, Table 1, Figs 4, 6, 10, 11.
    """
    device = clock.gpu()
    plan = Plan(shapes, decode, decode_context, layers, parts)
    plan.check(size, checkpoint, active, compiled, tuned)
    rows = Rows(out, FILES)
    if checkpoint is None:
        subject = Subject.random(size, overrides, profile, active, plan.longest, device)
    else:
        subject = Subject.given(*checkpoint, plan.longest, device)
    meter = clock.optional_meter(energy)
    idle = clock.idle_watts(meter) if meter else None
    print(subject.title, flush=True)
    sides = Sides(subject.model, calibration)
    bench = Bench(sides, subject.columns, compiled, tuned, meter, idle)
    for means in subject.levels:
        sides.become(DENSE_EAGER)
        if means is not None:
            imposed.impose(subject.model, means, subject.calibrating)
            sides.take_weights()
        plan.run(bench, subject.draw, means, rows)
    return rows.by_file


# --- what to measure, on which model ----------------------------------------------------------


@dataclass(frozen=True)
class Plan:
    """The batches of a command, and what to measure on them: arguments of `language_model`."""

    shapes: Sequence[tuple[int, int]]
    decode: Sequence[int]
    decode_context: int
    layers: bool
    parts: bool

    def check(
        self,
        size: str,
        checkpoint: Checkpoint | None,
        active: Sequence[float] | None,
        compiled: bool | None,
        tuned: bool,
    ) -> None:
        """Raise ValueError for arguments that do not fit."""
        sizes = [number for shape in self.shapes for number in shape]
        for name, numbers in (("shapes", sizes), ("decode", [*self.decode, self.decode_context])):
            if numbers and min(numbers) < 1:
                raise ValueError(f"{name} holds {min(numbers)}; it has to be at least 1")
        if checkpoint is not None and active is not None:
            raise ValueError(
                "active is imposed on random weights; a checkpoint has its own activity"
            )
        if checkpoint is None and active is None and size not in imposed.PAPER_ACTIVE:
            raise ValueError(
                f"active: the paper has no model {size!r}; say how many neurons are to be active"
            )
        for name, batches in (("layers", self.shapes), ("parts", [*self.shapes, *self.decode])):
            if getattr(self, name) and not batches:
                raise ValueError(f"{name}: measured on the first of the batches, and there is none")
        if tuned and (compiled is False or not self.decode):
            reason = "compiled is False" if self.decode else "decode has no number of documents"
            raise ValueError(f"tuned: decoding is timed so with compiled layers, and {reason}")

    @property
    def longest(self) -> int:
        """The most tokens of a document."""
        lengths = [context for _, context in self.shapes]
        return max([*lengths, *[self.decode_context + GENERATION] * bool(self.decode)], default=1)

    def run(
        self,
        bench: Bench,
        draw: Callable[[int, int], Tensor],
        means: Sequence[float] | None,
        rows: Rows,
    ) -> None:
        """Measure one level of activity: `means` by layer, or a checkpoint's own."""
        for index, (batch, context) in enumerate(self.shapes):
            ids = draw(batch, context)
            passes, activity = measure_forward(bench, ids)
            rows.add("model", passes)
            if self.parts and index == 0:
                rows.add("model_parts", measure_parts(bench, ids, activity))
            times = measure_layers(bench, ids) if self.layers and index == 0 else None
            rows.add("model_layers", layer_rows(bench.case(ids, activity), means, activity, times))
            torch.cuda.empty_cache()
        for batch in self.decode:
            script = draw(batch, self.decode_context + GENERATION)
            with joined_projections(bench.model):
                steps, decoder = measure_decode(bench, script, self.decode_context)
                rows.add("decode", steps)
                if self.parts:
                    rows.add("model_parts", decode_parts(bench, decoder, steps[0]))
            del decoder
            torch.cuda.empty_cache()


@dataclass(frozen=True)
class Subject:
    """A model, its columns, the levels of activity to measure, and what draws its tokens.

    levels: each layer's mean active neurons; None: the tokens' own. calibrating: the tokens that
    activity is imposed on.
    """

    model: SparseLlamaForCausalLM
    columns: dict
    levels: Sequence[Sequence[float] | None]
    draw: Callable[[int, int], Tensor]
    calibrating: Tensor | None = None

    @classmethod
    def random(cls, size, overrides, profile, active, longest, device) -> Subject:
        """A model of random weights; arguments as of `language_model`."""
        model, config = random_model(size, overrides, longest, device)
        pattern = replace(IMPOSED, profile=profile)
        means = [imposed.PAPER_ACTIVE[size]] if active is None else active
        levels = [pattern.means(config.num_layers, mean) for mean in means]
        draw = functools.partial(imposed.draw_tokens, config.vocab_size, device=device)
        calibrating = draw(64, min(128, longest), seed=1)
        return cls(model, _columns(size, model, profile), levels, draw, calibrating)

    @classmethod
    def given(cls, name, model, text, longest, device) -> Subject:
        """A checkpoint. Raises ValueError for one that is not measured."""
        config = model.config
        if config.hidden_act != "relu":
            raise ValueError(
                f"{name} has the activation {config.hidden_act!r}; sparse layers need 'relu'"
            )
        if model.dtype != torch.bfloat16:
            raise ValueError(f"{name} is in {model.dtype}; load it in torch.bfloat16")
        if config.mlp_bias:
            raise ValueError(f"{name} has feed-forward layers with biases, which are not measured")
        most = config.max_position_embeddings
        if longest > most:
            raise ValueError(f"{name} is for {most} tokens; {longest} were asked for")
        check_sizes([longest], config.hidden_size, config.intermediate_size)
        model = model.to(device).requires_grad_(False).eval()
        tokens = torch.as_tensor(text, dtype=torch.int64, device=device)
        draw = functools.partial(_first_tokens, tokens)
        return cls(model, _columns(name, model, "checkpoint"), [None], draw)

    @property
    def title(self) -> str:
        size = f"{self.columns['parameters'] / 1e6:.0f} M parameters"
        return f"{self.columns['model']}: {size}, {self.columns['num_layers']} layers"


def _columns(name: str, model: SparseLlamaForCausalLM, profile: str) -> dict:
    config = model.config
    return {
        "model": name,
        "parameters": sum(p.numel() for p in model.parameters()),
        "num_layers": config.num_hidden_layers,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_heads": config.num_attention_heads,
        "vocab_size": config.vocab_size,
        "gated": config.gated_mlp,
        "dtype": "bfloat16",
        "profile": profile,
        "sdpa": "default",  # recorded files name attention's kernel; it is torch's choice
    }


def _first_tokens(text: Tensor, batch: int, context: int) -> Tensor:
    """The first tokens of a text as [batch, context]."""
    needed = batch * context
    if len(text) < needed:
        raise ValueError(f"the text has {len(text)} tokens; {batch} x {context} need {needed}")
    return text[:needed].view(batch, context)


# --- forward passes ---------------------------------------------------------------------------


def measure_forward(bench: Bench, ids: Tensor) -> tuple[list[dict], list[dict[str, float]]]:
    """Return rows of model.csv for a batch [B, S], and the activity of each layer."""
    sides, num_tokens = bench.sides, ids.numel()
    sides.become(DENSE_EAGER)
    activity = imposed.activity_of(bench.model, ids)
    case = bench.case(ids, activity)
    sides.observe(activity, min(num_tokens, check.BLOCK))
    title = f"{case['model']}  {case['batch']} x {case['context']} tokens"
    title += f"  {case['active']:.4g} active"
    run = functools.partial(forward, bench.model, ids)
    columns = _check_passes(bench, ids, run, title)
    graph, clocks = num_tokens <= GRAPH_TOKENS, {}
    for provider in columns:
        sides.become(provider)
        columns[provider]["peak"] = _peak(bench.model, run)
        call = clock.capture([run])[0].replay if graph else run
        clocks[provider] = clock.Clock(call, bench.meter)
    rows = []
    for provider, times in bench.timed(clocks, sides.become).items():
        row = {"mode": "graph" if graph else "stream", "provider": provider.name}
        row["path"] = sides.paths(provider, num_tokens)
        row["tokens_per_ms"] = significant(num_tokens / times["p50"], 5)
        rows.append(case | row | columns[provider] | times)
        joules = times["energy"]
        energy = "" if joules is None else f"  {joules / num_tokens:.4g} mJ a token"
        speed = f"{row['tokens_per_ms']:8.1f} tokens/ms{energy}"
        print(f"{title}  {provider.name:<20} {speed}  {row['path']}", flush=True)
    return rows, activity


def _check_passes(
    bench: Bench, ids: Tensor, run: Callable[[], tuple[Tensor, Tensor]], title: str
) -> dict[Provider, dict]:
    """The columns of each provider's check: relative_rms and layer_rms."""
    sides, (batch, context) = bench.sides, ids.shape
    sequences = max(1, min(batch, check.SAMPLE // context))
    exact = exact_hidden_states(bench.model, ids[:sequences])
    judge = check.Judge(f"hidden states ({title})", exact, lambda hidden: hidden[:sequences])
    worst, columns = {}, {}
    for provider in model_providers(bench.compiled):
        backend = provider.backend
        if backend not in worst:
            sides.become(Provider(backend))
            worst[backend] = check.check_layers(bench.model.ffns, run, f"{backend} of {title}")
        sides.become(provider)
        columns[provider] = {
            "relative_rms": significant(judge.check(provider.name, run()[0]), 3),
            "layer_rms": significant(worst[backend], 3),
        }
    return columns


def _peak(model: SparseLlamaForCausalLM, run: Callable[[], object]) -> int:
    """The most bytes that a pass allocates, with one copy of the weights."""
    run()
    before, most = clock.peak_bytes(run)
    return sum(parameter.nbytes for parameter in model.parameters()) + most - before


# --- layer by layer ---------------------------------------------------------------------------


def layer_rows(
    case: dict,
    means: Sequence[float] | None,
    activity: Sequence[dict],
    times: Sequence[dict] | None,
) -> list[dict]:
    """Return rows of model_layers.csv; without `times` these cells are empty."""
    rows = []
    for index, layer in enumerate(activity):
        row = case | {"level": case["active"], "layer": index}
        row["wanted"] = None if means is None else round(means[index], 2)
        row |= {"active": round(layer["mean"], 2), "p99": layer["p99"]}
        row |= {"active_max": layer["max"], "union": round(layer["union"], 1)}
        rows.append(row | (dict.fromkeys(LAYER_TIMES) if times is None else times[index]))
    return rows


def measure_layers(bench: Bench, ids: Tensor) -> list[dict]:
    """Return times in ms of each feed-forward layer alone, on its input in a dense pass.

    Dense (compiled), sparse and "auto", each checked against fp64 before it is timed in turns, the
    cache emptied between calls.
    """
    from twell.kernels import ops

    bench.sides.become(DENSE_EAGER)
    compiled = torch.compile(reference.ffn, fullgraph=True, dynamic=False)
    rows = []

    def visit(index: int, ffn: SparseFFN, x: Tensor) -> None:
        first = (ffn.gate_proj or ffn.up_proj).weight
        inputs = x.flatten(0, -2), first, ffn.up_proj.weight, bench.sides.by_neuron[index]
        case = Case.of(bench.columns["profile"], inputs, ffn.gated)
        (auto,) = case.auto_layers(bench.sides.calibration)
        path = ops.choose(len(case.x))
        calls = {"dense": case.calls(compiled, plain=True)[0], "sparse": case.path_calls(path)[0]}
        calls["auto"] = functools.partial(auto, case.x)
        limit = check.allowed(case.exact, case.x, case.sets[0])
        errors = {
            name: case.exact.check(call(), f"layer {index}, {name},", limit)
            for name, call in calls.items()
        }
        timers = {
            name: functools.partial(clock.stream_times, call, clock.LAYER_TURN)
            for name, call in calls.items()
        }
        times = clock.in_turns(timers, clock.MODEL_ROUNDS)
        row = {name: times[name]["p50"] for name in calls}
        row["auto_path"] = auto.chooser.path(len(case.x))
        row["relative_rms"] = significant(errors["sparse"], 3)
        rows.append(row)
        speeds = "  ".join(f"{name} {row[name]:.3f}" for name in calls)
        active = f"{case.columns['active']:>7} active"
        print(f"layer {index:>2}  {active}  {speeds} ms", flush=True)

    with imposed.before_ffn(bench.model, visit):
        hidden_states(bench.model, ids)
    return rows
