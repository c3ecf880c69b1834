"""Draws the figures of `docs/attention.md` into `docs/figures/`: `python docs/figures.py`.

What is drawn is computed by the functions that the algorithms use, so a figure cannot differ from them.
"""

from pathlib import Path

import jax.numpy as jnp
import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, Rectangle

from treering.layers.attention.mask import BlockClass, Bounds, Mask, classify, visible
from treering.layers.attention.order import ORDERS, order_positions

FOLDER = Path(__file__).parent / "figures"
RANKS = ("#4477aa", "#ee6677", "#228833", "#ccbb44")
CLASSES = {BlockClass.EMPTY: "#ffffff", BlockClass.FULL: "#66a5ad", BlockClass.MIXED: "#f2b872"}
P = len(RANKS)


def save(figure: Figure, name: str) -> None:
    """As SVG whose text is text and whose bytes are the same each time."""
    figure.savefig(FOLDER / f"{name}.svg", bbox_inches="tight", metadata={"Date": None})
    plt.close(figure)


def tiles() -> None:
    """Classes of 8 x 8 tiles under three masks, as a query tile lists them."""
    length, tile = 64, 8
    positions = jnp.arange(length, dtype=jnp.int32).reshape(-1, tile)
    documents = 1 + (jnp.arange(length)[:, None] >= jnp.array([19, 30, 52])).sum(1).reshape(-1, tile)
    figure, axes = plt.subplots(1, 3, figsize=(9, 3.1))
    cases = (("causal", Mask(), None), ("window of 20", Mask(window=20), None), ("four documents", Mask(), documents))
    for axis, (title, mask, segments) in zip(axes, cases, strict=True):
        q = Bounds.of(positions, segments, slots=False)
        kv = Bounds.of(positions, segments, slots=True)
        column = Bounds(*(x[:, None] for x in vars(q).values()))
        row = Bounds(*(x[None, :] for x in vars(kv).values()))
        classes = np.asarray(classify(mask, column, row))
        whole = None if segments is None else segments.reshape(-1)
        seen = np.asarray(visible(mask, positions.reshape(-1), positions.reshape(-1), whole, whole))
        for i, j in np.ndindex(classes.shape):
            colour = CLASSES[BlockClass(int(classes[i, j]))]
            axis.add_patch(Rectangle((j * tile, i * tile), tile, tile, facecolor=colour, edgecolor="#999999", lw=0.5))
        axis.contour(
            np.arange(length) + 0.5, np.arange(length) + 0.5, seen, levels=[0.5], colors="black", linewidths=0.8
        )
        axis.set(title=title, xlim=(0, length), ylim=(length, 0), aspect="equal", xticks=[], yticks=[], xlabel="keys")
    axes[0].set_ylabel("queries")
    marks = [Rectangle((0, 0), 1, 1, facecolor=colour, edgecolor="#999999") for colour in CLASSES.values()]
    figure.legend(
        marks, ["empty: skipped", "full: no mask", "mixed: masked"], loc="lower center", ncol=3, frameon=False
    )
    figure.subplots_adjust(bottom=0.16)
    save(figure, "tiles")


def orders() -> None:
    """Seen pairs of a causal mask in token order, coloured by the rank that computes them, and how many each has."""
    length = 32
    figure, axes = plt.subplots(1, 3, figsize=(9, 3.4))
    for axis, order in zip(axes, ORDERS, strict=True):
        places = np.asarray(order_positions(order, P, length))
        owner = np.empty(length, int)
        owner[places] = np.arange(length) // (length // P)
        seen = np.asarray(visible(Mask(), jnp.arange(length), jnp.arange(length)))
        image = np.ones((length, length, 3))
        for rank, colour in enumerate(RANKS):
            image[seen & (owner == rank)[:, None]] = to_rgb(colour)
        axis.imshow(image, interpolation="nearest")
        counts = [int(seen[owner == rank].sum()) for rank in range(P)]
        axis.set(title=order, xticks=[], yticks=[], xlabel="pairs a rank: " + ", ".join(map(str, counts)))
    axes[0].set_ylabel("queries, in token order")
    marks = [Rectangle((0, 0), 1, 1, facecolor=colour) for colour in RANKS]
    figure.legend(marks, [f"rank {rank}" for rank in range(P)], loc="lower center", ncol=P, frameon=False)
    figure.subplots_adjust(bottom=0.2)
    save(figure, "orders")


