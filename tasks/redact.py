"""Secrets out of everything that leaves a run: reports, receipts, archives for public issues.

Three nets, because each one alone has holes: values under keys that name a secret, shapes that
only secrets have (tokens, key blocks, passwords in URLs), and every further occurrence of what
the first two found or the caller knows. It errs on the side of hiding: a word too many costs a
reader a moment, a key too few costs its owner the account.
"""

from __future__ import annotations

import base64
import ipaddress
import json
import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import asdict, is_dataclass
from functools import lru_cache, partial
from typing import Any
from urllib.parse import quote

MASK = "[redacted]"
PRIVATE_ADDRESS = "private-ip"

_DEEPEST = 40
# Joins the items of a list while it is searched: `\s` matches it, no cleaned text contains it.
_ITEM = "\x1e"

# Terminal escapes, control and invisible characters: noise to a reader, a hiding place inside a token.
_INVISIBLE = re.compile(
    r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b\n]*(?:\x07|\x1b\\)?|\x1b.?"
    r"|[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u00ad\u061c\u180e\u200b-\u200f\u202a-\u202e\u2060-\u206f\ufeff]"
)
_SURROGATE = re.compile("[\ud800-\udfff]")
_ODD = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u00ad\u061c\u180e\u200b-\u200f\u202a-\u202e\u2060-\u206f\ufeff\ud800-\udfff]"
)

_WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")
_ALWAYS = re.compile(
    r"passw(?:or)?d|passphrase|passcode|secret|apikey|accesskey|privatekey|credential|authorization"
    r"|authtoken|accesstoken|cookie|密码|口令|密钥|令牌"
)
# What follows a secret's name and makes it something else: where it lies, what it is called.
_ABOUT = re.compile(r"files?|paths?|dir|name|env|var|variable|count|length|type|present|required")
_MODEL_TOKEN = re.compile(
    r"[be]os|pad|unk|sep|cls|mask|special|stop|start|end|next|first|last|per|each|additional|image|tool"
)
_SECRET_KEY = re.compile(
    r"encryption|signing|license|ssh|hmac|account|storage|client|session|master"
    r"|wandb|swanlab|comet|openai|anthropic|deepseek|dashscope|gemini|groq|ngc|kaggle"  # NAME_KEY of services
)
_BENIGN = re.compile(
    r"|none|null|nil|true|false|yes|no|(?:not[ -]|un)?set|missing|required|optional|present|absent"
    r"|enabled|disabled|configured|invalid|empty|default"
)
_PLACEHOLDER = re.compile(r"\$(?:\(|\{|[A-Z_][A-Z0-9_]*(?![A-Za-z0-9]))|<[A-Z][A-Z_ ]*>|\*+$|…$")

# A name and what separates it from its value. The possessive quantifiers keep this linear.
_NAMED = re.compile(
    r"(?<![\w.-])(?P<name>[\w.-]++)"
    rf"(?:(?:\\*+[\"'])?[ \t]{{0,8}}(?:=>|[:=：＝])[ \t]{{0,8}}|(?<=\w)[ \t{_ITEM}]++(?!-))"
)
_SCHEME = re.compile(r"(?:bearer|basic|token|digest|negotiate|aws4-hmac-sha256)\s+", re.IGNORECASE)
_QUOTE = re.compile(r"\\*[\"']")
_BARE = re.compile(r"\S+")
_TO_LINE_END = re.compile(rf"[^\n{_ITEM}\"']+")
_TRAILING = ".,;:)]}'\"\\"
_PLAIN_NAME = re.compile(r"[\w.-]{1,200}:?")
_PLAIN_WORD = re.compile(r"[A-Za-z]?[a-z]+")

