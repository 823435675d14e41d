"""The pure parts of the mlflow backend: names, params, artifacts, spans, settings."""

from __future__ import annotations

import json
import posixpath
import re
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.batches import STREAM, item
from verl_shipper.backends.mlflow import MlflowBackend
from verl_shipper.backends.mlflow_artifacts import CLAIMS_MAX, Claims, generations_artifact, text_artifact
from verl_shipper.backends.mlflow_http import database_path, default_artifact_location
from verl_shipper.backends.mlflow_names import NAME_CHARS_MAX, NAMES_MAX, Names
from verl_shipper.backends.mlflow_params import CUT, VALUE_CHARS_MAX, params_of
from verl_shipper.backends.mlflow_plan import span_chunks
from verl_shipper.backends.mlflow_run import experiment_name, tag_value
from verl_shipper.backends.mlflow_spans import span_of
from verl_shipper.errors import ConfigError
from verl_shipper_spool.record import RecordKind

P12_NAMES = [
    *(
        "timing(s)/gen",
        "val/pass@8",
        "train/lr(1e-3)",
        "/lead",
        "../up",
        "a//b",
        "k" * 300,
        "奖励/均值",
        "val/😀",
        "ok",
    ),
    *("", ".", "..", "a/", " lead", "new\nline", "a/./b", "nul\0", "\ud83d"),
]


def is_taken_by_mlflow(name: str) -> bool:
    """The server's own rule, written down independently."""
    norm = posixpath.normpath(name)
    is_path_like = norm != name or norm == "." or norm.startswith(("..", "/"))
    return bool(re.fullmatch(r"[/\w.\- :]+", name)) and not is_path_like and len(name) <= NAME_CHARS_MAX


# Names


@pytest.mark.parametrize(
    ("original", "name"),
    [
        ("ok", "ok"),
        ("val/pass@8", "val/pass_at_8"),
        ("timing(s)/gen", "timing_s_/gen"),
        ("/lead", "lead"),
        ("../up", "__/up"),
        ("a//b", "a/b"),
        ("", "unnamed"),
        ("奖励/均值", "奖励/均值"),
    ],
)
def test_names_stay_readable(original: str, name: str) -> None:
    assert Names().name(original) == name


def test_every_hostile_name_becomes_one_that_mlflow_takes() -> None:
    names = Names()

    shown = [names.name(original) for original in P12_NAMES]

    assert [name for name in shown if not is_taken_by_mlflow(name)] == []
    assert len(set(shown)) == len(P12_NAMES)


@pytest.mark.parametrize(
    "originals",
    [["a(b)", "a[b]"], ["Loss", "loss"], ["a_at_b", "a@b"], ["a@b", "a_at_b"], ["a/b", "a//b"], ["", "unnamed"]],
)
def test_two_originals_never_share_a_name(originals: list[str]) -> None:
    names = Names()

    shown = [names.name(original).casefold() for original in originals]

    assert len(set(shown)) == len(originals)
    assert shown[0] == Names().name(originals[0]).casefold()


def test_names_are_the_same_after_a_restart_in_any_order() -> None:
    first = Names()
    shown = {original: first.name(original) for original in ["a(b)", "a[b]", "Loss", "loss", *P12_NAMES]}

    again = Names(json.loads(json.dumps(first.notes())))

    assert {original: again.name(original) for original in reversed(list(shown))} == shown
    assert not again.is_changed


def test_the_number_of_notes_is_bounded_and_names_stay_apart_beyond_it() -> None:
    names = Names({f"n{number}": f"n{number}" for number in range(NAMES_MAX)})

    shown = [names.name("a(b)"), names.name("a[b]"), names.name("plain")]

    assert len(set(shown)) == 3
    assert shown[2] == "plain"
    assert not names.is_changed
    assert names.renamed() == {}


