"""A back-off n-gram model on Python's documentation: `python -m bench.ngram`.

Bits per byte on the held-out split of `treering.train.data.python_docs`, fitted on the rest: the baseline that the
recipe `tiny_from_scratch` has to beat. The model predicts a byte from the longest context that it has seen, up to
`order` bytes, and backs off with Witten-Bell weights (Witten and Bell 1991, method C): after a context seen n times
with d different bytes, the shorter context has the weight d / (n + d); below the shortest is a uniform distribution
over 256 bytes. Prints a table and writes it to bench/results/ngram.md.
"""

import math
import platform
from collections import Counter, defaultdict
from collections.abc import Iterable
from pathlib import Path

ORDERS = range(0, 7)
BAR = 4


def fit(documents: Iterable[bytes], order: int) -> dict[bytes, Counter[int]]:
    """How often each byte followed each context of up to `order` bytes; no context spans two documents."""
    counts: dict[bytes, Counter[int]] = defaultdict(Counter)
    for document in documents:
        for at, byte in enumerate(document):
            for length in range(min(at, order) + 1):
                counts[document[at - length : at]][byte] += 1
    return dict(counts)


def bits(document: bytes, counts: dict[bytes, Counter[int]], order: int) -> float:
    """The bits that the model needs for `document`, each byte after up to `order` before it."""
    total = 0.0
    for at, byte in enumerate(document):
        probability = 1 / 256
        for length in range(min(at, order) + 1):
            followers = counts.get(document[at - length : at])
            if followers is None:
                break
            seen, different = followers.total(), len(followers)
            probability = (followers[byte] + different * probability) / (seen + different)
        total -= math.log2(probability)
    return total


def main() -> None:
    """Runs the benchmark."""
    from treering.train.data.python_docs import python_docs

    train, test = ([text.encode() for text in python_docs(split)["text"]] for split in ("train", "test"))
    size = sum(map(len, test))
    counts = fit(train, max(ORDERS))
    lines = [
        f"`python -m bench.ngram`: back-off n-gram models on pydoc_data.topics of Python {platform.python_version()}; "
        f"{sum(map(len, train)):,} bytes to fit, {size:,} held out in {len(test)} documents.",
        "",
        "| bytes of context | bits per byte, held out |",
        "|---|---|",
    ]
    for order in ORDERS:
        score = sum(bits(document, counts, order) for document in test) / size
        lines.append(f"| {order}{' (order 4: the baseline)' if order == BAR else ''} | {score:.4f} |")
        print(lines[-1], flush=True)
    lines += ["", "Order 4 means four bytes of context here, the stronger baseline of the two common meanings."]
    results = Path(__file__).parent / "results"
    results.mkdir(exist_ok=True)
    (results / "ngram.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
