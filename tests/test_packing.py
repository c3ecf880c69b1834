"""Documents to rows: every token accounted for, targets within documents, cuts that lose nothing."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st


def packed(documents: list[np.ndarray], window: int):
    from treering.train.data.packing import Document, fill_row, pack_documents

    rows, report = pack_documents([len(document) for document in documents], window)
    filled = [fill_row(pieces, lambda i: Document(documents[i]), window) for pieces in rows]
    return rows, filled, report


def numbered(lengths: list[int]) -> list[np.ndarray]:
    """Documents whose tokens say where they are: document i's token j is 1000 i + j."""
    return [1000 * number + np.arange(length, dtype=np.int32) for number, length in enumerate(lengths, 1)]


LENGTHS = st.lists(st.integers(0, 40), min_size=1, max_size=30)


@pytest.mark.smoke
@given(LENGTHS, st.sampled_from([2, 8, 16]))
def test_every_token_is_out_once_or_dropped_and_rows_hold_together(lengths, window) -> None:
    rows, filled, report = packed(numbered(lengths), window)
    out = np.concatenate([row["tokens"][row["segments"] > 0] for row in filled]) if filled else np.zeros(0)
    assert len(set(out)) == len(out) == report.tokens_out
    assert report.tokens_in == sum(lengths) == report.tokens_out + report.dropped
    assert report.rows == len(rows) and report.padding == len(rows) * window - len(out)
    for pieces, row in zip(rows, filled, strict=True):
        assert 0 < sum(map(len, pieces)) <= window
        assert all(len(x) == window for x in row.values())
        used = row["segments"] > 0
        assert not used[np.argmin(used) :].any() or used.all()
        assert (row["positions"][~used] == -1).all() and (row["targets"][~used] == -1).all()
        for segment in range(1, row["segments"].max() + 1):
            here = row["segments"] == segment
            assert row["positions"][here].tolist() == list(range(here.sum()))
            assert (np.diff(row["tokens"][here]) == 1).all()


@given(LENGTHS, st.sampled_from([2, 8, 16]))
def test_each_document_trains_one_target_less_than_its_tokens_and_none_of_another(lengths, window) -> None:
    _, filled, _ = packed(numbered(lengths), window)
    trained = 0
    for row in filled:
        has = row["targets"] >= 0
        assert (row["targets"][has] == row["tokens"][has] + 1).all()
        trained += has.sum()
    assert trained == sum(max(0, length - 1) for length in lengths)


def test_a_long_document_is_cut_into_whole_windows_and_its_rest() -> None:
    from treering.train.data.packing import cut

    assert [(p.start, p.stop) for p in cut(0, 20, 8)] == [(0, 8), (8, 16), (16, 20)]
    assert [(p.start, p.stop) for p in cut(0, 16, 8)] == [(0, 8), (8, 16)]
    assert [(p.start, p.stop) for p in cut(0, 8, 8)] == [(0, 8)]
    assert cut(0, 0, 8) == []


def test_with_a_stride_each_token_after_a_window_is_met_once_in_each_part_of_a_window() -> None:
    from treering.train.data.packing import cut

    pieces = cut(0, 21, 8, stride=4)
    assert [(p.start, p.stop) for p in pieces] == [(0, 8), (4, 12), (8, 16), (12, 20), (16, 21), (20, 21)]
    for token in range(8, 21):
        parts = sorted((token - p.start) // 4 for p in pieces if p.start <= token < p.stop)
        assert parts == [0, 1]
    assert cut(0, 21, 8, stride=9) == cut(0, 21, 8)
    assert [(p.start, p.stop) for p in cut(0, 5, 8, stride=4)] == [(0, 5)]


def test_best_fit_wastes_little_and_ignores_nothing_that_fits() -> None:
    lengths = np.random.default_rng(0).geometric(1 / 300, 2000).clip(2, 4000)
    _, _, report = packed(numbered(lengths.tolist()), 1024)
    assert report.padding / (report.rows * 1024) < 0.002


def test_only_trained_tokens_are_targets() -> None:
    from treering.train.data.packing import Document, fill_row, pack_documents

    tokens = np.arange(10, 16, dtype=np.int32)
    trained = np.array([True, False, False, True, True, False])
    (pieces,), _ = pack_documents([6], 8)
    row = fill_row(pieces, lambda i: Document(tokens, trained), 8)
    assert row["targets"].tolist() == [-1, -1, 13, 14, -1, -1, -1, -1]
    rows, _ = pack_documents([6], 3)
    cut_rows = [fill_row(pieces, lambda i: Document(tokens, trained), 3) for pieces in rows]
    assert sorted(tuple(row["targets"]) for row in cut_rows) == [(-1, -1, 13), (14, -1, -1)]


def test_pieces_without_a_trained_token_are_dropped_and_those_with_one_kept() -> None:
    from treering.train.data.packing import Document, pack_documents

    documents = [
        Document(np.arange(20, dtype=np.int32), np.arange(20) == 13),
        Document(np.arange(4, dtype=np.int32), np.arange(4) == 0),  # a first token is no target
        Document(np.arange(3, dtype=np.int32)),
    ]
    rows, report = pack_documents([20, 4, 3], 8, document=documents.__getitem__)
    kept = {(piece.document, piece.start) for row in rows for piece in row}
    assert kept == {(0, 8), (2, 0)}
    assert (report.tokens_in, report.tokens_out, report.dropped) == (27, 11, 16)
    # Token 8 is the target of token 7: the piece before the cut is kept for it.
    rows, _ = pack_documents([20], 8, document=lambda _: Document(documents[0].tokens, np.arange(20) == 8))
    assert [(piece.start, piece.stop) for row in rows for piece in row] == [(0, 8)]


def test_a_document_of_one_token_and_a_rest_of_one_token_are_dropped_and_counted() -> None:
    rows, filled, report = packed(numbered([1, 9]), 8)
    assert len(rows) == 1 and report.dropped == 2
    assert filled[0]["targets"].tolist() == list(range(2001, 2009))


def test_an_end_token_that_is_also_the_padding_token_is_trained() -> None:
    """Padding is known by its segment, never by comparing token ids."""
    document = np.array([5, 6, 0], np.int32)
    _, (row,), _ = packed([document], 6)
    assert row["targets"].tolist() == [6, 0, -1, -1, -1, -1]
    assert row["segments"].tolist() == [1, 1, 1, 0, 0, 0]


def test_reports_add_up() -> None:
    from treering.train.data.packing import Report

    a = Report(documents=1, tokens_in=10, tokens_out=9, dropped=1, rows=2, padding=7)
    assert (a + a).to_dict() == {key: 2 * value for key, value in a.to_dict().items()}
    assert "9 out" in str(a) and "1 dropped" in str(a)
