"""`mosar prepare`: what it says, its exit codes, and that it loads no more than it needs."""

import os
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from mosar.cli import app


def run(*arguments):
    return CliRunner().invoke(app, ["prepare", *map(str, arguments)])


def test_it_says_what_was_made_and_what_comes_next(tmp_path, write_lines):
    out = tmp_path / "a set"
    result = run(write_lines(["é" * 10, "b", "c"]), "--out", out, "--valid-fraction", 0.01)
    assert result.exit_code == 0
    train, valid, where, following = result.stdout.splitlines()
    assert "documents" in train
    assert "1 document " in valid
    assert "bytes per token" in train
    assert where == f"{out}: tokenizer byte, vocabulary 257, uint16"
    assert following.startswith("next: mosar train ")
    assert f"--data '{out}'" in following
    assert result.stderr == "packing\n"


def test_notes_go_to_stderr(tmp_path):
    folder = tmp_path / "corpus"
    folder.mkdir()
    for name, content in (("a.txt", b"a"), ("b.txt", b"\xff"), ("c.txt", b" "), ("d.bin", b"x")):
        (folder / name).write_bytes(content)
    result = run(folder, "--out", tmp_path / "set", "--tokenizer", "bpe:5000")
    assert result.exit_code == 0
    assert result.stderr.splitlines() == [
        "training the tokenizer (bpe:5000)",
        "packing",
        "note: ignored: 1 file of other kinds",
        "note: skipped: 1 empty document",
        "note: bytes that are not UTF-8 were replaced by U+FFFD in 1 document, "
        f"the first is {folder / 'b.txt'}",
        "note: the text is too short for a vocabulary of 5,000; it gave 257 tokens",
    ]


def test_the_standard_library_is_the_default(tmp_path):
    result = run("--out", tmp_path / "set")
    assert result.exit_code == 0
    assert '"source": "stdlib of Python ' in (tmp_path / "set" / "manifest.json").read_text()


def test_check(dataset):
    result = run("--check", dataset)
    assert result.stdout.splitlines()[-1] == "every file matches its checksum"
    content = bytearray((dataset / "train.bin").read_bytes())
    content[5] ^= 1
    (dataset / "train.bin").write_bytes(content)
    result = run("--check", dataset)
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.splitlines()[-1].startswith(f"mosar: error: {dataset / 'train.bin'} was")


def test_every_option_arrives(tmp_path, write_lines, bpe_dataset):
    train = write_lines(["a", "b"], "train.jsonl", "body")
    held_out = [write_lines([text], f"{text}.jsonl", "body") for text in ("c", "d")]
    out = tmp_path / "set"
    options = ("--out", out, "--text-field", "body", "--seed", 9, "--force")
    options += ("--tokenizer", bpe_dataset / "tokenizer.json", "--end-of-text", "<|endoftext|>")
    for _ in range(2):
        result = run(train, "--valid", held_out[0], "--valid", held_out[1], *options)
        assert result.exit_code == 0, result.output
    text = (out / "manifest.json").read_text()
    assert '"seed": 9' in text
    assert '"text_field": "body"' in text
    assert "2 documents" in result.stdout.splitlines()[1]


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        ((), "--out is missing"),
        (("--check", "a", "--out", "b"), "--check takes no sources and no --out"),
        (("stdlib", "--check", "a"), "--check takes no sources and no --out"),
        (("--out", "a", "--tokenizer", f"bpe:{'9' * 5000}"), "VOCAB from 257 to 1048576"),
        (("--out", "a", "--valid-fraction", "2"), "between 0 and 1"),
        (("--out", "a", "--seed", "-1"), "--seed"),
    ],
)
def test_wrong_usage_exits_2(tmp_path, monkeypatch, arguments, part):
    monkeypatch.chdir(tmp_path)
    result = run(*arguments)
    assert result.exit_code == 2
    assert part in result.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (("nothing.txt", "--out", "a"), "nothing.txt does not exist"),
        (("--out", "a", "--tokenizer", "nothing.json"), "there is no tokenizer nothing.json"),
        (("--out", "a", "--tokenizer", "gpt2"), "download the model's tokenizer.json and give its"),
        (("--check", "nothing"), "there is no dataset nothing; make one: mosar prepare stdlib"),
        (("--out", "/dev/null/a"), "/dev/null/a: a file is in the place of a folder"),
        (("--out", "/proc/a"), "/proc/a: the folder cannot be made (No such file or directory)"),
        (("--out", "/dev/null/a/b"), "/dev/null/a/b: a file is in the place of a folder"),
    ],
)
def test_failures_are_one_line(tmp_path, monkeypatch, arguments, part):
    monkeypatch.chdir(tmp_path)
    result = run(*arguments)
    assert result.exit_code == 1
    (line,) = result.stderr.splitlines()
    assert line.startswith("mosar: error: ")
    assert part in line
    assert not list(tmp_path.iterdir())


def test_a_hub_that_cannot_be_reached(tmp_path):
    """A real refusal, and none of the library's own lines about its attempts."""
    pytest.importorskip("datasets")
    code = "import time; time.sleep = lambda seconds: None; import mosar.cli; mosar.cli.main()"
    command = [sys.executable, "-c", code, "prepare", "hf:no/such", "--out", str(tmp_path / "set")]
    environment = os.environ | {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 1
    lines = done.stderr.splitlines()
    assert len(lines) == 1, lines
    (line,) = lines
    assert line.startswith("mosar: error: cannot reach the Hugging Face hub for hf:no/such: check")
    assert not (tmp_path / "set").exists()


def test_bytes_need_no_heavy_module(tmp_path, write_lines):
    code = (
        "import sys\n"
        "from mosar.data.prepare import prepare\n"
        f"prepare([{write_lines()!r}], {str(tmp_path / 'set')!r})\n"
        "heavy = {'torch', 'tokenizers', 'datasets', 'pyarrow', 'transformers', 'typer'}\n"
        "assert not heavy & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
