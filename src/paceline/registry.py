"""Registries: one per kind of component, filled by decorators, found by discovery.

A registered component is a dataclass or a function. Its parameters *with* a default are options
that the user may set (`name:key=value,key=value`). Its parameters *without* a default are injected
by the caller of `build`. Options, `paceline list`, the tables in the documentation and the contract
tests all follow from the signature:

    @strategies.register("local-sgd")
    @dataclass
    class LocalSGD(Strategy):
        every: Annotated[int, "steps between two averages"] = 8
"""

from __future__ import annotations

import difflib
import importlib
import importlib.metadata
import importlib.util
import inspect
import pkgutil
import sys
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Generic, TypeVar

from paceline.common.shortage import out_of_memory
from paceline.common.values import convert, format_value, is_path, parse_pairs, shortened
from paceline.errors import BadRequest, PacelineError, UnknownName

if TYPE_CHECKING:
    import torch

    from paceline.callbacks.base import Callback
    from paceline.codecs.base import Codec
    from paceline.collectives.base import Collective
    from paceline.collectives.schedule import Schedule
    from paceline.faults.base import Fault
    from paceline.parallel.base import Form
    from paceline.parallel.timetable import Timetable
    from paceline.strategies.base import Strategy
    from paceline.transport.base import Transport

Make = TypeVar("Make", bound=Callable[..., Any])  # a class or a function

PLUGIN_GROUP = "paceline.plugins"


@dataclass(frozen=True)
class Spec:
    """A choice with options as the user writes it: `ps:consistency=ssp,staleness=4`,
    `imagefolder:PATH`.
    """

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)
    rest: str = ""  # the text after the colon, not parsed yet

    @classmethod
    def parse(cls, text: str) -> Spec:
        name, _, rest = text.partition(":")
        if not name.strip():
            raise BadRequest(f"{text!r} has no name: write NAME or NAME:key=value,key=value")
        return cls(name.strip(), {}, rest)

    @classmethod
    def of(cls, value: Spec | str | Mapping[str, Any]) -> Spec:
        """Make a Spec from text, from a TOML table with a `name`, or from a Spec."""
        if isinstance(value, Spec):
            return value
        if isinstance(value, str):
            return cls.parse(value)
        table = dict(value)
        if "name" not in table:
            raise BadRequest(
                f"a table of options needs a `name`, got only {', '.join(table) or 'nothing'}"
            )
        parsed = cls.parse(str(table.pop("name")))
        return cls(parsed.name, {**parsed.options, **table}, parsed.rest)

    def with_option(self, key: str, value: Any) -> Spec:
        return Spec(self.name, {**self.options, key: value}, self.rest)

    def __str__(self) -> str:
        pairs = ",".join(f"{k}={format_value(v)}" for k, v in self.options.items())
        return ":".join(part for part in (self.name, self.rest, pairs) if part)


@dataclass(frozen=True)
class Option:
    """One option of a registered component, as its signature declares it."""

    name: str
    kind: Any
    default: Any
    help: str


@dataclass(frozen=True)
class Entry(Generic[Make]):
    name: str
    make: Make
    positional: str | None = None  # the option that may follow the colon without its name
    has_options: bool = True  # False: the parameters are not the user's

    @property
    def summary(self) -> str:
        text = inspect.getdoc(self.make) or ""
        return text.split("\n\n")[0].replace("\n", " ").strip()

    @cached_property
    def options(self) -> Mapping[str, Option]:
        return options_of(self.make) if self.has_options else {}

    @cached_property
    def parameters(self) -> Mapping[str, inspect.Parameter]:
        return inspect.signature(self.make).parameters


