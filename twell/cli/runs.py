"""`twell runs` and `twell info`"""

from __future__ import annotations

from pathlib import Path

from twell.cli.common import OUTPUT, RUNS, Form, argument, option

BEGIN = "<!-- runs: python -m twell runs data/runs --out data/README.md -->"
END = "<!-- end of runs -->"
SPARE = "device weights seed parameters dead tokens".split()


def runs(
    folder: Path = argument("DIR", "The folder of runs.", default=RUNS),
    pattern: str = option("*", "Only runs whose names fit."),
    form: Form = None,
    out: Path | None = option(None, "A Markdown file: replace its list.", OUTPUT, metavar="FILE"),
) -> None:
    """List runs, also in folders below: size, tokens, L1, loss, activity, speed and weights."""
    import pandas as pd

    from twell import results, tables
    from twell.cli.output import markdown, short, show

    runs, log = results.load_runs(folder, pattern)
    rows = tables.list_runs(runs, log).merge(runs[["run", "path"]], on="run")
    rows["weights"] = [_weights(Path(path)) for path in rows.pop("path")]
    runs = list(rows.itertuples())
    cells = pd.DataFrame(
        {
            "run": [f"`{run.run}`" + " (not complete)" * (not run.complete) for run in runs],
            "parameters": [f"{run.parameters / 1e6:.1f} M" for run in runs],
            "tokens": [f"{run.tokens / 1e6:.4g} M" for run in runs],
            "L1": [tables.level_name(run.l1_coefficient) for run in runs],
            "seed": [str(run.seed) for run in runs],
            "validation (nats)": [f"{run.cross_entropy:.3f}" for run in runs],
            "active": [
                f"{short(run.active, '.3g')} ({short(100 * run.active_fraction, '.2g')}%)"
                for run in runs
            ],
            "dead": [f"{short(100 * run.dead_fraction, '.2g')}%" for run in runs],
            "tokens/s": [f"{run.tokens_per_second:,.0f}" for run in runs],
            "device": rows["device"],
            "weights": rows["weights"].fillna("–"),
        }
    )
    if out is None:
        show(rows, cells, form, SPARE)
    else:
        results.write_between(out, BEGIN, END, f"\n{markdown(cells)}\n")


def _weights(run: Path) -> str | None:
    if (run / "model" / "config.json").is_file():
        return "model"
    return "checkpoint" if any(run.glob("checkpoint*")) else None


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
