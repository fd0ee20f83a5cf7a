"""A rollout worker: samples ahead, and handles the trainers' orders.

Every rollout worker makes the same sequence of collectives over the group that joins both worlds,
because it handles the same orders in the same order. In between it samples ahead: step k once the
trainers have started step k - lag. Replicas sample independently. Orders that need no pause
(receive weights, send finished responses) are handled between two tokens, at the same token on all
ranks of a replica.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self

import numpy as np
import torch
import torch.distributed as dist

from vapo_megatron.config import (
    AlgorithmConfig,
    EnvironmentConfig,
    EvaluationConfig,
    LoggingConfig,
    ModelConfig,
    ParallelConfig,
    RewardConfig,
    RolloutConfig,
    TimeoutsConfig,
)
from vapo_megatron.config.phases import Span
from vapo_megatron.data.packing import plan_of
from vapo_megatron.data.rollout import ScoredRollout
from vapo_megatron.errors import Stopped
from vapo_megatron.parallel import backend, store
from vapo_megatron.parallel.exchange import exchange, gather_summary
from vapo_megatron.parallel.health.early_stop import note_started, pending_signal
from vapo_megatron.parallel.health.watchdog import Watchdog
from vapo_megatron.parallel.offload import check_host_memory
from vapo_megatron.parallel.reduce import gather_objects, gather_objects_on
from vapo_megatron.parallel.route_exchange import exchange_routes
from vapo_megatron.parallel.worlds import Worlds
from vapo_megatron.reward.own_metrics import Sums, sums_of
from vapo_megatron.rollout.disaggregated.orders import Kind, Order, Orders
from vapo_megatron.rollout.disaggregated.staging import Staging
from vapo_megatron.rollout.dump import read_array, read_file, step_bytes
from vapo_megatron.rollout.inputs import Inputs
from vapo_megatron.rollout.partial.files import IN_FLIGHT, sampled_steps, write_files
from vapo_megatron.rollout.partial.lag import tokens_by_version
from vapo_megatron.rollout.requests import assign
from vapo_megatron.rollout.sampling import Sampling
from vapo_megatron.rollout.source import OnProgress, StepRequest
from vapo_megatron.weights.reshard.sync import WeightSync


class HandedOver(NamedTuple):
    """What a rollout worker says of the responses that it hands over."""

    tokens: Counter[int]
    """Response tokens by the version that sampled them."""
    num_prompts: int
    """That all replicas have started in the step."""
    idle: float
    """Seconds in which it had nothing to do since the latest step."""
    spans: list[Span]
    """When it sampled and judged what, since the latest step."""
    own: Sums
    """Of the verifiers' own metrics."""
    waited: float | None
    """Seconds in which it waited for its environment; None: there is none."""


class Sampled(NamedTuple):
    """A step that has been sampled, of one rollout worker."""

    scored: list[ScoredRollout]
    num_prompts: int
    """See HandedOver."""


