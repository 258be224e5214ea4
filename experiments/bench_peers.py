"""KDA's forward on the GPU: evotune's objects beside FlashKDA, cuDNN and flash-linear-attention.

    python experiments/build_objects.py experiments/kda_h200/objects.toml OBJECTS
    python experiments/bench_peers.py --evotune OBJECTS --out peers.json
    python experiments/bench_peers.py --evotune OBJECTS:default-production,default-plain --regimes strong,weak
    python experiments/bench_peers.py --table peers.json

Each implementation has a process of its own, which draws the same tensors from the same seeds (checksums are
compared); what is not installed is named and left out. For each problem the processes take turns, so that
drift of the device meets all alike. Per sample: outputs filled with NaN, twice the L2 read of other data,
another set of inputs than the last sample's, and a captured graph of one call replayed between two events;
plain calls between events beside it, and the time the host takes to issue one. The error against the float64
recurrence is that of the outputs that the last timed replay left, on the first, middle and last head.

Of several evotune objects the one that was fastest on problems of another seed is timed; all are reported.
Contracts: production has norm, gate and sigmoid inside the call; plain was given them done, so its times
compare with plain times alone. Regimes: log decay of -3.2 a token in the mean (strong), -0.013 (weak),
above -1e-8 (zero), and per head a memory of 4 to 1e5 tokens, log-uniform (mixed). bfloat16 in and out,
float32 states, K = V = 128.
"""

import argparse
import csv
import dataclasses
import json
import math
import queue
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from statistics import geometric_mean, median, quantiles
from typing import Any

from _peers_child import DIM, PEERS, Case

_RAGGED = (1300, 547, 2048, 963, 271, 3063)
_SHORT = (1, 7, 16, 17, 33, 63, 64, 65, 127, 129, 500, 1026)
CASES = {
    case.name: case
    for case in (
        Case("1x8192xH64", (8192,), 64, 1),
        Case("1x8192xH96", (8192,), 96, 1),
        Case("var6_8192xH64", _RAGGED, 64, None),
        Case("var6_8192xH96", _RAGGED, 96, None),
        Case("var8x1024xH96", (1024,) * 8, 96, None),
        Case("2x4096xH32", (4096,) * 2, 32, 2),
        Case("8x1024xH32", (1024,) * 8, 32, 8),
        Case("1x32768xH32", (32768,), 32, 1),
        Case("1x65536xH8", (65536,), 8, 1),
        Case("varshort_H32", _SHORT, 32, None),
    )
}
REGIMES = ("strong", "weak", "zero", "mixed")
CONTRACTS = ("production", "plain")
AGAINST = {"production": ("flashkda",), "plain": ("cudnn_dsl_direct", "cudnn_cuda")}
"""What ratios are against: the first that was measured. FlashKDA has no plain contract."""

COPY_BYTES_PER_US = 4.3e6
"""An H200's measured device-to-device copy rate, reads and writes counted."""

ERROR_LIMIT = 0.03
"""Relative L2 error from which an implementation's time is no time of KDA."""

_MOST_LOSSES = 4
_CHILD = Path(__file__).with_name("_peers_child.py")


class LostError(Exception):
    """A process that gave an error, took too long or died; `absent` when it can never serve."""

    def __init__(self, why: str, absent: bool = False) -> None:
        super().__init__(why)
        self.absent = absent


