"""The compiled programs of generation, and the state that they run on.

Each is compiled once per shape. `append` runs prompt tokens through the model, `start` draws the first token after a
prompt, `decode` draws several tokens in every live row; the others change rows and pages without the model. Which
requests take which rows is up to the scheduler (`infer.scheduler`).
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from treering.configs.precision import Precision
from treering.infer.chunks import Chunks, choose_chunks
from treering.infer.sampling import Kind, draw, log_probabilities
from treering.infer.sequence_state import EngineState, SequenceState, at_rows, set_rows
from treering.layers.attention.order import striped_slot_of, striped_token_at
from treering.layers.nn.attention import ForwardInfo
from treering.layers.nn.gathered_weight import cast_matrices, gather_on_use
from treering.layers.operations.paged import PagedAttention
from treering.layers.operations.pool import DecodeState
from treering.layers.parallel.program import Program
from treering.layers.parallel.sharding import Plan
from treering.models.transformer import Transformer, empty_pools

PAGE_SLOTS = 128
"""Slots of a page on each device: long enough that a page's products run at speed, short enough that a row's last page,
which is read whole, costs little."""
MAX_STEPS = 8
"""Tokens that one call of `decode` draws in each row at most."""
Logprobs = tuple[Array, Array, Array]
"""Log-probabilities of tokens `[...]`, and those of the most likely alternatives `[... top]` with their ids."""


class Chunk(eqx.Module):
    """Tokens for some rows of the cache: the first `count` of each row's are appended to row `index`."""

    index: Int[Array, "batch"]
    tokens: Int[Array, "batch seq"]
    count: Int[Array, "batch"]


def append_tokens(
    model: Transformer, cache: DecodeState, chunk: Chunk, plan: Plan, precision: Precision, *, fresh: bool = False
) -> tuple[Float[Array, "batch vocab"], DecodeState]:
    """Appends a chunk to the cache; logits after each row's last token. `fresh` says that the rows hold nothing yet.

    A plan for prefill spreads the tokens over context, position t on device t mod p as in the cache, and gathers each
    layer's weights.
    """
    logits, cache, _ = _append(model, cache, chunk, plan, precision, fresh)
    return logits, cache


def append_scored(
    model: Transformer,
    cache: DecodeState,
    chunk: Chunk,
    targets: Int[Array, "batch seq"],
    plan: Plan,
    precision: Precision,
    *,
    top: int,
) -> tuple[Float[Array, "batch vocab"], DecodeState, Logprobs]:
    """`append_tokens`, and the log-probability of each target after its token, with `top` alternatives."""
    logits, cache, all_logits = _append(model, cache, chunk, plan, precision, False)
    scores = log_probabilities(all_logits().reshape(targets.size, -1), targets.reshape(-1), top)
    return logits, cache, jax.tree.map(lambda x: x.reshape(*targets.shape, *x.shape[1:]), scores)


def _append(
    model: Transformer, cache: DecodeState, chunk: Chunk, plan: Plan, precision: Precision, fresh: bool
) -> tuple[Float[Array, "batch vocab"], DecodeState, Callable[[], Array]]:
    """What both do: the last tokens' logits, the cache, and a function that gives the logits of all tokens."""
    lengths, tokens, seq = cache.lengths[chunk.index], chunk.tokens, chunk.tokens.shape[1]
    devices = plan.size(*plan.axes("seq", seq))
    steps = striped_token_at(lengths, devices, seq)
    if plan.table == "prefill":
        model = gather_on_use(cast_matrices(model, jnp.dtype(precision.compute)), None, plan)
        tokens = jnp.take_along_axis(tokens, steps, axis=1)
    positions = jnp.where(steps < chunk.count[:, None], lengths[:, None] + steps, -1)
    info = ForwardInfo(positions, None, PagedAttention(cache.table[chunk.index], fresh), plan)

    def logits_of(hidden):
        with jax.default_matmul_precision(precision.matmul):
            return model.unembed(hidden, info)

    with jax.default_matmul_precision(precision.matmul):
        hidden, pools = model(tokens, info, cache.pools, dtype=jnp.dtype(precision.compute))
    last = striped_slot_of(lengths, devices, seq, jnp.maximum(chunk.count - 1, 0))[:, None, None]
    logits = logits_of(jnp.take_along_axis(hidden, last, axis=1))[:, 0]
    cache = DecodeState(pools, cache.table, cache.lengths.at[chunk.index].add(chunk.count))
    return logits, cache, lambda: logits_of(hidden)


