"""The machine and the native library: cores, memory, instruction sets, compiler."""

import shutil
from pathlib import Path

from foretoken.core.errors import ConfigError
from foretoken.core.provenance import cpu_name
from foretoken.core.threads import usable_cores
from foretoken.doctor.finding import Finding, found
from foretoken.forward.switch import native_wanted
from foretoken.models.memory import free_memory
from foretoken.native import build, variants

_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_TIMES = Path("/proc/stat")
_STOLEN = 0.05  # of the processor's time since it was started
_PORTABLE = ("x86_64", "neon")  # variants without wide products


def check(threads: int) -> list[Finding]:
    """Look at the machine.

    Args:
        threads: that torch computes on.
    """
    return [*_cores(threads), _instructions(), _memory(), _huge_pages(), *_build()]


def _cores(threads: int) -> list[Finding]:
    cores = usable_cores()
    facts = f"{threads} of {cores} cores compute"
    if threads > cores:
        return [found("threads", facts, warn=f"threads that wait for a core slow all others: --threads {cores}")]
    if threads < cores:
        remedy = f"--threads {cores}, or set OMP_NUM_THREADS={cores}, unless other programs need the cores"
        return [found("threads", facts, warn=remedy)]
    findings = [found("threads", facts)]
    if cores == 1:
        findings = [
            found("threads", facts, warn="this process has one core: give it more, by its affinity or its quota")
        ]
    stolen = _stolen()
    if stolen is not None and stolen > _STOLEN:
        remedy = "figures vary with the neighbours' load: measure interleaved, or on a machine of your own"
        findings.append(
            found("neighbours", f"{stolen:.0%} of the processor's time went to other machines", warn=remedy)
        )
    return findings


def _stolen() -> float | None:
    """The share of time that a virtual machine waited for its processor; None if it is not known."""
    try:
        times = [int(each) for each in _TIMES.read_text(encoding="ascii").splitlines()[0].split()[1:9]]
        return times[7] / max(1, sum(times))
    except (OSError, ValueError, IndexError):
        return None


def _instructions() -> Finding:
    able = variants.of_this_machine()
    facts = f"{cpu_name()}, {able[0].name if able else 'instruction sets not known'}"
    if able and able[0].name not in _PORTABLE:
        return found("processor", facts)
    return found("processor", facts, warn="it lacks the wide products of newer ones: expect a fraction of their speed")


def _memory() -> Finding:
    free = free_memory()
    return found("memory", "not known on this system" if free is None else f"{free / 1e9:.1f} GB are free")


def _huge_pages() -> Finding:
    try:
        chosen = _HUGE_PAGES.read_text(encoding="ascii").partition("[")[2].partition("]")[0]
    except OSError:
        return found("huge pages", "not known on this system")
    if chosen != "never":
        return found("huge pages", chosen)
    remedy = f"weights are read faster with them: echo madvise | sudo tee {_HUGE_PAGES}"
    return found("huge pages", "switched off", warn=remedy)


def _build() -> list[Finding]:
    """The compiler, and the library as far as it is there: nothing is compiled here."""
    try:
        wanted, ready = native_wanted(), build.is_ready()
    except ConfigError as error:
        return [found("native decoder", str(error), fail="correct the variable, or unset it")]
    if not wanted:
        return [found("native decoder", "switched off by FORETOKEN_NATIVE=0", warn="unset FORETOKEN_NATIVE for speed")]
    compiler = variants.compiler_command()
    there = compiler is not None and shutil.which(compiler[0]) is not None
    name = "none" if compiler is None else " ".join(compiler)
    if not there and not ready:
        remedy = "install gcc or clang, or set CC to one; without it the general path computes, several times slower"
        facts = f"compiler: {name}; there is no compiled library"
        return [found("native decoder", facts if compiler is None else f"{facts}, and no such program", fail=remedy)]
    if not ready:
        return [found("native decoder", f"{name} compiles it at the first load of a model, in about a minute")]
    origin = build.origin()
    if origin is None:
        remedy = "FORETOKEN_NATIVE=1 foretoken generate --verbose shows why; empty the cache folder to compile it again"
        return [found("native decoder", "the library fails its self-test or cannot be loaded", fail=remedy)]
    return [found("native decoder", f"{origin}; compiler: {name}")]
