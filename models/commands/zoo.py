"""`treering zoo`."""

from dataclasses import dataclass

from treering.configs.cli import parse


@dataclass(frozen=True, kw_only=True)
class ZooOptions:
    """List the published sizes: parameters, context, and bytes of keys and values per token in a bfloat16 cache."""


def main(arguments: list[str]) -> int:
    """Runs the command."""
    parse(ZooOptions, arguments, program="treering zoo")
    from treering.models.audit.zoo import table

    print(table())
    return 0
