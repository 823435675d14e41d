"""Secrets go, everything else stays."""

from __future__ import annotations

import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl_shipper_spool.redact import REDACTED, is_secret_key, redact, scrub

SENTINEL = "SENTINEL2"


@pytest.mark.parametrize(
    "key",
    [
        *("api_key", "API_KEY", "apikey", "WANDB_API_KEY", "openai-api-key", "apiKey", "api_keys"),
        *("token", "hf_token", "HF_TOKEN", "accessToken", "password", "db_password", "passwd", "secret"),
        *("client_secret", "secretKey", "aws_secret_access_key", "credential", "credentials", "private_key"),
        *("authorization", "passphrase", "WANDB-API-KEY", "access_key_id", "secret_access_key", "pwd", "pgpass"),
        *("Proxy-Authorization", "x-api-key", "auth", "basic_auth", "refresh_tokens", "db_pass", "AccountKey", "jwt"),
    ],
)
def test_keys_that_name_a_secret_are_known(key: str) -> None:
    assert is_secret_key(key)


@pytest.mark.parametrize(
    "key",
    [
        *("max_tokens", "ppo_max_token_len_per_gpu", "token2text", "tokenizer", "eos_token", "pad_token", "token_id"),
        *("prompt_key", "reward_fn_key", "num_keys", "lr", "", "secretary_problem", "loss_agg_mode", "image_token"),
        *("num_key_value_heads", "author", "authority", "max_token", "num_tokens", "response_token", "first_pass"),
        *("api_key_file", "private_key_path", "n_tokens", "passes", "keys", "monkey", "keyboard_access"),
    ],
)
def test_the_words_of_a_language_model_are_no_secrets(key: str) -> None:
    assert not is_secret_key(key)


@pytest.mark.parametrize(
    "config",
    [
        {"swanlab": {"api_key": SENTINEL}},
        {"env": [{"HF_TOKEN": SENTINEL}]},
        {"credentials": {"user": SENTINEL, "parts": [SENTINEL]}},
        {"proxy": f"http://svc:{SENTINEL}@proxy:8080"},
        {"headers": f"Bearer {SENTINEL}.{SENTINEL}"},
        {"extra": [[["Authorization", SENTINEL]]]},
        {"env": [{"name": "HF_TOKEN", "value": SENTINEL}]},
        {"command": ["python", "train.py", "--api-key", SENTINEL]},
        {"command": f"python train.py --api-key {SENTINEL} +trainer.swanlab.api_key={SENTINEL}"},
        {"env": [f"WANDB_API_KEY={SENTINEL}"]},
        {f"http://svc:{SENTINEL}@proxy:8080": 1},
        {"pem": f"-----BEGIN EC PRIVATE KEY-----\n{SENTINEL}\n-----END EC PRIVATE KEY-----\n"},
        {"uri": f"postgresql+psycopg2://mlflow:{SENTINEL}@db/mlflow"},
    ],
)
def test_no_secret_is_left_wherever_it_stands(config: dict[str, object]) -> None:
    assert SENTINEL not in str(redact(config))
    assert REDACTED in str(redact(config))


def test_a_numeric_password_goes_but_a_switch_stays() -> None:
    assert redact({"password": 1234, "use_auth_token": True, "hf_token": None}) == {
        "password": REDACTED,
        "use_auth_token": True,
        "hf_token": None,
    }


def test_what_is_no_secret_is_returned_as_it_was() -> None:
    config = {"lr": 1e-6, "data": {"eos_token": "</s>", "files": ["a.parquet"]}, 3: None, "flag": False}

    assert redact(config) == config


def test_the_original_is_not_changed() -> None:
    config = {"api_key": SENTINEL}

    redact(config)

    assert config == {"api_key": SENTINEL}


def test_a_message_keeps_its_host_and_loses_its_password() -> None:
    assert (
        scrub(f"cannot reach http://me:{SENTINEL}@tracker:5000/api")
        == f"cannot reach http://{REDACTED}@tracker:5000/api"
    )


@pytest.mark.parametrize(
    ("text", "clean"),
    [
        ("https://h/x?a=1&api_key=SENTINEL&b=2", "https://h/x?a=1&api_key=[redacted]&b=2"),
        ("GET /x?token=SENTINEL HTTP/1.1", "GET /x?token=[redacted] HTTP/1.1"),
        ("PUT https://s3/x?X-Amz-Signature=SENTINEL", "PUT https://s3/x?X-Amz-Signature=[redacted]"),
        ("https://SENTINEL@git.example.com/x", "https://[redacted]@git.example.com/x"),
        ("http://u:p@SENTINEL@h/x", "http://[redacted]@h/x"),
        ("{'Authorization': 'Bearer SENTINEL', 'Accept': '*'}", "{'Authorization': '[redacted]', 'Accept': '*'}"),
        ("> Authorization: token SENTINEL\n> Accept: */*", "> Authorization: [redacted]\n> Accept: */*"),
        ("Cookie: sid=SENTINEL; other=SENTINEL", "Cookie: [redacted]"),
        ("ValueError: bad api_key 'x', password='SENTINEL X'", "ValueError: bad api_key 'x', password='[redacted]'"),
        ('{\\"api_key\\": \\"SENTINEL\\"}', '{\\"api_key\\": \\"[redacted]\\"}'),
        ("AccountName=a;AccountKey=SENTINEL==;x", "AccountName=a;AccountKey=[redacted];x"),
    ],
)
def test_a_message_loses_its_secret_and_nothing_else(text: str, clean: str) -> None:
    assert scrub(text) == clean


