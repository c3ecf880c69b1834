"""The example of `docs/drop_in.py`, run as a user runs it but on eight devices."""

import importlib.util
from pathlib import Path


def test_the_example_agrees_with_dense_attention(capsys):
    path = Path(__file__).parents[1] / "docs" / "drop_in.py"
    spec = importlib.util.spec_from_file_location("drop_in", path)
    assert spec is not None and spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    assert example.main() < 1e-6
    assert capsys.readouterr().out.startswith("8 devices")
