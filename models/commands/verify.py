"""`treering verify CKPT SRC`."""

import sys
from dataclasses import dataclass, field

from treering.configs.cli import Positional, parse
from treering.configs.mesh import MeshConfig

TEXT = (
    "A tree grows by one ring a year. Wide rings tell of wet years, narrow ones of drought, and a scar inside a ring "
    "of a fire that the tree outlived. Whoever counts 812 of them has read 812 years: 203 * 4 = 812.\n\n"
    "def ring(year):\n    return year % 12 == 0\n"
)


@dataclass(frozen=True, kw_only=True)
class VerifyOptions:
    """Compare a checkpoint with transformers' reading of its source: logits on a text, in float32.

    Exit status 1 where they differ by more than the bound. Needs torch.
    """

    checkpoint: Positional[str]
    """Checkpoint folder."""
    source: Positional[str]
    """The Hugging Face folder or GGUF file that it came from, or one that `treering export` wrote."""
    text: str = TEXT
    """Text to compare on; - reads standard input."""
    max_tokens: int = 256
    """Compare on this many tokens of the text at most."""
    bound: float = 1e-3
    """Largest difference of two logits that passes; in proportion where logits are beyond 10."""
    mesh: MeshConfig = field(default_factory=MeshConfig)
    cpu_devices: int | None = None
    """Simulate this many CPU devices."""


def main(arguments: list[str]) -> int:
    """Runs the command."""
    options = parse(VerifyOptions, arguments, program="treering verify")
    if not options.bound > 0:
        raise ValueError(f"bound {options.bound}: it must be above 0")
    if options.max_tokens < 1:
        raise ValueError(f"max_tokens {options.max_tokens}: compare on at least 1")
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
