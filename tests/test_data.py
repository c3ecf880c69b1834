"""Sources, the token cache, and the one stream of rows: the same from any point, on any mesh, for any process."""

import bz2
import gzip
import json
import lzma
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

VOCAB = 300


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory):
    from treering.models.tokenizer import Tokenizer
    from treering.train.data.new_tokenizer import write_tokenizer

    folder = tmp_path_factory.mktemp("tokenizer") / "bytes"
    write_tokenizer(folder, "bytes", [], VOCAB)
    return Tokenizer.from_folder(folder)


def texts(count: int, seed: int = 0) -> list[str]:
    lengths = np.random.default_rng(seed).integers(1, 40, count)
    return [f"{number}:" + "abcdefgh"[number % 8] * int(length) for number, length in enumerate(lengths)]


def write_jsonl(path: Path, rows: list[str]) -> None:
    path.write_text("".join(json.dumps({"text": row, "n": i}) + "\n" for i, row in enumerate(rows)))


def store_of(tmp_path: Path, tokenizer, path: str, **source):
    from treering.configs.data import Source
    from treering.train.data.store import tokenise

    where = Source(path=path, **source)
    return tokenise(where, tokenizer, tokenizer_hash="t", vocab=VOCAB, end=True, cache=tmp_path / "cache")


def decoded(store, tokenizer) -> list[str]:
    return [tokenizer.decode(store.document(i).tokens.tolist()) for i in range(len(store))]


ROWS = ["first row", "second\n\nrow", "thïrd"]


def local(tmp_path: Path, kind: str) -> str:
    """Data of a kind on disk; its path."""
    import datasets

    lines = "".join(json.dumps({"text": row}) + "\n" for row in ROWS).encode()
    openers = {"jsonl.gz": gzip.open, "jsonl.bz2": bz2.open, "jsonl.xz": lzma.open, "jsonl": open}
    path = tmp_path / f"data.{kind}"
    if kind in openers:
        with openers[kind](path, "wb") as out:
            out.write(lines)
    elif kind == "json":
        path.write_text(json.dumps([{"text": row} for row in ROWS]))
    elif kind == "txt":
        for number, row in enumerate(ROWS):
            (tmp_path / f"{number}.txt").write_text(row)
        return str(tmp_path / "*.txt")
    else:
        rows = datasets.Dataset.from_dict({"text": ROWS})
        if kind == "parquet":
            rows.to_parquet(path)
        elif kind == "saved":
            rows.save_to_disk(path)
        elif kind == "saved splits":
            datasets.DatasetDict({"train": rows}).save_to_disk(path)
    return str(path)


KINDS = ["jsonl", "jsonl.gz", "jsonl.bz2", "jsonl.xz", "json", "parquet", "txt", "saved", "saved splits"]


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_local_data_gives_the_same_documents_stored_and_streamed(tmp_path, tokenizer, kind) -> None:
    from treering.configs.data import Source
    from treering.train.data.sources import open_source
    from treering.train.data.stream import StreamedBlocks

    path = local(tmp_path, kind)
    store = store_of(tmp_path, tokenizer, path)
    assert decoded(store, tokenizer) == ROWS
    assert store.text_bytes == sum(len(row.encode()) for row in ROWS)
    first = store.document(0).tokens
    assert first[0] == 0 and first[-1] == tokenizer.end_id and (first == tokenizer.end_id).sum() == 1
    source = Source(path=path)
    rows = open_source(source, streaming=True, cache=tmp_path / "cache")
    blocks = StreamedBlocks(rows, source, tokenizer, tokens=10**6, vocab=VOCAB, end=True)
    lengths, document, following = blocks.read(blocks.start())
    assert lengths == store.lengths.tolist() and following["epoch"] == 1
    assert all((document(i).tokens == store.document(i).tokens).all() for i in range(3))


def test_text_by_line_and_a_part_of_a_split(tmp_path, tokenizer) -> None:
    (tmp_path / "a.txt").write_text("one\ntwo\nthree\nfour\n")
    assert decoded(store_of(tmp_path, tokenizer, str(tmp_path / "a.txt"), unit="line"), tokenizer) == [
        "one", "two", "three", "four",
    ]  # fmt: skip
    half = store_of(tmp_path, tokenizer, str(tmp_path / "a.txt"), unit="line", split="train[:50%]")
    assert decoded(half, tokenizer) == ["one", "two"]
    saved = store_of(tmp_path, tokenizer, local(tmp_path, "saved"), split="train[1:]")
    assert decoded(saved, tokenizer) == ROWS[1:]


