"""`twell trace`"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from twell.cli.common import (
    BUILD,
    INPUT,
    OUTPUT,
    File,
    Model,
    Text,
    flag,
    option,
    prepare_out,
    read_text,
    say,
)

EXAMPLE = 'twell trace runs/quick --text "The bridge was built in 1862."'
AGGREGATE = "With --aggregate"
VALID = "The run's validation tokens: of one evaluation, or all."
COUNT = "Count over many tokens, with examples, in under 2 MB instead."
TOKENS = "Number of tokens; default: all, at most 2^20."
MAX_BYTES = "Largest size of the file; default: 2000000."
OUT = f"The .npz file to write; default: {BUILD}/traces/MODEL.npz, or MODEL-aggregate.npz."


def command(
    model: Model,
    text: Text = None,
    file: File = None,
    valid: Annotated[bool, flag("--valid", VALID, INPUT)] = False,
    aggregate: Annotated[bool, flag("--aggregate", COUNT)] = False,
    tokens: Annotated[int | None, option(TOKENS, AGGREGATE)] = None,
    max_bytes: Annotated[int | None, option(MAX_BYTES, AGGREGATE)] = None,
    out: Annotated[Path | None, option(OUT, OUTPUT, metavar="FILE")] = None,
) -> None:
    """Record which neurons fire for which token."""
    if not aggregate and (tokens, max_bytes) != (None, None):
        raise ValueError("--tokens and --max-bytes belong to --aggregate; a trace keeps everything")
    if valid and (text, file) != (None, None):
        raise ValueError("--valid has its own text; leave out --text and --file")
    from twell import results

    name = results.model_name(model) + ("-aggregate" if aggregate else "")
    out = out or BUILD / "traces" / f"{name}.npz"
    read = None if valid else read_text(text, file)
    prepare_out(out, ".npz")

    from twell import trace

    if aggregate:
        limit = trace.MAX_BYTES if max_bytes is None else max_bytes
        result = trace.aggregate_run(model, read, tokens, max_bytes=limit, say=say)
    elif valid:
        result = trace.trace_validation(model)
    else:
        result = trace.trace_text(*trace.load_with_tokenizer(model), read)
    result.save(out)
    size = out.stat().st_size
    print(f"{out}: {result.num_tokens} tokens, {result.num_layers} layers, {size} bytes")
    for name, wanted in result.meta.get("reduced", {}).items():
        kept, limit = result.meta["kept"][name], result.meta["max_bytes"]
        print(f"to stay under {limit} bytes: {name} {kept} instead of {wanted}")
