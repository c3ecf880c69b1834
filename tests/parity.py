"""transformers as the oracle of parity tests, and our own model beside it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from treering.layers.parallel.sharding import Plan

torch = pytest.importorskip("torch")


def oracle(config: Mapping[str, Any], *, seed: int = 0, dtype: Any = torch.float32) -> Any:
    """transformers' model with every parameter random."""
    from transformers import AutoConfig, AutoModelForCausalLM

    fields = dict(config)
    loaded = AutoConfig.for_model(fields.pop("model_type"), **fields)
    model = AutoModelForCausalLM.from_config(loaded, attn_implementation="eager").eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            drawn = 0.3 * torch.randn(parameter.shape, generator=generator)
            parameter.copy_(drawn + 1 if name.endswith("norm.weight") else drawn)
    return model.to(dtype)


def right_logits(model: Any, ids: np.ndarray) -> np.ndarray:
    with torch.no_grad():
        return model(torch.tensor(ids), use_cache=False).logits.float().numpy()


def ours(folder: Path, model: Any, plan: Plan) -> Any:
    """Our model of the same weights, through the folder that transformers writes."""
    from treering.models.conversion.load import open_model

    model.save_pretrained(folder / "hf")
    return open_model(folder / "hf").load(plan, None)


def there_and_back(model: Any, folder: Path) -> Any:
    """transformers' model of what we export after converting `model`, each parameter's bits compared on the way."""
    from transformers import AutoModelForCausalLM

    from treering.models.conversion.convert import convert
    from treering.models.conversion.export import export

    model.save_pretrained(folder / "hf")
    convert(folder / "hf", folder / "checkpoint")
    export(folder / "checkpoint", folder / "back", shard_bytes=60_000)
    back, said = AutoModelForCausalLM.from_pretrained(folder / "back", output_loading_info=True)
    assert not any(said[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    theirs = dict(model.named_parameters())
    assert theirs.keys() == dict(back.named_parameters()).keys()
    for name, parameter in back.named_parameters():
        assert parameter.dtype == theirs[name].dtype and torch.equal(parameter, theirs[name]), name
    return back


def run(model: Any, plan: Plan, ids: np.ndarray, *, dtype: str = "float32") -> np.ndarray:
    """Logits `[batch seq vocab]`; rows shorter than the longest end in -1, which is padding."""
    from treering.layers.attention.dense import dense_attention
    from treering.layers.nn.attention import ForwardInfo

    def attend(q, k, v, *, mask, info, state, layer):
        return dense_attention(q, k, v, mask=mask, positions=info.positions, segments=info.segments), state

    steps = jnp.broadcast_to(jnp.arange(ids.shape[1], dtype=jnp.int32), ids.shape)
    segments = jnp.asarray(ids >= 0, jnp.int32)
    info = ForwardInfo(jnp.where(segments > 0, steps, -1), segments, attend, plan)
    with jax.default_matmul_precision("highest"):
        logits = _forward(model, jnp.asarray(np.maximum(ids, 0), jnp.int32), info, jnp.dtype(dtype))
    return np.asarray(logits, np.float32)


@eqx.filter_jit
def _forward(model, tokens, info, dtype):
    hidden, _ = model(tokens, info, dtype=dtype)
    return model.unembed(hidden, info)