_PEM = re.compile(
    r"-----BEGIN [A-Z0-9 ]*PRIVATE KEY[A-Z ]*-----.*?(?:-----END [A-Z0-9 ]*PRIVATE KEY[A-Z ]*-----|\Z)",
    re.DOTALL,
)
_BEARER = re.compile(r"(?i)\b(bearer\s+)([^\s\"'`<>]{4,})")
_BASIC = re.compile(r"\b((?i:basic)\s+)(?=[A-Za-z+/]*[0-9A-Z=])([A-Za-z0-9+/]{6,}={0,2})")
_USER_PASSWORD = re.compile(
    rf"(?<!\S)((?:-u|--user|--proxy-user)[ ={_ITEM}]\s*[\"']?[^\s\"':]+:)(?!\d+(?:\s|$))([^\s\"']+)"
)
_SSHPASS = re.compile(r"(\bsshpass\s+-p\s*[\"']?)([^\s\"']+)")
_NETRC = re.compile(r"(\blogin\s+\S+\s+password\s+)(\S+)")
# As people write it: `api key: …`. A path says where the key lies, a plain word how it is.
_SPOKEN = re.compile(
    r"(?i)(?<![\w.-])((?:api|access|secret|private|auth)[ _-]key(?:\s+is)?"
    r"(?:[ \t]*[:=：＝][ \t]*[\"']?|[ \t]+(?=[\w-]*\d)(?=[\w-]{16})))"
    r"(?![a-z]{1,14}(?:[\s.,;:)]|$))([^\s\"',;/~][^\s\"',;]{5,})"
)
# Whoever knows the rest of these addresses may post to them.
_WEBHOOK = re.compile(
    r"(?i)(\bhttps://(?:hooks\.slack\.com/|discord(?:app)?\.com/api/webhooks/|api\.telegram\.org/bot"
    r"|open\.(?:feishu\.cn|larksuite\.com)/open-apis/bot/v2/hook/|qyapi\.weixin\.qq\.com/[\w/-]*\?key=))"
    r"([^\s\"'<>]+)"
)
_URL_PASSWORD = re.compile(
    r"(\b[A-Za-z][A-Za-z0-9+.-]{0,30}://[^\s/:@\"'<>]{0,200}:)([^\s\"'<>]{1,300})(?=@)"
)
_URL_TOKEN = re.compile(r"(\bhttps?://)([^\s/:@\"'<>]{1,300})(?=@)")
_BARE_PASSWORD = re.compile(r"(?<![\w/.:@-])([\w.-]{1,64}:)([^\s/\"'<>]{1,200})(?=@(?!sha\d)[\w.-])")
_SHAPES = re.compile(
    r"(?<![A-Za-z0-9])(?:"
    r"(?:hf|api_org)_[A-Za-z0-9]{16,}"  # Hugging Face
    r"|ms-[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}"  # ModelScope
    r"|(?:AKIA|ASIA|AROA|AIDA|ABIA|ACCA)[A-Z0-9]{16}"  # AWS key ids
    r"|LTAI[A-Za-z0-9]{12,}|AKID[A-Za-z0-9]{28,}"  # Aliyun, Tencent Cloud
    r"|gh[pousr]_[A-Za-z0-9]{20,}|github_pat_\w{20,}|gl(?:pat|dt|rt|cbt|ptt|ft|soat|agent)-[\w-]{16,}"
    r"|sk-[\w-]{12,}|AIza[\w-]{30,}|xox[a-z]-[\w-]{10,}|nvapi-[\w-]{20,}|pypi-[\w-]{40,}"
    r"|eyJ[\w-]{4,}\.[\w-]{4,}(?:\.[\w-]*)?"  # JSON web tokens
    r")"
)
# An AWS secret key or a line of a key block: base64 with all three kinds. Hashes are lower-case hex.
_BASE64 = re.compile(
    r"(?<![A-Za-z0-9/+_.-])(?=[a-z0-9/+]*[A-Z])(?=[A-Z0-9/+]*[a-z])(?=[A-Za-z/+]*\d)"
    r"[A-Za-z0-9/+]{40,}={0,2}(?![A-Za-z0-9/+=_-]|\.[A-Za-z0-9])"
)
_MAYBE_SECRET = re.compile(r"[:=：＝@$]|-----|\s|[A-Za-z0-9+/_-]{16}")

_IPV4 = re.compile(r"(?<!\d)(?<!\d\.)\d{1,3}(?:\.\d{1,3}){3}(?!\d|\.\d|-(?:py|cp)\d)")
# ip-10-0-0-5, and any such name with a domain behind it
_IP_NAME = re.compile(
    r"(?i)(?<![a-z0-9])(?:ip-(?=[\d-]+)|[a-z][a-z0-9]{0,30}-(?=[\d-]+\.[a-z]))"
    r"(\d{1,3}-\d{1,3}-\d{1,3}-\d{1,3})(?!-?\d)"
)
_IPV6 = re.compile(
    r"(?i)(?<![\w:])(?:f[cde89ab][0-9a-f]{2}:[0-9a-f:]+(?:%\w+)?"
    r"|(?:::|(?:0{1,4}:){5})ffff:[0-9a-f]{1,4}:[0-9a-f]{1,4}(?![\w:.]))"
)
_PRIVATE = [
    ipaddress.ip_network(net)
    for net in (
        *("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16"),
        *("169.254.0.0/16", "100.64.0.0/10", "fc00::/7", "fe80::/10"),
    )
]
# Four numbers after these are a version of one of NVIDIA's libraries (cuRAND and TensorRT are at 10.x).
_LIBRARY = re.compile(r"(?i)(?:[=<>~!]=|(?:curand|tensorrt)[\w-]{0,12}[-=<>~!: v]{0,3})$")
_VERSION_KEY = re.compile(r"(?i)version$|^driver$")


