"""Rows and runs, each with where it came from: recorded ones in data/, yours in runs/ and build/.

A number without its provenance is not kept: every run folder and every row carries the device,
versions, commit and command that made it. This module is a leaf; it imports nothing of ours.

A run folder holds
    config.yaml       every field of the configuration, defaults included
    provenance.json   device, versions, commit, command and date of the last start; `starts`: the
                      same for every start, with its first step; the SHA-256 of the tokens; whether
                      the run is complete
    log.csv           tidy: step, tokens, split, layer, metric, value (layer empty for the whole
                      model); in data/, compressed: log.csv.xz
    valid.npy         the tokens of its validations, for traces (not tracked by git)
    model/            weights and tokenizer in Hugging Face layout (not tracked by git)
    model-at-TOKENS/  the same of a copy that ended there (`decay_at`)
and, until it is complete, the files of train/checkpoint.py and train.lock. No other file in it
is ever deleted.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import hashlib
import importlib.metadata
import json
import lzma
import os
import platform
import re
import secrets
import shlex
import subprocess
import sys
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path

import filelock
import pandas as pd
import yaml

LOG_COLUMNS = ["step", "tokens", "split", "layer", "metric", "value"]
PROVENANCE_FIELDS = ["device", "versions", "commit", "command"]
EVALUATION_FIELDS = ["model", "backend", "tasks", "lm_eval"]
PACKAGES = "torch triton transformers vllm accelerate tokenizers numpy pandas matplotlib".split()
# Accelerate's variables for FSDP2 that change a training's computation, and their defaults.
FSDP_DEFAULTS = {
    "FSDP_AUTO_WRAP_POLICY": "NO_WRAP",
    "FSDP_RESHARD_AFTER_FORWARD": "true",
    "FSDP_OFFLOAD_PARAMS": "false",
    "FSDP_ACTIVATION_CHECKPOINTING": "false",
}
LOCK = "train.lock"
VALID = "valid.npy"
LIVE = "runs/live"  # where `make reproduce` trains
# Only files of these names are replaced or deleted in a run's folder.
RUN_FILES = ["config.yaml", "log.csv", "log.csv.xz", "aggregate.npz", VALID, "provenance.json"]
MODEL_FILES = """config.json generation_config.json model.safetensors model-*-of-*.safetensors
    model.safetensors.index.json tokenizer.json tokenizer_config.json special_tokens_map.json
    chat_template.jinja additional_chat_templates/*.jinja modeling_twell.py
    calibration.json""".split()
# Files that only a training or an export writes.
KEPT_FILES = {*RUN_FILES, *MODEL_FILES} - {"aggregate.npz", "calibration.json"}
# What reading a damaged file raises; zipfile has RuntimeError for encrypted members.
DAMAGES = LookupError, ValueError, TypeError, EOFError, RuntimeError, lzma.LZMAError, zlib.error
DAMAGES += yaml.YAMLError, zipfile.BadZipFile
UNFINISHED = ".part"  # a file that is being written; a killed process leaves it behind


def root() -> Path:
    """Return the repository's root: the nearest folder here or above with data/paper.yaml.

    Raises FileNotFoundError when there is none, naming where it looked.
    """
    start = Path.cwd()
    for folder in (start, *start.parents):
        if (folder / "data" / "paper.yaml").is_file():
            return folder
    raise FileNotFoundError(
        f"no data/paper.yaml in {start} or above; run this inside a clone of the repository"
    )


def is_recorded(path: str | Path) -> bool:
    """Return whether a path lies in the data folder of a clone of the repository."""
    folders = (Path(path).resolve() / "file").parents
    return any(part.name == "data" and (part / "paper.yaml").is_file() for part in folders)


def live_runs() -> str:
    """Return the folder of the runs that `make reproduce` trains, below the root.

    Raises FileNotFoundError where there are none.
    """
    if not any(root().glob(f"{LIVE}/*/config.yaml")):
        raise FileNotFoundError(f"no runs in {root() / LIVE}: `make reproduce` trains them")
    return LIVE


def paper() -> pd.DataFrame:
    """Return the numbers that the paper prints, one a row."""
    with open(root() / "data" / "paper.yaml", encoding="utf-8") as file:
        return pd.DataFrame(yaml.safe_load(file)["values"])


