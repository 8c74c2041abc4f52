"""Whole models: forward passes, each feed-forward layer, and, by parts.py and decode.py, the rest.

A sample of the last hidden states (in decoding: of the logits) is compared with fp32, all of them
with the dense model's, and each feed-forward layer with fp64. Without a checkpoint the weights are
random and the activity is imposed (imposed.py). Energy is counted over the same turns as times.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from twell.measure import check, clock, imposed
from twell.measure.case import GRAPH_TOKENS, Case
from twell.measure.decode import GENERATION, joined_projections, measure_decode
from twell.measure.layer import checked
from twell.measure.parts import decode_parts, measure_parts
from twell.measure.patterns import IMPOSED
from twell.measure.providers import DENSE_EAGER, FP8, FP8_ALL, Provider, model_providers
from twell.measure.rows import LAYER_TIMES, Rows, require, significant
from twell.measure.sides import Bench, check_model, exact_hidden_states, forward, random_model
from twell.models.llama import SparseLlamaForCausalLM
from twell.models.order import order_tokens
from twell.sparse import float8, reference
from twell.sparse.calibration import Calibration
from twell.sparse.layer import SparseFFN, captured_by_hand

FILES = "model", "model_layers", "model_parts", "decode"
ORDERED = "checkpoint ordered"  # the column `profile` where similar tokens are side by side
Checkpoint = tuple[str, SparseLlamaForCausalLM, Sequence[int]]
Draw = Callable[..., Tensor]


@torch.no_grad()
def language_model(
    size: str = "2b",
    overrides: Sequence[str] = (),
    *,
    checkpoint: Checkpoint | None = None,
    ordered: bool = False,
    alike: bool = False,
    shapes: Sequence[tuple[int, int]] = ((64, 2048),),
    profile: str = "paper",
    active: Sequence[float] | None = None,
    layers: bool = False,
    parts: bool = False,
    decode: Sequence[int] = (),
    decode_context: int = 512,
    compiled: bool | None = None,
    tuned: bool = False,
    fp8: bool = False,
    calibration: Calibration | None = None,
    graphs: bool = True,
    energy: bool = False,
    out: str | Path | None = None,
) -> dict[str, list[dict]]:
    """Time a language model in bf16: dense, sparse and by "auto", eager and with compiled layers.

    Args:
        size: a configuration of the package or a YAML file (`TrainConfig.load`), random weights.
        overrides: fields of it to change, as key=value.
        checkpoint: instead, its name, the model in bf16 and the tokens of a text with its activity.
        ordered: compute similar tokens of the text side by side (`twell.order_tokens`).
        alike: then measure random weights too, with its layers' means on the first of the batches.
        shapes: batches (sequences, tokens of each) whose forward pass is timed.
        profile: how the activity varies over layers, see `Pattern`.
        active: means over layers, each imposed and measured in turn; default: the paper's.
        layers: also time each feed-forward layer alone, on the first of the batches.
        parts: also say where a layer's time goes, on the first of the batches and in decoding.
        decode: numbers of documents to continue by GENERATION tokens behind `decode_context`.
        compiled: True: only with compiled layers; False: only eager; None: both.
        tuned: also time decoding with layers that Inductor tunes.
        fp8: also time all with feed-forward layers in FP8, and passes with attention's too.
        calibration: the times that "auto", which knows the activity, chooses by.
        graphs: False: time calls back to back, which wait for the host where it is slower.
        energy: also measure energy, over the same turns.
        out: the folder of model.csv, model_layers.csv, model_parts.csv and decode.csv.

    With `graphs` decoding and passes of up to 4,096 tokens are timed in CUDA graphs. Returns the
    rows by file, COLUMNS. Raises ValueError for unfit arguments, ArithmeticError for a wrong
    result, RuntimeError without a GPU. Paper: section 4.1, Table 1, Figs 4, 6, 10, 11.
    """
    gpu = clock.Gpu(energy)
    plan = Plan(shapes, decode, decode_context, layers, parts, compiled, tuned, fp8)
    plan.check(gpu, checkpoint, active, ordered, alike)
    if checkpoint is None:
        given = _random(size, overrides, profile, active, plan.longest, gpu.device)
    else:
        size, profile = checkpoint[0], ORDERED if ordered else "checkpoint"
        given = _given(*checkpoint, ordered, plan.longest, gpu.device)
    model, draw, levels = given
    bench = Bench(size, model, profile, calibration, gpu, graphs)
    with captured_by_hand() if graphs else nullcontext():
        return plan.run_all(bench, draw, levels, alike, Rows(out, FILES))


@dataclass(frozen=True)
class Plan:
    """What to measure: arguments of `language_model`. Raises ValueError for unfit ones."""

    shapes: Sequence[tuple[int, int]]
    decode: Sequence[int]
    decode_context: int
    layers: bool
    parts: bool
    compiled: bool | None
    tuned: bool
    fp8: bool

    def __post_init__(self):
        sizes = [number for shape in self.shapes for number in shape]
        for name, numbers in (("shapes", sizes), ("decode", [*self.decode, self.decode_context])):
            least = min(numbers, default=1)
            require(least >= 1, f"{name} holds {least}; it has to be at least 1")
        none = "measured on the first of the batches, and there is none"
        require(not self.layers or self.shapes, f"layers: {none}")
        require(not self.parts or self.shapes or self.decode, f"parts: {none}")
        reason = "compiled is False" if self.decode else "decode has no number of documents"
        possible = self.compiled is not False and self.decode
        unfit = f"tuned: decoding is timed so with compiled layers, and {reason}"
        require(possible or not self.tuned, unfit)

    def check(
        self,
        gpu: clock.Gpu,
        checkpoint: Checkpoint | None,
        active: object,
        ordered: bool,
        alike: bool,
    ) -> None:
        """Raise ValueError for what this GPU, or this kind of model, does not have."""
        unfit = "alike: random weights get the activity of a checkpoint on the first of the batches"
        require(not alike or (checkpoint is not None and self.shapes), unfit)
        unfit = "ordered: random weights have no similar tokens; give a checkpoint"
        require(checkpoint is not None or not ordered, unfit)
        unfit = "layers: they are timed alone and in the text's order; ordered says another"
        require(not (self.layers and ordered), unfit)
        unfit = "active is imposed on random weights; a checkpoint has its own activity"
        require(checkpoint is None or active is None, unfit)
        reason = float8.why_not(gpu.device) if self.fp8 else None
        require(reason is None, f"FP8 cannot be measured here: {reason}")

    @property
    def longest(self) -> int:
        """The most tokens of a document."""
        lengths = [context for _, context in self.shapes]
        return max([*lengths, *[self.decode_context + GENERATION] * bool(self.decode)], default=1)

    def run_all(
        self, bench: Bench, draw: Draw, levels: Sequence, alike: bool, rows: Rows
    ) -> dict[str, list[dict]]:
        """Measure all levels of activity; return the rows by file."""
        activity = [self.run(bench, draw, means, rows) for means in levels]
        if alike:
            self.run(bench, _drawn_anew(bench), [layer["mean"] for layer in activity[0]], rows)
        return rows.by_file

    def run(
        self, bench: Bench, draw: Draw, means: Sequence[float] | None, rows: Rows
    ) -> list[dict[str, float]]:
        """Measure one level of activity: `means` by layer, or a checkpoint's own.

        Returns the activity of each layer on the first of the batches.
        """
        of_first: list[dict[str, float]] = []
        bench.become(DENSE_EAGER)
        if means is not None:
            imposed.impose(bench.model, means, draw(64, min(128, self.longest), seed=1))
            bench.take_weights()
        in_passes = (None, FP8, FP8_ALL) if self.fp8 else (None,)
        providers = model_providers(self.compiled, precisions=in_passes)
        for index, (batch, context) in enumerate(self.shapes):
            ids, first = draw(batch, context), index == 0
            passes, activity = measure_forward(bench, ids, providers)
            of_first = of_first or activity
            rows.add("model", passes)
            if self.parts and first:
                rows.add("model_parts", measure_parts(bench, ids, activity))
            times = measure_layers(bench, ids) if self.layers and first else None
            rows.add("model_layers", layer_rows(bench.case(ids, activity), means, activity, times))
            torch.cuda.empty_cache()
        providers = model_providers(self.compiled, self.tuned, in_passes[:2])
        for batch in self.decode:
            script = draw(batch, self.decode_context + GENERATION)
            with joined_projections(bench.model):
                steps, decoder = measure_decode(bench, script, self.decode_context, providers)
                rows.add("decode", steps)
                if self.parts:
                    rows.add("model_parts", decode_parts(bench, decoder, steps[0]))
            del decoder
            torch.cuda.empty_cache()
        return of_first


def _random(
    size: str,
    overrides: Sequence[str],
    profile: str,
    active: Sequence[float] | None,
    longest: int,
    device: torch.device,
) -> tuple[SparseLlamaForCausalLM, Draw, list[list[float]]]:
    """A model of random weights, what draws its tokens, and levels of activity by layer."""
    means = [imposed.paper_active(size)] if active is None else active
    pattern = replace(IMPOSED, profile=profile)
    model, config = random_model(size, overrides, longest, device)
    draw = functools.partial(imposed.draw_tokens, config.vocab_size, device=device)
    return model, draw, [pattern.means(config.num_layers, mean) for mean in means]


def _drawn_anew(bench: Bench) -> Draw:
    """Give a checkpoint's model random weights; return what draws its tokens."""
    bench.become(DENSE_EAGER)
    imposed.draw_weights(bench.model)
    bench.columns["profile"] = "imposed"
    vocab_size = bench.model.config.vocab_size
    return functools.partial(imposed.draw_tokens, vocab_size, device=bench.gpu.device)