def test_columns_of_token_ids_are_taken_as_they_are(tmp_path, tokenizer) -> None:
    (tmp_path / "ids.jsonl").write_text('{"ids": [5, 6, 7]}\n{"ids": [9, 299]}\n{"ids": []}\n')
    store = store_of(tmp_path, tokenizer, str(tmp_path / "ids.jsonl"), column="ids")
    assert [store.document(i).tokens.tolist() for i in range(len(store))] == [[5, 6, 7], [9, 299]]
    assert store.empty == 1


@pytest.mark.parametrize("streaming", [False, True])
def test_only_the_ranges_of_a_column_are_trained_on(tmp_path, tokenizer, streaming) -> None:
    from treering.configs.data import Source
    from treering.train.data.sources import open_source
    from treering.train.data.stream import PackedRows, StoredBlocks, StreamedBlocks, held_out_batches

    rows = [("aaa BCD eee", [[4, 7]]), ("FG hh", [[0, 2]]), ("no", []), ("çéJ", [[2, 3]])]
    path = tmp_path / "data.jsonl"
    path.write_text("".join(json.dumps({"text": text, "answers": within}) + "\n" for text, within in rows))
    source = Source(path=str(path), trained="answers")
    store = store_of(tmp_path, tokenizer, str(path), trained="answers")
    if streaming:
        stream = open_source(source, streaming=True, cache=tmp_path / "cache")
        blocks = StreamedBlocks(stream, source, tokenizer, tokens=40, vocab=VOCAB, end=True)
    else:
        blocks = StoredBlocks(store, 40, (0,))
    packed = PackedRows(blocks, 16, (0,), masked=True)
    trained = set()
    while packed.position["block"]["epoch"] == 0:
        targets = packed.next()()["targets"]
        trained |= set(tokenizer.decode(targets[targets >= 0].tolist()))
    assert trained == set("BCDFGJ")
    assert store.targets == store.text_bytes == 6
    assert sum((batch.targets >= 0).sum() for batch in held_out_batches([store], 16, 2, range(2))) == 6


def test_ranges_that_are_none_are_reported(tmp_path, tokenizer) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text('{"text": "short", "answers": [[2, 9]]}\n')
    with pytest.raises(ValueError, match=r"jsonl, line 1: .answers. \[2, 9\]: .* within the text's 5 characters"):
        store_of(tmp_path, tokenizer, str(path), trained="answers")
    with pytest.raises(ValueError, match="trained spans: .*data.jsonl has no such column .works: text, answers."):
        store_of(tmp_path, tokenizer, str(path), trained="spans")


def test_tokenised_once_and_again_when_data_or_settings_change(tmp_path, tokenizer, monkeypatch) -> None:
    from treering.train.data import store as module

    calls = []
    real = module.encode_rows
    monkeypatch.setattr(module, "encode_rows", lambda *a, **k: calls.append(1) or real(*a, **k))
    path = tmp_path / "data.jsonl"
    write_jsonl(path, ROWS)
    for _ in range(2):
        store_of(tmp_path, tokenizer, str(path))
    assert len(calls) == 1
    from treering.configs.data import Source

    keywords = {"vocab": VOCAB, "cache": tmp_path / "cache"}
    module.tokenise(Source(path=str(path)), tokenizer, tokenizer_hash="other", end=True, **keywords)
    module.tokenise(Source(path=str(path)), tokenizer, tokenizer_hash="t", end=False, **keywords)
    assert len(calls) == 3
    write_jsonl(path, [*ROWS, "a fourth"])
    assert len(store_of(tmp_path, tokenizer, str(path))) == 4 and len(calls) == 4


