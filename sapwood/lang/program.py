"""Programs: functions over a state, and the ways to run them.

A plain function runs in a thread and blocks where it reads a value; an ``async def`` function runs on the event loop. Either can
be run by a blocking call, from asyncio, as a stream, or over many rows.
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, overload

from sapwood.lang.backends.base import Backend
from sapwood.lang.batch import Batch, Row
from sapwood.lang.defaults import backend_or_default
from sapwood.lang.errors import ProgramError, UntraceableError
from sapwood.lang.interpreter import Interpreter
from sapwood.lang.nodes import OPTION_NAMES, GenOptions, check_options
from sapwood.lang.state import State, _at_once
from sapwood.lang.trace import TRACING, Trace, Tracer, Unknown

_LEAST_PREFIX = 64
"""Characters that a prefix has at least, if it is computed before a batch."""
_OF_RUNS = ("backend", "stream")
_RENAMED = {"max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens"}


class Program:
    """A function whose first argument is the state.

    Calling it runs it; inside of a trace it is traced. The arguments of a run are the function's own, and sampling options for
    all its ``gen`` nodes: those of :class:`~sapwood.lang.nodes.GenOptions`, ``max_new_tokens`` too.

    Args:
        func: The function.
        speculates: See :func:`function`.
        bound: Arguments that are given already.

    Raises:
        TypeError: The function has no argument for the state, or one that a run cannot give by its name.
    """

    def __init__(
        self, func: Callable[..., Any], speculates: int | None = None, bound: Mapping[str, Any] | None = None
    ) -> None:
        names = list(inspect.signature(func).parameters)
        if not names:
            raise TypeError(f"{func.__qualname__} has no argument: the first of a program is its state")
        for each in list(inspect.signature(func).parameters.values())[1:]:
            if each.kind not in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY) or each.name in _OF_RUNS:
                why = "run has one of this name" if each.name in _OF_RUNS else "a program's arguments are given by name"
                raise TypeError(f"{func.__qualname__} cannot have the argument {str(each)!r}: {why}")
        self.func = func
        self.arg_names = names[1:]
        self._signature = inspect.signature(func)
        self._speculates = speculates
        self._bound = dict(bound or {})
        self._is_async = inspect.iscoroutinefunction(func)
        self.__doc__, self.__name__ = func.__doc__, func.__name__

    def bind(self, **arguments: Any) -> Program:
        """The same program with some of its arguments given. Raises TypeError if it has no such argument."""
        unknown = [name for name in arguments if name not in self.arg_names]
        if unknown:
            raise TypeError(f"{self.__name__} has no argument {unknown[0]!r}")
        return Program(self.func, self._speculates, {**self._bound, **arguments})

    # One run.

    def run(self, *args: Any, backend: Backend | None = None, stream: bool = False, **arguments: Any) -> State:
        """Runs it, and returns its state when it has ended.

        Args:
            args: The function's arguments after the state.
            backend: Where it runs; None: the one of ``set_default_backend``.
            stream: Return at once: ``state.text_iter()`` gives the text as it comes.
            arguments: The function's arguments by name, and sampling options.

        Raises:
            ProgramError: A node failed; of a stream it is raised by its state.
            TypeError, ValueError: An argument or option is wrong, or there is no backend.
        """
        tracer = TRACING.get()
        if tracer is not None:
            return self._trace_call(tracer, args, arguments)
        given, defaults = self._split(args, arguments)
        backend = backend_or_default(backend)
        _refuse_in_loop()
        loop = backend.loop.get()
        state = self._state(backend, loop, defaults, streams=stream)
        if stream:
            asyncio.run_coroutine_threadsafe(self._run_quietly(state, given), loop)
            return State(state._executor, outside=True)
        if self._is_async:
            backend.loop.wait(self._run(state, given))
        else:
            self._run_here(state, given, backend)
        return state

    async def arun(self, *args: Any, backend: Backend | None = None, **arguments: Any) -> State:
        """:meth:`run` for asyncio. Cancelling it cancels the requests under way."""
        given, defaults = self._split(args, arguments)
        state = self._state(backend_or_default(backend), asyncio.get_running_loop(), defaults)
        await self._run(state, given)
        return state

    def stream(self, *args: Any, backend: Backend | None = None, **arguments: Any) -> State:
        """``run(..., stream=True)``."""
        return self.run(*args, backend=backend, stream=True, **arguments)

    def astream(self, *args: Any, backend: Backend | None = None, **arguments: Any) -> State:
        """The same for asyncio: begins the run on the running loop and returns its state, for ``text_async_iter``."""
        given, defaults = self._split(args, arguments)
        loop = asyncio.get_running_loop()
        state = self._state(backend_or_default(backend), loop, defaults, streams=True)
        outside = State(state._executor, outside=True)
        outside._task = loop.create_task(self._run_quietly(state, given))  # type: ignore[attr-defined]
        return outside

    def __call__(self, *args: Any, **arguments: Any) -> State:
        return self.run(*args, **arguments)

    # Many runs.

    def run_batch(
        self,
        rows: Iterable[Mapping[str, Any] | Sequence[Any]],
        *,
        backend: Backend | None = None,
        concurrency: int = 64,
        progress_bar: bool = False,
        journal: str | Path | None = None,
        errors: str = "raise",
        cache_prefix: bool = True,
        num_threads: int | str | None = None,
        **options: Any,
    ) -> list[State]:
        """Runs it for each row; the states are in the rows' order.

        Args:
            rows: The arguments of each run, by name or in order.
            backend: Where they run.
            concurrency: So many rows are under way at a time.
            progress_bar: Whether a line on the error output shows how far it is.
            journal: A file that gets each row as it ends. A later call with the same program, rows and file takes them from
                there, also after a crash, and runs the others.
            errors: ``raise``: the first row that fails ends the batch. ``return``: its state has the ``error()``.
            cache_prefix: Whether the text that all rows begin with is computed once before them.
            num_threads: SGLang's name of ``concurrency``; "auto" is the default.
            options: Sampling options for all rows.

        Raises:
            ProgramError: A row failed; the message says which.
            UnsupportedError: The backend cannot do what a trace shows before the first node that a run decides; no row ran.
            ValueError: An option is wrong, or the journal is of another program or of other rows.
        """
        backend = backend_or_default(backend)
        _refuse_in_loop()
        if isinstance(num_threads, int):
            concurrency = num_threads
        return backend.loop.wait(
            self.arun_batch(
                rows,
                backend=backend,
                concurrency=concurrency,
                progress_bar=progress_bar,
                journal=journal,
                errors=errors,
                cache_prefix=cache_prefix,
                **options,
            )
        )

    async def arun_batch(
        self,
        rows: Iterable[Mapping[str, Any] | Sequence[Any]],
        *,
        backend: Backend | None = None,
        concurrency: int = 64,
        progress_bar: bool = False,
        journal: str | Path | None = None,
        errors: str = "raise",
        cache_prefix: bool = True,
        **options: Any,
    ) -> list[State]:
        """:meth:`run_batch` for asyncio."""
        if errors not in ("raise", "return"):
            raise ValueError(f"errors is 'raise' or 'return', not {errors!r}")
        if concurrency < 1:
            raise ValueError(f"concurrency is at least 1, not {concurrency}")
        backend = backend_or_default(backend)
        if isinstance(rows, Mapping):
            raise TypeError("rows is a list of rows, not one row")
        arguments = [self._row(index, row) for index, row in enumerate(rows)]
        defaults = self._options(options)
        if arguments:
            trace = self._traced(backend, {}, defaults, only_prefix=True)
            if cache_prefix and len(arguments) > 1:
                await self._warm(backend, trace)

        async def run(row: Row, state: State) -> None:
            await self._run(state, row.arguments)

        def begin() -> State:
            return self._state(backend, asyncio.get_running_loop(), defaults)

        name = f"{self.func.__module__}.{self.func.__qualname__}"
        rows_of = [Row(index, each) for index, each in enumerate(arguments)]
        return await Batch(name, begin, run, concurrency, progress_bar, journal, errors).run(rows_of, defaults)

    # Without a run.

    def trace(self, *, backend: Backend | None = None, only_prefix: bool = False, **arguments: Any) -> Trace:
        """The nodes of the program, as far as they are known without running it; arguments may be left out.

        Raises:
            UnsupportedError: The backend cannot do one of them.
        """
        given = {name: value for name, value in arguments.items() if name in self.arg_names}
        options = {name: value for name, value in arguments.items() if name not in self.arg_names}
        return self._traced(backend_or_default(backend), given, self._options(options), only_prefix=only_prefix)

    def cache(self, backend: Backend | None = None) -> None:
        """Computes the text that all runs begin with, so that the server has it cached."""
        backend = backend_or_default(backend)
        _refuse_in_loop()
        backend.loop.wait(self._warm(backend, self._traced(backend, {}, {}, only_prefix=True)))

    def _traced(self, backend: Backend, given: Mapping[str, Any], defaults: GenOptions, *, only_prefix: bool) -> Trace:
        trace = Trace()
        tracer = Tracer(backend, defaults, trace, only_prefix=only_prefix)
        known = {**self._bound, **given}
        missing = {name: Unknown(name) for name in self.arg_names if name not in known}
        token = TRACING.set(tracer)
        try:
            done = self.func(State(tracer), **known, **missing)
            if inspect.iscoroutine(done):
                _at_once(done)
        except UntraceableError as end:
            trace.stopped = str(end)
        except ProgramError:
            raise
        except Exception as end:  # the program did with a value what no Unknown can do, or does not like one
            with suppress(UntraceableError):  # as its text, too, may look into one
                trace.stopped = type(end).__name__
                trace.stopped = f"{type(end).__name__}: {end}"
        finally:
            TRACING.reset(token)
        return trace

    def _trace_call(self, tracer: Tracer, args: Sequence[Any], arguments: Mapping[str, Any]) -> State:
        given, _ = self._split(args, arguments)
        state = State(tracer.fork(1)[0])
        done = self.func(state, **given)
        if inspect.iscoroutine(done):
            _at_once(done)
        return state

    async def _warm(self, backend: Backend, trace: Trace) -> None:
        prefix = trace.prefix
        if not prefix:
            return
        run = Interpreter(backend, asyncio.get_running_loop(), {})
        run.submit(*prefix)
        await run.drained()
        if len(run.text) >= _LEAST_PREFIX:
            await backend.warm(run._prompt())

    # How it runs.

    def _state(
        self, backend: Backend, loop: asyncio.AbstractEventLoop, defaults: GenOptions, *, streams: bool = False
    ) -> State:
        return State(Interpreter(backend, loop, defaults, streams=streams, speculates=self._speculates))

    async def _run(self, state: State, given: Mapping[str, Any]) -> None:
        run: Interpreter = state._executor
        try:
            if self._is_async:
                run.returned = await self.func(state, **given)
            else:
                run.returned = await _in_thread(lambda: self.func(state, **given))
            await run.finish()
        except BaseException as error:
            if isinstance(error, ProgramError):
                run.error = run.error or error  # it may be a fork's
            elif isinstance(error, Exception):
                run.fail("program", error)
            await run.cancel()
            raise
        finally:
            await run.release()

    async def _run_quietly(self, state: State, given: Mapping[str, Any]) -> None:
        """A stream's errors are its state's."""
        with suppress(Exception):
            await self._run(state, given)

    def _run_here(self, state: State, given: Mapping[str, Any], backend: Backend) -> None:
        """A plain function runs in the caller's own thread."""
        run: Interpreter = state._executor
        try:
            run.returned = self.func(state, **given)
            backend.loop.wait(run.finish())
        except BaseException:
            backend.loop.wait(run.cancel())
            raise
        finally:
            backend.loop.wait(run.release())

    # Arguments.

    def _split(self, args: Sequence[Any], arguments: Mapping[str, Any]) -> tuple[dict[str, Any], GenOptions]:
        """The function's arguments and the sampling options."""
        own = {name: value for name, value in arguments.items() if name in self.arg_names}
        options = {name: value for name, value in arguments.items() if name not in self.arg_names}
        positional = [name for name in self.arg_names if name not in self._bound]
        if len(args) > len(positional):
            raise TypeError(f"{self.__name__} takes {len(positional)} arguments after its state, not {len(args)}")
        own |= zip(positional, args, strict=False)
        given, named = {**self._bound, **own}, self._options(options)
        self._signature.bind(None, **given)  # raises TypeError that names what is missing
        return given, named

    def _options(self, options: Mapping[str, Any]) -> GenOptions:
        named = {_RENAMED.get(name, name): value for name, value in options.items() if value is not None}
        unknown = next((name for name in named if name not in OPTION_NAMES), None)
        if unknown is not None:
            raise TypeError(f"{self.__name__} has no argument {unknown!r}, and neither is it a sampling option")
        check_options(named)
        return named  # type: ignore[return-value]

    def _row(self, index: int, row: Mapping[str, Any] | Sequence[Any]) -> dict[str, Any]:
        """A row's arguments. Raises TypeError that names the row."""
        if not isinstance(row, Mapping | Sequence) or isinstance(row, str | bytes):
            raise TypeError(f"row {index} is {row!r:.60}: give arguments by name in a mapping, or in order in a tuple")
        try:
            given, options = self._split((), row) if isinstance(row, Mapping) else self._split(row, {})
        except TypeError as error:
            raise TypeError(f"row {index}: {error}") from None
        if options:
            raise TypeError(f"row {index}: {next(iter(options))!r} is an option of all rows: give it to run_batch")
        return given


