"""The paper's inference: TwELL words from the gate. test_kernels.py tests what reads them."""

import pytest
import torch

from tests import fuzz
from tests.factories.kernels import DEVICE, integer_case
from twell.kernels.paper.gate import COMPRESSIONS, gate_words
from twell.sparse import formats
from twell.sparse.paper import ffn_twell


@pytest.mark.parametrize("num_tokens, num_neurons", [(0, 257), (1, 1), (70, 520)])
@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_gate_words_are_those_of_the_format(num_tokens, num_neurons, compression):
    pattern = "heavy" if compression < 8 else "even"
    case = integer_case(num_tokens=70, intermediate_size=num_neurons, pattern=pattern, biases=True)
    t = fuzz.layer(case, DEVICE)
    t["x"] = t["x"][:num_tokens]
    g = fuzz.exact(t)[0].to(case.dtype)
    expected = formats.PackedTwELL.pack(g, compression=compression)
    assert torch.equal(gate_words(t["x"], t["w_gate"], t["b_gate"], compression), expected.words)


def test_compressions_are_checked():
    tensors = fuzz.layer(integer_case(), DEVICE)
    for device in (DEVICE, "meta"):
        given = {name: None if t is None else t.to(device) for name, t in tensors.items()}
        with pytest.raises(ValueError, match="compression=3"):
            ffn_twell(**given, compression=3)
    with pytest.raises(ValueError, match="compression=1"):
        gate_words(tensors["x"], tensors["w_gate"], None, 1)
