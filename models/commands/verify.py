"""`treering verify CKPT SRC`."""

import sys
from dataclasses import dataclass, field
from typing import Annotated

from treering.configs.cli import Positional, metavar, parse
from treering.configs.errors import UserError
from treering.configs.mesh import MeshConfig

TEXT = (
    "A tree grows by one ring a year. Wide rings tell of wet years, narrow ones of drought, and a scar inside a ring "
    "of a fire that the tree outlived. Whoever counts 812 of them has read 812 years: 203 * 4 = 812.\n\n"
    "def ring(year):\n    return year % 12 == 0\n"
)


@dataclass(frozen=True, kw_only=True)
class VerifyOptions:
    """Compare a checkpoint with transformers on its source: logits on a text, in float32.

    Exit status 1 where they differ by more than the bound. Needs torch.
    """

    checkpoint: Positional[Annotated[str, metavar("CKPT")]]
    """Checkpoint folder."""
    source: Positional[Annotated[str, metavar("SRC")]]
    """The Hugging Face folder or GGUF file that it came from, or one that `treering export` wrote."""
    text: str = TEXT
    """Text to compare on; - reads standard input."""
    max_tokens: int = 256
    """Compare on at most this many tokens of the text."""
    bound: float = 1e-3
    """Largest difference of two logits that passes; larger in proportion where logits are beyond 10."""
    mesh: MeshConfig = field(default_factory=MeshConfig)
    cpu_devices: int | None = None
    """Simulate this many CPU devices."""


def main(arguments: list[str]) -> int:
    """Runs the command."""
    options = parse(VerifyOptions, arguments, program="treering verify")
    if not options.bound > 0:
        raise UserError("it must be above 0", field="bound", value=options.bound)
    if options.max_tokens < 1:
        raise UserError("it must be at least 1", field="max_tokens", value=options.max_tokens)
    from treering.layers.parallel.devices import plan_for, simulate_cpu_devices
    from treering.models.audit.verify import verify
    from treering.models.conversion.load import open_model

    opened = open_model(options.checkpoint)
    if options.cpu_devices is not None:
        simulate_cpu_devices(options.cpu_devices)
    plan = plan_for(options.mesh, "decode", fill="context")
    text = sys.stdin.read() if options.text == "-" else options.text
    found = verify(opened, options.source, plan, text, max_tokens=options.max_tokens)
    passed = found.within(options.bound)
    print(f"{found}: {'within' if passed else 'PAST'} the bound of {options.bound:g}")
    return 0 if passed else 1
