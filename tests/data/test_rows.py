"""sources/tables.py, folders.py: lists and tables as people write them, and the split that is trained on."""

import logging
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from dino_sparo.data.sources import ImageSource, TableColumns, open_source
from dino_sparo.data.sources.tables import LABELS, PATHS, TableRows


@pytest.fixture(autouse=True)
def heard(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)


def write(path: Path, value: int = 0) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (3, 2), (value, 0, 0)).save(path)
    return path


def values(source: ImageSource) -> list[int]:
    return [int(np.asarray(source.read(i))[0, 0, 0]) for i in range(len(source))]


def class_names(source: ImageSource) -> list[str | None]:
    assert source.labels is not None
    return [source.classes[label] if label >= 0 else None for label in source.labels]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "images"
    for value in range(1, 6):
        write(folder / f"{value}.png", value)
    return folder


# ---- splits


TABLE = "path,label,split\n1.png,fox,train\n2.png,ape,val\n3.png,ape,Train\n4.png,fox,test\n5.png,fox,\n"


def test_a_table_with_splits_trains_on_its_train_rows_and_says_so(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    (root / "set.csv").write_text(TABLE)
    path = str(root / "set.csv")
    assert values(open_source(path)) == [1, 3]
    assert "the rows of the split 'train' are used, of '' (1 rows), 'test' (1 rows), 'train' (2 rows)" in caplog.text
    assert "--split all uses all" in caplog.text
    assert values(open_source(path, "val")) == [2]
    assert values(open_source(path, "test")) == [4]
    assert values(open_source(path, "all")) == [1, 2, 3, 4, 5]
    assert values(open_source(path, default_split="val")) == [2]
    (root / "set.csv").write_text("image,split\n1.png,test\n")
    assert values(open_source(path, "val")) == [1]
    with pytest.raises(ValueError, match=r"'split' of table .* has no split 'train': it holds 'test' \(1 rows\)"):
        open_source(path, "train")


def test_a_column_of_other_words_uses_all_rows_with_a_warning(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    (root / "set.csv").write_text("path,set\n1.png,a\n2.png,b\n")
    assert values(open_source(str(root / "set.csv"))) == [1, 2]
    assert "has no split 'train', all rows are used: 'a' (1 rows), 'b' (1 rows); --split NAME chooses" in caplog.text
    assert values(open_source(str(root / "set.csv"), "B")) == [2]
    (root / "set.csv").write_text("path,fold\n1.png,train\n2.png,val\n")
    assert values(open_source(str(root / "set.csv"), columns=TableColumns(split="fold"))) == [1]


def test_a_folder_of_splits_trains_on_the_train_folder_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for value, name in enumerate(("train/fox/1.png", "train/ape/2.png", "val/fox/3.png")):
        write(tmp_path / "set" / name, value)
    path = str(tmp_path / "set")
    source = open_source(path)
    assert sorted(class_names(source)) == ["ape", "fox"]
    assert "holds splits, 'train' is used; --split all uses everything in it" in caplog.text
    assert len(open_source(path, "all")) == 3
    assert "all of the folders train, val are used together" in caplog.text
    assert values(open_source(path, default_split="val")) == [2]


def test_a_class_called_train_is_no_split(tmp_path: Path) -> None:
    for name in ("bus/1.png", "car/2.png", "train/3.png"):
        write(tmp_path / "vehicles" / name)
    assert open_source(str(tmp_path / "vehicles")).classes == ["bus", "car", "train"]


def test_scenes_train_on_training_scenes_whatever_is_meant_by_all() -> None:
    assert open_source("scenes:5:32").name == open_source("scenes:5:32", "all").name
    assert "val" in open_source("scenes:5:32", default_split="val").name


# ---- columns


def test_a_table_whose_labels_are_not_recognised_says_so_and_names_its_columns(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (root / "set.csv").write_text("path,species\n1.png,fox\n2.png,ape\n")
    assert open_source(str(root / "set.csv")).labels is None
    assert "is used without labels: none of its columns ['path', 'species'] is called label or" in caplog.text
    source = open_source(str(root / "set.csv"), columns=TableColumns(label="species"))
    assert class_names(source) == ["fox", "ape"]
    with pytest.raises(
        ValueError, match=r"no column of labels \(label_column 'kind'\); found the columns \['path', 'species'\]; name"
    ):
        open_source(str(root / "set.csv"), columns=TableColumns(label="kind"))
    caplog.clear()
    (root / "set.csv").write_text("path\n1.png\n")
    open_source(str(root / "set.csv"))
    assert "without labels:" not in caplog.text


def test_columns_are_found_by_the_names_that_options_give(root: Path) -> None:
    (root / "set.csv").write_text("path;Where;what\nno.png;2.png;fox\n")
    source = open_source(str(root / "set.csv"), columns=TableColumns(path="Where", label="what"))
    assert values(source) == [2]
    assert class_names(source) == ["fox"]


@pytest.mark.parametrize("data_path", ["scenes:7:32", "folder", "list.txt", "splits", "cifar10:data", "x-{0..3}.tar"])
def test_columns_of_what_is_no_table_are_refused_not_ignored(root: Path, data_path: str) -> None:
    (root / "folder").mkdir()
    (root / "list.txt").write_text("1.png\n")
    (root / "splits").mkdir()
    (root / "splits/train.txt").write_text("../1.png\n")
    (root / "splits/val.txt").write_text("../1.png\n")
    path = data_path if ":" in data_path else str(root / data_path)
    with pytest.raises(ValueError, match=r"is not a table, so it has no column of that name \(label 'what'\)"):
        open_source(path, columns=TableColumns(label="what"))


# ---- lists


@pytest.mark.parametrize(
    ("line", "name", "label"),
    [
        ("a, b.png", "a, b.png", None),
        ("a, b.png,fox", "a, b.png", "fox"),
        ("a, b.png, red fox  # seen twice", "a, b.png", "red fox"),
        ("a, b.png 3", "a, b.png", "3"),
        ("a, b.png # no label", "a, b.png", None),
        ("a, b.png\tred fox", "a, b.png", "red fox"),
    ],
)
def test_a_list_may_have_commas_in_names_and_comments(root: Path, line: str, name: str, label: str | None) -> None:
    write(root / name, 9)
    (root / "list.txt").write_text(f"# made by hand\n{line}\n\n#1.png 7\n")
    source = open_source(str(root / "list.txt"))
    assert values(source) == [9]
    assert (class_names(source)[0] if source.labels is not None else None) == label


def test_a_list_may_be_json_lines(root: Path) -> None:
    rows = ['{"path": "1.png", "label": 3, "box": [1, 2]}', "", '{"label": "4", "path": "2.png"}', '{"path": "3.png"}']
    (root / "list.jsonl").write_text("\n".join(rows))
    source = open_source(str(root / "list.jsonl"))
    assert values(source) == [1, 2, 3]
    assert class_names(source) == ["3", "4", None]


def test_numbers_in_json_lines_may_be_written_as_pandas_does(root: Path) -> None:
    rows = ['{"path": "1.png", "label": 10.0}', '{"path": "2.png", "label": 2.0}', '{"path": "3.png", "label": NaN}']
    (root / "list.jsonl").write_text("\n".join(rows))
    assert class_names(open_source(str(root / "list.jsonl"))) == ["10", "2", None]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"path": "1.png"}\n{"path": \n', "line 2 is not valid JSON"),
        ('{"path": "1.png"}\n[1]\n', r"line 2 is not a JSON object; give one \{...\} per line"),
        ('{"path": "1.png"}\n{"path": ["2.png"]}\n', r"line 2: 'path' holds no text of one line but \"\['2.png'\]\""),
        ('{"path": "1.png"}\n{"path": ' + "[" * 200_000, "line 2 is not valid JSON .nested too deeply"),
        ("[", "line 1 is not valid JSON"),
        ("", r"no column of paths .*found the columns \[\]"),
    ],
)
def test_bad_json_lines_are_named(root: Path, text: str, message: str) -> None:
    (root / "list.jsonl").write_text(text)
    with pytest.raises(ValueError, match=message):
        open_source(str(root / "list.jsonl"))


# ---- rows that are odd


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            'path,label\n1.png,"a\n2.png,b\n3.png,"c\n',
            r"line 2 cannot be read \(',' expected after '\"'\); is a quote missing",
        ),
        ('path,label\n1.png,a\n"2.png,b\n3.png,c\n', r"line 3 cannot be read \(unexpected end of data\)"),
        ('path,label\n1.png,"a\n2.png,b"\n', "line 2: 'label' holds no text of one line but .*; is a quote missing"),
        ("path,label\n1.png," + "x" * 200_000 + "\n", "line 2 cannot be read .*larger than field limit"),
    ],
)
def test_an_unbalanced_quote_or_an_endless_field_is_an_error_with_its_lines(
    root: Path, text: str, message: str
) -> None:
    (root / "set.csv").write_text(text)
    with pytest.raises(ValueError, match=message):
        open_source(str(root / "set.csv"))