def _given(
    name: str,
    model: SparseLlamaForCausalLM,
    text: Sequence[int],
    ordered: bool,
    longest: int,
    device: torch.device,
) -> tuple[SparseLlamaForCausalLM, Draw, list[None]]:
    """A checkpoint, what cuts its text, and one level: its own activity. `ordered`: see above.

    Raises ValueError for a model that is not measured.
    """
    config, most = model.config, model.config.max_position_embeddings
    check_model(name, config, longest)
    in_bf16 = f"{name} is in {model.dtype}; load it in torch.bfloat16"
    require(model.dtype == torch.bfloat16, in_bf16)
    biases = f"{name} has feed-forward layers with biases, which are not measured"
    require(not config.mlp_bias, biases)
    require(longest <= most, f"{name} is for {most} tokens; {longest} were asked for")
    tokens = torch.as_tensor(text, dtype=torch.int64, device=device)

    def draw(batch: int, context: int) -> Tensor:
        needed = f"{batch} x {context} need {batch * context}"
        require(len(tokens) >= batch * context, f"the text has {len(tokens)} tokens; {needed}")
        return tokens[: batch * context].view(batch, context)

    model = model.to(device).requires_grad_(False).eval()
    if ordered:
        order_tokens(model)
    return model, draw, [None]


