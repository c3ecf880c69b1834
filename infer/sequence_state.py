"""What the device keeps of each row in addition to its cache: the last token, and when to stop."""

import dataclasses
from collections.abc import Collection, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from treering.configs.sampling import SamplingConfig
from treering.infer.sampling import AnyArray, SamplingRows
from treering.layers.operations.pool import DecodeState
from treering.layers.parallel.sharding import Plan, array_field

MAX_ENDS = 8
"""End tokens that a row is stopped at on device."""
COLDEST = 1e-20
"""Lower temperatures choose as this one does, and logits divided by them may overflow."""


class SequenceState(eqx.Module):
    """The rows of a running batch."""

    token: Int[AnyArray, "batch"] = array_field("batch")
    """The last token drawn; the cache does not hold it yet."""
    live: Bool[AnyArray, "batch"] = array_field("batch")
    """Whether the row draws more tokens."""
    drawn: Int[AnyArray, "batch"] = array_field("batch")
    budget: Int[AnyArray, "batch"] = array_field("batch")
    """Tokens that the row may draw in all."""
    ends: Int[AnyArray, "batch ends"] = array_field("batch ends")
    """Tokens that end the row; -1 for none."""
    sampling: SamplingRows

    @staticmethod
    def empty(batch: int, vocab: int) -> "SequenceState":
        """No row is live."""
        zeros = jnp.zeros(batch, jnp.int32)
        return SequenceState(
            token=zeros,
            live=jnp.zeros(batch, bool),
            drawn=zeros,
            budget=zeros,
            ends=jnp.full((batch, MAX_ENDS), -1, jnp.int32),
            sampling=SamplingRows.neutral(batch, vocab),
        )

    @staticmethod
    def of_request(
        prompt: Sequence[int], budget: int, end_ids: Collection[int], sampling: SamplingConfig, vocab: int
    ) -> "SequenceState":
        """One row, not live yet, as host arrays; for settings that `check_settings` let pass."""
        bias: Any = np.zeros((1, vocab), np.float32)
        for token, value in sampling.logit_bias:
            bias[0, token] = value
        prompted: Any = np.zeros((1, vocab), bool)
        prompted[0, list(prompt)] = True
        counts: Any = np.zeros((1, vocab), np.int32)
        ends: Any = np.array([(sorted(end_ids) + [-1] * MAX_ENDS)[:MAX_ENDS]], np.int32)

        def one(value: float | int | bool, dtype: type = np.float32) -> Any:
            return np.array([value], dtype)

        return SequenceState(
            token=one(0, np.int32),
            live=one(False, np.bool_),
            drawn=one(0, np.int32),
            budget=one(budget, np.int32),
            ends=ends,
            sampling=SamplingRows(
                seed=one(sampling.seed, np.uint32),
                temperature=one(sampling.temperature and max(sampling.temperature, COLDEST)),
                top_k=one(min(sampling.top_k, vocab), np.int32),
                top_p=one(sampling.top_p),
                min_p=one(sampling.min_p),
                repetition_penalty=one(sampling.repetition_penalty),
                presence_penalty=one(sampling.presence_penalty),
                frequency_penalty=one(sampling.frequency_penalty),
                bias=bias,
                prompted=prompted,
                counts=counts,
            ),
        )

    def take(self, token: Int[Array, "batch"], where: Bool[Array, "batch"]) -> "SequenceState":
        """After drawing `token` in the rows of `where`: they are live unless it ends them or their budget."""
        drawn = self.drawn + where
        ended = jnp.any(token[:, None] == self.ends, axis=1) | (drawn >= self.budget)
        rows = jnp.arange(token.shape[0])
        counts = self.sampling.counts.at[rows, token].add(where.astype(jnp.int32))
        return dataclasses.replace(
            self,
            token=jnp.where(where, token, self.token),
            live=jnp.where(where, ~ended, self.live),
            drawn=drawn,
            sampling=dataclasses.replace(self.sampling, counts=counts),
        )


class EngineState(eqx.Module):
    """All that changes while an engine runs."""

    cache: DecodeState
    rows: SequenceState

    def admit(
        self, row: Int[Array, ""], length: Int[Array, ""], pages: Int[Array, "row_pages"], new: SequenceState
    ) -> "EngineState":
        """With these pages for a row, the first `length` tokens of which are its own, and its settings."""
        table, lengths = self.cache.table.at[row].set(pages), self.cache.lengths.at[row].set(length)
        return EngineState(DecodeState(self.cache.pools, table, lengths), set_rows(self.rows, row[None], new))

    def release(self, row: Int[Array, ""]) -> "EngineState":
        """With a row that draws no more."""
        return eqx.tree_at(lambda state: state.rows.live, self, self.rows.live.at[row].set(False))

    def copy_pages(self, source: Int[Array, "groups"], target: Int[Array, "groups"], plan: Plan) -> "EngineState":
        """With one page of each group copied to another of its pages."""
        pools = tuple(pool.with_copies(source, target, plan) for pool in self.cache.pools)
        return eqx.tree_at(lambda state: state.cache.pools, self, pools)


def at_rows(tree: SequenceState, index: Int[Array, "some"]) -> SequenceState:
    """The rows of `index`."""
    return jax.tree.map(lambda leaf: leaf[index], tree)


def set_rows(tree: SequenceState, index: Int[Array, "some"], values: SequenceState) -> SequenceState:
    """`tree` with the rows of `index` replaced; an index past the end replaces nothing."""
    return jax.tree.map(lambda leaf, value: leaf.at[index].set(value, mode="drop"), tree, values)
