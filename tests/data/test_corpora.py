"""Where text comes from: every format, its order, and what is said of input that is wrong."""

import gzip
import json
import os
import sys
import types

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mosar.data import documents
from mosar.data.corpora import find_source, read_documents, total_bytes
from mosar.data.documents import PIECE_LENGTH, ReadReport, cut_pieces
from mosar.data.tokenizer import train_bpe
from mosar.errors import DataError


def read(*specs, report=None, **options):
    """Every document as its name and its text."""
    sources = [find_source(str(spec)) for spec in specs]
    read = read_documents(sources, report or ReadReport(), **options)
    return [(document.name, "".join(document.pieces)) for document in read]


def texts(*specs, **options):
    return [text for _, text in read(*specs, **options)]


def rows(*values):
    return "".join(json.dumps(value) + "\n" for value in values)


def write(path, content):
    path.parent.mkdir(parents=True, exist_ok=True)
    data = content if isinstance(content, bytes) else content.encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


@pytest.mark.parametrize("name", ["a.txt", "a.txt.gz", "a.md", "noending", "A.TXT"])
def test_a_text_file_is_one_document_as_it_is(tmp_path, name):
    text = "Grüße\r\n\r\nzweite Zeile\rdritte\n\n"
    assert texts(write(tmp_path / name, text)) == [text]


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.ndjson", "a.json"])
def test_each_json_line_is_a_document(tmp_path, name):
    values = {"text": "eins\r\n"}, {"body": "zwei", "text": "two"}
    path = write(tmp_path / name, rows(*values) + "\n  \n")
    assert read(path) == [(f"{path}, line 1", "eins\r\n"), (f"{path}, line 2", "two")]
    assert texts(write(tmp_path / name, rows(values[1])), text_field="body") == ["zwei"]


@pytest.mark.parametrize("package", ["pyarrow", "datasets", "tokenizers"])
def test_a_missing_package_names_the_extra(tmp_path, monkeypatch, package):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(DataError, match=r'pip install "datasets>=.*"pyarrow>=.*"tokenizers>='):
        if package == "tokenizers":
            train_bpe(["text"], 300)
        else:
            texts("hf:a" if package == "datasets" else write(tmp_path / "a.parquet", b""))


