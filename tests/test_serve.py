"""The plugin of vLLM: layers of saved folders against those of transformers."""

import pytest
import torch
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd
from torch._inductor.decomposition import select_decomp_table

from tests.factories.models import calibration, make, stock
from tests.factories.sparse import relative, triton_here
from twell.models import quantize_

pytestmark = [pytest.mark.vllm, triton_here]
PLAIN = {"mode": 0, "custom_ops": ["none"]}
TUNED = {"ffn_backend": "auto", "num_key_value_heads": 2, "ffn_activity": [[64, 2.0, 9.0]] * 3}
FORCED = {"ffn_backend": "triton", "tie_word_embeddings": False, "mlp_bias": True}
MODELS = {  # and the number of ranks
    "tuned": (2, lambda: make(**TUNED)),
    "threshold": (1, lambda: make(activation_threshold=0.1, **FORCED)),
    "non-gated": (2, lambda: make(gated_mlp=False, **FORCED)),
    "FP8": (2, lambda: make(**FORCED)),
    "dense": (1, lambda: make(hidden_act="relu2")),
    **dict.fromkeys(["waiting", "enforce-eager"], (1, lambda: make(**TUNED))),
    "llama": (2, lambda: stock("llama", **TUNED)),
    "qwen3": (2, lambda: stock("qwen3", **TUNED)),
    "SiLU": (1, lambda: stock("mistral", "silu", sliding_window=None)),
}


@pytest.fixture
def load(monkeypatch, tmp_path):
    """A function that loads the folder `tmp_path` as vLLM does, without attention."""
    pytest.importorskip("vllm", reason="vLLM is missing: pip install vllm")
    from vllm import config, distributed
    from vllm.model_executor.model_loader import get_model

    from twell import serve

    def load(rank, ranks):
        model = config.ModelConfig(str(tmp_path), skip_tokenizer_init=True, dtype="bfloat16")
        options = {"device_config": config.DeviceConfig("cpu"), "compilation_config": PLAIN}
        options = config.VllmConfig(model_config=model, **options)
        options.compilation_config.max_cudagraph_capture_size = load.captured
        with config.set_current_vllm_config(options):
            if not distributed.model_parallel_is_initialized():
                distributed.init_distributed_environment(1, 0, f"file://{tmp_path}/init", 0, "gloo")
                distributed.initialize_model_parallel()
            group = {"rank_in_group": rank, "world_size": ranks, "all_reduce": lambda y: ranks * y}
            for name, value in group.items():
                monkeypatch.setattr(distributed.get_tp_group(), name, value)
            model = get_model(vllm_config=options)
        load.ends = options.compilation_config.compile_ranges_endpoints
        return model

    load.captured = 256
    serve.register()
    for module in (serve.llama, serve.qwen3):
        monkeypatch.setattr(module, "Attention", lambda *_, **__: torch.nn.Identity())
    return load


@pytest.mark.parametrize("name", MODELS)
@torch.inference_mode()
def test_layers_compute_as_in_transformers(name, load, tmp_path, monkeypatch):
    ranks, create = MODELS[name]
    load.captured = 0 if name == "enforce-eager" else 256
    waiting = {"tuned": 800 * 32 * 42, "waiting": 10**12, "enforce-eager": 10**7}.get(name, 0)
    monkeypatch.setattr("twell.serve.WAITING", waiting)
    with torch.inference_mode(False):
        expected = create().bfloat16().eval().requires_grad_(False)
        for parameter in expected.parameters():
            parameter.normal_(0, 0.3)
    if name == "FP8":
        quantize_(expected)
    expected.save_pretrained(tmp_path)
    calibration().save(tmp_path / "calibration.json")
    torch.compiler.reset()
    mlps = [load(rank, ranks).model.layers[1].mlp for rank in range(ranks)]
    sparse = [getattr(mlp, "paths", None) is not None for mlp in mlps]
    assert sparse == [name not in ("dense", "enforce-eager", "SiLU")] * ranks
    traced = [torch.compile(mlp, fullgraph=True, dynamic=True, backend="eager") for mlp in mlps]
    assert load.ends == {"tuned": [256, 800], "waiting": [256]}.get(name, []) + [2048]
    for x in torch.randn(603, 32).bfloat16().split([3, 600]):
        y = sum(mlp(x) for mlp in traced) / ranks
        assert relative(y, expected.model.layers[1].mlp(x)) < 0.01


@pytest.mark.parametrize("fp8", [False, True])
@torch.inference_mode()
def test_for_tokens_that_are_all_dense_plain_code_is_compiled(fp8, load, tmp_path, monkeypatch):
    with torch.inference_mode(False):
        saved = make(**FORCED).bfloat16().eval()
    if fp8:
        quantize_(saved)
    saved.save_pretrained(tmp_path)
    mlp = load(0, 1).model.layers[1].mlp
    mlp.paths |= {"most": [512, 1000, 2000], "paths": ["union", "dense", "rowwise"]}
    from vllm.compilation.passes.inductor_pass import pass_context
    from vllm.config.utils import Range

    calls, x = [], torch.randn(600, 32).bfloat16()

    def compiler(graph, _):
        calls.append([str(node.target) for node in graph.graph.nodes])
        return make_boxed_func(graph.forward)

    for tokens in (Range(513, 1000), Range(513, 1001), Range(512, 1000)):
        torch.compiler.reset()
        backend = aot_autograd(fw_compiler=compiler, decompositions=select_decomp_table())
        with pass_context(tokens):
            y = torch.compile(mlp, fullgraph=True, dynamic=True, backend=backend)(x)
        assert relative(y, saved.model.layers[1].mlp(x)) < 0.01
    assert ["twell.planned_ffn.default" in call for call in calls] == [False, True, True]
