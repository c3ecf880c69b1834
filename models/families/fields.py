"""Reading the fields of config.json: each one is read, known to change nothing, refused unless neutral, or unknown."""

import math
from collections.abc import Collection, Mapping
from typing import Any

_REQUIRED = object()

HARMLESS = frozenset(
    """
    _attn_implementation _attn_implementation_autoset _name_or_path architectures attention_dropout auto_map
    bos_token_id chunk_size_feed_forward dtype eos_token_id hidden_dropout initializer_range is_encoder_decoder
    is_llama_config output_attentions output_hidden_states pad_token_id resid_pdrop return_dict tokenizer_class
    torch_dtype torchscript transformers.js_config transformers_version unk_token_id unsloth_fixed unsloth_version
    use_cache
    """.split()
)
"""Fields that change nothing here: names, dtypes (the tensors carry theirs), token ids (the tokenizer's), training."""


class Fields:
    """config.json, and which of its fields were looked at."""

    def __init__(self, raw: Mapping[str, Any], name: str, keys: Mapping[str, str] | None = None):
        self.raw = raw
        self.name = name
        """The file, for errors."""
        self.keys = keys or {}
        """What the file itself calls fields, for errors, where that is another name."""
        self._known: set[str] = set(HARMLESS)

    def with_values(self, **values: Any) -> "Fields":
        """The same file with other values; what is read there counts as read here."""
        return self._sharing({**self.raw, **values})

    def with_defaults(self, defaults: Mapping[str, Any]) -> "Fields":
        """The same file with values for fields that are absent; what is read there counts as read here."""
        return self._sharing({**defaults, **{key: value for key, value in self.raw.items() if value is not None}})

    def _sharing(self, raw: Mapping[str, Any]) -> "Fields":
        other = Fields(raw, self.name, self.keys)
        other._known = self._known
        return other

    def take(self, field: str, default: Any = _REQUIRED) -> Any:
        """The value of a field; raises ValueError where it is absent and has no default. null counts as absent."""
        self._known.add(field)
        value = self.raw.get(field)
        if value is not None:
            return value
        if default is _REQUIRED:
            raise ValueError(f"{self.name} lacks {self.keys.get(field, field)!r}")
        return default

    def integer(self, field: str, default: Any = _REQUIRED) -> Any:
        """`take`, for a whole number."""
        value = self.take(field, default)
        if value is not default and (isinstance(value, bool) or not isinstance(value, int)):
            raise self._refused(field, "it must be a whole number")
        return value

    def count(self, field: str, default: Any = _REQUIRED) -> Any:
        """`integer`, for one that is at least 1."""
        value = self.integer(field, default)
        if value is not default and value < 1:
            raise self._refused(field, "it must be at least 1")
        return value

    def number(self, field: str, default: Any = _REQUIRED) -> Any:
        """`take`, for a number, which is finite."""
        value = self.take(field, default)
        proper = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        if value is not default and not proper:
            raise self._refused(field, "it must be a number")
        return value

    def flag(self, field: str, default: Any = _REQUIRED) -> Any:
        """`take`, for true or false."""
        value = self.take(field, default)
        if value is not default and not isinstance(value, bool):
            raise self._refused(field, "it must be true or false")
        return value

    def only(self, field: str, *neutral: Any, why: str = "this family does not compute it") -> None:
        """Raises ValueError where a field that changes the arithmetic has a value other than the `neutral` ones."""
        value = self.take(field, None)
        if value is not None and value not in neutral:
            works = " or ".join(["absent", *(repr(value) for value in neutral)])
            raise self._refused(field, f"{why} (supported: {works})")

    def _refused(self, field: str, rule: str) -> ValueError:
        return ValueError(f"{self.name} has {self.keys.get(field, field)} {self.raw[field]!r}: {rule}")

    def finish(self, ignore: Collection[str] = ()) -> None:
        """Raises ValueError listing the fields that nobody looked at and `ignore` does not name, or those that it names
        without effect."""
        if useless := ", ".join(sorted(set(ignore) - (set(self.raw) - self._known))):
            raise ValueError(
                f"ignore_fields {useless}: {self.name} has no such field, or it is known here and cannot be ignored"
            )
        unknown = sorted(field for field in set(self.raw) - self._known - set(ignore) if self.raw[field] is not None)
        if unknown:
            names = ",".join(unknown)
            raise ValueError(
                f"{self.name} has fields that are not known here and may change the arithmetic: {', '.join(unknown)} "
                f"(treering convert --ignore-fields {names} goes on without them)"
            )
