"""Trainings that are still to record, as parts of `study.record`, in order of value.

They are further seeds of every comparison, schedules of 25 to 300 M tokens, the flagship without L1
and with, on 200 M tokens on a GPU each and on 300 M tokens on all GPUs, the 99 M model with dense
layers and with sparse ones, and one training on one GPU and on two. Recorded runs have no weights,
so other models have to be traced and evaluated. A run has the fields of the recorded runs of its
comparison. Each part trains, or resumes, and then `study.keep` writes its small files; two are
measured at last. Runs in data/runs are left out. `python -m study.trainings` lists the rest.
"""

from __future__ import annotations

from pathlib import Path

RECORDED = Path(__file__).parents[1] / "data" / "runs"
TEXT = (
    "source=corpus/train valid_source=corpus/valid.jsonl.xz compile=true checkpoint_every=0 "
    "parse_special=true tokenizer=corpus/tokenizer-"
)
SMALL = (
    f"85m {TEXT}16k batch_tokens=32768 micro_batch=32 log_every=32 valid_every=512 "
    "learning_rate=1e-3 tokens={tokens} l1_coefficient={l1}"
)
WIDE = (
    f"0.5b {TEXT}16k vocab_size=16384 context=1024 batch_tokens=131072 micro_batch=64 log_every=8 "
    "valid_every=256 valid_tokens=1048576 warmup_steps=100 learning_rate=5e-4 "
    "tokens={tokens} l1_coefficient={l1}"
)
SHIPS = (
    f"5m {TEXT}4k micro_batch=128 log_every=64 valid_every=2048 "
    "precision=bf16 dead_window_tokens=4194304 learning_rate=3e-3 tokens={tokens} "
    "l1_coefficient={l1}"
)
PAIR = (
    f"171m {TEXT}16k batch_tokens=131072 micro_batch=32 log_every=8 valid_every=128 "
    "learning_rate=1e-3 backend=triton tokens={tokens} l1_coefficient={l1}"
)
# The second half of the steps, of 32 sequences, is compared with steps of imposed activity, of 64.
STEP = "batch_tokens=32768 micro_batch=64"
FEWER_STEPS = "batch_tokens=524288 log_every=4 valid_every=40 warmup_steps=20"
LAUNCHER = "accelerate.commands.launch"
LAUNCH = f"{LAUNCHER} --main_process_port 0 --mixed_precision bf16 --num_processes {{gpus}}"
# Groups whose runs take all GPUs, four and two, and how much faster these were than one.
ALL_GPUS = {"flagship-300m": 3.7, "two-gpus": 1.8}
TIMED = "flagship", "step", "one-gpu", *ALL_GPUS  # their speed is in a claim
WARM, WIDER = "l1_zero_steps=254 l1_warmup_steps=254", "gated=false intermediate_size=3168"

