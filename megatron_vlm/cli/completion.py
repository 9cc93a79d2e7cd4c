"""Completion in bash, zsh and fish: `megatron-vlm completion bash` prints a script, and the script
asks `megatron-vlm completion --line LINE` what may follow."""

import argparse
from collections.abc import Iterator, Mapping

from megatron_vlm.config.key_docs import recipe_names
from megatron_vlm.config.key_hints import group_names
from megatron_vlm.config.schema import key_types, leaves
from megatron_vlm.errors import ConfigError

Commands = Mapping[str, argparse.ArgumentParser]

# bash splits words at =, so it replaces only what follows that sign.
_BASH = r"""_megatron_vlm() {
  local line="${COMP_LINE:0:COMP_POINT}" each
  local word="${line##* }" before=""
  [[ "$word" == *=* && "$COMP_WORDBREAKS" == *=* ]] && before="${word%%=*}="
  COMPREPLY=()
  while IFS= read -r each; do
    COMPREPLY+=("${each#"$before"}")
    [[ "$each" == *[.=] ]] && compopt -o nospace 2>/dev/null
  done < <("${COMP_WORDS[0]}" completion --line="$line" 2>/dev/null)
}
complete -o default -F _megatron_vlm megatron-vlm
"""
_ZSH = r"""#compdef megatron-vlm
_megatron_vlm() {
  local -a found
  found=("${(@f)$("${words[1]}" completion --line="$LBUFFER" 2>/dev/null)}")
  if [[ -n "$found" ]]; then
    compadd -Q -S '' -- "${found[@]}"
  else
    compset -P '*='
    _files
  fi
}
compdef _megatron_vlm megatron-vlm
"""
_FISH = r"""function __megatron_vlm
  set -l found ((commandline -opc)[1] completion --line=(commandline -cp) 2>/dev/null)
  if test (count $found) -gt 0
    printf '%s\n' $found
  else
    __fish_complete_path (commandline -ct)
  end
end
complete -c megatron-vlm -f -a '(__megatron_vlm)'
"""
SHELLS = {"bash": _BASH, "zsh": _ZSH, "fish": _FISH}


def add_completion_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the shell, and the line that a script asks about."""
    parser.add_argument("shell", nargs="?", choices=SHELLS, help="shell to print the script for")
    parser.add_argument("--line", help=argparse.SUPPRESS)


def completion(args: argparse.Namespace) -> None:
    """print a script with which a shell completes commands, recipes and keys

    Print the script for bash, zsh or fish. A line such as this one in ~/.bashrc or ~/.zshrc loads
    it; for fish, write it to ~/.config/fish/completions/megatron-vlm.fish.

    example: source <(megatron-vlm completion bash)
    """
    if args.line is not None:
        print("".join(f"{each}\n" for each in complete_line(args.line, args.commands)), end="")
    elif args.shell is None:
        raise ConfigError("is not given", place="completion", key="SHELL", allowed=list(SHELLS))
    else:
        print(SHELLS[args.shell], end="")


def complete_line(line: str, commands: Commands) -> Iterator[str]:
    """Yield what the last word of a line may become; nothing where only the shell knows more."""
    *before, word = line.split(" ")
    words = [each for each in before[1:] if each]
    command = next((each for each in words if not each.startswith("-")), None)
    yield from (
        each for each in _candidates(command, words, word, commands) if each.startswith(word)
    )


def _candidates(
    command: str | None, words: list[str], word: str, commands: Commands
) -> Iterator[str]:
    parser = commands.get(command or "")
    parts = _parts_of(parser) if parser is not None else {}
    if words[1:] and words[1] in parts:
        parser, parts = parts[words[1]], {}
    if parts:
        yield from parts
    elif command is None:
        yield from commands
    elif command == "help":
        yield from (*commands, *_names(word))
    elif parser is not None:
        options = {option: each for each in parser._actions for option in each.option_strings}
        previous = options.get(words[-1])
        if previous is not None and previous.nargs != 0 and "--help" not in previous.option_strings:
            yield from previous.choices or ()
        elif word.startswith("-"):
            yield from (name for name, each in options.items() if each.help != argparse.SUPPRESS)
        elif any(each.dest == "overrides" for each in parser._actions):
            places = [each for each in parser._actions if not each.option_strings]
            given = [each for each in words[1:] if not each.startswith("-")]
            if given or places[0].dest == "overrides":  # only the shell knows runs and folders
                yield from _settings(word)


def _parts_of(parser: argparse.ArgumentParser) -> Commands:
    """Return the parsers of the parts of a command, such as demo has."""
    found = (each for each in parser._actions if isinstance(each, argparse._SubParsersAction))
    return next((each.choices for each in found), {})


def _settings(word: str) -> Iterator[str]:
    """Yield recipes and keys, one level at a time, and the values that can be named one by one."""
    key, sign, _ = word.partition("=")
    if not sign:
        yield from (f"{name}=" for name in group_names() if recipe_names(name))
        for name in _names(word):
            yield name if name.endswith(".") else f"{name}="
    elif key in group_names():
        yield from (f"{key}={name}" for name in recipe_names(key))
    elif key in key_types():
        from megatron_vlm.config.key_docs import key_docs

        yield from (f"{key}={value}" for value in key_docs()[key].choices)


def _names(word: str) -> Iterator[str]:
    """Yield groups, or the keys of a group once its dot is there."""
    if "." not in word:
        yield from (f"{name}." for name in group_names())
    yield from (key for key in leaves() if ("." in key) == ("." in word))
