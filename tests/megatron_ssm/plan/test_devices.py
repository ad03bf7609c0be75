"""What a rank computes with: the file of a device's rates, and the memory that a rank may use."""

import json
import math
import os

import pytest
import torch

from megatron_ssm.plan.devices import DEVICES, GRAPH, memory_limit, of_data_sheet, own_memory, read_device

RATES = {"memory_gb": 96, "tflops": 1000.0, "bandwidth_gb_s": 4000}


def written(folder, content):
    path = folder / "f.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return str(path)


def test_a_device_from_a_file(tmp_path):
    """By hand: half of the peak for products, 70 % of the bandwidth for the rest."""
    found = read_device(written(tmp_path, RATES | {"name": "GPU", "mamba2_layer_us": 20}))
    assert (found.name, found.memory, found.flops, found.bandwidth) == ("GPU", 96e9, 0.5e15, 2.8e12)
    assert found.graph == pytest.approx((GRAPH[0], 20e-6))
    assert read_device(written(tmp_path, RATES)) == of_data_sheet("f", 96, 1000, 4000)
    h100 = {"name": "H100 SXM", "memory_gb": 80, "tflops": DEVICES["h100"].flops / 0.5e12, "bandwidth_gb_s": 3350}
    assert read_device(written(tmp_path, h100)) == DEVICES["h100"]


@pytest.mark.parametrize(
    "content, message",
    [
        (RATES | {"tflops": -3}, "tflops -3 must be a number from 1e-06 to 1e+12"),
        (RATES | {"tflops": True}, "tflops True must be a number from 1e-06 to 1e+12"),
        (RATES | {"memory_gb": "80"}, 'memory_gb "80" must be a number from 1e-06 to 1e+12'),
        (RATES | {"memory_gb": math.inf}, "memory_gb inf must be a number from 1e-06 to 1e+12"),
        (RATES | {"mamba1_layer_us": -1}, "mamba1_layer_us -1 must be a number from 0 to 1e+12"),
        (RATES | {"bandwith_gb_s": 1}, "unknown field 'bandwith_gb_s' (did you mean bandwidth_gb_s?)"),
        ({"memory_gb": 80, "tflops": 1}, "bandwidth_gb_s None must be a number from 1e-06 to 1e+12"),
        ([1], "is not a JSON object"),
        (RATES | {"tflops": 10**400}, "must be a number from 1e-06 to 1e+12"),
        (RATES | {"tflops": 1e-320}, "must be a number from 1e-06 to 1e+12"),
        ("{", "is not a JSON object"),
        ("[" * 100_000, "is not a JSON object"),
    ],
)
def test_a_wrong_file_of_a_device(tmp_path, content, message):
    path = written(tmp_path, content)
    with pytest.raises(ValueError) as error:
        read_device(path)
    assert str(path) in str(error.value) and message in str(error.value)


def cgroups_of(folder, membership, limits):
    """(the file of a process's cgroups, where they are mounted); limits: {file: what it holds}."""
    for name, content in limits.items():
        (folder / "mounted" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "mounted" / name).write_text(content)
    (folder / "membership").write_text(membership)
    return folder / "membership", folder / "mounted"


@pytest.mark.parametrize(
    "membership, limits, expected",
    [
        ("0::/job/step\n", {"job/step/memory.max": "max\n", "job/memory.max": "4096\n"}, 4096),
        ("0::/job/step\n", {"job/step/memory.max": "512\n", "job/memory.max": "4096\n"}, 512),
        ("0::/\n", {"memory.max": "2048\n"}, 2048),  # in a container with a namespace of its own
        ("0::/../other\n", {"memory.max": "2048\n"}, 2048),
        ("4:memory:/pod\n0::/\n", {"memory/pod/memory.limit_in_bytes": "1024\n"}, 1024),
        ("4:cpu,memory:/pod\n", {"memory/memory.limit_in_bytes": "9223372036854771712\n"}, 9223372036854771712),
        ("4:memory:/docker/on/the/host\n", {"memory/memory.limit_in_bytes": "1024\n"}, 1024),
        ("3:cpuset:/pod\n", {"memory/pod/memory.limit_in_bytes": "1024\n"}, math.inf),
        ("0::/job\n", {"job/memory.max": "max\n", "other/memory.max": "1\n"}, math.inf),
    ],
)
def test_the_limit_of_a_cgroup(tmp_path, membership, limits, expected):
    assert memory_limit(*cgroups_of(tmp_path, membership, limits)) == expected


def test_the_memory_of_a_rank_on_this_machine(tmp_path, monkeypatch):
    """Its share of the machine, or of the limit if that is smaller."""
    cpu, physical = torch.device("cpu"), os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert memory_limit(tmp_path / "none") == math.inf
    assert own_memory(2, cpu) == min(physical, memory_limit()) / 2
    membership, mounted = cgroups_of(tmp_path, "0::/job\n", {"job/memory.max": "4096\n"})
    monkeypatch.setattr(memory_limit, "__defaults__", (membership, mounted))
    assert own_memory(2, cpu) == 2048