def measure_forward(
    bench: Bench, ids: Tensor, providers: Sequence[Provider]
) -> tuple[list[dict], list[dict[str, float]]]:
    """Return rows of model.csv for a batch [B, S], and the activity of each layer."""
    model, (batch, context) = bench.model, ids.shape
    bench.become(DENSE_EAGER)
    activity = imposed.activity_of(model, ids)
    bench.observe(activity, ids.numel())
    case = bench.case(ids, activity)
    title = f"{case['model']}  {batch} x {context} tokens  {case['active']:.4g} active"
    mode = "graph" if bench.graphs and ids.numel() <= GRAPH_TOKENS else "stream"
    run = functools.partial(forward, model, ids)

    def prepare(provider: Provider) -> tuple[Tensor, Callable, dict]:
        call, (hidden, _) = run, run()
        # With one copy of the weights.
        before, most = bench.gpu.peak(run)
        weights = itertools.chain(model.parameters(), model.buffers())  # those in FP8 are buffers
        peak = sum(weight.nbytes for weight in weights) + most - before
        if mode == "graph":
            call, ((hidden, _),) = bench.gpu.capture([run])
            call()
        return hidden, call, {"peak": peak}

    sequences = max(1, min(batch, check.SAMPLE // context))
    exact = exact_hidden_states(model, ids[:sequences])
    judge = check.Judge(f"hidden states ({title})", exact, lambda hidden: hidden[:sequences])
    rows = []
    for provider, columns in bench.measure(title, providers, run, prepare, judge).items():
        row = {"provider": provider.name, "path": bench.paths(provider, ids.numel()), "mode": mode}
        row["tokens_per_ms"] = significant(ids.numel() / columns["p50"], 5)
        rows.append(case | row | columns)
    return rows, activity


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
        rows.append(row | (times[index] if times else dict.fromkeys(LAYER_TIMES.split())))
    return rows


def measure_layers(bench: Bench, ids: Tensor) -> list[dict]:
    """Return times in ms of each feed-forward layer alone, on its input in a dense pass.

    Dense (compiled), sparse and "auto", each checked against fp64 before it is timed in turns, the
    cache emptied between calls.
    """
    from twell.kernels import ops

    bench.become(DENSE_EAGER)
    compiled = torch.compile(reference.ffn, fullgraph=True, dynamic=False)
    rows = []

    def visit(index: int, ffn: SparseFFN, x: Tensor) -> None:
        weights = ffn.first.weight, ffn.up_proj.weight
        inputs = x.flatten(0, -2), *weights, bench.by_neuron[index]
        case = Case.of(bench.columns["profile"], inputs, ffn.gated)
        (auto,) = case.auto_layers(bench.calibration)
        calls = {
            "dense": case.calls(compiled, plain=True),
            "sparse": case.path_calls(ops.choose(len(case.x))),
            "auto": [functools.partial(auto, case.x)],
        }
        exact = case.exact, check.allowed(case.exact, case.x, case.sets[0])

        def checks(name: str) -> tuple[dict, Callable]:
            what = f"layer {index}, {name},"
            columns, times, _ = checked(bench.gpu, exact, what, calls[name], "stream")
            return columns, functools.partial(times, clock.LAYER_TURN)

        columns = clock.measure(calls, checks, clock.MODEL_ROUNDS)
        row = {name: columns[name]["p50"] for name in calls}
        row["auto_path"] = auto.chooser.path(len(case.x))
        row["relative_rms"] = columns["sparse"]["relative_rms"]
        rows.append(row)

    with imposed.before_ffn(bench.model, visit):
        forward(bench.model, ids)
    return rows
