"""Rows and runs, each with where it came from: recorded ones in data/, yours in runs/ and build/.

A number without its provenance is not kept: every run folder and every row carries the device,
versions, commit and command that made it. This module is a leaf; it imports nothing of ours.

A run folder holds
    config.yaml       every field of the configuration, defaults included
    provenance.json   device, versions, commit, command and date of the last start; `starts`: the same of
                      every start, with the step that it went on from; the SHA-256 of the tokens; whether the
                      run is complete
    log.csv           tidy: step, tokens, split, layer, metric, value (layer empty for the whole model); in a run that is
                      kept, compressed: log.csv.xz
    model/            weights and tokenizer in Hugging Face layout (not tracked by git)
and, until it is complete, the files of train/checkpoint.py and train/lock.py. No other file in it is ever deleted.
"""

from __future__ import annotations

import datetime
import functools
import hashlib
import importlib.metadata
import json
import lzma
import os
import platform
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

import filelock
import pandas as pd
import yaml

LOG_COLUMNS = ["step", "tokens", "split", "layer", "metric", "value"]
PROVENANCE_FIELDS = ["device", "versions", "commit", "command"]
LOCK = "train.lock"
CHECKPOINTS = "checkpoint.pt", "checkpoint-previous.pt"  # of older versions
# Only files of these names are replaced or deleted in a run's folder.
RUN_FILES = (
    "config.yaml",
    "provenance.json",
    "log.csv",
    "log.csv.xz",
    *CHECKPOINTS,
    "aggregate.npz",
)
MODEL_FILES = (
    *("config.json", "generation_config.json", "model.safetensors", "model-*-of-*.safetensors"),
    *(
        "model.safetensors.index.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "special_tokens_map.json",
    ),
    "calibration.json",
)
# The files among them that only a training or an export writes.
KEPT_FILES = {*RUN_FILES, *MODEL_FILES} - {"aggregate.npz", "calibration.json"}
UNFINISHED = ".part"  # a file that is being written; a killed process leaves it behind


def root(start: str | Path | None = None) -> Path:
    """Return the repository's root: the nearest folder at or above `start` that holds data/paper.yaml.

    Raises FileNotFoundError when there is none, naming where it looked.
    """
    start = Path(start or Path.cwd()).resolve()
    for folder in (start, *start.parents):
        if (folder / "data" / "paper.yaml").is_file():
            return folder
    raise FileNotFoundError(
        f"no data/paper.yaml in {start} or above; run this inside a clone of the repository"
    )


def is_recorded(path: str | Path) -> bool:
    """Return whether a path lies in the data folder of a clone of the repository."""
    folders = [Path(path).resolve(), *Path(path).resolve().parents]
    return any(folder.name == "data" and (folder / "paper.yaml").is_file() for folder in folders)


def paper(metric: str | None = None, **filters) -> pd.DataFrame:
    """Return the numbers that the paper prints, one a row, optionally those of one metric.

    `filters` keep the rows whose column equals the given value, e.g. `source="Table 3"`, `l1=2e-5`.
    Raises KeyError for an unknown column.
    """
    with open(root() / "data" / "paper.yaml", encoding="utf-8") as file:
        rows = pd.DataFrame(yaml.safe_load(file)["values"])
    if metric is not None:
        filters["metric"] = metric
    for column, value in filters.items():
        if column not in rows:
            raise KeyError(
                f"the paper's table has no column {column!r}; it has {', '.join(rows.columns)}"
            )
        rows = rows[rows[column] == value]
    return rows.reset_index(drop=True)


# --- provenance -------------------------------------------------------------------------------


