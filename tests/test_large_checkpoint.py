"""A checkpoint of forty layers is converted and restored in little memory: one parameter at a time, shard by shard."""

from pathlib import Path

import pytest


@pytest.mark.long
def test_memory_of_conversion_and_restore(tmp_path: Path) -> None:
    from bench.convert import DEVICES, measure

    found = measure(tmp_path, 2.0)
    assert found["convert_peak"] <= 1.3 * found["largest"] + 500e6 < 0.7 * found["bytes"]
    # Each device holds its share; all of them together lie in this one machine's memory, with what is on its way.
    assert found["most_on_a_device"] <= 1.02 * found["bytes"] / DEVICES
    assert found["restore_peak"] <= found["held"] + 1.3 * found["largest"] + 500e6
    assert not list(tmp_path.iterdir())
