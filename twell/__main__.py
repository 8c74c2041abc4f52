"""The command line: `python -m twell train | trace`, each with --help."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path


def main(arguments: list[str] | None = None) -> int:
    """Run one command; a mistake of the user's is one line on standard error and exit status 2."""
    parser = argparse.ArgumentParser(prog="twell", description="Sparse feed-forward layers for language models.")
    commands = parser.add_subparsers(dest="command", required=True)

    train = commands.add_parser("train", help="train a model with the L1 term")
    train.add_argument("config", help="a YAML file, or the name of one of the package's configurations")
    train.add_argument("overrides", nargs="*", metavar="key=value", help="fields to change, e.g. l1_coefficient=3e-4")
    train.add_argument("--out", type=Path, help="the run's folder (default: data/runs/CONFIG-l1-COEFFICIENT-seed-SEED)")
    train.add_argument("--overwrite", action="store_true", help="replace a run that is already there")

    trace = commands.add_parser("trace", help="record which neurons fire for which token")
    trace.add_argument("run", type=Path, help="a run folder, or the folder of a model with its tokenizer")
    what = trace.add_mutually_exclusive_group(required=True)
    what.add_argument("--text", help="the text itself")
    what.add_argument("--file", type=Path, help="a UTF-8 text file")
    what.add_argument("--valid", action="store_true", help="the validation tokens of the run's last evaluation")
    trace.add_argument("--out", type=Path, required=True, help="the .npz file to write")

    options = parser.parse_args(arguments)
    _quiet_libraries()
    try:
        globals()[f"_{options.command}"](options)
    except (ValueError, OSError, KeyError, ImportError, RuntimeError, ArithmeticError) as error:
        message = error.args[0] if isinstance(error, KeyError) and error.args else error
        print(f"twell {options.command}: {message}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"twell {options.command}: interrupted", file=sys.stderr)
        return 130
    return 0


def _quiet_libraries() -> None:
    import transformers

    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()


def _train(options: argparse.Namespace) -> None:
    from twell.train import TrainConfig, train

    config = TrainConfig.load(options.config, options.overrides)
    name = f"{Path(options.config).stem}-l1-{config.l1_coefficient:g}-seed-{config.seed}"
    train(config, options.out or Path("data") / "runs" / name, overwrite=options.overwrite)


def _trace(options: argparse.Namespace) -> None:
    from twell import trace

    if options.valid:
        found = trace.trace_validation(options.run)
    else:
        text = options.text if options.text is not None else options.file.read_text(encoding="utf-8")
        found = trace.trace_text(*trace.load_model(options.run), text)
    found.save(options.out)
    print(f"{options.out}: {found.num_tokens} tokens, {found.num_layers} layers, {len(found.indices)} active neurons")


if __name__ == "__main__":
    sys.exit(main())