def ring() -> None:
    """A timeline of four ranks, forward and backward: which keys each attends to, and what travels meanwhile."""
    figure, axes = plt.subplots(2, 1, figsize=(9, 5.6))
    for axis, backward in zip(axes, (False, True), strict=True):
        for step in range(P):
            for rank in range(P):
                source = (rank - step) % P
                axis.add_patch(Rectangle((step, rank + 0.15), 0.78, 0.5, facecolor=RANKS[source], alpha=0.85))
                axis.text(step + 0.39, rank + 0.4, f"keys of {source}", ha="center", va="center", fontsize=8)
        for step in range(P if backward else P - 1):
            for rank in range(P):
                ends = (step + 0.1, rank + 0.72), (step + 0.98, (rank + 1) % P + 0.1)
                if step < P - 1:
                    axis.add_patch(_arrow(*ends, "#333333"))
                if backward and step > 0 or backward and step == P - 1:
                    axis.add_patch(_arrow((step + 0.1, rank + 0.78), (step + 0.98, (rank + 1) % P + 0.16), "#bb0055"))
        if backward:
            for rank in range(P):
                axis.add_patch(_arrow((P + 0.02, rank + 0.78), (P + 0.9, (rank + 1) % P + 0.16), "#bb0055"))
        sends = "forward: p - 1 sends of keys and values, while the block before them is computed"
        if backward:
            sends = "backward: p - 1 sends of keys and values (black), p of their gradients, a step behind (red)"
        axis.set(
            title=sends, xlim=(-0.1, P + 1), ylim=(P + 0.1, 0), yticks=np.arange(P) + 0.4, xticks=np.arange(P) + 0.4
        )
        axis.set_yticklabels([f"rank {rank}" for rank in range(P)])
        axis.set_xticklabels([f"step {step}" for step in range(P)])
        axis.spines[:].set_visible(False)
        axis.tick_params(length=0)
    figure.tight_layout()
    save(figure, "ring")


def zigzag() -> None:
    """Queries and keys of two ranks at one step, as halves; what is seen is what is computed."""
    figure, axes = plt.subplots(1, 3, figsize=(9, 3.1))
    chunk = 4
    for axis, (rank, source) in zip(axes, ((1, 1), (2, 1), (1, 2)), strict=True):
        places = np.asarray(order_positions("zigzag", P, 2 * P * chunk)).reshape(P, -1)
        seen = np.asarray(visible(Mask(), jnp.asarray(places[rank]), jnp.asarray(places[source])))
        axis.imshow(np.where(seen, 0.35, 0.0), cmap="Blues", vmin=0, vmax=1)
        axis.axhline(chunk - 0.5, color="black", lw=0.8)
        axis.axvline(chunk - 0.5, color="black", lw=0.8)
        title = "step 0: own keys" if rank == source else f"keys of a rank {'before' if source < rank else 'after'}"
        middles = [(chunk - 1) / 2, chunk + (chunk - 1) / 2]
        axis.set(title=title, xticks=middles, yticks=middles)
        axis.set_xticklabels([f"chunk {source}", f"chunk {2 * P - 1 - source}"])
        axis.set_yticklabels([f"chunk {rank}", f"chunk {2 * P - 1 - rank}"], rotation=90, va="center")
        axis.tick_params(length=0)
    axes[0].set_ylabel("queries")
    figure.tight_layout()
    save(figure, "zigzag")


def tree() -> None:
    """Who sends parts to whom, in each scheme, with two nodes of two ranks."""
    figure, axes = plt.subplots(1, 3, figsize=(9, 3.2))
    pairs = [(a, b) for a in range(P) for b in range(P) if a != b]
    near = [(a, b) for a, b in pairs if a // 2 == b // 2]
    across = [(a, b) for a, b in pairs if a % 2 == b % 2]
    titles = (
        "all_to_all: 1/4 of the heads to each",
        "all_gather: all heads to each",
        "two_level: within nodes, then across",
    )
    for axis, title, rounds in zip(axes, titles, ([pairs], [pairs], [near, across]), strict=True):
        for stage, sends in enumerate(rounds):
            for a, b in sends:
                axis.add_patch(_arrow((stage, a + 0.5), (stage + 1, b + 0.5), RANKS[a], shrink=5))
        for stage in range(len(rounds) + 1):
            for rank in range(P):
                axis.plot(stage, rank + 0.5, "o", color=RANKS[rank], markersize=9)
        axis.set(title=title, xlim=(-0.2, len(rounds) + 0.2), ylim=(P, 0), xticks=[], yticks=np.arange(P) + 0.5)
        axis.title.set_fontsize(9)
        axis.set_yticklabels([f"rank {rank}" for rank in range(P)])
        axis.spines[:].set_visible(False)
        axis.tick_params(length=0)
    figure.tight_layout()
    save(figure, "tree")


def _arrow(start: tuple, end: tuple, colour: str, *, shrink: float = 0) -> FancyArrowPatch:
    return FancyArrowPatch(
        start, end, arrowstyle="-|>", mutation_scale=8, lw=0.8, color=colour, shrinkA=shrink, shrinkB=shrink
    )


def main() -> None:
    """Draws them all."""
    FOLDER.mkdir(exist_ok=True)
    plt.rcParams.update({"svg.hashsalt": "treering", "svg.fonttype": "none", "font.size": 9})
    for draw in (tiles, orders, ring, zigzag, tree):
        draw()


if __name__ == "__main__":
    main()
