"""A Llama whose layers run the kernels, against the dense model: eager, compiled, in graphs."""

import pytest
import torch
from transformers import ContinuousBatchingConfig, GenerationConfig

pytest.importorskip("triton")

from tests.factories.sparse import relative
from tests.gpu.test_gpu import two_gpus
from twell.models import SparseLlamaConfig, SparseLlamaForCausalLM

PATHS = [None, "rowwise", "union", "decode"]


@pytest.fixture(scope="module")
def models():
    """The model densely, with the kernels, and in fp32; about 2% of the neurons are active."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 4096, "hidden_size": 1024, "intermediate_size": 2816}
    sizes |= {"num_hidden_layers": 4, "num_attention_heads": 16, "initializer_range": 0.05}
    ids = {"bos_token_id": 0, "eos_token_id": None, "pad_token_id": 0}
    config = SparseLlamaConfig(**sizes, **ids, mlp_bias=True)
    exact, dense, sparse = (SparseLlamaForCausalLM(config).cuda().eval() for _ in range(3))
    with torch.no_grad():
        for ffn in exact.ffns:
            ffn.gate_proj.bias.fill_(-3.3)
            ffn.down_proj.weight.mul_(4)
    for model in (dense, sparse):
        model.load_state_dict(exact.state_dict())
        model.bfloat16()
    sparse.set_ffn_backend("triton")
    dense.recording = True
    with torch.no_grad():
        dense(torch.randint(4096, (2, 200), device="cuda"))
    dense.recording = False
    fires = torch.stack([ffn.stats.take()[0] for ffn in dense.ffns])
    assert 0.002 < fires.double().mean() / 400 < 0.2
    return exact, dense, sparse


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("shape", [(1, 1), (3, 57), (4, 512)], ids=str)
@torch.no_grad()
def test_logits_are_as_close_as_the_dense_models(models, path, shape):
    exact, dense, sparse = models
    x = torch.randint(4096, shape, device="cuda")
    for ffn in sparse.ffns:
        ffn.path = path
    right = exact(x).logits
    assert relative(sparse(x).logits, right) <= 1.25 * relative(dense(x).logits, right)


def test_greedy_text_is_the_same_eager_and_compiled_with_graphs(models):
    exact, dense, sparse = models
    # With random weights the best two tokens nearly tie; a few steps on one sequence part them.
    sequence = torch.randint(4096, (1, 64), device="cuda")
    optimizer = torch.optim.AdamW(exact.parameters(), 5e-4)
    exact.train()
    for _ in range(60):
        exact(sequence, labels=sequence).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    exact.eval()
    for model in (dense, sparse):
        model.load_state_dict(exact.state_dict())
    for ffn in sparse.ffns:
        ffn.path = None
    options = {"max_new_tokens": 50, "do_sample": False}
    expected = dense.generate(sequence[:, :12], **options)
    assert (expected == sequence[:, :62]).float().mean() > 0.9  # it did learn
    assert torch.equal(sparse.generate(sequence[:, :12], **options), expected)
    torch.compiler.reset()
    # with a static cache transformers compiles the forward pass and captures it in CUDA graphs
    assert torch.equal(
        sparse.generate(sequence[:, :12], cache_implementation="static", **options), expected
    )
    (answer,) = sparse.generate_batch(
        sequence[:, :12].tolist(),
        generation_config=GenerationConfig(**options, eos_token_id=-1),
        continuous_batching_config=ContinuousBatchingConfig(use_cuda_graph=True, num_blocks=32),
    ).values()
    assert answer.generated_tokens == expected[0, 12:].tolist()


@two_gpus
def test_replicas_on_two_gpus_have_the_losses_and_gradients_of_one():
    """nn.DataParallel, which runs replicas in threads."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 512, "hidden_size": 256, "intermediate_size": 704}
    sizes |= {"num_hidden_layers": 4, "num_attention_heads": 8, "l1_coefficient": 0.1}
    model = SparseLlamaForCausalLM(SparseLlamaConfig(**sizes)).cuda().train()
    model.set_ffn_backend("auto")
    x = torch.randint(512, (8, 128), device="cuda")
    total = {"num_tokens_in_batch": x.numel(), "num_items_in_batch": x[:, 1:].numel()}
    # One GPU takes the halves in turn: products of other shapes round otherwise, and gates near
    # zero then change the gradients by 4e-4.
    results = []
    for run, parts in ((model, x.chunk(2)), (torch.nn.DataParallel(model), [x])):
        model.zero_grad()
        outputs = [run(input_ids=p, labels=p, use_cache=False, **total) for p in parts]
        loss, l1 = (torch.cat([getattr(o, n).reshape(-1) for o in outputs]) for n in ("loss", "l1"))
        loss.sum().backward()
        gradients = torch.cat([p.grad.flatten() for p in model.parameters()])
        counts = torch.stack([ffn.stats.take()[1].cpu() for ffn in model.ffns])
        results.append([loss, l1, gradients, counts])
    (*expected, counts), (*replicas, recounts) = results
    for one, other in zip(expected, replicas, strict=True):
        assert (other - one).norm() <= 1e-5 * one.norm()
    assert counts.sum() == recounts.sum() == 4 * x.numel()
    assert (counts - recounts).abs().sum() <= 8  # a gate near zero may be rounded
