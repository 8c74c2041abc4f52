"""Measure on a GPU what data/ holds: python -m study.record [PART ...] --out DIR

Without a part it lists all parts. A part is a name of PARTS below, or a run or a group of
`study.trainings`. Each GPU runs one part at a time. A part waits until nothing else runs on its
GPU, writes a log into DIR/logs, and ends with all of its processes at its limit of time. The same
command again goes on with what is not done. The trainings of `study.trainings` read ./corpus.
A GPU that --gpus names twice runs two parts at a time, which share it: one computes while the other
starts or is traced. Only trainings may, whose speed no claim is about.
A part with Accelerate's launcher takes all of --gpus; such parts run after the others, in turn.
"""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import IO

from study import trainings
from twell import results

FFN, MODEL = "twell measure ffn", "twell measure model 2b --fp8 --energy --compile"
PLAIN = "twell measure model 2b --compile"
# The calibrations that ship; "auto" goes by them in the parts that follow.
CALIBRATION = "twell/sparse/default_calibration"
KINDS = {"": "", "_fp8": " --fp8", "_non_gated": " --non-gated --intermediate-size 8192"}
SIZE = "--hidden-size {} --intermediate-size {}".format
FEWEST, FEW = "1,2,4,8,16", "32,64,96,128,192,256,512,1024,2048"
FUZZ = 100_000, 102_500, 105_000, 107_500
OPT = "--tokens 65536,2048,64,1 --non-gated"
TRAIN = (
    "twell train 85m source={corpus}/train valid_source={corpus}/valid.jsonl.xz "
    "parse_special=true batch_tokens=32768 micro_batch=32 compile=true valid_every=10000 "
    "tokens=5e7 learning_rate=1e-3"
)
# 77 steps of one model on one GPU, and on all of --gpus with DDP and with FSDP2. A step has the
# same tokens on any number of GPUs. Layers train sparsely from about half of the steps on.
SPREAD = (
    "twell train 171m source={{corpus}}/train valid_source={{corpus}}/valid.jsonl.xz "
    "parse_special=true "
    "batch_tokens=131072 micro_batch=32 warmup_steps=20 log_every=4 valid_every=10000 "
    "checkpoint_every=0 tokens=1e7 backend=auto compile=true l1_coefficient=6e-4 "
    "--out {{out}}/runs/{}"
).format
LAUNCH = trainings.LAUNCH
FSDP2 = "--use_fsdp --fsdp_version 2 --fsdp_auto_wrap_policy TRANSFORMER_BASED_WRAP"
LEVELS = {level: "{out}/runs/85m-50m-l1-" + level for level in ("0", "1.5e-4", "6e-4")}
QUALITY = "twell measure quality {} --source {{corpus}}/valid.jsonl.xz --tokens 1048576".format

