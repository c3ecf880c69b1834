"""What our tests check of each size of the zoo, for a user's: does it build, shard, decode, and match?"""

import importlib
import json
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import redirect_stderr
from dataclasses import dataclass, fields, replace
from io import StringIO
from tempfile import TemporaryDirectory
from typing import Any, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, AxisType
from jaxtyping import Array, Float

from treering.configs.mesh import AXES, Axis
from treering.configs.model import ModelConfig
from treering.layers.nn.attention import ForwardInfo
from treering.layers.operations.paged import PagedAttention
from treering.layers.parallel.sharding import Plan, Table, make_mesh
from treering.models.audit.score import text_logits
from treering.models.checkpoint.model import abstract_arrays, abstract_model, named_leaves
from treering.models.checkpoint.record import Record
from treering.models.conversion.load import open_model
from treering.models.families import families, family_of
from treering.models.families.fields import Fields
from treering.models.files import listing
from treering.models.tokenizer import transformers
from treering.models.transformer import Transformer, check_mesh, empty_pools

MESHES: tuple[Mapping[Axis, int], ...] = (
    {},
    {"context": 8},
    {"fsdp": 8},
    {"data": 2, "context": 64},
    {"fsdp": 16, "context": 16},
    {"data": 2, "fsdp": 4, "context": 8, "tensor": 2},
)
"""The shapes of mesh that every size is tried on, without devices."""
TABLES: tuple[Table, ...] = ("train", "decode")
BOUND = 1e-4
"""Largest difference of two logits in float32; in proportion where logits are beyond 10."""
_TOKENS = 40


@dataclass(frozen=True)
class Finding:
    """What one check found."""

    check: str
    verdict: Literal["ok", "skipped", "FAILED"]
    message: str

    def __str__(self) -> str:
        return f"{self.check:12}  {self.verdict:7}  {self.message}"


class Skipped(Exception):
    """Why a check cannot be made here."""


def check(config: ModelConfig) -> Iterator[Finding]:
    """All findings about `config`, each as soon as it is made; a config without a family, or that does not
    build, ends them."""
    steps: tuple[tuple[str, Callable[[ModelConfig], str]], ...] = (
        ("family", _family),
        ("build", _build),
        ("names", _names),
        ("config.json", _config_json),
        ("model.json", _model_json),
        ("shardings", _shardings),
        ("decoding", _decoding),
        ("transformers", _transformers),
    )
    for name, step in steps:
        try:
            yield Finding(name, "ok", step(config))
        except Skipped as why:
            yield Finding(name, "skipped", str(why))
        except Exception as error:  # The user's own code runs in each step.
            kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
            yield Finding(name, "FAILED", kind + " ".join(str(error).split())[:600])
            if name in ("family", "build"):
                return


def _family(config: ModelConfig) -> str:
    family = families().get(config.family)
    if family is None:
        raise ValueError(
            f"{type(config).__name__} says family {config.family!r}, which is not registered: the families are "
            f"{', '.join(families())} (--plugin FILE adds one)"
        )
    if family.config_class is not type(config):
        raise ValueError(
            f"family {family.name} has configs of {family.config_class.__name__}, not {type(config).__name__}"
        )
    return f"{family.name}, the model_type {' or '.join(family.model_types)} of config.json"


def _build(config: ModelConfig) -> str:
    arrays = named_leaves(abstract_model(config))
    count = sum(math.prod(leaf.shape) for leaf in arrays.values())
    cache = config.kv_bytes_per_token(2)
    return f"{count:,} parameters in {len(arrays)} arrays; {cache:,} bytes of keys and values per token in bfloat16"


def _names(config: ModelConfig) -> str:
    ours, named = set(named_leaves(abstract_model(config))), set(families()[config.family].names(config))
    faults = [f"no name for {listing(sorted(ours - named))}"] if ours - named else []
    faults += [f"names for parameters that do not exist: {listing(sorted(named - ours))}"] if named - ours else []
    if faults:
        raise ValueError("; ".join(faults))
    return "every parameter has a tensor's name in Hugging Face's files"


