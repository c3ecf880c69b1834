"""A tiny model, packed batches and runs of a few steps, for the tests of training.

Weights have a standard deviation of 0.3, as in `tiny`. The batches are hostile: documents of unequal length that cross
the edges of shards, answers of unequal length behind prompts that are not trained, padding, and a row without any
trained token.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import tiny
from treering.configs.llama import TINY, LlamaConfig
from treering.configs.precision import Precision
from treering.configs.train import OptimizerConfig, StepConfig
from treering.layers.parallel.sharding import Plan
from treering.models.checkpoint.model import named_leaves
from treering.models.families.registry import families
from treering.train.data.batch import IGNORED, Batch, shard_batch
from treering.train.step import TrainState, init_state, step_program

ROWS, WINDOW = 8, 32
MORE_KEY_HEADS = dataclasses.replace(TINY, kv_heads=8)
FLOAT32 = StepConfig(precision=Precision(), loss_chunk=24)
ADAMW = OptimizerConfig(learning_rate=1e-3, weight_decay=0.1)


def documents(rng: np.random.Generator, window: int, vocab: int = TINY.vocab) -> list[tuple[np.ndarray, int]]:
    """Documents that fill a window but for a little, each as its tokens and the length of its prompt."""
    found, room = [], window - int(rng.integers(0, 4))
    while room > 2:
        length = min(int(rng.integers(3, 3 * window // 4)), room)
        found.append((rng.integers(0, vocab, length), int(rng.integers(0, length - 1))))
        room -= length
    return found


def pack(rows: list[list[tuple[np.ndarray, int]]], window: int) -> Batch:
    """Rows of documents as a host batch. A token is trained to foretell the next of its document, but no prompt's."""
    fields = {name: np.full((len(rows), window), -1, np.int32) for name in ("targets", "positions")}
    fields |= {name: np.zeros((len(rows), window), np.int32) for name in ("tokens", "segments")}
    for row, found in enumerate(rows):
        at = 0
        for number, (tokens, prompt) in enumerate(found):
            end = at + len(tokens)
            fields["tokens"][row, at:end] = tokens
            fields["positions"][row, at:end] = np.arange(len(tokens))
            fields["segments"][row, at:end] = number + 1
            fields["targets"][row, at : end - 1] = np.where(np.arange(len(tokens) - 1) >= prompt, tokens[1:], IGNORED)
            at = end
    return Batch(**fields)


def packed_rows(seed: int, rows: int = ROWS, window: int = WINDOW) -> list[list[tuple[np.ndarray, int]]]:
    """Random rows of documents; the first row is all prompt, so a shard of it trains no token."""
    rng = np.random.default_rng(seed)
    found = [documents(rng, window) for _ in range(rows)]
    found[0] = [(rng.integers(0, TINY.vocab, window), window)]
    return found


def batches(count: int = 3, **sizes: int) -> list[Batch]:
    """Different batches, the same in every process."""
    return [pack(packed_rows(seed, **sizes), sizes.get("window", WINDOW)) for seed in range(count)]


def train_plan(mesh: jax.sharding.Mesh) -> Plan:
    """The training rules on a mesh."""
    return Plan(mesh, "train")


def make_model(config: LlamaConfig, plan: Plan, dtype: str = "float32") -> Any:
    """The model with the weights of `tiny.tensors`, the same on every mesh."""
    hf = tiny.LLAMA | {"num_key_value_heads": config.kv_heads, "vocab_size": config.vocab}
    hf |= {"tie_word_embeddings": config.tie_embeddings}
    tensors = tiny.tensors(hf)
    shapes = jax.eval_shape(lambda: families()["llama"].init(config, jax.random.key(0)))
    arrays = {}
    for name, pattern in families()["llama"].names(config).items():
        stacked = "{layer}" in pattern
        found = [tensors[pattern.format(layer=n)] for n in range(config.layers if stacked else 1)]
        arrays[name] = (np.stack(found) if stacked else found[0]).astype(dtype)
    names = named_leaves(shapes)
    leaves = [arrays[name].reshape(leaf.shape) for name, leaf in names.items()]
    shardings = jax.tree.leaves(plan.shardings(shapes, "parameters"))
    placed = [
        jax.make_array_from_callback(x.shape, sharding, lambda index, x=x: x[index])
        for x, sharding in zip(leaves, shardings, strict=True)
    ]
    return jax.tree.unflatten(jax.tree.structure(shapes), placed)


@dataclasses.dataclass
class Run:
    """What a few steps gave, on the host."""

    losses: list[float]
    norms: list[float]
    tokens: list[int]
    gradients: dict[str, np.ndarray]
    """Of the first step, after clipping."""
    parameters: dict[str, np.ndarray]
    """After the last."""
    state: TrainState | None


def run(
    plan: Plan,
    *,
    config: LlamaConfig = TINY,
    step: StepConfig = FLOAT32,
    optimizer: OptimizerConfig = ADAMW,
    data: list[Batch] | None = None,
    first_row: int = 0,
    rows: int | None = None,
) -> Run:
    """Trains on `data` (default: three packed batches), a step each, from the same weights on every mesh."""
    data = batches() if data is None else data
    params = step.precision.params
    state = init_state(make_model(config, plan, params), optimizer, plan, params=params)
    seq = data[0].tokens.shape[1]
    batch = rows or data[0].tokens.shape[0]
    program = step_program(state, step, optimizer, plan, steps=len(data), batch=batch, seq=seq)
    done = Run([], [], [], {}, {}, state)
    for number, host in enumerate(data):
        state, metrics = program(None, state, shard_batch(host, plan, rows=rows, first_row=first_row))
        done.losses.append(float(metrics.loss))
        done.norms.append(float(metrics.grad_norm))
        done.tokens.append(int(metrics.tokens))
        if number == 0 and optimizer.kind == "adamw":
            # The mean of gradients begins at zero: after one step it is the gradient times 1 - b1.
            means = named(state.optimizer[0].mu)
            done.gradients = {name: x / (1 - optimizer.b1) for name, x in means.items()}
    done.parameters, done.state = named(state.model), state
    return done


def named(tree: Any) -> dict[str, np.ndarray]:
    """Leaves by name, whole, on the host of every process."""
    return {name: whole(leaf) for name, leaf in named_leaves(tree).items()}


def whole(x: jax.Array) -> np.ndarray:
    """An array in full, wherever its shards lie."""
    if x.is_fully_addressable:
        return np.asarray(x)
    assert isinstance(x.sharding, jax.sharding.NamedSharding)
    replicated = jax.sharding.NamedSharding(x.sharding.mesh, jax.sharding.PartitionSpec())
    return np.asarray(jax.jit(lambda x: x, out_shardings=replicated)(x))


def difference(ours: dict[str, np.ndarray], theirs: dict[str, np.ndarray]) -> float:
    """The largest over leaves of the norm of the difference over the norm."""
    assert ours.keys() == theirs.keys()
    return max(
        float(jnp.linalg.norm((ours[name] - x).ravel()) / jnp.linalg.norm(x.ravel())) for name, x in theirs.items()
    )
