"""The compiled decoder: built once, by one process, in a private folder, and tried before it is used."""

from __future__ import annotations

import logging
import shutil
import subprocess
import threading
from pathlib import Path

import pytest

from foretoken.core.errors import ConfigError
from foretoken.forward.kernels import loading
from foretoken.native import build, selftest, variants
from helpers.compiled import compiled as program

COMPILER = variants.compiler_command()

pytestmark = pytest.mark.skipif(build.library() is None, reason="no C compiler on this machine: the native path is off")


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A library of this source: the one that all tests use."""
    found = build.library()
    assert found is not None
    path = Path(found._name)
    if not path.exists():  # this process compiled it, and moved it to its name afterwards
        path = build.own_cache_folder() / f"decoder-{build._key(COMPILER)}.so"
    return shutil.copy(path, tmp_path_factory.mktemp("compiled") / "decoder.so")


class Machine:
    """A cache folder of its own, and a compiler that keeps a record, as ccache does."""

    def __init__(self, folder: Path, compiled: Path) -> None:
        self.cache = folder / "cache" / "foretoken"
        self.record = folder / "record"
        self.compiler = folder / "cc"
        self.compiler.write_text(
            "#!/bin/sh\n"
            'case "$*" in *--version*) echo "recording 1.0"; exit 0;; esac\n'
            f'echo built >> "{self.record}"; sleep 0.1\n'
            'while [ "$1" != -o ]; do shift; done\n'
            f'cp "{compiled}" "$2"\n'
        )
        self.compiler.chmod(0o755)

    def library(self) -> object:
        return build.found_or_built([str(self.compiler)])

    @property
    def num_built(self) -> int:
        return len(self.record.read_text().splitlines()) if self.record.exists() else 0

    @property
    def kept(self) -> Path:
        (found,) = self.cache.glob("decoder-*.so")
        return found


@pytest.fixture
def machine(tmp_path: Path, compiled: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(selftest, "failure", lambda library: None)  # two seconds, of code that is not optimised
    return Machine(tmp_path, compiled)


def test_it_is_built_once_and_writable_by_its_owner_only(machine: Machine, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        machine.library()
        machine.library()
    assert machine.num_built == 1
    assert caplog.text.count("compiling the native CPU decoder") == 1
    assert machine.cache.stat().st_mode & 0o777 == 0o700
    assert machine.kept.stat().st_mode & 0o777 == 0o600
    assert sorted(each.name for each in machine.cache.iterdir()) == sorted(["build.lock", machine.kept.name])


def test_one_builds_and_the_others_wait(machine: Machine) -> None:
    found: list[object] = []
    builders = [threading.Thread(target=lambda: found.append(machine.library())) for _ in range(4)]
    for each in builders:
        each.start()
    for each in builders:
        each.join()
    assert (len(found), machine.num_built) == (4, 1)


@pytest.mark.parametrize("content", [b"", b"not a library", None])
def test_a_damaged_library_is_built_again(machine: Machine, content: bytes | None) -> None:
    machine.library()
    whole = machine.kept.read_bytes()
    damaged = whole[: len(whole) // 2] if content is None else content
    replacement = machine.cache / "replacement"  # a new file: this process has the old one in use
    replacement.write_bytes(damaged)
    replacement.chmod(0o600)
    replacement.replace(machine.kept)
    machine.library()
    assert machine.num_built == 2
    assert machine.kept.read_bytes() == whole


@pytest.mark.parametrize("mode", [0o666, 0o620, 0o602], ids=["all", "group", "others"])
def test_a_library_that_others_can_write_is_not_loaded(machine: Machine, mode: int) -> None:
    machine.library()
    machine.kept.chmod(mode)
    machine.library()
    assert machine.num_built == 2
    assert machine.kept.stat().st_mode & 0o777 == 0o600


def test_a_library_of_another_owner_is_not_loaded(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine.library()
    monkeypatch.setattr("os.getuid", lambda: machine.kept.stat().st_uid + 1)
    with pytest.raises(build._Unfit, match="a file of the current user that no other user can write"):
        build._own(machine.kept)


def test_a_link_is_not_loaded(machine: Machine, tmp_path: Path) -> None:
    machine.library()
    elsewhere = tmp_path / "planted.so"
    shutil.move(machine.kept, elsewhere)
    link = machine.cache / f"decoder-{build._key([str(machine.compiler)])}.so"
    link.symlink_to(elsewhere)
    machine.library()
    assert machine.num_built == 2
    assert not machine.kept.is_symlink()


def test_what_an_interrupted_build_left_is_removed(machine: Machine) -> None:
    left = machine.cache / f"{build._SCRATCH}abc"
    left.mkdir(parents=True)
    (left / "decoder.so").write_bytes(b"half")
    machine.library()
    assert not left.exists()


def test_without_a_folder_nothing_is_left_over(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cache").write_text("a file where the folder should be")
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    machine.library()
    assert list(temporary.iterdir()) == []


def test_flags_are_part_of_the_name(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    command = [str(machine.compiler)]
    before = build._key(command)
    monkeypatch.setattr(variants, "FLAGS", (*variants.FLAGS, "-mtune=generic"))
    assert build._key(command) != before
    assert build._key([*command, "-m64"]) != build._key(command)


def test_contraction_is_not_left_to_the_compiler() -> None:
    assert "-ffp-contract=off" in variants.FLAGS


def test_without_a_compiler_one_line_is_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with caplog.at_level(logging.WARNING):
        assert build.library.__wrapped__() is None
    (said,) = caplog.records
    assert "no C compiler was found" in said.message


def test_a_library_that_fails_its_self_test_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One that adds three rows up in another way, as a compiler may that was allowed to."""
    assert COMPILER is not None
    text = (variants.HERE / "products.inc").read_text()
    spoilt = text.replace("part y = acc[m][n];", "part y = MR == 3 ? acc[m][n] * 1.0000001f : acc[m][n];")
    assert spoilt != text
    # not optimised, it is compiled in a fifth of the time
    flags = [*(flag for flag in variants.FLAGS if flag != "-O3"), *variants.NATIVE, "-O0", "-DMOST_CODED=4", "-shared"]
    library = program(variants.HERE / "decoder.c", COMPILER, flags, changed={"products.inc": spoilt})
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    other = Machine(tmp_path, library)
    monkeypatch.setenv("CC", str(other.compiler))
    with caplog.at_level(logging.WARNING):
        assert build.library.__wrapped__() is None
    assert "fails its self-test" in caplog.text
    assert "on 1 threads differ from single ones" in caplog.text
    assert not list(other.cache.glob("decoder-*"))