class Registry(Generic[Make]):
    """All components of one kind, by name."""

    def __init__(self, kind: str, plural: str, package: str, *, options: bool = True) -> None:
        self.kind, self.plural, self.package, self._options = kind, plural, package, options
        self._entries: dict[str, Entry[Make]] = {}
        self._discovered = False

    def register(self, name: str, *, positional: str | None = None) -> Callable[[Make], Make]:
        def decorate(make: Make) -> Make:
            old = self._entries.get(name)
            if old is not None and old.make.__module__ != make.__module__:
                raise BadRequest(
                    f"{self.kind} {name!r} is registered twice: {old.make.__module__},"
                    f" {make.__module__}"
                )
            self._entries[name] = Entry(name, make, positional, self._options)
            if isinstance(make, type):
                make.name = name  # type: ignore[attr-defined]
            return make

        return decorate

    def discover(self) -> None:
        """Import every module of the package and every entry point, which register components."""
        if self._discovered:
            return
        self._discovered = True
        package = importlib.import_module(self.package)
        for module in pkgutil.iter_modules(getattr(package, "__path__", [])):
            importlib.import_module(f"{self.package}.{module.name}")
        for point in importlib.metadata.entry_points(group=PLUGIN_GROUP):
            point.load()

    def names(self) -> list[str]:
        self.discover()
        return sorted(self._entries)

    def __iter__(self) -> Iterator[Entry[Make]]:
        self.discover()
        return iter(self._entries[n] for n in sorted(self._entries))

    def __contains__(self, name: str) -> bool:
        self.discover()
        return name in self._entries

    def entry(self, choice: Spec | str) -> Entry[Make]:
        """The entry of a registered name; other names are imported as `package.module:factory`."""
        self.discover()
        spec = Spec.of(choice)
        if spec.name in self._entries:
            return self._entries[spec.name]
        if spec.rest and "=" not in spec.rest.split(":")[0]:
            return self._import(spec)
        hint = (
            ""
            if self.kind in {"codec", "transport"}
            else "To use your own: package.module:factory, or --plugin FILE."
        )
        raise UnknownName(self.kind, spec.name, self._entries, hint)

    def resolve(self, choice: Spec | str) -> Spec:
        """The same choice with its options checked, converted and named, as a run saves it."""
        spec = Spec.of(choice)
        entry = self.entry(spec)
        given, rest = dict(spec.options), spec.rest
        if spec.name not in self._entries:
            attribute, _, rest = spec.rest.partition(":")
        options = entry.options
        if rest:
            if entry.positional and rest.partition("=")[0].strip() not in options:
                head, pairs = _split_positional(rest, options)
                given = {
                    entry.positional: head,
                    **parse_pairs(pairs, f"{self.kind} {spec.name}"),
                    **given,
                }
            else:
                given = {**parse_pairs(rest, f"{self.kind} {spec.name}"), **given}
        checked = {key: self._check(entry, options, key, value) for key, value in given.items()}
        if spec.name not in self._entries:
            return Spec(spec.name, checked, attribute)
        return Spec(spec.name, checked)

    def build(self, choice: Spec | str, **injected: Any) -> Any:
        """Build the component with the choice's options and, of `injected`, what it asks for."""
        spec = self.resolve(choice)
        entry = self.entry(spec)
        make, parameters = entry.make, entry.parameters
        takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        wanted = {k: v for k, v in injected.items() if takes_all or k in parameters}
        try:
            return make(**{**wanted, **spec.options})
        except PacelineError:
            raise
        except (Exception, SystemExit) as error:
            if (reason := out_of_memory(error)) is None:
                said = str(error).splitlines()[0] if str(error) else "no message"
                reason = f"{type(error).__name__}: {said}"
            raise BadRequest(f"{self.kind} {spec} cannot be made: {reason}") from error

    def _check(
        self, entry: Entry[Make], options: Mapping[str, Option], key: str, value: Any
    ) -> Any:
        if key not in options:
            near = difflib.get_close_matches(key, options, n=1)
            allowed = ", ".join(options) or "none"
            guess = f" Did you mean {near[0]!r}?" if near else ""
            raise BadRequest(
                f"{self.kind} {entry.name!r} has no option {key!r}.{guess} It has: {allowed}."
            )
        return convert(value, options[key].kind, f"{self.kind} {entry.name}: {key}")

    def _import(self, spec: Spec) -> Entry[Make]:
        attribute = spec.rest.partition(":")[0].partition(",")[0]
        if "" not in sys.path and str(Path.cwd()) not in sys.path:
            sys.path.insert(0, str(Path.cwd()))
        try:
            make = getattr(importlib.import_module(spec.name), attribute)
        except (Exception, SystemExit) as error:  # importing runs the user's code
            raise UnknownName(
                self.kind,
                f"{spec.name}:{spec.rest}",
                self._entries,
                f"(Importing it failed: {error}.)",
            ) from error
        if not callable(make):
            raise BadRequest(
                f"{spec.name}:{attribute} is a {type(make).__name__}; a {self.kind} must be a class"
                " or a function"
            )
        return Entry(f"{spec.name}:{attribute}", make)


PLUGIN = "paceline_plugin_"  # the module of a plugin FILE.py has this name before FILE