@given(st.lists(st.text(max_size=300), max_size=8, unique=True))
def test_any_names_become_distinct_names_that_mlflow_takes(originals: list[str]) -> None:
    names = Names()

    shown = [names.name(original) for original in originals]

    assert all(is_taken_by_mlflow(name) for name in shown)
    assert len({name.casefold() for name in shown}) == len(originals)


# Params


def test_a_configuration_becomes_flat_text() -> None:
    config = {"optim": {"lr": 1e-4, "betas": [0.9, {"x": None}]}, "tag": None, "on": True, "empty": {}, 3: "", "s": "a"}

    assert params_of(config) == {
        "optim/lr": "0.0001",
        "optim/betas": '[0.9, {"x": null}]',
        "tag": "None",
        "on": "True",
        "empty": "{}",
        "3": "",
        "s": "a",
    }


def test_params_carry_no_secrets() -> None:
    assert "SENTINEL" not in str(params_of({"swanlab": {"api_key": "SENTINEL"}, "list": [{"token": "SENTINEL"}]}))


def test_a_long_value_is_cut_where_it_can_be_seen() -> None:
    params = params_of({"long": "x" * 7000, "fits": "y" * VALUE_CHARS_MAX})

    assert len(params["long"]) == VALUE_CHARS_MAX
    assert params["long"].endswith(CUT)
    assert params["fits"] == "y" * VALUE_CHARS_MAX


@pytest.mark.parametrize("config", [None, "text", [], {}])
def test_what_is_no_configuration_has_no_params(config: object) -> None:
    assert params_of(config) == {}


# Artifacts


def generations(**place: Any) -> Any:
    body = {"columns": ["input", "output", "score"], "rows": [["q", "a", 0.5]], "part": 0, "parts": 1, "call": 0}
    body |= place.pop("body", {})
    return item(RecordKind.GENERATIONS, body, **place)


@pytest.mark.parametrize(
    ("place", "path"),
    [
        ({"step": 40}, "val_generations/step_40.json"),
        ({"step": -1}, "val_generations/step_-1.json"),
        ({"step": None}, "val_generations/no_step.json"),
        ({"step": 4, "rank": 1, "body": {"call": 2, "part": 3}}, "val_generations/step_4.rank_1.call_2.part_3.json"),
        ({"step": 4, "body": {"name": "training/groups"}}, "tables/training/groups/step_4.json"),
        ({"step": 4, "body": {"name": "../up"}}, "tables/__-5ec1f7e7/up/step_4.json"),
    ],
)
def test_a_generations_path_says_step_rank_call_and_part(place: dict[str, Any], path: str) -> None:
    assert generations_artifact(generations(**place), Claims())[0] == path


def test_generations_are_a_list_of_rows_by_column() -> None:
    body = {"rows": [["q\ud83d", None, float("nan")], ["short"], ["a", "b", 1, "rest"]]}

    _path, content = generations_artifact(generations(body=body), Claims())

    assert json.loads(content) == [
        {"input": "q\ufffd", "output": None, "score": "NaN"},
        {"input": "short"},
        {"input": "a", "output": "b", "score": 1, "column_4": "rest"},
    ]


def test_the_same_step_of_another_process_does_not_replace_the_first() -> None:
    claims = Claims()
    first = generations_artifact(generations(step=40), claims)[0]
    other = generations_artifact(generations(step=40, stream_id="7" * 32), claims)[0]

    again = Claims(json.loads(json.dumps(claims.notes())))

    assert (first, other) == ("val_generations/step_40.json", "val_generations/step_40.writer_77777777.json")
    assert generations_artifact(generations(step=40, stream_id="7" * 32), again)[0] == other
    assert generations_artifact(generations(step=40), again)[0] == first
    assert not again.is_changed


