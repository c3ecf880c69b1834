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
        kept_arrays, structure = jax.tree.flatten(data[0])

        def run(kept_arrays, state_data, inputs_data):
            data = jax.tree.unflatten(structure, kept_arrays), state_data, inputs_data
            kept, state, inputs = map(eqx.combine, data, static)
            return function(kept, state, *inputs)

        self.compiled = jax.jit(run, donate_argnums=1).lower(kept_arrays, *data[1:]).compile()
        """What XLA made: `as_text()`, `memory_analysis()`."""
        self._only_data = all(map(_is_data, jax.tree.leaves((state, inputs))))
        self._kept: Any = None
        self._kept_arrays: list[Any] = []

    def __call__(self, kept: Any, state: Any, *inputs: Any) -> Any:
        """Runs on arrays; static parts of the arguments are those of compile time."""
        # A model has hundreds of arrays, and stays the same from call to call: taking it apart costs a millisecond.
        if kept is not self._kept:
            self._kept, self._kept_arrays = kept, jax.tree.leaves(eqx.filter(kept, eqx.is_array))
        data = (state, inputs) if self._only_data else eqx.filter((state, inputs), eqx.is_array)
        return self.compiled(self._kept_arrays, *data)
