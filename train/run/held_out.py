"""Evaluation on the held-out sources."""

import math
from collections.abc import Iterator
from typing import Any

import jax

from treering.configs.run import RunConfig
from treering.layers.parallel.sharding import Plan
from treering.models.transformer import Transformer
from treering.train.data.batch import Batch, shard_batch
from treering.train.data.store import TokenStore
from treering.train.data.stream import ahead, held_out_batches, process_rows
from treering.train.evaluate import empty_sums, evaluation_program


class HeldOut:
    """Held-out documents, and the compiled program that computes a model's loss on them."""

    def __init__(self, config: RunConfig, model: Transformer, plan: Plan, stores: list[TokenStore]):
        """`model` may be abstract. A batch has the rows of one accumulation part of a step."""
        self._config, self._plan, self._stores = config, plan, stores
        self._rows, self._window = config.data.batch // config.step.accumulation, config.data.window
        self._edges = tuple(edge for edge in config.evaluate.buckets if edge < self._window)
        self._mine = process_rows(plan, self._rows, self._window)
        self._program = evaluation_program(
            model, config.step, plan, batch=self._rows, seq=self._window, edges=self._edges
        )

    def _batches(self) -> Iterator[Batch]:
        evaluate = self._config.evaluate
        found = held_out_batches(
            self._stores, self._window, self._rows, self._mine, stride=evaluate.stride, limit=evaluate.rows
        )
        return (shard_batch(batch, self._plan, rows=self._rows, first_row=self._mine.start) for batch in found)

    def evaluate(self, model: Transformer) -> dict[str, Any]:
        """Mean loss in nats per token, also by position in the document, and bits per byte where the data is text.

        Bits per byte are exact where each token counts once (no stride, no limit of rows); otherwise the mean loss is
        taken for that of all tokens.
        """
        sums = empty_sums(self._plan, len(self._edges))
        for batch in ahead(self._batches()):
            sums = self._program(model, sums, batch)
        sums = jax.device_get(sums)
        tokens = int(sums.tokens.sum())
        mean = float(sums.loss.sum()) / max(1, tokens)
        text_bytes = sum(store.text_bytes for store in self._stores)
        targets = sum(store.targets for store in self._stores)
        by_position = [
            [edge, float(loss / count) if count else None, int(count)]
            for edge, loss, count in zip(self._edges, sums.loss, sums.tokens, strict=True)
        ]
        bits = {"bits_per_byte": mean * targets / text_bytes / math.log(2)} if text_bytes else {}
        return {"held_out": mean, "held_out_tokens": tokens, **bits, "by_position": by_position}


def in_words(record: dict[str, Any]) -> str:
    """An evaluation on one line."""
    bits = f", {record['bits_per_byte']:.4f} bits per byte" if "bits_per_byte" in record else ""
    places = "  ".join(f"{edge}+ {loss:.3f}" for edge, loss, count in record["by_position"] if count)
    return f"held out: loss {record['held_out']:.4f}{bits}; by position {places}"
