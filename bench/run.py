# SPDX-License-Identifier: Apache-2.0
"""Times specfused's ops beside their peers. `python bench/run.py --help`; see bench/README.md."""

import argparse
import os
import sys
import time
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parent.parent)  # the repository, so `bench` is a package

import torch  # noqa: E402

from bench import argtypes, attn, cases, commit, peers_attn, peers_commit, plot  # noqa: E402
from bench.report import OURS, Report, make_meta  # noqa: E402
from bench.timing import Harness, Yardsticks  # noqa: E402

ATTN_PEERS = (attn.SpecFusedNoPdl, *peers_attn.PEERS)
COMMIT_PEERS = (commit.SpecFusedCommitNoPdl, *peers_commit.PEERS)
PEER_NAMES = {c.name for c in (*ATTN_PEERS, *COMMIT_PEERS)}
NO_PDL = attn.SpecFusedNoPdl.name
SERVING = ("serve", "load", "rescore", "steps", "flips")  # whole engines, see bench/serve
QUICK_SECONDS = 45.0  # no new case of the quick suite starts after this


def parse(argv: list[str]) -> argparse.Namespace:
    p = argparse.ArgumentParser(prog="python bench/run.py", description=__doc__,
                                allow_abbrev=False)  # fmt: skip
    p.add_argument("--suite", choices=("quick", "attn", "commit", "all", *SERVING),
                   default="quick", help="see also --suite serve --help")  # fmt: skip
    p.add_argument("--peers", help="comma-separated names, none or all; default: all, but in the "
                   "quick suite FlashInfer only if its kernels are compiled already")  # fmt: skip
    p.add_argument("--filter", metavar="TEXT", type=argtypes.expression,
                   help="only ids that hold TEXT, or match it as regex")  # fmt: skip
    p.add_argument("--list", action="store_true", help="print the ids and end")
    p.add_argument("--json", metavar="FILE", type=argtypes.json_file,
                   help="write results, after every case")  # fmt: skip
    p.add_argument("--plot", metavar="DIR", help="draw us against bytes (needs matplotlib)")
    p.add_argument("--device", choices=("cuda", "cpu"), help="default: cuda if there is one")
    p.add_argument("--repeats", type=argtypes.count,
                   help="rounds of a case (default: 15 to 60, by time)")  # fmt: skip
    p.add_argument("--seconds", type=argtypes.seconds, help="start no new case after this many")
    args = p.parse_args(argv)
    args.device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if args.device == "cuda" and not torch.cuda.is_available():
        p.error("--device cuda needs a GPU that torch can use")
    unknown = set((args.peers or "all").split(",")) - PEER_NAMES - {"none", "all"}
    if unknown:
        p.error(f"--peers must be of {', '.join(sorted(PEER_NAMES))}, none or all, got "
                f"{', '.join(sorted(unknown))}")  # fmt: skip
    return args


def first_line(e: Exception) -> str:
    return f"{type(e).__name__}: {(str(e).splitlines() or [''])[0][:160]}"


