"""`treering convert SRC DST`."""

from dataclasses import dataclass
from typing import Annotated

from treering.configs.cli import Positional, metavar, parse
from treering.configs.precision import DType


@dataclass(frozen=True, kw_only=True)
class ConvertOptions:
    """Turn a Hugging Face folder (safetensors), a Meta folder (params.json and consolidated.*.pth, which need PyTorch)
    or a GGUF file into a checkpoint. Nothing is cast unless asked.
    """

    source: Positional[Annotated[str, metavar("SRC")]]
    """Hugging Face folder, Meta folder or GGUF file."""
    destination: Positional[Annotated[str, metavar("DST")]]
    """Checkpoint folder to write; must not exist."""
    dtype: DType | None = None
    """Cast the weights to this dtype."""
    ignore_fields: str = ""
    """Fields of config.json that are not known here and are to be ignored, separated by commas."""
    overwrite: bool = False
    """Replace the destination if it exists; the old one stays until the new one is complete."""


def main(arguments: list[str]) -> int:
    """Runs the command."""
    options = parse(ConvertOptions, arguments, program="treering convert")
    from treering.models.conversion.convert import convert

    convert(
        options.source,
        options.destination,
        dtype=options.dtype,
        overwrite=options.overwrite,
        ignore_fields=[field for field in options.ignore_fields.split(",") if field],
    )
    return 0