# A pretrained model made sparse. A training has 30 L1 stages, the first of them without L1, and 10
# validations, however long it is. A share of 0 is ReLU without L1. Validation has batches of 32
# sequences: with as many in a micro-batch the compiled code has one size.
RELUFY = (
    "twell relufy {{model}} source={{corpus}}/train valid_source={{corpus}}/valid.jsonl.xz "
    "parse_special=true "
    "compile=true checkpoint_every=0 batch_tokens=32768 micro_batch=32 "
    "tokens={tokens} l1_zero_steps={stage} valid_every={valid} l1_stage_steps={stage} "
    "log_every={log} learning_rate={rate} {fields} fit_tokens={fit} --out {run}"
).format
LEARNING_RATE = "1e-3"  # better than that of the parts rate-3e-4
NO_L1 = "active_share=0 l1_coefficient=0"
# With a threshold, or for many active neurons, the term has to begin more lightly.
TENTH, LIGHT = "active_share=0.1", "active_share={} threshold={} l1_coefficient=1e-4".format
# Steps between validations, of a stage, and between rows.
STAGES = {"5e6": (15, 5, 5), "2e7": (60, 20, 20), "4e7": (120, 40, 40), "8e7": (240, 80, 40)}
STAGES |= {"1.2e8": (360, 120, 60), "1.6e8": (480, 160, 40), "2e8": (600, 200, 40)}
KEEP = "study.keep {} --tasks {{tasks}} --out {{out}}/kept".format
SENTENCE = (
    "In 1862 three engineers built a bridge of iron across the river, and the town paid for it."
)
TRACED = f"twell trace {{0}} --text '{SENTENCE}' --out {{{{out}}}}/kept/traces/{{1}}.npz".format
BY_THRESHOLD = "active_share={} threshold=0.5 l1_coefficient=0".format  # which is steered
SAMPLED = f"{BY_THRESHOLD(0.1)} sampled_share=0.25 sampled_tokens=1e7"
CHAT = f"{BY_THRESHOLD(0.1)} sampled_share=0.5 sampled_tokens=1.5e7 sampled_chat=true"
HIDDEN = f"{BY_THRESHOLD(0.1)} hidden_weight=1"
FIT = 262_144  # tokens to which the down projections of most students were fitted
WITH_TRACE = "relufy-0.1-t-0.5-1.2e8"
OTHER_BUDGETS = "1.2e8", "8e7", "4e7", "5e6"  # tokens, beside the usual 2e7
RELUFIED_A_SECOND, WRITTEN_A_SECOND = 1.7e5, 5.5e4  # tokens that an H100 trains on, and writes
START = 130  # seconds around a training


def relufied(
    name: str,
    fields: str,
    tokens: str = "2e7",
    rate: str = LEARNING_RATE,
    fit: int = FIT,
) -> tuple[int, list[str]]:
    """Return a part that trains a model with ReLU, keeps its small files, and deletes its weights.

    At its limit a training leaves a checkpoint, from which the next call goes on.
    """
    run = f"{{out}}/runs/{name}"
    stage_of = dict(zip(("valid", "stage", "log"), STAGES[tokens], strict=True))
    training = RELUFY(tokens=tokens, rate=rate, fields=fields, fit=fit, run=run, **stage_of)
    commands = [training, KEEP(run)]
    commands[1:1] = [TRACED(run, name)] if name == WITH_TRACE else []
    given = dict(field.split("=") for field in fields.split())
    written = float(given.get("sampled_tokens", 0))
    seconds = START + float(tokens) / RELUFIED_A_SECOND + written / WRITTEN_A_SECOND
    return int(3 * seconds), commands


