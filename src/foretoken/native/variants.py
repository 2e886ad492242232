"""How the native code is compiled, and for which kinds of processors a wheel brings it compiled.

The sources are one unit: the files that ``native_sources.txt`` lists, in its order. decoder.c comes first; the native
code of a method lies in the method's folder and follows.

A wheel holds one library for each variant of its architecture, in ``prebuilt/``. The choice is made on the
user's machine, by the features of its processor. Standard library only: setup.py runs this file before anything is
installed.
"""

import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
PACKAGE = HERE.parent
PREBUILT = HERE / "prebuilt"
FLAGS = (  # whatever the processor
    "-O3",
    "-std=gnu11",
    "-fPIC",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-ffp-contract=off",  # products are fused with additions where the source says so
    "-Wno-psabi",
    "-Werror=incompatible-pointer-types",  # floats taken for units would be a wrong answer, not a warning
    "-pthread",
)
NATIVE = ("-march=native",)
_DIGEST = hashlib.sha256().digest_size


@dataclass(frozen=True)
class Variant:
    """A kind of processor.

    Attributes:
        name: of the library.
        machine: the architecture, as ``platform.machine()`` calls it.
        options: of the compiler.
        needs: features of the processor, by their names in /proc/cpuinfo.
    """

    name: str
    machine: str
    options: tuple[str, ...]
    needs: tuple[str, ...]

    @property
    def library(self) -> Path:
        """Where the library of the sources next to this file would be: its name changes with every one of them."""
        return PREBUILT / f"decoder-{self.name}-{key(self.options)}.so"


_AVX2 = ("avx2", "bmi1", "bmi2", "f16c", "fma", "movbe")
_AVX512 = (*_AVX2, "avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl")
_BF16 = ("-march=x86-64-v4", "-mavx512vnni", "-mavx512bf16")
_AVX512_BF16 = (*_AVX512, "avx512_vnni", "avx512_bf16")
VARIANTS = (  # of each architecture, the best first
    Variant(  # where the system refuses the matrix unit, it computes as the next one
        "amx",
        "x86_64",
        (*_BF16, "-mamx-tile", "-mamx-bf16", "-mamx-int8"),
        (*_AVX512_BF16, "amx_tile", "amx_bf16", "amx_int8"),
    ),
    Variant("avx512-bf16", "x86_64", _BF16, _AVX512_BF16),
    Variant("avx512-vnni", "x86_64", ("-march=x86-64-v4", "-mavx512vnni"), (*_AVX512, "avx512_vnni")),
    Variant("avx2", "x86_64", ("-march=x86-64-v3",), _AVX2),
    Variant("x86_64", "x86_64", ("-march=x86-64",), ()),
    Variant("neon-dotprod", "aarch64", ("-march=armv8.2-a+dotprod",), ("asimd", "asimddp")),
    Variant("neon", "aarch64", ("-march=armv8-a",), ("asimd",)),
)


def of_architecture(machine: str) -> list[Variant]:
    """Those that a wheel for this architecture holds."""
    return [each for each in VARIANTS if each.machine == machine]


def of_this_machine() -> list[Variant]:
    """Those that this processor can run, the best first; none where that cannot be known."""
    if sys.platform != "linux":
        return []
    able = set(processor().partition(":")[2].split())
    return [each for each in of_architecture(platform.machine()) if able.issuperset(each.needs)]


def processor() -> str:
    """The processor's features, in one line."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith(("flags", "Features")):
                return line
    except OSError:
        pass
    return f"{platform.machine()} {platform.processor()}"


def compiler_command() -> list[str] | None:
    """The command in ``CC``, else the first compiler on the PATH; None if there is none."""
    asked = os.environ.get("CC")
    if asked:
        try:
            return shlex.split(asked)
        except ValueError:  # an unclosed quote: a program of this name does not exist
            return [asked]
    for name in ("gcc", "cc", "clang"):
        path = shutil.which(name)
        if path:
            return [path]
    return None


def compile_library(compiler: Sequence[str], options: Sequence[str], target: Path) -> None:
    """Compile the sources into a shared library.

    Raises:
        OSError, subprocess.SubprocessError: they cannot be compiled.
    """
    command = [*compiler, *FLAGS, *options, "-shared", "-x", "c", "-", "-lm", "-o", str(target)]
    subprocess.run(command, input=unit(), capture_output=True, text=True, check=True, timeout=1800)


def unit() -> str:
    """The C text that includes all sources."""
    names = (PACKAGE / "native_sources.txt").read_text(encoding="utf-8").split()
    return "".join(f'#include "{(PACKAGE / name).resolve().as_posix()}"\n' for name in names)


def seal(library: Path) -> None:
    """Put a library's digest after its content."""
    with library.open("ab") as file:
        file.write(hashlib.sha256(library.read_bytes()).digest())


def sealed_digest(library: Path) -> bytes | None:
    """The digest of a sealed library; None if its content does not match.

    Raises:
        OSError: it cannot be read.
    """
    content = library.read_bytes()
    digest = hashlib.sha256(content[:-_DIGEST]).digest()
    return digest if content[-_DIGEST:] == digest else None


def key(words: Sequence[str]) -> str:
    """A name for the library of these sources and these words (compiler, options)."""
    digest = hashlib.sha256()
    names = (PACKAGE / "native_sources.txt").read_text(encoding="utf-8").split()
    own = sorted(each for each in HERE.iterdir() if each.suffix in (".c", ".h", ".inc"))
    for source in (*own, *(PACKAGE / name for name in names[1:])):
        digest.update(source.read_bytes())
    digest.update("\0".join([*words, *FLAGS]).encode())
    return digest.hexdigest()[:20]
