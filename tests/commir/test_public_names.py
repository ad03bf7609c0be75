"""The public names of commir, as a user calls them. Oracle: torch's attention."""

import pickle
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import commir
from attention_problems import exact
from commfabric.fabric.curve import Curve
from commfabric.fabric.fitting import Segment
from sparsefusion import Fabric


def fabric():
    """20 microseconds and 10 GB/s for messages between pairs of ranks."""
    sizes = (1_000, 1_000_000)
    line = Segment(*sizes, 2e-5, 1e-10)
    return Fabric((Curve("p2p", 4, "eager", sizes, tuple(map(line.time, sizes)), (), (), (line,), (0.0, 0.0)),))


def test_a_program_is_searched_explained_verified_and_run():
    program = commir.programs.attention(batch=1, heads=8, kv_heads=2, seq=64, head_dim=16, causal=True, backward=False)
    mesh = commir.Mesh(node=2, gpu=4, speeds={"node": (1e-4, 1e9), "gpu": (1e-6, 1e11)})
    plans = commir.search(program, mesh, fabric=None, memory=None)
    best = plans[0]
    assert [plan.hash for plan in plans] == [plan.hash for plan in commir.search(program, mesh)]
    assert best.seconds > 0 and best.memory > 0 and best.bytes_per_rank > 0
    assert str(best.schedule) in best.explain()
    commir.verify(best)
    q, k, v = torch.randn(1, 64, 8, 16), torch.randn(1, 64, 2, 16), torch.randn(1, 64, 2, 16)
    inputs = {"q": q, "k": k, "v": v}
    outs = commir.interpret(best, inputs)
    out, lse = exact(q, k, v, causal=True)
    torch.testing.assert_close(outs["out"].double(), out, rtol=0, atol=1e-5)
    torch.testing.assert_close(outs["lse"].double(), lse, rtol=0, atol=1e-5)
    parts = [best.shard(inputs, rank) for rank in range(mesh.ranks)]
    assert all(torch.equal(best.unshard(parts)[name], x) for name, x in inputs.items())
    alone = commir.search(program, commir.Mesh(gpu=1))[0]
    on_one_rank = commir.execute(alone, alone.shard(inputs, 0), None)
    torch.testing.assert_close(on_one_rank["out"].double(), out, rtol=0, atol=1e-5)


def test_speeds_of_a_measured_fabric():
    """As the speed of a level, and for all levels without one."""
    program = commir.programs.attention(batch=1, heads=8, seq=4096, head_dim=64)
    pairs = commir.search(program, commir.Mesh(gpu=4), fabric=fabric())
    levels = commir.search(program, commir.Mesh(gpu=4, speeds={"gpu": (2e-5, 1e10)}))
    assert [plan.hash for plan in pairs] == [plan.hash for plan in levels]
    assert [plan.seconds for plan in pairs] == pytest.approx([plan.seconds for plan in levels], rel=0.05)
    with pytest.raises(TypeError):
        levels[0].mesh.speeds["gpu"] = (1.0, 1.0)
    assert pickle.loads(pickle.dumps(levels[0].mesh)) == levels[0].mesh
    mixed = commir.Mesh(node=2, gpu=2, speeds={"node": (1e-4, 1e9), "gpu": fabric()})
    commir.verify(commir.search(program, mixed)[0])


def test_a_schedule_by_hand():
    program = commir.programs.attention(batch=1, heads=4, seq=32, head_dim=8)
    schedule = commir.Schedule(program, commir.Mesh(gpu=4)).tile("q", 4).tile("kv", 4)
    plan = schedule.parallelize("q.o", "gpu").shift("kv.o", "gpu").lower()
    commir.verify(plan)
    assert commir.Plan.from_json(plan.to_json()) == plan
    changed = plan.to_json().replace('"heads"', '"heads "', 1)
    with pytest.raises(ValueError):
        commir.Plan.from_json(changed)
    changed = plan.to_json().replace('"causal":true', '"causal":false')
    with pytest.raises(ValueError, match="this plan was changed after it was saved"):
        commir.Plan.from_json(changed)


def test_split_meshes_are_part_of_the_plan():
    program = commir.programs.attention(batch=1, heads=4, seq=32, head_dim=8)
    mesh = commir.Mesh(gpu=4).split("gpu", a=2, b=2)
    schedule = commir.Schedule(program, mesh).tile("q", 2, "q.a").tile("q.i", 2, "q.b").tile("heads", 2)
    plan = schedule.parallelize("q.a", "a").parallelize("heads.o", "b").lower()
    commir.verify(plan)
    assert "Mesh(a=2, b=2)" in plan.explain()


def test_the_reference_lists_all_public_names_and_errors():
    page = (Path(__file__).resolve().parents[2] / "docs/reference/commir.md").read_text()
    assert {"search_graph", "GraphNode", "GraphRunner"} <= set(commir.__all__)
    headings = re.findall(r"heading: commir\.(\w+)$", page, re.MULTILINE)
    assert sorted(set(commir.__all__) - {"programs"}) == sorted(headings)
    errors = {"LoopNestError", "IllegalSchedule", "VerificationError", "Stuck", "StepFailed"}
    assert errors | {"backward_plan"} <= set(re.findall(r"^::: commir\.\S+\.(\w+)$", page, re.MULTILINE))


def test_importing_commir_loads_no_torch():
    program = "import sys, commir; commir.programs.attention(); sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True)