# relufy-*: L1 with a threshold and without, ReLU alone, steered thresholds, text by the teacher,
# and how quality rises with tokens. The others are compared with these: other learning rates, a
# first L1 as light as beside a threshold, with the fit or without, and the same again. With a
# threshold and L1 long trainings end below the wanted share; a steered threshold holds it.
RELUFIED = {
    "rate-3e-4": relufied("rate-3e-4", TENTH, rate="3e-4"),
    "rate-3e-4-t-0.5": relufied("rate-3e-4-t-0.5", LIGHT(0.1, 0.5), rate="3e-4"),
    "rate-2e-3-by-t": relufied("rate-2e-3-by-t", BY_THRESHOLD(0.1), rate="2e-3"),
    "rate-5e-4-hidden-2e8": relufied("rate-5e-4-hidden-2e8", HIDDEN, "2e8", "5e-4", fit=0),
    "light-0.1": relufied("light-0.1", f"{TENTH} l1_coefficient=1e-4"),
    "unfitted-0.1-t-0.5": relufied("unfitted-0.1-t-0.5", LIGHT(0.1, 0.5), fit=0),
    **{
        f"relufy-{name}": relufied(f"relufy-{name}", *fields)
        for name, *fields in (
            ("0.1", TENTH),
            ("0.1-t-0.5", LIGHT(0.1, 0.5)),
            ("0", NO_L1),
            *((f"0.1-by-t-{tokens}", BY_THRESHOLD(0.1), tokens) for tokens in ("1.6e8", "8e7")),
            *((f"{share}-by-t", BY_THRESHOLD(share)) for share in (0.1, 0.05, 0.02)),
            *((f"0.1-t-0.5-{tokens}", LIGHT(0.1, 0.5), tokens) for tokens in OTHER_BUDGETS),
            *((f"0.1-{tokens}", TENTH, tokens) for tokens in OTHER_BUDGETS),
            ("0.05-t-0.5", LIGHT(0.05, 0.5)),
            ("0.05", "active_share=0.05"),
            ("0.3", "active_share=0.3 l1_coefficient=1e-5"),
            ("0.02-t-0.5", LIGHT(0.02, 0.5)),
            ("0.02", "active_share=0.02"),
            ("0.2", "active_share=0.2 l1_coefficient=1e-4"),
            ("0-8e7", NO_L1, "8e7"),
            # Of the original's gates a quarter is above 0.2, and 15% above 0.5.
            ("0.1-t-0.2", LIGHT(0.1, 0.2)),
            ("0-t-0.5", f"{NO_L1} threshold=0.5"),
        )
    },
    "unfitted-0.1-by-t": relufied("unfitted-0.1-by-t", BY_THRESHOLD(0.1), fit=0),
    "again-0": relufied("again-0", NO_L1),
    **{
        name: relufied(name, f"{fields} seed={seed}", tokens, fit=fit)
        for kind, fields, tokens, fit in (
            ("", BY_THRESHOLD(0.1), "2e7", FIT),
            ("-chat-1.6e8", CHAT, "1.6e8", 0),
        )
        for seed in (1, 2)
        for name in [f"again-0.1-by-t{kind}-seed-{seed}"]
    },
    # The outputs of the layers compared with the teacher's, too.
    **{
        name: relufied(name, f"{fields} seed={seed}", tokens, fit=0)
        for fields, tokens, end in (
            (HIDDEN, "2e7", ""),
            (HIDDEN, "8e7", "-8e7"),
            (HIDDEN, "2e8", "-2e8"),
            (f"{CHAT} hidden_weight=1", "1.6e8", "-chat-1.6e8"),
        )
        for seed in range(3)
        for name in [f"hidden-0.1-by-t{end}" + f"-seed-{seed}" * (seed > 0)]
    },
    **{
        name: relufied(name, fields, tokens, fit=fit)
        for first, fields, fit in (
            ("relufy-0.1-by-t-sampled", SAMPLED, FIT),
            ("relufy-0.1-by-t-chat", CHAT, 0),
            ("fitted-0.1-by-t-chat", CHAT, FIT),
        )
        for tokens in ("2e7", "8e7", "1.6e8")
        for name in [first + f"-{tokens}" * (tokens != "2e7")]
    },
}


