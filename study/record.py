"""Measure on a GPU what data/ holds: python -m study.record [PART ...] --out DIR

Without a part it lists those of MEASURED. A part is also a recorded run, which is then trained
again, with other fields as in 85m-50m-l1-0-seed-0:tokens=8e7; patterns such as "85m-100m-*" work.
Each GPU runs one part at a time, with a log in DIR/logs. The same command again skips finished
parts and resumes trainings. Parts with Accelerate's launcher take all of --gpus, after the others.
Trainings read ./corpus (scripts/corpus.py makes it).
"""

import argparse
import fnmatch
import math
import os
import queue
import shlex
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import yaml

from study import price
from twell import results

RECORDED = results.root() / "data" / "runs"
LIMIT = 1800  # seconds of one command
STOPPING = 40  # seconds in which a training writes its checkpoint
RUNNING: list[subprocess.Popen] = []

FFN, MODEL = "twell measure ffn", "twell measure model 2b --compile"
STEP = "twell measure train-step {} --spread paper --compile --out {{out}}/bench/trained".format
SIZE_STEP = "micro_batch=16 --spread paper --compile --energy --hybrid"
SIZE = "--hidden-size {} --intermediate-size {}".format
GRID = "--tokens 1,8,64,512,2048,16384,65536,131072 --active 17,56,225,563,2816"
SIZES, PAPERS = ("0.5b", "1b", "1.5b"), "--provider twell.sparse.paper:layer"  # and 2b
SIZE_PASS = f"--compile --batches 64x2048 --energy {PAPERS}"
DENSE = "study.dense:joined,study.dense:max_autotune,study.dense:two_of_four"
FEW = "1,2,4,8,16,32,64,96,128,192,256,512,1024,2048"
SOME = "--tokens 65536,2048,64,1"
# The calibrations that ship; "auto" goes by them in the parts that follow.
CALIBRATE = "twell measure calibrate{} --out twell/sparse/default_calibration{}.json".format
FUZZ = "tests.fuzz --cases {} --seed {} --jobs {{jobs}}{}".format
CORPUS = "source={corpus}/train valid_source={corpus}/valid.jsonl.xz parse_special=true"
QUALITY = "twell measure quality {} --source {{corpus}}/valid.jsonl.xz --tokens 1048576".format
LAUNCHER = "accelerate.commands.launch"
LAUNCH = f"{LAUNCHER} --main_process_port 0 --mixed_precision bf16 --num_processes {{gpus}}"

# Name -> commands. Those without --out get --out DIR/bench.
MEASURED: dict[str, list[str]] = {
    "tests": ["pytest tests/gpu -q -p no:cacheprovider -n 4"],
    "fuzz": [FUZZ(2500, seed, "") for seed in (100_000, 102_500, 105_000, 107_500)],
    "fuzz-training": [FUZZ(3000, 200_000, " --training")],
    "layers": [f"{FFN} --tokens 65536 {SIZE(3072, 8192)}", f"{FFN} --tokens 131072 --active 100"],
    "tokens": [f"{FFN} --tokens {FEW},4096,8192,32768,65536"],
    "auto": [f"{FFN} --auto {GRID} --provider study.untuned:layer --out {{out}}/bench/auto"],
    "activity": [f"{FFN} --tokens 16384,131072 --active 1,10,300,1000,3,60,200,600"],
    "backward": [f"{FFN} --backward --tokens 16384 --active 3,10,29,100,200 --pattern skewed,even"],
    "steps": [f"{FFN} --backward --mode eager --tokens 16384,4096 --active 10,29"],
    "opt": [
        f"{FFN} {SOME} --non-gated --bias {SIZE(2048, 8192)} --active 328,164",
        f"{FFN} {SOME} --non-gated --bias {SIZE(4096, 16384)} --active 655,328",
    ],
    "relu2": [f"{FFN} {SOME} --non-gated --activation relu2 {SIZE(3072, 9216)} --active 369,184"],
    "drelu": [f"{FFN} {SOME} --activation drelu {SIZE(4096, 14336)} --active 1434,573,287"],
    "smollm2-layer": [f"{FFN} {SOME} {SIZE(576, 1536)} --active 150,40"],
    "calibrate": [
        CALIBRATE("", ""),
        CALIBRATE(" --fp8", "_fp8"),
        CALIBRATE(" --non-gated --intermediate-size 8192", "_non_gated"),
    ],
    "algorithms": [f"{FFN} --tokens 131072,16384,65536 --pattern skewed,even,lively {PAPERS}"],
    "processes": 3
    * [
        f"{FFN} --tokens 131072,16384 --pattern skewed,even {PAPERS},{DENSE}",
        f"{FFN} --backward --mode eager --tokens 16384 --pattern skewed,even,lively",
        f"twell measure model 2b --fp8 {SIZE_PASS},study.dense:joined",
        f"twell measure train-step 2b {SIZE_STEP}",
    ],
    "sizes": [f"twell measure model {size} {SIZE_PASS}" for size in SIZES],
    "size-steps": [f"twell measure train-step {size} {SIZE_STEP}" for size in SIZES],
    "decode": [f"{MODEL} --fp8 --energy --batches none --decode 1,32"],
    "few-documents": [
        f"{MODEL} --batches none --decode 1,2,4,8,16,32,64",
        f"{MODEL} --batches none --decode 1,8,32 --context 4096",
    ],
    "prompts": [f"{MODEL} --batches 1x128,1x512,1x2048"],
    "plain-calls": [f"{MODEL} --no-graphs --batches 1x128,1x512,1x2048 --decode 1,4,32"],
    "vllm": ["twell measure serve 2b"],
    "flagship-step": [STEP("0.5b vocab_size=16384 context=1024 micro_batch=64 --active 19")],
    "85m-step": [STEP("85m micro_batch=64 --active 18")],
}