class Worker:
    """A child process that answers one request at a time. Raises LostError."""

    def __init__(self, name: str, given: Mapping[str, Any], timeout_s: float, child: Path = _CHILD) -> None:
        self.name, self._timeout_s = name, timeout_s
        command = [sys.executable, str(child), name, json.dumps(given)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._answers: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._answers.put(line)
        self._answers.put("")

    def send(self, do: str, **request: Any) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"do": do, **request}) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # the answer, or its absence, says why

    def receive(self) -> dict[str, Any]:
        try:
            line = self._answers.get(timeout=self._timeout_s)
        except queue.Empty:
            raise LostError(f"no answer in {self._timeout_s:.0f} s") from None
        if not line:
            raise LostError(f"died, exit status {self._process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        if "absent" in answer:
            raise LostError(answer["absent"], absent=True)
        if "error" in answer:
            raise LostError(answer["error"])
        return answer

    def ask(self, do: str, **request: Any) -> dict[str, Any]:
        self.send(do, **request)
        return self.receive()

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        self._reader.join()
        for stream in (self._process.stdin, self._process.stdout):
            assert stream is not None
            stream.close()


@dataclass(frozen=True)
class Plan:
    """What is measured. `given` is what each implementation's process is started with."""

    given: Mapping[str, Mapping[str, Any]]
    cases: Sequence[Case]
    regimes: Sequence[str]
    contracts: Sequence[str]
    rounds: int = 7
    samples: int = 3
    seed: int = 1
    timeout_s: float = 120.0
    deadline: float = math.inf
    child: Path = _CHILD
    truth_device: str = "cuda"


@dataclass
class Entry:
    """One implementation on one problem, as it goes."""

    worker: Worker
    found: dict[str, Any]
    graph_us: list[float] = field(default_factory=list)
    plain_us: list[float] = field(default_factory=list)

    def record(self) -> dict[str, Any]:
        record = dict(self.found)
        for name, times in (("graph", self.graph_us), ("plain", self.plain_us)):
            if times:
                record[f"{name}_us"] = median(times)
                record[f"{name}_samples_us"] = [round(us, 2) for us in times]
        if times := self.graph_us or self.plain_us:
            record["us"] = median(times)
            cuts = quantiles(times, n=5, method="inclusive") if len(times) > 1 else times * 4
            record["p20_us"], record["p80_us"] = cuts[0], cuts[3]
        return record


class Bench:
    """The processes, and the turns they are given."""

    def __init__(self, plan: Plan, stack: ExitStack) -> None:
        self._plan, self._stack = plan, stack
        self._folder = stack.enter_context(tempfile.TemporaryDirectory(dir=_memory()))
        self.records: list[dict[str, Any]] = []
        self.absent: dict[str, str] = {}
        self._losses = dict.fromkeys(plan.given, 0)
        self.about: dict[str, dict[str, Any]] = {}
        self._truth = self._start("truth", {"device": plan.truth_device})
        self._workers = {name: self._start(name, given) for name, given in plan.given.items()}
        self._truth.receive()
        for name in plan.given:
            self._greet(name)

    def _start(self, name: str, given: Mapping[str, Any]) -> Worker:
        plan = self._plan
        worker = Worker(name, {**given, "folder": self._folder}, plan.timeout_s, plan.child)
        self._stack.callback(worker.close)
        return worker

    def _greet(self, name: str) -> None:
        try:
            self.about[name] = self._workers[name].receive()
        except LostError as lost:
            self.absent[name] = str(lost)
            self._workers.pop(name).close()

    def _lose(self, name: str, lost: LostError) -> None:
        """Start the process anew for the next problem, or leave it out for good."""
        self._workers.pop(name).close()
        self._losses[name] += 1
        if lost.absent or self._losses[name] == _MOST_LOSSES:
            self.absent[name] = str(lost)
            return
        self._workers[name] = self._start(name, self._plan.given[name])
        self._greet(name)

    def run_case(self, case: Case) -> None:
        """Every regime and contract of a case; the truth is found while the first problem is prepared."""
        plan, shape = self._plan, dataclasses.asdict(case)
        self._truth.send("solve", case=shape, regimes=plan.regimes, contracts=plan.contracts, seed=plan.seed)
        checksums: dict[str, int] | None = None
        for contract in plan.contracts:
            for regime in plan.regimes:
                entries = self._prepare(case, contract, regime)
                checksums = checksums or self._truth.receive()["inputs"]
                problem = {"contract": contract, "regime": regime}
                self._choose(entries, checksums[f"{regime} {contract}"], problem)
                self._take_turns(entries)
                self._finish(entries, problem)
                self.records += [entry.record() for entry in entries]

    def _each(self, entries: Iterable[Entry], do: str, **request: Any) -> list[tuple[Entry, dict[str, Any]]]:
        """The same request to all that still stand, at once; those that fail get their error noted."""
        standing = [entry for entry in entries if "error" not in entry.found]
        for entry in standing:
            entry.worker.send(do, **request)
        return [(e, answer) for e in standing if (answer := self._answer(e)) is not None]

    def _answer(self, entry: Entry) -> dict[str, Any] | None:
        try:
            return entry.worker.receive()
        except LostError as lost:
            entry.found["error"] = str(lost)
            self._lose(entry.worker.name, lost)
            return None

    def _ask(self, entry: Entry, do: str, **request: Any) -> dict[str, Any] | None:
        if "error" in entry.found:
            return None
        entry.worker.send(do, **request)
        return self._answer(entry)

    def _prepare(self, case: Case, contract: str, regime: str) -> list[Entry]:
        entries = []
        for name, worker in self._workers.items():
            if contract in self.about[name]["contracts"]:
                found: dict[str, Any] = {"impl": name, "case": case.name}
                found |= {"contract": contract, "regime": regime}
                found["floor_us"] = floor_us(case, contract)
                entries.append(Entry(worker, found))
        shape = dataclasses.asdict(case)
        seed = self._plan.seed
        for entry, answer in self._each(
            entries, "prepare", case=shape, contract=contract, regime=regime, seed=seed
        ):
            entry.found |= answer
        return entries

    def _choose(self, entries: Sequence[Entry], checksum: int, problem: Mapping[str, str]) -> None:
        """Settle which variant of each implementation is timed: the fastest of the right ones."""
        for entry in entries:
            if "error" in entry.found:
                continue
            if entry.found["inputs"] != checksum:
                entry.found["error"] = "drew other inputs than the truth"
                continue
            variants = entry.found["variants"]
            for name in variants:
                variants[name] |= self._truth.ask("compare", path=variants[name].pop("path"), **problem)
            right = [name for name, found in variants.items() if _right(found)]
            if not right:
                entry.found["error"] = f"wrong: {_errors(variants)}"
            elif self._select(entry, right):
                entry.found |= self._ask(entry, "arm", variant=entry.found["label"]) or {}

    def _select(self, entry: Entry, right: Sequence[str]) -> bool:
        entry.found["label"] = right[0]
        if len(right) == 1:
            return True
        answer = self._ask(entry, "select", variants=right, samples=self._plan.rounds)
        if answer is None:
            return False
        for name, us in answer["us"].items():
            entry.found["variants"][name]["select_us"] = us
        entry.found["label"] = min(answer["us"], key=answer["us"].__getitem__)
        return True

    def _take_turns(self, entries: Sequence[Entry]) -> None:
        """Rounds over all implementations, each round begun by another."""
        for turn in range(self._plan.rounds):
            first = turn % max(1, len(entries))
            for entry in [*entries[first:], *entries[:first]]:
                answer = self._ask(entry, "sample", count=self._plan.samples)
                if answer is not None:
                    entry.graph_us += answer["graph_us"]
                    entry.plain_us += answer["plain_us"]
        for entry in entries:
            entry.found |= self._ask(entry, "host") or {}

    def _finish(self, entries: Sequence[Entry], problem: Mapping[str, str]) -> None:
        for entry, answer in self._each(entries, "finish"):
            entry.found |= answer | self._truth.ask("compare", path=answer["path"], **problem)
            del entry.found["path"]
            if not _right(entry.found):
                entry.found["error"] = f"wrong after timing: {_errors({'timed': entry.found})}"


def _memory() -> str | None:
    """Where outputs pass between processes: half a gigabyte at once, so not a container's small tmpfs."""
    memory = Path("/dev/shm")
    return str(memory) if memory.is_dir() and shutil.disk_usage(memory).free > 4 << 30 else None


def _right(found: Mapping[str, Any]) -> bool:
    return bool(found["finite"]) and max(found["o"], found["state"]) <= ERROR_LIMIT


def _errors(variants: Mapping[str, Mapping[str, Any]]) -> str:
    return ", ".join(f"{name} o {v['o']:.2g} state {v['state']:.2g}" for name, v in variants.items())


def floor_us(case: Case, contract: str) -> float:
    """The bytes that must move, each input and output once and both states, at the copy rate."""
    gate_bytes = 2 if contract == "production" else 4
    per_token_head = 4 * DIM * 2 + (DIM + 1) * gate_bytes
    state_bytes = 2 * len(case.lengths) * case.heads * DIM * DIM * 4
    return (case.tokens * case.heads * per_token_head + state_bytes) / COPY_BYTES_PER_US


def disagrees(record: Mapping[str, Any]) -> bool:
    """Whether a graph's time and a plain call's are more than 10 us and 15 % apart: neither is believed."""
    if "graph_us" not in record or "plain_us" not in record:
        return False
    return bool(abs(record["graph_us"] - record["plain_us"]) > 10 + 0.15 * record["graph_us"])


class Results:
    """Records as tables."""

    def __init__(self, records: Sequence[Mapping[str, Any]]) -> None:
        self._all = records
        self._by = {
            (r["contract"], r["regime"], r["case"], r["impl"]): r
            for r in records
            if "error" not in r and "us" in r
        }

    def names(self, key: str, **where: str) -> list[str]:
        """Values of `key` in order of appearance, among the records that agree with `where`."""
        picked = (r for r in self._all if all(r[k] == v for k, v in where.items()))
        return list(dict.fromkeys(r[key] for r in picked))

    def against(self, contract: str) -> str | None:
        present = {impl for found, _, _, impl in self._by if found == contract}
        return next((name for name in AGAINST[contract] if name in present), None)

    def us(self, contract: str, regime: str, case: str, impl: str) -> float | None:
        record = self._by.get((contract, regime, case, impl))
        return None if record is None else float(record["us"])

    def ratios(self, contract: str, impl: str, regimes: Sequence[str]) -> list[float]:
        """Time of what ratios are against, over the implementation's, where both were measured."""
        base = self.against(contract)
        if base is None:
            return []
        pairs = (
            (self.us(contract, regime, case, base), self.us(contract, regime, case, impl))
            for regime in regimes
            for case in self.names("case", contract=contract)
        )
        return [theirs / ours for theirs, ours in pairs if theirs and ours]

    def lead(self, contract: str, regime: str, case: str) -> float | None:
        """Time of the best peer over evotune's."""
        ours = self.us(contract, regime, case, "evotune")
        peers = [
            us
            for impl in self.names("impl", contract=contract)
            if impl != "evotune" and (us := self.us(contract, regime, case, impl))
        ]
        return min(peers) / ours if ours and peers else None

    def markdown(self) -> str:
        parts = []
        for contract in self.names("contract"):
            regimes = self.names("regime", contract=contract)
            parts += [self._times(contract, regime) for regime in regimes]
            parts.append(self._means(contract, regimes))
        return "\n\n".join([*parts, self._errors(), self._failures()]).strip() + "\n"

    def _times(self, contract: str, regime: str) -> str:
        impls = self.names("impl", contract=contract)
        rows = [["case", "floor", *impls, "evotune's object", "best peer / evotune"]]
        for case in self.names("case", contract=contract, regime=regime):
            found = [self._by.get((contract, regime, case, impl)) for impl in impls]
            floor = floor_us(CASES[case], contract) if case in CASES else math.nan
            ours = self._by.get((contract, regime, case, "evotune"))
            lead = self.lead(contract, regime, case)
            label = ours["label"] if ours else "-"
            rows.append([case, f"{floor / 1e3:.3f}", *map(_cell, found), label, _ratio(lead)])
        return f"### {contract}, {regime}: ms of device time\n\n{_table(rows)}"

    def _means(self, contract: str, regimes: Sequence[str]) -> str:
        base = self.against(contract)
        rows = [["implementation", *regimes, "all"]]
        spans = [*([regime] for regime in regimes), regimes]
        for impl in self.names("impl", contract=contract):
            found = [self.ratios(contract, impl, span) for span in spans]
            rows.append([impl, *map(_mean, found)])
        leads = [[self._leads(contract, regime) for regime in span] for span in spans]
        rows.append(["evotune against the best peer", *(_mean(sum(lead, [])) for lead in leads)])
        title = f"### {contract}: geometric mean of {base or 'a peer'}'s time over an implementation's"
        return f"{title}\n\n{_table(rows)}"

    def _leads(self, contract: str, regime: str) -> list[float]:
        cases = self.names("case", contract=contract)
        return [lead for case in cases if (lead := self.lead(contract, regime, case))]

    def _errors(self) -> str:
        rows = [["implementation", "contract", "regime", "o", "state", "worst head", "host us"]]
        for contract in self.names("contract"):
            for impl in self.names("impl", contract=contract):
                for regime in self.names("regime", contract=contract):
                    kept = (contract, regime, impl)
                    found = [r for (c, g, _, i), r in self._by.items() if (c, g, i) == kept]
                    if found:
                        worst = [f"{max(r[key] for r in found):.4f}" for key in ("o", "state", "worst_head")]
                        rows.append(
                            [impl, contract, regime, *worst, f"{median(r['host_us'] for r in found):.0f}"]
                        )
        title = "### Relative L2 error against float64, worst case; host time of a call, median over cases"
        return f"{title}\n\n{_table(rows)}"

    def _failures(self) -> str:
        lines = [
            f"- {r['impl']}, {r['contract']}, {r['regime']}, {r['case']}: {r['error']}"
            for r in self._all
            if "error" in r
        ]
        return "### Not measured\n\n" + "\n".join(lines) if lines else ""


def _cell(record: Mapping[str, Any] | None) -> str:
    if record is None:
        return "-"
    marks = ("" if "graph_us" in record else " (no graph)") + (" (?)" if disagrees(record) else "")
    return f"{record['us'] / 1e3:.3f}{marks}"


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _mean(ratios: Sequence[float]) -> str:
    return f"{geometric_mean(ratios):.2f} ({len(ratios)})" if ratios else "-"


def _table(rows: Sequence[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([lines[0], "|" + " --- |" * len(rows[0]), *lines[1:]])


CSV_COLUMNS = (
    *("contract", "regime", "case", "impl", "label", "us", "p20_us", "p80_us", "graph_us", "plain_us"),
    *("host_us", "floor_us", "o", "state", "worst_head", "error"),
)


def write(out: Path, bench: Bench, plan: Plan) -> None:
    """`out` with every record, and beside it the tables as .md and the figures as .csv."""
    facts = {"about": bench.about, "absent": bench.absent, "seed": plan.seed}
    facts |= {"rounds": plan.rounds, "samples": plan.samples, "records": bench.records}
    out.write_text(json.dumps(facts) + "\n")
    out.with_suffix(".md").write_text(Results(bench.records).markdown())
    with out.with_suffix(".csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, CSV_COLUMNS, extrasaction="ignore")
        writer.writeheader()
        writer.writerows(bench.records)


def bench(plan: Plan, out: Path | None) -> Bench:
    """Measure everything, in time; `out` is written after each case."""
    with ExitStack() as stack:
        run = Bench(plan, stack)
        for name, why in run.absent.items():
            print(f"{name} is absent: {why}", file=sys.stderr, flush=True)
        for case in plan.cases:
            if time.monotonic() > plan.deadline:
                print(f"out of time before {case.name}", file=sys.stderr, flush=True)
                break
            start = time.monotonic()
            run.run_case(case)
            print(f"{case.name}: {time.monotonic() - start:.1f} s", file=sys.stderr, flush=True)
            if out is not None:
                write(out, run, plan)
        return run


def _listed(text: str, known: Iterable[str]) -> list[str]:
    names = [name for name in text.split(",") if name]
    if unknown := sorted(set(names) - set(known)):
        raise argparse.ArgumentTypeError(f"unknown: {', '.join(unknown)}; known: {', '.join(known)}")
    return names


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )

    def some(flag: str, known: Sequence[str], default: Sequence[str]) -> None:
        parser.add_argument(
            flag, type=lambda text: _listed(text, known), default=list(default), help=", ".join(known)
        )

    some("--impls", list(PEERS), [name for name in PEERS if name != "fla"])
    some("--cases", list(CASES), list(CASES))
    some("--regimes", REGIMES, REGIMES)
    some("--contracts", CONTRACTS, CONTRACTS)
    parser.add_argument(
        "--evotune", metavar="DIR[:LABEL,…]", help="objects, their manifest and the DSL's runtime"
    )
    parser.add_argument("--rounds", type=int, default=7, help="turns of each implementation")
    parser.add_argument("--samples", type=int, default=3, help="timed replays in a turn")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=9.0, help="begin no case after so long")
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds for one request")
    parser.add_argument("--out", type=Path, help="records as JSON; tables beside it as .md and .csv")
    parser.add_argument("--table", type=Path, help="print the tables of a file written with --out, and end")
    return parser.parse_args(arguments)


def plan_of(given: argparse.Namespace) -> Plan:
    starts: dict[str, Mapping[str, Any]] = {name: {} for name in given.impls}
    if "evotune" in starts and given.evotune is None:
        del starts["evotune"]
        print("evotune is absent: no --evotune DIR", file=sys.stderr)
    elif "evotune" in starts:
        directory, _, labels = given.evotune.partition(":")
        starts["evotune"] = {
            "directory": directory,
            "labels": [label for label in labels.split(",") if label],
        }
    return Plan(
        given=starts,
        cases=[CASES[name] for name in given.cases],
        regimes=given.regimes,
        contracts=given.contracts,
        rounds=given.rounds,
        samples=given.samples,
        seed=given.seed,
        timeout_s=given.timeout,
        deadline=time.monotonic() + 60 * given.minutes,
    )


def main() -> None:
    given = parse(sys.argv[1:])
    if given.table:
        print(Results(json.loads(given.table.read_text())["records"]).markdown())
        return
    run = bench(plan_of(given), given.out)
    print(Results(run.records).markdown())


if __name__ == "__main__":
    main()
