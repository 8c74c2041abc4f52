"""Checkpoints with damaged or impossible files: every error names the file and the reason."""

import shutil

import pytest
import torch

from tests.models.factories import INDEX, change_config, change_tensors, published, write
from twell.models import load


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn", "nonsense", {"text": "bfloat16"}])
def test_types_that_weights_cannot_have_are_refused(tmp_path, dtype):
    published(tmp_path, "llama", torch_dtype=dtype)
    message = r"config\.json: dtype is .*; expected one of bfloat16, float16, float32"
    with pytest.raises(ValueError, match=message):
        load(tmp_path)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"sparsity_gated_mlp": "false"}, "gated_mlp is 'false'; expected true or false"),
        ({"sparsity_gated_mlp": None}, "gated_mlp is None; expected true or false"),
        (
            {"sparsity_l1_coeff": "much"},
            "l1_coefficient is 'much'; it has to be a finite number, 0 or more",
        ),
        (
            {"sparsity_l1_coeff": 1e999},
            "l1_coefficient is inf; it has to be a finite number, 0 or more",
        ),
        ({"sparsity_new_intermediate_size": None, "intermediate_size": None}, "intermediate_size"),
        ({"hidden_size": "32"}, "'hidden_size' expected int, got str"),
        ({"tie_word_embeddings": "yes"}, "'tie_word_embeddings' expected bool, got str"),
        ({"rope_theta": "abc"}, "TypeError"),
        ({"rope_scaling": {"type": "foo", "factor": 2.0}}, "foo"),
        (
            {"quantization_config": {"load_in_8bit": True}},
            "quantization_config; quantised weights cannot be read",
        ),
    ],
)
def test_impossible_configurations_of_the_paper_are_named(tmp_path, fields, message):
    published(tmp_path, "llama", **fields)
    with pytest.raises(ValueError, match=rf"config\.json (describes no model: .*|has a ){message}"):
        load(tmp_path)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_a_damaged_tokenizer_alone_is_named(tmp_path, name):
    published(tmp_path, "llama")
    (tmp_path / name).write_text("{")
    with pytest.raises(ValueError, match=r"tokenizer(_config)?\.json"):
        load(tmp_path)


def in_two_layouts(tensors):
    weight = tensors["model.layers.0.mlp.gate_proj.weight"]
    tensors["model.layers.0.mlp.gate_weight"] = weight.t().contiguous()


def not_finite(value):
    def edit(tensors):
        tensors["model.norm.weight"][3] = value

    return change_tensors(edit)


def rope(kind, theta):
    return change_config(rope_parameters={"rope_type": kind, "rope_theta": theta})


CONFIG, NO_MODEL = r"config\.json", r"config\.json describes no model: "
DAMAGE = {
    "a list": (write("config.json", "[1]"), rf"{CONFIG} holds a list, expected a JSON object"),
    "no size": (
        change_config(hidden_size=...),
        rf"{CONFIG} has no hidden_size; put back the file",
    ),
    "a word for a size": (change_config(hidden_size="wide"), rf"{NO_MODEL}.*'hidden_size'.*wide"),
    "no heads": (change_config(num_attention_heads=0), rf"{NO_MODEL}ZeroDivisionError"),
    "an unknown activation": (
        change_config(hidden_act="gelu2"),
        rf"{NO_MODEL}KeyError: 'gelu2'",
    ),
    "an unknown rope type": (
        rope("spiral", 1e4),
        rf"{NO_MODEL}rope_type is 'spiral'; use one of default, .*linear",
    ),
    "a negative rope_theta": (
        rope("default", -1.0),
        rf"{NO_MODEL}rope_theta is -1\.0; .* a finite number above 0",
    ),
    "an index cut short": (
        write(INDEX, "{"),
        r"model\.safetensors\.index\.json is not JSON: .*; put back the file",
    ),
    "an index that is a list": (
        write(INDEX, "[]"),
        r"index\.json holds a list, expected a JSON object",
    ),
    "an index without files": (
        write(INDEX, "{}"),
        r"index\.json has no weight_map with a file for each tensor",
    ),
    "a list of files": (write(INDEX, '{"weight_map": ["a"]}'), r"index\.json has no weight_map"),
    "a number for a file": (
        write(INDEX, '{"weight_map": {"a": 3}}'),
        r"index\.json has no weight_map with a file",
    ),
    "a tokenizer cut short": (
        write("tokenizer.json", '{"version'),
        r"tokenizer\.json is not JSON: .*; put back",
    ),
    "an empty tokenizer": (
        write("tokenizer.json", "{}"),
        r"tokenizer\.json and tokenizer_config\.json make no tok",
    ),
    "a tokenizer's settings cut short": (
        write("tokenizer_config.json", "{"),
        r"tokenizer_config\.json is not JSON",
    ),
    "a weight in two layouts": (
        change_tensors(in_two_layouts),
        r"safetensors: \S*gate_proj\.weight and \S*gate_weight would be one weight twice; "
        "take one of them out",
    ),
    "a weight that is NaN": (
        not_finite(torch.nan),
        r"model\.safetensors: the tensor model\.norm\.weight has NaN or infinite values: "
        "put back a whole copy",
    ),
    "a weight that is infinite": (
        not_finite(torch.inf),
        r"model\.norm\.weight has NaN or infinite",
    ),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_files_are_named(tiny_run, tmp_path, damage):
    folder = shutil.copytree(tiny_run / "model", tmp_path / "model")
    change, message = DAMAGE[damage]
    change(folder)
    with pytest.raises(ValueError, match=message):
        load(folder)
