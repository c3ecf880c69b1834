"""`treering export CKPT HF_DIR`."""

import math
from dataclasses import dataclass

from treering.configs.cli import Positional, parse
from treering.configs.errors import UserError


@dataclass(frozen=True, kw_only=True)
class ExportOptions:
    """Turn a checkpoint into a Hugging Face folder, which transformers and its kin load. Nothing is cast."""

    checkpoint: Positional[str]
    """Checkpoint folder."""
    folder: Positional[str]
    """Hugging Face folder to write; must not exist."""
    shard_gigabytes: float = 5.0
    """Split the weights into files of up to this many billion bytes."""
    overwrite: bool = False
    """Replace the folder if it exists; the old one stays until the new one is whole."""


def main(arguments: list[str]) -> int:
    """Runs the command."""
    options = parse(ExportOptions, arguments, program="treering export")
    if not math.isfinite(options.shard_gigabytes) or options.shard_gigabytes < 1e-9:
        raise UserError(
            "it must be a number above 0", field="shard_gigabytes", value=options.shard_gigabytes, works=[5]
        )
    from treering.models.conversion.export import export

    export(
        options.checkpoint,
        options.folder,
        shard_bytes=int(options.shard_gigabytes * 1e9),
        overwrite=options.overwrite,
    )
    return 0
