"""P08: lone surrogates in generated text. Here half a character becomes U+FFFD, everywhere the same."""

from __future__ import annotations

import pytest

from support import oracle
from support.four_trackers import FourTrackers
from support.mlflow_server import MlflowServer
from support.site import Site
from support.trainer import run_script

TRAINER = r"""
import sys
from verl_shipper_client import Client

project, = sys.argv[1:]
with Client(project, "exp\ud83d1", run_id="published") as client:
    texts = ["fine", "cut \ud83d here", "\udcff\udcfe", "\U0001F600 ok"]
    client.log_generations([(f"p{n}", text, n / 2) for n, text in enumerate(texts)], step=7)
    client.log({"val/acc": 0.5}, step=7)
    with client.span("roll\udfffout", inputs="in \ud800", attributes={"step": 7, "no\udc80te": "half \ud83d"}) as span:
        span.set_outputs("\udcff out")
config = {"na\ud83dme": "va\udcfflue", "deep": {"list": ["\ud83d", "\U0001F600"]}}
with Client(project, "\udc00\ud800", config=config, run_id="siblings") as client:
    client.log({"val/\ud83dacc": 0.25, "val/\U0001F600": 1.0, "word": "\ud83d"}, step=3)
    client.log_generations([{"prompt\ud83d": "a\ud83d", "n": "\ud83d\ude00", "empty": "", "why": None}], step=3)
    client.log_text("no\ud83dte", "\udcff" * 5 + "end", step=4)
    client.log({"val/acc": 0.75}, step=4)
"""
BAD = "\ufffd"


def test_p08_halves_of_characters_are_shown_as_such_and_cost_nothing(site: Site, mlflow_server: MlflowServer) -> None:
    with FourTrackers(site, mlflow_server) as trackers, trackers.daemon() as daemon:
        run_script(site, TRAINER, trackers.project)
        status = daemon.wait_settled(11, timeout_s=120)
        oracle.assert_law(status, pending=0)

        for name in trackers.names:
            assert status["backends"][name]["delivered"] == 11, name
            assert trackers.runs(name) == 2, name
            assert trackers.values(name, "published", "val/acc") == [(7, 0.5)], name
            assert trackers.values(name, "siblings", "val/acc") == [(4, 0.75)], name
            ((step, rows),) = trackers.tables(name, "published")
            assert step == 7, name
            assert [row[1] for row in rows] == ["fine", f"cut {BAD} here", BAD * 2, "\U0001f600 ok"], name
            assert [row[2] for row in rows] == [0.0, 0.5, 1.0, 1.5], name
            ((step, ((first, second, *_),)),) = trackers.tables(name, "siblings")
            assert (step, first) == (3, f"a{BAD}"), name
            assert second in ("\U0001f600", BAD * 2), name
            (bad_key,) = [key for key in trackers.keys(name, "siblings") if key.endswith("acc") and key != "val/acc"]
            assert trackers.values(name, "siblings", bad_key) == [(3, 0.25)], name
            assert bad_key == ("val/_acc" if name == "mlflow" else f"val/{BAD}acc"), name
            told = trackers.config(name, "siblings")
            assert f"va{BAD}lue" in told.values(), (name, told)
        texts = {name: trackers.texts(name, "siblings") for name in trackers.names}

    assert all(shown == [(4, BAD * 5 + "end")] for shown in texts.values()), texts


@pytest.mark.parametrize("text", ["\udcff", "x\udfff\ud800y", "\udbff" * 1000])
def test_what_the_client_keeps_is_what_a_plain_replacement_gives(text: str, site: Site) -> None:
    """Siblings: other halves alone, in the wrong order, and many of them."""
    source = "import sys\nfrom verl_shipper_client import Client\n"
    source += f"Client('p', 'e', run_id='r').log_generations([('q', {text!a}, 1)], step=1)\n"
    trackers = FourTrackers(site, names=["file"])

    with trackers, trackers.daemon() as daemon:
        run_script(site, source)
        oracle.assert_law(daemon.wait_settled(3), pending=0)

    assert trackers.tables("file", "r") == [
        (1, [["q", "".join(BAD if 0xD800 <= ord(c) < 0xE000 else c for c in text), 1]])
    ]
