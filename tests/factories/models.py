"""Models, checkpoints of every layout, and masks for the tests of twell.models."""

import json

import torch
from huggingface_hub import save_torch_state_dict
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM

from twell.models import SparseLlamaConfig, SparseLlamaForCausalLM
from twell.sparse.calibration import Calibration, Point

VOCAB, INDEX, DOWN = 90, "model.safetensors.index.json", ".mlp.down_proj.weight"

SHAPE = {
    **{"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 84},
    **{"num_hidden_layers": 3, "num_attention_heads": 4, "initializer_range": 0.2},
}


def make(**changes):
    """A model of ours with random weights."""
    own = {"max_position_embeddings": 32, "l1_coefficient": 0.03}
    tokens = {"bos_token_id": 0, "eos_token_id": 0}
    return SparseLlamaForCausalLM(SparseLlamaConfig(**SHAPE | own | tokens | changes))


def stock(kind, act="relu", **changes):
    """A model of transformers."""
    config = AutoConfig.for_model(kind, hidden_act=act, **SHAPE | HEADS | changes)
    return AutoModelForCausalLM.from_config(config).eval()


HEADS = {"num_key_value_heads": 2, "head_dim": 8}
FAMILIES = {  # fields of their configurations
    "nemotron": HEADS,
    "arcee": HEADS,
    "nanochat": HEADS,
    "opt": {"ffn_dim": 84, "word_embed_proj_dim": 32},
    "t5": {
        **{"d_model": 32, "d_ff": 84, "num_decoder_layers": 1, "num_heads": 4, "d_kv": 8},
        "decoder_start_token_id": 0,
    },
}


def family(kind, **changes):
    """A model of transformers whose layers have other names, with random weights and biases."""
    config = AutoConfig.for_model(kind, **SHAPE | FAMILIES.get(kind, HEADS) | changes)
    auto = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    model = auto.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.3)
    return model


def inputs_of(model, x):
    """x [B, S] for the model; an encoder-decoder's decoder reads the last 7 tokens."""
    both = model.config.is_encoder_decoder
    return {"input_ids": x} | ({"decoder_input_ids": x[:, -7:]} if both else {})


def tokens(*shape):
    return torch.randint(1, VOCAB, shape)


def step(model, **inputs):
    """A pass and its gradients: the output, and all gradients in one vector."""
    model.zero_grad()
    output = model(**inputs)
    output.loss.backward()
    grads = [p.grad.reshape(-1) for p in model.parameters() if p.grad is not None]
    return output, torch.cat(grads)


def counted(model):
    """Take the number of tokens that each layer counted."""
    return [int(ffn.stats.take()[1].sum()) for ffn in model.ffns]


def calibration(**changes):
    times = tuple(Point(m, 84, 84, {"dense": 1.0, "decode": 0.5, "union": 0.6}) for m in (1, 1000))
    about = {"hidden_size": 32, "intermediate_size": 84, "gated": True}
    about |= {"device": "a device", "dtype": "bfloat16", "versions": "", "date": "2026-01-01"}
    return Calibration(times=times, **about | changes)


def assert_same(result, expected):
    """Compare two state dictionaries bit for bit."""
    assert result.keys() == expected.keys()
    for name, tensor in expected.items():
        assert result[name].dtype == tensor.dtype, name
        assert torch.equal(result[name].cpu(), tensor.cpu()), name


PAPER_CONFIG = {
    **{"architectures": ["LlamaSparse"], "vocab_size": VOCAB, "hidden_size": 32},
    **{"intermediate_size": 4 * 32, "num_hidden_layers": 3, "num_attention_heads": 4},
    **{"num_key_value_heads": 4, "max_position_embeddings": 32, "hidden_act": "silu"},
    **{"rms_norm_eps": 1e-5, "rope_theta": 100000, "torch_dtype": "bfloat16"},
    **{"sparsity_l1_coeff": 2e-5, "sparsity_something_else": [1]},
}


def published(
    folder,
    layout,
    gated=True,
    kind="llama_sparse_relu",
    tied=True,
    shard=10**6,
    neurons=84,
    **changes,
):
    """Write a checkpoint as the paper's authors publish theirs, and return its model.

    layout: names of the feed-forward weights, "llama" or the paper's "own". shard: bytes of a
    file. changes: fields of config.json.
    """
    rope = {"rope_type": "default", "rope_theta": 1e5}
    shape = {"gated_mlp": gated, "tie_word_embeddings": tied, "intermediate_size": neurons}
    model = make(**shape, l1_coefficient=2e-5, rope_parameters=rope)
    # Rotary tables stay fp32, as in a model that transformers loads.
    frequencies = model.model.rotary_emb.inv_freq.clone()
    tensors = {name: t.detach().clone() for name, t in model.bfloat16().state_dict().items()}
    model.model.rotary_emb.inv_freq = frequencies
    if tied:
        del tensors["lm_head.weight"]
    if layout == "own":
        tensors = own_layout(tensors, gated)
    fields = {"model_type": kind, "tie_word_embeddings": tied, "sparsity_gated_mlp": gated}
    fields |= {"sparsity_new_intermediate_size": neurons}
    (folder / "config.json").write_text(json.dumps(PAPER_CONFIG | fields | changes))
    save_torch_state_dict(tensors, folder, max_shard_size=shard)
    return model.eval()


def own_layout(tensors, gated):
    """Tensors with the paper's names, transposed as there, and with its trackers."""
    result = {"model.layers.0.mlp.tracker.count": torch.ones(3)}
    result["metrics_accumulator.steps"] = torch.ones(1)
    for name, tensor in tensors.items():
        if ".mlp." in name:
            part = name.split(".")[-2].removesuffix("_proj")
            name = name.replace(f"{part}_proj.weight", f"{part}_weight")
            if part in ("gate", "down") or not gated:
                tensor = tensor.t().contiguous()
        result[name] = tensor
    return result


# Changes of a checkpoint: functions of its folder.


def change_config(**fields):
    """Change fields of config.json; `...` takes a field out."""

    def change(folder):
        path = folder / "config.json"
        changed = json.loads(path.read_text()) | fields
        path.write_text(json.dumps({k: value for k, value in changed.items() if value is not ...}))

    return change


def change_tensors(edit):
    """Apply a function, or a dictionary of new tensors, to the tensors in every file."""

    def change(folder):
        for path in folder.glob("*.safetensors"):
            tensors = load_file(path)
            edit(tensors) if callable(edit) else tensors.update(edit)
            save_file(tensors, path)

    return change


def write(name, text):
    return lambda folder: (folder / name).write_text(text)


def transpose_down(tensors):
    tensors |= {name: t.t().contiguous() for name, t in tensors.items() if name.endswith(DOWN)}