def redact(value: Any, secrets: Iterable[str] = ()) -> Any:
    """The value as plain JSON data, with secrets and private addresses masked.

    Goes through dicts, lists and texts of any depth; hides values under keys that name a secret
    (`api_key`, `password`, `Authorization`), tokens by shape (Bearer, `hf_`, AWS, GitHub, JWT, PEM),
    passwords in URLs and command lines, and private addresses except loopback. `secrets` are
    values that the caller knows. Whatever was found is masked wherever else it occurs in `value`,
    longest first, also URL-quoted and in base64. Shell placeholders (`$API_KEY`) stay.

    What JSON cannot hold becomes text (NaN and infinities become null), terminal escapes and
    invisible characters are dropped. Never raises; applying it twice changes nothing.
    """
    found: set[str] = {clean(secret) for secret in secrets if len(secret) >= 4}
    masked = _walk(value, found, 0)
    known = _variants(secret for secret in found if MASK not in secret)
    return _replace(masked, re.compile("|".join(map(re.escape, known)))) if known else masked


def names_a_secret(name: str) -> bool:
    """Whether a key, variable or flag of this name holds a secret (`HF_TOKEN`, not `max_tokens`)."""
    return _names_a_secret(name[-200:])


@lru_cache(maxsize=4096)
def _names_a_secret(name: str) -> bool:
    words = [word.lower() for word in _WORDS.findall(name)]
    before, last = ["", "", *words][-2:]
    if _ABOUT.fullmatch(last) or "passwordless" in words:
        return False
    if _ALWAYS.search("".join(words)) or _ALWAYS.search(name):
        return True
    match last:
        case "key":
            return bool(_SECRET_KEY.fullmatch(before))
        case "pwd" | "pass":
            return bool(before)  # alone they are the shell's working directory and a verdict
        case "auth" | "sshpass":
            return True
        case "signature":
            return before in ("", "amz")
        case "token":
            return not _MODEL_TOKEN.fullmatch(before)
    return last.endswith("token") and not _MODEL_TOKEN.fullmatch(last[:-5])


