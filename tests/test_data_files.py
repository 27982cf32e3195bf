"""Calibration data on disk: each format, folders, and what can be said of it before it is read."""

from __future__ import annotations

import importlib.util
import json
import os
from pathlib import Path
from typing import Any

import pytest

from adx.calibration import documents
from adx.calibration.data_files import check_data, read_documents
from adx.calibration.documents import Conversation, Skipped, Text
from adx.export.errors import UsageError

TALK = [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "So."}]


def found(path: Path) -> list[Any]:
    """Texts and messages as they are, and reasons in brackets."""
    out: list[Any] = []
    for document in read_documents(path):
        if isinstance(document, Skipped):
            out.append((document.reason,))
        else:
            out.append("".join(document.pieces) if isinstance(document, Text) else document.messages)
    return out


def places(path: Path) -> list[str]:
    return [document.where for document in read_documents(path)]


def write(path: Path, content: str | bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def parquet(path: Path, columns: dict[str, Any], **options: Any) -> Path:
    import pyarrow
    from pyarrow.parquet import write_table

    path.parent.mkdir(parents=True, exist_ok=True)
    write_table(pyarrow.table(columns), path, **options)
    return path


@pytest.mark.parametrize("name", ["a.txt", "a.md", "A.TXT"])
def test_a_text_file_is_one_document(tmp_path: Path, name: str) -> None:
    data = write(tmp_path / name, b"\xef\xbb\xbfone\r\n\r\ntwo \xe2\x82\xac\n")
    assert found(data) == ["one\n\ntwo €\n"]
    assert places(data) == [name]


def test_a_text_file_is_used_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A byte that is no UTF-8 far behind the first piece; a character that two pieces share is none."""
    monkeypatch.setattr("adx.calibration.data_files.PIECE", 16)
    assert found(write(tmp_path / "a.txt", b"some words " * 10 + b"\xff")) == [(documents.NOT_UTF8,)]
    assert found(write(tmp_path / "b.txt", "€" * 100)) == ["€" * 100]
    assert found(write(tmp_path / "c.txt", " \n" * 100)) == [(documents.EMPTY,)]


@pytest.mark.parametrize("name", ["a.jsonl", "a.json"])
def test_lines_of_json(tmp_path: Path, name: str) -> None:
    """Ends of lines are line feeds alone: JSON's strings may hold U+2028 and U+0085 as they are. A byte order mark and
    blank lines are no samples."""
    text = "one\u2028two\x85three\x0cfour"
    content = json.dumps({"text": text, "id": 1}, ensure_ascii=False) + "\r\n\n" + json.dumps({"messages": TALK})
    data = write(tmp_path / name, b"\xef\xbb\xbf" + content.encode())
    assert found(data) == [text, TALK]
    assert places(data) == [f"{name}, line 1", f"{name}, line 3"]


def test_text_comes_before_messages(tmp_path: Path) -> None:
    values = [{"text": "a", "messages": TALK}, {"text": None, "messages": TALK}]
    data = write(tmp_path / "a.jsonl", "\n".join(map(json.dumps, values)))
    assert found(data) == ["a", TALK]


@pytest.mark.parametrize("indent", [None, 2])
def test_a_json_file_may_hold_a_list_or_one_object(tmp_path: Path, indent: int | None) -> None:
    values = [{"text": "a"}, {"messages": TALK}, {"text": 5}, 7]
    data = write(tmp_path / "a.json", "\n" + json.dumps(values, indent=indent))
    assert found(data) == ["a", TALK, (documents.WRONG_TYPE,), (documents.WRONG_TYPE,)]
    assert places(data)[1] == "a.json, item 2"
    assert found(write(tmp_path / "b.json", json.dumps({"text": "a"}, indent=indent))) == ["a"]


def test_json_that_is_none(tmp_path: Path) -> None:
    """A list that is cut is one skipped file, lines are skipped one by one."""
    assert found(write(tmp_path / "a.json", '[{"text": "a"},')) == [(documents.NOT_JSON,)]
    assert found(write(tmp_path / "b.json", 'nothing\n{"text": "a"}')) == [(documents.NOT_JSON,), "a"]
    assert found(write(tmp_path / "c.json", "[]")) == [(documents.EMPTY,)]
    assert found(write(tmp_path / "d.json", "\n\n")) == [(documents.EMPTY,)]
    assert found(write(tmp_path / "e.jsonl", "\n\n")) == [(documents.EMPTY,)]


def test_tool_calls_need_no_content(tmp_path: Path) -> None:
    """What is null is absent."""
    call = {"role": "assistant", "content": None, "tool_calls": [{"name": "look"}]}
    data = write(tmp_path / "a.jsonl", json.dumps({"messages": [TALK[0], call]}))
    assert found(data) == [[TALK[0], {"role": "assistant", "tool_calls": [{"name": "look"}]}]]


def test_parquet_has_texts_or_messages(tmp_path: Path) -> None:
    """Read in batches over several row groups; fields that a message lacks are absent."""
    texts = [f"text {n}" for n in range(200)]
    data = parquet(tmp_path / "a.parquet", {"id": list(range(200)), "text": texts}, row_group_size=30)
    assert found(data) == texts
    assert places(data)[170] == "a.parquet, row 171"
    talk = [TALK[0], {**TALK[1], "tool_calls": [{"name": "look"}]}]
    both = parquet(tmp_path / "b.parquet", {"messages": [talk, None, []], "text": [None, "a", None]})
    assert found(both) == [talk, "a", (documents.EMPTY,)]


def test_bad_rows_of_parquet_are_skipped(tmp_path: Path) -> None:
    import pyarrow

    assert found(parquet(tmp_path / "a.parquet", {"text": ["a", None, ""]})) == [
        "a",
        (documents.NO_TEXT,),
        (documents.EMPTY,),
    ]
    assert found(parquet(tmp_path / "b.parquet", {"text": [1, 2]})) == [(documents.WRONG_TYPE,)] * 2
    raw = pyarrow.array([b"a", b"\xff", b"b"]).cast(pyarrow.string(), safe=False)
    assert found(parquet(tmp_path / "c.parquet", {"text": raw})) == ["a", (documents.NOT_UTF8,), "b"]
    none = parquet(tmp_path / "d.parquet", {"text": pyarrow.array([], pyarrow.string())})
    assert found(none) == [(documents.EMPTY,)]


def test_values_that_python_has_none_for_are_skipped(tmp_path: Path) -> None:
    """A time beyond the year 9999 beside a text: that row is skipped, not the file."""
    import pyarrow

    kind = pyarrow.struct([("role", pyarrow.string()), ("content", pyarrow.string()), ("at", pyarrow.timestamp("us"))])
    talks = [[{"role": "user", "content": "a", "at": at}] for at in (0, 2**62)]
    data = parquet(tmp_path / "a.parquet", {"messages": pyarrow.array(talks, pyarrow.list_(kind))})
    kinds = [type(each) for each in read_documents(data)]
    assert kinds == [documents.Conversation, documents.Skipped]


def test_parquet_with_two_columns_of_one_name_is_refused(tmp_path: Path) -> None:
    import pyarrow
    from pyarrow.parquet import write_table

    write_table(pyarrow.Table.from_arrays([pyarrow.array(["a"])] * 2, names=["text", "text"]), tmp_path / "a.parquet")
    with pytest.raises(UsageError, match="two columns of one name"):
        check_data(tmp_path / "a.parquet")


def test_parquet_without_such_a_column_says_what_it_has(tmp_path: Path) -> None:
    data = parquet(tmp_path / "a.parquet", {"prompt": ["a"], "answer": ["b"]})
    for read in (check_data, found):
        with pytest.raises(UsageError, match=r"a\.parquet: a column `text` or `messages`.* columns are prompt, answer"):
            read(data)


@pytest.mark.parametrize("content", [b"", b"PAR1 and nothing else", b"PAR1" * 100])
def test_what_is_not_parquet_is_refused(tmp_path: Path, content: bytes) -> None:
    with pytest.raises(UsageError, match=r"a\.parquet is not Parquet, or is damaged"):
        check_data(write(tmp_path / "a.parquet", content))


def test_damaged_parquet_is_refused_where_it_is_read(tmp_path: Path) -> None:
    """The footer is whole, a page is not."""
    data = parquet(tmp_path / "a.parquet", {"text": [f"text {n}" for n in range(1000)]}, compression="gzip")
    content = bytearray(data.read_bytes())
    content[4:200] = b"\x00" * 196
    data.write_bytes(content)
    check_data(data)
    with pytest.raises(UsageError, match=r"a\.parquet cannot be read"):
        found(data)


def test_parquet_needs_its_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = parquet(tmp_path / "a.parquet", {"text": ["a"]})
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "pyarrow" else real(name))
    with pytest.raises(UsageError, match=r"pip install 'adx-toolchain\[parquet\]'"):
        check_data(data)


def test_a_folder_is_read_in_the_order_of_names(tmp_path: Path) -> None:
    """Files of all types, deeper folders after; what is passed over is named and counted."""
    write(tmp_path / "d/c.txt", "c")
    write(tmp_path / "d/b.jsonl", '{"text": "b"}')
    write(tmp_path / "d/sub/e.md", "e")
    parquet(tmp_path / "d/sub/f.parquet", {"text": ["f"]})
    write(tmp_path / "d/tail/g.txt", "g")
    write(tmp_path / "d/.git/config.txt", "no")
    write(tmp_path / "d/.hidden.txt", "no")
    write(tmp_path / "d/image.PNG", "no")
    write(tmp_path / "d/Makefile", "no")
    (tmp_path / "d/again").symlink_to(tmp_path / "d", target_is_directory=True)
    (tmp_path / "d/gone.txt").symlink_to(tmp_path / "absent")
    (tmp_path / "d/linked.txt").symlink_to(tmp_path / "d/c.txt")
    os.mkfifo(tmp_path / "d/pipe.txt")
    assert [each for each in found(tmp_path / "d") if isinstance(each, str)] == ["b", "c", "c", "e", "f", "g"]
    passed = {item.where: item.reason for item in read_documents(tmp_path / "d") if isinstance(item, Skipped)}
    assert passed == {
        ".git": "hidden",
        ".hidden.txt": "hidden",
        "again": "a link to a folder",
        "image.PNG": "of type .png",
        "Makefile": "of no type",
        "gone.txt": "no regular file",
        "pipe.txt": "no regular file",
    }
    assert "sub/f.parquet, row 1" in places(tmp_path / "d")


def test_documents_are_read_as_they_are_asked_for(tmp_path: Path) -> None:
    """A file behind the first is not opened for the first document."""
    write(tmp_path / "a.jsonl", '{"text": "a"}\n')
    write(tmp_path / "b.jsonl", '{"text": "b"}\n')
    stream = read_documents(tmp_path)
    first = next(stream)
    assert isinstance(first, Text)
    write(tmp_path / "b.jsonl", json.dumps({"messages": TALK}))
    (last,) = stream
    assert isinstance(last, Conversation)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("empty.txt", "", "is empty; accepted are .txt"),
        ("text.csv", "a,b\n", r"nothing to read; accepted are \.txt and \.md"),
        ("text", "a", r"nothing to read; accepted are \.txt and \.md"),
        ("folder/a.csv", "a", r"nothing to read \(it holds a\.csv\); accepted"),
        ("folder/a.txt", "", "is empty"),
    ],
)
def test_data_that_cannot_be_read_is_refused_early(tmp_path: Path, name: str, content: str, words: str) -> None:
    write(tmp_path / name, content)
    data = tmp_path / name.split("/")[0]
    with pytest.raises(UsageError, match=words) as caught:
        check_data(data)
    assert str(data) in str(caught.value)


def test_data_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"absent\.txt is not there: give a file or a folder"):
        check_data(tmp_path / "absent.txt")
    (tmp_path / "none").mkdir()
    with pytest.raises(UsageError, match="nothing to read"):
        check_data(tmp_path / "none")


def test_data_that_may_not_be_read_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = write(tmp_path / "a.txt", "a")

    def refuse(path: Path, *args: Any, **keys: Any) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(UsageError, match=r"a\.txt cannot be read: .*Permission denied"):
        check_data(data)
