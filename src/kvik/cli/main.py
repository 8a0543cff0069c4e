"""`kvik`: run a verb. Verbs are imported when they are used, so `kvik --help` is instant."""

from __future__ import annotations

import errno
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from importlib import import_module
from io import TextIOWrapper

from kvik import __version__
from kvik.cli.plugins import added_verbs
from kvik.cli.terminal import abandon_broken_streams, flush_output, open_missing_streams, say
from kvik.collector import uncollected
from kvik.errors import START_LOG, KvikError
from kvik.files import check_current_folder

# verb -> its module, with `build_parser()` and `run(arguments) -> exit code`; what it does. Other
# packages add verbs (`kvik.cli.plugins`), including all measurements.
VERBS: Mapping[str, tuple[str, str]] = {
    "generate": ("kvik.cli.generate", "complete a prompt"),
    "chat": ("kvik.cli.chat", "talk to a model"),
    "serve": ("kvik.cli.serve", "serve a model over HTTP to clients of OpenAI and Anthropic"),
    "route": ("kvik.cli.route", "forward requests to several servers, by what they have cached"),
    "top": ("kvik.cli.top", "show what a running server is doing"),
    "export": ("kvik.cli.export", "write a model as a GGUF file"),
    "models": ("kvik.cli.models", "list the supported models"),
    "info": ("kvik.cli.info", "describe a model and how it would run on this machine"),
    "eval": ("kvik.cli.eval", "measure perplexity and the divergence from a reference"),
    "quantize": ("kvik.cli.quantize", "write a model in fewer bits"),
    "build": ("kvik.cli.build", "write an engine folder, from which a model starts faster"),
    "kv-budget": (
        "kvik.cli.kv_budget",
        "measure how many tokens each layer should keep in the KV cache",
    ),
    "train-heads": ("kvik.cli.train_heads", "train draft heads for speculative decoding"),
    "replay": ("kvik.cli.replay", "run a recording of a server again and compare"),
    "plan": ("kvik.cli.plan", "predict memory, speed and cost of a model on some hardware"),
    "advise": ("kvik.cli.advise", "recommend what to change, with predicted gains"),
}

