"""The scheduler process: loads the model, then runs the event loop. Started by the gRPC front (``supervisor.py``).

It knows no gRPC: nothing but the scheduler and the model takes its interpreter's time.
"""

from __future__ import annotations

import argparse
import importlib.util
import logging
import os
import socket
import sys
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Protocol

import msgspec

from sapwood_common.errors import ConfigError
from sapwood_common.network.keyed_ways import accept
from sapwood_common.telemetry.logs import setup_logging
from sapwood_worker.config import WorkerConfig
from sapwood_worker.core.cache.hierarchical import HierarchicalCache
from sapwood_worker.core.child import Task, add_arguments, begin, load, spare_the_collector
from sapwood_worker.core.event_loop import EventLoop, Operations, Profiler
from sapwood_worker.core.expert_balancing import ExpertBalancer, ExpertWatch
from sapwood_worker.core.group.group_runner import DataParallelRunner, GroupRunner
from sapwood_worker.core.loaded_runner import DraftRunner, LoadedRunner
from sapwood_worker.core.lora_reads import LoraReads
from sapwood_worker.core.observers import (
    AllReduceWatch,
    CrashDump,
    Observer,
    PictureWatch,
    StageLog,
    StepClock,
    Watchdog,
)
from sapwood_worker.core.scheduler.config import SchedulerConfig, SpeculateName
from sapwood_worker.core.scheduler.rank_planner import RankPlanner
from sapwood_worker.core.scheduler.scheduler import Scheduler
from sapwood_worker.core.scheduler.speculation.model_drafter import DraftModel
from sapwood_worker.core.tiering import Tiering, TiersOfRanks, measure_token_seconds
from sapwood_worker.core.weight_updates import WeightUpdates
from sapwood_worker.ipc.liveness import PROGRESS_FILE, Heartbeat
from sapwood_worker.ipc.messages import Failed, OrphanedError, Ready, StagedChannel, ZmqChannel, stages_are_logged
from sapwood_worker.ipc.rank import exit_reason
from sapwood_worker.model.grammar.backend import GrammarBackend, GrammarNeeds
from sapwood_worker.model.grammar.registry import make_backend
from sapwood_worker.records.grammar_state import MaskFiller
from sapwood_worker.records.model_info import ModelInfo
from sapwood_worker.records.ranks import ALONE, Place, Waits
from sapwood_worker.records.step import RankGoneError, RankLostError

logger = logging.getLogger(__name__)

_SWITCH_SECONDS = 2e-4
"""Seconds after which a thread gives Python's lock to another that waits for it; Python's default is 5 ms. The loop that launches
steps would wait for so long, again and again, for threads that read pages or answer reads."""
_COMING_SECONDS = 120.0
"""Seconds that ranks of other hosts get to come for their steps, before they load anything."""


class RunnerFactory(Protocol):
    """Makes the runner from the configuration: all of the model, or the part of a place in a group."""

    def __call__(self, config: WorkerConfig, place: Place = ALONE) -> LoadedRunner: ...