Row = tuple[str, str, str, str, str, str]  # name, configuration, tokens, L1, other fields, seeds
GROUPS: dict[str, list[Row]] = {  # by name of the group
    "choices": [
        ("85m-50m-l1-6e-4-warmup", SMALL, "5e7", "6e-4", WARM, "012"),
        ("85m-50m-nongated-l1-6e-4", SMALL, "5e7", "6e-4", WIDER, "012"),
        ("85m-50m-nongated-l1-0", SMALL, "5e7", "0", WIDER, "012"),
        ("85m-50m-silu-l1-0", SMALL, "5e7", "0", "activation=silu", "012"),
        ("85m-50m-l1-6e-4-reinit", SMALL, "5e7", "6e-4", "reinit=0.1", "012"),
        ("85m-50m-l1-6e-4-balance", SMALL, "5e7", "6e-4", "balance_every=10", "012"),
        ("85m-50m-l1-1.5e-3-balance", SMALL, "5e7", "1.5e-3", "balance_every=10", "012"),
        *((f"85m-50m-l1-{l1}", SMALL, "5e7", l1, "", "012") for l1 in ("1.5e-3", "1.5e-4")),
    ],
    "sizes": [
        (f"depth-{layers}-l1-{l1}", SMALL, tokens, l1, f"num_layers={layers}", "012")
        for layers, tokens in ((2, "1.67e7"), (4, "3.33e7"), (8, "6.67e7"))
        for l1 in ("0", "6e-4")
    ],
    # Seed 0 is recorded without weights; seeds 1 to 3 make three traced models a level.
    "tokens-100m": [
        (f"85m-100m-l1-{l1}", SMALL, "1e8", l1, "", "0123") for l1 in ("6e-4", "0", "1.5e-4")
    ],
    "tokens-25m": [
        (f"85m-25m-l1-{l1}", SMALL, "2.5e7", l1, "", "012") for l1 in ("6e-4", "0", "1.5e-4")
    ],
    "tokens-200m": [
        (f"85m-200m-l1-{l1}", SMALL, "2e8", l1, "", "0") for l1 in ("0", "6e-4", "1.5e-4")
    ],
    "tokens-300m": [
        (f"85m-300m-l1-{l1}", SMALL, "3e8", l1, "", "0") for l1 in ("0", "6e-4", "1.5e-4")
    ],
    "levels-seeds": [
        (f"85m-50m-l1-{l1}", SMALL, "5e7", l1, "", "012") for l1 in ("5e-3", "3e-4", "6e-5", "2e-5")
    ],
    "rates": [
        (f"lr-{rate}-l1-{l1}", SMALL, "5e7", l1, f"learning_rate={rate}", "12")
        for rate, l1 in (("2e-3", "0"), ("2e-3", "3e-4"), ("5e-4", "0"))
    ],
    "ships": [(f"5m-500m-l1-{l1}", SHIPS, "5e8", l1, "", "012") for l1 in ("1.5e-3", "0")],
    "flagship": [
        ("flagship-200m-l1-0", WIDE, "2e8", "0", "backend=dense", "0"),
        ("flagship-200m-l1-6e-4", WIDE, "2e8", "6e-4", "backend=auto", "0"),
        # At 6e-4 the loss ends 2.2% higher, and dense is there sooner: not so at a lower level?
        ("flagship-200m-l1-1.5e-4", WIDE, "2e8", "1.5e-4", "backend=auto", "0"),
    ],
    "flagship-300m": [
        (f"flagship-300m-l1-{l1}", WIDE, "3e8", l1, f"backend={backend} micro_batch=32", "0")
        for l1, backend in (("0", "dense"), ("6e-4", "auto"))
    ],
    "step": [
        (f"step-l1-6e-4-{backend}", SMALL, "5e7", "6e-4", f"backend={backend} {STEP}", "012")
        for backend in ("dense", "auto")
    ],
    "one-gpu": [
        ("171m-30m-1-gpu", PAIR, "3e7", "6e-4", "", "12"),
        ("171m-40m-1-gpu", PAIR, "4e7", "6e-4", FEWER_STEPS, "12"),
    ],
    "two-gpus": [
        ("171m-30m-2-gpus", PAIR, "3e7", "6e-4", "", "12"),
        ("171m-40m-2-gpus", PAIR, "4e7", "6e-4", FEWER_STEPS, "12"),
    ],
}
TOKENS_A_SECOND = {
    "0.5b": 180e3,
    "171m": 3.3e5,
    "5m": 3e6,
    "depth-2": 1.5e6,
    "depth-4": 1.1e6,
    "depth-8": 7e5,
}
START, WIDE_START = 80, 160  # seconds of start, compilation and `study.keep`, on an H100
# Models whose weights stay, for their speed is measured beside that of imposed activity.
BESIDE = (
    "twell measure model {{out}}/runs/{} --source {{corpus}}/valid.jsonl.xz {} --compile --alike "
    "--out {{out}}/bench/trained"
)
MEASURED = {
    "flagship-200m-l1-6e-4": "--batches 64x1024 --decode 1,32",
    "85m-100m-l1-6e-4-seed-1": "--batches 128x512 --decode 1,32 --context 256",
}
MEASURING = 180  # seconds; a guess


def runs(group: str) -> dict[str, tuple[str, float]]:
    """Return the command of each run of a group, and the seconds that an H100 may take, by name."""
    result = {}
    for name, fields, tokens, l1, others, seeds in GROUPS[group]:
        chosen = fields.format(tokens=tokens, l1=l1)
        for changed in others.split():
            key = changed.partition("=")[0]
            chosen = " ".join(one for one in chosen.split() if not one.startswith(f"{key}="))
        speed = TOKENS_A_SECOND.get(fields.split()[0]) or TOKENS_A_SECOND.get(name[:7], 4.9e5)
        for seed in seeds:
            run = name if fields is WIDE else f"{name}-seed-{seed}"
            command = f"twell train {chosen} {others} seed={seed} --out {{out}}/runs/{run}"
            start = WIDE_START if fields is WIDE else START
            seconds = float(tokens) / speed
            if group in ALL_GPUS:
                command = f"{LAUNCH} --multi_gpu -m {command}"
                seconds /= ALL_GPUS[group]
            seconds += start + MEASURING * (run in MEASURED)
            result[run] = " ".join(command.split()), seconds
    return result


def missing(group: str, recorded: Path = RECORDED) -> list[str]:
    """Return the runs of a group that are not recorded, seed after seed."""
    names = [name for name in runs(group) if not (recorded / name / "provenance.json").is_file()]
    return sorted(names, key=lambda name: name.partition("-seed-")[2])


def parts(recorded: Path = RECORDED) -> dict[str, tuple[int, list[str]]]:
    """Return the limit in seconds and the commands of each run that is not recorded."""
    keep = "study.keep {{out}}/runs/{} --tasks {{tasks}} --out {{out}}/kept"
    measured = {name: BESIDE.format(name, options) for name, options in MEASURED.items()}
    stay = keep.replace("--tasks", "--weights --tasks")
    after = {name: [stay.format(name), command] for name, command in measured.items()}
    return {
        name: (3 * int(seconds) + 300, [command, *after.get(name, [keep.format(name)])])
        for group in GROUPS
        for name, (command, seconds) in runs(group).items()
        if name in missing(group, recorded)
    }


def main() -> None:
    """Print what is missing, and the seconds that it may take."""
    for group in GROUPS:
        seconds = runs(group)
        names = missing(group)
        print(f"{group}: {len(names)} runs, {sum(seconds[name][1] for name in names):.0f} s")
        print(*(f"    {name}  {seconds[name][1]:.0f} s" for name in names), sep="\n")


if __name__ == "__main__":
    main()
