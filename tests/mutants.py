"""Mutants: errors that `make test` must notice. Oracle: the tests named beside each mutant, which pass without it.

    .venv/bin/python tests/mutants.py [NAME ...]

All mutants, or those named, are applied one at a time to a copy of the tree in a temporary directory, and their tests run
there. It prints whether each was killed, that is, whether a test failed. The exit code is 1 if a mutant survives, if the
text that it replaces is not in its file exactly once, or if a test fails without any mutant. All take about 15 min on 2
cores.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
LIMIT_S = 600  # for the tests of one mutant; a mutant that makes them hang is killed, too
LIBRARIES = [path.relative_to(ROOT) for path in sorted(ROOT.glob("*/native/libkernels.so"))]
# setup.py, but only with the library of the package that is the first argument: building the other one takes minutes.
SETUP = """
import runpy, setuptools, sys
setup, package = setuptools.setup, sys.argv.pop(1)
def setup_one(ext_modules, **options):
    setup(ext_modules=[each for each in ext_modules if each.name.startswith(f"{package}.")], **options)
setuptools.setup = setup_one
runpy.run_path("setup.py", run_name="__main__")
"""


class Mutant(NamedTuple):
    """An error: `new` in place of `old`, which occurs once in `file`. tests: one of them fails."""

    name: str
    file: str
    old: str
    new: str
    tests: str


MUTANTS = (
    # sparsefusion
    Mutant(
        "rounding error not kept as a residual", "sparsefusion/gradients/exchanges.py",
        "            feedback.add_back(selection, lost)", "            pass",
        "tests/sparsefusion/fusion/test_sparse_fusion.py::test_means_and_residuals_add_up_to_all_gradients",
    ),
    Mutant(
        "residuals of a skipped step not restored", "sparsefusion/gradients/error_feedback.py",
        "self.residuals.update(self._residuals_before_step)", "pass",
        "tests/sparsefusion/fusion/test_sparse_fusion.py::test_skipped_steps_change_nothing",
    ),
    Mutant(
        "indices of a later unit not shifted", "sparsefusion/gradients/exchanges.py",
        "s.indices.to(dtype) + n for", "s.indices.to(dtype) for",
        "tests/sparsefusion/fusion/test_sparse_fusion.py::test_means_and_residuals_add_up_to_all_gradients",
    ),
    Mutant(
        "resumed residuals summed, not averaged", "sparsefusion/fusion/checkpoint_state.py",
        "total / len(states) if len(states) > 1 else total", "total",
        "tests/sparsefusion/fusion/test_fusion_states.py::test_another_number_of_ranks_takes_the_mean_residual",
    ),
    Mutant(
        "int8 truncates", "commfabric/collectives/wire_formats.py",
        "(blocks / scale).round_()", "(blocks / scale).trunc_()",
        "tests/commfabric/collectives/test_wire_formats.py::test_int8_rounds_halves_to_even",
    ),
    Mutant(
        "a sum over ranks lacks one rank", "commfabric/reduction/quantized.py",
        "range(1, len(encoded))", "range(2, len(encoded))",
        "tests/commfabric/reduction/test_quantized_all_reduce.py::test_sums_bits_and_bytes",
    ),
    Mutant(
        "a dead rank not noticed", "commfabric/collectives/shared_memory.py",
        "state == MISSING and rank in dead_ranks", "False",
        "tests/commfabric/collectives/test_shared_memory_failures.py::test_a_killed_rank_is_named",
    ),
    Mutant(
        "messages sent at the same time", "sparsefusion/planning/fusion_cuts.py",
        "np.maximum(sent, there)", "there",
        "tests/sparsefusion/planning/test_planner.py::test_fusion_cuts_are_optimal",
    ),
    Mutant(
        "C selects one element too many of equal ones", "commfabric/native/selection.c",
        "equal-- <= 0", "equal-- < 0",
        "tests/sparsefusion/selection/test_sparsifiers.py::test_c_takes_what_torch_takes",
    ),
    Mutant(
        "C sends fp16 without its scale", "commfabric/native/formats.h",
        "half_of_float(x[i] / divisor)", "half_of_float(x[i])",
        "tests/commfabric/collectives/test_shared_memory.py::test_other_numbers_of_ranks",
    ),
    # attention2d
    Mutant(
        "zigzag order off by one block", "attention2d/layout/token_order.py",
        "(2 * ranks - 1 - rank) * length", "(2 * ranks - 2 - rank) * length",
        "tests/attention2d/layout/test_token_order.py::test_zigzag_is_megatrons_order",
    ),
    Mutant(
        "merged attention keeps the old weight", "attention2d/compute/tile.py",
        "out.mul_((lse - finite).exp().unsqueeze(-1))", "pass",
        "tests/attention2d/compute/test_tile.py::test_merged_tiles_are_exact",
    ),
    Mutant(
        "reduce-scatter adds the wrong chunk", "attention2d/compute/axis.py",
        "(self.index + 1 + step) % self.size", "(self.index + step) % self.size",
        "tests/attention2d/schedules/test_schedules.py::test_equivalent_schedules",
    ),
    Mutant(
        "the last gradient of queries is dropped", "attention2d/compute/passes.py",
        "add_to([dq], pending_dq.wait())", "pending_dq.wait()",
        "tests/attention2d/schedules/test_schedules.py::test_overlap_makes_no_difference",
    ),
    Mutant(
        "memory without the results of forward", "attention2d/cost/memory.py",
        "results + max(gathered + sizes.tile_forward, merging)", "max(gathered + sizes.tile_forward, merging)",
        "tests/attention2d/cost/test_attention_memory.py::test_peak_memory",
    ),
    # commir
    Mutant(
        "a loop is not shifted by the rank", "commir/lowering/rank_view.py",
        "(counter + shift) % loop.size", "counter % loop.size",
        "tests/commir/execution/test_interpreter.py::test_placements_are_exact",
    ),
    Mutant(
        "a wrong neutral element of softmax", "commir/ir/monoids.py",
        '(0.0, float("-inf"))', "(0.0, 0.0)",
        "tests/commir/scheduling/test_primitives.py::test_schedules_by_hand_are_exact",
    ),
    Mutant(
        "a scan forgets the state before a block", "commir/programs/scan_programs.py",
        "state = kept(state, decays[:, n], *rates) + states[:, n]", "state = states[:, n]",
        "tests/commir/programs/test_scan_programs.py::test_every_plan_equals_one_rank",
    ),
    Mutant(
        "a plan that rounds nothing is verified", "commir/execution/verifier.py",
        "len(rounds) != 1 or rounds[0] < last", "rounds and rounds[0] < last",
        "tests/commir/execution/test_verifier.py::test_a_result_is_rounded_once",
    ),
    Mutant(
        "a ring with one message too many", "commir/searching/cost.py",
        "(part.size - 1) * before)", "part.size * before)",
        "tests/commir/searching/test_search.py::test_closed_forms_are_those_of_the_plans",
    ),
    Mutant(
        "memory of a plan in chunks lacks what is kept", "commir/lowering/accounting.py",
        "Account(by_step, kept + self.peak)", "Account(by_step, self.peak)",
        "tests/commir/execution/test_chunks.py::test_ranks_compute_what_the_whole_plan_does",
    ),
    # megatron_ssm: layers and ranks
    Mutant(
        "rotary positions begin anew in each call", "megatron_ssm/layers/attention.py",
        "angles = positions.clamp(min=0)", "angles = (positions - positions[:, :1]).clamp(min=0)",
        "tests/megatron_ssm/engine/test_prefix_cache.py::test_a_prompt_in_pieces_is_read_as_by_one_call_of_the_model",
    ),
    Mutant(
        "a silent rank not noticed", "megatron_ssm/parallel/heartbeat.py",
        "self._missed[rank] + 1 if is_silent else 0", "0",
        "tests/megatron_ssm/train/test_faults.py::test_a_stopped_rank_is_named",
    ),
    Mutant(
        "an expert of another rank", "megatron_ssm/layers/experts.py",
        "index - ranks.rank * count", "index",
        "tests/megatron_ssm/model/test_expert_parallel.py::test_prompts_and_decoding",
    ),
    Mutant(
        "the bias of a router is ignored", "megatron_ssm/kernels/experts.py",
        "scores.detach() + bias.detach()", "scores.detach()",
        "tests/megatron_ssm/kernels/test_experts.py::test_groups_and_a_correction_choose_other_experts",
    ),
    Mutant(
        "C scores a group of experts by its best alone", "megatron_ssm/native/experts.c",
        " + numbers[g * size + best[1]]", "",
        "tests/megatron_ssm/layers/test_tapes.py::test_tokens_equal_those_of_layers",
    ),
    Mutant(
        "C keeps the convolution's inputs one token late", "megatron_ssm/native/conv.c",
        "a->seq - a->taps + 1 + k", "a->seq - a->taps + k",
        "tests/megatron_ssm/engine/test_generation.py::test_greedy_tokens_are_those_of_transformers",
    ),
    Mutant(
        "the boundary before a context block is dropped", "megatron_ssm/parallel/blocks.py",
        "received[:, place] = value", "pass",
        "tests/megatron_ssm/parallel/test_scans.py::test_convolution_with_halos_equals_that_of_the_whole_sequence",
    ),
    Mutant(
        "states of earlier context blocks are dropped", "megatron_ssm/parallel/state_passing.py",
        "state = maps.apply(block, state, summaries[block])", "state = summaries[block]",
        "tests/megatron_ssm/parallel/test_scans.py::test_scans_over_context_ranks_equal_those_on_one_rank",
    ),
    Mutant(
        "gradients of rows that ranks share are not summed", "megatron_ssm/parallel/layers.py",
        "self.ranks.all_reduce_exact(pieces, self.ranks.group)[index]", "pieces[index]",
        "tests/megatron_ssm/model/test_gradients.py::test_every_gradient_of_the_loss",
    ),
    Mutant(
        "the gradient of a norm is not summed over tokens", "megatron_ssm/parallel/layers.py",
        "replicated(self.weight, self.ranks)", "self.weight",
        "tests/megatron_ssm/model/test_sequence_parallel.py::test_loss_and_gradients_equal_those_of_one_rank",
    ),
    Mutant(
        "a wrong slice of units that ranks share", "megatron_ssm/spec/fields.py",
        "rank // self.copies(size) * width", "rank % self.copies(size) * width",
        "tests/megatron_ssm/checkpoints/test_checkpoint.py::test_saved_tensors_are_the_loaded_bytes",
    ),
    # megatron_ssm: generation and serving
    Mutant(
        "a freed row keeps its state", "megatron_ssm/layers/cache.py",
        "tensor[row] = 0", "pass",
        "tests/megatron_ssm/layers/test_cache.py::test_a_freed_row_begins_anew",
    ),
    Mutant(
        "a prefix is found with a later state", "megatron_ssm/layers/cache.py",
        "[tensor[row].clone() for tensor in self._fixed()]", "[tensor[row] for tensor in self._fixed()]",
        "tests/megatron_ssm/layers/test_cache.py::test_a_snapshot_is_restored_anywhere_any_number_of_times",
    ),
    Mutant(
        "prefixes are shared by all keys", "megatron_ssm/engine/prefix_cache.py",
        'len(text).to_bytes(8, "little") + text', 'b""',
        "tests/megatron_ssm/engine/test_prefix_cache.py"
        "::test_prefixes_are_shared_only_between_requests_with_the_same_key",
    ),
    Mutant(
        "refused proposals stay in the state", "megatron_ssm/layers/state.py",
        "state.update(call.rows, **before)", "pass",
        "tests/megatron_ssm/engine/test_speculation.py::test_tokens_are_taken_back_exactly",
    ),
    Mutant(
        "stop strings off by one", "megatron_ssm/engine/text.py",
        "(len(stop) - 1 for stop in stop_strings)", "(len(stop) - 2 for stop in stop_strings)",
        "tests/megatron_ssm/engine/test_text.py::test_stop_strings",
    ),
    Mutant(
        "a grammar is not enforced", "megatron_ssm/engine/slot.py",
        "banned[: len(allowed)] = ~allowed", "banned[: len(allowed)] = False",
        "tests/megatron_ssm/engine/test_grammar.py::test_a_grammar_ends_a_request_where_nothing_may_follow",
    ),
    Mutant(
        "any API key is accepted", "megatron_ssm/server/keys.py",
        "if not found:", "if not key:",
        "tests/megatron_ssm/server/test_keys.py::test_each_key_is_a_user",
    ),
    Mutant(
        "any host is accepted", "megatron_ssm/server/hosts.py",
        "if host is not None and not self._allows(host):", "if host is not None and not host:",
        "tests/megatron_ssm/server/test_keys.py::test_a_server_that_is_bound_to_loopback",
    ),
    # megatron_ssm: training and checkpoints
    Mutant(
        "elements that ranks share count several times", "megatron_ssm/train/gradients.py",
        " / fields[parameter].copies(ranks.size)", "",
        "tests/megatron_ssm/train/test_training.py::test_clipping_counts_each_element_once",
    ),
    Mutant(
        "warm-up begins one step late", "megatron_ssm/train/trainer.py",
        "options.lr * min(step + 1, warmup) / warmup", "options.lr * step / warmup",
        "tests/megatron_ssm/train/test_training.py::test_learning_rates_by_hand",
    ),
    Mutant(
        "a resumed run repeats the data", "megatron_ssm/train/pretraining.py",
        "trainer.step(inputs.batches, step - 1)", "trainer.step(inputs.batches, step - 1 - inputs.first_step)",
        "tests/megatron_ssm/train/test_pretrain.py::test_a_killed_run_is_resumed_from_where_it_saved",
    ),
    Mutant(
        "a checkpoint without a temporary name", "megatron_ssm/checkpoints/training.py",
        "hidden.rename(final)", "shutil.copytree(hidden, final)",
        "tests/megatron_ssm/checkpoints/test_resume.py::test_an_interrupted_checkpoint_is_not_found",
    ),
    Mutant(
        "an index leads out of its directory", "megatron_ssm/checkpoints/hf_directory.py",
        "Path(name).name == name and name.endswith(suffix)", "name.endswith(suffix)",
        "tests/megatron_ssm/checkpoints/test_broken_checkpoints.py::test_broken_directories",
    ),
    Mutant(
        "memory without residuals", "megatron_ssm/model/activations.py",
        "5 if has_residuals else 4", "4",
        "tests/megatron_ssm/train/test_memory_budget.py::test_residuals_of_sparse_gradients_are_counted",
    ),
    Mutant(
        "8-bit weights with a wrong scale", "megatron_ssm/kernels/quantized_matrices.py",
        "blocks.abs().amax(-1) / 127", "blocks.abs().amax(-1) / 128",
        "tests/megatron_ssm/kernels/test_matrices.py::test_the_kernel_quantizes_as_torch",
    ),
)  # fmt: skip


def copy_tree(target: Path) -> None:
    """Copy the files that git tracks, and the built libraries."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True).stdout
    for name in [*filter(None, listed.split("\0")), *LIBRARIES]:
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)


