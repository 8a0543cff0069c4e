"""Command-line flags from the options of a dataclass, and options from flags."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NoReturn

from kvik.cli.terminal import say
from kvik.config.config import EngineConfig
from kvik.config.env import environment_options, set_variable
from kvik.config.server_config import ServerConfig
from kvik.config.synonyms import SYNONYMS, synonym_options, translated
from kvik.core.sampling_params import SamplingParams
from kvik.core.structured import MAX_SOURCE_BYTES, Structure
from kvik.errors import ConfigError, KvikError, ParamError, shown
from kvik.files import regular
from kvik.options import FORMERLY, NO_FACTS, TAKES_SEVERAL, Flag, Option, did_you_mean, options_of

# The model is a separate argument. --seed is the request's seed in commands that make requests;
# commands that only start the engine may have the engine's seed as a flag, under another dest.
NOT_ENGINE_FLAGS = ("model", "seed")
ENGINE_SEED = "engine_seed"
# Engine options that only servers use; verbs with an engine in their process have no flags for them
OF_SERVERS = ("role", "kv_listen", "data_parallel_size")


class Parser(argparse.ArgumentParser):
    """A parser that reports errors in one line, like every other user error."""

    def __init__(self, verb: str, arguments: str, description: str) -> None:
        super().__init__(
            prog=f"kvik {verb}",
            usage=f"kvik {verb} [options] {arguments}".rstrip(),
            description=description,
            allow_abbrev=False,
        )
        self.color = False  # of Python 3.14; `say` escapes control characters

    def print_help(self, file: object = None) -> None:
        """Print the help texts on standard output; raise OSError, which argparse ignores, if it
        fails."""
        say(self.format_help(), end="")

    def error(self, message: str) -> NoReturn:
        # "argument --top-k: must be ..." names the field; other messages are about all arguments.
        pattern = r"argument (?:-\w/)?(?:--no-\S+/|--)?(\S+?)(?:/\S+)?: (.*)"
        named = re.fullmatch(pattern, message, re.DOTALL)
        if named:
            raise KvikError(named[1].replace("-", "_"), named[2])
        stray = re.fullmatch(r"unrecognized arguments: (--[^\s=]+).*", message, re.DOTALL)
        if stray:
            flags = [flag for flag in self._option_string_actions if flag.startswith("--")]
            hint = did_you_mean(stray[1][:60], flags) or f"{self.prog} --help lists them"
            raise KvikError("arguments", f"{stray[1][:60]} is not a flag of {self.prog} ({hint})")
        surplus = re.fullmatch(r"unrecognized arguments: (.*)", message, re.DOTALL)
        if surplus:
            usage = f"{surplus[1][:60]!r} is too much; it is {self.usage}"
            raise KvikError("arguments", usage)
        raise KvikError("arguments", message)

    def in_flags(self, field: str, message: str, words: Sequence[str]) -> tuple[str, str]:
        """Return the field and the message of an error with this verb's flags in place of the
        options' Python names. Arguments without a flag keep their names.

        Args:
            words: the words of the command line. A field that they do not set may come from an
                environment variable.
        """
        flags = self._option_string_actions

        def in_words(match: re.Match[str]) -> str:
            is_option = flag_of(match[0]) in flags and match[0] not in SYNONYMS
            return flag_of(match[0]) if is_option else match[0]

        arguments = {action.dest for action in self._actions if not action.option_strings}
        arguments.add("model")  # an argument unless its flag is used
        flag = flag_of(field)
        if field not in arguments:
            has_flag = any(word == flag or word.startswith(f"{flag}=") for word in words)
            variable = None if has_flag else set_variable(field)
            field = variable or (flag if flag in flags else field)
        if flag in ("--config", "--prompts") or "." in field:  # the message names keys of the file
            return field, message
        return field, re.sub(r"(?<![\w/.'\"-])[a-z]+(_[a-z]+)+(?![\w/.'\"-])", in_words, message)


def add_engine_flags(
    parser: argparse.ArgumentParser,
    only: Collection[str] | None = None,
    *,
    left_out: Collection[str] = (),
) -> None:
    """Add the flags of `EngineConfig`.

    Args:
        only: fields that apply to this verb; None: all.
        left_out: fields that do not.
    """
    group = parser.add_argument_group("engine options")
    for option in options_of(EngineConfig):
        if option.name == "seed" and only is not None and option.name in only:
            _add(group, option, ENGINE_SEED)
        elif option.name in NOT_ENGINE_FLAGS or option.name in left_out:
            continue
        elif only is None or option.name in only:
            _add(group, option)
    for option in synonym_options():  # accepted as flags, but not shown
        target = SYNONYMS[option.name].option
        if only is None or not target or target in only:
            _add(group, option, shown=False)


def add_sampling_flags(parser: argparse.ArgumentParser, *, left_out: Collection[str] = ()) -> None:
    """Add the flags of `SamplingParams`, except those that do not apply to this verb."""
    title = "sampling options (default: what the model's authors advise)"
    add_option_flags(parser, title, SamplingParams, left_out=left_out, defaults=False)
    group = parser.add_argument_group("constraints on the text (short forms of --structured)")
    group.add_argument(
        "--schema", metavar="FILE", help="generate JSON that satisfies the JSON Schema in FILE"
    )
    group.add_argument(
        "--regex", metavar="R", help="generate text that matches this regular expression"
    )


def add_option_flags(
    parser: argparse.ArgumentParser,
    title: str,
    options: type,
    *,
    left_out: Collection[str] = (),
    defaults: bool = True,
) -> argparse._ArgumentGroup:
    """Add a group with a flag for each option of a dataclass, and return it.

    Args:
        left_out: options without a flag.
        defaults: whether the help texts show the defaults.
    """
    group = parser.add_argument_group(title)
    for option in options_of(options):
        if option.name not in left_out:
            _add(group, option, default=defaults)
    return group


def add_model(
    parser: argparse.ArgumentParser, kinds: str = "a folder, GGUF file or hub id"
) -> None:
    """Add the optional MODEL.

    Args:
        kinds: kinds of models that the verb accepts.
    """
    parser.set_defaults(model="")
    for name in ("model", "--model"):
        shown = name == "model"
        parser.add_argument(
            name,
            nargs="?" if shown else None,
            metavar=None if shown else "MODEL",
            default=argparse.SUPPRESS,
            help=f"{kinds} (default: '', the bundled one)" if shown else "the same as the argument",
        )


def number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a number, not {text[:60]!r}") from None


def add_force_flag(parser: argparse.ArgumentParser) -> None:
    """Add --force, without which `check_new` refuses an output that exists."""
    parser.add_argument("--force", action="store_true", help="replace an existing output")


def check_new(arguments: argparse.Namespace, exists: bool) -> None:
    """Raise ConfigError if the output of a command `exists`, and --force was not given."""
    if exists and not arguments.force:
        raise ConfigError("output", f"{str(arguments.output)!r} exists; --force replaces it")


def engine_options(arguments: argparse.Namespace, model: str) -> dict[str, Any]:
    """Return the fields of EngineConfig that are set by flags or environment variables."""
    named = {"model": model} if model else {}
    return {**environment_options(), **named, **given_engine_options(arguments)}


def given_engine_options(arguments: argparse.Namespace) -> dict[str, object]:
    """Return the fields of EngineConfig that are set by flags."""
    options = (*options_of(EngineConfig), *synonym_options())
    fields = translated(_given_values(options, arguments, NOT_ENGINE_FLAGS))
    if ENGINE_SEED in arguments:
        fields["seed"] = getattr(arguments, ENGINE_SEED)
    return fields


def server_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the fields of ServerConfig that are set by flags or environment variables."""
    return {**environment_options(kind=ServerConfig), **given_options(ServerConfig, arguments)}


