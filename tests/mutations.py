# ruff: noqa: E501
"""Faults that the default tests of the core must find: ``python -m tests.mutations [NUMBER ...]``.

Each row changes one line of ``lightning_asyncpp/core`` in a copy of the repository. Run it after changing the core
or its tests. A row whose line does not occur exactly once is reported, too: update the row, or delete it with the code.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CORE = Path("lightning_asyncpp/core")
SECONDS = 900.0
# The first phase finds most faults, within seconds.
PHASES = (
    ["tests/core/test_weights.py", "tests/core/test_randomness.py", "tests/core/test_engine.py"],
    [
        "tests/core",
        "tests/fabric",
        "tests/nccl_rules",
        "tests/trainer/hooks",
        "tests/trainer/callbacks",
        "tests/trainer/test_fit.py",
    ],
)
# File in the core -> pairs of a line and its replacement.
MUTATIONS: dict[str, list[tuple[str, str]]] = {
    "schedule.py": [
        ("return behind * (1 + everywhere) + behind", "return behind * (1 + everywhere) + 1 + behind"),
        ("behind * (rest + 1) // num_stages", "behind * rest // num_stages"),
        ("behind = num_stages - 1 - stage", "behind = num_stages - stage"),
        (
            "return microbatches - (1 if num_replicas > 1 else 0) - (num_stages - 1)",
            "return microbatches - (num_stages - 1)",
        ),
        (
            'if slack == "exact" else depth(stage, num_stages, lookahead) + slack',
            'if slack == "exact" else depth(stage, num_stages, lookahead)',
        ),
        ("return depth(0, num_stages, lookahead) if slack", "return depth(stage, num_stages, lookahead) if slack"),
        ('return staleness == "uniform" or slack == "exact"', 'return staleness == "uniform"'),
        (
            "is_stale = self.num_stale is None or place < self.num_stale",
            "is_stale = self.num_stale is None or place <= self.num_stale",
        ),
        ("if mini_batch < self.synchronous_start or not is_stale:", "if not is_stale:"),
        ("return max(mini_batch - self.delay, self.synchronous_start)", "return max(mini_batch - self.delay, 0)"),
        ("return self.delay * self.num_stale / microbatches if self.num_stale else 0", "return self.delay"),
        ("return 1 if self.num_stale == 0 else 1 + self.delay", "return 1 + self.delay + 1"),
        (
            "return 0 if mini_batch < self.synchronous_start else self.staleness(microbatches)",
            "return self.staleness(microbatches)",
        ),
        (
            "return 0 if mini_batch < self.synchronous_start or self.num_stale == 0 else self.delay",
            "return 0 if self.num_stale == 0 else self.delay",
        ),
        (
            "return mini_batch + 1 - self.updates_behind(mini_batch)",
            "return mini_batch - self.updates_behind(mini_batch)",
        ),
        ("stage = self.stage if self.shares_with is None else self.shares_with", "stage = self.stage"),
        (
            "return not self.agrees_first and self.pipeline_rule.updates_behind(mini_batch) > 0",
            "return self.pipeline_rule.updates_behind(mini_batch) > 0",
        ),
        ("while k + 1 - oldest > depth:", "while k - oldest > depth:"),
        (
            "if num_stale and k - begin == num_stale and mini_batch",
            "if num_stale and k - begin == num_stale - 1 and mini_batch",
        ),
    ],
    "weights.py": [
        ("leaves[name].grad, before[name].grad = before[name].grad, None", "before[name].grad = None"),
        ("for use in reversed(uses)]", "for use in uses]"),
        (
            "for leaf in leaves.values():\n            leaf.grad = None\n        self._sums.clear()",
            "self._sums.clear()",
        ),
        ("        self._sums.clear()\n", ""),
        (
            "                foreach.copy_([after[name] for name in owned], [before[name] for name in owned])",
            "                pass",
        ),
        ("owned = [*self.parameters, *self.buffers]", "owned = [*self.parameters]"),
        (
            "        self._show_newest()\n        return None if self.has_masters",
            "        return None if self.has_masters",
        ),
        ("                    newest[name].copy_(parameter.detach())\n", ""),
        ("                foreach.copy_([newest[name] for name in self.parameters], masters)", "                pass"),
        ("source = older if older and version < newest else values", "source = values"),
        ("                self.parameters[name].copy_(value)", "                pass"),
        ("        sums[name].add_(gradient)", "        sums[name] = gradient.to(dtype)"),
        ("        sums[name] = gradient.to(dtype)", "        sums[name] = gradient"),
    ],
    "updates/update_queue.py": [
        ("foreach.divide_(there, step.weight)", "pass"),
        (
            'drawing_from(runner.seed, runner.device, "update", self.mesh.stage, index)',
            'drawing_from(runner.seed, runner.device, "update", index)',
        ),
        ("gradient.masked_fill_(~finite, 0.0)", "pass"),
        (
            "            self._dropped.popleft()\n            self.weights.take_gradients()",
            "            self._dropped.popleft()",
        ),
        ("            gradients[name] = None\n", "            pass\n"),
        (
            "if totals.weight and totals.finite:\n            self.last_norm",
            "if totals.weight:\n            self.last_norm",
        ),
        ('if not totals.finite and self.settings.nonfinite_gradients == "stop":', "if False:"),
        ("self.agreed.interrupted |= totals.interrupted > 0", "pass"),
        ("self.agreed.finished |= totals.finished > 0", "pass"),
        (
            "is_sound = [totals.norm] * len(self._clip_groups), totals.finite and",
            "is_sound = [totals.norm] * len(self._clip_groups), True and",
        ),
        ("weight, statistics, norms, finite and weight > 0)", "weight, statistics, norms, weight > 0)"),
        ("norm = 0.0 if self.last_norm is None else self.last_norm", "norm = 0.0"),
        ("while self.pending and self.pending[0].index < due:", "while self.pending and self.pending[0].index <= due:"),
        ("mini_batch.note = end, hyper_parameters or [], note", "mini_batch.note = end, [], note"),
        ("self._starts.append((index, first))", "self._starts.append((index, 0))"),
    ],
    "updates/mini_batch.py": [
        (
            "message = self.transport.receive_partial_sum(self.mini_batch) + message",
            "self.transport.receive_partial_sum(self.mini_batch)",
        ),
        ("weight = self.weight if mesh.is_last else 0.0", "weight = self.weight"),
        ("squares = squares if mesh.replica == 0 and finite else 0.0", "squares = squares if finite else 0.0"),
        ("return Totals(weight, norm, non_finite == 0,", "return Totals(weight, norm, True,"),
        (
            "names = set(gradients if self.reduction is None else self.tied.names) - self.tied.counted_by_others",
            "names = set(gradients if self.reduction is None else self.tied.names)",
        ),
    ],
    "engine.py": [
        ("if not self.updates.pending:", "if False:"),
        (
            "version = self.schedule.stage_rule.version(opened.index, k - opened.first)",
            "version = self.schedule.pipeline_rule.version(opened.index, k - opened.first)",
        ),
        (
            "version = self.schedule.stage_rule.version(opened.index, k - opened.first)",
            "version = self.schedule.stage_rule.version(opened.index, k)",
        ),
        ("        opened.weight += flight.weight\n", "        opened.weight = flight.weight\n"),
        ("                after_update()\n", ""),
        ("weighted = [flight for flight in flights if flight.weight]", "weighted = flights"),
        ("        if flushes:\n            yield from self._iter_backwards()\n", ""),
        ("self._drained = self.next_forward\n        return updates", "return updates"),
        (
            "        newest, weights = self.weights.newest, self.weights.for_evaluation()",
            "        newest, weights = self.weights.newest, None",
        ),
        ("        self.updates.last_norm = last_norm\n", ""),
        ('        self.evaluated = state.get("evaluated", 0)\n', ""),
        ("weights = self.weights.leaves_for_backward(flight.version)", "weights = self.weights.leaves(flight.version)"),
        (
            "                modes.enter_context(stage.modes_of_forwards())",
            "                pass",
        ),
        (
            "torch.inference_mode(False), torch.enable_grad(), preserved_generators(self.runner.device),",
            "torch.inference_mode(False), torch.enable_grad(),",
        ),
    ],
    "runner.py": [
        ('weight = 1.0 if self.hooks.loss_reduction == "sum" else flight.weight', "weight = flight.weight"),
        ("gradients += [torch.full_like(loss, flight.weight)", "gradients += [torch.full_like(loss, 1.0)"),
        (
            '        seed_generators(self.seed, self.device, "backward", self.stage.first_unit, self.mesh.replica, flight.k)\n',
            "",
        ),
        (
            "            set_generator_states(states, self.device)\n            return output",
            "            return output",
        ),
    ],
    "clipping.py": [
        ("elif not factor < 1.0:", "elif False:"),
        ("else max(norm_before, own)", "else norm_before"),
        ("else max(norm_before, own)", "else own"),
        ("norm = math.sqrt(sum_of_squares) / weight if weight else 0.0", "norm = math.sqrt(sum_of_squares)"),
    ],
    "cut/ties.py": [("groups.setdefault(tie.stages, [])", "groups.setdefault((stage,), [])")],
    "updates/reduction.py": [
        (
            "pieces.append(like.new_full((len(list(run)),), float(there)))",
            "pieces.append(like.new_full((len(list(run)),), 1.0))",
        ),
        (
            "pieces.append(like.new_zeros(like.numel()) if gradient is None",
            "pieces.append(like.new_ones(like.numel()) if gradient is None",
        ),
        (
            "                if not flag:\n                    self.gradients[name] = None\n                elif name",
            "                if name",
        ),
        ("elif name not in self._excluded_from_norm:", "else:"),
        ("own if later is None else [later, *own]", "own if later is None else [*own, later]"),
        ("            if prev is None:\n                gradients[name] = total\n", ""),
        ("tie.stages[1:] if prev is None else (prev,)", "tie.stages[1:2] if prev is None else (prev,)"),
        ("turn = mini_batch % _MOST_MINI_BATCHES * len(whole)", "turn = 0 * len(whole)"),
        ("_ALIGNMENT = 64", "_ALIGNMENT = 1"),
        (
            "for name in [n for n in backwards if n not in complete_late] + [n for n in backwards if n in complete_late]:",
            "for name in backwards:",
        ),
        ("for name in bucket.names if name not in complete_late", "for name in bucket.names"),
        ("        while len(self._sent) < len(self._buckets):\n            self._send(gradients)", "        pass"),
    ],
}


def main() -> None:
    """Try the mutations with the given numbers, or all, and exit with the number of mutations that no test found."""
    rows = [(path, *pair) for path, pairs in MUTATIONS.items() for pair in pairs]
    numbers = [int(text) for text in sys.argv[1:]] or range(len(rows))
    import lightning.pytorch.cli  # noqa: F401  # here, not once in each child

    found = [_try(number, *rows[number]) for number in numbers]
    print(f"{sum(found)} of {len(found)} found")
    sys.exit(len(found) - sum(found))


def _try(number: int, path: str, line: str, changed: str) -> bool:
    """Return whether a test fails with the changed line."""
    text = (ROOT / CORE / path).read_text(encoding="utf-8")
    if text.count(line) != 1:
        print(f"{number:3} {path}: {text.count(line)} places in place of 1 have {line!r}", flush=True)
        return False
    folder = Path(tempfile.mkdtemp())  # not a TemporaryDirectory, which processes forked by tests would delete
    copy = folder / "copy"
    shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".git", "runs", "__pycache__", "*.egg-info"))
    (copy / CORE / path).write_text(text.replace(line, changed), encoding="utf-8")
    begin = time.monotonic()
    why = next((why for phase in PHASES if (why := _failure(copy, phase))), "")
    seconds = time.monotonic() - begin
    shutil.rmtree(folder)
    print(
        f"{number:3} {why or 'NOT FOUND'} ({seconds:.0f} s): {path}: {line.strip()!r} -> {changed.strip()!r}",
        flush=True,
    )
    return bool(why)


def _failure(copy: Path, tests: list[str]) -> str:
    """Run tests in a child process until one fails; return its name, "no end" after ``SECONDS``, or "" if all pass."""
    output = copy.parent / "output"
    child = os.fork()
    if not child:
        os.setsid()
        _run(copy, tests, output)
    end = time.monotonic() + SECONDS
    while not (waited := os.waitpid(child, os.WNOHANG))[0] and time.monotonic() < end:
        time.sleep(0.2)
    if not waited[0]:
        os.killpg(child, signal.SIGKILL)
        os.waitpid(child, 0)
        return "no end"
    if not waited[1]:
        return ""
    lines = output.read_text(encoding="utf-8").splitlines()
    return next((row.partition(" - ")[0] for row in lines if row.startswith(("FAILED", "ERROR"))), lines[-1])


def _run(copy: Path, tests: list[str], output: Path) -> None:
    """Run pytest in the copy, and end this process."""
    descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.chdir(copy)
    for name in [name for name in sys.modules if name.partition(".")[0] in ("lightning_asyncpp", "tests")]:
        del sys.modules[name]
    sys.path.insert(0, str(copy))
    os.environ["PYTHONPATH"] = str(copy)  # for the processes that tests start
    code = pytest.main(["-x", "-q", "-p", "no:cacheprovider", "--timeout", "120", *tests])
    sys.stdout.flush()
    os._exit(int(code))


if __name__ == "__main__":
    main()