# --- provenance ---------------------------------------------------------------------------------


def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that decide results."""
    installed = {"python": platform.python_version()}
    for package in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            installed[package] = importlib.metadata.version(package)
    return installed


@functools.cache
def device_name(kind: str | None = None) -> str:
    """Return the name of the GPU that torch sees, else of the processor with its core count.

    The kind "cpu" asks for the processor.
    """
    import torch

    if kind != "cpu" and torch.cuda.is_available():
        return torch.cuda.get_device_name()
    name = None
    if Path("/proc/cpuinfo").is_file():
        name = re.search(r"^model name\s*:(.*)", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    model = name[1].strip() if name else platform.processor() or platform.machine()
    return f"{model} CPU, {os.cpu_count()} cores"


def _git(*arguments: str) -> str:
    """Return what a git command prints, "" where there is no repository or no git."""
    options = {"cwd": Path(__file__).parent, "capture_output": True, "text": True, "check": True}
    try:
        return subprocess.run(["git", *arguments], **options).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def commit() -> str:
    """Return the commit of this code, with "-dirty" when twell/ or kernels/ differ from it.

    The environment variable TWELL_COMMIT overrides it, for copies of the files. Outside a git
    checkout the commit is "unknown".
    """
    if given := os.environ.get("TWELL_COMMIT"):
        return given
    # An installed package may lie in another project's checkout, which does not track it.
    tracked = _git("ls-files", Path(__file__).name)
    head = _git("rev-parse", "HEAD") if tracked else ""
    changed = _git("status", "--porcelain", "--", ":/twell", ":/kernels")
    return f"{head}-dirty" if head and changed else head or "unknown"


def provenance(command: str | None = None) -> dict:
    """Return the origin of a result: device, versions, commit, command and time."""
    return {
        "device": device_name(),
        "versions": versions(),
        "commit": commit(),
        "command": command or shlex.join([*_launcher(), "-m", "twell", *sys.argv[1:]]),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def _launcher() -> list[str]:
    """Return the program that started Python: Accelerate's launcher with its options, or Python."""
    # The launcher always sets this variable; WORLD_SIZE may be a cluster's.
    if "ACCELERATE_MIXED_PRECISION" not in os.environ:
        return ["python"]
    words = ["accelerate", "launch"]
    if os.environ.get("ACCELERATE_USE_FSDP", "").lower() == "true":
        words += ["--use_fsdp", "--fsdp_version", os.environ.get("FSDP_VERSION", "1")]
        for name, default in FSDP_DEFAULTS.items():
            if (value := os.environ.get(name, default)).lower() != default.lower():
                words += [f"--{name.lower()}", value]
    processes = os.environ.get("WORLD_SIZE", "1")
    machines = int(processes) // int(os.environ.get("LOCAL_WORLD_SIZE", processes))
    words += ["--num_machines", str(machines)] if machines > 1 else []
    return [*words, "--num_processes", processes]


def _check_provenance(origin: dict) -> None:
    if missing := ", ".join(field for field in PROVENANCE_FIELDS if not origin.get(field)):
        raise ValueError(
            f"provenance without {missing}: a result is only kept with where it came from"
        )


# --- files --------------------------------------------------------------------------------------


def file_hash(path: str | Path) -> str:
    """Return the SHA-256 of a file, in hex."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextlib.contextmanager
def naming(path: str | Path) -> Iterator[None]:
    """Name the file in an OSError: for a full disk the system names none."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or error
        raise OSError(error.errno, f"{path} could not be written: {reason}") from None


