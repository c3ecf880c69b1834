"""The keys and values of one row, layer by layer and in the order of its text: out of the cache, and into it."""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from treering.infer.request import Session
from treering.infer.scheduler import Scheduler
from treering.layers.operations.pool import NO_PAGE, token_divisor
from treering.layers.parallel.program import Program
from treering.models.progress import byte_progress


class RowTransfer:
    """Reads and writes the row of a session. Never holds more than one layer in addition to the cache."""

    def __init__(self, scheduler: Scheduler, session: Session):
        engine = scheduler.engine
        assert session.row is not None
        divisor = token_divisor(engine.plan)
        self.length = len(session.tokens)
        self.tokens = -(-self.length // divisor) * divisor
        """The row's length, rounded up to what the mesh divides."""
        self.bytes = self.length * engine.model.config.kv_bytes_per_token(np.dtype(engine.precision.cache).itemsize)
        pages = np.full((engine.groups, engine.pages_for(self.tokens)), NO_PAGE, np.int32)
        own = session.pages[: pages.shape[1]]
        pages[session.row // engine.group_rows, : len(own)] = own
        self._pages = jax.device_put(pages, engine.plan.sharding("batch row_pages", pages.shape))
        self._scheduler = scheduler

    def layers(self, description: str) -> Iterator[tuple[int, int, int]]:
        """Each layer's place in the pattern, its index there, and its number in the model; shows the bytes done."""
        model = self._scheduler.engine.model
        blocks, period = model.blocks, len(model.blocks.pattern)
        every = [(place, at, n) for place in range(period) for at, n in enumerate(model.layers_at(place))]
        every += [(period + more, 0, period * blocks.periods + more) for more in range(len(blocks.tail))]
        with byte_progress() as progress:
            task = progress.add_task(description, total=self.bytes)
            for one in every:
                yield one
                progress.advance(task, self.bytes // model.config.layers)

    def abstract(self) -> jax.ShapeDtypeStruct:
        """Of a layer's keys or values: zeros follow the row's tokens."""
        engine = self._scheduler.engine
        shape = (self.tokens, engine.model.config.kv_heads, engine.model.config.head_dim)
        sharding = engine.plan.sharding("kv_seq kv_heads head_dim", shape)
        return jax.ShapeDtypeStruct(shape, jnp.dtype(engine.precision.cache), sharding=sharding)

    def read(self, place: int, layer: int) -> dict[str, jax.Array]:
        """A layer's `keys` and `values`, each device its own part of the tokens."""
        put = self._scheduler.engine.put
        keys, values = self._run(self.read_program(place), place, put(np.int32(layer)), put(np.int32(self.length)))
        return {"keys": keys, "values": values}

    def write(self, place: int, layer: int, arrays: dict[str, jax.Array]) -> None:
        """Replaces a layer's keys and values."""
        layer_index = self._scheduler.engine.put(np.int32(layer))
        self._run(self.write_program(place), place, layer_index, arrays["keys"], arrays["values"])

    def read_program(self, place: int) -> Program:
        """`(None, pool, pages, layer, length) -> (pool, (keys, values))`."""
        engine, tokens = self._scheduler.engine, self.tokens

        def read(_, pool, pages, layer, length):
            return pool, pool.read(layer, pages, length, tokens=tokens, plan=engine.plan)

        return engine.pool_program(f"read {tokens}", read, place, self._pages, engine.abstract(), engine.abstract())

    def write_program(self, place: int) -> Program:
        """`(None, pool, pages, layer, keys, values) -> (pool, ())`."""
        engine = self._scheduler.engine

        def write(_, pool, pages, layer, keys, values):
            return pool.write(layer, pages, keys, values, plan=engine.plan), ()

        return engine.pool_program("write", write, place, self._pages, engine.abstract(), *[self.abstract()] * 2)

    def _run(self, program: Program, place: int, *inputs: jax.Array) -> Any:
        pool, result = program(None, self._scheduler.pool(place), self._pages, *inputs)
        self._scheduler.replace_pool(place, pool)
        return result
