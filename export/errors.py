"""Every error that adx raises on purpose, as one tree; the command line catches `AdxError` alone.

AdxError                     1
├── UsageError               2   an argument that cannot be accepted
│   ├── SamplingError            a sampling field out of range
│   ├── ContextLengthError       more tokens than the engine's context holds
│   ├── PromptLengthError        a prompt longer than the engine was exported for
│   └── OutputExistsError        OUT is there already
├── CheckpointError          1   the checkpoint is damaged or incomplete
│   └── UnsupportedCheckpointError   it is whole, but adx cannot export it
├── BundleError              1   the bundle is damaged, incomplete or of another schema
├── LoweringError            1   a graph that a target cannot express
├── ParityError              3   the engine does not compute what PyTorch computes
├── BackendError             5   the backend or the device asked for is not there
└── Interrupted            130   SIGINT or SIGTERM while working
"""


class AdxError(Exception):
    """Base of all errors that adx raises on purpose.

    A message says what was given, what is accepted, and what to do.
    """

    exit_code = 1


class UsageError(AdxError):
    """An argument that cannot be accepted."""

    exit_code = 2


class SamplingError(UsageError):
    """A sampling field out of range.

    Attributes:
        field: the name of the field, as the user spells it.
    """

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field


class ContextLengthError(UsageError):
    """More tokens than the engine's context holds."""

    def __init__(self, prompt_tokens: int, context_length: int) -> None:
        super().__init__(
            f"the prompt has {prompt_tokens} tokens, but this engine's context holds {context_length}: "
            "shorten the prompt, or export with a larger --max-seq-len"
        )
        self.prompt_tokens = prompt_tokens
        self.context_length = context_length


class PromptLengthError(UsageError):
    """A prompt longer than the engine was exported for, though its context would hold it."""

    def __init__(self, prompt_tokens: int, max_input_len: int) -> None:
        super().__init__(
            f"the prompt has {prompt_tokens} tokens, but this engine takes prompts of at most {max_input_len}: "
            "shorten it, or export with a larger --max-input-len"
        )


class OutputExistsError(UsageError):
    """The output folder is there already."""


class CheckpointError(AdxError):
    """The checkpoint is damaged or incomplete."""


class UnsupportedCheckpointError(CheckpointError):
    """The checkpoint is whole, but adx cannot export it."""


class BundleError(AdxError):
    """The bundle is damaged, incomplete or of another schema."""


class LoweringError(AdxError):
    """A graph that a target cannot express."""


class ParityError(AdxError):
    """The engine does not compute what PyTorch computes."""

    exit_code = 3


class BackendError(AdxError):
    """The backend or the device asked for is not there."""

    exit_code = 5


class Interrupted(AdxError):
    """SIGINT or SIGTERM while working: nothing that looks finished was left.

    Attributes:
        exit_code: 128 and the signal's number, as a shell gives it.
    """

    exit_code = 130

    def __init__(self, signum: int = 2) -> None:
        names = {2: "SIGINT", 15: "SIGTERM"}
        super().__init__(f"stopped by {names.get(signum, f'signal {signum}')}; nothing unfinished was left behind")
        self.exit_code = 128 + signum
