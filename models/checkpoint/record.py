"""model.json: what a checkpoint says about itself."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from treering.configs.errors import UserError
from treering.configs.model import ModelConfig
from treering.configs.rope import ROPE_KINDS
from treering.models.families import families
from treering.models.files import check_file
from treering.models.tokenizer import TOKENIZER

FORMAT = 1
RECORD = "model.json"
WEIGHTS = "weights"
CHECKPOINTS = "checkpoints"
"""Where a training run's folder has its checkpoints, STEP/model/ each."""


@dataclass(frozen=True, kw_only=True)
class Record:
    """What model.json says."""

    config: ModelConfig
    dtype: str
    """Of the weights, or of most of them where they differ."""
    fingerprint: str
    """Of names, shapes, dtypes and values of all weights."""
    source: Mapping[str, Any]
    """Where the weights came from."""
    transforms: tuple[str, ...] = field(default=())
    """Changes to the plain layout (such as quantisation) that a reader must know; this version knows none."""

    def to_json(self) -> str:
        """The text of model.json."""
        record = {
            "format": FORMAT,
            "family": self.config.family,
            "config": asdict(self.config) | {"rope": {"kind": self.config.rope.kind, **asdict(self.config.rope)}},
            "dtype": self.dtype,
            "transforms": list(self.transforms),
            "source": dict(self.source),
            "fingerprint": self.fingerprint,
        }
        return json.dumps(record, indent=2) + "\n"

    @staticmethod
    def from_json(text: str | bytes, name: str) -> "Record":
        """Reads model.json; `name` is the file's in errors.

        Raises ValueError for what is not JSON, another format, or a family or fields that are not known here.
        """
        try:
            raw = json.loads(text)
            version = raw["format"]
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise ValueError(f"{name} is damaged: {error!r}") from None
        if version != FORMAT:
            raise UserError("this version does not read it", field="format", value=version, works=[FORMAT], file=name)
        if raw.get("family") not in families():
            raise UserError(
                "it is not known here, and --plugin FILE adds a family",
                field="family",
                value=raw.get("family"),
                works=sorted(families()),
                file=name,
            )
        if raw.get("transforms"):
            raise UserError("this version knows none", field="transforms", value=raw["transforms"], file=name)
        try:
            rope = dict(raw["config"]["rope"])
            kind = ROPE_KINDS[rope.pop("kind")]
            config_class = families()[raw["family"]].config_class
            return Record(
                config=config_class(**{**raw["config"], "rope": kind(**rope)}),
                dtype=raw["dtype"],
                fingerprint=raw["fingerprint"],
                source=raw["source"],
            )
        except UserError as error:
            raise error.at(name) from None
        except (KeyError, TypeError) as error:
            raise ValueError(f"{name} does not describe a model: {error}") from None


def read_record(path: str | Path) -> Record:
    """model.json of the checkpoint at `path`.

    Raises FileNotFoundError for a path that is not there, ValueError for one that is not a finished checkpoint.
    """
    folder = Path(path)
    if not folder.exists():
        raise FileNotFoundError(
            f"{folder} does not exist: give a checkpoint, which `treering convert` and training write"
        )
    check_no_run(folder)
    record = folder / RECORD
    if record.is_file() and (folder / WEIGHTS).is_dir():
        check_file(record)
        return Record.from_json(record.read_bytes(), str(record))
    advice = f"`treering convert {folder} DST` makes a checkpoint of it"
    if folder.is_file():
        what = "is a GGUF file" if folder.suffix == ".gguf" else "is a file, and a checkpoint is a folder"
        raise ValueError(f"{folder} {what}" + (f": {advice}" if folder.suffix == ".gguf" else ""))
    if not any(folder.iterdir()):
        raise ValueError(f"{folder} is an empty folder: a checkpoint holds {RECORD}, {WEIGHTS}/ and {TOKENIZER}/")
    if (folder / WEIGHTS).is_dir():
        raise ValueError(f"{folder} is unfinished: its {RECORD}, which is written last, is missing")
    if (folder / "config.json").is_file() or any(folder.glob("*.safetensors")):
        raise ValueError(f"{folder} is a Hugging Face folder, not a checkpoint: {advice}")
    if gguf := sorted(folder.glob("*.gguf")):
        raise ValueError(f"{folder} holds GGUF files: `treering convert {gguf[0]} DST` makes a checkpoint of one")
    raise ValueError(f"{folder} is not a checkpoint: it lacks {RECORD} or {WEIGHTS}/")


def check_no_run(folder: Path) -> None:
    """Raises ValueError for the folder of a training run, or of one of its steps, naming the checkpoint in it."""
    if (folder / "model" / RECORD).is_file():
        raise ValueError(f"{folder} is a step of a training run: its checkpoint is {folder / 'model'}")
    steps = [path.parent.parent for path in folder.glob(f"{CHECKPOINTS}/*/model/{RECORD}")]
    if steps := [step for step in steps if step.name.isdigit()]:
        newest = max(steps, key=lambda step: int(step.name))
        raise ValueError(f"{folder} is a training run: its newest checkpoint is {newest / 'model'}")
    if (folder / CHECKPOINTS).is_dir() and not any(folder.glob("*.safetensors")):
        raise ValueError(f"{folder} is a training run without a checkpoint")


def read_config(path: str | Path) -> ModelConfig:
    """The architecture of the checkpoint at `path`; raises what `read_record` does."""
    return read_record(path).config
