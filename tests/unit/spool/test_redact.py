"""Secrets go, everything else stays."""

from __future__ import annotations

import pytest

from verl_shipper_spool.redact import REDACTED, is_secret_key, redact, scrub

SENTINEL = "SENTINEL2"


@pytest.mark.parametrize(
    "key",
    [
        *("api_key", "API_KEY", "apikey", "WANDB_API_KEY", "openai-api-key", "apiKey", "api_keys"),
        *("token", "hf_token", "HF_TOKEN", "accessToken", "password", "db_password", "passwd", "secret"),
        *("client_secret", "secretKey", "aws_secret_access_key", "credential", "credentials", "private_key"),
        *("authorization", "passphrase"),
    ],
)
def test_keys_that_name_a_secret_are_known(key: str) -> None:
    assert is_secret_key(key)


@pytest.mark.parametrize(
    "key",
    [
        *("max_tokens", "ppo_max_token_len_per_gpu", "token2text", "tokenizer", "eos_token", "pad_token", "token_id"),
        *("prompt_key", "reward_fn_key", "num_keys", "lr", "", "secretary_problem", "loss_agg_mode", "image_token"),
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


def test_keys_of_known_shape_are_taken_out_of_any_text() -> None:
    for key in ("sk-abcdefghijklmnop1234", "hf_abcdefghijklmnopqrstuv", "ghp_" + "a" * 36, "AKIAABCDEFGHIJKLMNOP"):
        assert scrub(f"using {key} now") == f"using {REDACTED} now"


def test_very_deep_configurations_end_in_a_marker() -> None:
    config: dict[str, object] = {"password": "x"}
    for _ in range(2000):
        config = {"a": config}

    assert REDACTED in str(redact(config))
