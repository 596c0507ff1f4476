"""No secret gets out, by name, by shape or by repetition; and what is no secret stays readable."""

from __future__ import annotations

import base64
import json
import random
import string
import time
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

import pytest
from report_pages import sample

from tasks.redact import MASK, names_a_secret, redact

# Made up here; none was ever valid. Letters, digits and signs as keys and passwords have them.
SECRET = "Zq9-xK2m_Wv7pLr4"
SIGNS = "p@ss/w0rd!$x&y%=z"
HF = "hf_" + "aB3dE6gH9" * 4


def words(text: str) -> list[str]:
    return text.split()


def text_of(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


CONTEXTS = [
    "Authorization: Bearer {}",
    "authorization: bearer   {}",
    "curl -H 'Authorization: Bearer {}' http://127.0.0.1:8000/v1/models",
    'curl -H "X-Api-Key: {}" http://127.0.0.1:8000/v1/models',
    "sent Bearer {} and got 401",
    "HF_TOKEN={} vllm serve model",
    "export HF_TOKEN='{}'",
    'export AWS_SECRET_ACCESS_KEY="{}"',
    "aws_secret_access_key = {}",
    "vllm serve model --api-key {} --port 8000",
    "vllm serve model --api-key={} --port 8000",
    "vllm serve model --api-key '{}'",
    '{{"api_key": "{}", "max_tokens": 5}}',
    "{{'api_key': '{}', 'max_tokens': 5}}",
    '{{\\"api_key\\": \\"{}\\", \\"max_tokens\\": 5}}',
    '{{"headers": {{"Authorization": "Bearer {}"}}}}',
    "api_key: {}",
    "api key: {}",
    "The API-Key is: '{}'",
    "WANDB_KEY={}",
    "https://hooks.slack.com/services/T01ABCDEF/B01ABCDEF/{}",
    "https://open.feishu.cn/open-apis/bot/v2/hook/{}",
    "curl 'https://qyapi.weixin.qq.com/cgi-bin/webhook/send?key={}'",
    "ApiKey => {}",
    "password: {}",
    "root password is set; password={}",
    "密码：{}",
    "登录口令: {}",
    "GET /v1/models?token={}",
    "Cookie: session={}; theme=dark",
    "Set-Cookie: id={}; HttpOnly",
    "sshpass -p {} ssh root@host",
    "sshpass -p '{}' ssh root@host",
    "curl -u admin:{} http://127.0.0.1/",
    "machine hub.example login me password {}",
    "mysql://root:{}@db.example/x",
    "https://me:{}@git.example/a.git",
    "git clone https://{}@git.example/a.git",
    "http_proxy=me:{}@proxy.example:3128",
]


@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize("secret", [SECRET, HF, "12345678a", "correcthorsebattery", "S" * 40])
def test_a_secret_in_a_known_place_is_hidden(context: str, secret: str) -> None:
    hidden = redact(context.format(secret))
    assert secret not in hidden and MASK in hidden
    for piece in (secret[:6], secret[-6:]):
        assert piece not in hidden, hidden


@pytest.mark.parametrize(
    "context",
    [
        "export HF_TOKEN='{}'",
        'export AWS_SECRET_ACCESS_KEY="{}"',
        "vllm serve model --api-key '{}' --port 1",
        "password={} next",
        "https://me:{}@git.example/a.git",
        'curl -H "Authorization: Bearer {}" http://127.0.0.1/',
    ],
)
def test_signs_in_a_password_do_not_let_its_end_out(context: str) -> None:
    hidden = redact(context.format(SIGNS))
    for piece in ("p@ss", "w0rd", "x&y", "=z"):
        assert piece not in hidden, hidden


@pytest.mark.parametrize(
    "token",
    [
        HF,
        "api_org_" + "aB3dE6gH9" * 4,
        "ms-0123abcd-4567-89ef-0123-456789abcdef",
        "AKIA" + "ABCD1234EFGH5678",
        "ASIA" + "ABCD1234EFGH5678",
        "LTAI" + "5tAbCdEfGh123456",
        "ghp_" + "aB3dE6gH9" * 4,
        "github_pat_" + "aB3dE6gH9_" * 4,
        "glpat-" + "aB3dE6gH9xYz12345678",
        "sk-" + "aB3dE6gH9" * 5,
        "nvapi-" + "aB3dE6gH9" * 5,
        "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.dBjftJeZ4CVP",
        "wJalrXUtnFEMI/K7MDENG/bPxRfiCYzzzzzzz123",
    ],
)
@pytest.mark.parametrize("context", ["{}", "got {}.", "x={};y", '"{}"', "/path/{}/y?z", "【{}】", "a\t{}\n"])
def test_a_token_is_known_by_its_shape_wherever_it_is(token: str, context: str) -> None:
    if "/" in token and "/" in context:
        context = "{}"  # inside a path, base64 is a path
    hidden = redact(context.format(token))
    assert token not in hidden and token[-8:] not in hidden


@pytest.mark.parametrize(
    "noise",
    ["\x1b[0m", "\x1b[1;32m", "\u200b", "\u2060", "\ufeff", "\x00", "\u00ad", "\u202e", "\x1b]0;t\x07"],
)
def test_invisible_characters_inside_do_not_hide_a_token(noise: str) -> None:
    broken = HF[:5] + noise + HF[5:]
    for value in (broken, f"HF_TOKEN={broken}", ["--api-key", SECRET[:4] + noise + SECRET[4:]]):
        hidden = text_of(redact(value))
        assert HF[5:15] not in hidden and SECRET[4:] not in hidden


@pytest.mark.parametrize(
    "key",
    words(
        "api_key apiKey API-Key X-Api-Key HF_TOKEN hfToken token access_token aws_secret_access_key "
        "secret_access_key password ssh_password PASSWD root_pwd DB_PASS SSHPASS auth passphrase "
        "Authorization Proxy-Authorization Cookie credentials "
        "client_secret private_key ssh_key X-Amz-Signature 密码 登录密码 令牌"
    ),
)
def test_what_lies_under_a_secret_name_is_hidden(key: str) -> None:
    assert names_a_secret(key)
    assert redact({key: SECRET}) == {key: MASK}
    assert SECRET not in text_of(redact({key: [SECRET, {"x": SECRET}], "y": SECRET}))
    assert SECRET not in text_of(redact({"env": [{"name": key, "value": SECRET}]}))
    assert SECRET not in text_of(redact({"headers": [[key, SECRET]]}))
    assert SECRET not in text_of(redact({"headers": [(key + ":", SECRET)]}))


@pytest.mark.parametrize(
    "key",
    words(
        "max_tokens total_tokens tokens tokenizer tokenizer-mode bos_token eos_token pad_token next_token "
        "tokens_per_second api_key_file password_file key digest cache_key prefix_cache_key public_key "
        "host_key PWD pass passwordless_sudo HF_TOKEN_PATH key_present signature_version sha256 author"
    ),
)
def test_names_that_only_look_like_a_secret_are_left_alone(key: str) -> None:
    assert not names_a_secret(key)
    assert redact({key: "some value 1"}) == {key: "some value 1"}


def test_a_number_under_a_password_is_hidden_and_a_count_of_tokens_is_not() -> None:
    assert redact({"password": 12345678, "token": 17, "log": "tried 12345678"}) == {
        "password": MASK,
        "token": 17,
        "log": f"tried {MASK}",
    }


@pytest.mark.parametrize("argv", [["--api-key", SECRET], ["-x", "--hf-token", SECRET, "--port", "8000"]])
def test_the_argument_after_a_secret_flag_is_hidden(argv: list[str]) -> None:
    hidden = redact({"argv": argv})["argv"]
    assert hidden == [MASK if word == SECRET else word for word in argv]


def test_a_key_block_is_hidden_over_several_log_lines_and_when_its_end_is_cut_off() -> None:
    body = ["b3BlbnNzaC1rZXktdjEAAAAABG5vbmU", "QyNTUxOQAAACAvKk1xT2"]
    lines = [
        "before",
        "-----BEGIN OPENSSH PRIVATE KEY-----",
        *body,
        "-----END OPENSSH PRIVATE KEY-----",
        "after",
    ]
    assert redact(lines) == ["before", MASK, MASK, MASK, MASK, "after"]
    assert redact(lines[:3]) == ["before", MASK, MASK]
    assert body[0] not in redact("\n".join(lines[:4]))


def test_what_was_found_once_is_hidden_everywhere_else() -> None:
    hidden = redact(
        {"api_key": SECRET, "log": [f"trying {SECRET}"], SECRET: 1, "deep": [[{"x": f"<{SECRET}>"}]]}
    )
    assert SECRET not in text_of(hidden)
    found_in_text = redact({"first": f"--api-key {SECRET}", "second": f"the key {SECRET} is wrong"})
    assert SECRET not in text_of(found_in_text)


@pytest.mark.parametrize(
    "secret", ["tiny", "with space and ü", 'quote"back\\slash', "päss/w?rd&x", SECRET, "a.*(b"]
)
def test_what_the_caller_knows_is_hidden_in_every_spelling(secret: str) -> None:
    value = {
        "plain": f"x{secret}y",
        "json": json.dumps({"k": secret}),
        "url": f"http://127.0.0.1/?k={quote(secret, safe='')}",
        "log": ["a", secret, f"b {secret}"],
        secret: 1,
    }
    hidden = text_of(redact(value, secrets=[secret]))
    assert secret not in hidden
    assert quote(secret, safe="") not in hidden
    assert json.dumps(secret)[1:-1] not in hidden


@pytest.mark.parametrize("before", ["", "u:", "user:", "us:"])
def test_a_known_secret_is_hidden_in_base64_at_any_offset(before: str) -> None:
    coded = base64.b64encode(f"{before}{SECRET}".encode()).decode()
    hidden = redact(f"sent {coded}", secrets=[SECRET])
    kept = "".join(hidden.removeprefix("sent ").split(MASK))
    assert MASK in hidden and len(kept) <= len(coded) - len(SECRET)


def test_the_longest_secret_goes_first_so_that_none_of_it_stays() -> None:
    assert redact("x abcdef-extra y abcdef z", secrets=["abcdef", "abcdef-extra"]) == f"x {MASK} y {MASK} z"
    assert redact("x abcdef-extra", secrets=["abcdef-extra", "abcdef"]) == f"x {MASK}"


@pytest.mark.parametrize(
    "address",
    [
        "10.0.0.5",
        "10.255.1.2",
        "172.16.0.1",
        "172.31.9.9",
        "192.168.1.7",
        "169.254.169.254",
        "100.64.3.3",
        "010.000.000.005",
        "fd12:3456:789a::1",
        "fc00::2",
        "fe80::1",
        "fe80::aede:48ff:fe00:1122%eth0",
        "::ffff:192.168.1.7",
    ],
)
@pytest.mark.parametrize(
    "context", ["{}", "ssh root@{}", "from {}: refused", "http://{}/v1", "[{}]:22", "x={},y", "to {}."]
)
def test_private_addresses_are_hidden(address: str, context: str) -> None:
    hidden = redact(context.format(address))
    assert address not in hidden and address.split("%")[0] not in hidden
    assert "private-ip" in hidden


def test_a_private_address_in_a_cloud_host_name_is_hidden() -> None:
    assert redact("on ip-10-0-12-7.ec2.internal") == "on private-ip.ec2.internal"


@pytest.mark.parametrize(
    "text",
    [
        "http://127.0.0.1:8000/v1",
        "127.0.1.1",
        "::1",
        "0.0.0.0:8000",
        "8.8.8.8",
        "172.32.0.1",
        "100.128.0.1",
        "nvidia-curand==10.4.0.35",
        "nvidia_curand-10.4.0.35-py3-none-manylinux_2_27_x86_64.whl",
        "curand 10.4.0.35",
        "TensorRT 10.9.0.34",
        "1.2.3.4.5",
        "2026-11-30T04:23:47Z took 12:30:45",
        "driver 580.95.05",
        "f63bfd3d7b425b10e0b5e0e2c130fe113a85d009",
        "ad44bdad85566b1532aa95066d6c92a5f6715867efe7df9cf2178f182af814c6",
        "vllm/vllm-openai:v0.26.0@sha256:" + "3c5c53248feb" * 5,
        'curl -H "Authorization: Bearer $(cat /opt/rackwright/run/api-key)" http://127.0.0.1:8000/v1',
        "Authorization: Bearer $API_KEY",
        "HF_TOKEN=$HF_TOKEN vllm serve",
        "--api-key ${VLLM_API_KEY} --port 8000",
        "api_key: not set",
        "HF_TOKEN is missing",
        "Bearer token required",
        "Basic authentication is off",
        "Failed password for root",
        "unexpected token: identifier",
        "first token: 0.21 s",
        "'finish_reason': 'stop', 'max_tokens': 5, 'tokens': [1, 2]",
        "docker run -u 1000:1000 image",
        "undefined symbol: _ZN5torch7Library4_defEON3c1014FunctionSchemaEPNS2_12OperatorNameERKSt6vector",
        "<｜Assistant｜></think>",
        "model-00001-of-00046.safetensors",
        "a\nb\tc",
        "只输出：PD_OK",
    ],
)
def test_what_is_no_secret_stays_word_for_word(text: str) -> None:
    assert redact(text) == text


def test_pieces_of_the_models_text_are_not_taken_for_tokens() -> None:
    logprobs = {
        "content": [
            {"token": "get_weather", "logprob": -0.1, "top_logprobs": [{"token": "x", "logprob": -1.0}]}
        ]
    }
    assert redact(logprobs) == logprobs
    text = json.dumps(logprobs)
    assert redact(text) == text


@pytest.mark.parametrize("name", ["rehearsal-pass", "engine-failed"])
def test_real_evidence_without_secrets_comes_out_as_it_went_in(name: str) -> None:
    assert redact(sample(name)) == sample(name)


def test_of_a_host_with_a_private_address_only_the_address_goes() -> None:
    evidence = sample("refused")
    evidence["facts"]["network"]["address"] = "private-ip"
    assert redact(sample("refused")) == evidence


@pytest.mark.parametrize("context", CONTEXTS)
def test_applying_it_twice_changes_nothing(context: str) -> None:
    once = redact({"x": context.format(SECRET), "y": [context.format(SIGNS), context.format(HF)]})
    assert redact(once) == once


def test_random_secrets_do_not_get_through() -> None:
    """Passwords of random printable characters, where they are quoted or structured."""
    dice = random.Random(20261130)
    letters = string.ascii_letters + string.digits + "!#$%&()*+,-./:;<=>?@[]^_{|}~"
    for _ in range(300):
        secret = dice.choice(string.ascii_letters) + "".join(dice.choices(letters, k=dice.randint(9, 40)))
        value = {
            "password": secret,
            "argv": ["vllm", "--api-key", secret],
            "log": [f"export API_KEY='{secret}'", f"tried {secret}"],
            "body": json.dumps({"api_key": secret, "n": 1}),
        }
        assert secret not in text_of(redact(value)), secret


@dataclass
class Thing:
    name: str
    password: str


class Rude:
    def __str__(self) -> str:
        raise RuntimeError("no")


def test_anything_becomes_plain_json_data() -> None:
    value = {
        1: (1, 2),
        "thing": Thing("x", SECRET),
        "set": {"b", "a"},
        "bytes": f"api_key={SECRET}".encode(),
        "nan": float("nan"),
        "inf": [float("inf")],
        "huge": 1 << 80,
        "rude": Rude(),
        "lone": "a\udc80b",
        None: True,
    }
    hidden = redact(value)
    json.dumps(hidden, allow_nan=False).encode()
    assert hidden["1"] == [1, 2] and hidden["set"] == ["a", "b"] and hidden["nan"] is None
    assert hidden["thing"] == {"name": "x", "password": MASK}
    assert hidden["bytes"] == f"api_key={MASK}"
    assert hidden["rude"] == "<Rude>" and hidden["lone"] == "a\ufffdb" and hidden["None"] is True


def test_data_that_contains_itself_ends() -> None:
    loop: dict[str, Any] = {"api_key": SECRET}
    loop["again"] = loop
    assert SECRET not in text_of(redact(loop))


@pytest.mark.parametrize(
    "piece",
    [
        "a",
        "a-",
        "api_key",
        "a://b:",
        "x:y@",
        "eyJ",
        "-----BEGIN ",
        "1.",
        "1.2.3.",
        "f:",
        "\\",
        '"',
        "--a ",
        "Bearer ",
        "aB3/",
    ],
)
@pytest.mark.slow
def test_the_time_grows_with_the_length_and_not_with_its_square(piece: str) -> None:
    def seconds(length: int) -> float:
        text = piece * (length // len(piece))
        best = 9.0
        for _ in range(3):
            start = time.process_time()
            redact(text)
            best = min(best, time.process_time() - start)
        return best

    small, large = seconds(20_000), seconds(160_000)
    assert large < 24 * small + 0.05  # 8 times the text; its square would be 64 times


@pytest.mark.parametrize(
    "text",
    [
        "api key: required",
        "the API key: /opt/rackwright/run/api-key",
        "the API key is in its file",
        "api key: refused.",
        "CACHE_KEY=3f2a9c3f2a9c",
        "nvidia-curand==10.3.5.147",  # a pin is a version
        "server==10.1.2.3",
        "::ffff:808:808 answers",
        "::ffff:7f00:1",
        "node-8-8-8-8.example.org",
        "cuda-10-2-89-1",
    ],
)
def test_what_only_looks_like_a_key_or_a_private_address_stays(text: str) -> None:
    assert redact(text) == text


@pytest.mark.parametrize(
    "address", ["::ffff:a00:5", "::ffff:10.0.0.5", "0:0:0:0:0:ffff:c0a8:0107", "compute-10-0-0-5.internal"]
)
def test_private_addresses_are_hidden_in_their_other_spellings(address: str) -> None:
    hidden = redact(f"on {address} and on")
    assert "private-ip" in hidden
    assert not any(rest in hidden for rest in ("a00:5", "0.0.5", "c0a8", "10-0-0-5"))
