"""`treering check ENTRY`."""

from dataclasses import dataclass
from typing import Annotated

from treering.configs.cli import Positional, metavar, parse


@dataclass(frozen=True, kw_only=True)
class CheckOptions:
    """Run our checks on a size of your own: it builds, every parameter has a name in Hugging Face's files, its configs
    come back from their files, it shards on every mesh, and a tiny version decodes through a cache and matches
    transformers, where that knows the architecture.

    Exit status 1 where one of them fails.
    """

    entry: Positional[Annotated[str, metavar("ENTRY")]]
    """MODULE:CONFIG, path/to/file.py:CONFIG, a config.json, or a size that `treering zoo` lists."""


def main(arguments: list[str]) -> int:
    """Runs the command."""
    options = parse(CheckOptions, arguments, program="treering check")
    from treering.models.audit.check import check
    from treering.models.audit.entry import find_entry

    failed = False
    for finding in check(find_entry(options.entry)):
        print(finding, flush=True)
        failed |= finding.verdict == "FAILED"
    return 1 if failed else 0