def training(name: str) -> list[str]:
    """Return the commands that train a recorded run again, and keep its files.

    name: RUN, or RUN:FIELD=VALUE,... with fields that differ; the new run has these in its name.
    """
    base, _, changed = name.partition(":")
    new = dict(field.split("=") for field in filter(None, changed.split(",")))
    name = "-".join([base, *(f"{field}-{value}" for field, value in new.items())])
    words = results.load_provenance(RECORDED / base)["command"].split()
    fields = dict(word.split("=", 1) for word in words if "=" in word)
    kind = "train" if "train" in words else "relufy"
    subject = words[words.index(kind) + 1]
    if kind == "relufy":
        config = yaml.safe_load((RECORDED / base / "config.yaml").read_text(encoding="utf-8"))
        if config.get("fit_tokens") or config.get("sampled_share"):
            raise ValueError(f"{base} has a fit or samples, which twell dropped; see its commit")
        subject = "{model}"
        fields.pop("fit_tokens", None)
        if "tokens" in new:  # stages and rows of the log in proportion
            stage = round(float(new["tokens"]) / 1e6)
            fields |= {"valid_every": str(3 * stage), "log_every": str(math.gcd(stage, 40))}
            fields |= {"l1_zero_steps": str(stage), "l1_stage_steps": str(stage)}
    fields |= dict(field.split("=") for field in CORPUS.split()) | new
    given = " ".join(f"{key}={value}" for key, value in fields.items())
    command = f"twell {kind} {subject} {given} --out {{out}}/runs/{name}"
    if "launch" in words:
        options = words[words.index("launch") + 1 : words.index("-m")]
        sharded = " ".join(options[: options.index("--num_processes")]) or "--multi_gpu"
        command = f"{LAUNCH} {sharded} -m {command}"
    return [command, f"study.keep {{out}}/runs/{name} --tasks {{tasks}} --out {{out}}/kept"]


# Of recorded runs no weights are kept: these are trained again before their quality is measured.
LEVELS = [f"85m-50m-l1-{level}-seed-0" for level in ("0", "1.5e-4", "6e-4")]
MEASURED["quality"] = [training(run)[0] for run in LEVELS]
MEASURED["quality"] += [QUALITY("data/checkpoints/twell-6m")]
MEASURED["quality"] += [QUALITY(f"{{out}}/runs/{run}") for run in LEVELS]
TEXT = "--source {corpus}/valid.jsonl.xz --batches 128x1024 --compile --energy"
PASSES = 3 * [f"twell measure model {{out}}/runs/{LEVELS[2]} {TEXT} {PAPERS}"]
MEASURED["trained"] = [training(LEVELS[2])[0], *PASSES]


def commands_of(name: str) -> list[str]:
    """Return the commands of a part."""
    return MEASURED.get(name) or price.parts().get(name) or training(name)


