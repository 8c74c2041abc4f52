"""`twell runs` and `twell info`"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from twell.cli.common import OUTPUT, RUNS, argument, option

BEGIN = "<!-- runs: python -m twell runs data/runs --out data/README.md -->"
END = "<!-- end of runs -->"
COLUMNS = "run,parameters,tokens,L1,seed,validation (nats),active,dead,tokens/s,device,weights"


def runs(
    folder: Annotated[Path, argument("DIR", "The folder of runs.")] = RUNS,
    pattern: Annotated[str, option("Only runs whose names fit.")] = "*",
    out: Annotated[
        Path | None, option("A Markdown file: replace its list.", OUTPUT, metavar="FILE")
    ] = None,
) -> None:
    """List runs, also in folders below: size, tokens, L1, loss, activity, speed and weights."""
    from twell import results, tables

    runs, log = results.load_runs(folder, pattern)
    paths = dict(zip(runs["run"], runs["path"], strict=True))
    rows = [COLUMNS.split(",")]
    for run in tables.list_runs(runs, log).itertuples():
        cells = [
            f"`{run.run}`" + ("" if run.complete else " (not complete)"),
            f"{run.parameters / 1e6:.1f} M",
            f"{run.tokens / 1e6:.4g} M",
            tables.level_name(run.l1_coefficient),
            str(run.seed),
            f"{run.cross_entropy:.3f}",
            f"{_short(run.active, 3)} ({_short(100 * run.active_fraction, 2)}%)",
            f"{_short(100 * run.dead_fraction, 2)}%",
            f"{run.tokens_per_second:,.0f}",
            run.device,
            _weights(Path(paths[run.run])),
        ]
        rows.append(cells)
    table = tables.markdown(rows, left=(0, 9, 10))  # the columns of words
    if out is None:
        print(table)
        return
    results.write_between(out, BEGIN, END, f"\n{table}\n")


def _short(value: float, digits: int) -> str:
    """Return a number with few digits: 100 as 100, not as 1e+02."""
    text = f"{value:.{digits}g}"
    return f"{value:,.0f}" if float(text) >= 100 else text


def _weights(run: Path) -> str:
    if (run / "model" / "config.json").is_file():
        return "model"
    return "checkpoint" if any(run.glob("checkpoint*")) else "–"


def info() -> None:
    """Show versions, devices, and which backends can be used here."""
    import torch

    from twell import __version__, results
    from twell.sparse import layer

    versions = ", ".join(f"{name} {version}" for name, version in results.versions().items())
    print(f"twell {__version__}, commit {results.commit()}")
    print(f"versions: {versions}")
    print(f"device: {results.device_name()}")
    for number in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(number)
        memory = f"{gpu.total_memory / 2**30:.0f} GiB"
        print(f"  cuda:{number}: {gpu.name}, {memory}, sm_{gpu.major}{gpu.minor}")
    for backend, reason in layer.backend_status().items():
        print(f"backend {backend}: {'on' if reason is None else 'off: ' + reason}")


COMMANDS = {runs: "runs data/runs --pattern '85m-50m-*'", info: "info"}