def build_scheduler(
    config: WorkerConfig,
    info: ModelInfo,
    tiers: Sequence[HierarchicalCache] = (),
    masks: Callable[[], MaskFiller] | None = None,
    draft: DraftRunner | None = None,
) -> Scheduler | RankPlanner:
    """The scheduler for a loaded model, and the one that drafts for it.

    Args:
        config: The worker's configuration.
        info: The model's.
        tiers: The KV cache's lower tiers: of each rank that has requests of its own; empty: there are none.
        masks: Makes what fills grammar masks, which does so for one scheduler; None: no requests with a grammar come.
        draft: Runs a model that drafts.
    """
    max_running = config.max_running or info.max_running
    drafter = None
    if draft is not None:
        head = config.speculate.startswith(("eagle:", "mtp"))
        most = max(max_running, draft.info.max_step_tokens)
        drafter = DraftModel(draft, draft.info.context_length, most, config.speculate.partition(":")[0], int(head))
    settings = SchedulerConfig(
        page_size=info.page_size,
        num_pages=info.num_pages,
        context_length=info.context_length,
        eos_token_ids=frozenset(info.eos_token_ids),
        max_running=max_running,
        max_waiting=config.max_waiting,
        max_step_tokens=config.max_step_tokens or info.max_step_tokens,
        step_seconds=config.step_ms / 1000,
        policy=config.policy.name,
        starved_after=config.policy.starved_after,
        prefix_cache=config.prefix_cache.on and not info.encodes,
        whole_prompts=info.encodes,
        whole_pictures=info.pictures is not None and info.pictures.whole,
        picture_tokens=config.pictures.step_tokens or config.max_step_tokens or info.max_step_tokens,
        eviction=config.prefix_cache.eviction,
        kv_events=True,
        conservativeness=config.conservativeness,
        jump_forward=config.structured_output.jump_forward,
        speculate=_speculate(config) if info.generates else "off",
        windows=info.windows,
        states=info.states,
        micro_batches=info.micro_batches,
        micro_batches_from=info.micro_batches_from,
        chained=info.chained and config.overlap,
        lora_slots=info.lora_slots,
    )
    ranks = info.attention_ranks
    schedulers = [
        Scheduler(settings, below, masks=None if masks is None else masks(), drafter=drafter)
        for below in tiers or (None,) * ranks
    ]
    return schedulers[0] if ranks == 1 else RankPlanner(settings, schedulers)


def build_tiers(config: WorkerConfig, runner: LoadedRunner) -> Tiering | TiersOfRanks | None:
    """The tiers below the device's pages; None: there are none. Raises as :class:`Tiering`."""
    if runner.host_pool is None or not config.prefix_cache.on:
        return None
    tiers = Tiering if runner.info.attention_ranks == 1 else TiersOfRanks
    return tiers(config, runner, runner.host_pool, measure_token_seconds(config, runner))


def _speculate(config: WorkerConfig) -> SpeculateName:
    """Whether to draft: with a model, where it pays."""
    name = config.speculate.partition(":")[0]
    return "off" if name == "off" else "prefix" if name == "prefix" else "auto"


def build_grammars(config: WorkerConfig, runner: LoadedRunner) -> GrammarBackend | None:
    """Makes the grammar backend, unless the runner has no vocabulary."""
    if runner.vocabulary is None:
        return None
    info = runner.info
    needs = GrammarNeeds(runner.vocabulary, info.vocab_size, info.eos_token_ids, config.structured_output.timeout)
    return make_backend(config.structured_output.backend, needs)


def _described(runner: LoadedRunner, speculate: str, fingerprint: bytes) -> ModelInfo:
    """Describes the model to routers and clients: all ranks together, the vocabulary, the drafter and the layout of its pages."""
    info, ranks = runner.info, runner.info.attention_ranks
    info = msgspec.structs.replace(
        info,
        num_pages=ranks * info.num_pages,
        max_running=ranks * info.max_running,
        speculate=speculate,
        page_fingerprint=fingerprint,
    )
    if runner.vocabulary is None:
        return info
    return msgspec.structs.replace(
        info,
        vocabulary_fingerprint=runner.vocabulary.fingerprint,
        special_tokens=runner.vocabulary.special_names,
    )