def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that decide results."""
    found = {"python": platform.python_version()}
    for package in (
        "torch",
        "triton",
        "transformers",
        "accelerate",
        "tokenizers",
        "numpy",
        "pandas",
        "matplotlib",
    ):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


@functools.cache
def device_name(kind: str | None = None) -> str:
    """Return the name of the GPU that torch sees, else (or for the kind "cpu") of the processor with its core count."""
    import torch

    if kind != "cpu" and torch.cuda.is_available():
        return torch.cuda.get_device_name()
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            model = next(
                line.split(":", 1)[1].strip() for line in file if line.startswith("model name")
            )
    except (OSError, StopIteration):
        model = platform.processor() or platform.machine()
    return f"{model} CPU, {os.cpu_count()} cores"


def _git(*arguments: str) -> str | None:
    """Output of a git command in this repository, or None where there is no repository or no git."""
    try:
        done = subprocess.run(
            ["git", *arguments],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()


def commit() -> str:
    """Return the commit of this code, with "-dirty" when twell/ or kernels/ differ from it.

    The environment's TWELL_COMMIT, where it is set, says it instead, for a copy of the files elsewhere; outside a git
    checkout without it, it is "unknown".
    """
    if told := os.environ.get("TWELL_COMMIT"):
        return told
    head = _git("rev-parse", "HEAD")
    if head is None:
        return "unknown"
    return head + ("-dirty" if _git("status", "--porcelain", "--", ":/twell", ":/kernels") else "")


def source_commit(paths: Iterable[str | Path]) -> str:
    """Return the last commit that changed any of `paths`, with "-dirty" when they differ from it."""
    paths = [str(Path(path).resolve()) for path in paths]
    last = _git("log", "-1", "--format=%H", "--", *paths)
    if not last:
        return os.environ.get("TWELL_COMMIT", "unknown")
    return last + ("-dirty" if _git("status", "--porcelain", "--", *paths) else "")


def provenance(command: str | None = None) -> dict:
    """Return what has to stand beside a result: device, versions, commit, command and time."""
    return {
        "device": device_name(),
        "versions": versions(),
        "commit": commit(),
        "command": command or shlex.join([*_launcher(), "-m", "twell", *sys.argv[1:]]),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def _launcher() -> list[str]:
    """What started Python: Accelerate's launcher, with the options that decide how training is spread, or nothing."""
    if (
        "ACCELERATE_MIXED_PRECISION" not in os.environ
    ):  # the launcher always sets it; WORLD_SIZE may be a cluster's
        return ["python"]
    sharded = os.environ.get("ACCELERATE_USE_FSDP", "").lower() == "true"
    fsdp = ["--use_fsdp", "--fsdp_version", os.environ.get("FSDP_VERSION", "1")] if sharded else []
    return ["accelerate", "launch", *fsdp, "--num_processes", os.environ.get("WORLD_SIZE", "1")]


def file_hash(path: str | Path) -> str:
    """Return the SHA-256 of a file, in hex."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_atomically(path: str | Path, data: str | bytes) -> None:
    """Write a file so that at any moment it is either the old one or the new one, whole."""
    path, temporary = Path(path), None
    data = data.encode() if isinstance(data, str) else data
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(
            dir=path.parent, prefix=f".{path.name}.", suffix=UNFINISHED
        )
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException as error:
        if temporary is not None:
            os.unlink(temporary)
        if isinstance(error, OSError):  # the system names no file when the disk is full
            raise OSError(error.errno, f"{path} could not be written: {error.strerror}") from None
        raise


# --- rows and runs ---------------------------------------------------------------------------------------


def append_rows(path: str | Path, rows: list[dict], origin: dict) -> None:
    """Append measured rows to a CSV, each with device, versions, commit, command and date.

    Raises ValueError when the provenance is not whole, or when the file has other columns.
    """
    _check_provenance(origin)
    where = {field: origin[field] for field in ("device", "commit", "command", "date")}
    where["versions"] = "; ".join(
        f"{name} {version}" for name, version in origin["versions"].items()
    )
    table = pd.DataFrame([row | where for row in rows])
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with filelock.FileLock(
        path.with_name(f".{path.name}.lock")
    ):  # two processes may append at once
        if path.is_file():
            before = pd.read_csv(path)
            if list(before.columns) != list(table.columns):
                raise ValueError(
                    f"{path} has the columns {list(before.columns)}; these rows have {list(table.columns)}"
                )
            table = pd.concat([before, table], ignore_index=True)
        write_atomically(path, table.to_csv(index=False, lineterminator="\n"))


def _check_provenance(origin: dict) -> None:
    missing = [field for field in PROVENANCE_FIELDS if not origin.get(field)]
    if missing:
        raise ValueError(
            f"provenance without {', '.join(missing)}: a result is only kept with where it came from"
        )


def write_run(folder: str | Path, config: dict, origin: dict) -> None:
    """Write a run's configuration and provenance. Raises ValueError when the provenance is not whole.

    The provenance comes first: a folder with nothing but a config.yaml may be somebody's.
    """
    _check_provenance(origin)
    folder = Path(folder)
    write_atomically(folder / "provenance.json", json.dumps(origin, indent=2) + "\n")
    write_atomically(folder / "config.yaml", yaml.safe_dump(config, sort_keys=False))


def run_state(folder: str | Path) -> str:
    """Return what a folder holds: "nothing" (hidden files aside), a "run", the "beginning" of one, or something "else".

    A run has config.yaml, provenance.json and a log. A process that was killed while it wrote these leaves a beginning.
    """
    folder = Path(folder)
    names = (
        {path.name for path in folder.iterdir() if not path.name.startswith(".")}
        if folder.is_dir()
        else set()
    )
    names.discard(LOCK)
    if not names:
        return "nothing"
    if not missing_of_run(folder):
        return "run"
    return (
        "beginning"
        if names in ({"provenance.json"}, {"config.yaml", "provenance.json"})
        else "else"
    )


def missing_of_run(folder: str | Path) -> list[str]:
    """Return the files of a run that this folder lacks."""
    paths = [Path(folder) / "config.yaml", Path(folder) / "provenance.json", log_path(folder)]
    return [path.name for path in paths if not path.is_file()]


def remove_run(folder: str | Path) -> None:
    """Delete a run's files by their names, and its unfinished files. All other files stay."""
    folder = Path(folder)
    remove_unfinished(folder)
    for path in [folder / name for name in RUN_FILES]:
        path.unlink(missing_ok=True)
    for pattern in MODEL_FILES:
        for path in (folder / "model").glob(pattern):
            path.unlink()
    model = folder / "model"
    if model.is_dir() and not model.is_symlink() and not any(model.iterdir()):
        model.rmdir()


