"""`treering check ENTRY`."""

from dataclasses import dataclass

from treering.configs.cli import Positional, parse


@dataclass(frozen=True, kw_only=True)
class CheckOptions:
    """Run our checks on a size of your own: it builds, every parameter has a name in Hugging Face's files, its files
    read back, it shards on every mesh, a tiny version decodes through a cache, and matches transformers where that
    knows it.

    Exit status 1 where one of them fails.
    """

    entry: Positional[str]
    """MODULE:CONFIG, path/to/file.py:CONFIG, a config.json, or a size that `treering zoo` lists."""


def main(arguments: list[str]) -> int:
    """Runs the command."""
    options = parse(CheckOptions, arguments, program="treering check")
    from treering.models.audit.check import check, find_entry

    failed = False
    for finding in check(find_entry(options.entry)):
        print(finding, flush=True)
        failed |= finding.verdict == "FAILED"
    return 1 if failed else 0