def given_sampling_options(arguments: argparse.Namespace) -> dict[str, object]:
    """Return the fields of SamplingParams that are set by flags."""
    fields = given_options(SamplingParams, arguments)
    schema = _schema(arguments.schema)
    for name, kind, value in (("schema", "json", schema), ("regex", "regex", arguments.regex)):
        if value is not None:
            if "structured" in fields:
                raise ParamError(name, "contradicts another flag that constrains the text")
            try:
                fields["structured"] = Structure().checked({kind: value}).called(name)
            except ValueError as error:
                raise ParamError(name, str(error)) from None
    return fields


def _schema(file: str | None) -> object:
    if file is None:
        return None
    try:
        with open(file, "rb", opener=regular) as opened:
            return json.loads(opened.read(MAX_SOURCE_BYTES + 1))
    except OSError as error:
        raise ParamError("schema", f"{shown(file)} cannot be read ({error.strerror})") from None
    except (ValueError, RecursionError):
        raise ParamError("schema", f"{shown(file)} is not JSON, or is too large") from None


# Options whose names in help texts are replaced by their flags.
_NAMED = frozenset(
    one.name for kind in (EngineConfig, ServerConfig, SamplingParams) for one in options_of(kind)
)


def flag_of(name: str) -> str:
    """Return the flag of an option."""
    return f"--{name.replace('_', '-')}"


