"""Reading the fields of config.json: each one is read, known to change nothing, refused unless neutral, or unknown."""

import math
from collections.abc import Collection, Mapping
from typing import Any

from treering.configs.errors import UserError

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
    """config.json, and which of its fields were read."""

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
        """The value of a field; raises UserError where it is absent and has no default. null counts as absent."""
        self._known.add(field)
        value = self.raw.get(field)
        if value is not None:
            return value
        if default is _REQUIRED:
            raise UserError("it is missing", field=self.called(field), file=self.name)
        return default

    def integer(self, field: str, default: Any = _REQUIRED) -> Any:
        """`take`, for a whole number."""
        value = self.take(field, default)
        if value is not default and (isinstance(value, bool) or not isinstance(value, int)):
            raise self.refused(field, "it must be a whole number")
        return value

    def count(self, field: str, default: Any = _REQUIRED) -> Any:
        """`integer`, for one that is at least 1."""
        value = self.integer(field, default)
        if value is not default and value < 1:
            raise self.refused(field, "it must be at least 1")
        return value

    def number(self, field: str, default: Any = _REQUIRED) -> Any:
        """`take`, for a number, which is finite."""
        value = self.take(field, default)
        proper = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        if value is not default and not proper:
            raise self.refused(field, "it must be a number")
        return value

    def flag(self, field: str, default: Any = _REQUIRED) -> Any:
        """`take`, for true or false."""
        value = self.take(field, default)
        if value is not default and not isinstance(value, bool):
            raise self.refused(field, "it must be true or false")
        return value

    def only(self, field: str, *neutral: Any, why: str = "this family does not compute it") -> None:
        """Raises UserError where a field that changes the arithmetic has a value other than the `neutral` ones."""
        value = self.take(field, None)
        if value is not None and value not in neutral:
            raise self.refused(field, why, works=("absent", *neutral))

    def called(self, field: str) -> str:
        """What the file itself calls a field."""
        return self.keys.get(field, field)

    def refused(self, field: str, rule: str, works: Collection[object] = ()) -> UserError:
        """The error that names the file, the field, its value, the rule that it breaks, and values that work."""
        return UserError(rule, field=self.called(field), value=self.raw.get(field), works=works, file=self.name)

    def finish(self, ignore: Collection[str] = ()) -> None:
        """Raises UserError listing the fields that were not read and `ignore` does not name, or those that it names
        without effect."""
        if useless := ", ".join(sorted(set(ignore) - (set(self.raw) - self._known))):
            raise UserError(
                f"{self.name} has no such field, or it is known here and cannot be ignored",
                field="ignore_fields",
                value=useless,
            )
        unknown = sorted(field for field in set(self.raw) - self._known - set(ignore) if self.raw[field] is not None)
        if unknown:
            names = ",".join(unknown)
            raise UserError(
                f"it has fields that are not known here and may change the arithmetic: {', '.join(unknown)} "
                f"(treering convert --ignore-fields {names} ignores them)",
                file=self.name,
            )
