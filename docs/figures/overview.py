"""The overview: the packages, their rooms, and the libraries and files with which each exchanges data."""

from pathlib import Path

from svg import INK, MUTED, Drawing

PACKAGES = (
    ("megatron_ssm", "violet", "state-space language models split over ranks",
     "spec · kernels · parallel · layers · model · engine",
     "checkpoints · train · plan · server · integrations · cli"),
    ("commir", "blue", "loop programs turned into verified schedules on many ranks",
     "ir · programs · scheduling · lowering · execution · searching", ""),
    ("attention2d", "blue", "exact attention over sequences that are spread over ranks",
     "layout · compute · cost · schedules", ""),
    ("sparsefusion", "green", "sparse gradients on a budget of bytes",
     "selection · planning · gradients · adapters · fusion · cli", ""),
    ("commfabric", "green", "moving bytes between ranks, and what that costs",
     "foundation · native · collectives · fabric · reduction", ""),
)  # fmt: skip
LEFT, WIDTH = 190, 470


def overview() -> Path:
    """Draw the packages from bottom to top in import order, and beside them their users and what they use."""
    drawing = Drawing(880, 668, "The packages and what talks to what")
    tops = {}
    top = 62
    for name, colour, about, first, second in PACKAGES:
        height = 56 + 22 * bool(first) + 20 * bool(second)
        drawing.box(LEFT, top, WIDTH, height, colour=colour)
        drawing.text(LEFT + 16, top + 25, name, 16, True)
        drawing.text(LEFT + 16, top + 45, about, 13.5, colour=INK)
        drawing.text(LEFT + 16, top + 68, first, 12.5, colour=MUTED)
        drawing.text(LEFT + 16, top + 87, second, 12.5, colour=MUTED)
        tops[name.split()[0]] = (top, height)
        if name != "commfabric":
            middle = LEFT + WIDTH / 2
            drawing.line([(middle, top + height), (middle, top + height + 26)], arrow=True)
            drawing.text(middle + 10, top + height + 18, "imports", 12, colour=MUTED)
        top += height + 28

    def beside(
        package: str, text: str, left: bool, height: float = 48, shift: float = 0.0, both: bool = False, inward: bool = False
    ) -> None:  # fmt: skip
        at, high = tops[package]
        y = at + high / 2 - height / 2 + shift
        x, width = (14, 138) if left else (706, 160)
        drawing.box(x, y, width, height, text, "orange", 13)
        ends = (x + width, LEFT) if left else (LEFT + WIDTH, x)
        middle = y + height / 2
        if not inward:
            drawing.line([(ends[0], middle), (ends[1], middle)], arrow=True)
        if both or inward:
            drawing.line([(ends[1], middle), (ends[0], middle)], arrow=True)

    beside("megatron_ssm", "your program,\ncommand line", True)
    beside("megatron_ssm", "Hugging Face\ncheckpoints", False, shift=-28, both=True)
    beside("megatron_ssm", "Megatron-Core\n(groups, specs)", False, shift=28, both=True)
    beside("attention2d", "any model's\nattention", True)
    beside("attention2d", "Megatron-Core's\nlayers", False, both=True)
    beside("sparsefusion", "torch DDP,\nMegatron DDP,\nDeepSpeed", True, 66)
    beside("commfabric", "nccl-tests'\nmeasurements", False, inward=True)
    bottom = top + 4
    middle = LEFT + WIDTH / 2
    drawing.box(
        14, bottom, 852, 44, "torch.distributed: gloo or NCCL; shared memory between ranks of one host", "grey", 15
    )
    drawing.line([(middle, top - 28), (middle, bottom - 1)], arrow=True)
    drawing.text(14, 36, "A package imports only the packages below it.", 14, colour=MUTED)
    return drawing.save("overview")