@pytest.mark.parametrize(
    "key",
    [
        *("sk-proj-abcdefghijklmnop1234", "hf_abcdefghijklmnopqrstuv", "ghp_" + "a" * 36, "github_pat_" + "a1" * 20),
        *(
            "AKIAABCDEFGHIJKLMNOP",
            "ASIAABCDEFGHIJKLMNOP",
            "AIza" + "b" * 35,
            "ya29.a0AfH6SMBx-1234567",
            "glpat-" + "c" * 20,
        ),
        *("xoxb-1234567890-abcdef", "wandb_v1_abcdefghijklmnop", "nvapi-abcdefghijklmnop12", "dapi" + "0" * 32),
        "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.c2lnbmF0dXJl",
    ],
)
def test_keys_of_known_shape_are_taken_out_of_any_text(key: str) -> None:
    assert scrub(f"using {key} now") == f"using {REDACTED} now"


@pytest.mark.parametrize(
    "text",
    [
        *("each token: the smallest part", "Basic understanding of basic arithmetic", "bearer authentication"),
        *("ssh://git@github.com/x", "hdfs://me@namenode/path", "http://localhost:5000/@scope/x", "mail me@example.com"),
        *("max_tokens=4096 eos_token=</s>", "--max-tokens 4096", "sk-learn-is-not-a-key-at-all", "use_auth_token=True"),
        *("chmod 600 /x/wandb.key", "api_key_file=/x/wandb.key", "set WANDB_API_KEY or backends.wandb.api_key_file"),
        *("http://USER:PASSWORD@HOST:PORT", "loss: 0.1, key: value", "step:10", "https://api.wandb.ai/authorize"),
    ],
)
def test_a_text_without_secrets_stays_as_it_was(text: str) -> None:
    assert scrub(text) == text


def test_very_deep_configurations_end_in_a_marker() -> None:
    config: dict[str, object] = {"password": "x"}
    for _ in range(2000):
        config = {"a": config}

    assert REDACTED in str(redact(config))


# --- properties -----------------------------------------------------------------------------------------------

PIECES = st.sampled_from(
    [
        *("api_key", "token", "=", ": ", '"', "'", " ", "://", "@", ":", "?", "&", "Bearer ", "Authorization", "sk-"),
        *("hf_", "eyJ", ".", "-----BEGIN PRIVATE KEY-----", "A1b2C3d4E5f6G7h8", REDACTED, "\\", "\n", "--", "http"),
        *("Basic ", ",", "https", "cookie"),
    ]
)
TEXTS = st.one_of(st.text(), st.lists(PIECES, max_size=20).map("".join))
PLAIN = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.binary(), TEXTS)
KEYS = st.one_of(TEXTS, st.integers(), st.sampled_from(["api_key", "max_tokens", "name", "value"]))
VALUES = st.recursive(
    PLAIN,
    lambda inner: st.one_of(st.lists(inner), st.tuples(inner, inner), st.dictionaries(KEYS, inner)),
    max_leaves=20,
)


@given(TEXTS)
def test_a_text_that_was_redacted_stays_as_it_is(text: str) -> None:
    assert scrub(scrub(text)) == scrub(text)


@given(VALUES)
def test_any_value_is_taken_and_stays_as_it_is_when_redacted_again(value: Any) -> None:
    clean = redact(value)

    assert redact(clean) == clean


@given(st.dictionaries(st.text("abcdefg_", min_size=1), st.one_of(st.integers(), st.text("abc xyz0123456789"))))
def test_a_configuration_without_secrets_is_returned_as_it_was(config: dict[str, Any]) -> None:
    assert redact(config) == config


@given(st.text("abcdefghijklmnopqrstuvwxyz0123456789", min_size=8, max_size=40), TEXTS)
def test_a_password_is_gone_whatever_stands_around_it(password: str, around: str) -> None:
    config = {
        "swanlab": [{"api_key": password}],
        "proxy": f"http://svc:{password}@proxy:3128",
        "note": f"api_key={password}",
    }

    assert password not in str(redact(config))
    assert password not in scrub(f"{around}\nhttp://svc:{password}@proxy:3128/").split("\n")[-1]


@pytest.mark.parametrize(
    "piece",
    ["a", "a-", "-----BEGIN PRIVATE KEY-----", "://a:", "sk-", "eyJ", "eyJaaaaaaaa.", "token=", "cookie:", "a:@", "="],
)
def test_the_time_is_linear(piece: str) -> None:
    began_s = time.perf_counter()

    scrub(piece * (200_000 // len(piece)))

    assert time.perf_counter() - began_s < 5.0