def _config_json(config: ModelConfig) -> str:
    family = families()[config.family]
    written = Fields(json.loads(json.dumps(family.to_hf(config))), "config.json")
    if family_of(written) is not family:
        raise ValueError(f"config.json has model_type {written.raw['model_type']!r}, which is another family's")
    back = family.from_hf(written)
    written.finish()
    _same(config, back)
    return "written and read back, the config is the same"


def _model_json(config: ModelConfig) -> str:
    record = Record(config=config, dtype="float32", fingerprint="", source={})
    _same(config, Record.from_json(record.to_json(), "model.json").config)
    return "written and read back, the config is the same"


def _same(config: ModelConfig, back: ModelConfig) -> None:
    differ = [
        f"{field.name} {getattr(back, field.name)!r} instead of {getattr(config, field.name)!r}"
        for field in fields(config)
        if getattr(back, field.name) != getattr(config, field.name)
    ]
    if differ:
        raise ValueError(f"read back it has {'; '.join(differ)}")


def _shardings(config: ModelConfig) -> str:
    model = abstract_model(config)
    arrays = abstract_arrays(model)
    fits, refused = [], []
    for sizes in MESHES:
        name = " x ".join(f"{axis} {size}" for axis, size in sizes.items()) or "1 device"
        for table in TABLES:
            plan = abstract_plan(sizes, table)
            try:
                check_mesh(config, plan)
            except ValueError as error:
                refused.append(f"{name}: {error}")
                break
            for leaf in named_leaves(plan.abstract(arrays, "parameters")).values():
                leaf.sharding.shard_shape(leaf.shape)
        else:
            fits.append(name)
    refusals = f"; not on {'; '.join(refused)}" if refused else ""
    return f"on {', '.join(fits)}{refusals}"


def abstract_plan(sizes: Mapping[Axis, int], table: Table) -> Plan:
    """A plan on a mesh without devices."""
    shape = tuple(sizes.get(axis, 1) for axis in AXES)
    mesh: Any = AbstractMesh(shape, AXES, axis_types=(AxisType.Auto,) * len(AXES))
    return Plan(mesh, table)


