import shutil

import pytest

SMALL = """hidden_size=32 intermediate_size=96 num_layers=2 num_heads=2 context=32 batch_tokens=512
    tokens=512 warmup_steps=0 vocab_size=320 valid_tokens=512""".split()


class Place:
    """A folder with a finished run and a text, and the arguments of commands there."""

    def __init__(self, folder, run, text):
        self.folder = folder
        self.run = shutil.copytree(run, folder / "run")
        self.text = shutil.copy(text, folder / "text.jsonl")

    def train(self, *overrides, config="quick"):
        fields = [*SMALL, f"source={self.text}", *overrides]
        fields = {field.partition("=")[0]: field for field in fields}
        return ["train", config, *fields.values(), "--out", str(self.folder / "new")]

    def trace(self, *options, run=None):
        options = options or ("--text", "ba de")
        return ["trace", str(run or self.run), *options, "--out", str(self.folder / "out.npz")]

    def inspect(self, *options, run=None):
        return ["inspect", str(run or self.run), *options, "--out", str(self.folder / "out.html")]


@pytest.fixture
def place(tmp_path, tiny_run, tiny_text):
    return Place(tmp_path, tiny_run, tiny_text)
