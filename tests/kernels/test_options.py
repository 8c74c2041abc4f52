"""The table of launch options and its rules, and the headers of the kernels' files."""

from pathlib import Path

import pytest
import torch
import triton

from twell.kernels import few, options

SOURCES = {
    path: path.read_text()
    for path in Path(options.__file__).parent.rglob("*.py")
    if path.name != "options.py"
}


@pytest.mark.parametrize("block_m", [64, 128])
def test_lists_have_the_same_tiles_in_fp8(block_m):
    plain, in_fp8 = (options.OPTIONS[f"union_up_{block_m}{suffix}"] for suffix in ("", "_fp8"))
    for architecture in in_fp8:
        assert in_fp8[architecture]["BN"] == plain[architecture]["BN"]


@pytest.mark.parametrize("kernel", options.OPTIONS)
def test_architectures_have_the_same_options(kernel, monkeypatch):
    table = options.OPTIONS[kernel]
    for architecture in (*table, *options.LIKE, "sm_75"):
        monkeypatch.setattr(options, "architecture", lambda device, name=architecture: name)
        like = options.LIKE.get(architecture, architecture)
        if not {like, "default"} & set(table):
            with pytest.raises(KeyError):
                options.launch_options(kernel, torch.device("cpu"))
            continue
        given = options.launch_options(kernel, torch.device("cpu"))
        assert given == {**(table.get(like) or table["default"]), "enable_fp_fusion": True}
        assert set(given) == {*next(iter(table.values())), "enable_fp_fusion"}
        given["num_stages"] = 99
    assert all(row["num_stages"] != 99 for row in table.values())


def test_sizes_decide():
    assert options.OPTIONS["gate_tokens"]["sm_90"] == dict(
        BM=128, BN=256, BK=64, num_warps=8, num_stages=3
    )
    assert [options.row_warps(k) for k in (16, 1024, 2048, 4096, 65_536)] == [1, 1, 2, 4, 16]
    assert [options.decode_up(k)["BK"] for k in (48, 2048, 2064)] == [64, 2048, 4096]
    assert [options.decode_up(k)["num_warps"] for k in (48, 2064)] == [1, 2]


def test_few_tokens_have_options_of_their_own(monkeypatch):
    device = torch.device("cpu")
    monkeypatch.setattr(options, "architecture", lambda device: "sm_90")
    for kernel, sizes in options.BY_TOKENS.items():
        most = few.MAX_TOKENS if kernel.startswith("few") else options.TRACED_TOKENS
        assert sizes[-1] == most
        for before, size in zip([0, *sizes], sizes, strict=False):
            expected = options.launch_options(f"{kernel}{size}", device)
            assert options.options_by_tokens(kernel, before + 1, device) == expected
            assert options.options_by_tokens(kernel, size, device) == expected
    overlap = options.launches_dependents.__wrapped__  # the cache knows other devices
    monkeypatch.setattr(triton.knobs.runtime, "interpret", False)
    assert [m for m in (1, 2, 3, 4, 256, 257) if overlap(m, device)] == [1, 4, 256]
    monkeypatch.setattr(options, "architecture", lambda device: "sm_100")
    assert overlap(1, device)
    monkeypatch.setattr(options, "architecture", lambda device: "sm_89")
    assert not overlap(1, device)