def tiny(config: ModelConfig) -> ModelConfig:
    """The same architecture, small enough to run in a moment: a whole pattern of blocks, and a part of one if the
    model ends in one. Contexts and windows shrink so far that 40 tokens go beyond them."""
    period = len(abstract_model(config).blocks.pattern)
    changes: dict[str, Any] = {
        "vocab": min(config.vocab, 96),
        "layers": min(config.layers, period + (config.layers % period or period)),
        "mlp": min(config.mlp, 96),
        "context_length": min(config.context_length, 256),
    }
    if config.embed > 128:
        # More than one key head, and neither as many as query heads nor as their quotient, where the model allows it.
        kv_heads = min(config.kv_heads, 2)
        heads = kv_heads * min(config.heads // config.kv_heads, 4)
        changes |= {"kv_heads": kv_heads, "heads": heads, "head_dim": 16, "embed": 12 * heads}
    if hasattr(config.rope, "original_context"):
        changes["rope"] = replace(config.rope, original_context=32)  # pyright: ignore[reportCallIssue]
    window = getattr(config, "window", None)
    if window is not None:
        changes["window"] = min(window, 7)
    return replace(config, **changes)


def _one_device() -> Plan:
    return Plan(make_mesh(dict.fromkeys(AXES, 1), jax.devices()[:1]), "decode")


def _ids(config: ModelConfig) -> list[int]:
    return np.random.default_rng(0).integers(0, config.vocab, _TOKENS).tolist()


def _decoding(config: ModelConfig) -> str:
    """A chunk of a prompt and then tokens one by one through a cache, compared with all of them in one pass."""
    small, plan = tiny(config), _one_device()
    rng = np.random.default_rng(1)
    model = plan.init(lambda: families()[small.family].init(small, jax.random.key(0)), "parameters")
    # Weights this large show a wrong layer, which the usual ones hide.
    model = jax.tree.map(lambda leaf: leaf + 0.3 * rng.normal(size=leaf.shape).astype(leaf.dtype), model)
    ids = _ids(small)
    _near(_stepwise(model, plan, ids), text_logits(model, plan, ids), "tokens one by one and all at once")
    return f"{small.layers} layers, tiny: {_TOKENS} tokens one by one through a cache give what they give at once"


def _stepwise(model: Transformer, plan: Plan, ids: list[int]) -> Float[np.ndarray, "seq vocab"]:
    @eqx.filter_jit
    def step(model: Transformer, pools: Any, tokens: Array, start: Array) -> tuple[Array, Any]:
        positions = start + jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
        info = ForwardInfo(positions, None, PagedAttention(jnp.zeros((1, 1), jnp.int32)), plan)
        hidden, pools = model(tokens, info, pools, dtype=jnp.dtype("float32"))
        return model.unembed(hidden, info)[0], pools

    pools = empty_pools(model, pages=1, page_tokens=len(ids), dtype=jnp.dtype("float32"))
    chunk = len(ids) // 2
    rows = []
    with jax.default_matmul_precision("highest"):
        for start in (0, *range(chunk, len(ids))):
            part = ids[start : start + 1] if start else ids[:chunk]
            logits, pools = step(model, pools, jnp.asarray([part], jnp.int32), jnp.asarray(start, jnp.int32))
            rows.append(np.asarray(logits))
    return np.concatenate(rows)


def _near(found: np.ndarray, right: np.ndarray, what: str) -> float:
    if found.shape != right.shape:
        raise ValueError(f"{what} give logits of the shapes {found.shape} and {right.shape}")
    apart, scale = np.nan_to_num(np.abs(found - right), nan=np.inf).max(), float(np.abs(right).max())
    if not apart <= BOUND * max(1.0, scale / 10):
        raise ValueError(f"{what} give logits that differ by {apart:.3g} (they reach {scale:.3g})")
    return float(apart)


def _transformers(config: ModelConfig) -> str:
    """A tiny random model of transformers', and ours of the files that it writes."""
    try:
        torch: Any = importlib.import_module("torch")
    except ImportError:
        raise Skipped("comparing with transformers needs PyTorch: pip install 'treering[torch]'") from None
    library, small = transformers(), tiny(config)
    settings = json.loads(json.dumps(families()[small.family].to_hf(small)))
    model_type = settings.pop("model_type", None)
    if model_type not in library.CONFIG_MAPPING:
        raise Skipped(f"transformers does not know model_type {model_type!r}, so there is nothing to compare with")
    settings.pop("architectures", None)
    right = library.AutoModelForCausalLM.from_config(library.AutoConfig.for_model(model_type, **settings)).eval()
    generator = torch.Generator().manual_seed(0)
    ids = _ids(small)
    with torch.no_grad(), TemporaryDirectory() as folder:
        for name, parameter in right.named_parameters():
            drawn = 0.3 * torch.randn(parameter.shape, generator=generator)
            parameter.copy_(drawn + 1 if name.endswith("norm.weight") else drawn)
        theirs = right(torch.tensor([ids]), use_cache=False).logits[0].float().numpy()
        with redirect_stderr(StringIO()):  # two progress bars for a moment's work
            right.save_pretrained(folder)
            plan = _one_device()
            ours = text_logits(open_model(folder).load(plan, None), plan, ids)
    apart = _near(ours, theirs, "ours and transformers'")
    scale = np.abs(theirs).max()
    return f"{small.layers} layers, tiny and random: logits differ by {apart:.2g} at most (they reach {scale:.3g})"