def test_parquet(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    wanted = [f"row {number}" for number in range(200)]
    table = pyarrow.table({"text": [*wanted, None], "other": range(201)})
    parquet.write_table(table, tmp_path / "a.parquet", row_group_size=50)
    report = ReadReport()
    assert texts(tmp_path / "a.parquet", report=report) == wanted
    assert report.empty == 1
    with pytest.raises(DataError, match=r"no field 'body'; there are \['other', 'text'\]"):
        texts(tmp_path / "a.parquet", text_field="body")
    with pytest.raises(DataError, match="row 1: 'other' must be text, got int"):
        texts(tmp_path / "a.parquet", text_field="other")
    data = (tmp_path / "a.parquet").read_bytes()
    with pytest.raises(DataError, match="not a complete parquet file"):
        texts(write(tmp_path / "b.parquet", data[:-20]))


def test_a_folder_is_read_by_path(tmp_path):
    for name in ("b.txt", "a/z.txt", "a/b/y.md", "C.jsonl", "b/x.txt.gz"):
        content = rows({"text": name}) if name.endswith("jsonl") else name
        write(tmp_path / name, content)
    for name in (".hidden.txt", ".git/a.txt", "__pycache__/a.txt", "image.png", "a.json"):
        write(tmp_path / name, "no")
    assert texts(tmp_path) == ["C.jsonl", "b.txt", "a/z.txt", "a/b/y.md", "b/x.txt.gz"]
    assert find_source(str(tmp_path)).passed_over == 2


def test_the_standard_library(tmp_path):
    source = find_source("stdlib")
    names = {file.name for file in source.files}
    assert {"argparse.py", "dataclasses.py"} <= names
    assert not any("site-packages" in file.parts for file in source.files)
    assert total_bytes([source]) > 1_000_000
    assert source == find_source("stdlib")


def test_a_hugging_face_dataset(tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    write(tmp_path / "corpus" / "train.jsonl", rows({"text": "eins"}, {"text": "zwei"}))
    write(tmp_path / "corpus" / "test.jsonl", rows({"text": "drei"}))
    folder = tmp_path / "corpus"
    assert texts(f"hf:{folder}") == ["eins", "zwei"]
    assert texts(f"hf:{folder}::test") == ["drei"]
    assert total_bytes([find_source(f"hf:{folder}")]) is None
    with pytest.raises(DataError, match="no field 'body'"):
        texts(f"hf:{folder}", text_field="body")
    with pytest.raises(DataError, match="cannot read hf:"):
        texts(f"hf:{folder}::nothing")


def test_what_is_asked_of_datasets(monkeypatch):
    calls = []

    def load_dataset(*arguments, **options):
        calls.append((arguments, options))
        return iter([{"text": "x"}])

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    for spec in ("hf:a/b", "hf:a/b:c", "hf:a/b:c:d", "hf:a/b::train[:1%]"):
        assert texts(spec) == ["x"]
    wanted = [("a/b", None, "train"), ("a/b", "c", "train"), ("a/b", "c", "d")]
    wanted.append(("a/b", None, "train[:1%]"))
    assert calls == [((n, c), {"split": s, "streaming": True}) for n, c, s in wanted]


def test_empty_documents_are_skipped(tmp_path):
    report = ReadReport()
    path = write(tmp_path / "a.jsonl", rows(*({"text": t} for t in ("", "a", " \n", None, "b"))))
    last = write(tmp_path / "0.txt", "c")
    assert texts(path, write(tmp_path / "a.txt", b""), last, report=report) == ["a", "b", "c"]
    assert (report.empty, report.documents) == (4, [2, 0, 1])


def test_a_long_blank_beginning_is_not_lost(tmp_path):
    text = " " * (PIECE_LENGTH + 5) + "x"
    assert texts(write(tmp_path / "a.txt", text)) == [text]


def test_what_is_not_utf8_is_replaced_and_counted(tmp_path):
    good = write(tmp_path / "good.txt", "schön \ufffd")
    bad = write(tmp_path / "bad.txt", "schön\r\n".encode() + b"sch\xf6n\xe2\x82")
    lines = write(tmp_path / "a.jsonl", b'{"text": "sch\xf6n"}\n{"text": "\\ud800 half"}\n')
    report = ReadReport()
    found = texts(good, bad, lines, report=report)
    assert found == ["schön \ufffd", "schön\r\nsch\ufffdn\ufffd", "sch\ufffdn", "\ufffd half"]
    assert (report.replaced, report.first_replaced) == (3, str(bad))


def test_bad_bytes_across_blocks(tmp_path, monkeypatch):
    monkeypatch.setattr(documents, "_BLOCK_BYTES", 3)
    data = "a€b€\n€".encode() + b"\xff" + "€".encode() + b"\xe2\x82"
    assert texts(write(tmp_path / "a.txt", data)) == [data.decode(errors="replace")]


def test_a_byte_order_mark_is_no_text(tmp_path):
    mark = b"\xef\xbb\xbf"
    assert texts(write(tmp_path / "a.txt", mark + b"a")) == ["a"]
    assert texts(write(tmp_path / "a.jsonl", mark + b'{"text": "a"}')) == ["a"]


@pytest.mark.parametrize(
    ("name", "content", "part"),
    [
        ("a.jsonl", '{"text": "a"}\n{"text": \n', "line 2: not JSON"),
        ("a.jsonl", '{"title": "a", "body": "b"}', "no field 'text'; there are ['body', 'title']"),
        ("a.jsonl", '["a"]', "line 1: each line must be a JSON object"),
        ("a.jsonl", '{"text": 3}', "'text' must be text, got int"),
        ("a.txt", "a\0b", "NUL bytes"),
        ("a.txt", "text".encode("utf-16"), "NUL bytes"),
        ("a.txt.gz", None, "a.txt.gz is not a complete gzip file"),
        ("b.txt.gz", b"plain text", "not a complete gzip file"),
        ("a.jsonl.gz", None, "a.jsonl.gz is not a complete gzip file"),
        ("a.parquet.gz", "x", "unpack it first"),
        ("a.zst", "x", "unpack it first"),
    ],
)
def test_wrong_input_is_named(tmp_path, name, content, part):
    path = write(tmp_path / name, content or rows({"text": "a" * 1000}) * 50)
    if content is None:
        path.write_bytes(path.read_bytes()[:-9])
    elif name == "b.txt.gz":
        path.write_bytes(content)
    with pytest.raises(DataError) as caught:
        texts(path)
    assert part in str(caught.value)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_missing_and_strange_sources(tmp_path):
    (tmp_path / "empty").mkdir()
    os.mkfifo(tmp_path / "pipe")
    for name, part in (
        ("nothing.txt", "does not exist"),
        ("empty", "has no file that ends in"),
        ("pipe", "neither a file nor a folder"),
    ):
        with pytest.raises(DataError, match=part):
            find_source(str(tmp_path / name))
    with pytest.raises(DataError, match="hf:NAME"):
        find_source("hf:")


@given(st.lists(st.text(alphabet="ab \n\té€", max_size=40)), st.integers(2, 12))
def test_cut_pieces_depends_on_the_text_alone(chunks, length):
    pieces = list(cut_pieces(chunks, length))
    whole = "".join(chunks)
    assert "".join(pieces) == whole
    assert all(0 < len(piece) <= length for piece in pieces)
    assert pieces == list(cut_pieces([whole], length)) == list(cut_pieces(whole, length))
    assert list(cut_pieces(["one two three four"], 10)) == ["one two", " three", " four"]
