"""Prefill and decode: the two compiled programs of generation, and the loop that runs them."""

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, PRNGKeyArray

from configs.precision import Precision
from infer.sampling import sample
from layers.attention import Context
from layers.cache import DecodeState, PagedAttention
from layers.program import Program
from layers.sharding import Plan
from models.transformer import Transformer, empty_pools

PAGE_SLOTS = 256
"""Slots of a page on each device: long enough that a page's products run at speed."""
PREFILL_CHUNKS = (16, 64, 256)
"""Tokens that one prefill call takes. Few, since each is a program to compile; a prompt's last chunk is padded."""


def _advance(
    model: Transformer,
    state: DecodeState,
    tokens: Int[Array, "batch seq"],
    count: Int[Array, "batch"],
    plan: Plan,
    precision: Precision,
) -> tuple[Float[Array, "batch vocab"], DecodeState]:
    """Appends the first `count` of each row's tokens; logits of each row's last one."""
    steps = jnp.arange(tokens.shape[1])[None, :]
    positions = jnp.where(steps < count[:, None], state.lengths[:, None] + steps, -1)
    context = Context(positions, None, PagedAttention(state.table), plan)
    with jax.default_matmul_precision(precision.matmul):
        hidden, pools = model(tokens, context, state.pools, dtype=jnp.dtype(precision.compute))
        last = jnp.maximum(count - 1, 0)[:, None, None]
        hidden = jnp.take_along_axis(hidden, last, axis=1)
        logits = model.unembed(hidden, context)[:, 0]
    return logits, DecodeState(pools, state.table, state.lengths + count)


def _placed(tree: DecodeState, plan: Plan) -> DecodeState:
    """States leave a program as they entered it, or the next call would compile anew."""
    return jax.tree.map(jax.lax.with_sharding_constraint, tree, plan.shardings(tree, "activations"))


def prefill(
    model: Transformer,
    state: DecodeState,
    tokens: Int[Array, "batch seq"],
    count: Int[Array, "batch"],
    plan: Plan,
    precision: Precision,
) -> tuple[Float[Array, "batch vocab"], DecodeState]:
    """Appends a chunk of prompt to each row: `count` tokens of `tokens`, none where it is 0.

    Returns the logits after each row's last token, and the state; the state passed in is consumed.
    """
    logits, state = _advance(model, state, tokens, count, plan, precision)
    return logits, _placed(state, plan)


def decode_step(
    model: Transformer,
    state: DecodeState,
    tokens: Int[Array, "batch"],
    live: Int[Array, "batch"],
    key: PRNGKeyArray,
    temperature: Float[Array, "batch"] | None,
    plan: Plan,
    precision: Precision,
) -> tuple[Int[Array, "batch"], DecodeState]:
    """Appends one token to each row where `live` is 1, and draws the next; the state passed in is consumed."""
    logits, state = _advance(model, state, tokens[:, None], live, plan, precision)
    return plan.constrain(sample(logits, key, temperature, plan), "batch"), _placed(state, plan)


@eqx.filter_jit
def first_token(
    logits: Float[Array, "batch vocab"], key: PRNGKeyArray, temperature: Float[Array, "batch"] | None, plan: Plan
) -> Int[Array, "batch"]:
    """Draws the token after a prompt."""
    return plan.constrain(sample(logits, key, temperature, plan), "batch")


@dataclass(frozen=True)
class Step:
    """One generated token of one row."""

    row: int
    token: int
    finish_reason: Literal["stop", "length"] | None
    """Set on a row's last token."""


