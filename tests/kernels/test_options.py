"""The table of launch options and its rules."""

import pytest
import torch
import triton

from twell.kernels import few, options

CPU = torch.device("cpu")


@pytest.mark.parametrize("kernel", options.OPTIONS)
def test_architectures_have_the_same_options(kernel, monkeypatch):
    table = options.OPTIONS[kernel]
    for architecture in (*table, *options.LIKE, "sm_75"):
        monkeypatch.setattr(options, "architecture", lambda device, name=architecture: name)
        row = table.get(options.LIKE.get(architecture, architecture), table.get("default"))
        if row is None:
            with pytest.raises(KeyError):
                options.launch_options(kernel, CPU)
            continue
        given = options.launch_options(kernel, CPU)
        assert given == {**row, "enable_fp_fusion": True}
        assert {*row} == {*next(iter(table.values()))}


def test_few_tokens_have_options_of_their_own(monkeypatch):
    monkeypatch.setattr(options, "architecture", lambda device: "sm_90")
    for kernel, sizes in options.BY_TOKENS.items():
        most = few.MAX_TOKENS if kernel.startswith("few") else options.TRACED_TOKENS
        assert sizes[-1] == most
        for before, size in zip([0, *sizes], sizes, strict=False):
            expected = options.launch_options(f"{kernel}{size}", CPU)
            assert options.options_by_tokens(kernel, before + 1, CPU) == expected
            assert options.options_by_tokens(kernel, size, CPU) == expected
    overlap = options.launches_dependents.__wrapped__  # the cache knows other devices
    monkeypatch.setattr(triton.knobs.runtime, "interpret", False)
    assert [m for m in (1, 2, 3, 4, 256, 257) if overlap(m, CPU)] == [1, 4, 256]