@pytest.mark.full_product
def test_other_tuning_flags_give_the_same_bits_to_every_row(tmp_path: Path) -> None:
    assert COMPILER is not None
    flags = [*(flag for flag in variants.FLAGS if flag != "-O3"), *variants.NATIVE, "-O0"]
    library = tmp_path / "decoder.so"
    command = [*COMPILER, *flags, "-shared", str(variants.HERE / "decoder.c"), "-lm", "-o", str(library)]
    subprocess.run(command, check=True, capture_output=True)
    assert selftest.failure(build._loaded(library)) is None


class Wheel:
    """A folder of libraries as a wheel brings them."""

    def __init__(self, folder: Path, compiled: Path) -> None:
        self.library = folder / variants.of_this_machine()[0].library.name
        folder.mkdir()
        shutil.copy(compiled, self.library)
        variants.seal(self.library)


@pytest.fixture
def wheel(tmp_path: Path, compiled: Path, machine: Machine, monkeypatch: pytest.MonkeyPatch) -> Wheel:
    if not variants.of_this_machine():
        pytest.skip("what this processor can do is not known")
    monkeypatch.setattr(variants, "PREBUILT", tmp_path / "prebuilt")
    monkeypatch.setenv("CC", str(machine.compiler))
    return Wheel(tmp_path / "prebuilt", compiled)