USAGE_ERROR = 2
INTERRUPTED = 130  # 128 + SIGINT, as shells count


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return the exit code: 0, 2 for user errors, 1 for failures."""
    open_missing_streams()
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        # Characters that a terminal cannot show become "?"; invalid input bytes become U+FFFD.
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")
    try:
        try:
            code = _dispatch(list(sys.argv[1:] if argv is None else argv))
        except SystemExit:  # argparse after --help
            flush_output()
            raise
        flush_output()
        return code
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        return 0  # the reader closed the pipe, as `head` does
    except BaseException as error:
        problem = _problem(error)
        if problem is None:  # a bug, or SystemExit
            raise
        with suppress(OSError):
            say(f"kvik: error: {problem}", error=True)
        return USAGE_ERROR
    finally:
        abandon_broken_streams()


def _problem(error: BaseException) -> str | None:
    """Return the one-line message of an error that the user can fix; None if it is a bug."""
    if isinstance(error, KvikError):
        return str(error)
    if _is_lack_of_memory(error):
        return "memory: there is too little of it; free some, or raise a limit (ulimit -v, -d)"
    if isinstance(error, RuntimeError) and "can't start new thread" in str(error):
        limits = "of processes (ulimit -u, a container's pids limit) or of memory (ulimit -v, -d)"
        return f"threads: the system starts no more of them; raise a limit {limits}"
    if isinstance(error, RuntimeError) and any(sign in str(error) for sign in _FULL_GPU):
        return "memory: the GPU has too little; end its other programs or lower memory_utilization"
    if isinstance(error, ModuleNotFoundError) and error.name and not error.name.startswith("kvik"):
        package = error.name.partition(".")[0]
        return f"{package}: is not installed: pip install {package}"
    if isinstance(error, OSError):
        reason = error.strerror or str(error) or type(error).__name__
        files = [file for file in (error.filename, error.filename2) if file is not None]
        return f"{' -> '.join(map(str, files))}: {reason}" if files else reason
    if type(error).__name__ == "PanicException":  # of a Rust library; derives from
        (reason, *_) = str(error).splitlines() or [""]  # BaseException, as a panic is a bug in it
        return f"tokenizer: failed inside its library; tokenizer.json is probably wrong ({reason})"
    return None


# Of torch's allocator, which says "CUDA out of memory", of the driver and of a library.
_FULL_GPU = ("CUDA out of memory", "CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED")


def _is_lack_of_memory(error: BaseException) -> bool:
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    # torch's allocator and the shared library loader raise no MemoryError.
    signs = ("can't allocate memory", "failed to map segment")
    other = isinstance(error, RuntimeError | ImportError)
    return isinstance(error, MemoryError) or (other and any(sign in str(error) for sign in signs))


def _dispatch(argv: list[str]) -> int:
    if not argv or argv[0] in ("-h", "--help", "help"):
        say(_help({**VERBS, **added_verbs()}))
        return 0 if argv else USAGE_ERROR
    if argv[0] in ("-V", "--version"):
        say(f"kvik {__version__}")
        return 0
    verbs = VERBS if argv[0] in VERBS else {**VERBS, **added_verbs()}
    group = {verb: entry for verb, entry in verbs.items() if verb.startswith(f"{argv[0]} ")}
    if group and (len(argv) == 1 or argv[1] in ("-h", "--help", "help")):
        say(_help(group, argv[0]))
        return 0 if len(argv) > 1 else USAGE_ERROR
    verb, rest = _verb(argv, verbs)
    check_current_folder()
    with uncollected():
        module = import_module(verbs[verb][0])
        parser = module.build_parser()
    try:
        arguments = parser.parse_intermixed_args(rest)
        # JSON is requested by programs, which need no start-up messages.
        with nullcontext() if vars(arguments).get("json") else _launch_told():
            code: int = module.run(arguments)
    except KvikError as error:
        raise KvikError(*parser.in_flags(error.field, error.message, rest)) from error
    return code


@contextmanager
def _launch_told() -> Iterator[None]:
    """Print log messages of an engine's start to standard error: loading and warnings."""
    import logging  # imported only when a verb runs

    class ToStandardError(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            with suppress(OSError):
                say(f"kvik: {record.getMessage()}", error=True)

    log, handler = logging.getLogger(START_LOG), ToStandardError()
    before = log.level
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.setLevel(before)


def _verb(argv: list[str], verbs: Mapping[str, tuple[str, str]]) -> tuple[str, list[str]]:
    """Return the verb named by the first one or two words, and the words after it."""
    for length in (2, 1):
        verb = " ".join(argv[:length])
        if verb in verbs:
            return verb, argv[length:]
    group = [verb for verb in verbs if verb.startswith(f"{argv[0]} ")]
    wrong = " ".join(argv[: 2 if group else 1])

    from kvik.options import did_you_mean  # needed only for errors

    hint = did_you_mean(wrong, group or verbs)
    names = ", ".join(group or verbs)
    raise KvikError("command", f"must be one of {names}, not {wrong[:60]!r}; {hint}".rstrip("; "))


def _help(verbs: Mapping[str, tuple[str, str]], group: str = "") -> str:
    """Return the help text. `group`: the first word common to all verbs, if there is one."""
    width = max(map(len, verbs))
    listed = "\n".join(f"  {verb:{width}}  {summary}" for verb, (_, summary) in verbs.items())
    command = f"kvik {group} COMMAND" if group else "kvik COMMAND"
    return (
        f"usage: {command} [options]\n\n"
        f"{listed}\n\n"
        f"{command} --help lists the options of a command. Without a model, a small story\n"
        "writer that ships with kvik is used. In the environment, KVIK_MAX_MODEL_LEN=4096 is\n"
        "--max-model-len 4096, and so on, except for plan and advise, which may be about\n"
        "another machine."
    )


if __name__ == "__main__":
    sys.exit(main())
