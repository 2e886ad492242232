"""Names of modules that were not run behave as the real ones do once they are used."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest

from foretoken.core import stand_ins


@pytest.fixture
def heavy(tmp_path, monkeypatch):
    """A package ``heavy_part``; the list holds its name once it was run."""
    (tmp_path / "heavy_part").mkdir()
    (tmp_path / "heavy_part" / "__init__.py").write_text(
        "import builtins\nbuiltins.heavy_runs.append(__name__)\n"
        "class Box:\n    size = 3\n    def __init__(self, held=0):\n        self.held = held\n"
        "TABLE = {'a': 1}\n"
    )
    (tmp_path / "heavy_part" / "below.py").write_text("def double(x):\n    return 2 * x\n")
    runs: list[str] = []
    monkeypatch.setattr("builtins.heavy_runs", runs, raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(stand_ins, "_PACKAGES", ("heavy_part",))
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    stand_ins.allow_stand_ins()
    importlib.invalidate_caches()
    yield runs
    for name in [name for name in sys.modules if name.partition(".")[0] == "heavy_part"]:
        del sys.modules[name]


def taken():
    with stand_ins.stand_ins():
        from heavy_part import TABLE, Box, below
        from heavy_part.below import double
    return Box, TABLE, below, double


def run(code, *arguments):
    """The error of a program in a process of its own; "": there is none."""
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False)
    return done.stderr if done.returncode else ""


def test_a_module_is_run_when_a_name_of_it_is_used_and_then_it_is_the_real_one(heavy):
    box, table, below, double = taken()
    assert heavy == []
    assert "heavy_part" not in sys.modules
    assert double(4) == 8
    assert below.double(5) == 10
    assert table["a"] == 1
    assert "a" in table
    assert len(table) == 1
    assert list(table) == ["a"]
    assert box.size == 3
    assert box(7).held == 7
    import heavy_part

    assert heavy == ["heavy_part"]
    assert isinstance(box(1), heavy_part.Box)


def test_asking_whether_an_object_is_of_a_class_runs_nothing_until_there_can_be_one(heavy):
    box, *_ = taken()
    assert not isinstance(3, box)
    assert not issubclass(int, box)
    assert heavy == []
    import heavy_part

    assert isinstance(heavy_part.Box(), box)
    assert issubclass(heavy_part.Box, box)
    assert not isinstance(3, box)


def test_a_class_can_be_made_of_one(heavy):
    box, *_ = taken()

    class Larger(box):
        size = 4

    import heavy_part

    assert issubclass(Larger, heavy_part.Box)
    assert Larger(2).held == 2


def test_a_module_that_is_there_already_is_taken_as_it_is(heavy):
    import heavy_part

    with stand_ins.stand_ins():
        from heavy_part import Box
    assert Box is heavy_part.Box


def test_imports_of_a_program_of_its_own_stay_as_they_are(heavy, monkeypatch):
    monkeypatch.setattr(sys, "meta_path", [each for each in sys.meta_path if each is not stand_ins._FINDER])
    taken()
    assert heavy == ["heavy_part"]


def test_a_missing_module_is_missing(heavy):
    with stand_ins.stand_ins(), pytest.raises(ModuleNotFoundError):
        importlib.import_module("heavy_part.nowhere.else_")
    assert heavy == []


def test_marks_of_functions_for_the_compiler_are_set_once_there_is_one(tmp_path):
    package = tmp_path / "torch" / "_dynamo"  # in the place of the large one
    package.mkdir(parents=True)
    (tmp_path / "torch" / "__init__.py").touch()
    (package / "__init__.py").write_text(
        "def allow_in_graph(function):\n    function.allowed = True\n    return function\n"
        "def disable(function, recursive=True):\n    return lambda *given: ('apart', function(*given))\n"
    )
    code = """
import sys
sys.path.insert(0, sys.argv[1])
from foretoken.core import stand_ins
stand_ins.allow_stand_ins()
with stand_ins.stand_ins():
    import torch._dynamo
    @torch._dynamo.allow_in_graph
    def marked():
        return 1
    @torch._dynamo.disable(recursive=False)
    def kept_out(x):
        return x
    assert marked() == 1 and not hasattr(marked, "allowed") and kept_out(3) == 3
assert "torch._dynamo" not in sys.modules
import torch._dynamo
assert marked.allowed and kept_out(3) == ("apart", 3)
"""
    assert run(code, str(tmp_path)) == ""


def test_shapes_that_only_python_computes_and_the_compiler_work_without_their_module_at_first():
    code = """
from foretoken.core import stand_ins
stand_ins.allow_stand_ins()
with stand_ins.stand_ins():
    import torch
assert stand_ins._FINDER.left_out <= {"torch._meta_registrations"}  # none in another release of torch
assert torch.rand(1, generator=torch.Generator().manual_seed(3)).equal(torch.rand(1, generator=torch.manual_seed(3)))
made = stand_ins.with_all_kernels(lambda: torch.linalg.eigvals(torch.empty(3, 3, device="meta")))
assert made.shape == (3,) and not stand_ins._FINDER.left_out
"""
    assert run(code) == ""


def test_the_compiler_works_after_the_module_of_shapes_was_left_out():
    code = """
from foretoken.core import stand_ins
stand_ins.allow_stand_ins()
with stand_ins.stand_ins():
    import torch
assert torch.compile(lambda x: x.sin() + 1, backend="eager")(torch.zeros(2)).tolist() == [1, 1]
assert not stand_ins._FINDER.left_out
"""
    assert run(code) == ""


@pytest.mark.parametrize(
    "module", ["torch.distributed.tensor", "torch._refs", "torch._decomp", "torch._inductor.decomposition"]
)
def test_modules_that_read_the_shapes_are_whole_after_they_were_left_out(module):
    code = f"""
import importlib, sys
from foretoken.core.stand_ins import allow_stand_ins, stand_ins
allow_stand_ins()
with stand_ins():
    import torch
found = importlib.import_module("{module}")
assert importlib.import_module("{module}") is found
import torch._decomp, torch._refs
assert torch._refs.linalg and torch._decomp.decompositions.pw_cast_for_opmath
assert sys.modules["torch._meta_registrations"].meta__fused_moving_avg_obs_fq_helper
assert torch.ones(2, 3, device="meta").sum(0).shape == (3,)
"""
    assert run(code) == ""