def write_atomically(path: str | Path, data: str | bytes) -> None:
    """Write a file so that at any moment it is either the old one or the new one, whole."""
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}{UNFINISHED}")
    with naming(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with open(temporary, "wb") as file:
                file.write(data.encode() if isinstance(data, str) else data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)


def write_between(path: Path, begin: str, end: str, text: str) -> None:
    """Replace the text between two marks of a page. Raises ValueError where it lacks them."""
    before, first, rest = path.read_text(encoding="utf-8").partition(begin)
    _, last, after = rest.partition(end)
    if not last:
        raise ValueError(f"{path} has no place for this table: two lines, {begin} and {end}")
    write_atomically(path, before + first + text + last + after)


def kept(path: str | Path) -> Path:
    """Return the file, or its compressed form NAME.xz where only that exists."""
    path = Path(path)
    packed = path.with_name(f"{path.name}.xz")
    return packed if packed.is_file() and not path.is_file() else path


def append_rows(path: str | Path, rows: list[dict], origin: dict) -> None:
    """Append measured rows to a CSV, each with device, versions, commit, command and date.

    Raises ValueError when the provenance is not whole, or when the file has other columns.
    """
    _check_provenance(origin)
    where = {field: origin[field] for field in ("device", "commit", "command", "date")}
    where["versions"] = "; ".join(" ".join(pair) for pair in origin["versions"].items())
    table, path = pd.DataFrame([row | where for row in rows]), Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with filelock.FileLock(path.with_name(f".{path.name}.lock")):  # two processes may append
        if path.is_file():
            before = pd.read_csv(path)
            if (old := list(before.columns)) != (new := list(table.columns)):
                raise ValueError(f"{path} has the columns {old}; these rows have {new}")
            table = pd.concat([before, table], ignore_index=True)
        write_atomically(path, table.to_csv(index=False, lineterminator="\n"))


# --- runs ---------------------------------------------------------------------------------------


def write_run(folder: str | Path, config: dict, origin: dict) -> None:
    """Write a run's configuration and provenance.

    The provenance comes first: a folder with nothing but a config.yaml may be somebody's. Raises
    ValueError when the provenance is not whole.
    """
    _check_provenance(origin)
    write_atomically(Path(folder) / "provenance.json", json.dumps(origin, indent=2) + "\n")
    write_atomically(Path(folder) / "config.yaml", yaml.safe_dump(config, sort_keys=False))


def remove_run(folder: str | Path) -> None:
    """Delete a run's files by their names, and its unfinished files. All other files stay.

    Without its config.yaml it no longer resumes; with its provenance.json it still is a run.
    """
    remove_unfinished(folder)
    *files, last = [Path(folder) / name for name in RUN_FILES]
    for file in files:
        file.unlink(missing_ok=True)
    for model in (Path(folder) / "model", *Path(folder).glob("model-at-*")):
        for path in [path for pattern in MODEL_FILES for path in model.glob(pattern)]:
            path.unlink()
        for path in (model / "additional_chat_templates", model):
            with contextlib.suppress(OSError):  # absent, a link, or with files of somebody else
                path.rmdir()
    last.unlink(missing_ok=True)


def remove_unfinished(folder: str | Path) -> None:
    """Delete the unfinished files of a run, which a killed process left."""
    for name in RUN_FILES:
        for path in Path(folder).glob(f".{name}.????????{UNFINISHED}"):
            path.unlink()


@contextlib.contextmanager
def reading(path: str | Path, remedy: str = "put back a copy of it") -> Iterator[None]:
    """Name the file where it has another form than ours, and how to get one that has."""
    try:
        yield
    except DAMAGES as error:
        raise ValueError(f"{path} is damaged or of another kind, {remedy}: {error!r}") from None


def load_provenance(folder: str | Path) -> dict:
    """Read a run's provenance. Raises ValueError naming the file when it cannot be read."""
    path = Path(folder) / "provenance.json"
    with reading(path):
        origin = dict(json.loads(path.read_text(encoding="utf-8")))
        _check_provenance(origin)
        return origin | {"starts": [dict(start) for start in origin.get("starts", ())]}


def load_log(path: str | Path) -> pd.DataFrame:
    """Read one run's log. Raises ValueError when it is not such a file, naming it."""
    with reading(Path(path)):
        return pd.read_csv(path, dtype={"layer": "Int64", "value": "float64"})[LOG_COLUMNS]


def load_run(folder: str | Path) -> tuple[dict, pd.DataFrame]:
    """Read one run folder: its configuration with its provenance as one flat dict, and its log.

    Raises FileNotFoundError or ValueError naming the file that is missing or not whole.
    """
    folder = Path(folder)
    path, log = folder / "config.yaml", kept(folder / "log.csv")
    files = path, folder / "provenance.json", log
    if missing := ", ".join(file.name for file in files if not file.is_file()):
        raise FileNotFoundError(f"{folder} is not a run: it has no {missing}")
    with reading(path):
        config = dict(yaml.safe_load(path.read_text(encoding="utf-8")))
    origin = load_provenance(folder)
    row = {"run": folder.name, "path": str(folder), "complete": origin.get("complete", False)}
    row |= config | {field: origin.get(field) for field in (*PROVENANCE_FIELDS, "parameters")}
    if "teacher_sha256" in origin:
        row["teacher_sha256"] = origin["teacher_sha256"]
    return row, load_log(log)


def load_runs(
    folder: str | Path, pattern: str = "*", required: bool = True
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Read every run below `folder` whose name fits `pattern`, or one of several between spaces.

    Names are paths from `folder`; a pattern has to fit their end. Returns (runs, log): one row a
    run with its configuration and provenance, and all logs as one tidy table with the column `run`
    in front. Without any run, raises FileNotFoundError if one is `required`, and else returns two
    tables without rows.
    """
    folder = Path(folder)
    paths = sorted(
        path.parent
        for path in folder.rglob("config.yaml")
        if path.with_name("provenance.json").is_file()
        and any(path.parent.relative_to(folder).match(one) for one in pattern.split())
    )
    if not paths:
        if required:
            files = "config.yaml, provenance.json and log.csv"
            named = f"no run that fits {pattern!r} in {folder}"
            raise FileNotFoundError(f"{named}: a run is a folder with {files}")
        runs = pd.DataFrame(columns=["run", "path", "complete", "device"])
        return runs.astype({"complete": bool}), pd.DataFrame(columns=["run", *LOG_COLUMNS])
    rows, logs = zip(*map(load_run, paths), strict=True)
    names = [path.relative_to(folder).as_posix() for path in paths]
    runs = pd.DataFrame(rows).assign(run=names)
    log = pd.concat([log.assign(run=name) for log, name in zip(logs, names, strict=True)])
    return runs, log[["run", *LOG_COLUMNS]].reset_index(drop=True)


def load_kept(folder: str | Path, ending: str) -> pd.DataFrame:
    """Read the tables of `study.keep`, files RUN + ending, into one with the column run in front.

    Without such files the result has no rows.
    """
    paths = sorted(Path(folder).glob(f"[!.]*{ending}"))
    tables = [pd.read_csv(path).assign(run=path.name.removesuffix(ending)) for path in paths]
    table = pd.concat([pd.DataFrame(columns=["run"]), *tables], ignore_index=True)
    return table[["run", *table.columns.drop("run")]]


# --- evaluations --------------------------------------------------------------------------------


def model_name(path: str | Path) -> str:
    """Return a model's name in results: its run, RUN-at-TOKENS, folder, or name on the hub."""
    folder = Path(path)
    folder = folder.resolve() if folder.is_dir() else folder
    of_run = re.fullmatch(r"model(-at-\d+)?", folder.name)
    return folder.parent.name + (of_run[1] or "") if of_run else folder.name


def write_evaluation(path: str | Path, record: dict) -> None:
    """Write what `evaluate.run` returned as JSON, in place of an older one.

    Raises ValueError when the provenance is not whole.
    """
    _check_provenance(record)
    write_atomically(path, json.dumps(record, indent=1, ensure_ascii=False) + "\n")
    Path(f"{path}.xz").unlink(missing_ok=True)


def load_evaluations(folder: str | Path) -> list[dict]:
    """Read every evaluation in `folder`, by name: NAME.json or, where only that is, NAME.json.xz.

    Raises ValueError for a file that is not one. Hidden files are ignored.
    """
    paths = [*Path(folder).glob("[!.]*.json"), *Path(folder).glob("[!.]*.json.xz")]
    records = []
    for name in sorted({path.name.removesuffix(".xz") for path in paths}):
        path = kept(Path(folder) / name)
        with reading(path):
            data = path.read_bytes()
            record = json.loads(lzma.decompress(data) if path.suffix == ".xz" else data)
            missing = [f for f in (*EVALUATION_FIELDS, *PROVENANCE_FIELDS) if not record[f]]
            if missing:
                raise ValueError(f"no {', '.join(missing)}")
        records.append(record)
    return records