class Runner:
    """Runs cases one by one: check, capture, time, report."""

    def __init__(self, args: argparse.Namespace, argv: list[str]):
        self.device = torch.device(args.device, 0) if args.device == "cuda" else torch.device("cpu")
        quick = args.suite == "quick"
        self.harness = Harness(self.device, args.repeats, seconds=0.5 if quick else 2.0)
        self.yard = Yardsticks(self.harness)
        self.report = Report(make_meta(self.device, argv, self.harness, self.yard), args.json)
        self.report.header()
        wanted = self._wanted(args.peers, quick)
        self.attn_classes = self._available((attn.SpecFused, *ATTN_PEERS), wanted)
        self.commit_classes = self._available((commit.SpecFusedCommit, *COMMIT_PEERS), wanted)

    def _wanted(self, text: str | None, quick: bool) -> set[str]:
        if text == "none":
            return set()
        if text == "all":
            return PEER_NAMES
        if text is not None:
            return set(text.split(","))
        if quick and self.device.type == "cuda" and not peers_attn.flashinfer_compiled():
            self.report.note(
                "flashinfer: not compiled here yet, so not in the quick suite "
                "(--peers all compiles it, about a minute)"
            )
            return {n for n in PEER_NAMES - {NO_PDL} if not n.startswith("flashinfer")}
        return PEER_NAMES - {NO_PDL} if quick else PEER_NAMES

    def _available(self, classes, wanted: set[str]) -> list:
        """Classes that can run here; each case makes its own objects, freed with the case."""
        found = []
        for cls in classes:
            if cls.name != OURS and cls.name not in wanted:
                continue
            reason = cls().available(self.device)
            if reason is None:
                found.append(cls)
            elif self.device.type == "cuda":
                self.report.note(f"{cls.name}: left out, {reason}")
        return found

    def run(self, case: cases.Case):
        if isinstance(case, cases.PlanCase):
            self._plan(case)
        elif isinstance(case, cases.AttnCase):
            self._attn(case)
        else:
            self._commit(case)

    def _check(self, case, impl, check) -> bool:
        """Runs the implementation once and compares; false: it is not timed."""
        try:
            wrong = check(impl)
        except Exception as e:  # a peer may fail in any way; it must not end the run
            wrong = first_line(e)
        if wrong is None:
            return True
        if impl.name == OURS:
            self.report.problem(f"{case.id} {impl.name}: not timed, {wrong}")
        else:
            self.report.note(f"{impl.name}: left out where it does not work, {wrong}")
        return False

    def _time(self, case, impls, sources, num_sets: int, num_bytes: int, **options):
        expected = num_bytes / self.yard.read_gbps * 1e-3
        launches = self.harness.num_launches(num_sets, expected)
        replays = {}
        for impl in impls:
            start = self.harness.eager if getattr(impl, "eager", False) else self.harness.capture
            try:
                replays[impl.name] = start(impl.launch, num_sets, launches)
            except Exception as e:  # not capturable, or out of memory
                say = self.report.problem if impl.name == OURS else self.report.note
                say(f"{case.id} {impl.name}: not timed, {first_line(e)}")
        if OURS not in replays:
            return
        if sources:
            reads = self.harness.num_launches(len(sources), expected)
            replays["t_read"] = self.yard.read_replay(sources, reads)
        times = self.harness.time(replays)
        read = times.pop("t_read").us if sources else None
        self.report.case(case, times, num_bytes, read, **options)

    def _attn(self, case: cases.AttnCase):
        data = attn.AttnData(case, self.harness)

        def check(impl) -> str | None:
            impl.prepare(data)
            data.sets[0].out.fill_(float("nan"))
            error = data.error(impl.launch(0), impl.chain(case))
            limit = attn.TOLERANCE[case.dtype]
            return None if error <= limit else f"relative error {error:.2e} > {limit:.0e}"

        impls = [cls() for cls in self.attn_classes]
        impls = [i for i in impls if i.applies(case) and self._check(case, i, check)]
        if not any(i.name == OURS for i in impls):
            return  # refused, see the problem above; peers alone are not what this bench is for
        chains = {i.name for i in impls if i.name != OURS and i.chain(case) and case.w > 1}
        missing = []
        if self.device.type == "cuda" and not any(i.name == "fa3" for i in impls):
            missing.append("fa3 not measured")
        sources = [s.storage for s in data.sets]
        shown = {name: f"{name}(chain)" for name in chains}
        self._time(
            *(case, impls, sources, len(data.sets), case.bytes), shown=shown, missing=missing
        )

    def _plan(self, case: cases.PlanCase):
        if attn.SpecFused not in self.attn_classes:
            return
        plan = attn.PlanLaunch(case, self.device)
        launches = self.harness.num_launches(1, 2.0)
        replay = self.harness.capture(plan.launch, 1, launches)
        self.report.case(case, self.harness.time({OURS: replay}), plan.bytes, None)

    def _commit(self, case: cases.CommitCase):
        data = commit.CommitData(case, self.harness)

        def check(impl) -> str | None:
            impl.prepare(data)
            wrong = data.mismatch(impl)
            return None if wrong is None else f"{wrong} differs from the tree's path"

        impls = [cls() for cls in self.commit_classes]
        impls = [i for i in impls if self._check(case, i, check)]
        if not any(i.name == OURS for i in impls):
            return
        self._time(case, impls, data.read_sources(), len(data.sets), data.bytes)

    def count_launches(self, chosen: list[cases.Case]):
        """Launches of the commit cases that were timed. After all timing: a profiler stays."""
        timed = {(c["id"], c["impl"]) for c in self.report.cases}
        for case in chosen:
            if self.device.type != "cuda" or (case.id, OURS) not in timed:
                continue
            if isinstance(case, cases.CommitCase):
                data, counts = commit.CommitData(case, self.harness, sets=2), {}
                for cls in self.commit_classes:
                    if not cls.eager and cls.name != OURS or (case.id, cls.name) not in timed:
                        continue
                    impl = cls()
                    try:
                        impl.prepare(data)
                        counts[impl.name] = commit.count_launches(impl.launch)
                    except Exception as e:  # the times stand without it
                        self.report.note(f"{impl.name}: launches not counted, {first_line(e)}")
                self.report.launches(case, counts)
                del data
                self.harness.release()


def serving_arguments(argv: list[str]) -> tuple[str, list[str]] | None:
    """A suite of whole engines and its arguments, or None for the other suites."""
    p = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    p.add_argument("--suite")
    known, rest = p.parse_known_args(argv)
    return (known.suite, rest) if known.suite in SERVING else None


def main(argv: list[str]) -> int:
    if serving := serving_arguments(argv):
        from bench.serve import arguments

        return arguments.main(*serving)
    args = parse(argv)
    chosen = cases.select(cases.suite(args.suite, args.device), args.filter)
    if args.list:
        print("\n".join(c.id for c in chosen))
        return 0
    if not chosen:
        print(f"no id of suite {args.suite} matches {args.filter}", file=sys.stderr)
        return 2
    start = time.monotonic()
    limit = args.seconds or (QUICK_SECONDS if args.suite == "quick" else float("inf"))
    torch.manual_seed(0)
    if args.device == "cpu" and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)  # a shared machine's other work would decide the times
    with torch.inference_mode():
        runner = Runner(args, argv)
        try:
            for n, case in enumerate(chosen):
                if time.monotonic() - start > limit:
                    runner.report.note(f"time is up: {len(chosen) - n} cases not run (--seconds)")
                    break
                try:
                    runner.run(case)
                    runner.harness.release()
                except Exception as e:  # the next case may work; a dead GPU context ends the run
                    runner.report.problem(f"{case.id}: {first_line(e)}")
                    runner.harness.release()
            runner.count_launches(chosen)
        except KeyboardInterrupt:
            runner.report.problem("interrupted")
        finally:
            runner.report.summary()
    if args.plot:
        print(
            plot.draw(runner.report.meta, runner.report.cases, Path(args.plot, "attn-roofline.png"))
        )
    return 1 if runner.report.problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
