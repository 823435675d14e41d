"""P06 with torch itself: tensors of every kind. A single number arrives as it is, all else is counted.

Marked `verl`: run by `make test-verl`, whose environment has torch. field/test_p06_value_types.py needs none.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from support import oracle
from support.daemon import Daemon
from support.site import Site
from support.trainer import run_script

pytestmark = pytest.mark.verl

VALUES = """
import warnings
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

warnings.simplefilter("ignore")  # torch's own about prototypes

class Own(torch.Tensor):
    pass

def inference():
    with torch.inference_mode():
        return torch.tensor(1.5) * 1

def mapped():
    seen = []
    torch.vmap(lambda row: (seen.append(row.sum()), row)[1])(torch.ones(2, 3))
    return seen[0]

def distributed():
    import os, tempfile
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, distribute_tensor
    place = os.path.join(tempfile.mkdtemp(), "store")
    dist.init_process_group("gloo", init_method=f"file://{place}", rank=0, world_size=1)
    return distribute_tensor(torch.tensor(1.5), init_device_mesh("cpu", (1,)), [Replicate()])

leaf = torch.tensor(2.0, requires_grad=True)
NUMBERS = {
    "tensor": (torch.tensor(1.5), 1.5),
    "bf16": (torch.tensor(1.5, dtype=torch.bfloat16), 1.5),
    "int64_max": (torch.tensor(2**63 - 1), 2.0**63),
    "int64_min": (torch.tensor(-(2**63)), -(2.0**63)),
    "uint64_max": (torch.tensor(2**64 - 1, dtype=torch.uint64), 2.0**64),
    "false": (torch.tensor(False), 0),
    "one": (torch.tensor([2.5]), 2.5),
    "one_by_one": (torch.tensor([[2.5]]), 2.5),
    "of_a_row": (torch.arange(6.0).reshape(2, 3).t()[2, 1], 5.0),
    "expanded": (torch.tensor(2.5).expand(1, 1), 2.5),
    "requires_grad": (leaf, 2.0),
    "grad_fn": ((leaf * 3).sum(), 6.0),
    "detached": ((leaf * 3).detach(), 6.0),
    "inference": (inference(), 1.5),
    "parameter": (nn.Parameter(torch.tensor(1.5)), 1.5),
    "buffer": (nn.Buffer(torch.tensor([1.5])), 1.5),
    "subclass": (torch.tensor(1.5).as_subclass(Own), 1.5),
    "sparse": (torch.tensor([1.5]).to_sparse(), 1.5),
    "quantized": (torch.quantize_per_tensor(torch.tensor([1.5]), 0.5, 0, torch.qint8), 1.5),
    "real_part": (torch.tensor(3 + 1j).real, 3.0),
    "negated_view": (torch.tensor(1 + 2j).conj().imag, -2.0),
    "unmasked": (torch.masked.masked_tensor(torch.tensor([1.5]), torch.tensor([True])), 1.5),
    "numpy": (torch.tensor(1.5).numpy(), 1.5),
    "size_of_one": (torch.Size([3]), 3),
    "list_of_one": ([torch.tensor(1.5)], 1.5),
    "distributed": (distributed(), 1.5),
}
for name in ("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz",
             "float8_e5m2fnuz", "float8_e8m0fnu", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32",
             "uint64", "bool"):
    for shape in ((), (1,)):
        NUMBERS[f"{name}_{len(shape)}d"] = (torch.ones(shape, dtype=getattr(torch, name)), 1)

OTHERS = {
    "two": torch.ones(2),
    "empty": torch.empty(0),
    "complex": torch.tensor(1j),
    "complex_conj": torch.tensor([1 + 1j]).conj(),
    "meta": torch.empty((), device="meta"),
    "meta_1d": torch.empty(1, device="meta"),
    "sparse_two": torch.ones(2).to_sparse(),
    "sparse_csr": torch.tensor([[1.5]]).to_sparse_csr(),
    "nested": torch.nested.nested_tensor([torch.tensor([1.5])]),
    "jagged": torch.nested.nested_tensor([torch.tensor([1.5])], layout=torch.jagged),
    "fake": FakeTensorMode().from_tensor(torch.tensor(1.5)),
    "mapped": mapped(),
    "masked": torch.masked.masked_tensor(torch.tensor([1.5]), torch.tensor([False])),
    "parameter_of_two": nn.Parameter(torch.ones(2)),
    "size_of_two": torch.Size([1, 2]),
    "dtype": torch.float32,
    "device": torch.device("cpu"),
    "module": nn.Linear(1, 1),
    "generator": torch.Generator(),
    "storage": torch.tensor(1.5).untyped_storage(),
    "list_of_two": [torch.tensor(1.5), torch.tensor(2.5)],
}
for name in ("float4_e2m1fn_x2", "uint4", "int4", "bits8"):
    OTHERS[name] = torch.ones(1, dtype=torch.uint8).view(getattr(torch, name))