def run(tree: Path, *command: str) -> int:
    """The exit code of `python COMMAND` in the copy; 1 if it takes longer than LIMIT_S."""
    # Bytecode would be taken for that of a mutant written in the same second.
    environment = os.environ | {"PYTHONDONTWRITEBYTECODE": "1"}
    quiet = dict(stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=LIMIT_S)
    try:
        return subprocess.run([sys.executable, *command], cwd=tree, env=environment, **quiet).returncode
    except subprocess.TimeoutExpired:
        return 1


def run_tests(tree: Path, tests: list[str]) -> int:
    """pytest's exit code: 0 if all pass, 1 if one fails, others if they could not run."""
    return run(tree, "-m", "pytest", "-q", "-x", "-n", "0", "-p", "no:cacheprovider", *tests)


def outcome(tree: Path, mutant: Mutant) -> str:
    """Apply a mutant, run its tests, and take it back: "killed", "SURVIVED", or why it cannot be tried."""
    path, is_c = tree / mutant.file, mutant.file.endswith((".c", ".h"))
    original = path.read_text() if path.is_file() else ""
    if original.count(mutant.old) != 1:
        return f"NOT APPLIED: {mutant.file} contains {mutant.old!r} {original.count(mutant.old)} times, not once"
    path.write_text(original.replace(mutant.old, mutant.new))
    try:
        if is_c and run(tree, "-c", SETUP, mutant.file.partition("/")[0], "build_ext", "--inplace"):
            return "NOT BUILT"
        code = run_tests(tree, [mutant.tests])
        if code < 0:  # a signal: the mutant has made the tests crash
            return "killed"
        return {0: "SURVIVED", 1: "killed"}.get(code, f"NOT RUN: pytest ended with {code}")
    finally:
        path.write_text(original)
        for library in LIBRARIES if is_c else ():
            shutil.copy2(ROOT / library, tree / library)


def main(names: list[str]) -> int:
    """Try the mutants with these names, or all."""
    chosen = [mutant for mutant in MUTANTS if mutant.name in names or not names]
    if unknown := set(names) - {mutant.name for mutant in chosen}:
        sys.exit(f"no mutants: {', '.join(sorted(unknown))}")
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        tree = Path(folder)
        copy_tree(tree)
        if code := run_tests(tree, sorted({mutant.tests for mutant in chosen})):
            sys.exit(f"pytest ended with {code} without any mutant")
        outcomes = []
        for mutant in chosen:
            start = time.monotonic()
            outcomes.append(outcome(tree, mutant))
            print(f"{time.monotonic() - start:5.0f} s  {mutant.name}: {outcomes[-1]}", flush=True)
    print(f"{outcomes.count('killed')} of {len(outcomes)} killed")
    return int(outcomes.count("killed") < len(outcomes))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
