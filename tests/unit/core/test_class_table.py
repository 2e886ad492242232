"""The table of the library's classes is read once, and again where the kept one is of no use."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from foretoken.core import class_table

TABLE = {"llama": {frozenset({"torch"}): {"modeling_llama": {"LlamaModel"}}}}


@pytest.fixture
def read(tmp_path, monkeypatch):
    """The function of an installed library, each time in a new process; ``read.paths``: the folders that it read."""
    package = tmp_path / "site-packages" / "transformers"
    (package / "models").mkdir(parents=True)
    (package / "utils").mkdir()
    (package / "__init__.py").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def in_a_process(path):
        def original(given):
            in_a_process.paths.append(given)
            return TABLE

        library = SimpleNamespace(
            __file__=str(package / "utils" / "import_utils.py"), create_import_structure_from_path=original
        )
        class_table.keep_table(library)
        return library.create_import_structure_from_path(str(path))

    in_a_process.paths = []
    in_a_process.models = package / "models"
    in_a_process.kept = lambda: list((tmp_path / "cache" / "foretoken").glob("classes-*"))
    return in_a_process


def test_the_models_are_read_once(read):
    assert read(read.models) == TABLE
    assert read(read.models / "__init__.py") == TABLE
    assert read.paths == [str(read.models)]


def test_other_folders_are_read_as_ever(read):
    read(read.models / "llama")
    read(read.models / "llama")
    assert read.paths == [str(read.models / "llama")] * 2
    assert read.kept() == []


@pytest.mark.parametrize("damaged", [b"", b"{", b"i\x01\x00\x00\x00"], ids=["empty", "truncated", "no table"])
def test_a_damaged_table_is_read_again(read, damaged):
    read(read.models)
    (kept,) = read.kept()
    kept.write_bytes(damaged)
    assert read(read.models) == TABLE
    assert len(read.paths) == 2
    assert read(read.models) == TABLE
    assert len(read.paths) == 2


def test_another_installation_is_read_again(read):
    read(read.models)
    (read.models / "mistral").mkdir()
    read(read.models)
    assert len(read.paths) == 2


def test_nothing_is_kept_without_a_cache_folder(read, monkeypatch):
    monkeypatch.setattr(class_table, "own_cache_folder", lambda: None)
    assert read(read.models) == read(read.models) == TABLE
    assert len(read.paths) == 2


def test_the_kept_table_is_the_library_s_own():
    from transformers.utils import import_utils

    read = import_utils.create_import_structure_from_path
    library = SimpleNamespace(__file__=import_utils.__file__, create_import_structure_from_path=read)
    class_table.keep_table(library)
    models = str(class_table.Path(import_utils.__file__).parents[1] / "models")
    assert library.create_import_structure_from_path(models) == read(models)