def test_two_texts_of_one_step_have_two_paths_and_a_repeat_has_the_same() -> None:
    claims = Claims()
    one, two = (item(RecordKind.TEXT, {"a/b": "x"}, ordinal=ordinal, step=None) for ordinal in (1, 2))

    paths = [text_artifact(record, "a/b", "x", claims)[0] for record in (one, two, one, two)]

    assert paths == ["text/a/b/no_step.txt", f"text/a/b/no_step.writer_{STREAM[:8]}-2.txt"] * 2


@pytest.mark.parametrize("key", ["../../etc", "a:%2f#?", "", "/", "😀", "x" * 400, 3, ("a", 1)])
def test_a_text_key_never_leaves_its_folder(key: object) -> None:
    path, _content = text_artifact(item(RecordKind.TEXT, {}, step=1), key, "x", Claims())

    assert path.startswith("text/")
    assert path == posixpath.normpath(path)
    assert re.fullmatch(r"[\w.\- /]+", path)


def test_claims_are_bounded_and_the_oldest_go_first() -> None:
    claims = Claims()
    for number in range(CLAIMS_MAX + 1):
        claims.claim(f"s{number}", ".txt", "me")

    notes = claims.notes()

    assert len(notes) == CLAIMS_MAX
    assert "s0" not in notes


# Spans


def span_body(**changes: Any) -> dict[str, Any]:
    ids = {"trace_id": b"\x01" * 16, "span_id": b"\x02" * 8, "parent_id": None}
    return ids | {"name": "generate", "start_ns": 10, "end_ns": 20, "status": "ok", "attributes": {}} | changes


def attributes(span: Any) -> dict[str, str]:
    return {pair.key: pair.value.string_value for pair in span.attributes}


def test_a_span_says_of_which_type_it_is_and_how_many_tokens_it_took() -> None:
    told = {"span_type": "chat", "prompt_tokens": 230, "response_tokens": 2048}
    found = attributes(span_of(span_body(attributes=told), step=1, rank=0, experiment="exp"))
    assert json.loads(found["mlflow.spanType"]) == "LLM"
    usage = {"input_tokens": 230, "output_tokens": 2048, "total_tokens": 2278}
    assert json.loads(found["mlflow.chat.tokenUsage"]) == usage
    for odd in ({"span_type": ["chat"]}, {"span_type": "unknown"}, {"span_type": "chat", "prompt_tokens": "many"}):
        found = attributes(span_of(span_body(attributes=odd), step=1, rank=0, experiment="exp"))
        assert "mlflow.chat.tokenUsage" not in found


def test_an_answer_to_messages_is_a_message() -> None:
    body = span_body(inputs={"messages": [{"role": "user", "content": "2+2?"}]})
    for outputs, shown in (
        ({"response_text": "4", "reward": 1.0}, {"messages": [{"role": "assistant", "content": "4"}], "reward": 1.0}),
        ({"response_of": [b"\1" * 8]}, {"response_of": ["01" * 8]}),
        ("4", "4"),
    ):
        found = attributes(span_of(body | {"outputs": outputs}, step=1, rank=0, experiment="exp"))
        assert json.loads(found["mlflow.spanOutputs"]) == shown
    plain = attributes(span_of(span_body(outputs={"response_text": "4"}), step=1, rank=0, experiment="exp"))
    assert json.loads(plain["mlflow.spanOutputs"]) == {"response_text": "4"}


def test_a_root_span_tags_its_trace_and_a_child_does_not() -> None:
    body = span_body(attributes={"sample_index": 3, "validate": False, "custom": [1]})

    root = attributes(span_of(body, step=7, rank=2, experiment="exp"))
    child = attributes(span_of(body | {"parent_id": b"\x03" * 8}, step=7, rank=2, experiment="exp"))

    tags = {key.removeprefix("mlflow.traceTag."): json.loads(text) for key, text in root.items() if "traceTag" in key}
    assert tags == {
        "step": "7",
        "rank": "2",
        "experiment_name": "exp",
        "sample_index": "3",
        "validate": "False",
        "mlflow.traceName": "generate",
    }
    assert not any("traceTag" in key for key in child)
    assert child["custom"] == "[1]"