def remove_unfinished(folder: str | Path) -> None:
    """Delete the unfinished files of a run, which a killed process left."""
    for name in RUN_FILES:
        for path in Path(folder).glob(f".{name}.????????{UNFINISHED}"):
            path.unlink()


def load_provenance(folder: str | Path) -> dict:
    """Read a run's provenance. `starts` has an entry for each start; a file of an older version gets one entry.

    Raises ValueError naming the file when it cannot be read.
    """
    path = Path(folder) / "provenance.json"
    try:
        origin = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}; put back a copy of it") from None
    if not isinstance(origin, dict):
        raise ValueError(
            f"{path} is no provenance: expected a JSON object, not {type(origin).__name__}"
        )
    missing = [field for field in PROVENANCE_FIELDS if field not in origin]
    if missing:
        raise ValueError(f"{path} has no {', '.join(missing)}; put back a copy of it")
    starts = origin.get("starts", [])
    if not (isinstance(starts, list) and all(isinstance(start, dict) for start in starts)):
        raise ValueError(
            f"{path}: starts is {starts!r}; expected a list of JSON objects: put back a copy of it"
        )
    only = {field: origin.get(field) for field in (*PROVENANCE_FIELDS, "date")}
    return origin | {"starts": origin.get("starts") or [only]}


def kept(path: str | Path) -> Path:
    """Return the file, or where it is not there its compressed form, which has .xz behind its name."""
    path = Path(path)
    packed = path.with_name(f"{path.name}.xz")
    return packed if packed.is_file() and not path.is_file() else path


def log_path(folder: str | Path) -> Path:
    """Return the log in a run's folder: log.csv, or log.csv.xz where that alone is there."""
    return kept(Path(folder) / "log.csv")


def load_log(path: str | Path) -> pd.DataFrame:
    """Read one run's log. Raises ValueError when it is not such a file, naming it."""
    try:
        log = pd.read_csv(path, dtype={"layer": "Int64", "value": "float64"})
    except (ValueError, UnicodeDecodeError, lzma.LZMAError, EOFError) as error:
        raise ValueError(f"{path} is not a run's log: {error}; put back a copy of it") from None
    if list(log.columns) != LOG_COLUMNS:
        raise ValueError(
            f"{path} has the columns {list(log.columns)}; a run's log has {LOG_COLUMNS}: put back a copy of it"
        )
    return log


