"""Secrets in text, which are hidden wherever it is shown: in messages, in what `import` prints and
in what a run stores. A secret is known by the name before it, by its place or by its form."""

import re

HIDDEN = "***"
_SECRET = re.compile(
    r"\w*(?:password|passwd|passphrase|secret|credential|webhook)\w*|\w*token|\w+_key"
    r"|\w*(?:api|access|private|auth|signing)_?keys?|(?:\w*_)?(?:pwd|authorization|cookie)"
    r"|(?:\w*_)?(?:x_\w+_signature|(?:hf|hub|api|auth|access|bearer|refresh|id|bot|user)_?tokens)"
)
# Names of tokens and of fields, which end like names of secrets.
_PUBLIC = re.compile(
    r"(?:\w*_)?(?:[bec]o[sitda]|pad|unk|cls|sep|mask|image|video|audio|vision|media|special|start"
    r"|end|stop|per|split|first|last|next|positive|negative)_?token"
    r"|(?:\w*_)?(?:image|video|audio|prompt|messages|answer|label|source|fn|model|sort|chosen"
    r"|rejected|tools|module|thinking|reward)_key"
)
_FILE = re.compile(r"\.(?:py|sh|ya?ml|jsonl?|csv|parquet|txt|md)$")
# A name, and the mark between it and its value: that of an option may be a space or a comma.
_NAMED = re.compile(
    r"""(?<![\w.-])(?P<name>(?P<option>--)?[\w.-]++(?:\[\d*\][\w.-]*+){0,3}+)"""
    r"""(?:["'\\\])]*+\s*(?:[:=]+>?|,\s*["'\\]*value["'\\]*\s*[:=])\s*"""
    r"""|(?(option)["'\\]*(?:\s+|,\s*)(?!--)|(?!)))"""
)
# A value ends at a space or a quote, or at a mark with which something else begins.
_BARE = r"""(?:[^\s"',;&}\]]|[,;&}\]](?![\s"'\[\]{},;&]|$|[\w.-]+["'\\]*\s*[:=]))+"""
_SCHEME = r"(?:(?:bearer|basic|digest|token|apikey)\s+|[|>][+-]?\s+)?"
_QUOTED = r"""(?P<quote>\\*["'])(?:(?!(?P=quote))(?:\\.|.))*+(?:(?P=quote))?"""
_PART = r"""(?:"(?:\\.|[^"\\])*+"?|'(?:\\.|[^'\\])*+'?|[^\[\](){}"'])"""
_LIST = rf"[\[({{](?:{_PART}|[\[({{]{_PART}*+[\])}}]?)*+[\])}}]?"
_VALUE = re.compile(
    rf"(?!\*\*\*|(?:true|false|null|none|is)(?![\w-]))"
    rf"(?:{_QUOTED}|{_LIST}|-\s+{_BARE}(?:\s+-\s+{_BARE})*|{_SCHEME}{_BARE})",
    re.DOTALL | re.IGNORECASE,
)
_HEADER = re.compile(r"(?:authorization|cookie)$", re.IGNORECASE)  # its value is the whole line
# Secrets without a name: logins of addresses and parts of their queries, what follows the word
# Bearer, and the forms of well-known services.
_OTHERS = re.compile(
    r"""(?<=://)(?!git@)[^/\s"'?#]+(?=@)|(?<=[?&](?:key|sig)=)[^&\s"'#]+"""
    r"""|(?<=\b[Bb]earer )(?=\S*[\d_.+/=-])[^\s"',;]{3,}"""
    r"""|(?<=\bBasic )(?=\S*[\d+/=-])[^\s"',;]{3,}"""
    r"""|(?<![\w-])(?:[srp]k-(?=[\w-]*\d)[\w-]{20,}|hf_[A-Za-z\d]{20,}|gh[opsur]_\w{20,}"""
    r"""|github_pat_\w{20,}|glpat-[\w-]{16,}|xox[a-z]-[\w-]{10,}|A[KS]IA[A-Z\d]{16}|AIza[\w-]{30,}"""
    r"""|nvapi-[\w-]{20,}|eyJ[\w-]{8,}\.[\w-]{8,}(?:\.[\w-]*)?)"""
    r"""|(?<=-----BEGIN )[A-Z ]*PRIVATE KEY-----.*""",
    re.DOTALL,
)


def is_secret(key: str) -> bool:
    """Return whether a key or variable, or what it is a part of, names a token, a key, a secret or
    a password."""
    name = key.lower().replace("-", "_")
    parts = [part[-80:] for part in re.split(r"[.\[\]]", name)]
    is_named = any(_SECRET.fullmatch(part) and not _PUBLIC.fullmatch(part) for part in parts)
    return is_named and not _FILE.search(name)


def hide_secrets(text: str) -> str:
    """Return a text without the secrets in it. What is hidden already stays as it is."""
    shown, place = list[str](), 0
    while match := _NAMED.search(text, place):
        end = match.end()
        shown.append(text[place:end])
        place = end
        if is_secret(match["name"]) and (value := _value_at(text, match)):
            shown.append(HIDDEN)
            place = value.end()
    return _OTHERS.sub(HIDDEN, "".join([*shown, text[place:]]))


def _value_at(text: str, named: re.Match[str]) -> re.Match[str] | None:
    """Find the value of a name. That of a header has several words."""
    value = _VALUE.match(text, named.end())
    if value and _HEADER.search(named["name"]) and value[0][0] not in "\"'\\[({":
        quote = text[named.start() - 1 : named.start()]
        mark = quote if quote in "\"'" else ""
        return re.compile(rf"[^\n{mark}]+").match(text, named.end())
    return value
