"""A small data set in every Python: the text of Python's own documentation, `pydoc_data.topics`.

About 380 kB of English prose and code. Some topics repeat paragraphs of larger ones; each paragraph is kept once, in
the largest topic that has it, so that nothing held out is also trained on. Topics are cut at paragraphs into blocks of
about 8 kB; each tenth block is a document of the split `test`, the runs between them are those of `train`. The split
`test-in-place` has the topics that hold such blocks, whole, and in the column `held_out` the characters of those blocks
that have at least a block of the topic before them: they are scored in place, after all the text before them. The
text, and so every number measured on it, differs a little between versions of Python.
"""

from typing import Any, Literal, get_args

Split = Literal["train", "test", "test-in-place"]
SPLITS: tuple[Split, ...] = get_args(Split)

BLOCK_BYTES = 8192
SHORTEST = 200
"""Bytes that a topic must have left to be a document."""


def topics() -> list[list[str]]:
    """The topics, largest first, each as its paragraphs, without those that were in one before."""
    from pydoc_data.topics import topics as texts

    seen: set[str] = set()
    kept = []
    for _, text in sorted(texts.items(), key=lambda item: (-len(item[1]), item[0])):
        paragraphs = [paragraph for paragraph in text.strip().split("\n\n") if paragraph.strip() not in seen]
        seen |= {paragraph.strip() for paragraph in paragraphs if len(paragraph) >= 40}
        if len("\n\n".join(paragraphs).encode()) >= SHORTEST:
            kept.append(paragraphs)
    return kept


def python_docs(split: Split) -> dict[str, list[Any]]:
    """The columns of a split: `text`, and `held_out` where only a part of it is."""
    documents: dict[str, list[str]] = {"train": [], "test": []}
    in_place: dict[str, list[Any]] = {"text": [], "held_out": []}
    offset = 0
    for paragraphs in topics():
        runs: list[tuple[str, list[str]]] = []
        for paragraph in paragraphs:
            home = "test" if offset // BLOCK_BYTES % 10 == 0 else "train"
            if not runs or runs[-1][0] != home:
                runs.append((home, []))
            runs[-1][1].append(paragraph)
            offset += len(paragraph.encode()) + 2
        text, held_out = "", []
        for home, run in runs:
            documents[home].append("\n\n".join(run))
            text += "\n\n" if text else ""
            if home == "test" and len(text) >= BLOCK_BYTES:
                held_out.append([len(text), len(text) + len(documents[home][-1])])
            text += documents[home][-1]
        if held_out:
            in_place["text"].append(text)
            in_place["held_out"].append(held_out)
    return in_place if split == "test-in-place" else {"text": documents[split]}