"""

TRAINER = (
    VALUES
    + """
import json, sys
from verl_shipper_client import Client

with Client("torch", "exp", run_id="r") as client:
    client.log({name: value for name, (value, _) in NUMBERS.items()} | {"ok": 1.0}, step=1)
    client.log(OTHERS | {"ok": 1.0}, step=2)
    for step, (name, (value, _)) in enumerate(NUMBERS.items(), 10):
        client.log({"alone": value, "in": {"a": {name: value}}}, step=step)
    for step, value in enumerate(OTHERS.values(), 1000):
        client.log({"before": 1.0, "other": value, "after": 1.0}, step=step)
    client.log({torch.tensor(1.5): 1.0, torch.tensor(1.5): 2.0, torch.float16: 3.0}, step=5000)
    client.log({"step": 1.0}, step=torch.tensor(6000))
    assert client.errors == 0
json.dump([{name: number for name, (_, number) in NUMBERS.items()}, len(OTHERS)], sys.stdout)
"""
)


def test_p06_tensors_of_every_kind_arrive_as_numbers_or_are_counted(site: Site) -> None:
    uri = f"sqlite:///{site.root}/mlflow.db"
    with Daemon(site, *site.file_backend(), *site.mlflow_backend(uri)) as daemon:
        told: tuple[dict[str, float], int] = json.loads(run_script(site, TRAINER, timeout_s=120).stdout)
        numbers, others = told
        records = 2 + 2 + len(numbers) + others + 2
        status = daemon.wait_settled(records, timeout_s=120)
        oracle.assert_law(status, pending=0)

    for figures in status["backends"].values():
        assert figures["delivered"] == figures["logged"] == records
        assert figures["ignored_values"] == {"not_a_number": 2 * others, "key_clash": 1}
    lines = oracle.read_lines(site.output("torch", "exp", "r"))
    run = oracle.mlflow_run(uri, "torch", "r", *numbers, "alone", "before")
    for step, (name, number) in enumerate(numbers.items(), 10):
        assert as_floats(oracle.values(lines, name)) == run.history(name) == [(1, number)], name
        assert as_floats(oracle.values(lines, f"in/a/{name}")) == [(step, number)], name
    alone = list(enumerate(numbers.values(), 10))
    assert as_floats(oracle.values(lines, "alone")) == alone
    assert sorted(run.history("alone")) == alone
    assert len(run.history("before")) == others
    assert oracle.values(lines, "after") == [(step, 1.0) for step in range(1000, 1000 + others)]
    assert next(line.data for line in lines if line.step == 5000) == {"1.5": 1.0, "torch.float16": 3.0}
    assert oracle.values(lines, "step") == [(6000, 1.0)]


def as_floats(points: list[tuple[int | None, Any]]) -> list[tuple[int | None, float]]:
    return [(step, float(value)) for step, value in points]


GRAPH = """
import gc, json, sys, weakref
import torch
from verl_shipper_client import Client

client = Client("torch", "graph", run_id="r")
weights = torch.ones(50 * 2**18, requires_grad=True)  # 50 MiB
hidden = weights * 2
loss = hidden.square().mean()
seen = weakref.ref(hidden)
client.log({"loss": loss, "nested": {"loss": [loss]}, "other": hidden, "ok": 1.0}, step=1)
del loss, hidden
gc.collect()
dead = seen() is None
client.finish()
json.dump(dead, sys.stdout)
"""


def test_a_logged_tensor_keeps_no_graph_alive(site: Site) -> None:
    assert json.loads(run_script(site, GRAPH, timeout_s=120).stdout) is True


def test_torch_is_not_imported_by_the_client(site: Site) -> None:
    source = "import sys, verl_shipper_client; print('torch' in sys.modules)"

    assert run_script(site, source).stdout == "False\n"
