"""Fixtures shared by all rooms."""

import os
import shlex
import signal
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest

from tests.browser import NEEDED, find_chromium
from tests.fault_table import Fault, table
from tests.launched import Launched
from tests.workers import WorkerPool, prepare, share

SUMMARY: pytest.StashKey[list] = pytest.StashKey()
"""Functions that return lines for the end of the run, whichever process ran their tests."""

TESTS = Path(__file__).parent
TRAINER, ENGINE = "vapo_megatron.training.loop", "tests.preloaded_engine"
LONGEST = (
    "distributed/test_matrix.py",
    "reward/test_math_cases.py",
    "rollout/disaggregated/test_worker.py",
    "reward/test_math_verifier.py",
    "test_disaggregated_wiring.py",
    "reward/test_verifiers.py",
    "cli/test_user_errors.py",
    "e2e/test_run.py",
    "gpu/test_network.py",
    "reward/test_hybrid.py",
    "cli/test_launch.py",
    "docs/test_pages.py",
    "reward/test_code_verifier.py",
    "weights/convert/test_refused.py",
    "gpu/test_tool.py",
    "test_value_stage.py",
    "weights/convert/test_convert.py",
    "e2e/test_disaggregated.py",
    "examples/test_runner.py",
    "rollout/vllm/test_engine.py",
    "parallel/health/test_watchdog.py",
    "test_step_on_a_gpu.py",
    "docs/test_your_own.py",
)


def pytest_configure(config):
    """Start with nothing to say, and with an interrupt that interrupts."""
    config.stash[SUMMARY] = []
    # A shell starts a background command with it ignored, and every child would inherit that.
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if config.option.dist != "no" and not hasattr(config, "workerinput"):
        share([TRAINER, ENGINE])
        forked = f"popen//python={shlex.quote(sys.executable)} -m tests.forked"
        config.option.tx = [forked for _ in config.option.tx]
        if not sys.dont_write_bytecode:
            rewrite_asserts(config)


def rewrite_asserts(config):
    """Put what pytest makes of the tests on disk, while the server that all share imports.

    Each of xdist's processes would make it for itself, all at one time: 10 to 20 s of a core each.
    """
    from _pytest.assertion import rewrite

    state = config.stash[rewrite.assertstate_key]
    for path in TESTS.rglob("test_*.py"):
        made = rewrite.get_cache_dir(path) / f"{path.stem}{rewrite.PYC_TAIL}"
        if rewrite._read_pyc(path, made) is None:
            made.parent.mkdir(exist_ok=True)
            source, code = rewrite._rewrite_test(path, config)
            rewrite._write_pyc(state, code, source, made)


def pytest_collection_modifyitems(items):
    """Begin with the files that take longest, so that xdist's processes end at about one time."""
    places = {name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path.relative_to(TESTS).as_posix(), len(places)))


def pytest_sessionfinish(session):
    """Hand a process's lines to the one that prints."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["summary"] = summary_lines(session.config)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node):
    """Take them."""
    lines = getattr(node, "workeroutput", {}).get("summary", [])
    node.config.stash[SUMMARY].append(lambda: lines)


def pytest_terminal_summary(terminalreporter, config):
    """Print them."""
    for line in summary_lines(config):
        terminalreporter.write_line(line)


def summary_lines(config):
    """Return what this process has to say."""
    return [line for lines in config.stash[SUMMARY] for line in lines()]


def pytest_collection_finish(session):
    """Import in the background what the chosen tests' worker processes need."""
    if not find_chromium() and any(i.get_closest_marker("browser") for i in session.items):
        raise pytest.UsageError(NEEDED)
    option = session.config.option
    asked = {name for item in session.items for name in item.fixturenames}
    with_vllm = asked & {"vllm_workers", "launch"}
    modules = [TRAINER] if with_vllm or "workers" in asked else []
    modules += [ENGINE] if with_vllm else []
    prepare([] if option.collectonly else modules, each_by_itself=option.markexpr == "slow")


@pytest.fixture(autouse=True)
def _seeded():
    """Every test starts from the same random state, on one thread; none keeps a signal."""
    import torch  # Not at the top: xdist's own process, which starts first, does without.

    torch.manual_seed(0)
    torch.set_num_threads(1)
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    handler = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


@pytest.fixture(scope="session")
def injected(request):
    """injected(fault, where) -> Fault: a row of a table at the end; a test says what came of it."""
    faults = []
    request.config.stash[SUMMARY].append(lambda: table(faults))

    def note(name, where):
        faults.append(Fault(name, where))
        return faults[-1]

    yield note
    assert not [fault for fault in faults if not fault.survived or fault.lost_updates]


def _pool():
    pool = WorkerPool()
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def workers():
    """Real gloo processes: workers.run(world_size, function, *args)."""
    yield from _pool()


@pytest.fixture(scope="module")
def vllm_workers():
    """The same for functions that use vLLM, which keeps its groups when it has failed to start."""
    yield from _pool()


@pytest.fixture(scope="session")
def launch():
    """launch(function, *args, world_size=N) -> Launched: a command's processes, vLLM in them."""
    return Launched