def load_plugin(path: str | Path) -> None:
    """Run a file that registers components (`--plugin FILE`)."""
    if not is_path(str(path)):
        raise BadRequest(f"plugin {shortened(path)} is not a path")
    path = Path(path).resolve()
    name = f"{PLUGIN}{path.stem}"
    if name in sys.modules and getattr(sys.modules[name], "__file__", None) == str(path):
        return
    if not path.is_file():
        raise BadRequest(f"plugin {path} is not a file")
    for registry in ALL.values():
        registry.discover()  # so that a name that is taken raises here, not at its first use
    before = {registry: dict(registry._entries) for registry in ALL.values()}
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise BadRequest(f"plugin {path} is not a Python file (.py)")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        for registry, entries in before.items():
            registry._entries = entries  # remove what the failed plugin registered
        told = (
            str(error) if isinstance(error, PacelineError) else f"{type(error).__name__}: {error}"
        )
        raise BadRequest(f"plugin {path} failed while it was loaded: {told}") from error


def interactive_entries() -> list[tuple[str, Entry[Any]]]:
    """The entries that a notebook or the main script registered.

    Other processes cannot import them, so they are sent.
    """
    return [
        (r.plural, e)
        for r in ALL.values()
        for e in r._entries.values()
        if e.make.__module__ == "__main__"
    ]


def adopt_entries(entries: list[tuple[str, Entry[Any]]]) -> None:
    for plural, entry in entries:
        ALL[plural]._entries[entry.name] = entry


def _split_positional(text: str, options: Mapping[str, Option]) -> tuple[str, str]:
    """Split `PATH,size=32` where the first known option begins."""
    parts = text.split(",")
    for index, part in enumerate(parts[1:], start=1):
        if "=" in part and part.partition("=")[0].strip() in options:
            return ",".join(parts[:index]), ",".join(parts[index:])
    return text, ""


def _signature_of(make: Any) -> Any:
    return getattr(make, "__init__", None) if isinstance(make, type) else make


def options_of(make: Callable[..., Any]) -> dict[str, Option]:
    try:
        hints = typing.get_type_hints(_signature_of(make), include_extras=True)
    except (NameError, TypeError):
        hints = {}
    found = {}
    for parameter in inspect.signature(make).parameters.values():
        if parameter.default is parameter.empty:
            continue
        plain = (
            type(parameter.default)
            if isinstance(parameter.default, (bool, int, float, str))
            else Any
        )
        kind, text = hints.get(parameter.name, plain), ""
        if typing.get_origin(kind) is Annotated:
            kind, *notes = typing.get_args(kind)
            text = next((n for n in notes if isinstance(n, str)), "")
        found[parameter.name] = Option(parameter.name, kind, parameter.default, text)
    return found


strategies: Registry[type[Strategy]] = Registry("strategy", "strategies", "paceline.strategies")
collectives: Registry[Callable[..., Collective]] = Registry(
    "collective", "collectives", "paceline.collectives.algorithms"
)
operations: Registry[Callable[..., Schedule]] = Registry(
    "operation", "operations", "paceline.collectives.algorithms"
)
forms: Registry[type[Form]] = Registry("form", "forms", "paceline.parallel")
timetables: Registry[Callable[..., Timetable]] = Registry(
    "timetable", "timetables", "paceline.parallel.timetables"
)
codecs: Registry[type[Codec]] = Registry("codec", "codecs", "paceline.codecs")
transports: Registry[type[Transport]] = Registry(
    "transport", "transports", "paceline.transport", options=False
)
faults: Registry[Callable[..., Fault]] = Registry("fault", "faults", "paceline.faults")
models: Registry[Callable[..., torch.nn.Module]] = Registry("model", "models", "paceline.models")
sources: Registry[Callable[..., Any]] = Registry("data source", "data", "paceline.data")
optimizers: Registry[Callable[..., torch.optim.Optimizer]] = Registry(
    "optimizer", "optimizers", "paceline.optim"
)
schedules: Registry[Callable[..., Any]] = Registry("lr schedule", "schedules", "paceline.optim")
losses: Registry[Callable[..., Any]] = Registry("loss", "losses", "paceline.objectives")
metrics: Registry[Callable[..., Any]] = Registry("metric", "metrics", "paceline.objectives")
callbacks: Registry[Callable[..., Callback]] = Registry(
    "callback", "callbacks", "paceline.callbacks"
)

ALL: dict[str, Registry[Any]] = {
    registry.plural: registry
    for registry in (
        strategies,
        collectives,
        operations,
        forms,
        timetables,
        codecs,
        transports,
        faults,
        models,
        sources,
        optimizers,
        schedules,
        losses,
        metrics,
        callbacks,
    )
}
