"""Labels as Parquet and back: nothing is lost, nothing comes twice, and what is no such file is named."""

from dataclasses import replace
from pathlib import Path

import pandas as pd
import pyarrow.parquet as pq
import pytest
from test_store import RECORD

from vla_rlaif.cli import main
from vla_rlaif.preferences.parquet import export_parquet, import_parquet
from vla_rlaif.preferences.store import PreferenceStore


@pytest.fixture
def store(tmp_path: Path):
    with PreferenceStore(tmp_path / "labels.sqlite") as store:
        store.append([RECORD, replace(RECORD, p_first=None, both_orders=None, step=4), replace(RECORD, step=5)])
        store.append([replace(RECORD, p_first=0.5, held_out=True, step=6, corrects=1), replace(RECORD, step=7)])
        store.rewind(4)  # abandons the record of step 7
        store.append([replace(RECORD, step=8)])
        yield store


def test_a_file_says_all(store: PreferenceStore, tmp_path: Path) -> None:
    assert export_parquet(store, tmp_path / "labels.parquet") == 6
    frame = pd.read_parquet(tmp_path / "labels.parquet")  # as others read it
    assert frame["step"].tolist() == [3, 4, 5, 6, 7, 8]
    assert frame["in_force"].tolist() == [False, True, True, True, False, True]
    assert frame["p_first"].isna().tolist() == [False, True, False, False, False, False]
    assert frame["corrects"].dropna().tolist() == [1.0] and frame["answer_second_first"][0] == 0.2
    assert pq.read_schema(tmp_path / "labels.parquet").metadata[b"format"] == b"vla_rlaif preferences 1"


def test_what_is_in_force_comes_back_once(store: PreferenceStore, tmp_path: Path) -> None:
    path = tmp_path / "labels.parquet"
    export_parquet(store, path)
    with PreferenceStore(tmp_path / "other.sqlite") as other:
        assert import_parquet(path, other) == (4, 0)
        plain = [replace(r, id=None, corrects=None) for r in store.records()]
        assert [replace(r, id=None) for r in other.records()] == plain
        assert import_parquet(path, other) == (0, 4)
        store.append([replace(RECORD, step=9)])
        export_parquet(store, path)
        assert import_parquet(path, other) == (1, 4)
        assert other.count == 5
    assert import_parquet(path, store) == (0, 5)


def test_bad_files_are_named(store: PreferenceStore, tmp_path: Path) -> None:
    path = tmp_path / "labels.parquet"
    path.write_bytes(b"PAR1 this is not one")
    with pytest.raises(ValueError, match="not a readable Parquet file"):
        import_parquet(path, store)
    pd.DataFrame({"first": ["a"]}).to_parquet(path)
    with pytest.raises(ValueError, match="no column 'id': it was not written by"):
        import_parquet(path, store)
    export_parquet(store, path)
    frame = pd.read_parquet(path)
    frame.loc[1:, "second"] = frame["first"]
    frame.to_parquet(path)
    with pytest.raises(ValueError, match="compares two episodes"):
        import_parquet(path, store)
    assert store.count == 4


def command(*argv: object) -> int:
    with pytest.raises(SystemExit) as exit:
        main(["labels", *map(str, argv)])
    assert isinstance(exit.value.code, int)
    return exit.value.code


def test_the_verb(store: PreferenceStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, file, new = tmp_path / "labels.sqlite", tmp_path / "labels.parquet", tmp_path / "new.sqlite"
    assert [command("export", path, "--file", file), command("import", new, "--file", file)] == [0, 0]
    assert command("agreement", path) == 0 and (tmp_path / "labels.agreement.json").exists()
    said = capsys.readouterr().out
    for text in ("6 records written, 4 of them in force", "4 records added, 0 were there", "oracle/1: 4 labels"):
        assert text in said
    assert command("export", tmp_path / "none.sqlite", "--file", file) == 2
    assert command("export", path) == 2
    assert command("import", path, "--file", tmp_path / "none.parquet") == 2
    said = capsys.readouterr().err
    for text in ("no preference store at", "labels export needs --file", "no Parquet file at"):
        assert text in said
