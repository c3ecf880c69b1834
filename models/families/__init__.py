"""Families of models; importing this package registers those of the zoo."""

from treering.models.families import gemma3, llama, mistral, qwen2, qwen3
from treering.models.families.registry import Family as Family
from treering.models.families.registry import config_of as config_of
from treering.models.families.registry import families as families
from treering.models.families.registry import family_of as family_of
from treering.models.families.registry import named_sizes as named_sizes
from treering.models.families.registry import read_hf_config as read_hf_config
from treering.models.families.registry import register_family as register_family

for _module in (llama, mistral, qwen2, qwen3, gemma3):
    register_family(_module.FAMILY)
