"""From options to an engine: checkpoint, tokenizer, devices, mesh."""

import time
from dataclasses import dataclass

import jax
import numpy as np

from treering.configs.infer import DeviceOptions
from treering.configs.model import ModelConfig
from treering.configs.precision import Precision
from treering.infer.engine import Engine
from treering.infer.saved_cache.record import ModelIdentity, SavedCache
from treering.infer.text.progress import count, say
from treering.layers.parallel.devices import describe, plan_for, simulate_cpu_devices
from treering.layers.parallel.sharding import Plan
from treering.models.checkpoint.hashing import fingerprint, hash_arrays
from treering.models.checkpoint.model import named_leaves
from treering.models.conversion.load import OpenModel
from treering.models.tokenizer import Tokenizer
from treering.models.transformer import Transformer, check_mesh


@dataclass(frozen=True)
class Loaded:
    """A model on its devices."""

    model: Transformer
    tokenizer: Tokenizer
    plan: Plan
    precision: Precision
    identity: ModelIdentity | None
    """What its caches belong to, where the fingerprint of its weights was asked for."""

    def engine(self, *, rows: int, capacity: int) -> Engine:
        """An engine for `rows` rows, rounded up to what the mesh divides; says how large its cache is."""
        groups = self.plan.size("data", "fsdp")
        batch = -(-rows // groups) * groups
        engine = Engine(self.model, self.plan, self.precision, batch=batch, capacity=capacity)
        size = f"{count(batch, 'row')} of {count(capacity, 'token')}"
        say(f"cache {engine.cache_bytes_per_device():,} bytes per device, for {size}")
        return engine

    def cache_bytes(self, tokens: int) -> int:
        """Bytes of the keys and values of this many tokens."""
        return tokens * self.model.config.kv_bytes_per_token(np.dtype(self.precision.cache).itemsize)


def make_plan(config: ModelConfig, options: DeviceOptions) -> tuple[Plan, Precision]:
    """The mesh and the dtypes that the options ask for; raises ValueError where they do not fit the model."""
    if options.cpu_devices is not None:
        simulate_cpu_devices(options.cpu_devices)
    plan = plan_for(options.mesh, "decode", fill="context")
    check_mesh(config, plan)
    dtype = options.dtype or ("float32" if jax.default_backend() == "cpu" else "bfloat16")
    return plan, Precision(params=dtype, compute=dtype, cache=dtype)


def load(
    opened: OpenModel,
    tokenizer: Tokenizer,
    options: DeviceOptions,
    *,
    rows: int = 1,
    saved: SavedCache | None = None,
    fingerprinted: bool = False,
) -> Loaded:
    """Weights onto devices, to generate for `rows` rows at a time; says the mesh and how long it took.

    A fingerprint of the weights takes another pass over them. Raises ValueError where `saved` is of another model,
    dtype or weights.
    """
    plan, precision = make_plan(opened.config, options)
    if saved is not None:
        saved.check_model(opened.config, opened.name)
        saved.check_dtype(precision.cache)
    say("mesh", describe(plan))
    started = time.perf_counter()
    model = opened.load(plan, precision.params)
    # Of the stacked form, which is the same however the blocks run.
    hashed = fingerprinted or saved is not None
    weights = fingerprint(hash_arrays(named_leaves(model)).items()) if hashed else ""
    if saved is not None:
        saved.check_weights(weights, opened.name)
    one_cpu = plan.mesh.size == 1 and jax.default_backend() == "cpu"
    if options.layers == "unrolled" or (options.layers == "auto" and one_cpu):
        model = model.unrolled(rows=rows if one_cpu else 1)
    say(f"weights loaded in {time.perf_counter() - started:.1f} s, {precision.params}")
    whose = {"checkpoint": opened.name, "weights": weights, "dtype": precision.cache}
    identity = ModelIdentity.of(opened.config, **whose) if hashed else None
    return Loaded(model, tokenizer, plan, precision, identity)
