"""Parity with transformers, the oracle, on tiny random models of each family.

Weights have a standard deviation of 0.3 and biases and norms are random too: with the usual ones a wholly wrong layer
moves logits by little. All cases of a family share compiled programs where their shapes allow: a length is data.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from parity import oracle, ours, right_logits, run, there_and_back
from treering.layers.parallel.sharding import Plan

torch = pytest.importorskip("torch")

VOCAB = 96
LENGTHS = (*range(1, 41), 120)
"""The last is far past the original context of 32."""
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 1e4},
    "theta": {"rope_type": "default", "rope_theta": 1e6},
    "linear": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
    "llama3": LLAMA3,
    "yarn": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32},
    "yarn-factor": {
        "rope_type": "yarn",
        "rope_theta": 1e4,
        "factor": 4.0,
        "original_max_position_embeddings": 32,
        "attention_factor": 0.8,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
        "truncate": False,
    },
}
GRID = [
    # heads, kv_heads, head_dim, tied, rotary kind, eps: every value of one meets most values of the others.
    (8, 2, 8, False, "default", 1e-5),
    (8, 2, 16, True, "llama3", 1e-6),
    (8, 1, 16, False, "yarn", 1e-5),
    (8, 8, 8, True, "linear", 1e-6),
    (6, 3, 16, True, "yarn-factor", 1e-5),
    (6, 2, 8, False, "llama3", 1e-3),
    (6, 6, 16, False, "theta", 1e-6),
    (6, 1, 8, True, "default", 1e-3),
]


def grid(family: str) -> list[dict[str, Any]]:
    cases = []
    for number, (heads, kv_heads, head_dim, tie, rope, eps) in enumerate(GRID):
        config = {
            "model_type": family,
            "vocab_size": VOCAB,
            "hidden_size": 48,
            "intermediate_size": 80,
            "num_hidden_layers": 2,
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "head_dim": head_dim,
            "max_position_embeddings": 128,
            "rms_norm_eps": eps,
            "tie_word_embeddings": tie,
            "rope_parameters": dict(ROPES[rope]),
        }
        if family == "mistral":
            config["sliding_window"] = (None, 1, 7, 32)[number % 4]
        cases.append(config)
    return cases


FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
FEWER = {"llama": range(len(GRID)), "mistral": (1, 2, 3, 6), "qwen2": (0, 1, 5), "qwen3": (0, 2, 5)}
"""The cases of the default tier; all others are long."""
CASES = [
    pytest.param(family, number, marks=() if number in FEWER[family] else pytest.mark.long)
    for family in FAMILIES
    for number in range(len(GRID))
]


@pytest.fixture
def plan(mesh: Callable[..., Any]) -> Plan:
    return Plan(mesh(), "decode")


@pytest.mark.parametrize("family,number", CASES)
def test_logits_at_every_length(tmp_path: Path, plan: Plan, family: str, number: int) -> None:
    config = grid(family)[number]
    model = oracle(config, seed=number)
    mine = ours(tmp_path, model, plan)
    rng = np.random.default_rng(number)
    ids = rng.integers(0, VOCAB, (len(LENGTHS), max(LENGTHS)))
    right = right_logits(model, ids)
    padded = np.where(np.arange(max(LENGTHS)) < np.array(LENGTHS)[:, None], ids, -1)
    found = run(mine, plan, padded)
    scale = max(1.0, float(np.abs(right).max()) / 10)
    for row, length in enumerate(LENGTHS):
        worst = np.abs(found[row, :length] - right[row, :length]).max()
        assert worst <= 1e-4 * scale, (length, worst, scale)
    assert np.abs(right).max() > 5
    for length in (1, 17, 120) if number == FEWER[family][0] else ():  # as they are, without padding
        ids = rng.integers(0, VOCAB, (1, length))
        worst = np.abs(run(mine, plan, ids) - right_logits(model, ids)).max()
        assert worst <= 1e-4 * scale, (length, worst, scale)


@pytest.mark.parametrize("family", FAMILIES)
def test_decoding_token_by_token(tmp_path: Path, mesh: Callable[..., Any], family: str) -> None:
    """Through the cache, on four devices: windows and norms hold there too."""
    from treering.configs.precision import Precision
    from treering.infer.chunks import Chunks
    from treering.infer.engine import Engine

    config = grid(family)[1] | ({"sliding_window": 7} if family == "mistral" else {})
    model = oracle(config)
    plan = Plan(mesh(context=4), "decode")
    engine = Engine(ours(tmp_path, model, plan), plan, Precision(), batch=1, capacity=64)
    ids = np.random.default_rng(1).integers(0, VOCAB, (1, 24))
    right = right_logits(model, ids)[0]
    found, state = engine.append(engine.empty_state(), [list(map(int, ids[0, :15]))])
    rows = [np.asarray(found)[0]]
    for token in ids[0, 15:]:
        found, state = engine.append(state, [[int(token)]])
        rows.append(np.asarray(found)[0])
    scale = max(1.0, float(np.abs(right).max()) / 10)
    assert np.abs(np.stack(rows) - right[14:]).max() <= 1e-4 * scale
    # In chunks spread over the devices: the first by a ring, the others against the cache.
    engine.chunks = Chunks(8, least=1)
    for length in (8, 21):
        found, _ = engine.append(engine.empty_state(), [list(map(int, ids[0, :length]))])
        assert np.abs(np.asarray(found)[0] - right[length - 1]).max() <= 1e-4 * scale, length


@pytest.mark.parametrize("family", FAMILIES)
def test_bfloat16_is_as_near_to_float32_as_transformers(tmp_path: Path, plan: Plan, family: str) -> None:
    config = grid(family)[0] | {"num_hidden_layers": 2}
    ids = np.random.default_rng(2).integers(0, VOCAB, (8, 40))
    rounded = oracle(config, dtype=torch.bfloat16)
    # The same rounded weights in float32 are what both stray from.
    exact = right_logits(oracle(config, dtype=torch.bfloat16).float(), ids)
    theirs = right_logits(rounded, ids) - exact
    mine = run(ours(tmp_path, rounded, plan), plan, ids, dtype="bfloat16") - exact
    assert 0 < np.sqrt((mine**2).mean()) <= 2 * np.sqrt((theirs**2).mean())
    assert np.abs(mine).max() <= 2 * np.abs(theirs).max()


# ---- rotary angles


@pytest.mark.parametrize("head_dim", [8, 64, 128])
@pytest.mark.parametrize("kind", ROPES)
def test_rotary_angles(kind: str, head_dim: int) -> None:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    from treering.layers.nn.rope import inverse_frequencies, rotate
    from treering.models.families.fields import Fields
    from treering.models.families.rope_fields import read_rope

    parameters = dict(ROPES[kind])
    if head_dim == 128 and "original_max_position_embeddings" in parameters:
        parameters["original_max_position_embeddings"] = 8192
    embedding = LlamaRotaryEmbedding(
        LlamaConfig(
            hidden_size=8 * head_dim,
            num_attention_heads=8,
            max_position_embeddings=131072,
            rope_parameters=dict(parameters),
        )
    )
    rope = read_rope(Fields({"rope_parameters": parameters}, "config.json"), 131072)
    found, right = inverse_frequencies(rope, head_dim), embedding.inv_freq.numpy()
    assert np.abs(found - right).max() <= 1e-7
    # torch's float32 power is off by a bit for one frequency in fifty, theta 1e6 and heads of 128 among them.
    assert np.abs(found / right - 1).max() <= 4e-7 and (found == right).mean() >= 0.98
    stray = np.abs(found - right)
    positions = np.array([0, 1, 31, 32, 33, 255, 256, 257, 4095, 8191, 8192, 131071], np.int32)
    cosine, sine = (
        part[0, :, : head_dim // 2].numpy() for part in embedding(torch.zeros(1), torch.tensor(positions)[None])
    )
    for dtype in ("float32", "bfloat16"):
        # Turning (1, 0) reads cosine and sine off, in the dtype that the layer is given.
        ones = jnp.zeros((1, len(positions), 1, head_dim), dtype).at[..., : head_dim // 2].set(1)
        turned = np.asarray(rotate(ones, jnp.asarray(positions)[None], rope)[0, :, 0], np.float32)
        read = np.split(turned, 2, axis=-1)
        for mine, theirs in zip(read, (cosine, sine), strict=True):
            near = 1e-6 + positions[:, None] * stray
            if dtype == "float32":
                assert (np.abs(mine - theirs) <= near).all()
            else:  # The angle's float32 cosine, rounded once.
                assert (np.abs(mine - theirs) <= near + 2**-8 * np.abs(theirs)).all()
    distinct = rotate(jnp.ones((1, 2, 1, head_dim), jnp.bfloat16), jnp.array([[256, 257]], jnp.int32), rope)
    assert not np.array_equal(distinct[0, 0], distinct[0, 1])


# ---- config.json, there and back


@pytest.mark.parametrize("family", FAMILIES)
def test_export_gives_transformers_the_same_model(tmp_path: Path, plan: Plan, family: str) -> None:
    for number in (1, 2):
        config, folder = grid(family)[number], tmp_path / str(number)
        model = oracle(config, seed=number)
        back = there_and_back(model, folder)
        ids = np.random.default_rng(0).integers(0, VOCAB, (1, 100))
        assert (
            np.abs(right_logits(back, ids) - right_logits(model, ids)).max()
            <= 2e-5 * np.abs(right_logits(model, ids)).max()
        )


def read(family: str, **changes: Any) -> Any:
    from treering.models.families import families
    from treering.models.families.fields import Fields

    fields = Fields({**grid(family)[0], **changes}, "config.json")
    fields.take("model_type")
    config = families()[family].from_hf(fields)
    fields.finish()
    return config


def test_fields_that_only_one_family_has() -> None:
    base = {key: value for key, value in grid("mistral")[0].items() if key != "sliding_window"}
    from treering.models.families.fields import Fields
    from treering.models.families.mistral import from_hf

    assert from_hf(Fields(base, "config.json")).window == 4096
    assert read("mistral", sliding_window=None).window is None
    for family in ("qwen2", "qwen3"):
        read(family, use_sliding_window=False, sliding_window=4096, max_window_layers=28)
        read(family, layer_types=["full_attention"] * 2)
        with pytest.raises(ValueError, match='"use_sliding_window" True'):
            read(family, use_sliding_window=True)
        with pytest.raises(ValueError, match="layer_types.*only 'full_attention'"):
            read(family, layer_types=["full_attention", "sliding_attention"])
    with pytest.raises(ValueError, match='"attention_bias" True'):
        read("qwen3", attention_bias=True)
    with pytest.raises(ValueError, match='"use_mrope" True'):
        read("qwen2", use_mrope=True)
    with pytest.raises(ValueError, match="^window 0: it must be at least 1: a query sees itself"):
        read("mistral", sliding_window=0)


@pytest.mark.parametrize("family,kv_heads,head_dim", [("mistral", 8, 6), ("qwen2", 32, 6), ("qwen3", 32, 128)])
def test_defaults_of_absent_fields_are_those_of_transformers(family: str, kv_heads: int, head_dim: int) -> None:
    from transformers import AutoConfig

    fields = {
        key: value
        for key, value in grid(family)[0].items()
        if key not in ("head_dim", "num_key_value_heads", "rms_norm_eps", "rope_parameters", "tie_word_embeddings")
    } | {"num_attention_heads": 32, "hidden_size": 192}
    theirs = AutoConfig.for_model(**json.loads(json.dumps(fields)))
    from treering.models.families import families
    from treering.models.families.fields import Fields

    mine = families()[family].from_hf(Fields(fields, "config.json"))
    assert (mine.kv_heads, mine.head_dim) == (kv_heads, head_dim)
    assert mine.kv_heads == theirs.num_key_value_heads and mine.norm_eps == theirs.rms_norm_eps
    assert mine.rope.theta == theirs.rope_parameters["rope_theta"]
    assert mine.tie_embeddings == theirs.tie_word_embeddings