def completed(command: str, given: argparse.Namespace) -> str | None:
    """Return a command with its folders, with --resume where it began; None where it is done."""
    jobs = max(2, (os.cpu_count() or 2) // len(given.gpus) - 2)
    places = {name: getattr(given, name) for name in ("out", "corpus", "tasks", "model")}
    command = command.format(jobs=jobs, gpus=len(given.gpus), **places)
    if "--out" not in command and not command.startswith("pytest"):
        command += f" --out {given.out / 'bench'}"
    out = Path(command.rpartition(" --out ")[2])
    if command.rpartition("-m ")[2].startswith(("twell train ", "twell relufy ")):
        return command + " --resume" * (out / "provenance.json").is_file()
    kept = out / "runs" / Path(command.split()[1]).name / "log.csv.xz"  # the last file of a run
    keeps = command.startswith(("study.keep ", "study.price "))
    return None if keeps and kept.is_file() else command


def run(name: str, gpus: str, given: argparse.Namespace) -> bool:
    """Run a part's commands on GPUs, "0" or "0,1"; return whether all of them succeeded."""
    log, start, code = given.out / "logs" / f"{name}.log", time.monotonic(), 0
    done = log.with_suffix(".done")
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": gpus, "PYTHONUNBUFFERED": "1"}
    for command in commands_of(name) if not done.is_file() else ():
        command = completed(command, given)
        seconds = min(LIMIT, given.until - time.monotonic())
        if code or command is None:
            continue
        if seconds <= 0:
            code = 124
            continue
        with log.open("a") as file:
            print("==", command, file=file, flush=True)
            # Interrupted at its limit, a training writes a checkpoint.
            limits = ["--foreground", "--signal=INT", f"--kill-after={STOPPING}", f"{seconds:.0f}"]
            words = ["timeout", *limits, sys.executable, "-m", *shlex.split(command)]
            output = {"stdout": file, "stderr": subprocess.STDOUT, "env": environment}
            process = subprocess.Popen(words, **output)
            RUNNING.append(process)
            code = process.wait()
    if not code:
        done.touch()
    taken = time.monotonic() - start
    print(f"{name:14} GPU {gpus}  {taken:5.0f} s  exit {code}, {log}", flush=True)
    return not code


def run_all(names: list[str], places: list[str], given: argparse.Namespace) -> bool:
    """Run parts, one at a time in each place, a GPU or several; return whether all succeeded."""
    free = queue.SimpleQueue()
    for gpus in places:
        free.put(gpus)

    def work(name: str) -> bool:
        gpus = free.get()
        try:
            return run(name, gpus, given)
        finally:
            free.put(gpus)

    with ThreadPoolExecutor(len(places)) as pool:
        try:
            return all(list(pool.map(work, names)))
        except BaseException:
            given.until = float("-inf")  # after an interruption nothing begins any more
            raise


def interrupt(*_: object) -> None:
    """Interrupt the commands, so that trainings write checkpoints, and then the recorder."""
    for process in RUNNING:
        process.send_signal(signal.SIGINT)
    sys.exit(143)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", metavar="PART")
    parser.add_argument("--out", type=Path, default=Path("build/record"), help="rows, runs, logs")
    parser.add_argument("--corpus", type=Path, default=Path("corpus"), help="text of trainings")
    parser.add_argument("--tasks", type=Path, default=Path("corpus"), help="items of study.keep")
    parser.add_argument("--model", type=Path, default=Path("smollm2"), help="which relufy changes")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="end by then")
    parser.add_argument("--gpus", type=lambda text: text.split(","), default=["0"])
    given = parser.parse_args()
    recorded = sorted(path.parent.name for path in RECORDED.glob("*/config.yaml"))
    known = [*MEASURED, *price.parts(), *recorded]
    if not given.parts:
        for name in MEASURED:
            print(f"{name}:", *commands_of(name), sep="\n    python -m ")
        return
    named = [
        [part] if part.partition(":")[0] in known else fnmatch.filter(known, part)
        for part in given.parts
    ]
    if not all(named):
        parser.error(f"no part fits {given.parts[named.index([])]!r}; there are {', '.join(known)}")
    names = list(dict.fromkeys(name for some in named for name in some))
    spread = [name for name in names if commands_of(name)[0].startswith(LAUNCHER)]
    if spread and len(given.gpus) < 2:
        parser.error(f"{', '.join(spread)} need several --gpus, such as 0,1")
    (given.out / "logs").mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, interrupt)
    # In the background a shell lets commands ignore SIGINT, and so would theirs.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    given.until = time.monotonic() + given.seconds - STOPPING
    succeeded = run_all([name for name in names if name not in spread], given.gpus, given)
    succeeded &= run_all(spread, [",".join(given.gpus)], given)
    raise SystemExit(not succeeded)


if __name__ == "__main__":
    main()
