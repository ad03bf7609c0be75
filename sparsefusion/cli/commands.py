"""`python -m sparsefusion COMMAND`: measure, fit and report the costs of messages. Only `measure` loads torch."""

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from commfabric.fabric.nccl import parse_setting
from commfabric.foundation.command_line import Parser, leave_on_interrupt, run, silence_third_parties
from commfabric.foundation.launcher import adopt_launcher
from commfabric.foundation.lazy import version

OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "p2p")
# Examples of the commands
MEASURE = "torchrun --nproc-per-node 2 -m sparsefusion measure --out fabric.json"
FIT = "sparsefusion fit --all-reduce all_reduce_perf.txt --ranks 8 --out fabric.json"
REPORT = "sparsefusion report --fabric fabric.json --out report"
UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}

Value = TypeVar("Value")


def parser() -> Parser:
    """The parser of the command line: one sub-parser for each command."""
    main = Parser(prog="sparsefusion", description="The costs of messages between ranks.", examples=[MEASURE, FIT])
    main.add_argument("--version", action="version", version=f"sparsefusion {version()}", help="print the version")
    commands = main.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=Parser)
    about = "measure collectives on these ranks (under torchrun)"
    _add_measure(commands.add_parser("measure", help=about, examples=[MEASURE]))
    _add_fit(commands.add_parser("fit", help="fit measurements of nccl-tests", examples=[FIT]))
    report = commands.add_parser("report", help="write a page with plots", examples=[REPORT])
    report.add_argument("--fabric", required=True, metavar="F", help="from measure or fit")
    report.add_argument("--out", required=True, metavar="DIR", help="receives fabric.md and two PNGs")
    return main


def _add_measure(measure: Parser) -> None:
    measure.add_argument("--out", required=True, metavar="F", help="the fabric file to write")
    measure.add_argument(
        "--sizes", type=_sizes, default="8:16M", metavar="A:B", help="sizes from A to B, doubling; default: 8:16M"
    )
    measure.add_argument(
        "--seconds", type=_positive, default=60.0, metavar="S", help="time for all measurements; default: 60"
    )
    measure.add_argument("--collectives", type=_operations, default=OPERATIONS, metavar="A,B", help="default: all")
    measure.add_argument("--ranks", type=_counts, metavar="N,N", help="numbers of ranks; default: all ranks")
    settings = "measure all-reduces also with these algorithms and protocols of NCCL, such as Ring,NVLS,LL128,Ring/LL"
    measure.add_argument("--nccl", type=_settings, default=[], metavar="X,Y", help=settings)
    programs = "run the programs of nccl-tests that are on the PATH, on --ranks GPUs of this host; without torchrun"
    measure.add_argument("--nccl-tests", action="store_true", help=programs)
    measure.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda if torch finds one")


def _add_fit(fit: Parser) -> None:
    for operation in OPERATIONS:
        flag = "--" + operation.replace("_", "-")
        fit.add_argument(flag, nargs="+", default=[], metavar="F", help="output of nccl-tests, or CSV made from it")
    fit.add_argument(
        "--latency", nargs="+", default=[], metavar="F", help="JSON of all-reduce latencies, eager and with CUDA graphs"
    )
    fit.add_argument("--ranks", type=_count, metavar="N", help="number of ranks of files that do not state it")
    fit.add_argument("--link-gb-per-s", type=_positive, metavar="X", help="bandwidth of a rank's link in one direction")
    fit.add_argument("--out", required=True, metavar="F", help="the fabric file to write")


def _argument_type(convert: Callable[[str], Value]) -> Callable[[str], Value]:
    """`convert` as a type for argparse that prints the messages of its ValueErrors unchanged."""

    def converted(text: str) -> Value:
        try:
            return convert(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return converted


def _nbytes(text: str) -> int:
    """'64K' -> 65536."""
    unit = text[-1:].upper() if text[-1:].isalpha() else ""
    number = text[: len(text) - len(unit)]
    if unit not in UNITS or not number.isdecimal() or int(number) < 1:
        raise ValueError(f"invalid size {text!r}: expected a number such as 4096, 64K or 16M")
    return int(number) * UNITS[unit]


@_argument_type
def _sizes(text: str) -> list[int]:
    """'1K:16M' -> [1024, 2048, ..., 16777216]."""
    first, last = (_nbytes(end) for end in text.partition(":")[::2])
    if first < 4:
        raise ValueError(f"{text!r} begins below 4 bytes, the size of one element")
    if first > last:
        raise ValueError(f"{text!r} begins above its end")
    return [first << doubling for doubling in range((last // first).bit_length())]


@_argument_type
def _operations(text: str) -> list[str]:
    """'all_reduce,p2p' -> ['all_reduce', 'p2p']."""
    names = text.split(",")
    for name in names:
        if name not in OPERATIONS:
            raise ValueError(f"unknown collective {name!r}: expected {', '.join(OPERATIONS)}")
    return names


def _at_least_two(text: str) -> int:
    """A number of ranks."""
    if not text.isdecimal() or int(text) < 2:
        raise ValueError(f"{text!r} must be a number of ranks, at least 2")
    return int(text)


_count = _argument_type(_at_least_two)


@_argument_type
def _counts(text: str) -> list[int]:
    """'4,2' -> [2, 4]."""
    return sorted({_at_least_two(part) for part in text.split(",")})


@_argument_type
def _settings(text: str) -> list[str]:
    """'Ring,Ring/LL' -> ['Ring', 'Ring LL']."""
    return list(dict.fromkeys(map(parse_setting, text.split(","))))


@_argument_type
def _positive(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise ValueError(f"{text} must be positive")
    return value


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line, by default that of this process, and return its exit code."""
    if code := run("sparsefusion", adopt_launcher):
        return code
    arguments = parser().parse_args(argv)
    leave_on_interrupt()
    silence_third_parties()
    command = {"measure": _measure, "fit": _fit, "report": _report}[arguments.command]
    return run(f"sparsefusion {arguments.command}", lambda: command(arguments))


def _measure(arguments: argparse.Namespace) -> None:
    from commfabric.fabric.command import measure_command
    from commfabric.fabric.nccl_tests import measure_with_nccl_tests

    measurement = measure_with_nccl_tests if arguments.nccl_tests else measure_command
    measurement(arguments)


def _fit(arguments: argparse.Namespace) -> None:
    """Read the files, save the fabric, and print its table."""
    from commfabric.fabric.cost_model import Fabric
    from commfabric.fabric.readers import extend_by_sweeps, read_curves

    files = {operation: getattr(arguments, operation) for operation in OPERATIONS}
    sweeps = [
        curve for name, paths in files.items() for path in paths for curve in read_curves(path, name, arguments.ranks)
    ]
    latencies = [curve for path in arguments.latency for curve in read_curves(path, "all_reduce", arguments.ranks)]
    if not sweeps and not latencies:
        raise ValueError("fit needs a file: --all-reduce F, --latency F, ...")
    sources = [*(path for paths in files.values() for path in paths), *arguments.latency]
    description: dict[str, object] = {"source": ", ".join(Path(path).name for path in sources)}
    if arguments.link_gb_per_s:
        description["link_bytes_per_s"] = arguments.link_gb_per_s * 1e9
    fabric = Fabric(tuple(extend_by_sweeps(latencies, sweeps)), description)
    fabric.save(arguments.out)
    print(fabric.table())


def _report(arguments: argparse.Namespace) -> None:
    """Write the report, and print the paths of its files."""
    from commfabric.fabric.cost_model import Fabric
    from commfabric.fabric.report import write_report

    for path in write_report(Fabric.load(arguments.fabric), arguments.out):
        print(path)
