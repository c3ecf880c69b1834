"""GGUF files and folders of one model give one checkpoint, whatever the rotary kind and the family."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tiny
from treering.configs.rope import DefaultRope
from treering.models.checkpoint.record import read_record
from treering.models.conversion.convert import convert
from treering.models.formats.open import open_source, read_source_config

LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}


def divisors_of(theta: float, head_dim: int, factor: float, original: int) -> np.ndarray:
    """What llama.cpp's converter writes for Llama 3.1, by its own loop."""
    found = []
    for i in range(0, head_dim, 2):
        wavelength = 2 * math.pi * theta ** (i / head_dim)
        if wavelength < original / 4.0:
            found.append(1.0)
        elif wavelength > original / 1.0:
            found.append(factor)
        else:
            smooth = (original / wavelength - 1.0) / (4.0 - 1.0)
            found.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(found, np.float32)


@pytest.mark.parametrize("factor,original", [(8.0, 8192), (32.0, 8192), (8.0, 32), (4.0, 256)])
@pytest.mark.parametrize("head_dim", [8, 64, 128])
def test_the_rule_of_llama_3_is_found_in_the_tensor(
    tmp_path: Path, head_dim: int, factor: float, original: int
) -> None:
    config = tiny.LLAMA | {"head_dim": head_dim, "num_hidden_layers": 1, "rope_theta": 5e5}
    scaling = LLAMA3 | {"rope_type": "llama3", "factor": factor, "original_max_position_embeddings": original}
    folder = tiny.write_folder(tmp_path / "hf", config | {"rope_scaling": scaling})
    file = tiny.write_gguf(tmp_path / "model.gguf", config, divisors=divisors_of(5e5, head_dim, factor, original))
    wanted, found = (read_source_config(open_source(source)) for source in (folder, file))
    if head_dim == 8 and factor != 4.0:
        # With four frequencies other contexts can give the same numbers: those are what counts.
        from treering.layers.nn.rope import inverse_frequencies

        assert np.allclose(inverse_frequencies(found.rope, 8), inverse_frequencies(wanted.rope, 8), rtol=1e-5, atol=0)
    else:
        assert found == wanted
    if (head_dim, factor) == (64, 32.0):
        convert(folder, tmp_path / "first")
        convert(file, tmp_path / "second")
        first, second = read_record(tmp_path / "first"), read_record(tmp_path / "second")
        assert (first.config, first.fingerprint) == (second.config, second.fingerprint)


@pytest.mark.parametrize(
    "metadata,fields",
    [
        ({"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        ({"rope.scale_linear": 2.0}, {"rope_type": "linear", "factor": 2.0}),
        ({"rope.scaling.type": "none", "rope.scaling.finetuned": True}, {}),
        (
            {
                "rope.scaling.type": "yarn",
                "rope.scaling.factor": 4.0,
                "rope.scaling.original_context_length": 64,
                "rope.scaling.finetuned": True,
            },
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
        ),
        (
            {
                "rope.scaling.type": "yarn",
                "rope.scaling.factor": 4.0,
                "rope.scaling.original_context_length": 64,
                "rope.scaling.attn_factor": 0.5,
                "rope.scaling.yarn_beta_fast": 16.0,
            },
            {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 64,
                "attention_factor": 0.5 * (0.1 * math.log(4.0) + 1),
                "beta_fast": 16.0,
            },
        ),
    ],
    ids=["linear", "old-linear", "none", "yarn", "yarn-factor"],
)
def test_keys_of_scaling(tmp_path: Path, metadata: dict[str, Any], fields: dict[str, Any]) -> None:
    folder = tiny.write_folder(tmp_path / "hf", tiny.LLAMA | {"rope_scaling": fields or None})
    keys = {f"llama.{key}": value for key, value in metadata.items()}
    file = tiny.write_gguf(tmp_path / "model.gguf", metadata=keys)
    assert read_source_config(open_source(file)) == read_source_config(open_source(folder))


def test_tensors_of_ones_change_nothing(tmp_path: Path) -> None:
    file = tiny.write_gguf(tmp_path / "model.gguf", divisors=np.ones(4, np.float32))
    assert read_source_config(open_source(file)).rope == DefaultRope(theta=10000.0)


@pytest.mark.parametrize(
    "divisors,metadata,message",
    [
        (np.array([1, 3, 2, 8], np.float32), {}, "Llama 3.1's rule does not give"),
        (divisors_of(1e4, 8, 8.0, 8192) * np.array([1, 1.001, 1, 1], np.float32), {}, "rule does not give"),
        (np.array([1, 8], np.float32), {}, r"of shape \(2,\): a head has 4 frequencies"),
        (np.array([1, 1, 8, 8], np.float32), {"llama.rope.scaling.type": "yarn"}, 'type" yarn: only one of it and'),
        (
            None,
            {"llama.rope.scaling.type": "longrope"},
            '"llama.rope.scaling.type" longrope: it is not supported .works: none, linear, yarn',
        ),
        (None, {"llama.rope.scaling.type": "yarn"}, r'model.gguf: rope: "factor": it is missing'),
        (
            None,
            {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 2.0, "llama.rope.scaling.alpha": 1.0},
            "llama.rope.scaling.alpha",
        ),
    ],
)
def test_what_no_rule_gives_is_refused(
    tmp_path: Path, divisors: np.ndarray | None, metadata: dict[str, Any], message: str
) -> None:
    file = tiny.write_gguf(tmp_path / "model.gguf", metadata=metadata, divisors=divisors)
    with pytest.raises(ValueError, match=message):
        read_source_config(open_source(file))


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
@pytest.mark.parametrize("tie", [False, True])
def test_qwen_comes_from_gguf_too(tmp_path: Path, family: str, tie: bool) -> None:
    config = tiny.LLAMA | {"model_type": family, "tie_word_embeddings": tie, "head_dim": 16}
    convert(tiny.write_folder(tmp_path / "hf", config), tmp_path / "first")
    convert(tiny.write_gguf(tmp_path / "model.gguf", config), tmp_path / "second")
    first, second = read_record(tmp_path / "first"), read_record(tmp_path / "second")
    assert first.config.family == family
    assert (first.config, first.fingerprint) == (second.config, second.fingerprint)
