"""The text model inside a multimodal one, in a Hugging Face folder."""

import sys
from dataclasses import replace

from treering.models.families import families
from treering.models.families.fields import Fields
from treering.models.formats.source import Source

_PREFIX = "language_model."


def text_part(source: Source) -> Source:
    """The text model of a source whose model_type is one of a family's `inside`; other sources as they are.

    Its fields are those of `text_config`, its tensors those of `language_model.`; others are left out, with a message.
    Raises UserError where there is no `text_config`.
    """
    raw, name = source.fields.raw, source.fields.name
    family = next((family for family in families().values() if raw.get("model_type") in family.inside), None)
    if family is None:
        return source
    inner = source.fields.take("text_config")
    if not isinstance(inner, dict):
        raise source.fields.refused("text_config", "it must be an object")
    tied = {"tie_word_embeddings": raw["tie_word_embeddings"]} if "tie_word_embeddings" in raw else {}
    tensors = {stored: tensor for stored, tensor in source.tensors.items() if stored.startswith(_PREFIX)}
    left = sorted({stored.split(".")[0] for stored in source.tensors.keys() - tensors})
    if left:
        print(f"{name}: only the text model is read, without {', '.join(left)}", file=sys.stderr)
    return replace(
        source,
        fields=Fields({**inner, **tied, "model_type": family.model_types[0]}, f"{name}: text_config"),
        tensors=tensors,
        stored_name=lambda wanted: _PREFIX + source.stored_name(wanted),
    )