# Name -> limit in seconds and commands. A limit is well above the time on an H200, where that is
# known: "layer" took 200 s with torchao. Commands without --out get --out DIR/bench.
PARTS: dict[str, tuple[int, list[str]]] = {
    "tests": (600, ["pytest tests/gpu -q -p no:cacheprovider -n 4"]),
    "fuzz": (
        900,
        [f"tests.fuzz --cases 2500 --seed {seed} --jobs {{jobs}}" for seed in FUZZ],
    ),
    "fuzz-training": (600, ["tests.fuzz --training --cases 3000 --seed 200000 --jobs {jobs}"]),
    "layer": (400, [f"{FFN} --tokens 131072,16384"]),
    "large-layer": (150, [f"{FFN} --tokens 65536 {SIZE(3072, 8192)}"]),
    "busy-layer": (150, [f"{FFN} --tokens 131072 --active 100"]),
    "tokens": (400, [f"{FFN} --tokens {FEW},4096,8192,32768,65536"]),
    "fewest": (400, [f"{FFN} --tokens {FEWEST}"]),  # with integer weights, which take long to tune
    "situations": (
        400,
        [f"{FFN} --mode {mode} --tokens {FEWEST},{FEW}" for mode in ("eager", "compiled")],
    ),
    "activity": (240, [f"{FFN} --tokens 16384,131072 --active 1,10,300,1000,3,60,200,600"]),
    "backward": (
        240,
        [
            f"{FFN} --backward --tokens 16384 --active 3,10,29,100,200 --pattern skewed,even",
        ],
    ),
    "steps": (150, [f"{FFN} --backward --mode eager --tokens 16384,4096 --active 10,29"]),
    "opt": (
        400,
        [
            f"{FFN} {OPT} --bias {SIZE(2048, 8192)} --active 328,164",
            f"{FFN} {OPT} --bias {SIZE(4096, 16384)} --active 655,328",
        ],
    ),
    "relu2": (100, [f"{FFN} {OPT} --activation relu2 {SIZE(3072, 9216)} --active 369,184"]),
    "drelu": (
        200,
        [
            f"{FFN} --tokens 65536,2048,64,1 --activation drelu {SIZE(4096, 14336)} "
            "--active 1434,573,287"
        ],
    ),
    "smollm2-layer": (
        150,
        [f"{FFN} --tokens 65536,2048,64,1 {SIZE(576, 1536)} --active 150,40"],
    ),
    "calibrate": (
        400,
        [
            f"twell measure calibrate{of} --out {CALIBRATION}{kind}.json"
            for kind, of in KINDS.items()
        ],
    ),
    "model": (400, [f"{MODEL} --batches 64x2048"]),
    "decode": (500, [f"{MODEL} --batches none --decode 1,32"]),
    "few-documents": (
        900,
        [
            f"{PLAIN} --batches none --decode 1,2,4,8,16,32,64",
            f"{PLAIN} --batches none --decode 1,8,32 --context 4096",
        ],
    ),
    "prompts": (300, [f"{PLAIN} --batches 1x128,1x512,1x2048"]),
    "plain-calls": (600, [f"{PLAIN} --no-graphs --batches 1x128,1x512,1x2048 --decode 1,4,32"]),
    "flagship-step": (
        200,
        [
            "twell measure train-step 0.5b vocab_size=16384 context=1024 micro_batch=64 "
            "--spread paper --active 19 --compile --out {out}/bench/trained"
        ],
    ),
    "85m-step": (
        200,
        [
            "twell measure train-step 85m micro_batch=64 --spread paper --active 18 --compile "
            "--out {out}/bench/trained"
        ],
    ),
    "single-171m": (500, [SPREAD("single-171m")]),
    "ddp-171m": (500, [f"{LAUNCH} --multi_gpu -m {SPREAD('ddp-171m')}"]),
    "fsdp-171m": (500, [f"{LAUNCH} {FSDP2} -m {SPREAD('fsdp-171m')}"]),
    "levels": (
        900,
        [f"{TRAIN} l1_coefficient={level} --out {run}" for level, run in LEVELS.items()],
    ),
    "quality": (
        600,
        [QUALITY(model) for model in ("data/checkpoints/twell-6m", *LEVELS.values())],
    ),
    **RELUFIED,
} | trainings.parts()
STOPPING = 40  # seconds in which a training writes its checkpoint
KEEPING = 120  # seconds of `study.keep`
# Seconds that a training may take. One that would not end in time does not begin.
SECONDS = {
    name: seconds
    for group in trainings.GROUPS
    for name, (_, seconds) in trainings.runs(group).items()
}
SECONDS |= {name: limit // 3 for name, (limit, _) in RELUFIED.items()}
# Parts that may share a GPU: nothing of them is timed.
SHARING = set(SECONDS) - set(trainings.MEASURED)
SHARING -= {name for group in trainings.TIMED for name in trainings.runs(group)}

RUNNING: set[int] = set()  # process groups of their own, which Ctrl-C does not reach
INTERRUPTED: set[int] = set()  # a second SIGINT would end a training without its checkpoint
BEGINNING = threading.Lock()  # what has begun is in RUNNING


def wait_for_gpu(gpu: str, until: float) -> None:
    """Return when no other process uses the GPU, whose work would distort the times, or late."""
    try:
        import pynvml
    except ModuleNotFoundError:
        return
    pynvml.nvmlInit()
    handle, said = pynvml.nvmlDeviceGetHandleByIndex(int(gpu)), False
    while busy := [one.pid for one in pynvml.nvmlDeviceGetComputeRunningProcesses(handle)]:
        if time.monotonic() > until:
            return
        if not said:
            print(f"GPU {gpu} is used by the processes {busy}; waiting for their end", flush=True)
        said = True
        time.sleep(1)


def run(
    command: str, environment: dict[str, str], log: IO[str], until: float, given: argparse.Namespace
) -> int:
    """Run a module's command and return its exit status, 124 at its limit; its children end too.

    At the limit it is interrupted, so that a training leaves a checkpoint. After it none begins.
    """
    with BEGINNING:
        left = min(until, given.until) - time.monotonic()
        if left <= 0:
            return 124
        process = subprocess.Popen(
            [sys.executable, "-m", *shlex.split(command)],
            env=environment,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        RUNNING.add(process.pid)
    try:
        return process.wait(left)
    except subprocess.TimeoutExpired:
        INTERRUPTED.add(process.pid)
        process.send_signal(signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            process.wait(STOPPING)
        return 124
    finally:
        end(process.pid)


def end(group: int) -> None:
    """Kill a command and its children."""
    RUNNING.discard(group)
    INTERRUPTED.discard(group)
    with suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


def stop() -> None:
    """Interrupt all commands, so that trainings leave checkpoints, and kill what does not end."""
    for group in RUNNING - INTERRUPTED:
        with suppress(ProcessLookupError):
            os.kill(group, signal.SIGINT)
    latest = time.monotonic() + STOPPING
    while RUNNING and time.monotonic() < latest:
        time.sleep(0.1)
    for group in list(RUNNING):
        end(group)


def completed(command: str, given: argparse.Namespace) -> str | None:
    """Return a command with its folders, with --resume where it began; None where it is done."""
    jobs = max(2, (os.cpu_count() or 2) // max(1, len(given.gpus)) - 2)
    places = {name: getattr(given, name) for name in ("out", "corpus", "tasks", "model")}
    command = command.format(jobs=jobs, gpus=len(set(given.gpus)), **places)
    if "--out" not in command and not command.startswith("pytest"):
        command += f" --out {given.out / 'bench'}"
    out = Path(command.rpartition(" --out ")[2])
    if command.rpartition("-m ")[2].startswith(("twell train ", "twell relufy ")):
        return command + " --resume" * (out / "provenance.json").is_file()
    if command.startswith("study.keep "):  # the log is its last file
        out = out / "runs" / Path(command.split()[1]).name / "log.csv.xz"
    makes_out = command.startswith(("twell trace", "twell evaluate", "study.keep "))
    return None if makes_out and out.is_file() else command


def is_spread(name: str) -> bool:
    """Return whether a part takes all GPUs."""
    return any(command.startswith(trainings.LAUNCHER) for command in PARTS[name][1])


def run_part(name: str, gpus: str, given: argparse.Namespace, lock: threading.Lock) -> bool:
    """Run a part's commands on GPUs, "0" or "0,1"; return whether all of them succeeded."""
    limit, commands = PARTS[name]
    log = given.out / "logs" / f"{name}.log"
    done = log.with_suffix(".done")
    code = 0
    if not done.is_file():
        for gpu in gpus.split(","):
            if given.gpus.count(gpu) == 1:
                wait_for_gpu(gpu, given.until)
    start = time.monotonic()
    with log.open("a") as file:
        for command in commands if not done.is_file() else ():
            command = completed(command, given)
            if command is None:
                continue
            file.write(f"== {command}\n")
            file.flush()
            environment = os.environ | {"CUDA_VISIBLE_DEVICES": gpus, "PYTHONUNBUFFERED": "1"}
            code = run(command, environment, file, start + limit, given)
            if code:
                break
    if not code:
        done.touch()
    last = log.read_text().strip().rpartition("\n")[2]
    with lock:
        seconds = time.monotonic() - start
        print(f"{name:14} GPU {gpus}  {seconds:5.0f} s  exit {code}  {last[:120]}", flush=True)
    return not code


def needed(name: str, given: argparse.Namespace) -> float:
    """Return the seconds that a part may take, KEEPING where its training is complete."""
    folder = given.out / "runs" / name
    begun = (folder / "provenance.json").is_file()
    complete = begun and results.load_provenance(folder).get("complete")
    return KEEPING if complete else SECONDS.get(name, 0)


def run_parts(names: list[str], places: list[str], given: argparse.Namespace) -> list[bool]:
    """Run parts, one at a time in each place: a GPU, or several ("0,1"). Return what succeeded.

    Parts that do not begin in time have not.
    """
    waiting, lock, ended = list(names), threading.Lock(), []

    def take(gpus: str) -> str | None:
        """Return the first part that may end in time; a shared GPU takes twice as long."""
        with lock:
            left = (given.until - time.monotonic()) / max(1, given.gpus.count(gpus))
            fit = next((name for name in waiting if needed(name, given) < left), None)
            if fit is not None:
                waiting.remove(fit)
            return fit

    def work(gpus: str) -> None:
        while (name := take(gpus)) is not None:
            ended.append(run_part(name, gpus, given, lock))

    threads = [threading.Thread(target=work, args=(gpus,), daemon=True) for gpus in places]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if waiting:
        print(f"not begun, for want of time: {', '.join(waiting)}", flush=True)
    return ended + [False] * (len(names) - len(ended))  # a part may also have raised


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", metavar="PART")

    def add(name: str, default: object, text: str, kind: Callable = Path) -> None:
        parser.add_argument(name, type=kind, default=default, help=text)

    add("--out", Path("build/record"), "folder of rows, runs and logs")
    add("--corpus", Path("corpus"), "train/ and valid.jsonl.xz")
    add("--tasks", Path("corpus"), "folder of the items for `study.keep`")
    add("--model", Path("smollm2"), "folder of the model that the parts relufy-* change")
    add("--seconds", float("inf"), "end by then; a training leaves a checkpoint", float)
    add("--gpus", ["0"], "GPUs, with commas; twice: shared", lambda text: text.split(","))
    given = parser.parse_args()
    given.until = time.monotonic() + given.seconds - STOPPING
    named = [
        trainings.missing(name) if name in trainings.GROUPS else [name] for name in given.parts
    ]
    given.parts = [part for parts in named for part in parts]
    unknown = sorted(set(given.parts) - set(PARTS))
    if unknown:
        parser.error(f"no part is named {', '.join(unknown)}; there are {', '.join(PARTS)}")
    if not given.parts:
        for name, (limit, commands) in PARTS.items():
            print(f"{name}, at most {limit} s:", *commands, sep="\n    python -m ")
        return
    spread = [name for name in given.parts if is_spread(name)]
    different = list(dict.fromkeys(given.gpus))
    if spread and len(different) < 2:
        parser.error(f"{', '.join(spread)} need several --gpus, such as 0,1")
    alone = [name for name in given.parts if name not in SHARING]
    if alone and len(different) < len(given.gpus):
        parser.error(f"{', '.join(alone)} are timed: name each of --gpus once")
    (given.out / "logs").mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    # In the background a shell lets commands ignore SIGINT, and so would theirs.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        ended = run_parts([name for name in given.parts if name not in spread], given.gpus, given)
        ended += run_parts(spread, [",".join(different)], given)
    finally:
        with BEGINNING:
            given.until = float("-inf")  # nothing begins any more
        stop()
    raise SystemExit(not all(ended))


if __name__ == "__main__":
    main()