class Server:
    """One rollout worker; a context manager."""

    def __init__(
        self,
        inputs: Inputs,
        needed: Mapping[str, int],
        *,
        seed: int,
        model: ModelConfig,
        parallel: ParallelConfig,
        rollout: RolloutConfig,
        algorithm: AlgorithmConfig,
        reward: RewardConfig,
        environment: EnvironmentConfig,
        evaluation: EvaluationConfig,
        logging: LoggingConfig,
        timeouts: TimeoutsConfig,
        verifier: object | None = None,
    ) -> None:
        """Build what sampling needs; collective over the rollout workers, beside the trainers.

        Args:
            inputs: from read_inputs.
            needed: bytes of host memory of this process by purpose, as of the trainers.
            seed, model, parallel, rollout, algorithm, reward, environment, evaluation, logging,
                timeouts: of the run, with rollout.placement=disaggregated.
            verifier: see StepTrainer.
        """
        self._rollout, self._algorithm, self._logging = rollout, algorithm, logging
        torch.manual_seed(seed)
        worlds = backend.initialize_distributed(parallel.timeout_seconds, rollout.num_processes)
        assert worlds is not None and worlds.is_rollout_worker, "the last processes sample"
        self._worlds: Worlds = worlds
        inputs = inputs.agreed()
        self._plan = functools.partial(
            plan_of, algorithm=algorithm, parallel=parallel,
            hidden_size=inputs.shape.hidden_size, seed=seed,
        )  # fmt: skip
        self._dp_size = parallel.data_parallel_size
        self._experts_per_token = inputs.shape.experts_per_token
        self.watchdog = Watchdog(
            timeouts, Path(logging.run_dir), worlds.rank, worlds.world_size,
            lambda: bool(pending_signal()), "rollout worker",
        )  # fmt: skip
        with self.watchdog.reporting():
            self._sampling = Sampling(
                inputs, None, model=model, rollout=rollout, algorithm=algorithm, reward=reward,
                environment=environment, evaluation=evaluation, logging=logging, seed=seed,
                offload=False, verifier=verifier,
            )  # fmt: skip
            self._engine = self._sampling.engine
            remedies = ["a smaller rollout.lag"] * (rollout.lag > 0)
            remedies += ["a smaller algorithm.responses_per_step"]
            check_host_memory(needed, parallel, remedies, worlds.group)
            # With a lag, new weights arrive while older ones still sample.
            self._staging = Staging(self._engine) if rollout.lag else None
            engine = self._staging or self._engine
            self._sync = WeightSync(inputs.shape, None, model, rollout, engine, worlds)
            self._orders = Orders(store.own_connection(), worlds)
            size = rollout.tensor_model_parallel_size
            self._replica = dist.new_subgroups(size, backend="gloo")[0] if size > 1 else None
        self._next = self._first = self._loaded = 0
        """Steps, from 0: to be sampled next, to be trained on first, and to be sampled first."""
        self._versions: dict[int, int] = {}
        """Policy version per step that has started."""
        self._finished: dict[int, Sampled] = {}
        """Responses by step, until a later one begins."""
        self._idle_seconds = 0.0
        self._spans: list[Span] = []
        self._is_over = False

    def serve(self) -> None:
        """Sample and answer orders until the trainers end the run."""
        note_started()
        while not self._is_over:
            may_sample = self._may_sample()
            order = self._agreed_head() if may_sample else self._wait()
            if order is not None and self._can_answer(order, is_idle=True):
                self._answer(order)
            else:
                assert may_sample, f"nothing to sample, and {order} cannot be answered"
                self._sample()

    def _wait(self) -> Order:
        start = time.monotonic()
        with self.watchdog.waiting():
            order = self._orders.wait()
        self._idle_seconds += time.monotonic() - start
        return order

    def _agreed_head(self) -> Order | None:
        """Return the order that is next, if one rank of the replica has seen it."""
        order = self._orders.head()
        if self._replica is None:
            return order
        seen = torch.tensor(int(order is not None))
        dist.all_reduce(seen, dist.ReduceOp.MAX, group=self._replica)
        return self._orders.wait() if seen else None

    def _may_sample(self) -> bool:
        step = self._next
        return step < self._algorithm.num_steps and self._origin(step) in self._versions

    def _origin(self, step: int) -> int:
        """Return the step whose weights sample a step."""
        return max(self._first, step - self._rollout.lag)

    def _sample(self) -> None:
        """Sample the next step with its version, and answer orders meanwhile."""
        step, version = self._next, self._versions[self._origin(self._next)]
        self.watchdog.step = step + 1
        self._load(version)
        if self._staging is not None:
            self._staging.forget_before(version)
        asked = StepRequest(step, version, self.phase, has_time=self._goes_on)
        scored = self._sampling.share(asked)
        if scored is not None:
            self._finished[step] = Sampled(scored, self._sampling.num_prompts(step))
            self._next += 1
            self._orders.report(f"sampled/{step}")

    def _load(self, version: int) -> None:
        if self._staging is not None:
            self._staging.load(version)

    def _goes_on(self) -> bool:
        """Answer what can be answered between two tokens; False: the run is over."""
        while not self._is_over and (order := self._agreed_head()) is not None:
            if not self._can_answer(order, is_idle=False):
                break
            self._answer(order)
        return not self._is_over

    def _can_answer(self, order: Order, *, is_idle: bool) -> bool:
        needs = _HANDLERS[order.kind].needs
        match needs:
            case "nothing":
                return True
            case "staging":
                return is_idle or self._staging is not None
            case "idle":
                return is_idle
        return all(step in self._finished for step in needs(self, order.fields))

    def _in_flight(self, done: int) -> range:
        """Return the steps whose responses a checkpoint after `done` steps has.

        Those that older versions sample than the checkpoint's, and those that the run began with:
        they may be more, if its lag was greater then.
        """
        stop = max(done + self._rollout.lag, self._loaded)
        return range(done, min(stop, self._algorithm.num_steps))

    def _answer(self, order: Order) -> None:
        # An evaluation is work of its own; everything else is done once the trainers take part.
        waits = order.kind != "evaluate"
        with self.watchdog.waiting() if waits else contextlib.nullcontext():
            _HANDLERS[order.kind].answer(self, number=order.number, **order.fields)
        self._orders.advance()

    def _start(self, number: int, data: dict[str, Any], done: int, checkpoint: str | None) -> None:
        """Continue where the trainers do, with the responses that their checkpoint has."""
        self._sampling.load_state_dict(data)
        self._first = self._next = done
        root = None if checkpoint is None else Path(checkpoint)
        for directory in [] if root is None else sampled_steps(root):
            step = self._next
            self._finished[step] = self._read(directory)
            self._sampling.skip(step, self._finished[step].num_prompts)
            self._orders.report(f"sampled/{step}")
            self._next += 1
        self._loaded = self._next
        self._sampling.load_groups(self._next, root)
        sampling = self._sampling
        known = sampling.labels, sampling.note, sampling.prompts.left_out
        gather_objects(known, self._worlds.group)

    def _read(self, directory: Path) -> Sampled:
        """Return this rollout worker's part of a step that a checkpoint has."""
        files = sorted(directory.glob("*.safetensors"))
        parts = assign(len(files), self._engine.num_replicas)
        scored: list[ScoredRollout] = []
        for i in parts[self._engine.replica] if self._engine.keeps_rollouts else ():
            scored += read_file(files[i])
        scored.sort(key=lambda item: item.rollout.position)
        started = read_array(files[0], "drawn")
        return Sampled(scored, self._algorithm.num_prompts if started is None else int(started[0]))

    def _receive(self, number: int, version: int) -> None:
        self._sync.publish((), version)

    def _want(self, number: int, step: int, version: int) -> None:
        """Note that a step begins; those before it are trained on."""
        self._versions[step] = version
        self._finished = {s: sampled for s, sampled in self._finished.items() if s >= step}

    def _hand_over(self, number: int, step: int) -> None:
        """Send a step's responses to the ranks that train on them."""
        group, (scored, num_prompts) = self._worlds.group, self._finished[step]
        tokens, own = tokens_by_version(scored), sums_of(scored)
        waited = self._sampling.take_idle_seconds()
        told = HandedOver(tokens, num_prompts, self._idle_seconds, self._spans, own, waited)
        gather_objects(told, group)
        self._idle_seconds, self._spans = 0.0, []
        most = self._logging.rollout_groups * self._algorithm.group_size
        gather_objects_on(
            0, [item.without_routes() for item in scored if item.rollout.first < most], group
        )
        summary = gather_summary(scored, self._algorithm.responses_per_step, group)
        plan = self._plan(summary.sequence_lengths, step=step)
        wanted = [plan.positions(dp_rank) for dp_rank in range(self._dp_size)]
        exchange(scored, summary, wanted, None, group)
        if self._algorithm.router_replay == "r3":
            exchange_routes(scored, summary, wanted, (), self._experts_per_token, None, group)

    def _evaluate(self, number: int, version: int) -> None:
        """Judge the held-out problems under a version, unless the trainers give it up."""
        self._load(version)
        found = None
        with contextlib.suppress(Stopped):
            found = self._sampling.evaluate(
                version, self.phase, lambda: not self._orders.is_cancelled(number)
            )
        self._orders.report(f"evaluated/{number}")
        gather_objects(found, self._worlds.group)

    def _save(self, number: int, directory: str, done: int) -> None:
        """Write what this rollout worker has in flight into a checkpoint after `done` steps."""
        steps = self._in_flight(done)
        # A replica may be at a later step already, or have made it.
        groups = self._sampling.group_files(steps.stop)
        files = itertools.chain((self._file(s) for s in steps if self._finished[s].scored), groups)
        gather_objects(write_files(Path(directory), files), self._worlds.group)

    def _file(self, step: int) -> tuple[str, bytes]:
        """Return name in a checkpoint and content of this rollout worker's responses of a step."""
        scored, num_prompts = self._finished[step]
        file = f"{IN_FLIGHT}/step_{step + 1:06d}/rank_{dist.get_rank():05d}.safetensors"
        return file, step_bytes(
            scored,
            step + 1,
            num_responses=self._algorithm.responses_per_step,
            group_size=self._algorithm.group_size,
            more={"drawn": np.array([num_prompts], np.int64)},
        )

    def _dump(self, number: int, root: str, step: int, keep_last: int) -> None:
        algorithm, scored = self._algorithm, self._finished[step].scored
        self._sampling.dump(Path(root), step, scored, algorithm, keep_last=keep_last)
        gather_objects(None, self._worlds.group)

    def _end(self, number: int) -> None:
        self._is_over = True

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[OnProgress]:
        """Enter a phase; yields a callback that shows nothing."""
        begin = time.time()
        with self.watchdog.phase(name):
            yield lambda done, total, part="": None
        self._spans.append(Span(name, self.watchdog.step, begin, time.time()))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, where: object) -> None:
        if error is not None:
            self.watchdog.fail(error)
        with self.watchdog.reporting():
            self._sampling.close()
            if error is None:
                # No process leaves while others may still communicate with it.
                dist.barrier(group=self._worlds.group)
            self._worlds.close()
            dist.destroy_process_group()
        self.watchdog.close()


class Handler(NamedTuple):
    """How a kind of order is answered."""

    answer: Callable[..., None]
    """A method of Server; takes the order's number and fields."""
    needs: Literal["nothing", "staging", "idle"] | Callable[[Server, dict[str, Any]], Iterable[int]]
    """What must be so first: that nothing is sampled (staging: or that weights can wait), or that
    these steps, by the order's fields, have been sampled."""


def _its_step(server: Server, fields: dict[str, Any]) -> Iterable[int]:
    return (fields["step"],)


_HANDLERS: dict[Kind, Handler] = {
    "start": Handler(Server._start, "idle"),
    "publish": Handler(Server._receive, "staging"),
    "want": Handler(Server._want, "nothing"),
    "take": Handler(Server._hand_over, _its_step),
    "evaluate": Handler(Server._evaluate, "idle"),
    "save": Handler(Server._save, lambda server, fields: server._in_flight(fields["done"])),
    "dump": Handler(Server._dump, _its_step),
    "end": Handler(Server._end, "nothing"),
}