def test_attributes_cannot_pose_as_mlflows_own() -> None:
    body = span_body(attributes={"mlflow.spanInputs": "forged", "mlflow.traceTag.step": "9"}, inputs={"a": 1})

    found = attributes(span_of(body, step=1, rank=0, experiment="exp"))

    assert found["mlflow.spanInputs"] == '{"a": 1}'
    assert found["mlflow.traceTag.step"] == '"1"'


@pytest.mark.parametrize(
    "changes",
    [
        {"trace_id": b""},
        {"trace_id": b"\0" * 16},
        {"span_id": b"short"},
        {"span_id": None},
        {"parent_id": b"\0" * 8},
        {"start_ns": -1},
        {"end_ns": None},
        {"end_ns": 2**64},
    ],
)
def test_what_cannot_be_a_span_is_a_value_error(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"span needs a|not a time"):
        span_of(span_body(**changes), step=1, rank=0, experiment="exp")


def test_spans_are_grouped_by_number_and_bytes() -> None:
    spans = [(number, SimpleNamespace(ByteSize=lambda: 1024 * 1024)) for number in range(5)]
    small = [(number, SimpleNamespace(ByteSize=lambda: 1)) for number in range(250)]

    assert [len(part) for part in span_chunks(spans)] == [2, 2, 1]
    assert [len(part) for part in span_chunks(small)] == [100, 100, 50]


# Settings


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({}, "MLFLOW_TRACKING_URI"),
        ({"tracking_uri": "./nowhere"}, "mkdir -p ./nowhere, or use sqlite:////PATH"),
        ({"tracking_uri": "file:///nowhere/mlruns"}, "mkdir -p /nowhere/mlruns"),
        ({"tracking_uri": "http://x", "ca_file": "/nowhere/ca.pem"}, "backends.mlflow.ca_file"),
        ({"tracking_uri": "sqlite://"}, "names no file"),
        ({"tracking_uri": "sqlite:///"}, "names no file"),
        ({"tracking_uri": "http://"}, "names no host"),
        ({"tracking_uri": "sqlite:///:memory:"}, "names no file"),
        ({"tracking_uri": "http://x", "timeout_s": 0}, "timeout_s"),
        ({"tracking_uri": "http://x", "timeout_s": "soon"}, "timeout_s"),
    ],
)
def test_settings_that_cannot_work_are_told_in_one_line(
    settings: dict[str, Any], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)

    with pytest.raises(ConfigError, match=words) as caught:
        MlflowBackend.check(settings)

    assert "\n" not in caught.value.line()


def test_the_uri_may_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://tracker:5000")

    MlflowBackend.check({})


def test_a_database_keeps_its_artifacts_beside_it() -> None:
    assert database_path("sqlite:////data/mlflow/runs.db?x=1") == "/data/mlflow/runs.db"
    assert default_artifact_location("sqlite:////data/mlflow/runs.db") == "/data/mlflow/mlartifacts"
    assert default_artifact_location("http://tracker") is None


@pytest.mark.parametrize("project", ["", ".", "x" * 600, "奖" * 400, "nul\0", "\ud83d", "a/b 'c'"])
def test_any_project_has_an_experiment_name_that_mlflow_takes(project: str) -> None:
    name = experiment_name(project)

    assert 0 < len(name) <= 500
    assert "\0" not in name.encode().decode()


@pytest.mark.parametrize("run_id", ["it's", 'say "x"', "back`tick", "", "\ud83d", "new\nline", "x" * 600])
def test_any_run_id_can_be_searched_for(run_id: str) -> None:
    assert re.fullmatch(r"sha256:[0-9a-f]{64}", tag_value(run_id))


def test_an_ordinary_run_id_is_its_own_tag() -> None:
    assert tag_value("grpo-2026.11_a1:b/c") == "grpo-2026.11_a1:b/c"