def _walk(value: Any, found: set[str], depth: int, key: str = "") -> Any:
    """One pass over the data; puts what it hides into `found`."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        return value if abs(value) < 1 << 63 else str(value)
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, str):
        return _text(value, found, version=bool(_VERSION_KEY.search(key)))
    if depth >= _DEEPEST:
        return "…"
    if is_dataclass(value) and not isinstance(value, type):
        value = asdict(value)
    if isinstance(value, Mapping):
        return _mapping(value, found, depth)
    if isinstance(value, set | frozenset):
        value = sorted(value, key=_as_text)
    if isinstance(value, list | tuple):
        return _sequence(list(value), found, depth, key)
    if isinstance(value, bytes | bytearray):
        return _text(bytes(value).decode("utf-8", "replace"), found)
    return _text(_as_text(value), found)


def _as_text(value: object) -> str:
    try:
        return str(value)
    except Exception:  # a broken __str__ must not cost the report
        return f"<{type(value).__name__}>"


def _mapping(value: Mapping[Any, Any], found: set[str], depth: int) -> dict[str, Any]:
    out = {}
    # {"name": "HF_TOKEN", "value": "..."}: how Kubernetes and header lists write it
    label = next((value[key] for key in ("name", "key", "header") if isinstance(value.get(key), str)), "")
    for key, item in value.items():
        name = _text(_as_text(key), found)
        secret = names_a_secret(_as_text(key)) or (key == "value" and names_a_secret(label))
        if (
            secret
            and name.lower().endswith("token")
            and (isinstance(item, int | float) or "logprob" in value)
        ):
            secret = False  # a count, or a piece of the model's text
        out[name] = _hide(item, found, depth + 1) if secret else _walk(item, found, depth + 1, name)
    return out


def _sequence(items: list[Any], found: set[str], depth: int, key: str) -> list[Any]:
    if len(items) > 1 and all(isinstance(item, str) for item in items):
        if len(items) == 2 and _PLAIN_NAME.fullmatch(items[0]) and names_a_secret(items[0]):
            return [_text(items[0], found), _hide(items[1], found, depth + 1)]
        # searched as one text: a key block spans log lines, a flag and its value are two arguments
        return [*_search(_ITEM.join(map(clean, items)), found).split(_ITEM)]
    return [_walk(item, found, depth + 1, key) for item in items]


def _hide(value: Any, found: set[str], depth: int) -> Any:
    """Everything under a key that names a secret."""
    if isinstance(value, str):
        text = clean(value)
        if not text.strip() or _is_benign(text) or _PLACEHOLDER.match(text):
            return text
        bare = _SCHEME.sub("", text, count=1)
        if _PLACEHOLDER.match(bare):
            return text
        found.update(secret for secret in (text, bare) if len(secret) >= 8)
        return MASK
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int | float):
        return _hide(str(value), found, depth)
    if depth >= _DEEPEST:
        return MASK
    if isinstance(value, Mapping):
        return {_text(_as_text(key), found): _hide(item, found, depth + 1) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_hide(item, found, depth + 1) for item in value]
    return MASK


def _is_benign(text: str) -> bool:
    return bool(_BENIGN.fullmatch(text.strip().lower()))


def _text(value: str, found: set[str], version: bool = False) -> str:
    return _search(clean(value), found, version)


def _search(text: str, found: set[str], version: bool = False) -> str:
    masked, secrets = _scan(text, version) if len(text) <= 2000 else _scan.__wrapped__(text, version)
    found.update(secrets)
    return masked


@lru_cache(maxsize=4096)
def _scan(text: str, version: bool) -> tuple[str, tuple[str, ...]]:
    """One clean text, masked, and the secrets in it. Cached: a run reports the same texts many times."""
    found: list[str] = []
    if _MAYBE_SECRET.search(text):
        text = _mask_shapes(text, found)
        text = _mask_named(text, found)
    return (text if version else _mask_addresses(text)), tuple(found)


def clean(text: str) -> str:
    """Without terminal escapes and invisible characters; a progress bar's `\\r` ends a line.

    What a host says may move a terminal's cursor, name its window or paint a PASS: none of it is shown raw.
    """
    if not _ODD.search(text):
        return text
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    return _SURROGATE.sub("\ufffd", _INVISIBLE.sub("", text))


def _mask_shapes(text: str, found: list[str]) -> str:
    def whole(match: re.Match[str]) -> str:
        found.append(match[0])
        return MASK

    def second(match: re.Match[str], benign: Collection[str] = ()) -> str:
        secret = match[2].rstrip("\\,;")
        if secret == MASK or secret.lower() in benign or _PLACEHOLDER.match(secret):
            return match[0]
        _note(secret, found)
        return match[1] + MASK + match[2][len(secret) :]

    def block(match: re.Match[str]) -> str:
        return re.sub(rf"[^\n{_ITEM}]+", MASK, match[0])

    rules: list[tuple[str, re.Pattern[str], Callable[[re.Match[str]], str]]] = [
        ("-----", _PEM, block),
        ("@", _URL_PASSWORD, second),
        ("@", _URL_TOKEN, second),
        ("@", _BARE_PASSWORD, second),
        ("bearer", _BEARER, partial(second, benign=("token", "tokens", "authentication", "authorization"))),
        ("basic", _BASIC, second),
        ("-u", _USER_PASSWORD, second),
        ("sshpass", _SSHPASS, second),
        ("login", _NETRC, second),
        ("key", _SPOKEN, second),
        ("https://", _WEBHOOK, second),
        ("", _SHAPES, whole),
        ("", _BASE64, whole),
    ]
    lower = text.lower()
    for hint, pattern, rule in rules:
        if hint in lower:
            text = pattern.sub(rule, text)
    return text


def _mask_named(text: str, found: list[str]) -> str:
    """Values behind `name=`, `"name": ` and `--name `, where the name is a secret's."""
    out, done = [], 0
    for match in _NAMED.finditer(text):
        name = match["name"]
        is_flag = not match[0][len(name) :].strip(f" \t{_ITEM}")
        if match.start() < done or (is_flag and not name.startswith("-")) or not names_a_secret(name):
            continue
        start, end = _value_at(text, match.end(), _takes_line(name))
        secret = text[start:end]
        if not secret or text.startswith((MASK, "not set", "not given"), start):
            continue
        if _is_benign(secret) or _PLACEHOLDER.match(secret):
            continue
        prose = name.lower() == "token" and ":" in match[0]
        if name.lower().endswith("token") and not _could_be_token(secret, text[end : end + 40], prose):
            continue
        _note(secret, found)
        out += [text[done:start], MASK]
        done = end
    return "".join([*out, text[done:]])


