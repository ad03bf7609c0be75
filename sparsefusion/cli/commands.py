"""`python -m sparsefusion COMMAND`: what messages cost on some machines, measured, fitted, reported. Loads no torch."""

import argparse
from pathlib import Path

from sparsefusion.foundation.command_line import Parser, leave_on_interrupt, run, silence_third_parties

OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "p2p")
UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def parser() -> Parser:
    """The command line."""
    main = Parser(prog="sparsefusion", description="What messages between ranks cost.")
    commands = main.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=Parser)
    _add_measure(commands.add_parser("measure", help="time collectives on these ranks (under torchrun)"))
    _add_fit(commands.add_parser("fit", help="fit what nccl-tests measured"))
    report = commands.add_parser("report", help="a page with plots")
    report.add_argument("--fabric", required=True, metavar="F", help="from measure or fit")
    report.add_argument("--out", required=True, metavar="DIR", help="receives fabric.md and three PNGs")
    return main


def _add_measure(measure) -> None:
    measure.add_argument("--out", required=True, metavar="F", help="the fabric file to write")
    measure.add_argument("--sizes", type=_sizes, default="1K:16M", metavar="A:B", help="powers of two, default 1K:16M")
    measure.add_argument("--collectives", type=_operations, default=OPERATIONS, metavar="A,B", help="default: all")
    measure.add_argument("--ranks", type=_counts, metavar="N,N", help="numbers of ranks, default all that run")
    measure.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda where there is one")


def _add_fit(fit) -> None:
    for operation in OPERATIONS:
        flag = "--" + operation.replace("_", "-")
        fit.add_argument(flag, nargs="+", default=[], metavar="F", help="nccl-tests text, or CSV of it")
    fit.add_argument("--latency", nargs="+", default=[], metavar="F", help="JSON of all-reduces, eager and graph")
    fit.add_argument("--ranks", type=_count, metavar="N", help="of the files that do not say")
    fit.add_argument("--link-gb-per-s", type=_positive, metavar="X", help="what a rank's link could carry one way")
    fit.add_argument("--out", required=True, metavar="F", help="the fabric file to write")


def _refusable(convert):
    """A type for argparse whose ValueErrors are told as they are."""

    def converted(text):
        try:
            return convert(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return converted


def _nbytes(text) -> int:
    unit = text[-1:].upper() if text[-1:].isalpha() else ""
    number = text[: len(text) - len(unit)]
    if unit not in UNITS or not number.isdecimal() or int(number) < 1:
        raise ValueError(f"{text!r} is no size such as 4096, 64K or 16M")
    return int(number) * UNITS[unit]


@_refusable
def _sizes(text) -> list[int]:
    """'1K:16M' -> 1024, 2048, ..., 16777216."""
    first, _, last = text.partition(":")
    first, last = _nbytes(first), _nbytes(last)
    if first < 4:
        raise ValueError(f"{text!r} begins below 4 bytes, one number")
    if first > last:
        raise ValueError(f"{text!r} begins above its end")
    return [first << doubling for doubling in range((last // first).bit_length())]


@_refusable
def _operations(text) -> list[str]:
    names = text.split(",")
    for name in names:
        if name not in OPERATIONS:
            raise ValueError(f"{name!r} is none of {', '.join(OPERATIONS)}")
    return names


def _at_least_two(text) -> int:
    if not text.isdecimal() or int(text) < 2:
        raise ValueError(f"{text!r} must be a number of ranks, at least 2")
    return int(text)


_count = _refusable(_at_least_two)


@_refusable
def _counts(text) -> list[int]:
    return sorted({_at_least_two(part) for part in text.split(",")})


@_refusable
def _positive(text) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise ValueError(f"{text} must be positive")
    return value


def main(argv=None) -> int:
    """Run a command line; returns its exit code."""
    arguments = parser().parse_args(argv)
    leave_on_interrupt()
    silence_third_parties()
    command = {"measure": _measure, "fit": _fit, "report": _report}[arguments.command]
    return run(f"sparsefusion {arguments.command}", lambda: command(arguments))


def _measure(arguments) -> None:
    from sparsefusion.fabric.command import measure_command

    measure_command(arguments)


def _fit(arguments) -> None:
    from sparsefusion.fabric.cost_model import Fabric
    from sparsefusion.fabric.readers import extended, read_curves

    files = {operation: getattr(arguments, operation) for operation in OPERATIONS}
    sweeps = [
        curve for name, paths in files.items() for path in paths for curve in read_curves(path, name, arguments.ranks)
    ]
    latencies = [curve for path in arguments.latency for curve in read_curves(path, "all_reduce", arguments.ranks)]
    if not sweeps and not latencies:
        raise ValueError("fit needs a file: --all-reduce F, --latency F, ...")
    for operation, paths in files.items():
        kept = [(curve.operation, curve.ranks, curve.mode) for curve in sweeps if curve.operation.startswith(operation)]
        if len(kept) > len(set(kept)):
            raise ValueError(f"{' and '.join(paths)} measured the same {operation}: give one of them")
    named = [*(path for paths in files.values() for path in paths), *arguments.latency]
    description = {"source": ", ".join(Path(path).name for path in named)}
    if arguments.link_gb_per_s:
        description["link_bytes_per_s"] = arguments.link_gb_per_s * 1e9
    fabric = Fabric(tuple(extended(latencies, sweeps)), description)
    fabric.save(arguments.out)
    print(fabric.table())


def _report(arguments) -> None:
    from sparsefusion.fabric.cost_model import Fabric
    from sparsefusion.fabric.report import write_report

    for path in write_report(Fabric.load(arguments.fabric), arguments.out):
        print(path)
