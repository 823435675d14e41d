"""token2text: a real tokenizer decodes the ids in spans; without one, ids stay ids and it is told why."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from unit.shipper.scripted import BACKEND, Bench
from verl_shipper.lane_intake import Order
from verl_shipper.policy.answers import Answers
from verl_shipper.policy.sampling import TraceSampling
from verl_shipper.policy.traces import trimmed
from verl_shipper.policy.wishes import MAY_CHOOSE
from verl_shipper.tokens import TokenizerError, find_tokenizer, load_decoder
from verl_shipper_spool.arrays import packed
from verl_shipper_spool.header import BULK, new_id
from verl_shipper_spool.record import Record, RecordKind, decode_record, encode_record

WORDS = ("<s>", "hello", "world", "2", "+", "=", "4")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model's folder with a tokenizer of a few words."""
    folder = tmp_path_factory.mktemp("model")
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="<s>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.Fuse()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def span(inputs: Any, outputs: Any) -> bytes:
    body: dict[str, Any] = {
        "trace_id": b"t" * 16,
        "span_id": b"s" * 8,
        "parent_id": None,
        "name": "generate",
        "start_ns": 1,
    }
    body |= {
        "start_ns": 1,
        "end_ns": 2,
        "inputs": inputs,
        "outputs": outputs,
        "status": "ok",
        "attributes": {"step": 1},
    }
    return encode_record(Record(RecordKind.SPAN, 0, 1, 1, body))


def test_texts_take_the_place_of_ids_wherever_they_stand(model: Path) -> None:
    body = {
        "inputs": {"prompt_ids": [3, 4, 3, 5], "turns": [{"token_ids": [6]}], "message_ids": ["a", "b"], "ids": []},
        "outputs": {"response_ids": [6], "response_text": "four", "log_probs": [0.1], "_ids": [1]},
    }

    shown = trimmed(body, TraceSampling(token2text=True), Answers(load_decoder(str(model))))

    assert shown["inputs"]["prompt_text"].replace(" ", "") == "2+2="
    assert shown["inputs"]["turns"] == [{"text": "4"}]
    assert (shown["inputs"]["message_ids"], shown["inputs"]["ids"]) == (["a", "b"], [])
    assert shown["outputs"] == {"response_text": "four", "log_probs": [0.1], "_ids": [1]}
    assert "prompt_ids" not in shown["inputs"]


def test_ids_that_no_tokenizer_has_stay_as_they_are(model: Path) -> None:
    decode = load_decoder(str(model))

    assert trimmed({"inputs": {"ids": [-1, 2**70]}}, TraceSampling(), Answers(decode))["inputs"] == {"ids": [-1, 2**70]}


def test_a_tokenizer_is_found_by_folder_file_and_model_name(model: Path, tmp_path: Path, monkeypatch: Any) -> None:
    snapshot = tmp_path / "hub" / "models--org--tiny" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    shutil.copy(model / "tokenizer.json", snapshot)
    monkeypatch.setenv("HF_HOME", str(tmp_path))

    assert find_tokenizer(str(model)) == find_tokenizer(str(model / "tokenizer.json")) == str(model / "tokenizer.json")
    assert find_tokenizer("org/tiny") == str(snapshot / "tokenizer.json")


def test_a_tokenizer_that_is_missing_or_broken_is_told_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0"}')

    for where in (str(tmp_path), str(tmp_path / "nowhere"), "no-such-org/no-such-model"):
        with pytest.raises(TokenizerError) as caught:
            load_decoder(where)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("missing", ["tokenizer", "package"])
def test_without_a_tokenizer_ids_stay_ids_and_status_tells_why(
    missing: str, model: Path, tmp_path: Path, monkeypatch: Any
) -> None:
    if missing == "package":
        monkeypatch.setitem(sys.modules, "tokenizers", None)
        load_decoder.cache_clear()
    traces = {"token2text": True, "tokenizer": str(model)} if missing == "package" else {"token2text": True}
    bench = Bench(tmp_path, order=Order(BACKEND, {"traces": traces}))
    stream = bench.stream(stream_class=BULK)
    bench.log_payload(stream, span({"prompt_ids": [3]}, None))
    bench.until_quiet()

    (payload,) = bench.tracker.kept.values()
    assert decode_record(payload).body["inputs"] == {"prompt_ids": [3]}
    assert "token2text" in bench.account().last_error
    assert ("pip install" if missing == "package" else "sampling.traces.tokenizer") in bench.account().last_error
    bench.close()


def test_a_lane_delivers_texts(model: Path, tmp_path: Path) -> None:
    load_decoder.cache_clear()
    order = Order(BACKEND, {"traces": {"token2text": True, "tokenizer": str(model), "max_length": 5}})
    bench = Bench(tmp_path, order=order)
    stream = bench.stream(stream_class=BULK)
    bench.log_payload(stream, span({"prompt_ids": [1, 2]}, {"response_ids": [3]}))
    bench.until_quiet()

    (payload,) = bench.tracker.kept.values()
    body = decode_record(payload).body
    assert body["inputs"]["prompt_text"].startswith("hello… [")
    assert body["outputs"] == {"response_text": "2"}
    bench.close()


@pytest.mark.parametrize("crash", [False, True])
def test_a_root_has_the_answer_of_its_turn_also_after_a_restart_in_between(
    crash: bool, model: Path, tmp_path: Path
) -> None:
    order = Order(BACKEND, {"traces": {"token2text": True, "tokenizer": str(model)}})
    bench = Bench(tmp_path, order=order)
    stream = bench.stream(stream_class=BULK)
    bench.log_payload(stream, span({}, {"token_ids": packed([1, 2, 6, 6])}))
    bench.until_quiet()
    if crash:
        bench.crash()
    bench.log_payload(stream, span({"messages": []}, {"response_of": [b"s" * 8], "reward": 1.0}))
    bench.until_quiet()

    outputs = decode_record(bench.tracker.kept[stream, 1]).body["outputs"]
    assert (outputs["response_text"], outputs["reward"]) == ("helloworld44", 1.0)
    bench.close()


def test_the_runs_own_tokenizer_is_found_in_its_configuration(model: Path, tmp_path: Path) -> None:
    """A rollout worker says it, on a node where the trainer is not; and none of its words is the run's beginning."""
    bench = Bench(tmp_path, order=Order(BACKEND, {}, MAY_CHOOSE))
    writer = new_id()
    scalars = bench.stream(writer_id=writer, forked=True)
    bulk = bench.stream(stream_class=BULK, writer_id=writer, forked=True)
    trace = {"rollout": {"trace": {"token2text": True}}, "model": {"path": "/nowhere", "tokenizer_path": str(model)}}
    body = {"config": {"actor_rollout_ref": trace}, "forked": True}
    bench.log_payload(bulk, span({"prompt_ids": [1, 2]}, None))
    bench.log_payload(scalars, encode_record(Record(RecordKind.RUN_START, 0, None, 1, body)))
    bench.until_quiet()

    assert decode_record(bench.tracker.kept[bulk, 0]).body["inputs"] == {"prompt_text": "helloworld"}
    bench.close()
