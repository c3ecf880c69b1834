"""`treering export CKPT HF_DIR`."""

import math
from dataclasses import dataclass
from typing import Annotated

from treering.configs.cli import Positional, metavar, parse
from treering.configs.errors import UserError


@dataclass(frozen=True, kw_only=True)
class ExportOptions:
    """Turn a checkpoint into a Hugging Face folder, which transformers and tools like it load. Nothing is cast."""

    checkpoint: Positional[Annotated[str, metavar("CKPT")]]
    """Checkpoint folder."""
    folder: Positional[Annotated[str, metavar("HF_DIR")]]
    """Hugging Face folder to write; must not exist."""
    shard_gigabytes: float = 5.0
    """Split the weights into files of up to this many billion bytes."""
    overwrite: bool = False
    """Replace the folder if it exists; the old one stays until the new one is complete."""


def main(arguments: list[str]) -> int:
    """Runs the command."""
    options = parse(ExportOptions, arguments, program="treering export")
    size = options.shard_gigabytes
    if not math.isfinite(size) or size < 1e-9:
        raise UserError("it must be a number above 0", field="shard_gigabytes", value=size, works=[5])
    from treering.models.conversion.export import export

    export(
        options.checkpoint,
        options.folder,
        shard_bytes=int(size * 1e9),
        overwrite=options.overwrite,
    )
    return 0