def test_a_cache_that_was_not_finished_is_written_again(tmp_path, tokenizer, monkeypatch) -> None:
    from treering.train.data import store as module

    document = module.Document(np.array([1, 2], np.int32))
    (tmp_path / "cache").mkdir()
    with monkeypatch.context() as patch:
        patch.setattr(module.json, "dumps", lambda *a: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            module._write(tmp_path / "cache" / "x", "uint16", lambda: iter([([document], 0)]))
    assert not (tmp_path / "cache" / "x").exists()
    module._write(tmp_path / "cache" / "x", "uint16", lambda: iter([([document], 0)]))
    assert (tmp_path / "cache" / "x" / "info.json").is_file()


# What is wrong with data, in one line.


@pytest.mark.smoke
@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize(
    ("name", "content", "source", "says"),
    [
        ("a.jsonl", b'{"body": "x", "title": "y"}\n', {}, "column text: PATH has no such column (works: body, title)"),
        ("a.jsonl", b"", {}, "PATH: it has no rows in split train"),
        ("a.txt", b"", {"unit": "line"}, "no rows"),
        (
            "a.jsonl",
            b'{"text": "x"}\n{"text": \n',
            {},
            "PATH, line 2: it is not JSON (Expecting value at",
        ),
        (
            "a.jsonl",
            b'{"text": "x"}\n{"text": "\xff\xfe"}\n',
            {},
            "PATH, line 2: it is not valid UTF-8 (byte 11",
        ),
        ("a.txt", b"fine\nnot \xff fine\n", {}, "PATH, line 2: it is not valid UTF-8 (byte 5 of the line)"),
        ("a.txt.gz", gzip.compress(b"\xff", mtime=0), {}, "PATH, line 1: it is not valid UTF-8"),
        ("a.jsonl.gz", gzip.compress(b'{"text": "x"}\n' * 9, mtime=0)[:-9], {}, "a.jsonl.gz: it cannot be read: "),
        ("a.jsonl.gz", gzip.compress(b'{"text": "x"}\n{"text": \n', mtime=0), {}, "a.jsonl.gz, line 2: it is not JSON"),
        ("a.json", b'[{"text": "x"},\n {"text": ]\n', {}, "a.json: it cannot be read: "),
        ("a.jsonl", b'{"ids": [3, 300]}\n', {"column": "ids"}, 'PATH, line 1: "ids" 300: it must be a token id of'),
        (
            "a.jsonl",
            b'{"ids": [3, -1]}\n',
            {"column": "ids"},
            '"ids" -1: it must be a token id of',
        ),
        ("a.jsonl", b'{"text": 5}\n', {}, 'PATH, line 1: "text" 5: it must be text, or a list of token ids'),
        ("a.csv", b"text\nx\n", {}, "path PATH: it is not data that can be read"),
    ],
)
def test_wrong_data_is_one_line_of_error(tmp_path, tokenizer, streaming, name, content, source, says) -> None:
    from treering.configs.data import Source
    from treering.train.data.sources import open_source
    from treering.train.data.stream import StreamedBlocks

    (tmp_path / name).write_bytes(content)
    where = Source(path=str(tmp_path / name), **source)
    with pytest.raises(ValueError) as raised:
        if streaming:
            rows = open_source(where, streaming=True, cache=tmp_path / "cache")
            blocks = StreamedBlocks(rows, where, tokenizer, tokens=100, vocab=VOCAB, end=True)
            blocks.read(blocks.start())
        else:
            store_of(tmp_path, tokenizer, str(tmp_path / name), **source)
    assert says.replace("PATH", str(tmp_path / name)) in str(raised.value) and "\n" not in str(raised.value)
    assert not list((tmp_path / "cache").rglob("info.json"))


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("nowhere/data.jsonl", "does not exist"),
        ("./strange", "path ./strange: it is not data that can be read"),
        (".", "it is not a folder that `datasets` saved: .*works: ./.*.jsonl"),
    ],
)
def test_a_path_that_is_no_data_is_reported(tmp_path, tokenizer, path, says) -> None:
    with pytest.raises(ValueError, match=says):
        store_of(tmp_path, tokenizer, path)


