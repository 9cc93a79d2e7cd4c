"""Words of a shell script, as the shell would split it: quotes, continued lines, comments and the
variables that the script itself sets. Nothing is run."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from megatron_vlm.errors import ConfigError

_VARIABLE = re.compile(r"\$(?:(\w+|[@*#?$!-])|\{(\w+)(?:(:?[-=])((?:[^{}]|\{[^{}]*\})*))?\})")
_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=", re.ASCII)
_ENDS = ";&|\n"  # characters between two commands
_MAX_VARIABLES = 1000  # replacements in a script


@dataclass
class ShellWord:
    """Word with the line where it begins. `unknown` is the first variable in it without a value."""

    text: str = ""
    line: int = 0
    unknown: str = ""


@dataclass
class ShellCommand:
    """Command of a script: the variables that are set for it, and its words."""

    words: list[ShellWord] = field(default_factory=list)
    variables: dict[str, ShellWord] = field(default_factory=dict)


class ShellReader:
    """Reader of one script. `given` are the variables of --set."""

    def __init__(self, text: str, file: str, given: Mapping[str, str]) -> None:
        self.text, self.file, self.given = text.replace("\r\n", "\n"), file, given
        self.known: dict[str, ShellWord] = {name: ShellWord(text) for name, text in given.items()}
        self.exported: dict[str, ShellWord] = {}
        self.place, self.line, self.replaced = 0, 1, 0

    def commands(self) -> Iterator[ShellCommand]:
        """Yield the commands in the order of the script. A command that consists of assignments
        sets the variables of those after it."""
        while self.place < len(self.text):
            command = self._command()
            first = command.words[0].text if command.words else ""
            if first == "export":
                command = _assignments(command.words[1:])
                self.exported |= command.variables
            if command.words:
                yield command
                continue
            for name, word in command.variables.items():
                if name not in self.given:
                    self.known[name] = word

    def _command(self) -> ShellCommand:
        words: list[ShellWord] = []
        while (word := self._word()) is not None:
            words.append(word)
        return _assignments(words)

    def _word(self) -> ShellWord | None:
        """Return the next word of the command, or None at its end."""
        self._skip_blanks()
        if self._next() in (*_ENDS, ""):
            self._step()
            return None
        word = ShellWord(line=self.line)
        while self._next() not in (*_ENDS, "", " ", "\t"):
            self._part(word)
        return word

    def _part(self, word: ShellWord) -> None:
        character = self._next()
        if character == "'":
            word.text += self._until("'")
        elif character == '"':
            self._step()
            while self._next() != '"':
                self._require_more("a double quote is not closed")
                self._plain(word, escapes='"\\$`\n')
            self._step()
        else:
            self._plain(word, escapes="")

    def _plain(self, word: ShellWord, escapes: str) -> None:
        """Read a character, an escaped one, or a variable. `escapes`: what a backslash protects
        between double quotes; outside of them it protects every character."""
        character = self._next()
        if character == "\\" and (not escapes or self._next(1) in escapes):
            self._step()
            word.text += "" if self._next() == "\n" else self._next()
            self._step()
        elif character == "`" or self.text.startswith("$(", self.place):
            self._substitute(word, "`" if character == "`" else ")")
        elif character == "$" and (match := _VARIABLE.match(self.text, self.place)):
            self._step(len(match[0]))
            self._replace(match, word)
        else:
            word.text += character
            self._step()

    def _substitute(self, word: ShellWord, closing: str) -> None:
        """Read the result of a command, which is known only for a sum such as $(expr 16 / 2)."""
        end = self.text.find(closing, self.place + 2)
        until = len(self.text) if end < 0 else end + 1
        command = self.text[self.place : until]
        self._step(until - self.place)
        inner = ShellReader(command[1:-1].strip("("), self.file, self.given)
        inner.known, inner.replaced = self.known, self.replaced
        texts = []
        while (each := inner._word()) is not None:
            texts.append(each.text)
        result = _sum(texts)
        word.text += command if result is None else str(result)
        word.unknown = word.unknown or ("" if result is not None else command[:80])

    def _replace(self, match: re.Match[str], word: ShellWord) -> None:
        name, default = match[1] or match[2], match[4]
        self.replaced += 1
        if self.replaced > _MAX_VARIABLES:
            raise self._error(f"more than {_MAX_VARIABLES} variables are used")
        known = self.known.get(name)
        if name in ("@", "*"):  # arguments of the script, of which there are none here
            return
        if known is not None and (known.text or known.unknown or default is None):
            word.text, word.unknown = word.text + known.text, word.unknown or known.unknown
        elif default is not None:
            inner = ShellReader(default, self.file, self.given)
            inner.known, inner.replaced = self.known, self.replaced
            while inner.place < len(inner.text):
                inner._part(word)
            self.replaced = inner.replaced
        else:
            word.text, word.unknown = word.text + match[0], word.unknown or name

    def _skip_blanks(self) -> None:
        while True:
            if self._next() in (" ", "\t"):
                self._step()
            elif self.text.startswith("\\\n", self.place):
                self._step(2)
            elif self._next() == "#":
                end = self.text.find("\n", self.place)
                self._step((len(self.text) if end < 0 else end) - self.place)
            else:
                return

    def _until(self, quote: str) -> str:
        """Return the text between single quotes."""
        end = self.text.find(quote, self.place + 1)
        if end < 0:
            raise self._error("a single quote is not closed")
        text = self.text[self.place + 1 : end]
        self._step(end + 1 - self.place)
        return text

    def _next(self, ahead: int = 0) -> str:
        return self.text[self.place + ahead : self.place + ahead + 1]

    def _step(self, count: int = 1) -> None:
        self.line += self.text.count("\n", self.place, self.place + count)
        self.place += count

    def _require_more(self, problem: str) -> None:
        if self.place >= len(self.text):
            raise self._error(problem)

    def _error(self, problem: str) -> ConfigError:
        return ConfigError(
            problem, place=f"{self.file}, line {self.line}", remedy="correct the script"
        )


def _sum(texts: list[str]) -> int | None:
    """Return the result of `expr A OPERATOR B` with whole numbers, or None."""
    if len(texts) != 4 or texts[0] != "expr" or not (texts[1] + texts[3]).isdecimal():
        return None
    left, right = int(texts[1][:18]), int(texts[3][:18])
    if texts[2] == "/":
        return left // right if right else None
    return {"+": left + right, "-": left - right, "*": left * right}.get(texts[2])


def _assignments(words: list[ShellWord]) -> ShellCommand:
    """Return a command whose first words of the form NAME=VALUE are variables."""
    command = ShellCommand()
    for place, word in enumerate(words):
        match = _ASSIGNMENT.match(word.text)
        if match is None:
            command.words = words[place:]
            break
        value = ShellWord(word.text[match.end() :], word.line, word.unknown)
        command.variables[match[0][:-1]] = value
    return command