def test_labels_that_are_not_utf_8_are_read_as_latin_1(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    (root / "set.csv").write_bytes("path,label\n1.png,ape\n2.png,élan\n".encode("latin-1"))
    assert class_names(open_source(str(root / "set.csv"))) == ["ape", "élan"]
    assert "1 texts are not UTF-8 and are read as Latin-1; the first is in line 3" in caplog.text
    (root / "list.txt").write_bytes("1.png ape\n2.png élan\n".encode("latin-1"))
    assert class_names(open_source(str(root / "list.txt"))) == ["ape", "élan"]


def test_half_a_character_in_json_leaves_the_other_characters_alone(root: Path) -> None:
    """The bug: the other characters were read as Latin-1."""
    (root / "set.jsonl").write_text('{"path": "1.png", "label": "caf\\u00e9 \\ud83d"}\n')
    assert class_names(open_source(str(root / "set.jsonl"))) == ["café ?"]


OPEN_QUOTES = 'a\t"open quote', "b\tplain", 'c\t"Hello" he said', 'd\t"he said ""hi"""', 'e\tends"', 'f\t"last'


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_quotes_that_enclose_no_cell_of_a_tsv_are_characters(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, end: str
) -> None:
    """The bug: an open quote swallowed the rows up to the next quote."""
    path = tmp_path / "t.tsv"
    path.write_bytes(end.join(["path\tlabel", *OPEN_QUOTES, ""]).encode())
    texts = ['"open quote', "plain", '"Hello" he said', 'he said "hi"', 'ends"', '"last']
    assert list(TableRows(str(path), (PATHS, LABELS))) == [
        (line, [name, text]) for line, name, text in zip(range(2, 8), "abcdef", texts, strict=True)
    ]
    assert "3 lines have a quote that does not enclose a cell and is read as a character; the first is in line 2" in (
        caplog.text
    )


def test_rows_come_with_the_line_that_they_begin_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "t.csv").write_text('path,label,x\na,b,"\n\n"\n\nc,d,e\n')
    assert list(TableRows(str(tmp_path / "t.csv"), (PATHS, LABELS))) == [(2, ["a", "b"]), (6, ["c", "d"])]
    assert "t.csv: 1 rows span several lines (is a quote missing?); the first is in line 2" in caplog.text
