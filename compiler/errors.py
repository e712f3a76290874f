"""Every error that mkc raises on purpose: a stable code, what is wrong, where, and what to do.

Nothing here imports more than the standard library, so a command line can import it at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

CODES: dict[str, str] = {
    "MKC101": "the description cannot be found or read",
    "MKC102": "the description is not UTF-8 text",
    "MKC103": "the description is empty or too large",
    "MKC104": "the description is not well-formed YAML or JSON",
    "MKC105": "the description uses a part of YAML that descriptions do without",
    "MKC106": "a key is given twice",
    "MKC107": "the version of the description format is not supported",
    "MKC110": "a key is unknown",
    "MKC111": "a key is missing",
    "MKC112": "a value has the wrong type",
    "MKC113": "a value is not one of the supported ones",
    "MKC114": "a number is out of range",
    "MKC115": "a layer names a kind that layer_kinds does not have",
    "MKC116": "a layer kind is never used",
    "MKC117": "there are no layers, or too many",
    "MKC120": "query heads are not a multiple of KV heads",
    "MKC121": "too many query heads share one KV head",
    "MKC122": "the head dimension is not supported",
    "MKC123": "the hidden size is not supported",
    "MKC124": "a feed-forward width is not supported",
    "MKC125": "the number of experts per token is not supported",
    "MKC126": "too many experts",
    "MKC127": "a window is longer than the model's longest sequence",
    "MKC128": "an end-of-sequence token lies outside the vocabulary",
    "MKC129": "the model's name is not usable as a file name",
    "MKC140": "the Hugging Face model type is not supported",
    "MKC141": "a Hugging Face key asks for arithmetic that is not supported",
    "MKC142": "two Hugging Face keys contradict each other",
    "MKC201": "an op's shape cannot be lowered to the target",
    "MKC202": "the target is unknown or its file is not valid",
    "MKC203": "the plan needs more of a resource than the target has",
    "MKC204": "a compile option is out of range",
    "MKC301": "the plan has a cycle",
    "MKC302": "a packet is not written exactly once",
    "MKC303": "a packet may be read before it is written",
    "MKC304": "the plan can deadlock",
    "MKC305": "the plan does not fit the target",
    "MKC306": "a byte of a weight is not streamed exactly once",
    "MKC307": "an offset lies outside its arena",
    "MKC401": "the CUDA compiler rejected the rendered source",
    "MKC402": "the CUDA compiler is missing or not usable",
    "MKC403": "the assembled kernel spills registers",
    "MKC501": "the artifact is missing or truncated",
    "MKC502": "the folder is not an artifact of this compiler",
    "MKC503": "a file of the artifact does not match its hash",
    "MKC504": "the version of the artifact format is not supported",
    "MKC601": "a result differs from the reference",
    "MKC602": "no suitable GPU was found",
    "MKC603": "the weights do not match the description",
    "MKC604": "the kernel gave up a wait that ran past its limit",
    "MKC605": "the kernel wrote outside of its packets",
    "MKC606": "the CUDA driver refused a call",
    "MKC607": "the oracle of a check is missing or cannot express the model",
    "MKC608": "a file of a checkpoint is missing, damaged or not to be trusted",
    "MKC609": "packed weights are missing, damaged, or those of another model or layout",
    "MKC611": "the interpreted programs deadlock",
    "MKC612": "an interpreted task reads a packet that does not hold its epoch",
    "MKC613": "an interpreted task writes a packet a second time",
    "MKC614": "an interpreted program entry lacks what earlier ones should have left it",
    "MKC701": "a prompt and the tokens wanted are longer than there is room for",
    "MKC702": "as many requests wait as may wait",
    "MKC703": "a sampling parameter is not supported",
    "MKC704": "a request makes no sense",
    "MKC705": "an error ended a request",
    "MKC706": "the engine has stopped",
}
"""One line per code. A code keeps its meaning for ever; a retired one is not used again."""


@dataclass(frozen=True, slots=True)
class Location:
    """A place in a user's file; lines and columns count from 1, columns in characters."""

    file: str
    line: int | None = None
    column: int | None = None

    def __str__(self) -> str:
        parts = (self.file, self.line, self.column)
        return ":".join(str(part) for part in parts if part is not None)


class MkcError(Exception):
    """Base of all errors raised on purpose; `exit_status` is what a command line should return.

    `str()` gives `file:line:column: error MKC101: message`, then a line with the hint if there is
    one.
    """

    exit_status: ClassVar[int] = 70

    def __init__(
        self,
        code: str,
        message: str,
        hint: str | None = None,
        location: Location | None = None,
    ) -> None:
        super().__init__(code, message, hint, location)
        self.code = code
        self.message = message
        self.hint = hint
        self.location = location

    def __str__(self) -> str:
        where = "" if self.location is None else f"{self.location}: "
        hint = "" if self.hint is None else f"\n  hint: {self.hint}"
        return f"{where}error {self.code}: {self.message}{hint}"


class DescriptionError(MkcError):
    """The model description is wrong or says something mkc does not support (MKC1xx)."""

    exit_status = 2


class LoweringError(MkcError):
    """The model or an option does not fit the target, or the target is unknown (MKC2xx)."""

    exit_status = 2


class CheckError(MkcError):
    """A proof, a comparison or a demanded property failed (MKC3xx, MKC403, MKC601, MKC61x)."""

    exit_status = 1


class ToolchainError(MkcError):
    """The CUDA compiler failed or is missing (MKC4xx)."""

    exit_status = 70


class ArtifactError(MkcError):
    """The artifact is truncated, foreign or damaged (MKC5xx)."""

    exit_status = 2
