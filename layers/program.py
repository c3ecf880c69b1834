"""Programs compiled before they run, from shapes alone."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax


def _is_data(leaf: Any) -> bool:
    return eqx.is_array(leaf) or isinstance(leaf, jax.ShapeDtypeStruct)


class Program:
    """`function(kept, state, *inputs)` compiled for the shapes, dtypes and shardings of its arguments.

    Arguments are trees of arrays, or of ShapeDtypeStructs that carry shardings; what is neither is fixed at compile
    time. The arrays of `state` are donated: a call consumes them, and the function returns the next state. Calling
    with other shapes is an error, so a program never compiles twice.
    """

    def __init__(self, function: Callable[..., Any], kept: Any, state: Any, *inputs: Any):
        data, static = zip(*(eqx.partition(tree, _is_data) for tree in (kept, state, inputs)), strict=True)

        def run(kept_data, state_data, inputs_data):
            kept, state, inputs = map(eqx.combine, (kept_data, state_data, inputs_data), static)
            return function(kept, state, *inputs)

        self.compiled = jax.jit(run, donate_argnums=1).lower(*data).compile()
        """What XLA made: `as_text()`, `memory_analysis()`."""

    def __call__(self, kept: Any, state: Any, *inputs: Any) -> Any:
        """Runs on arrays; static parts of the arguments are those of compile time."""
        return self.compiled(*(eqx.filter(tree, eqx.is_array) for tree in (kept, state, inputs)))
