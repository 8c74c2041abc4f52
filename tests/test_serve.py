"""The plugin of vLLM: saved folders against transformers, with a stub for vLLM's attention."""

import pytest
import torch
from torch.nn import functional as F

from tests.factories.models import make, stock, tokens
from tests.factories.sparse import relative, triton_here
from twell.models import quantize_
from twell.sparse import ops

pytestmark = [pytest.mark.vllm, triton_here]
PLAIN = {"mode": 0, "custom_ops": ["none"]}
TUNED = {"ffn_activity": [[64, 2.0, 9.0]] * 3}
FORCED = {"ffn_backend": "triton"}
MODELS = {
    "tuned": lambda: make(ffn_backend="auto", **TUNED),
    "threshold": lambda: make(activation_threshold=0.1, tie_word_embeddings=False, **FORCED),
    "non-gated": lambda: make(gated_mlp=False, mlp_bias=True, **FORCED),
    "FP8": lambda: make(**FORCED),
    "dense": lambda: make(hidden_act="relu2"),
    "llama": lambda: stock("llama", mlp_bias=True, **TUNED),
    "qwen3": lambda: stock("qwen3", **TUNED),
    "SiLU": lambda: stock("mistral", "silu", sliding_window=None),
}


class Attention(torch.nn.Module):
    def __init__(self, num_heads, size, scale, num_kv_heads, **_):
        super().__init__()
        self.heads = num_heads, num_kv_heads, num_kv_heads

    def forward(self, *states):
        pairs = zip(states, self.heads, strict=True)
        q, k, v = (x.unflatten(-1, (heads, -1)).transpose(0, 1) for x, heads in pairs)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return y.transpose(0, 1).flatten(1)


@pytest.fixture
def load(monkeypatch, tmp_path):
    """A function that loads the folder `tmp_path` as vLLM does, as one of several ranks."""
    pytest.importorskip("vllm", reason="vLLM is missing: pip install vllm")
    from vllm import config, distributed
    from vllm.model_executor.model_loader import get_model

    from twell import serve

    def load(rank=0, ranks=1):
        model = config.ModelConfig(str(tmp_path), skip_tokenizer_init=True, dtype="bfloat16")
        options = {"device_config": config.DeviceConfig("cpu"), "compilation_config": PLAIN}
        options = config.VllmConfig(model_config=model, **options)
        with config.set_current_vllm_config(options):
            if not distributed.model_parallel_is_initialized():
                distributed.init_distributed_environment(1, 0, f"file://{tmp_path}/init", 0, "gloo")
                distributed.initialize_model_parallel()
            rank_of = {"rank_in_group": rank, "world_size": ranks, "all_reduce": lambda y: y}
            for name, value in rank_of.items():
                monkeypatch.setattr(distributed.get_tp_group(), name, value)
            return get_model(vllm_config=options)

    serve.register()
    for module in (serve.llama, serve.qwen3):
        monkeypatch.setattr(module, "Attention", Attention)
    return load


@pytest.mark.parametrize("name", MODELS)
def test_models_compute_as_in_transformers(name, load, tmp_path, monkeypatch):
    expected = MODELS[name]().bfloat16().eval().requires_grad_(False)
    if name == "FP8":
        quantize_(expected)
    expected.save_pretrained(tmp_path)
    model, ids, taken = load(), tokens(30), []
    for path, compute in ops.PATHS.items():

        def counted(*args, path=path, compute=compute, **options):
            taken.append(path)
            return compute(*args, **options)

        monkeypatch.setitem(ops.PATHS, path, counted)
    with torch.no_grad():
        for count in (1, 30):
            logits = model.compute_logits(model(ids[:count], torch.arange(count)))
            error = relative(logits, expected(ids[None, :count]).logits[0])
            assert error < 0.06  # rounding moves a few neurons of FP8 and across the threshold
    assert taken == [] if name in ("dense", "SiLU") else ["decode"] * 6


def test_shards_of_two_ranks_add_up(load, tmp_path):
    model = make(mlp_bias=True, num_key_value_heads=2, **FORCED).bfloat16().requires_grad_(False)
    model.save_pretrained(tmp_path)
    x = torch.randn(600, 32).bfloat16()
    parts = [load(rank, 2).model.layers[1].mlp for rank in range(2)]
    traced = [torch.compile(mlp, fullgraph=True, dynamic=True, backend="eager") for mlp in parts]
    for rows in (x[:3], x):
        y = sum(mlp(rows) for mlp in traced)
        assert relative(y, model.model.layers[1].mlp(rows)) < 0.01