def help_of(option: Option, *, default: bool) -> str:
    """Return the help text of an option for its flag. Other options in the text are named by their
    flags, not by their Python names, and what None means is named as the default.

    Args:
        default: append the default.
    """
    text = option.description
    if option.default is None:
        text = re.sub(r"\b[Nn]one: ", "default: ", text)
    if default and option.default not in (None, (), ""):
        text += f"; default: {_shown(option.default)}"

    def named(match: re.Match[str]) -> str:
        name = match[1] or match[2]
        return flag_of(name) if name in _NAMED else name

    text = re.sub(r"`(\w+)`|\b([a-z]+(?:_[a-z]+)+)\b", named, text)
    return re.sub(r"\bNone\b", "none", text)


def _shown(default: object) -> str:
    if isinstance(default, bool):
        return "on" if default else "off"
    if isinstance(default, tuple):
        return ",".join(map(str, default))
    return f"{default:g}" if isinstance(default, float) else str(default)


def _add(
    group: argparse._ArgumentGroup,
    option: Option,
    name: str | None = None,
    *,
    default: bool = True,
    shown: bool = True,
) -> None:
    flag = flag_of(option.name)
    note = help_of(option, default=default).replace("%", "%%")  # argparse formats it with %
    note = note if shown else argparse.SUPPRESS
    if (former := option.facts.get(FORMERLY)) is not None:
        _add(group, replace(option, name=former, facts=NO_FACTS), option.name, shown=False)
    if isinstance(option.kind, Flag):
        group.add_argument(
            flag, action=argparse.BooleanOptionalAction, default=argparse.SUPPRESS, help=note
        )
    else:
        group.add_argument(
            flag,
            dest=name or option.name,
            action="append" if option.kind.repeats else "store",
            nargs="+" if TAKES_SEVERAL in option.facts else None,
            type=_reader(option),
            metavar=option.kind.metavar,
            default=argparse.SUPPRESS,
            help=note,
        )


def _reader(option: Option) -> Callable[[str], object]:
    def read(text: str) -> object:
        try:
            return option.parse(text)
        except ValueError:
            message = f"must be {option.expects}, not {text[:60]!r}"
            raise argparse.ArgumentTypeError(message) from None

    return read


def given_options(options: type, arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the fields of a dataclass of options that are set by flags."""
    return _given_values(options_of(options), arguments)


def _given_values(
    options: Iterable[Option], arguments: argparse.Namespace, left_out: tuple[str, ...] = ()
) -> dict[str, Any]:
    values: Mapping[str, Any] = vars(arguments)
    fields = {}
    for option in options:
        if option.name in values and option.name not in left_out:
            value = values[option.name]
            if TAKES_SEVERAL in option.facts:
                value = [entry for use in value for entry in use]
            fields[option.name] = tuple(value) if option.kind.repeats else value
    return fields
