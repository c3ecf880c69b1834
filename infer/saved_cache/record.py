"""What a saved cache says of itself: which tokens, read by which weights, and the files that hold their keys."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from treering.configs.errors import UserError
from treering.configs.model import ModelConfig
from treering.models.checkpoint.record import RECORD

FORMAT = 1
CACHE_RECORD = "cache.json"
LAYERS = "layers"


@dataclass(frozen=True, kw_only=True)
class ModelIdentity:
    """What reads texts: weights in a dtype. A cache is of use only to the one that made it."""

    checkpoint: str
    """Where it was, for messages alone."""
    config: dict[str, Any]
    weights: str
    """The fingerprint of the weights as they compute."""
    dtype: str
    """Of keys and values."""

    @staticmethod
    def of(config: ModelConfig, *, checkpoint: str, weights: str, dtype: str) -> "ModelIdentity":
        """The one of a model on its devices."""
        return ModelIdentity(checkpoint=checkpoint, config=describe_config(config), weights=weights, dtype=dtype)


@dataclass(frozen=True, kw_only=True)
class SavedCache:
    """What cache.json in `folder` says."""

    folder: Path
    identity: ModelIdentity
    tokens: list[int]
    fingerprint: str
    """Of tokens, keys and values."""

    def check_model(self, config: ModelConfig, checkpoint: str) -> None:
        """Raises ValueError naming what differs, where the model is another."""
        theirs, ours = self.identity.config, describe_config(config)
        unlike = [name for name in {**theirs, **ours} if theirs.get(name) != ours.get(name)]
        if unlike:
            message = "; ".join(f"{name} {theirs.get(name)} there, {ours.get(name)} in {checkpoint}" for name in unlike)
            raise ValueError(f"{self.folder} is the cache of another model ({message}): {self._advice()}")

    def check_dtype(self, dtype: str) -> None:
        """Raises ValueError where this run's cache has another dtype."""
        if dtype != self.identity.dtype:
            rule = f"the keys and values in {self.folder} have another dtype"
            raise UserError(rule, field="dtype", value=dtype, works=[self.identity.dtype])

    def check_weights(self, weights: str, checkpoint: str) -> None:
        """Raises ValueError where `weights` is not the fingerprint of those that read the text."""
        if weights != self.identity.weights:
            message = f"weights {self.identity.weights} there, {weights} in {checkpoint}"
            raise ValueError(f"{self.folder} is the cache of other weights ({message}): {self._advice()}")

    def _advice(self) -> str:
        return f"load it with {self.identity.checkpoint}, which it was saved from, or save it again with --save-cache"


def describe_config(config: ModelConfig) -> dict[str, Any]:
    """A model's family and fields, as JSON gives them back."""
    rope = {"kind": config.rope.kind, **asdict(config.rope)}
    return json.loads(json.dumps({"family": config.family, **asdict(config), "rope": rope}))


def read_saved_cache(folder: str | Path) -> SavedCache:
    """What the saved cache at `folder` says of itself.

    Raises ValueError for a path that does not exist, is not a saved cache, or not a complete one.
    """
    folder = Path(folder)
    if not folder.exists():
        raise ValueError(
            f"{folder} does not exist: a saved cache is a folder that `treering generate --save-cache` wrote"
        )
    file = folder / CACHE_RECORD
    if not file.is_file():
        if (folder / LAYERS).is_dir():
            raise ValueError(f"{folder} is incomplete: it has no {CACHE_RECORD}, which is written last")
        what = "a checkpoint, not a saved cache" if (folder / RECORD).is_file() else "not a saved cache"
        raise ValueError(f"{folder} is {what}: `treering generate --save-cache` writes one")
    try:
        raw = json.loads(file.read_text())
        version = raw["format"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"{file} is damaged: {error!r}") from None
    if version != FORMAT:
        raise UserError("this version cannot read it", field="format", value=version, works=[FORMAT], file=file)
    try:
        identity, tokens, files = ModelIdentity(**raw["reader"]), raw["tokens"], raw["files"]
        if not (isinstance(identity.config, dict) and isinstance(files, dict)):
            raise TypeError("its fields have wrong types")
        if not (tokens and isinstance(tokens, list) and all(type(t) is int and 0 <= t < 2**31 for t in tokens)):
            raise UserError("it must be a list of token ids", field="tokens", file=file)
        saved = SavedCache(folder=folder, identity=identity, tokens=tokens, fingerprint=raw["fingerprint"])
    except (KeyError, TypeError) as error:
        raise ValueError(f"{file} is damaged: {error!r}") from None
    # Here, since it takes no time; what a file holds is compared when it is loaded.
    for name, size in files.items():
        found = (folder / name).stat().st_size if (folder / name).is_file() else 0
        if found != size:
            message = f"{name} has {found} of its {size} bytes; copy or save it again"
            raise ValueError(f"{folder} is incomplete: {message}")
    return saved