class Engine:
    """A model on a mesh, ready to generate for up to `batch` rows of up to `capacity` tokens each.

    Raises ValueError where the batch is no multiple of the devices over rows.
    """

    def __init__(self, model: Transformer, plan: Plan, precision: Precision, *, batch: int, capacity: int):
        groups = plan.size("data", "fsdp")
        if batch % groups:
            raise ValueError(
                f"batch {batch} is no multiple of mesh.data x mesh.fsdp = {groups}: each takes an equal number of rows"
            )
        if capacity < 1:
            raise ValueError(f"capacity {capacity}: a row holds at least 1 token")
        self.model, self.plan, self.precision = model, plan, precision
        self.batch, self.capacity = batch, capacity
        self._programs: dict[tuple[str, int, bool], Program] = {}

    def _make_state(self) -> DecodeState:
        devices = self.plan.size("context")
        slots = min(PAGE_SLOTS, -(-self.capacity // devices))
        row_pages = -(-self.capacity // (slots * devices))
        rows_here = self.batch // self.plan.size("data", "fsdp")

        own = jnp.arange(self.batch, dtype=jnp.int32) % rows_here
        return DecodeState(
            pools=empty_pools(
                self.model.config,
                self.model.places,
                pages=self.batch * row_pages,
                page_tokens=slots * devices,
                dtype=jnp.dtype(self.precision.cache),
            ),
            table=own[:, None] * row_pages + jnp.arange(row_pages, dtype=jnp.int32)[None, :],
            lengths=jnp.zeros(self.batch, jnp.int32),
        )

    def empty_state(self) -> DecodeState:
        """A state of empty rows, built straight onto its devices."""
        return self.plan.init(self._make_state, "activations")

    def abstract_state(self) -> DecodeState:
        """Shapes, dtypes and shardings of a state."""
        return self.plan.abstract(eqx.filter_eval_shape(self._make_state), "activations")

    def _rows(self, *shape: int, dtype: Any = jnp.int32, dims: str = "batch") -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=self.plan.sharding(dims, shape))

    def _heat(self, sampled: bool) -> jax.ShapeDtypeStruct | None:
        return self._rows(self.batch, dtype=jnp.float32) if sampled else None

    def prefill_program(self, chunk: int) -> Program:
        """The compiled `prefill` for chunks of `chunk` tokens."""
        if ("prefill", chunk, False) not in self._programs:
            self._programs["prefill", chunk, False] = Program(
                functools.partial(prefill, plan=self.plan, precision=self.precision),
                self.model,
                self.abstract_state(),
                self._rows(self.batch, chunk, dims="batch seq"),
                self._rows(self.batch),
            )
        return self._programs["prefill", chunk, False]

    def decode_program(self, sampled: bool = False) -> Program:
        """The compiled `decode_step`; greedy choice is a program of its own, without noise."""
        if ("decode", 1, sampled) not in self._programs:
            self._programs["decode", 1, sampled] = Program(
                functools.partial(decode_step, plan=self.plan, precision=self.precision),
                self.model,
                self.abstract_state(),
                self._rows(self.batch),
                self._rows(self.batch),
                jax.random.key(0),
                self._heat(sampled),
            )
        return self._programs["decode", 1, sampled]

    def compile(self, prompt_tokens: int, *, sampled: bool = False) -> None:
        """Compiles ahead all that generating from a prompt of this length runs."""
        for size in chunk_sizes(prompt_tokens):
            self.prefill_program(size)
        self.decode_program(sampled)

    def put(self, values: np.ndarray, dims: str = "batch") -> Array:
        """Host values as a global array with `dims`."""
        return jax.device_put(values, self.plan.sharding(dims, values.shape))

    def cache_bytes_per_device(self) -> int:
        """Bytes of keys and values that one device holds, filled or not."""
        pools = self.abstract_state().pools
        total = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(pools))
        return total // self.plan.size("data", "fsdp", "context", "tensor")

    def prefill(self, state: DecodeState, prompts: Sequence[Sequence[int]]) -> tuple[Array, DecodeState]:
        """Appends each row's prompt (an empty one leaves its row untouched), in chunks of few shapes.

        Returns the logits `[batch vocab]` after each row's last token, on the host's side still sharded.
        """
        done = 0
        kept = None
        for size in chunk_sizes(max(len(prompt) for prompt in prompts)):
            tokens = np.zeros((self.batch, size), np.int32)
            count = np.zeros(self.batch, np.int32)
            for row, prompt in enumerate(prompts):
                part = prompt[done : done + size]
                tokens[row, : len(part)], count[row] = part, len(part)
            program = self.prefill_program(size)
            logits, state = program(self.model, state, self.put(tokens, "batch seq"), self.put(count))
            # A row whose prompt ended in an earlier chunk keeps the logits it had there.
            kept = logits if kept is None else jnp.where(self.put(count > 0)[:, None], logits, kept)
            done += size
        assert kept is not None, "prefill of no tokens"
        return kept, state

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        max_new_tokens: int,
        end_ids: frozenset[int] = frozenset(),
        temperature: float = 0.0,
        seed: int = 0,
    ) -> Iterator[Step]:
        """Generates for up to `batch` prompts at once, yielding each token as it comes, end tokens included.

        A row stops at any of `end_ids` ("stop"), or after `max_new_tokens` or at capacity ("length").

        Raises ValueError for an empty prompt, one longer than the capacity, an id beyond the vocabulary, more prompts
        than rows, or a negative temperature.
        """
        check_prompts(prompts, self.batch, self.capacity, self.model.config.vocab)
        if temperature < 0:
            raise ValueError(f"temperature {temperature} is negative: 0 takes the likeliest token, above 0 samples")
        if max_new_tokens < 1:
            return
        rows = [list(prompt) for prompt in prompts] + [[] for _ in range(self.batch - len(prompts))]
        heat = None if temperature == 0 else self.put(np.full(self.batch, temperature, np.float32))
        key, first_key = jax.random.split(jax.random.key(seed))
        logits, state = self.prefill(self.empty_state(), rows)
        tokens = first_token(logits, first_key, heat, self.plan)
        budget = [min(max_new_tokens, self.capacity - len(row)) if row else 0 for row in rows]
        made = [0] * self.batch
        live = np.array([room > 0 for room in budget], np.int32)
        program = self.decode_program(heat is not None)
        while live.any():
            for row, token in enumerate(np.asarray(tokens)):
                if not live[row]:
                    continue
                made[row] += 1
                reason: Literal["stop", "length"] | None = None
                if int(token) in end_ids:
                    reason = "stop"
                elif made[row] == budget[row]:
                    reason = "length"
                live[row] = reason is None
                yield Step(row, int(token), reason)
            if live.any():
                key, step_key = jax.random.split(key)
                tokens, state = program(self.model, state, tokens, self.put(live), step_key, heat)


def chunk_sizes(tokens: int) -> list[int]:
    """The chunks that take a prompt of `tokens`: as many of the largest size as fit, then the smallest that holds
    the rest."""
    whole, rest = divmod(tokens, PREFILL_CHUNKS[-1])
    tail = [next(size for size in PREFILL_CHUNKS if size >= rest)] if rest else []
    return [PREFILL_CHUNKS[-1]] * whole + tail


def check_prompts(prompts: Sequence[Sequence[int]], batch: int, capacity: int, vocab: int) -> None:
    """Raises ValueError for prompts that the engine cannot hold."""
    if not 0 < len(prompts) <= batch:
        raise ValueError(f"{len(prompts)} prompts for {batch} rows: give 1 to {batch}")
    for prompt in prompts:
        if not prompt:
            raise ValueError("the prompt is empty: give at least one token to continue from")
        if len(prompt) > capacity:
            raise ValueError(f"the prompt has {len(prompt)} tokens and a row holds {capacity}: shorten the prompt")
        wrong = [token for token in prompt if not 0 <= token < vocab]
        if wrong:
            raise ValueError(f"token id {wrong[0]} is outside the vocabulary of {vocab}")
