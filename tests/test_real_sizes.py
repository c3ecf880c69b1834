"""Recipes of real size, compiled for as many simulated devices as they name."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from treering.configs.recipes import RECIPES

pytestmark = pytest.mark.long

DEVICE_BYTES = 80e9
SIZES = {"llama_3_1_8b_128k": 8, "llama_3_1_8b_256k": 16, "llama_3_1_8b_512k": 32, "llama_3_1_70b_128k": 64}


@pytest.mark.parametrize("name", SIZES)
def test_its_step_fits_and_rings_as_reckoned(name):
    """Compiled for CPU, where XLA keeps and sends float32 in place of bfloat16: an upper bound of an accelerator's."""
    worker = Path(__file__).with_name("compile_recipe.py")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(worker.parents[1]), str(worker.parent)])}
    done = subprocess.run(
        [sys.executable, str(worker), name], env=environment, capture_output=True, text=True, timeout=1800
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    print(f"{name}: {found}")
    config = RECIPES[name]()
    model, p, window = config.model, config.mesh.context or 1, config.data.window
    assert found["devices"] == SIZES[name]
    assert found["total_bytes"] <= DEVICE_BYTES
    # The output weight and its gradient, vocab by embed: no logits of a device's tokens.
    assert found["beside_vocab"] == max(model.embed, config.step.loss_chunk)
    # 3 p - 2 messages a layer and part of the batch: keys and values there, the same back, and their gradients.
    launches = (3 * p - 2) * model.layers * config.step.accumulation
    assert found["ring_launches"] == launches
    assert found["ring_bytes"] == launches * 2 * (window // p) * model.kv_heads * model.head_dim * 4