def test_the_logging_of_datasets_is_left_as_it_was(tmp_path, tokenizer) -> None:
    import logging

    import datasets

    def settings() -> tuple[int, bool]:
        return logging.getLogger("datasets").level, datasets.are_progress_bars_disabled()

    (tmp_path / "empty.jsonl").write_text("")
    before = settings()
    try:
        datasets.enable_progress_bars()
        logging.getLogger("datasets").setLevel(logging.INFO)
        store_of(tmp_path, tokenizer, local(tmp_path, "jsonl"))
        streamed_rows(tmp_path, tokenizer, str(tmp_path / "data.jsonl")).next()
        with pytest.raises(ValueError, match="no rows"):
            store_of(tmp_path, tokenizer, str(tmp_path / "empty.jsonl"))
        assert settings() == (logging.INFO, False)
    finally:
        logging.getLogger("datasets").setLevel(before[0])
        if before[1]:
            datasets.disable_progress_bars()


def test_a_missing_split_is_reported_with_those_there_are(tmp_path, tokenizer) -> None:
    with pytest.raises(ValueError, match="split test: .* has no such split .works: train."):
        store_of(tmp_path, tokenizer, local(tmp_path, "saved"), split="test")
    with pytest.raises(ValueError, match="split validation: python-docs has no such split .works: train, test, "):
        store_of(tmp_path, tokenizer, "python-docs", split="validation")


def test_python_docs_are_split_by_paragraph_and_share_none() -> None:
    from treering.train.data.python_docs import python_docs

    train, test = python_docs("train")["text"], python_docs("test")["text"]
    sizes = [sum(len(text.encode()) for text in split) for split in (train, test)]
    assert 0.08 < sizes[1] / sum(sizes) < 0.13
    known = {paragraph.strip() for text in train for paragraph in text.split("\n\n")}
    shared = [p for text in test for p in text.split("\n\n") if len(p) >= 40 and p.strip() in known]
    assert shared == []


# The stream of rows.


def stored_rows(store, window: int = 32, seed: int = 0, block_windows: int = 4):
    from treering.train.data.stream import PackedRows, StoredBlocks

    return PackedRows(StoredBlocks(store, block_windows * window, (seed, 0)), window, (seed, 1))


def streamed_rows(tmp_path: Path, tokenizer, pattern: str, window: int = 32):
    from treering.configs.data import Source
    from treering.train.data.sources import open_source
    from treering.train.data.stream import PackedRows, StreamedBlocks

    source = Source(path=pattern)
    rows = open_source(source, streaming=True, cache=tmp_path / "cache")
    return PackedRows(StreamedBlocks(rows, source, tokenizer, tokens=4 * window, vocab=VOCAB, end=True), window, (0, 1))


@pytest.fixture(params=["stored", "streamed"])
def fresh(request, tmp_path, tokenizer):
    """A function that makes the same rows of 40 documents in three files anew."""
    all_texts = texts(40)
    for shard in range(3):
        write_jsonl(tmp_path / f"part{shard}.jsonl", all_texts[shard * 15 : (shard + 1) * 15])
    pattern = str(tmp_path / "part*.jsonl")
    if request.param == "streamed":
        return lambda: streamed_rows(tmp_path, tokenizer, pattern)
    return lambda: stored_rows(store_of(tmp_path, tokenizer, pattern))


def take(rows, count: int) -> list[bytes]:
    return [b"".join(x.tobytes() for x in rows.next()().values()) for _ in range(count)]


def documents_of(rows, tokenizer, epoch: int) -> list[str]:
    """Texts of an epoch, put together from the pieces of its rows."""
    found = []
    while True:
        row = rows.next()()
        now = rows.position["block"]["epoch"]
        if now > epoch:
            return found
        for segment in range(1, row["segments"].max() + 1) if now == epoch else ():
            found.append(tokenizer.decode(row["tokens"][row["segments"] == segment].tolist()))


def test_an_epoch_holds_every_document_once_and_the_next_has_another_order(fresh, tokenizer) -> None:
    first, second = (documents_of(fresh(), tokenizer, epoch) for epoch in (0, 1))
    # Documents longer than a window come in pieces: compare the letters.
    assert sorted("".join(sorted(first))) == sorted("".join(sorted(second))) == sorted("".join(texts(40)))
    assert first != second


def test_rows_go_on_from_any_position_as_if_nothing_had_happened(fresh) -> None:
    straight = fresh()
    positions, rows = [], []
    for _ in range(90):
        positions.append(json.loads(json.dumps(straight.position)))
        rows += take(straight, 1)
    assert positions[-1]["block"]["epoch"] >= 2, "the test must reach beyond an epoch's end"
    for at in (0, 1, 7, 33, 50, 71, 89):
        resumed = fresh()
        resumed.seek(positions[at])
        assert take(resumed, 90 - at) == rows[at:]


