"""What a training step holds in memory and sends, read from its program."""

import dataclasses
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import jax
import pytest

import hlo
import training
from treering.configs.llama import TINY
from treering.configs.precision import Precision
from treering.configs.train import OptimizerConfig, StepConfig
from treering.models.checkpoint.model import named_leaves
from treering.train.data.batch import abstract_batch
from treering.train.step import abstract_state, batch_gradients, step_program


@pytest.mark.long
def test_memory_falls_with_the_context_axis_and_logits_are_never_whole(mesh):
    """16k tokens of one row: temporary bytes a device at context 8 are at most a fifth of those at context 1."""
    vocab, seq = 200, 16384
    model = dataclasses.replace(TINY, vocab=vocab, context_length=seq)
    optimizer, step, found = OptimizerConfig(), StepConfig(precision=Precision(), remat="attention"), []
    for context in (1, 8):
        plan = training.train_plan(mesh(context=context))
        state = abstract_state(model, optimizer, plan)
        program = hlo.read(step_program(state, step, optimizer, plan, steps=10, batch=1, seq=seq).compiled)
        assert hlo.largest_beside(program, vocab) == step.loss_chunk
        found.append(program.temporary_bytes)
    print(f"temporary bytes a device: {found[0]:,} at context 1, {found[1]:,} at context 8, {found[1] / found[0]:.3f}x")
    assert found[1] <= 0.2 * found[0]


def equations(jaxpr: Any) -> Iterator[Any]:
    """Every equation of a jaxpr and of those inside it."""
    for equation in jaxpr.eqns:
        yield equation
        for value in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns")):
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                yield from equations(inner)


def test_weights_and_keys_travel_in_bfloat16_and_gradients_in_float32(mesh):
    """Weights are cast before they are gathered; what sums over devices or tokens is float32."""
    plan = training.train_plan(mesh(fsdp=2, context=2, tensor=2))
    model = abstract_state(TINY, training.ADAMW, plan).model
    batch = abstract_batch(plan, batch=8, seq=32)
    step = StepConfig(loss_chunk=24)
    traced = jax.make_jaxpr(lambda model, batch: batch_gradients(model, batch, step, plan))(model, batch)
    found = defaultdict(list)
    for equation in equations(traced.jaxpr):
        found[equation.primitive.name].append(equation)

    def dtypes(name: str) -> list[str]:
        return sorted(equation.outvars[0].aval.dtype.name for equation in found[name])

    # The ring over two devices: keys and values once forward and once back, their gradients twice.
    assert dtypes("ppermute") == ["bfloat16", "bfloat16", "float32", "float32"]
    assert set(dtypes("reduce_scatter")) == set(dtypes("scatter-add")) == {"float32"}
    weights = {leaf.shape[-rank:] for leaf in jax.tree.leaves(model) for rank in (2, 3) if leaf.ndim >= rank}
    vectors = {leaf.shape for name, leaf in named_leaves(model).items() if "norm" in name}
    whole, at_rest = set(), set()
    for equation in found["sharding_constraint"]:
        aval, spec = equation.outvars[0].aval, str(equation.params["sharding"].spec)
        if aval.shape in weights - vectors:
            (at_rest if "fsdp" in spec else whole).add(aval.dtype.name)
    assert whole == {"bfloat16"} and at_rest == {"float32"}
    # A weight's gradient is the product that contracts batch and seq.
    contracted = [x for x in found["dot_general"] if x.params["dimension_numbers"][0][0] == (0, 1)]
    turned = [x for x in found["dot_general"] if x.params["dimension_numbers"][0][0] == (1, 2)]
    assert len(contracted + turned) == 7, "one for each matrix of a block"
    assert {x.outvars[0].aval.dtype.name for x in contracted + turned} == {"float32"}