def _could_be_token(value: str, after: str, prose: bool) -> bool:
    """Not a count (`first token: 0.2 s`), nor a piece of the model's text (`"token": "Hi", "logprob"`)."""
    if value.replace(".", "").isdigit() or value.startswith("<") or "logprob" in after:
        return False
    return not prose or (bool(re.fullmatch(r"[!-~]{6,}", value)) and not _PLAIN_WORD.fullmatch(value))


def _takes_line(name: str) -> bool:
    lower = name.lower()
    return any(word in lower for word in ("authorization", "cookie", "passphrase"))


def _value_at(text: str, start: int, whole_line: bool) -> tuple[int, int]:
    """Where the value that begins at `start` lies: inside its quotes, or up to the next space."""
    opening = _QUOTE.match(text, start)
    if opening:
        start = opening.end()
        end = _closing(text, start, opening[0])
        scheme = _SCHEME.match(text, start, end)
        return (scheme.end() if scheme else start), end
    scheme = _SCHEME.match(text, start)
    if scheme:
        start = scheme.end()
    bare = (_TO_LINE_END if whole_line else _BARE).match(text, start)
    if not bare or _PLACEHOLDER.match(text, start):
        return start, start
    return start, start + (len(bare[0].rstrip(_TRAILING)) or len(bare[0]))


def _closing(text: str, start: int, quote_mark: str) -> int:
    """The end of a quoted value: the next equal quote that is not escaped once more, or the line's end."""
    at = start
    while (at := text.find(quote_mark, at)) >= 0:
        if at == start or text[at - 1] != "\\" or len(quote_mark) > 1:
            return at
        at += 1
    line = _TO_LINE_END.match(text, start)
    return line.end() if line else len(text)


def _note(secret: str, found: list[str]) -> None:
    """Remember a secret for the other places it occurs in; plain words would hide half the report."""
    if len(secret) >= 8 and not _PLAIN_WORD.fullmatch(secret) and MASK not in secret:
        found.append(secret)


def _mask_addresses(text: str) -> str:
    def version_or_address(match: re.Match[str]) -> str:
        before = match.string[max(0, match.start() - 40) : match.start()]
        return match[0] if _LIBRARY.search(before) else _address(match[0], match[0])

    if "." in text:
        text = _IPV4.sub(version_or_address, text)
    if text.count("-") > 3:
        text = _IP_NAME.sub(lambda match: _address(match[1].replace("-", "."), match[0]), text)
    if text.count(":") > 1:
        text = _IPV6.sub(lambda match: _address(match[0].split("%")[0], match[0]), text)
    return text


@lru_cache(maxsize=4096)
def _address(address: str, shown: str) -> str:
    """`shown`, or its mask when `address` is private. Loopback says nothing about anyone."""
    if "." in address:  # 010.0.0.5 is how some tools pad it
        address = ".".join(str(int(part)) for part in address.split("."))
    for text in (address, address.rstrip(":")):
        try:
            parsed = ipaddress.ip_address(text)
        except ValueError:
            continue
        parsed = getattr(parsed, "ipv4_mapped", None) or parsed  # ::ffff:a00:5 is 10.0.0.5
        return PRIVATE_ADDRESS if any(parsed in net for net in _PRIVATE) else shown
    return shown


def _variants(secrets: Iterable[str]) -> list[str]:
    """The ways a known secret may be written, longest first, so that no rest of a longer one stays."""
    forms: set[str] = set()
    for secret in secrets:
        forms |= {secret, quote(secret), quote(secret, safe=""), json.dumps(secret)[1:-1]}
        raw = secret.encode("utf-8", "replace")
        if len(raw) >= 8:
            forms |= {_base64_core(raw, offset) for offset in range(3)}
    return sorted((form for form in forms if form not in MASK), key=len, reverse=True)


def _base64_core(raw: bytes, offset: int) -> str:
    """The characters of base64 that depend on `raw` alone when `offset` bytes (modulo 3) precede it."""
    whole = (len(raw) + offset) // 3 * 3
    coded = base64.b64encode((b"\0" * offset + raw)[:whole]).decode()
    return coded[(0, 2, 3)[offset] :]


def _replace(value: Any, known: re.Pattern[str]) -> Any:
    if isinstance(value, str):
        return known.sub(MASK, value)
    if isinstance(value, dict):
        return {known.sub(MASK, key): _replace(item, known) for key, item in value.items()}
    if isinstance(value, list):
        return [_replace(item, known) for item in value]
    return value