def load_run(folder: str | Path) -> tuple[dict, pd.DataFrame]:
    """Read one run folder: its configuration with its provenance as one flat dict, and its log.

    Raises FileNotFoundError or ValueError naming the file that is missing or not whole.
    """
    folder = Path(folder)
    try:
        config = yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))
        origin = load_provenance(folder)
        log = load_log(log_path(folder))
    except FileNotFoundError as error:
        raise FileNotFoundError(
            f"{folder} is not a run: it has no {Path(error.filename).name}"
        ) from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(
            f"{folder / 'config.yaml'} is not YAML: {error}; put back a copy of it"
        ) from None
    if not isinstance(config, dict):
        raise ValueError(
            f"{folder / 'config.yaml'} is no configuration: expected lines of the form key: value"
        )
    if isinstance(level := config.get("l1_coefficient"), list):
        raise ValueError(
            f"{folder / 'config.yaml'}: l1_coefficient is {level}; it has to be one number"
        )
    row = {"run": folder.name, "path": str(folder), "complete": origin.get("complete", False)}
    row |= config | {field: origin.get(field) for field in (*PROVENANCE_FIELDS, "parameters")}
    return row, log


def load_runs(
    folder: str | Path, pattern: str = "*", required: bool = True
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Read every run in `folder` whose name fits `pattern`, or one of several with spaces between ("depth-* 85m-100m-*").

    Returns (runs, log): one row a run with its configuration and provenance, and all logs as one
    tidy table with the column `run` in front. Where there is no run, raises FileNotFoundError, or returns two
    tables without rows if none is `required`.
    """
    try:
        folders = sorted(
            {
                path.parent
                for one in pattern.split()
                for path in Path(folder).glob(f"{one}/config.yaml")
            }
        )
    except (ValueError, NotImplementedError) as error:
        raise ValueError(
            f"the pattern {pattern!r} cannot be used: {error}; give names below {folder}"
        ) from None
    if not folders and not required:
        nothing = pd.DataFrame(columns=["run", "path", "complete", "device"]).astype(
            {"complete": bool}
        )
        return nothing, pd.DataFrame(columns=["run", *LOG_COLUMNS])
    if not folders:
        named = "" if pattern == "*" else f" that fits {pattern!r}"
        raise FileNotFoundError(
            f"no run{named} in {folder}: a run is a folder with config.yaml, provenance.json and log.csv"
        )
    rows, logs = [], []
    for path in folders:
        row, log = load_run(path)
        rows.append(row)
        log.insert(0, "run", path.name)
        logs.append(log)
    return pd.DataFrame(rows), pd.concat(logs, ignore_index=True)


# --- evaluations ------------------------------------------------------------------------------------------

EVALUATION_FIELDS = ["model", "backend", "tasks", "lm_eval"]


def model_name(path: str | Path) -> str:
    """Return what a model is called in results: the name of its run or folder, or its name on the hub without owner."""
    folder = Path(path)
    folder = folder.resolve() if folder.is_dir() else folder
    return folder.parent.name if folder.name == "model" else folder.name


def write_evaluation(path: str | Path, record: dict) -> None:
    """Write what `evaluate.run` returned as JSON. Raises ValueError when the provenance is not whole."""
    _check_provenance(record)
    write_atomically(path, json.dumps(record, indent=1, ensure_ascii=False) + "\n")
    Path(f"{path}.xz").unlink(missing_ok=True)


def evaluation_paths(folder: str | Path) -> list[Path]:
    """Return the evaluations in `folder`, NAME.json or, where that alone is there, NAME.json.xz, by name.

    Other files are passed over, hidden ones too: a killed process may leave `.NAME.json.` and a few letters.
    """
    paths = [
        path
        for ending in ("json", "json.xz")
        for path in Path(folder).glob(f"*.{ending}")
        if path.is_file()
    ]
    names = {path.name.removesuffix(".xz") for path in paths if not path.name.startswith(".")}
    return [kept(Path(folder) / name) for name in sorted(names)]


def load_evaluations(folder: str | Path) -> list[dict]:
    """Read every evaluation in `folder`, by name; an empty list where there is none. Raises ValueError naming a file that is not one."""
    found = []
    for path in evaluation_paths(folder):
        try:
            data = path.read_bytes()
            record = json.loads(lzma.decompress(data) if path.suffix == ".xz" else data)
            missing = [
                field for field in (*EVALUATION_FIELDS, *PROVENANCE_FIELDS) if not record.get(field)
            ]
        except (ValueError, AttributeError, lzma.LZMAError):
            raise ValueError(
                f"{path} is not an evaluation: `twell evaluate` writes such files"
            ) from None
        if missing:
            raise ValueError(f"{path} is not an evaluation: it has no {', '.join(missing)}")
        found.append(record)
    return found