def main() -> int:
    """Entry point; the exit code is 0 after an orderly shutdown, 1 if it could not start."""
    parser = argparse.ArgumentParser(description="The scheduler process of a worker; started by sapwood_worker.")
    add_arguments(parser)
    parser.add_argument("--followers", default="", help="File descriptors of the sockets to the other ranks.")
    parser.add_argument("--rendezvous", required=True, help="Where all ranks meet.")
    parser.add_argument("--store", type=int, help="File descriptor of the socket that listens there.")
    parser.add_argument("--steps", type=int, help="That of the socket at which ranks of other hosts get their steps.")
    arguments = parser.parse_args()
    task = begin(arguments)
    config = task.config
    setup_logging("scheduler", config.log_level, config.log_format)
    channel = ZmqChannel(arguments.folder, arguments.parent)
    heartbeat = Heartbeat(arguments.folder / PROGRESS_FILE)
    try:
        runner = _make_runner(arguments, task, heartbeat.waits)
        tiering = build_tiers(config, runner)
        grammars = build_grammars(config, runner)
        masks = None if grammars is None else grammars.masks
        tiers = () if tiering is None else tiering.caches
        scheduler = build_scheduler(config, runner.info, tiers, masks, runner.draft)
    except Exception as error:
        if not isinstance(error, ConfigError):
            logger.exception("the model could not be loaded")
        channel.send(Failed(str(error) or type(error).__name__))
        channel.close()
        return 1
    spare_the_collector()
    sys.setswitchinterval(_SWITCH_SECONDS)
    speculate, fingerprint = (
        config.speculate if scheduler.speculates else "off",
        b"" if tiering is None else tiering.fingerprint,
    )
    channel.send(Ready(_described(runner, speculate, fingerprint)))
    dump = None if config.crash_dump_folder is None else CrashDump(config.crash_dump_folder, runner.info)
    observers: list[Observer] = [] if dump is None else [dump]
    staged = stages_are_logged()
    try:
        observers += _observers(
            config, runner, Watchdog(arguments.folder / PROGRESS_FILE, config.watchdog_timeout.seconds)
        )
        loop = EventLoop(
            scheduler,
            runner,
            StagedChannel(channel) if staged else channel,
            grammars,
            Operations(scheduler, _profiler()),
            tiering,
            LoraReads(runner, scheduler),
            WeightUpdates(runner, scheduler),
            runner.check_pictures,
            observers=[*observers, StageLog()] if staged else observers,
            overlap=config.overlap,
        )
        loop.run()
        if grammars is not None:
            grammars.close()
    except OrphanedError:
        logger.error("the gRPC front is gone")
        return 1
    except RankLostError as error:
        logger.error("%s", error, exc_info=error.__cause__)
        if not isinstance(error, RankGoneError):
            exit_reason(arguments.folder, 0).write_text(str(error))
        channel.close()
        sys.stderr.flush()
        os._exit(1)  # nothing waits for exchanges that will never end
    except Exception as error:
        if dump is not None:
            dump.write(error, scheduler.in_flight(), scheduler.load())
        raise
    channel.close()
    return 0


def _observers(config: WorkerConfig, runner: LoadedRunner, watchdog: Watchdog) -> list[Observer]:
    """The observers of each round of the loop."""
    observers: list[Observer] = [watchdog, StepClock()]
    if runner.experts is not None:
        balancer = (
            ExpertBalancer(config.tensor_parallel, config.expert_parallel.redundant)
            if config.expert_parallel.on
            else None
        )
        observers.append(ExpertWatch(runner.experts, balancer=balancer, exchanged=runner.exchanged_bytes))
    if runner.sums is not None:
        observers.append(AllReduceWatch(runner.sums))
    if runner.picture_use is not None:
        observers.append(PictureWatch(runner.picture_use))
    return observers


def _make_runner(arguments: argparse.Namespace, task: Task, waits: Waits) -> LoadedRunner:
    config = task.config
    factory: RunnerFactory = load(task.runner)
    if config.ranks == 1:
        return factory(config)
    followers = [Connection(int(descriptor)) for descriptor in arguments.followers.split(",") if descriptor]
    place = Place(0, config.ranks, arguments.rendezvous, config.nnodes, arguments.store, waits)
    if arguments.steps is not None:
        with socket.socket(fileno=arguments.steps) as listener:
            elsewhere = range(place.on_node, place.size)
            followers += accept(listener, task.key, elsewhere, _COMING_SECONDS)
    runner = factory(config, place)
    return (DataParallelRunner if runner.info.attention_ranks > 1 else GroupRunner)(runner, followers, waits)


def _profiler() -> Profiler | None:
    """torch's profiler; None where torch is not installed."""
    if importlib.util.find_spec("torch") is None:
        return None
    return LazyProfiler()


class LazyProfiler:
    """Implements :class:`~sapwood_worker.core.event_loop.Profiler`; imports torch when it is first used."""

    def __init__(self) -> None:
        self._profiler: Profiler | None = None

    def start(self, folder: str) -> None:
        if self._profiler is None:
            from sapwood_worker.model.profiler import TorchProfiler

            self._profiler = TorchProfiler()
        self._profiler.start(folder)

    def stop(self) -> str:
        assert self._profiler is not None
        return self._profiler.stop()


if __name__ == "__main__":
    sys.exit(main())
