"""Gemma 3: unlike blocks in one pattern, which breaks off where the number of layers is no multiple of its length."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from parity import oracle, ours, right_logits, run, there_and_back
from treering.configs.gemma import Gemma3Config
from treering.configs.rope import DefaultRope, LinearRope
from treering.layers.parallel.sharding import Plan
from treering.models.families import families
from treering.models.families.fields import Fields

torch = pytest.importorskip("torch")

VOCAB = 96
LENGTHS = (*range(1, 41), 120)
"""The last is far past the window."""


def config(layers: int = 8, **changes: Any) -> dict[str, Any]:
    """A tiny one: 8 layers are a period and two more."""
    return {
        "model_type": "gemma3_text",
        "vocab_size": VOCAB,
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": layers,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 256,
        "query_pre_attn_scalar": 24,
        "sliding_window": 7,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
        **changes,
    }


def near(found: np.ndarray, right: np.ndarray) -> bool:
    return bool(np.abs(found - right).max() <= 1e-4 * max(1.0, float(np.abs(right).max()) / 10))


@pytest.fixture
def plan(mesh: Callable[..., Any]) -> Plan:
    return Plan(mesh(), "decode")


# Whole periods, one that breaks off, and less than one; the short ones in the default tier.
@pytest.mark.parametrize(
    "layers,changes",
    [
        (8, {}),
        pytest.param(12, {"sliding_window": 32, "rope_parameters": None}, marks=pytest.mark.long),
        pytest.param(4, {"num_key_value_heads": 1}, marks=pytest.mark.long),
        pytest.param(26, {"head_dim": 8, "tie_word_embeddings": False}, marks=pytest.mark.long),
    ],
)
def test_logits_at_every_length(tmp_path: Path, plan: Plan, layers: int, changes: dict[str, Any]) -> None:
    model = oracle(config(layers, **changes))
    mine = ours(tmp_path, model, plan)
    ids = np.random.default_rng(0).integers(0, VOCAB, (len(LENGTHS), max(LENGTHS)))
    right = right_logits(model, ids)
    found = run(mine, plan, np.where(np.arange(max(LENGTHS)) < np.array(LENGTHS)[:, None], ids, -1))
    for row, length in enumerate(LENGTHS):
        assert near(found[row, :length], right[row, :length]), length
    assert np.abs(right).max() > 5


def test_decoding_token_by_token(tmp_path: Path, mesh: Callable[..., Any]) -> None:
    """Through the cache, on four devices: windows, angles and the broken-off period hold there too."""
    from treering.configs.precision import Precision
    from treering.infer.engine import Engine

    kinds = ["sliding_attention", "full_attention"] * 2 + ["sliding_attention"]
    model = oracle(config(5, layer_types=kinds))
    plan = Plan(mesh(context=4), "decode")
    stacked = ours(tmp_path, model, plan)
    ids = np.random.default_rng(1).integers(0, VOCAB, (1, 24))
    right = right_logits(model, ids)[0]
    for mine in (stacked, stacked.unrolled()):
        engine = Engine(mine, plan, Precision(), batch=1, capacity=64)
        found, state = engine.append(engine.empty_state(), [list(map(int, ids[0, :15]))])
        rows = [np.asarray(found)[0]]
        for token in ids[0, 15:]:
            found, state = engine.append(state, [[int(token)]])
            rows.append(np.asarray(found)[0])
        assert near(np.stack(rows), right[14:])


@pytest.mark.long
def test_a_long_prompt_is_spread_over_devices(tmp_path: Path, mesh: Callable[..., Any]) -> None:
    """Two long chunks and a short one on four devices, each device with every fourth token: the windows hold there."""
    from treering.configs.precision import Precision
    from treering.infer.engine import Engine

    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    model = oracle(config(3, layer_types=kinds, sliding_window=32, max_position_embeddings=1024))
    plan = Plan(mesh(context=4), "decode")
    ids = np.random.default_rng(1).integers(0, VOCAB, (1, 600))
    engine = Engine(ours(tmp_path, model, plan), plan, Precision(), batch=1, capacity=640)
    assert engine.chunks.of(600) == [256, 256, 128] and engine.chunks.long == 256
    found, _ = engine.append(engine.empty_state(), [list(map(int, ids[0]))])
    assert near(np.asarray(found)[0], right_logits(model, ids)[0, -1])


@pytest.mark.long
def test_bfloat16_is_as_near_to_float32_as_transformers(tmp_path: Path, plan: Plan) -> None:
    ids = np.random.default_rng(2).integers(0, VOCAB, (8, 40))
    rounded = oracle(config(2), dtype=torch.bfloat16)
    exact = right_logits(oracle(config(2), dtype=torch.bfloat16).float(), ids)
    theirs = right_logits(rounded, ids) - exact
    mine = run(ours(tmp_path, rounded, plan), plan, ids, dtype="bfloat16") - exact
    assert 0 < np.sqrt((mine**2).mean()) <= 2 * np.sqrt((theirs**2).mean())


@pytest.mark.parametrize("layers", [8, pytest.param(12, marks=pytest.mark.long)])
def test_there_and_back_bit_for_bit(tmp_path: Path, layers: int) -> None:
    from transformers import AutoModelForCausalLM

    there_and_back(oracle(config(layers), dtype=torch.bfloat16), tmp_path)
    # Read in float32, since a model that is cast keeps its embeddings' factor as bfloat16 rounded it.
    theirs, mine = (AutoModelForCausalLM.from_pretrained(tmp_path / name, dtype="float32") for name in ("hf", "back"))
    ids = np.random.default_rng(0).integers(0, VOCAB, (1, 60))
    assert near(right_logits(mine, ids), right_logits(theirs, ids))


def test_gguf_gives_the_same_checkpoint(tmp_path: Path) -> None:
    import tiny
    from treering.models.checkpoint.record import read_record
    from treering.models.conversion.convert import convert

    source = config(query_pre_attn_scalar=16, rms_norm_eps=1e-6)
    model = oracle(source)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):  # numbers that 1 can be added to without rounding
                parameter.copy_((parameter * 1024).round() / 1024)
    model.save_pretrained(tmp_path / "hf")
    weights = {name: parameter.detach().numpy() for name, parameter in model.named_parameters()}
    rope = {"gemma3.rope.scaling.type": "linear", "gemma3.rope.scaling.factor": 8.0}
    window = {"gemma3.attention.sliding_window": 7, "gemma3.rope.freq_base_swa": 10000.0}
    tiny.write_gguf(tmp_path / "model.gguf", source | {"rope_theta": 1e6}, weights, metadata=rope | window)
    convert(tmp_path / "hf", tmp_path / "first")
    convert(tmp_path / "model.gguf", tmp_path / "second")
    first, second = read_record(tmp_path / "first"), read_record(tmp_path / "second")
    assert (first.config, first.fingerprint) == (second.config, second.fingerprint)


@pytest.mark.long
def test_the_text_model_of_one_that_sees(tmp_path: Path, plan: Plan, capsys: pytest.CaptureFixture[str]) -> None:
    """As the larger sizes are published: its logits of text, and an export that is the text model alone."""
    from transformers import AutoModelForCausalLM, Gemma3Config, Gemma3ForConditionalGeneration

    from treering.models.conversion.convert import convert
    from treering.models.conversion.export import export

    sees = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
    text = {key: value for key, value in config(3).items() if key != "model_type"}
    whole = Gemma3Config(
        text_config=text, vision_config={**sees, "image_size": 28, "patch_size": 14}, mm_tokens_per_image=4
    )
    model = Gemma3ForConditionalGeneration(whole).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.model.language_model.parameters():
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    mine = ours(tmp_path, model, plan)
    assert "only the text model is read, without multi_modal_projector, vision_tower" in capsys.readouterr().err
    ids = np.random.default_rng(0).integers(0, VOCAB, (1, 40))
    right = right_logits(model, ids)
    assert near(run(mine, plan, ids), right)
    convert(tmp_path / "hf", tmp_path / "checkpoint")
    export(tmp_path / "checkpoint", tmp_path / "back")
    back = AutoModelForCausalLM.from_pretrained(tmp_path / "back")
    assert type(back).__name__ == "Gemma3ForCausalLM" and near(right_logits(back.eval(), ids), right)
    file = tmp_path / "hf" / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "text_config": None}))
    with pytest.raises(ValueError, match='config.json: "text_config": it is missing'):
        convert(tmp_path / "hf", tmp_path / "other")


def read(**fields: Any) -> Gemma3Config:
    raw = Fields({key: value for key, value in config(**fields).items()}, "config.json")
    raw.take("model_type")
    found = families()["gemma3"].from_hf(raw)
    raw.finish()
    return found


def test_config_json_in_every_spelling() -> None:
    new = read()
    assert (new.rope, new.local_theta, new.period, new.window) == (LinearRope(theta=1e6, factor=8.0), 1e4, 6, 7)
    old = read(
        rope_parameters=None,
        rope_scaling={"rope_type": "linear", "factor": 8.0},
        rope_theta=1e6,
        rope_local_base_freq=1e4,
        sliding_window_pattern=6,
        cache_implementation="hybrid",
    )
    assert old == new
    written = json.loads(json.dumps(families()["gemma3"].to_hf(new)))
    again = Fields(written, "config.json")
    assert families()["gemma3"].from_hf(again) == new
    absent = read(rope_parameters=None)
    assert absent.rope == DefaultRope(theta=1e6) and absent.local_theta == 1e4 and absent.tie_embeddings
    local, all_ = "sliding_attention", "full_attention"
    assert read(layer_types=([local] * 2 + [all_]) * 2 + [local] * 2).period == 3
    assert read(layer_types=[local] * 8).period == 9
    for wrong, words in (
        ({"layer_types": [all_] + [local] * 7}, "\"layer_types\" .*only runs of 'sliding_attention' of equal length"),
        ({"layer_types": [local]}, '"layer_types" .*it must be a list of 8 strings'),
        ({"use_bidirectional_attention": True}, '"use_bidirectional_attention" True'),
        ({"final_logit_softcapping": 30.0}, '"final_logit_softcapping" 30.0'),
        ({"hidden_activation": "silu"}, '"hidden_activation" silu.*works: absent, gelu_pytorch_tanh'),
        ({"rope_parameters": {local: {"rope_type": "linear", "factor": 2.0}}}, "layers with a window are not scaled"),
        ({"sliding_window": 0}, "window 0: it must be at least 1"),
    ):
        with pytest.raises(ValueError, match=words):
            read(**wrong)


@pytest.mark.long
def test_training_reaches_the_blocks_of_a_period_that_breaks_off(mesh: Callable[..., Any]) -> None:
    """One step on four devices changes every parameter, as one on a single device does."""
    import dataclasses

    import jax

    from treering.configs.precision import Precision
    from treering.configs.train import OptimizerConfig, StepConfig
    from treering.models.checkpoint.model import named_leaves
    from treering.train.data.batch import Batch, shard_batch
    from treering.train.step import init_state, step_program

    small = dataclasses.replace(read(), layers=3, period=2, context_length=64)
    rng = np.random.default_rng(0)
    ids = rng.integers(1, VOCAB, (4, 33)).astype(np.int32)
    after = []
    for sizes in ({}, {"fsdp": 2, "context": 2}):
        here = Plan(mesh(**sizes), "train")
        model = here.init(lambda: families()["gemma3"].init(small, jax.random.key(0)), "parameters")
        before = {name: np.asarray(leaf) for name, leaf in named_leaves(model).items()}
        optimizer = OptimizerConfig(kind="sgd", learning_rate=1.0)
        state = init_state(model, optimizer, here)
        step = step_program(state, StepConfig(precision=Precision()), optimizer, here, steps=10, batch=4, seq=32)
        positions = np.broadcast_to(np.arange(32, dtype=np.int32), (4, 32)).copy()
        batch = Batch(ids[:, :-1], ids[:, 1:], positions, np.ones((4, 32), np.int32))
        state, metrics = step(None, state, shard_batch(batch, here))
        after.append({name: np.asarray(leaf) for name, leaf in named_leaves(state.model).items()})
        assert np.isfinite(float(metrics.loss))
        for name, old in before.items():
            assert not np.array_equal(after[-1][name], old), name
    for name, one in after[0].items():
        assert np.abs(one - after[1][name]).max() <= 1e-5, name


@pytest.mark.long
def test_the_decode_step_moves_no_cache(mesh: Callable[..., Any]) -> None:
    """One all-to-all and two all-reduces a layer, whole periods and broken-off ones alike, and caches stay in place."""
    import dataclasses

    import jax

    import hlo
    from treering.configs.precision import Precision
    from treering.infer.engine import Engine

    small = dataclasses.replace(read(), layers=5, period=2)
    plan = Plan(mesh(context=8), "decode")
    model = plan.init(lambda: families()["gemma3"].init(small, jax.random.key(0)), "parameters")
    engine = Engine(model, plan, Precision(), batch=1, capacity=16384)
    program = hlo.read(engine.decode_program().compiled, loops=1)
    assert program.launches() == {"all-to-all": 5, "all-reduce": 11, "all-gather": 1}
    cache = engine.cache_bytes_per_device()
    assert program.moves(at_least=cache // 2 // 5) == [] and program.alias_bytes >= cache