@overload
def function(func: Callable[..., Any]) -> Program: ...
@overload
def function(*, num_api_spec_tokens: int | None = None) -> Callable[[Callable[..., Any]], Program]: ...
def function(
    func: Callable[..., Any] | None = None, num_api_spec_tokens: int | None = None
) -> Program | Callable[[Callable[..., Any]], Program]:
    """Makes a program of a function.

    Args:
        func: Its first argument is the state ``s``; it may be ``async def``.
        num_api_spec_tokens: A ``gen`` with a ``stop`` asks for so many tokens beyond it; later nodes take what fits. It saves
            requests where a model follows a form, with backends that complete texts.
    """
    if func is not None:
        return Program(func)
    return lambda func: Program(func, num_api_spec_tokens)


def _refuse_in_loop() -> None:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return
    raise RuntimeError("inside of an event loop, await arun or arun_batch: run would block the loop")


async def _in_thread(work: Callable[[], Any]) -> Any:
    """What ``work`` returns, from a thread of its own. A cancelled caller does not wait for it."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[Any] = loop.create_future()
    context = contextvars.copy_context()

    def tell(result: Any, error: BaseException | None) -> None:
        if done.done():
            return
        if error is not None:
            done.set_exception(error)
        else:
            done.set_result(result)

    def run() -> None:
        result, error = None, None
        try:
            result = context.run(work)
        except BaseException as failure:
            error = failure
        if not loop.is_closed():
            loop.call_soon_threadsafe(tell, result, error)

    threading.Thread(target=run, name="sapwood.lang program", daemon=True).start()
    return await done