class Drawn(eqx.Module):
    """What `start` or `decode` drew: one token a row, or several steps of them."""

    tokens: Int[Array, "*steps batch"]
    """-1 where a row was not live, or the step did not run."""
    logprobs: Logprobs | None


class Engine:
    """A model on a mesh, ready to generate for up to `batch` rows of up to `capacity` tokens each.

    `pages` is the number of cache pages of each group of devices with its own rows (data x fsdp); None for as many as
    all rows need when full. Rows take pages from the pool as their requests are admitted.

    Raises ValueError where the batch is not a multiple of the devices over rows, or a size is below one.
    """

    def __init__(
        self,
        model: Transformer,
        plan: Plan,
        precision: Precision,
        *,
        batch: int,
        capacity: int,
        pages: int | None = None,
    ):
        self.groups = plan.size("data", "fsdp")
        if batch < 1 or batch % self.groups:
            raise ValueError(
                f"batch {batch}: it must be a multiple of mesh.data x mesh.fsdp = {self.groups}: each has as many rows"
            )
        if capacity < 1:
            raise ValueError(f"capacity {capacity}: it must be at least 1 token")
        self.model, self.plan, self.precision = model, plan, precision
        self.batch, self.capacity = batch, capacity
        devices = plan.size("context")
        self.page_tokens = min(PAGE_SLOTS, -(-capacity // devices)) * devices
        self.row_pages = self.pages_for(capacity)
        self.group_rows = batch // self.groups
        self.group_pages = self.group_rows * self.row_pages if pages is None else pages
        if self.group_pages < 1:
            raise ValueError(f"pages {pages}: it must be at least 1")
        self.chunks = choose_chunks(model, plan, capacity)
        self._programs: dict[tuple[Any, ...], Program] = {}

    def pages_for(self, tokens: int) -> int:
        """Pages that this many tokens of a row take."""
        return -(-tokens // self.page_tokens)

    # States.

    def _make_state(self) -> EngineState:
        row = jnp.arange(self.batch, dtype=jnp.int32) % self.group_rows
        pages = row[:, None] * self.row_pages + jnp.arange(self.row_pages, dtype=jnp.int32)[None, :]
        config = self.model.config
        return EngineState(
            cache=DecodeState(
                pools=empty_pools(
                    self.model,
                    pages=self.groups * self.group_pages,
                    page_tokens=self.page_tokens,
                    dtype=jnp.dtype(self.precision.cache),
                ),
                # Rows that own equal parts of the pool, where it is large enough for that.
                table=jnp.where(pages < self.group_pages, pages, 0),
                lengths=jnp.zeros(self.batch, jnp.int32),
            ),
            rows=SequenceState.empty(self.batch, config.vocab),
        )

    def empty_state(self) -> EngineState:
        """A state of empty rows, built straight onto its devices; each row owns its part of a pool of full size."""
        return self.plan.init(self._make_state, "activations")

    def abstract_state(self) -> EngineState:
        """Shapes, dtypes and shardings of a state."""
        return self.plan.abstract(eqx.filter_eval_shape(self._make_state), "activations")

    def cache_bytes_per_device(self) -> int:
        """Bytes of keys and values that one device holds, filled or not."""
        pools = self.abstract_state().cache.pools
        total = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(pools))
        return total // self.plan.mesh.size

    # Programs.

    def _constrain(self, state: EngineState) -> EngineState:
        """States leave a program as they entered it: the next call takes them as they are."""
        return jax.tree.map(jax.lax.with_sharding_constraint, state, self.plan.shardings(state, "activations"))

    def _program(self, key: tuple[Any, ...], function: Any, *inputs: Any) -> Program:
        if key not in self._programs:
            self._programs[key] = Program(function, self.model, self.abstract_state(), *inputs)
        return self._programs[key]

    def abstract(self, *shape: int, dtype: Any = jnp.int32) -> jax.ShapeDtypeStruct:
        """Shape and dtype of an input that is the same on all devices, as `put` makes it."""
        return jax.ShapeDtypeStruct(shape, dtype, sharding=self._replicated)

    @functools.cached_property
    def _replicated(self) -> jax.NamedSharding:
        return jax.NamedSharding(self.plan.mesh, jax.P())

    def append_program(self, rows: int, chunk: int, *, fresh: bool = False, top: int | None = None) -> Program:
        """`(model, state, index [rows], tokens [rows chunk], count [rows]) -> (state, logits [rows vocab])`.

        `fresh` says that the rows hold nothing yet, which a long chunk makes use of. A short chunk with `top` also
        takes `targets [rows chunk]`, and returns their `Logprobs` with that many alternatives.
        """
        assert top is None or chunk != self.chunks.long, "the vocabulary and a long chunk are split over one axis"
        spread = chunk == self.chunks.long
        plan = dataclasses.replace(self.plan, table="prefill") if spread else self.plan
        fresh = fresh and spread

        def append(model, state, index, tokens, count):
            part = Chunk(index, tokens, count)
            logits, cache = append_tokens(model, state.cache, part, plan, self.precision, fresh=fresh)
            return self._constrain(EngineState(cache, state.rows)), logits

        def append_with_scores(model, state, index, tokens, count, targets):
            logits, cache, scores = append_scored(
                model, state.cache, Chunk(index, tokens, count), targets, plan, self.precision, top=top or 0
            )
            return self._constrain(EngineState(cache, state.rows)), logits, scores

        shapes = self.abstract(rows), self.abstract(rows, chunk), self.abstract(rows)
        if top is None:
            return self._program(("append", rows, chunk, fresh), append, *shapes)
        return self._program(
            ("append scored", rows, chunk, top), append_with_scores, *shapes, self.abstract(rows, chunk)
        )

    def start_program(self, kind: Kind, top: int | None) -> Program:
        """`(model, state, logits [groups vocab], index [groups], done [groups]) -> (state, Drawn)`.

        Rows whose prompt is `done` draw their first token.
        """

        def start(model, state, logits, index, done):
            rows = at_rows(state.rows, index)
            token = draw(logits, rows.sampling, rows.drawn, kind, self.plan)
            # An index past the end leaves the row of a group that has no prompt as it is.
            kept = jnp.where(done, index, self.batch)
            state = EngineState(state.cache, set_rows(state.rows, kept, rows.take(token, done)))
            logprobs = None if top is None else log_probabilities(logits, token, top)
            drawn = Drawn(jnp.where(done, token, -1), logprobs)
            return self._constrain(state), jax.tree.map(lambda leaf: leaf[None], drawn)

        logits = jax.ShapeDtypeStruct(
            (self.groups, self.model.config.vocab),
            jnp.dtype(self.precision.compute),
            sharding=self.plan.sharding("batch vocab", (self.groups, self.model.config.vocab)),
        )
        shapes = logits, self.abstract(self.groups), self.abstract(self.groups, dtype=bool)
        return self._program(("start", kind, top), start, *shapes)

    def decode_program(self, kind: Kind = "greedy", top: int | None = None) -> Program:
        """`(model, state, steps) -> (state, Drawn)`: up to `steps` tokens, at most `MAX_STEPS`, in each live row.

        Ends early when no row is live. With `top`, also their `Logprobs` with that many alternatives.
        """

        def step(model, i, state, drawn):
            live = state.rows.live
            tokens = Chunk(jnp.arange(self.batch), state.rows.token[:, None], live.astype(jnp.int32))
            logits, cache = append_tokens(model, state.cache, tokens, self.plan, self.precision)
            token = draw(logits, state.rows.sampling, state.rows.drawn, kind, self.plan)
            new = Drawn(jnp.where(live, token, -1), None if top is None else log_probabilities(logits, token, top))
            drawn = jax.tree.map(lambda all, one: all.at[i].set(one), drawn, new)
            return i + 1, self._constrain(EngineState(cache, state.rows.take(token, live))), drawn

        def decode(model, state, steps):
            shape = (MAX_STEPS, self.batch)
            empty = Drawn(
                jnp.full(shape, -1, jnp.int32),
                None
                if top is None
                else (jnp.zeros(shape), jnp.zeros((*shape, top)), jnp.zeros((*shape, top), jnp.int32)),
            )
            _, state, drawn = jax.lax.while_loop(
                lambda carry: (carry[0] < steps) & jnp.any(carry[1].rows.live),
                lambda carry: step(model, *carry),
                (jnp.zeros((), jnp.int32), state, empty),
            )
            return state, drawn

        return self._program(("decode", kind, top), decode, self.abstract())

    def admit_program(self) -> Program:
        """`(model, state, row, length, pages [row_pages], SequenceState of one) -> state`: see `EngineState.admit`."""
        one = jax.tree.map(
            lambda leaf: self.abstract(1, *leaf.shape[1:], dtype=leaf.dtype),
            eqx.filter_eval_shape(self._make_state).rows,
        )
        shapes = self.abstract(), self.abstract(), self.abstract(self.row_pages), one
        return self._program(("admit",), lambda _, state, *new: self._constrain(state.admit(*new)), *shapes)

    def copy_program(self) -> Program:
        """`(model, state, source [groups], target [groups]) -> state`: see `EngineState.copy_pages`."""

        def copy(model, state, source, target):
            return self._constrain(state.copy_pages(source, target, self.plan))

        return self._program(("copy",), copy, self.abstract(self.groups), self.abstract(self.groups))

    def release_program(self) -> Program:
        """`(model, state, row) -> state`: see `EngineState.release`."""
        return self._program(("release",), lambda _, state, row: self._constrain(state.release(row)), self.abstract())

    def pool_program(self, name: str, function: Any, place: int, *inputs: Any) -> Program:
        """`function(None, pool, *inputs)` for the pool at a place of the pattern; pools of one shape share programs."""
        pool = self.abstract_state().cache.pools[place]
        key = name, *((leaf.shape, leaf.dtype) for leaf in jax.tree.leaves((pool, inputs)))
        if key not in self._programs:
            self._programs[key] = Program(function, None, pool, *inputs)
        return self._programs[key]

    def compile(
        self,
        prompt_tokens: int,
        kind: Kind = "greedy",
        top: int | None = None,
        *,
        held: int = 0,
        scored: int | None = None,
    ) -> None:
        """Compiles ahead all that one request with a prompt of this length runs, whose row holds `held` of it; with
        `scored`, that many alternatives to the prompt's tokens are reported."""
        chunks = self.chunks if scored is None else Chunks()
        for place, chunk in enumerate(chunks.of(prompt_tokens - held)):
            self.append_program(self.groups, chunk, fresh=place == held == 0, top=scored)
        self.start_program(kind, top)
        self.decode_program(kind, top)
        self.admit_program()

    def put(self, values: Any) -> Any:
        """Host values on all devices."""
        return jax.device_put(values, self._replicated)

    def append(
        self, state: EngineState, prompts: Sequence[Sequence[int]]
    ) -> tuple[Float[Array, "batch vocab"], EngineState]:
        """Appends tokens to every row, in chunks of few shapes; an empty list leaves its row untouched.

        Returns the logits after each row's last token. Generation appends row by row; this is for scoring and tests.
        """
        index = self.put(np.arange(self.batch, dtype=np.int32))
        done, kept, fresh = 0, None, not np.any(state.cache.lengths)
        for size in self.chunks.of(max(len(prompt) for prompt in prompts)):
            tokens, count = np.zeros((self.batch, size), np.int32), np.zeros(self.batch, np.int32)
            for row, prompt in enumerate(prompts):
                part = prompt[done : done + size]
                tokens[row, : len(part)], count[row] = part, len(part)
            program = self.append_program(self.batch, size, fresh=fresh and done == 0)
            state, logits = program(self.model, state, index, self.put(tokens), self.put(count))
            # A row whose tokens ended in an earlier chunk keeps the logits it had there.
            kept = logits if kept is None else jnp.where(self.put(count > 0)[:, None], logits, kept)
            done += size
        assert kept is not None, "no tokens to append"
        return kept, state