def test_a_mixture_keeps_its_shares_at_each_point_and_resumes(tmp_path, tokenizer) -> None:
    from treering.train.data.stream import Mixture

    parts = []
    for number, count in enumerate((40, 5, 20)):
        path = tmp_path / f"{number}.jsonl"
        path.write_text("".join(json.dumps({"text": chr(65 + number) * (9 + i)}) + "\n" for i in range(count)))
        parts.append(store_of(tmp_path, tokenizer, str(path)))

    def fresh():
        return Mixture([stored_rows(store, seed=i) for i, store in enumerate(parts)], [3.0, 1.0, 1.0])

    mixture = fresh()
    sources, rows = [], []
    for drawn in range(1, 101):
        if drawn == 38:
            position = json.loads(json.dumps(mixture.position))
        row = mixture.next()()
        rows.append(row["tokens"].tobytes())
        sources.append(tokenizer.decode([int(row["tokens"][1])]))
        for letter, share in zip("ABC", (0.6, 0.2, 0.2), strict=True):
            assert abs(sources.count(letter) - share * drawn) <= 1
    resumed = fresh()
    resumed.seek(position)
    assert [resumed.next()()["tokens"].tobytes() for _ in range(63)] == rows[37:]


def test_processes_make_their_rows_of_the_same_global_batch(tmp_path, tokenizer) -> None:
    """Ten documents in three files, two processes: together they hold each row once, and step as often."""
    from treering.train.data.stream import Mixture, batches

    for shard in range(3):
        write_jsonl(tmp_path / f"part{shard}.jsonl", texts(10)[shard * 4 : (shard + 1) * 4])
    pattern = str(tmp_path / "part*.jsonl")

    def stream(mine: range):
        return batches(Mixture([streamed_rows(tmp_path, tokenizer, pattern)], [1.0]), 4, mine)

    whole, first, second = (list(islice(stream(mine), 6)) for mine in (range(4), range(2), range(2, 4)))
    for (all_rows, at), (a, at_a), (b, at_b) in zip(whole, first, second, strict=True):
        assert at == at_a == at_b
        for name in ("tokens", "targets", "positions", "segments"):
            joined = np.concatenate([getattr(a, name), getattr(b, name)])
            assert (joined == getattr(all_rows, name)).all()


def test_a_process_makes_the_rows_its_devices_stand_on(mesh) -> None:
    from treering.layers.parallel.sharding import Plan
    from treering.train.data.stream import process_rows

    assert process_rows(Plan(mesh(data=2, fsdp=2, context=2), "train"), 8, 64) == range(8)


def test_data_without_a_single_target_is_reported(tmp_path, tokenizer) -> None:
    (tmp_path / "ids.jsonl").write_text('{"ids": [5]}\n{"ids": [6]}\n')
    rows = stored_rows(store_of(tmp_path, tokenizer, str(tmp_path / "ids.jsonl"), column="ids"))
    with pytest.raises(ValueError, match="nothing to train on"):
        rows.next()


def test_held_out_batches_hold_every_target_once_and_end_in_empty_rows(tmp_path, tokenizer) -> None:
    from treering.train.data.stream import held_out_batches

    write_jsonl(tmp_path / "data.jsonl", texts(11))
    store = store_of(tmp_path, tokenizer, str(tmp_path / "data.jsonl"))
    found = list(held_out_batches([store], 32, 4, range(4)))
    assert sum((batch.targets >= 0).sum() for batch in found) == (store.lengths - 1).sum()
    assert found[-1].tokens.shape == (4, 32)
    again = list(held_out_batches([store], 32, 4, range(2, 4)))
    assert all((a.tokens[2:] == b.tokens).all() for a, b in zip(found, again, strict=True))
    assert len(list(held_out_batches([store], 32, 4, range(4), limit=5))) == 2


def test_making_ahead_keeps_order_and_passes_errors_on() -> None:
    from treering.train.data.stream import ahead

    def items():
        yield from range(5)
        raise ValueError("the sixth")

    got = []
    with pytest.raises(ValueError, match="the sixth"):
        for item in ahead(items()):
            got.append(item)
    assert got == list(range(5))