def test_what_a_wheel_brought_is_tried_once_and_nothing_is_compiled(
    wheel: Wheel, machine: Machine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tried: list[object] = []
    monkeypatch.setattr(selftest, "failure", lambda library: tried.append(library))
    with caplog.at_level(logging.INFO):
        assert build.library.__wrapped__() is not None
        assert build.library.__wrapped__() is not None
    assert (len(tried), machine.num_built) == (1, 0)
    assert "is the one that was installed for this kind of processor" in caplog.text


def test_a_wheel_that_lacks_the_best_library_gives_the_next(
    wheel: Wheel, machine: Machine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """An old compiler does not know the newest kind of processor."""
    able = variants.of_this_machine()
    if len(able) < 2:
        pytest.skip("this processor is of the first kind there was")
    wheel.library.rename(wheel.library.parent / able[1].library.name)
    monkeypatch.setattr(selftest, "failure", lambda library: None)
    with caplog.at_level(logging.INFO):
        assert build.library.__wrapped__() is not None
    assert machine.num_built == 0
    assert f"installed for this kind of processor ({able[1].name})" in caplog.text


def test_a_variant_is_chosen_by_name(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    *_, last = variants.of_this_machine() or pytest.skip("what this processor can do is not known")
    monkeypatch.setenv("CC", str(machine.compiler))
    monkeypatch.setattr(variants, "PREBUILT", machine.cache / "prebuilt")
    monkeypatch.setattr(selftest, "failure", lambda library: None)
    assert build.library.__wrapped__() is not None
    monkeypatch.setenv("FORETOKEN_VARIANT", last.name)
    assert build.library.__wrapped__() is not None
    assert machine.num_built == 2
    built = {each.name for each in machine.cache.glob("decoder-*.so")}
    assert f"decoder-{build._key([str(machine.compiler)], last.options)}.so" in built
    monkeypatch.setenv("FORETOKEN_VARIANT", "mmx")
    with pytest.raises(ConfigError, match=f"FORETOKEN_VARIANT=mmx: this processor can run .*{last.name}$"):
        build.library.__wrapped__()


def test_a_wheels_library_of_other_sources_is_not_looked_at(
    wheel: Wheel, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(variants, "FLAGS", (*variants.FLAGS, "-DOTHER"))  # as a changed source does, its name
    assert build.library.__wrapped__() is not None
    assert machine.num_built == 1


def test_a_wheels_library_that_is_damaged_or_fails_its_self_test_is_compiled_anew(
    wheel: Wheel, machine: Machine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    whole = wheel.library.read_bytes()
    wheel.library.unlink()  # a new file: another test may have it in use
    wheel.library.write_bytes(whole[: len(whole) // 2])
    assert build.library.__wrapped__() is not None
    assert "is damaged" in caplog.text
    wheel.library.write_bytes(whole)
    answers = iter(["two and two are five", None])
    monkeypatch.setattr(selftest, "failure", lambda library: next(answers))
    shutil.rmtree(machine.cache)
    assert build.library.__wrapped__() is not None
    assert "fails its self-test (two and two are five)" in caplog.text
    assert machine.num_built == 2
    assert not list(machine.cache.glob("tried-*"))


def test_a_processor_takes_the_best_variant_that_it_can_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    monkeypatch.setattr("sys.platform", "linux")
    chosen = []
    tiles = ("amx_tile", "amx_bf16", "amx_int8")
    for able in (
        [],
        variants._AVX2,
        [*variants._AVX512],
        [*variants._AVX512, "avx512_vnni", *tiles],
        variants._AVX512_BF16,
        [*variants._AVX512_BF16, *tiles],
    ):
        monkeypatch.setattr(variants, "processor", lambda able=able: f"flags\t: fpu {' '.join(able)} sse")
        chosen.append(variants.of_this_machine()[0].name)
    assert chosen == ["x86_64", "avx2", "avx2", "avx512-vnni", "avx512-bf16", "amx"]
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    monkeypatch.setattr(variants, "processor", lambda: "Features\t: fp asimd asimddp")
    assert [each.name for each in variants.of_this_machine()] == ["neon-dotprod", "neon"]
    monkeypatch.setattr("platform.machine", lambda: "riscv64")
    assert variants.of_this_machine() == []


@pytest.mark.parametrize("value", ["off", "false", "2", " 0"])
def test_a_switch_that_is_neither_on_nor_off_is_refused(value, monkeypatch):
    monkeypatch.setenv("FORETOKEN_NATIVE", value)
    for asked in (build.library.__wrapped__, lambda: loading.kernel.__wrapped__("cpu")):
        with pytest.raises(ConfigError, match=f"FORETOKEN_NATIVE={value}: 0 switches"):
            asked()


@pytest.mark.parametrize("value", ["'", '"gcc', "no-such-compiler -O2"])
def test_a_compiler_that_cannot_be_started_leaves_the_general_path(value, monkeypatch, tmp_path, caplog):
    monkeypatch.setenv("CC", value)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(build, "_ready_made", lambda able: None)
    assert build.library.__wrapped__() is None
    assert "the slower general path is" in caplog.text
