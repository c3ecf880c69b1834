"""Weights of other tools, in any format that is read."""

from collections.abc import Collection
from pathlib import Path

from treering.configs.model import ModelConfig
from treering.models.checkpoint.record import RECORD, check_no_run
from treering.models.families import config_of
from treering.models.formats.gguf import open_gguf
from treering.models.formats.meta import PARAMS, open_meta
from treering.models.formats.safetensors_folder import open_folder
from treering.models.formats.source import Source
from treering.models.formats.text_part import text_part


def open_source(src: str | Path) -> Source:
    """The weights at `src`: a Hugging Face folder, a Meta folder or a GGUF file.

    Raises ValueError and FileNotFoundError for others.
    """
    src = Path(src)
    if not src.exists():
        raise FileNotFoundError(
            f"{src} does not exist: give a Hugging Face folder, a Meta folder or a GGUF file; names on the Hugging "
            "Face hub are not downloaded"
        )
    if src.is_file():
        if src.suffix == ".safetensors":
            raise ValueError(f"{src} is one file of a Hugging Face folder: give the folder, with its config.json")
        return open_gguf(src)
    check_no_run(src)
    if (src / RECORD).is_file():
        raise ValueError(f"{src} is a checkpoint already: it needs no conversion")
    if not any(src.iterdir()):
        raise ValueError(f"{src} is an empty folder: give a Hugging Face folder, a Meta folder or a GGUF file")
    if not (src / "config.json").is_file() and (src / PARAMS).is_file():
        return open_meta(src)
    if not (src / "config.json").is_file() and (files := sorted(src.glob("*.gguf"))):
        raise ValueError(f"{src} holds GGUF files: give one of them, such as {files[0]}")
    return text_part(open_folder(src))


def read_source_config(source: Source, ignore_fields: Collection[str] = ()) -> ModelConfig:
    """The architecture; raises ValueError for fields that are not supported, or neither known nor ignored."""
    config = config_of(source.fields)
    source.fields.finish(ignore_fields)
    return config
