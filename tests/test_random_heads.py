"""A random model of Llama 3.2 1B's proportions, 32 heads and 8 key heads, where the all-to-all runs."""

import numpy as np
import pytest

import smollm2
import tiny

CONFIG = {
    **tiny.LLAMA,
    "vocab_size": 2048,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "max_position_embeddings": 4096,
    "initializer_range": 0.05,
    "tie_word_embeddings": True,
}
NEW_TOKENS = 48


@pytest.mark.parametrize(
    "sizes",
    [
        pytest.param({"context": 8}, id="context8", marks=pytest.mark.long),
        pytest.param({"context": 4, "tensor": 2}, id="context4-tensor2"),
    ],
)
def test_greedy_tokens_equal_transformers_where_heads_divide(tmp_path, mesh, sizes):
    pytest.importorskip("torch")
    from treering.configs.precision import Precision
    from treering.configs.sampling import RequestConfig
    from treering.infer.engine import Engine
    from treering.infer.scheduler import Scheduler
    from treering.layers.operations.paged import head_scheme
    from treering.layers.parallel.sharding import Plan
    from treering.models.checkpoint.model import load_model
    from treering.models.conversion.convert import convert

    convert(tiny.write_folder(tmp_path / "hf", CONFIG), tmp_path / "checkpoint")
    plan = Plan(mesh(**sizes), "decode")
    assert head_scheme(plan, (6, 1, 32, 64)) == "all_to_all"
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 2048, length).tolist() for length in (1, 2, 9, 33, 64, 100)]
    oracle = tiny.torch_model(CONFIG)
    engine = Engine(load_model(tmp_path / "checkpoint", plan, "float32"), plan, Precision(), batch=6, capacity=160)
    scheduler = Scheduler(engine)
    numbers = [scheduler.submit(prompt, RequestConfig(max_new_tokens=NEW_TOKENS)) for prompt in prompts]
    ours: dict[int, list[int]] = {number: [] for number in numbers}
    for event in scheduler.run():
        ours[event.request].append(event.token)
    compared = 0
    for prompt, row in zip(prompts, ours.values(), strict=True):
        tokens, gaps = smollm2.greedy(oracle, prompt, NEW_TOKENS)
        steps = next((i for i, gap in enumerate(gaps) if gap <= 1e-3), NEW_TOKENS)
        assert row[:steps] == tokens[:steps], len(prompt)
        compared += steps
    assert compared >= 0.9 * NEW_TOKENS * len(prompts)
